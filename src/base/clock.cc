#include "outlast/base/clock.h"

#include <ctime>

#include "absl/time/clock.h"

namespace outlast {
namespace {

class RealClock final : public Clock {
 public:
  absl::Duration Uptime() override { return absl::Nanoseconds(MonotonicNanos()); }
  absl::Time WallTime() override { return absl::Now(); }
  void SleepFor(absl::Duration duration) override { absl::SleepFor(duration); }
};

}  // namespace

int64_t MonotonicNanos() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

Clock& Clock::Real() {
  static RealClock* clock =
      new RealClock;  // never destroyed: threads may read it while the process exits
  return *clock;
}

}  // namespace outlast
