#include "outlast/elastic/exit_code.h"

#include <csignal>

namespace outlast {

int WorkerExitCode(FaultClass fault_class, const ProcessEnd& end) {
  if (end.signal != 0) return 128 + end.signal;
  if (end.code == 0) return fault_class == FaultClass::kHang ? 128 + SIGKILL : 1;
  return end.code >= 80 && end.code <= 88 ? 1 : end.code;
}

int ExitCodeOf(JobOutcome outcome, int preempt_exit, int worker_code) {
  switch (outcome) {
    case JobOutcome::kFinished:
      return 0;
    case JobOutcome::kPreemptedSaved:
      return preempt_exit;
    case JobOutcome::kPreemptedUnsaved:
      return 81;
    case JobOutcome::kNeedsHuman:
      return 82;
    case JobOutcome::kRestartsUsedUp:
      return 83;
    case JobOutcome::kNoQuorum:
      return 84;
    case JobOutcome::kRefused:
      return 85;
    case JobOutcome::kLeft:
      return 86;
    case JobOutcome::kExcluded:
      return 87;
    case JobOutcome::kNotInRoot:
      return 88;
    case JobOutcome::kWorkerFailed:
      return worker_code;
    case JobOutcome::kInterrupted:
      return 128 + SIGINT;
    case JobOutcome::kHungUp:
      return 128 + SIGHUP;
  }
  return 1;
}

}  // namespace outlast
