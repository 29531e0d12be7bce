// Distributions of step times: exact over what is held, and a log histogram that merges across
// ranks and time. A percentile of percentiles is not a percentile: merge histograms instead.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace outlast {

// The smallest value that at least `fraction` (0..1) of `values` do not exceed (nearest rank):
// exact, O(n), and reorders `values`. Empty: none.
std::optional<int64_t> ExactPercentile(std::span<int64_t> values, double fraction);

// Counts durations in buckets whose bounds grow by 2 %, from 1 us to a day; what lies outside goes
// to the first or last bucket. A percentile read from it is off by at most 1 %. About 10 KB;
// merging adds the counts. Not for concurrent use.
class LogHistogram {
 public:
  // ln(86400 s / 1 us) / ln(1.02), rounded up.
  static constexpr size_t kBuckets = 1272;

  void Add(int64_t nanos);
  void Merge(const LogHistogram& other);

  uint64_t count() const { return count_; }
  // The middle of the bucket that holds the percentile, in ns. Empty: none.
  std::optional<double> Percentile(double fraction) const;

 private:
  std::array<uint64_t, kBuckets> buckets_{};
  uint64_t count_ = 0;
};

}  // namespace outlast
