// How fast bytes may go: the rule, pure, and the one who waits by it.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/time/time.h"
#include "outlast/base/mutex.h"

namespace outlast {

// A token bucket. It fills at the rate, holds `burst_bytes` at most, and is full at first. Time is
// any clock that never goes back.
class TokenBucket {
 public:
  TokenBucket(uint64_t bytes_per_second, uint64_t burst_bytes);  // a rate from 1

  // Takes `bytes`, more than the bucket holds too, and says how long their taker has to wait before
  // he uses them. Debts add up, so that over any time no more than rate * time + burst goes.
  absl::Duration Take(uint64_t bytes, absl::Duration now);

 private:
  absl::Duration TimeOf(uint64_t bytes) const;

  uint64_t bytes_per_second_;
  absl::Duration burst_;
  absl::Duration paid_ =
      -absl::InfiniteDuration();  // when all that was taken will have been filled
};

// Holds the callers of Await to a rate, all together, until it is lifted. A tenth of a second's
// bytes may go at once, so that the time of a write is not lost. Safe for concurrent use.
class RateLimiter {
 public:
  explicit RateLimiter(uint64_t bytes_per_second);  // 0: no limit

  uint64_t bytes_per_second() const { return bytes_per_second_; }

  // Blocks until `bytes` may go, or the limit is lifted.
  void Await(uint64_t bytes);
  // Ends all waits, and lets everything go from now on; what went meanwhile is never owed.
  void Lift();
  void Enforce();

 private:
  TokenBucket FullBucket() const { return {bytes_per_second_, bytes_per_second_ / 10}; }

  const uint64_t bytes_per_second_;
  Mutex mutex_;
  CondVar changed_;
  bool lifted_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<TokenBucket> bucket_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace outlast
