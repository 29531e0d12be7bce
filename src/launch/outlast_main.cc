// The tool `outlast`.
#include <cstdio>
#include <string>
#include <vector>

#include "launch/options.h"

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  std::string help;
  if (arguments.empty() || arguments[0] != "run") {
    std::fputs(outlast::ToolHelp().c_str(), stdout);
    return 0;
  }
  auto options = outlast::ParseLaunchOptions({arguments.begin() + 1, arguments.end()}, &help);
  if (!options.ok()) std::fprintf(stderr, "%s\n", options.status().ToString().c_str());
  std::fputs(help.c_str(), stdout);
  return 0;
}
