#include "outlast/testing/sim_clock.h"

namespace outlast::testing {

absl::Duration SimClock::Uptime() {
  MutexLock lock(mutex_);
  return uptime_;
}

absl::Time SimClock::WallTime() {
  MutexLock lock(mutex_);
  return absl::UnixEpoch() + wall_offset_ + uptime_;
}

void SimClock::SleepFor(absl::Duration duration) {
  MutexLock lock(mutex_);
  const absl::Duration deadline = uptime_ + duration;
  while (uptime_ < deadline) moved_.Wait(mutex_);
}

void SimClock::Advance(absl::Duration duration) {
  MutexLock lock(mutex_);
  uptime_ += duration;
  moved_.NotifyAll();
}

void SimClock::StepWallTime(absl::Duration offset) {
  MutexLock lock(mutex_);
  wall_offset_ += offset;
}

}  // namespace outlast::testing
