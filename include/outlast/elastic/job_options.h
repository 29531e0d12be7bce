// What a job allows: budgets and deadlines. Defaults are those of the command line.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/time/time.h"

namespace outlast {

struct JobOptions {
  int world = 1;
  // The global batch, which is the same in every world: micro-batches of a step over all ranks (0:
  // not said), and the ranks that hold one replica of the model between them.
  int micro_batches = 0;
  int ranks_per_replica = 1;
  int max_restarts = 3;  // crash and hang faults since the last progress; 0 = never restart
  int same_root_limit = 3;
  int other_class_limit = 6;  // records of other classes since progress
  int restarts_per_hour_limit = 20;
  int64_t progress_steps = 200;  // new steps that count as progress where nothing commits
  absl::Duration grace = absl::Seconds(15);  // SIGTERM to SIGKILL in a stop, and of plain programs
  absl::Duration stop_within = absl::Seconds(25);  // a stop in all
  absl::Duration early_exit_grace = absl::Seconds(60);
  absl::Duration soft_abort = absl::Seconds(10);  // ABORT to staged
  absl::Duration abort_term = absl::Seconds(2);   // SIGTERM to SIGKILL in an abort
  absl::Duration reap = absl::Seconds(5);         // SIGKILL to the end of the process
  absl::Duration respawn = absl::Seconds(120);    // spawn to staged
  int preempt_exit = 80;
  std::vector<int> no_retry_codes = {82, 93};  // exit codes, or 128 + signal
  std::vector<int> retry_codes;                // when not empty, only these are tried again
};

}  // namespace outlast
