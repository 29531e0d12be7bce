// How a status looks to people.
#pragma once

#include <optional>
#include <string>

#include "absl/time/time.h"
#include "launch/job_status.h"

namespace outlast {

enum class Colour { kNo, kYes };

struct StatusStyle {
  Colour colour = Colour::kNo;
  // In columns; longer lines are cut, and bars fill what is left. 0: no bars, nothing is cut.
  int width = 0;
  int max_ranks = 64;  // more are counted in one line; those that stand still longest come first
};

// "0.5 ms", "12.3 s", "4 min 5 s", "3 h 12 min".
std::string DurationText(double seconds);
// Seconds from `utc`, as the records have it, to `now`; none: it is no time.
std::optional<double> AgeOf(const std::string& utc, absl::Time now);

// Several lines, each with its end. `now` is the wall clock: ages of a moment ago are for display.
std::string StatusText(const JobStatus& status, const StatusStyle& style, absl::Time now);

}  // namespace outlast
