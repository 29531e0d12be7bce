#include "store/rate_limit.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "outlast/base/clock.h"
#include "outlast/testing/time_factor.h"

namespace outlast {
namespace {

TEST(TokenBucket, LetsEachTakerWaitForItsOwnBytes) {
  TokenBucket bucket(1000, 0);
  EXPECT_EQ(bucket.Take(500, absl::Seconds(10)), absl::Milliseconds(500));
  EXPECT_EQ(bucket.Take(1000, absl::Seconds(10)), absl::Milliseconds(1500));  // after the former
  EXPECT_EQ(bucket.Take(100, absl::Seconds(11)), absl::Milliseconds(600));
}

TEST(TokenBucket, GivesNoCreditForIdleTimeBeyondItsBurst) {
  TokenBucket bucket(1000, 200);
  EXPECT_EQ(bucket.Take(200, absl::ZeroDuration()), absl::ZeroDuration());
  EXPECT_EQ(bucket.Take(50, absl::ZeroDuration()), absl::Milliseconds(50));
  EXPECT_EQ(bucket.Take(300, absl::Hours(5)), absl::Milliseconds(100));
}

TEST(TokenBucket, TakesASlowDisksOwnTimeAsTimeWaited) {
  TokenBucket bucket(1000, 100);
  absl::Duration now;
  for (int i = 0; i < 10; ++i) {
    now += bucket.Take(100, now);
    now += absl::Milliseconds(40);  // the write
  }
  EXPECT_EQ(now, absl::Milliseconds(9 * 100 + 40));  // the first 100 bytes were in the bucket
}

// 64 MB through 1 MB/s, in blocks of 1 MiB: 64 s and not one byte earlier.
TEST(TokenBucket, KeepsItsRateOverAWholeFile) {
  TokenBucket bucket(1'000'000, 0);
  absl::Duration now;
  int64_t written = 0;
  while (written < 64'000'000) {
    const int64_t block = std::min<int64_t>(1 << 20, 64'000'000 - written);
    now += bucket.Take(static_cast<uint64_t>(block), now);
    written += block;
    ASSERT_LE(written, absl::ToDoubleSeconds(now) * 1e6 + 1);
  }
  EXPECT_NEAR(absl::ToDoubleSeconds(now), 64, 1e-6);
}

TEST(TokenBucket, TakesTheLargestNumbers) {
  TokenBucket slow(1, 0), fast(UINT64_MAX, 0);
  EXPECT_GT(slow.Take(uint64_t{1} << 62, absl::ZeroDuration()), absl::Hours(24 * 365));
  EXPECT_LE(fast.Take(uint64_t{1} << 62, absl::ZeroDuration()), absl::Seconds(1));
}

TEST(RateLimiter, WithoutALimitNeverWaits) {
  RateLimiter limiter(0);
  limiter.Await(UINT64_MAX);
}

TEST(RateLimiter, HoldsItsCallersToTheRate) {
  RateLimiter limiter(1'000'000);
  const int64_t started = MonotonicNanos();
  for (int i = 0; i < 3; ++i) limiter.Await(60'000);
  EXPECT_GE(MonotonicNanos() - started, 80'000'000);  // 100'000 bytes were in the bucket
}

TEST(RateLimiter, EndsAWaitWhenItIsLifted) {
  RateLimiter limiter(1);
  std::atomic<int> passed{0};
  std::thread waiter([&] {
    limiter.Await(1'000'000);  // 11 days
    ++passed;
    limiter.Await(1'000'000);
    ++passed;
  });
  limiter.Lift();
  waiter.join();
  EXPECT_EQ(passed, 2);
  limiter.Enforce();
  const int64_t started = MonotonicNanos();
  limiter.Await(0);  // what went while it was lifted is not owed
  EXPECT_LT(MonotonicNanos() - started,
            absl::ToInt64Nanoseconds(absl::Seconds(5) * testing::TimeFactor()));
}

}  // namespace
}  // namespace outlast
