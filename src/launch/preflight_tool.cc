#include "launch/preflight_tool.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <ostream>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/event_loop.h"
#include "base/flag_values.h"
#include "launch/options.h"
#include "launch/preflight.h"
#include "launch/process.h"
#include "outlast/base/fd.h"
#include "outlast/base/status.h"
#include "outlast/elastic/exit_code.h"

namespace outlast {
namespace {

constexpr absl::Duration kEndLimit = absl::Seconds(5);

struct Arguments {
  std::string folder = ".";
  std::vector<std::string> only, floors, programs;
  std::string limit, begin_within, json_file;
  bool here = false, wants_json = false;
};

// NAME=NUMBER sets a check's floor.
absl::Status SetFloor(const std::string& text, std::vector<Check>& checks) {
  const size_t equals = text.find('=');
  const std::string name = text.substr(0, equals);
  OUTLAST_RETURN_IF_ERROR(FindCheck(name).status());
  const std::string number = equals == std::string::npos ? "" : text.substr(equals + 1);
  double floor = -1;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), floor);
  if (error != std::errc() || end != number.data() + number.size() || !std::isfinite(floor) ||
      floor < 0)
    return RefuseValue("--floor", text, "a check's name, '=' and a number from 0, as in disk=10,");
  const auto is_meant = [&](const Check& check) { return check.name == name; };
  if (std::none_of(checks.begin(), checks.end(), is_meant))
    return RefuseValue("--floor", text, "a check that --only names");
  for (Check& check : checks) {
    if (check.name == name) check.floor = floor;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Check>> ChecksOf(const Arguments& arguments) {
  std::vector<Check> checks;
  for (const std::string& name : arguments.only) {
    OUTLAST_ASSIGN_OR_RETURN(const Check check, FindCheck(name));
    const auto is_same = [&](const Check& one) { return one.name == check.name; };
    if (std::none_of(checks.begin(), checks.end(), is_same)) checks.push_back(check);
  }
  if (checks.empty()) checks = Checks();
  for (const std::string& floor : arguments.floors)
    OUTLAST_RETURN_IF_ERROR(SetFloor(floor, checks));
  return checks;
}

void Print(const std::vector<ProbeFinding>& findings, bool as_json, std::ostream& out) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const ProbeFinding& finding : findings) {
    if (!as_json) {
      out << fmt::format("{:8} {} ({:.2f} s)\n", NameOf(finding.fitness),
                         finding.probe + ": " + finding.detail,
                         absl::ToDoubleSeconds(finding.took));
      continue;
    }
    all.push_back({{"probe", finding.probe},
                   {"fitness", NameOf(finding.fitness)},
                   {"detail", finding.detail},
                   {"took_ms", absl::ToInt64Milliseconds(finding.took)}});
  }
  if (as_json)
    out << all.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << '\n';
}

// A slip in the command line says nothing of the node, and is not let pass as if it did.
absl::Status CheckFolder(const std::string& folder) {
  struct stat file {};
  if (stat(folder.c_str(), &file) != 0) return ErrnoStatus(errno, "--folder '" + folder + "'");
  if (!S_ISDIR(file.st_mode)) return RefuseValue("--folder", folder, "a folder");
  if (access(folder.c_str(), W_OK) != 0 && errno != EROFS)
    return ErrnoStatus(errno, "--folder '" + folder + "'");
  return absl::OkStatus();
}

absl::StatusOr<PreflightOptions> OptionsOf(const Arguments& arguments) {
  PreflightOptions options;
  OUTLAST_ASSIGN_OR_RETURN(options.checks, ChecksOf(arguments));
  OUTLAST_RETURN_IF_ERROR(CheckFolder(arguments.folder));
  OUTLAST_RETURN_IF_ERROR(ReadSeconds("--limit", arguments.limit, options.limit));
  if (options.limit == absl::ZeroDuration())
    return RefuseValue("--limit", arguments.limit, "seconds, more than 0");
  OUTLAST_RETURN_IF_ERROR(
      ReadSeconds("--begin-within", arguments.begin_within, options.begin_within));
  for (const std::string& program : arguments.programs) {
    if (program.empty()) return RefuseValue("--probe", program, "a command");
  }
  options.folder = arguments.folder;
  options.programs = arguments.programs;
  options.tool = OwnProgram();
  return options;
}

// What was found until the end, or until a signal that stops it, which is returned (0: none). All
// that the probes have started is ended, helpers in sessions of their own too.
absl::StatusOr<std::pair<std::vector<ProbeFinding>, int>> RunUntilSignal(PreflightOptions options) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  sigset_t stops;
  sigemptyset(&stops);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&stops, signal);
  pthread_sigmask(SIG_BLOCK, &stops, nullptr);  // before the thread
  const UniqueFd signals(signalfd(-1, &stops, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals.is_open()) return ErrnoStatus(errno, "take signals");
  OUTLAST_ASSIGN_OR_RETURN(const std::unique_ptr<EventLoop> loop, EventLoop::Make());
  std::atomic<bool> stopped{false};
  options.stopped = [&] { return stopped.load(); };
  std::vector<ProbeFinding> findings;
  int stop_signal = 0;
  OUTLAST_RETURN_IF_ERROR(loop->Watch(signals.get(), [&] {
    signalfd_siginfo taken{};
    if (read(signals.get(), &taken, sizeof taken) != static_cast<ssize_t>(sizeof taken)) return;
    stop_signal = static_cast<int>(taken.ssi_signo);
    loop->Stop();
  }));
  std::thread work([&] {
    pthread_setname_np(pthread_self(), "outlast-probes");
    findings = RunPreflight(options);
    loop->Stop();
  });
  loop->Run();
  stopped = true;
  absl::Status ended = stop_signal == 0 ? absl::OkStatus() : EndDescendants(kEndLimit);
  work.join();
  if (ended.ok()) ended = EndDescendants(kEndLimit);
  if (!ended.ok()) PrintToStderr("outlast: preflight: {}\n", MessageOf(ended));
  return std::make_pair(std::move(findings), stop_signal);
}

void WarnOfUnknown(const std::vector<ProbeFinding>& findings, std::ostream& err) {
  const auto is_unknown = [](const ProbeFinding& one) { return one.fitness == Fitness::kUnknown; };
  const auto unknown = std::count_if(findings.begin(), findings.end(), is_unknown);
  if (unknown == 0) return;
  err << fmt::format("outlast: preflight: {} of {} say nothing about this node, and pass\n",
                     unknown, findings.size());
}

}  // namespace

int RunPreflightTool(const std::vector<std::string>& words, std::ostream& out, std::ostream& err) {
  Arguments arguments;
  CLI::App app("Looks whether this node is fit to train.", "outlast preflight");
  app.footer(
      "A probe is a program: exit code 0 fit, 1 unfit, anything else unknown (passes, with a "
      "warning);\nits last line of output says why.\n\nExample:\n"
      "  outlast preflight --folder /ckpt --floor disk=200 --probe /etc/slurm/health.sh");
  app.add_option("--folder", arguments.folder, "Where the disk check writes (.)");
  app.add_option("--only", arguments.only, "These checks: memory, loopback, disk, shm, clock (all)")
      ->delimiter(',');
  app.add_option("--floor", arguments.floors, "NAME=NUMBER: what a check wants at least");
  app.add_option("--probe", arguments.programs, "A command to run as well; may be given again");
  app.add_option("--limit", arguments.limit, "Seconds for each (10)");
  app.add_flag("--json", arguments.wants_json, "As a JSON array");
  app.add_option("--begin-within", arguments.begin_within,
                 "Leave out checks that would begin later, in seconds (none)")
      ->group("");
  app.add_option("--json-file", arguments.json_file, "Write the JSON array there as well")
      ->group("");
  app.add_flag("--here", arguments.here, "One check, in this process: its exit code")->group("");
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::CallForHelp&) {
    out << app.help();
    return 0;
  } catch (const CLI::ParseError& error) {
    err << "outlast: preflight: " << error.what() << ": see outlast preflight --help\n";
    return kExitRefused;
  }
  auto options = OptionsOf(arguments);
  if (!options.ok()) {
    err << "outlast: preflight: " << MessageOf(options.status()) << '\n';
    return kExitRefused;
  }
  if (arguments.here) {
    const CheckEnd end = RunCheck(options->checks.front(), arguments.folder);
    out << end.line << '\n';
    return end.code;
  }
  const auto found = RunUntilSignal(*std::move(options));
  if (!found.ok()) {
    err << "outlast: preflight: " << MessageOf(found.status()) << '\n';
    return kExitRefused;
  }
  const auto& [findings, stop_signal] = *found;
  Print(findings, arguments.wants_json, out);
  if (!arguments.json_file.empty()) {
    std::ofstream file(arguments.json_file);
    Print(findings, true, file);
  }
  WarnOfUnknown(findings, err);
  if (stop_signal != 0) return 128 + stop_signal;
  return WhyUnfit(findings).empty() ? 0 : ExitCodeOf(JobOutcome::kExcluded);
}

}  // namespace outlast
