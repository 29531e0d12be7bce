#include "outlast/data/order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <vector>

namespace outlast {
namespace {

std::vector<int64_t> AllOf(const SampleOrder& order) {
  std::vector<int64_t> ids;
  for (int64_t position = 0; position < order.size(); ++position)
    ids.push_back(order.IdAt(position));
  return ids;
}

TEST(SampleOrder, VisitsEachSampleExactlyOnce) {
  for (const int64_t size : {0, 1, 2, 3, 10, 63, 64, 65, 100, 1000, 65537}) {
    for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{12345}, ~uint64_t{0}}) {
      const SampleOrder order(size, seed, 5);
      std::vector<int> visits(static_cast<size_t>(size), 0);
      for (const int64_t id : AllOf(order)) ++visits.at(static_cast<size_t>(id));
      EXPECT_THAT(visits, testing::Each(1)) << "size " << size << " seed " << seed;
    }
  }
}

// A saved cursor relies on it. Computed by a second implementation of the construction in order.h,
// in Python.
TEST(SampleOrder, StaysWhatItWasInTheFirstVersion) {
  EXPECT_THAT(AllOf(SampleOrder(10, 1, 0)), testing::ElementsAre(6, 7, 4, 1, 0, 8, 2, 5, 9, 3));
  EXPECT_THAT(AllOf(SampleOrder(10, 1, 1)), testing::ElementsAre(0, 5, 9, 6, 8, 2, 4, 7, 1, 3));
  const SampleOrder order(1000, 42, 3);
  std::vector<int64_t> first;
  for (int64_t position = 0; position < 8; ++position) first.push_back(order.IdAt(position));
  EXPECT_THAT(first, testing::ElementsAre(651, 639, 272, 463, 656, 283, 837, 956));
}

TEST(SampleOrder, HasNothingOutsideItsSize) {
  const SampleOrder order(10, 1, 0);
  EXPECT_EQ(order.IdAt(-1), -1);
  EXPECT_EQ(order.IdAt(10), -1);
  EXPECT_EQ(SampleOrder(-5, 1, 0).size(), 0);
}

TEST(SampleOrder, ReachesTheLargestSizes) {
  const SampleOrder order(std::numeric_limits<int64_t>::max(), 1, 0);
  EXPECT_GE(order.IdAt(0), 0);
  EXPECT_NE(order.IdAt(0), order.IdAt(order.size() - 1));
}

TEST(SampleOrder, DiffersByEpochAndBySeed) {
  const std::vector<int64_t> base = AllOf(SampleOrder(100, 7, 0));
  EXPECT_NE(AllOf(SampleOrder(100, 7, 1)), base);
  EXPECT_NE(AllOf(SampleOrder(100, 8, 0)), base);
  EXPECT_NE(AllOf(SampleOrder(100, 8, 0)), AllOf(SampleOrder(100, 7, 1)));
}

// A uniform permutation of 10000 leaves one sample in place on average (Poisson: 10 or more once in
// ten million), sends half of the first half to the second (hypergeometric: mean 2500, sigma 25),
// and has about two pairs of neighbours.
TEST(SampleOrder, MixesAsAUniformPermutationWould) {
  constexpr int64_t kSize = 10000;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const std::vector<int64_t> ids = AllOf(SampleOrder(kSize, seed, 0));
    int fixed = 0;
    int crossed = 0;
    int neighbours = 0;
    for (int64_t position = 0; position < kSize; ++position) {
      const int64_t id = ids[static_cast<size_t>(position)];
      if (id == position) ++fixed;
      if (position < kSize / 2 && id >= kSize / 2) ++crossed;
      if (position > 0 && std::abs(id - ids[static_cast<size_t>(position) - 1]) == 1) ++neighbours;
    }
    EXPECT_LT(fixed, 10) << seed;
    EXPECT_NEAR(crossed, 2500, 6 * 25) << seed;
    EXPECT_LT(neighbours, 15) << seed;
  }
}

// Each of 10 samples comes at each of 10 places in a tenth of 10000 epochs: chi-squared with 81
// degrees of freedom (rows and columns both sum to 10000) stays below 81 + 5 sigma = 145.
TEST(SampleOrder, SendsEachSampleOfASmallSourceEverywhereEquallyOften) {
  constexpr int kEpochs = 10000;
  std::vector<int> counts(100, 0);
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    const SampleOrder order(10, 3, epoch);
    for (int64_t position = 0; position < 10; ++position)
      ++counts[static_cast<size_t>(order.IdAt(position) * 10 + position)];
  }
  double chi_squared = 0;
  for (const int count : counts) chi_squared += (count - 1000.0) * (count - 1000.0) / 1000.0;
  EXPECT_LT(chi_squared, 145);
}

}  // namespace
}  // namespace outlast
