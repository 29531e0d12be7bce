// Slurm by its own commands (sbatch, squeue, scancel), which find the cluster and prove who asks.
// Functions, not an interface: there is no second engine yet that would show what they share.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "adapters/slurm_script.h"

namespace outlast {

struct SlurmEntry {
  std::string id;     // such as "4711"
  std::string state;  // such as "PENDING"
};

struct SlurmSubmission {
  SlurmEntry entry;
  bool was_there = false;  // an earlier submission of the same key
};

// Submits what was rendered, unless a job of the caller's with its key is there that has not ended:
// so whoever does not know whether a submission came through sends it again. Of two at the same
// moment the lower number stays, the other is cancelled. Blocks, at most minutes.
// kNotFound: Slurm's commands are not here. kInvalidArgument: Slurm refused, in its words.
// kFailedPrecondition: one with that key is just ending. kUnavailable: no answer; send it again.
absl::StatusOr<SlurmSubmission> SubmitToSlurm(const SlurmRequest& request);

// Of the caller's jobs with that key, the lowest number; none: no such job, or all have ended.
absl::StatusOr<std::optional<SlurmEntry>> FindInSlurm(const std::string& job,
                                                      const std::string& key);

// OK if it has ended already.
absl::Status CancelInSlurm(const std::string& id);

// The lines "ID|STATE|COMMENT" of squeue that have the key, by number.
std::vector<SlurmEntry> EntriesWithKey(std::string_view lines, std::string_view key);

}  // namespace outlast
