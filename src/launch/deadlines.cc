#include "launch/deadlines.h"

#include "base/error.h"

namespace outlast {

absl::Status CheckOuterDeadlines(const ElasticOptions& elastic, const OuterDeadlines& outer) {
  const JobOptions& job = elastic.budget;
  if (job.grace >= outer.kill_after - kKillMargin) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "--grace is {}, and the platform kills after --kill-after {}: a grace that is "
                 "shorter by more than {} wanted",
                 absl::FormatDuration(job.grace), absl::FormatDuration(outer.kill_after),
                 absl::FormatDuration(kKillMargin));
  }
  if (job.stop_within >= outer.kill_after) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "--stop-within is {}, and the platform kills after --kill-after {}: a shorter "
                 "stop wanted",
                 absl::FormatDuration(job.stop_within), absl::FormatDuration(outer.kill_after));
  }
  const absl::Duration heard = elastic.beat_loss + elastic.prepare;
  if (outer.collective_timeout > heard) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument,
               "--collective-timeout is {}, and a lost node is known, and the others prepared, "
               "after {} (beat loss {}, prepare {}): a longer one wanted, else the trainer's "
               "library ends its ranks first",
               absl::FormatDuration(outer.collective_timeout), absl::FormatDuration(heard),
               absl::FormatDuration(elastic.beat_loss), absl::FormatDuration(elastic.prepare));
}

}  // namespace outlast
