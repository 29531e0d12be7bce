#include "launch/preflight_tool.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <ostream>

#include "base/error.h"
#include "launch/options.h"
#include "launch/preflight.h"
#include "outlast/base/status.h"
#include "outlast/elastic/exit_code.h"

namespace outlast {
namespace {

struct Arguments {
  std::string folder = ".";
  std::vector<std::string> only, floors, programs;
  double limit_s = 10;
  bool here = false, wants_json = false;
};

// NAME=NUMBER sets a check's floor.
absl::Status SetFloor(const std::string& text, std::vector<Check>& checks) {
  const size_t equals = text.find('=');
  const std::string name = text.substr(0, equals);
  OUTLAST_RETURN_IF_ERROR(FindCheck(name).status());
  char* end = nullptr;
  const std::string number = equals == std::string::npos ? "" : text.substr(equals + 1);
  const double floor = std::strtod(number.c_str(), &end);
  if (number.empty() || *end != '\0' || !(floor >= 0)) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "--floor '{}': a check's name, '=' and a number from 0 wanted, such as disk=10",
                 text);
  }
  for (Check& check : checks) {
    if (check.name == name) check.floor = floor;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Check>> ChecksOf(const Arguments& arguments) {
  std::vector<Check> checks;
  for (const std::string& name : arguments.only) {
    OUTLAST_ASSIGN_OR_RETURN(const Check check, FindCheck(name));
    checks.push_back(check);
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
  app.add_option("--limit", arguments.limit_s, "Seconds for each (10)")->check(CLI::PositiveNumber);
  app.add_flag("--json", arguments.wants_json, "As a JSON array");
  app.add_flag("--here", arguments.here, "One check, in this process: its exit code")->group("");
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::CallForHelp&) {
    out << app.help();
    return 0;
  } catch (const CLI::ParseError& error) {
    err << "outlast: preflight: " << error.what() << '\n';
    return kExitRefused;
  }
  const auto checks = ChecksOf(arguments);
  if (!checks.ok()) {
    err << "outlast: preflight: " << MessageOf(checks.status()) << '\n';
    return kExitRefused;
  }
  if (arguments.here) {
    const CheckEnd end = RunCheck(checks->front(), arguments.folder);
    out << end.line << '\n';
    return end.code;
  }
  std::string self(4096, '\0');
  const ssize_t length = readlink("/proc/self/exe", self.data(), self.size());
  self.resize(length < 0 ? 0 : static_cast<size_t>(length));
  const auto findings = RunPreflight({.tool = self,
                                      .folder = arguments.folder,
                                      .checks = *checks,
                                      .programs = arguments.programs,
                                      .limit = absl::Seconds(arguments.limit_s)});
  Print(findings, arguments.wants_json, out);
  return WhyUnfit(findings).empty() ? 0 : ExitCodeOf(JobOutcome::kExcluded);
}

}  // namespace outlast
