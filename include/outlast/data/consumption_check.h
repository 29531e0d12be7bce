// The proof from the consumption log that every sample was consumed exactly once. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>

#include "absl/status/statusor.h"
#include "outlast/data/consumption_log.h"
#include "outlast/data/cursor.h"

namespace outlast {

struct ConsumptionPlan {
  CursorOptions data;
  std::optional<int> world;  // ranks in every step; unset: in each step those that its lines name,
                             // ranks 0 to k - 1
  int64_t steps = 0;         // that the run should have, from step 0
};

struct ConsumptionReport {
  int64_t steps = 0;             // proved
  int64_t consumed = 0;          // samples in them, without padding
  int64_t superseded_lines = 0;  // lines of attempts at a step that a later attempt replaced
  std::map<int64_t, int64_t>
      superseded_attempts;  // by step, where there are any: replaced attempts, whole or in part
  int64_t superseded_steps() const;  // the sum of superseded_attempts: the steps that were lost
};

// Checks that `lines` (in the order of the file) are the history of a run that follows `plan`. An
// attempt at a step is what the ranks wrote for it in one generation of one run. Runs are ordered
// by their first line; of all attempts at a step, the highest generation of the last run that came
// to that step counts, the others are superseded. Those that count must have exactly one line a
// rank with the samples that an undisturbed run's cursor gives, and must be one history: no step
// stems from an earlier run or generation than the step before it.
// kDataLoss: they do not, with the first step that is wrong, what it has and what is wanted.
// kInvalidArgument: the plan's world or step count is below 1 or 0, or no cursor can be made.
absl::StatusOr<ConsumptionReport> CheckConsumption(std::span<const ConsumptionLine> lines,
                                                   const ConsumptionPlan& plan);

}  // namespace outlast
