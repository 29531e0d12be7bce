// How a job's deadlines nest in those of what stands around it (design/elastic.md, section 8).
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "outlast/elastic/elastic_options.h"

namespace outlast {

// Of what nobody said anything: infinite.
struct OuterDeadlines {
  absl::Duration kill_after = absl::InfiniteDuration();  // the platform's, from SIGTERM to SIGKILL
  absl::Duration collective_timeout = absl::InfiniteDuration();  // of the trainer's own library
};

// What a stop keeps of the platform's time for reports and for the end of the agent itself.
inline constexpr absl::Duration kKillMargin = absl::Seconds(5);

// kInvalidArgument: names both timers. The watchdog's are judged when its options are known
// (watch/options.h).
absl::Status CheckOuterDeadlines(const ElasticOptions& elastic, const OuterDeadlines& outer);

}  // namespace outlast
