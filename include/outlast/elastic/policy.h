// Whether a fault is answered by a restart: budgets, pure.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "outlast/base/id.h"
#include "outlast/elastic/fault.h"
#include "outlast/elastic/job_options.h"

namespace outlast {

// Crash, hang and early exit share one budget, `max_restarts`.
bool CountsAsCrash(FaultClass fault_class);

// What a fault was, and where.
struct SeenFault {
  FaultClass fault_class = FaultClass::kCrash;
  uint64_t root = 0;
  int64_t step = 0;
  std::string node;
  bool as_crash = false;
  bool operator==(const SeenFault&) const = default;
};

// What was charged since the last progress, and the restarts of the last hour, which no progress
// refunds.
struct FaultHistory {
  int crashes = 0;
  int others = 0;                               // faults of other classes
  int restarts = 0;                             // since progress
  int resources = 0;                            // of those, out of memory and the like
  std::vector<std::pair<uint64_t, int>> roots;  // how often each was seen
  std::vector<SeenFault> seen_faults;           // in order
  std::vector<absl::Duration> restart_times;    // ascending, at most an hour before the newest

  void Add(const FaultRecord& fault);
  // The newest fault was a victim of one that is heard of only now.
  void TakeBackNewest();
  void AddRestart(absl::Duration now);
  void Refund();
  int seen(uint64_t root) const;
  int restarts_in_last_hour(absl::Duration now) const;
  bool operator==(const FaultHistory&) const = default;
};

struct Judgement {
  bool restart = false;
  absl::Duration delay;  // restart: how long the spawn waits (back-off)
  int exit_code = 0;     // no restart: the job's
  std::string reason;    // no restart: the rule that decided, with its numbers
};

// `history` has `fault` already. In this order: a no-retry code or `max_restarts` 0: the worker's
// own code; crashes used up, other classes used up, restarts of an hour used up: 83; the same root
// again, or memory or disk used up again, while restarts remain: 82; else a restart, after BackOff.
// Nothing but the delay depends on `seed`.
Judgement JudgeFault(const FaultHistory& history, const FaultRecord& fault,
                     const JobOptions& options, absl::Duration now, uint64_t seed);

// How long the spawn waits after so many restarts without progress: the first one is at once, then
// 1, 2, 4 ... 60 s, of which between the half and all. Jobs that fell together, of a file system
// that was away say, come back apart; a job whose coordinator was restarted decides as before.
absl::Duration BackOff(int restarts_before, uint64_t seed);
// The seed of a run.
uint64_t BackOffSeed(const Id128& run_id);

// What the places of the faults since progress say about the newest one. `history` has it already.
enum class PlaceJudgement : uint8_t {
  kStay,      // nothing
  kSwapNode,  // the same root at the same step, or a second hang, on this node: try another one
  kDeterministic,  // the same root at the same step on another node: it is the program
};
PlaceJudgement JudgePlace(const FaultHistory& history);

}  // namespace outlast
