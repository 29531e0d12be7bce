// What the exit code of a job says. Ours avoid 1-2, 64-78, 126-165 and 255, which mean something
// elsewhere; 129 and 130 are kept because shells give them that very meaning.
#pragma once

#include <cstdint>

#include "outlast/elastic/fault.h"

namespace outlast {

enum class JobOutcome : uint8_t {
  kFinished,          // 0
  kPreemptedSaved,    // 80, or --preempt-exit: requeue
  kPreemptedUnsaved,  // 81: the last save is not durable; requeue
  kNeedsHuman,        // 82: the same root again and again while restarts remained, or no candidate
                      // restores
  kRestartsUsedUp,    // 83: restarts were tried; the budget or a cap is used up
  kNoQuorum,          // 84
  kRefused,           // 85: refused before a worker ran, or at the first open of a checkpoint root
  kLeft,              // 86: this agent left on request, the job goes on
  kExcluded,      // 87: this node can't be used, such as for a process that SIGKILL does not end
  kNotInRoot,     // 88: trained, but this run's last state is not in the root
  kWorkerFailed,  // no restart was allowed: WorkerExitCode
  kInterrupted,   // 130: a person pressed Ctrl-C
  kHungUp,        // 129: the terminal went away
};

// The first failed worker's own code, or 128 + signal. Its own 80-88 become 1, for they would be
// taken for ours; and so does 0 (it left too early): a failed job never ends with 0. Of a hung
// worker that we killed: 137, as of any SIGKILL.
int WorkerExitCode(FaultClass fault_class, const ProcessEnd& end);

// The table above. `preempt_exit` is used by kPreemptedSaved, `worker_code` by kWorkerFailed.
int ExitCodeOf(JobOutcome outcome, int preempt_exit = 80, int worker_code = 1);

}  // namespace outlast
