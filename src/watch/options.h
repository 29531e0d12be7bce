// The watchdog's options on their way from a trainer to its agent: the payload of
// MessageKind::kWatch.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "outlast/watch/watchdog.h"

namespace outlast {

// {"mode": "act", "poll_ns": ..., "first_limits": {"init_ns": ...}, ...}; an infinite duration is
// the largest int64.
std::string EncodeWatchOptions(const WatchdogOptions& options);
// kInvalidArgument: no such JSON, naming the field, or options that Validate refuses. Missing
// fields have their defaults.
absl::StatusOr<WatchdogOptions> DecodeWatchOptions(std::string_view text);

}  // namespace outlast
