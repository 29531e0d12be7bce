// The tool `outlast`.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "adapters/submit_tool.h"
#include "base/error.h"
#include "checkpoint/ckpt_tool.h"
#include "control/coordinator_tool.h"
#include "control/load_transport.h"
#include "control/software.h"
#include "control/transport.h"
#include "launch/agent.h"
#include "launch/env_tool.h"
#include "launch/options.h"
#include "launch/preflight_tool.h"
#include "launch/status_tool.h"
#include "meter/report.h"
#include "outlast/base/plugins.h"
#include "outlast/base/status.h"
#include "outlast/store/blob.h"
#ifdef OUTLAST_HAS_S3
#include "outlast/adapters/s3.h"
#endif

namespace outlast {
namespace {

// Whoever closed them for us must not get our files as the workers' output.
void OpenStandardFiles() {
  while (true) {
    const int fd = open("/dev/null", O_RDWR);
    if (fd > STDERR_FILENO) {
      close(fd);
      return;
    }
    if (fd < 0) return;
  }
}

int Refuse(const absl::Status& why) {
  std::fprintf(stderr, "outlast: %s\n", std::string(MessageOf(why)).c_str());
  return kExitRefused;
}

absl::StatusOr<std::shared_ptr<const Plugins>> MakePlugins() {
  auto plugins = std::make_shared<Plugins>();
  OUTLAST_RETURN_IF_ERROR(RegisterStores(*plugins));
#ifdef OUTLAST_HAS_S3
  OUTLAST_RETURN_IF_ERROR(RegisterS3(*plugins));
#endif
  return plugins;
}

int Run(const std::vector<std::string>& arguments) {
  std::string help;
  auto options = ParseLaunchOptions(arguments, &help);
  if (!options.ok()) return Refuse(options.status());
  auto plugins = MakePlugins();
  if (!plugins.ok()) return Refuse(plugins.status());
  options->plugins = *std::move(plugins);
  if (!help.empty()) {
    std::fputs(help.c_str(), stdout);
    return 0;
  }
  if (const absl::Status fits = CheckSurroundings(*options); !fits.ok()) return Refuse(fits);
  const char* path = std::getenv("PATH");
  if (path == nullptr) path = "/usr/local/bin:/usr/bin:/bin";
  auto command = ResolveCommand(options->command, path, options->interpreter);
  if (!command.ok()) return Refuse(command.status());
  if (!options->template_command.empty()) {
    auto program = ResolveCommand(options->template_command, path);
    if (!program.ok()) return Refuse(Annotate(program.status(), "--template"));
    options->template_program = *std::move(program);
  }

  if (options->on_agent_death == OnAgentDeath::kAdopt) {
    auto found = FindJob(*options);
    if (!found.ok()) return Refuse(found.status());
    if (found->has_value()) return RunAdoptingAgent(*options, **std::move(found));
  }

  const Id128 run_id = Id128::Random();
  GuardianCommand orders{command->program, command->arguments, run_id.hex(), {}};
  if (options->on_agent_death == OnAgentDeath::kAdopt) {
    orders.adopt_within = options->adopt_within;
    getrlimit(RLIMIT_NOFILE, &orders.descriptors);
  }
  sigprocmask(SIG_SETMASK, nullptr, &orders.signal_mask);
  const auto guardian = Guardian::Fork(orders);
  if (!guardian.ok()) return Refuse(guardian.status());
  return RunAgent(*options, run_id, **guardian);
}

std::string VersionText() {
#ifdef __clang__
  const std::string compiler = std::string("clang ") + __clang_version__;
#else
  const std::string compiler = std::string("g++ ") + __VERSION__;
#endif
#ifdef NDEBUG
  const char* const asserts = "without asserts";
#else
  const char* const asserts = "with asserts";
#endif
#ifdef OUTLAST_SANITIZED
  const char* const sanitizers = ", with sanitizers";
#else
  const char* const sanitizers = "";
#endif
#ifdef OUTLAST_HAS_S3
  const char* const stores = "folders, s3";
#else
  const char* const stores = "folders (built without libcurl: no s3)";
#endif
  const bool has_grpc = control::HasTransport();
  return fmt::format("{}\nbuilt by {}, {}{}\nremote roots: {}\nseveral nodes: {}, protocol {}\n",
                     control::kSoftware, compiler, asserts, sanitizers, stores,
                     has_grpc ? "yes" : "no, liboutlast-grpc.so is not there",
                     control::kProtocolVersion);
}

// `code`, unless what it stands for could not be written.
int Shown(int code) {
  std::cout.flush();
  if (std::cout) return code;
  PrintToStderr("outlast: standard output: what was asked for could not be written in full\n");
  return code == 0 ? 1 : code;
}

int Main(const std::vector<std::string>& arguments) {
  const std::string command = arguments.empty() ? "" : arguments[0];
  const std::vector<std::string> rest(arguments.begin() + (arguments.empty() ? 0 : 1),
                                      arguments.end());
  if (command == "run") return Run(rest);
  if (command == "env") {
    const auto variables = [](const char* name) { return std::getenv(name); };
    return Shown(RunEnvTool(rest, variables, std::cout, std::cerr));
  }
  if (command == "preflight") return Shown(RunPreflightTool(rest, std::cout, std::cerr));
  if (command == "status") return Shown(RunStatusTool(rest, std::cout, std::cerr));
  if (command == "top") return Shown(RunTopTool(rest, std::cout, std::cerr));
  if (command == "coordinator") return Shown(RunCoordinatorTool(rest, std::cout, std::cerr));
  if (command == "submit") return Shown(RunSubmitTool(rest, std::cout, std::cerr));
  if (command == "report") return Shown(RunReportTool(rest, std::cout, std::cerr));
  if (command == "ckpt") {
    const auto plugins = MakePlugins();
    if (!plugins.ok()) return Refuse(plugins.status());
    return Shown(RunCkptTool(rest, std::cout, std::cerr,
                             isatty(STDERR_FILENO) ? Terminal::kYes : Terminal::kNo,
                             plugins->get()));
  }
  if (command == "--help" || command == "-h" || command == "help") {
    std::fputs(ToolHelp().c_str(), stdout);
    return 0;
  }
  if (command == "--version" || command == "version") {
    std::cout << VersionText();
    return Shown(0);
  }
  const std::string found = command.empty() ? "no command" : "unknown command '" + command + "'";
  std::fprintf(stderr, "outlast: %s: see outlast --help\n", found.c_str());
  return kExitRefused;
}

}  // namespace
}  // namespace outlast

int main(int argc, char** argv) {
  outlast::OpenStandardFiles();
  return outlast::Main({argv + (argc > 0 ? 1 : 0), argv + argc});
}
