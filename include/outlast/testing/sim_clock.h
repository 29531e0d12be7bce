// A clock that moves only when a test says so.
#pragma once

#include "absl/time/time.h"
#include "outlast/base/clock.h"
#include "outlast/base/mutex.h"

namespace outlast::testing {

// Safe for concurrent use. SleepFor blocks until Advance has moved the clock past the sleeper's
// deadline.
class SimClock final : public Clock {
 public:
  explicit SimClock(absl::Time wall = absl::FromUnixSeconds(1'700'000'000))
      : wall_offset_(wall - absl::UnixEpoch()) {}

  absl::Duration Uptime() override;
  absl::Time WallTime() override;
  void SleepFor(absl::Duration duration) override;

  void Advance(absl::Duration duration);
  // Moves the wall clock alone, as an administrator or NTP would.
  void StepWallTime(absl::Duration offset);

 private:
  Mutex mutex_;
  CondVar moved_;
  absl::Duration uptime_ ABSL_GUARDED_BY(mutex_);
  absl::Duration wall_offset_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace outlast::testing
