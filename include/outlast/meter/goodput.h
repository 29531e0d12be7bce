// Where a job's time went: exclusive states in integer nanoseconds whose sum is wall time exactly.
// Pure: a function of the ledgers' records, in whatever order they come.
//
// What is not plain from the states' names:
// - A step's parts: its data wait, then forward + backward + optimizer (productive), then the
// checkpoint stall; the rest is
//   eval or warm_up where the step's flags say so, else idle_held. A step in which nothing was
//   marked is productive as a whole.
// - The job's step is that of its lowest slot; tokens and FLOPs are summed over the slots.
// - A step is lost once a later generation goes on at or before it: its productive time becomes
// lost_work, its other parts
//   keep their label. One that a rank left early (aborted) is lost_work as a whole, unless training
//   went on behind it.
// - An unfinished step is lost_work up to the last progress; from there to the detection it is
// hang_wait; from the
//   detection to the first new process or the new generation's COMMIT, whichever is first,
//   recovery; then init, and restore where it was recorded, up to the first step.
// - An agent that was lost and followed (--on-agent-death adopt) cost no rank: from its death to
//   the new generation's COMMIT nobody was in control, which is recovery, but for the steps that
//   ranks still made. They are lost only where they are run again.
// - warm_up: of the first three steps after a start, what exceeds the median of the next twenty by
// more than a tenth of it
//   (below that it is noise, which would only ever add).
// - Several invocations of one job make one time line. Between two on one boot of the machine their
// clocks are one clock:
//   the gap is recovery when the earlier one was cut (its agent died), else queue, as nothing was
//   held. Across boots the gap is bridged by wall time, is unknown, and is flagged as estimated.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "outlast/meter/ledger_file.h"

namespace outlast {

enum class JobState : uint8_t {
  kQueue,            // submit -> all ranks alive
  kInit,             // process start -> first step begins
  kWarmUp,           // excess of the first steps
  kProductive,       // forward, backward and optimizer of steps that survive
  kDataWait,         // blocked in next()
  kCheckpointStall,  // the step path blocked by a save
  kRestore,          // reading state
  kLostWork,         // work that was done again or never finished
  kHangWait,         // last progress -> detection
  kRecovery,         // detection -> first new process or COMMIT
  kEval,
  kIdleHeld,  // cards held, nothing open
  kUnknown,
};
inline constexpr size_t kJobStates = 13;

// "queue", "ckpt_stall" and so on, as metrics name them.
std::string_view StateName(JobState state);

// One fault and the way back from it. Times are on the time line; none when it did not come to
// that.
struct Interruption {
  size_t run = 0;           // the invocation, by the order of the time line
  uint64_t generation = 0;  // that it ended
  int32_t slot = -1;
  int32_t rank = -1;  // -1: the whole job
  int64_t step = -1;  // that the culprit was in; -1: not known
  std::string fault_class;
  std::string found;
  bool is_planned = false;  // a pre-emption: not a failure
  bool is_outage = false;   // the agent's alone: the ranks lived on, and the next agent found them
  int64_t failed_ns = 0;    // last progress
  int64_t detected_ns = 0;
  std::optional<int64_t> recovered_ns;   // first new process or COMMIT
  std::optional<int64_t> first_step_ns;  // the first new step begins
  std::optional<size_t>
      resumed_run;  // where that was; another invocation: a person (or a scheduler) started it
  int64_t steps_lost = 0;  // finished ones that were or must be run again
  std::string
      source;  // where the state came from: "memory", "disk", "memory+disk"; empty: not known

  // Of an outage: programs without steps go on too.
  bool is_recovered() const { return first_step_ns || (is_outage && recovered_ns); }
  // By itself; the next agent is started by a person, or a service manager.
  bool is_unattended() const { return is_recovered() && resumed_run == run && !is_outage; }
};

// A step of the job, over its ranks.
struct JobStep {
  size_t run = 0;
  uint64_t generation = 0;
  int64_t step = 0;
  int64_t start_ns = 0;  // on the time line, of the lowest slot
  int64_t end_ns = 0;
  int64_t data_ns = 0;
  int64_t work_ns = 0;  // forward + backward + optimizer
  int64_t checkpoint_stall_ns = 0;
  int64_t other_ns = 0;  // in none of them: eval and the like
  int64_t ranks = 0;
  uint64_t tokens_real = 0, tokens_padded = 0, tokens_loss = 0, samples = 0;
  double model_flops = 0;            // 0: unknown
  double peak_flops_per_second = 0;  // of the ranks together; 0: unknown for one of them
  uint16_t flags = 0;
  bool is_lost = false;

  // What rates divide by: a save or an evaluation is not the step's fault.
  int64_t rate_ns() const { return data_ns + work_ns; }
};

struct Timeline {
  int64_t wall_ns = 0;
  std::array<int64_t, kJobStates> state_ns{};  // sums to wall_ns
  std::vector<Interruption> interruptions;     // by time
  std::vector<JobStep> steps;                  // by run, generation, step; the lost ones too
  size_t runs = 0;
  bool is_estimated = false;  // a gap was bridged by wall time

  int64_t in(JobState state) const { return state_ns[static_cast<size_t>(state)]; }
};

// One invocation's records, in any order. None, or none with a time: contributes nothing.
using RunEntries = std::vector<LedgerEntry>;

// The time line of one job from the ledgers of its invocations, given in any order. Any input gives
// an answer whose parts sum; times outside 0..2^58 ns (nine years) are clamped into it.
Timeline BuildTimeline(std::span<const RunEntries> runs);

// The three ratios that others all call goodput, under their own names, and what goes with them.
// None: no denominator.
struct GoodputRatios {
  std::optional<double> goodput;                   // productive / (wall - queue)
  std::optional<double> occupancy_goodput;         // productive / wall
  std::optional<double> effective_flops_ratio;     // goodput x MFU
  std::optional<int64_t> mtbi_ns;                  // (wall - queue) / unplanned interruptions
  std::optional<int64_t> restore_time_ns;          // mean of decision -> first new step
  std::optional<double> unattended_recovery_rate;  // recovered by itself / all that were unplanned
};

// mfu: 0..1 as the caller measured it, if it did.
GoodputRatios RatiosOf(const Timeline& timeline, std::optional<double> mfu);

}  // namespace outlast
