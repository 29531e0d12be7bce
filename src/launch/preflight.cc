#include "launch/preflight.h"

#include <algorithm>
#include <utility>

#include "base/child_program.h"
#include "base/error.h"
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
      fmt::format("{}: not done within {}, so below {:.3g} {}, at least {:g} wanted", check.what,
                  absl::FormatDuration(limit), at_most, check.unit, check.floor);
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
  for (const Check& check : options.checks) {
    if (options.stopped()) return findings;
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

}  // namespace outlast
