#include "launch/preflight.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "base/child_program.h"
#include "base/error.h"
#include "base/plain_number.h"
#include "outlast/base/clock.h"
#include "outlast/base/status.h"

namespace outlast {

std::string_view NameOf(Fitness fitness) {
  switch (fitness) {
    case Fitness::kFit:
      return "fit";
    case Fitness::kUnfit:
      return "unfit";
    case Fitness::kUnknown:
      break;
  }
  return "unknown";
}

const std::vector<Check>& Checks() {
  // A disk of 10 MB/s, memory of 1 GB/s, a loopback of 50 MB/s: each a tenth or less of the slowest
  // machines that people rent. /dev/shm: NCCL's transport takes some MiB a pair of ranks.
  static const std::vector<Check> checks = {
      {"memory", "copy 64 MiB of memory", 1000, "MB/s", 64 * 1.048576},
      {"loopback", "send 64 MiB over 127.0.0.1", 50, "MB/s", 64 * 1.048576},
      {"disk", "write, sync and read 32 MiB", 10, "MB/s", 32 * 1.048576},
      {"shm", "space in /dev/shm and for a memfd", 16, "MiB free", 0},
      {"clock", "clocks run, and alike", 10, "% apart", 0},
  };
  return checks;
}

absl::StatusOr<Check> FindCheck(std::string_view name) {
  std::string known;
  for (const Check& check : Checks()) {
    if (check.name == name) return check;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", check.name);
  }
  return Error(absl::StatusCode::kInvalidArgument, "check '{}': there is none; {} wanted", name,
               known);
}

ProbeFinding JudgeProbe(std::string probe, const ProgramEnd& end, absl::Duration limit) {
  ProbeFinding finding{std::move(probe), Fitness::kUnknown, end.last_line, {}};
  if (end.timed_out) {
    finding.detail = fmt::format("not done within {}: killed", absl::FormatDuration(limit));
  } else if (end.signal != 0) {
    finding.detail = fmt::format("ended by signal {}", end.signal);
  } else if (end.code == kProbeFit) {
    finding.fitness = Fitness::kFit;
  } else if (end.code == kProbeUnfit) {
    finding.fitness = Fitness::kUnfit;
  } else {
    finding.detail = fmt::format("exit code {} ({} fit, {} unfit){}{}", end.code, kProbeFit,
                                 kProbeUnfit, end.last_line.empty() ? "" : ": ", end.last_line);
  }
  return finding;
}

ProbeFinding JudgeCheck(const Check& check, const ProgramEnd& end, absl::Duration limit) {
  ProbeFinding finding = JudgeProbe(std::string(check.name), end, limit);
  if (!end.timed_out || check.megabytes == 0) return finding;
  const double at_most = check.megabytes / absl::ToDoubleSeconds(limit);
  if (at_most >= check.floor) return finding;
  finding.fitness = Fitness::kUnfit;
  finding.detail =
      fmt::format("{}: not done within {}, so below {} {}, at least {:g} wanted", check.what,
                  absl::FormatDuration(limit), PlainNumber(at_most), check.unit, check.floor);
  return finding;
}

namespace {

template <typename Judge>
ProbeFinding RunProbe(std::string name, ProgramCall call, absl::Duration limit, Judge judge) {
  call.deadline = limit;
  const absl::Duration start = Clock::Real().Uptime();
  const auto end = RunProgram(call);
  ProbeFinding finding =
      end.ok() ? judge(*end)
               : ProbeFinding{
                     std::move(name), Fitness::kUnknown, std::string(MessageOf(end.status())), {}};
  finding.took = Clock::Real().Uptime() - start;
  return finding;
}

}  // namespace

std::vector<ProbeFinding> RunPreflight(const PreflightOptions& options) {
  std::vector<ProbeFinding> findings;
  const absl::Duration start = Clock::Real().Uptime();
  for (const Check& check : options.checks) {
    if (options.stopped()) return findings;
    if (Clock::Real().Uptime() - start >= options.begin_within) {
      findings.push_back(
          {std::string(check.name),
           Fitness::kUnknown,
           fmt::format("not begun: {} were over", absl::FormatDuration(options.begin_within)),
           {}});
      continue;
    }
    ProgramCall call;
    call.command = {options.tool, "preflight",
                    "--only",     std::string(check.name),
                    "--floor",    fmt::format("{}={}", check.name, check.floor),
                    "--folder",   options.folder,
                    "--here"};
    findings.push_back(
        RunProbe(std::string(check.name), std::move(call), options.limit,
                 [&](const ProgramEnd& end) { return JudgeCheck(check, end, options.limit); }));
  }
  for (const std::string& program : options.programs) {
    if (options.stopped()) return findings;
    ProgramCall call;
    call.command = {"/bin/sh", "-c", program};
    findings.push_back(
        RunProbe(program, std::move(call), options.limit,
                 [&](const ProgramEnd& end) { return JudgeProbe(program, end, options.limit); }));
  }
  return findings;
}

std::string WhyUnfit(const std::vector<ProbeFinding>& findings) {
  std::string why;
  for (const ProbeFinding& finding : findings) {
    if (finding.fitness != Fitness::kUnfit) continue;
    why += fmt::format("{}{}: {}", why.empty() ? "" : "; ", finding.probe,
                       finding.detail.empty() ? "no reason given" : finding.detail);
  }
  return why;
}

std::string OwnProgram() {
  std::string path(4096, '\0');
  const ssize_t length = readlink("/proc/self/exe", path.data(), path.size());
  path.resize(length < 0 ? 0 : static_cast<size_t>(length));
  return path;
}

NodeLook JudgeNode(std::string_view json, const ProgramEnd& end) {
  NodeLook look;
  const auto findings = nlohmann::json::parse(json, nullptr, false);
  if (end.timed_out || end.signal != 0 || !findings.is_array()) {
    look.warnings.push_back(fmt::format(
        "it {}, so nobody knows whether this node is fit{}",
        end.timed_out
            ? "was not done in time"
            : fmt::format("ended with {}", end.signal != 0 ? fmt::format("signal {}", end.signal)
                                                           : fmt::format("exit code {}", end.code)),
        end.last_line.empty() ? "" : ": " + end.last_line));
    return look;
  }
  for (const auto& finding : findings) {
    const auto text = [&](const char* key) {
      const auto at = finding.find(key);
      return at != finding.end() && at->is_string() ? at->get<std::string>() : std::string();
    };
    if (!finding.is_object()) continue;
    const std::string said = fmt::format("{}: {}", text("probe"), text("detail"));
    if (text("fitness") == NameOf(Fitness::kUnfit))
      look.unfit += (look.unfit.empty() ? "" : "; ") + said;
    if (text("fitness") == NameOf(Fitness::kUnknown)) look.warnings.push_back(said);
  }
  return look;
}

NodeLook LookAtNode(const std::string& folder, const std::vector<std::string>& probes, int stop_fd,
                    std::function<bool()> stops) {
  constexpr absl::Duration kBeginWithin = absl::Seconds(5);
  const PreflightOptions usual;
  const std::string found = folder + "/preflight.json";
  ProgramCall call;
  call.command = {OwnProgram(),     "preflight",
                  "--folder",       folder,
                  "--begin-within", fmt::format("{:g}", absl::ToDoubleSeconds(kBeginWithin)),
                  "--json-file",    found};
  for (const std::string& probe : probes)
    call.command.insert(call.command.end(), {"--probe", probe});
  // The tool keeps to its own deadlines; and it may take a while to end what hangs.
  call.deadline = kBeginWithin + static_cast<int>(2 + probes.size()) * usual.limit;
  call.death_signal = SIGTERM;
  call.stop_fd = stop_fd;
  call.stops = std::move(stops);
  const auto end = RunProgram(call);
  if (!end.ok()) return {.unfit = "", .warnings = {std::string(MessageOf(end.status()))}};
  if (end->stopped) return {.unfit = "", .warnings = {}, .stopped = true};
  std::ifstream file(found, std::ios::binary);
  std::stringstream json;
  json << file.rdbuf();
  return JudgeNode(json.str(), *end);
}

}  // namespace outlast
