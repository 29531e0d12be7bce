#include "outlast/meter/histogram.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace outlast {
namespace {

TEST(ExactPercentile, IsTheNearestRank) {
  std::vector<int64_t> values = {50, 10, 40, 20, 30};
  EXPECT_EQ(ExactPercentile(values, 0.5), 30);
  EXPECT_EQ(ExactPercentile(values, 0.99), 50);
  EXPECT_EQ(ExactPercentile(values, 0.2), 10);
  EXPECT_EQ(ExactPercentile(values, 0), 10);
  EXPECT_EQ(ExactPercentile(values, 1), 50);
}

TEST(ExactPercentile, OfNothingIsNone) { EXPECT_EQ(ExactPercentile({}, 0.5), std::nullopt); }

TEST(LogHistogram, IsWithinOnePercentOfTheExactPercentile) {
  std::mt19937_64 random(7);
  std::lognormal_distribution<double> step(18, 1.5);  // around 66 ms
  LogHistogram histogram;
  std::vector<int64_t> values;
  for (int i = 0; i < 20000; ++i) {
    values.push_back(static_cast<int64_t>(step(random)));
    histogram.Add(values.back());
  }
  for (const double fraction : {0.01, 0.5, 0.9, 0.99, 0.999}) {
    const auto exact = static_cast<double>(*ExactPercentile(values, fraction));
    EXPECT_NEAR(*histogram.Percentile(fraction) / exact, 1, 0.01) << fraction;
  }
}

TEST(LogHistogram, MergedEqualsOneOverAll) {
  LogHistogram left, right, both;
  for (int64_t nanos = 1000; nanos < 1'000'000'000; nanos = nanos * 11 / 10) {
    (nanos % 2 == 0 ? left : right).Add(nanos);
    both.Add(nanos);
  }
  left.Merge(right);
  EXPECT_EQ(left.count(), both.count());
  for (const double fraction : {0.1, 0.5, 0.9})
    EXPECT_EQ(left.Percentile(fraction), both.Percentile(fraction));
}

TEST(LogHistogram, HoldsAMicrosecondAndADayAndClampsTheRest) {
  LogHistogram histogram;
  histogram.Add(-5);
  histogram.Add(0);
  EXPECT_NEAR(*histogram.Percentile(1), 1000, 20);
  const int64_t day = 86'400'000'000'000;
  histogram.Add(day);
  EXPECT_NEAR(*histogram.Percentile(1) / static_cast<double>(day), 1, 0.011);
  histogram.Add(INT64_MAX);
  EXPECT_NEAR(*histogram.Percentile(1) / static_cast<double>(day), 1, 0.011);
}

TEST(LogHistogram, OfNothingHasNoPercentile) {
  EXPECT_EQ(LogHistogram().Percentile(0.5), std::nullopt);
}

}  // namespace
}  // namespace outlast
