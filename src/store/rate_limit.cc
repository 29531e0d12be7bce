#include "store/rate_limit.h"

#include <algorithm>

#include "outlast/base/clock.h"

namespace outlast {

TokenBucket::TokenBucket(uint64_t bytes_per_second, uint64_t burst_bytes)
    : bytes_per_second_(std::max<uint64_t>(1, bytes_per_second)), burst_(TimeOf(burst_bytes)) {}

// Whole seconds apart: a product of all bytes and a second would not fit.
absl::Duration TokenBucket::TimeOf(uint64_t bytes) const {
  const double rest = static_cast<double>(bytes % bytes_per_second_);
  return absl::Seconds(static_cast<int64_t>(bytes / bytes_per_second_)) +
         absl::Seconds(rest / static_cast<double>(bytes_per_second_));
}

absl::Duration TokenBucket::Take(uint64_t bytes, absl::Duration now) {
  paid_ = std::max(paid_, now - burst_) + TimeOf(bytes);
  return std::max(absl::ZeroDuration(), paid_ - now);
}

RateLimiter::RateLimiter(uint64_t bytes_per_second) : bytes_per_second_(bytes_per_second) {
  if (bytes_per_second != 0) bucket_ = FullBucket();
}

void RateLimiter::Await(uint64_t bytes) {
  MutexLock lock(mutex_);
  if (!bucket_ || lifted_) return;
  const absl::Duration now = Clock::Real().Uptime();
  const absl::Duration until = now + bucket_->Take(bytes, now);
  while (!lifted_) {
    const absl::Duration left = until - Clock::Real().Uptime();
    if (left <= absl::ZeroDuration()) return;
    changed_.WaitFor(mutex_, left);
  }
}

void RateLimiter::Lift() {
  MutexLock lock(mutex_);
  lifted_ = true;
  if (bucket_) bucket_ = FullBucket();
  changed_.NotifyAll();
}

void RateLimiter::Enforce() {
  MutexLock lock(mutex_);
  lifted_ = false;
}

}  // namespace outlast
