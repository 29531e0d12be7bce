// The watchdog's options on their way from a trainer to its agent: the payload of
// MessageKind::kWatch.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "outlast/watch/watchdog.h"

namespace outlast {

// {"mode": "act", "poll_ns": ..., "first_limits": {"init_ns": ...}, ...}; an infinite duration is
// the largest int64.
std::string EncodeWatchOptions(const WatchdogOptions& options);
// kInvalidArgument: no such JSON, naming the field, or options that Validate refuses. Missing
// fields have their defaults.
absl::StatusOr<WatchdogOptions> DecodeWatchOptions(std::string_view text);

// Deadlines of a job that the watchdog's must nest with. Zero, or infinite, is not known.
struct JobDeadlines {
  // What a new process may take until its generation stands: each is plus 10 ms a rank, as the
  // rebuild limit is.
  absl::Duration respawn, commit_ack, connect;
  absl::Duration soft_abort;
  absl::Duration collective_timeout = absl::InfiniteDuration();  // of the trainer's own library
};
// The survivors of a re-form must not be called hung while the new process may still come, nor may
// the trainer's library end a rank before its watchdog does. kInvalidArgument: names both timers.
absl::Status CheckNesting(const WatchdogOptions& options, const JobDeadlines& job);

}  // namespace outlast
