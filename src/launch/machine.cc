#include "launch/machine.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "launch/binding.h"

namespace outlast {
namespace {

bool IsDevice(const std::string& name) {
  constexpr std::string_view kPrefix = "nvidia";
  return name.size() > kPrefix.size() && name.starts_with(kPrefix) &&
         std::all_of(name.begin() + kPrefix.size(), name.end(),
                     [](unsigned char c) { return std::isdigit(c) != 0; });
}

}  // namespace

int CountCpus() { return std::max(1, static_cast<int>(AllowedCpus().size())); }

int CountGpus() {
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES"); visible != nullptr) {
    const std::string_view list(visible);
    if (list.empty() || list == "-1" || list == "NoDevFiles") return 0;
    return static_cast<int>(std::count(list.begin(), list.end(), ',')) + 1;
  }
  int devices = 0;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", none))
    devices += IsDevice(entry.path().filename().string()) ? 1 : 0;
  return devices;
}

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "unknown host";
}

}  // namespace outlast
