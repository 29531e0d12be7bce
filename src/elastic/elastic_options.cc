#include "outlast/elastic/elastic_options.h"

#include "base/error.h"

namespace outlast {
namespace {

absl::Status AtLeast(std::string_view name, absl::Duration value, std::string_view rule,
                     absl::Duration limit) {
  if (value >= limit) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "{} is {}, but {} is {}", name,
               absl::FormatDuration(value), rule, absl::FormatDuration(limit));
}

}  // namespace

absl::Status CheckDeadlines(const ElasticOptions& options) {
  const JobOptions& budget = options.budget;
  OUTLAST_RETURN_IF_ERROR(
      AtLeast("the beat loss", options.beat_loss, "three beats", 3 * options.beat));
  OUTLAST_RETURN_IF_ERROR(AtLeast("the rejoin grace", options.rejoin_grace,
                                  "the beat loss and 2 s of back-off",
                                  options.beat_loss + absl::Seconds(2)));
  OUTLAST_RETURN_IF_ERROR(
      AtLeast("prepare", options.prepare, "soft abort, SIGTERM, reap and two beats",
              budget.soft_abort + budget.abort_term + budget.reap + 2 * options.beat));
  OUTLAST_RETURN_IF_ERROR(
      AtLeast("the commit's acknowledgement", options.commit_ack, "two beats", 2 * options.beat));
  OUTLAST_RETURN_IF_ERROR(AtLeast("join", options.join, "the last call", options.last_call));
  return AtLeast("the coordinator grace", options.coordinator_grace,
                 "rejoin grace, prepare, respawn, acknowledgement and restore",
                 options.rejoin_grace + options.prepare + budget.respawn + options.commit_ack +
                     options.restore);
}

}  // namespace outlast
