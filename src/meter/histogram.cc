#include "outlast/meter/histogram.h"

#include <algorithm>
#include <cmath>

namespace outlast {
namespace {

constexpr double kRatio = 1.02;
constexpr double kFloorNanos = 1000;

// Nearest rank, counted from 0.
uint64_t RankOf(uint64_t count, double fraction) {
  const double rank = std::ceil(std::clamp(fraction, 0.0, 1.0) * static_cast<double>(count));
  return rank < 1 ? 0 : std::min(static_cast<uint64_t>(rank) - 1, count - 1);
}

size_t BucketOf(int64_t nanos) {
  if (static_cast<double>(nanos) <= kFloorNanos) return 0;
  const double index =
      std::floor(std::log(static_cast<double>(nanos) / kFloorNanos) / std::log(kRatio));
  return std::min(static_cast<size_t>(index), LogHistogram::kBuckets - 1);
}

}  // namespace

std::optional<int64_t> ExactPercentile(std::span<int64_t> values, double fraction) {
  if (values.empty()) return std::nullopt;
  const auto nth = values.begin() + static_cast<ptrdiff_t>(RankOf(values.size(), fraction));
  std::nth_element(values.begin(), nth, values.end());
  return *nth;
}

void LogHistogram::Add(int64_t nanos) {
  ++buckets_[BucketOf(nanos)];
  ++count_;
}

void LogHistogram::Merge(const LogHistogram& other) {
  for (size_t i = 0; i < kBuckets; ++i) buckets_[i] += other.buckets_[i];
  count_ += other.count_;
}

std::optional<double> LogHistogram::Percentile(double fraction) const {
  if (count_ == 0) return std::nullopt;
  const uint64_t rank = RankOf(count_, fraction);
  uint64_t seen = 0;
  size_t bucket = 0;
  while ((seen += buckets_[bucket]) <= rank) ++bucket;
  // The geometric middle: as far, in ratio, from both bounds.
  return kFloorNanos * std::pow(kRatio, static_cast<double>(bucket) + 0.5);
}

}  // namespace outlast
