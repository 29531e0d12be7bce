// What `outlast report RUN_DIR...` shows: from ledgers only, so it can be made again at any time.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "outlast/meter/goodput.h"

namespace outlast {

// Everything that is printed. Rates are over the surviving steps of all invocations, without saves
// and evaluation, and for all ranks together.
struct RunReport {
  std::vector<std::string> run_dirs;
  std::string job;
  std::string command;
  Timeline timeline;
  GoodputRatios ratios;

  int64_t steps_finished = 0;  // that survived
  int64_t steps_lost = 0;      // finished ones that were run again
  int64_t steps_cut = 0;       // begun by some rank, never finished, and run again
  std::optional<int64_t> step_p50_ns, step_p99_ns;
  uint64_t tokens = 0;  // real ones of surviving steps: the lifetime counter
  uint64_t samples = 0;
  std::optional<double> tokens_per_second, samples_per_second;

  std::optional<double> flops_per_second;  // model FLOPs
  std::optional<double> mfu;               // 0..1, or above, when an input is wrong
  std::string flops_text;                  // the convention
  std::string peak_text;

  std::optional<int32_t> exit_code;  // of the last invocation; none: it has no end record
  std::string end_reason;
  std::vector<std::string> notes;  // a cut ledger, an estimated gap ...
};

// Reads the ledgers of one job's invocations, in any order; one that is named twice counts once.
// kNotFound: no such folder, or no ledger in it. kDataLoss: the file is no ledger.
// kInvalidArgument: no folder, those of two jobs, or those of two nodes of one run.
absl::StatusOr<RunReport> BuildReport(std::span<const std::string> run_dirs);

std::string ReportText(const RunReport& report);
// One object. Times in integer ns, ratios 0..1, null where something is unknown.
std::string ReportJson(const RunReport& report);

// `outlast report RUN_DIR... [--json]`; args are what follows "report". Returns the exit code: 0,
// or 85 for input that it refuses, with one line on `err`.
int RunReportTool(std::span<const std::string> args, std::ostream& out, std::ostream& err);

}  // namespace outlast
