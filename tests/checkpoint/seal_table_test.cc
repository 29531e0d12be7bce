#include "checkpoint/seal_table.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "outlast/base/memory.h"

namespace outlast {
namespace {

constexpr std::array<bool, kMaxBuffers> kNonePinned{};

HeldSteps Held(int64_t a, int64_t b = kNoStep, int64_t c = kNoStep, int buffers = 3) {
  return {{a, b, c}, buffers};
}

TEST(CommonStep, IsTheNewestThatAllRanksHold) {
  EXPECT_EQ(CommonStep(std::vector{Held(5, 6, 7), Held(6, 7), Held(7, 5, 6)}), 7);
  EXPECT_EQ(CommonStep(std::vector{Held(5, 6, 7), Held(5, 6), Held(6, 5, 4)}), 6);
  EXPECT_EQ(CommonStep(std::vector{Held(5), Held(6)}), kNoStep);
  EXPECT_EQ(CommonStep({}), kNoStep);
}

TEST(PickBuffer, TakesAFreeOneFirst) {
  EXPECT_EQ(PickBuffer(std::vector{Held(5, kNoStep, 4)}, 0, kNonePinned), 1);
}

TEST(PickBuffer, TakesTheOldestThatIsOlderThanTheCommonStep) {
  EXPECT_EQ(PickBuffer(std::vector{Held(7, 5, 6), Held(7, 6, 5)}, 0, kNonePinned), 1);
}

TEST(PickBuffer, KeepsTheCommonStepThoughItIsNotTheNewestHere) {
  // Rank 1 has not sealed 7 yet: 6 is what all have. With two buffers nothing is free.
  EXPECT_EQ(PickBuffer(std::vector{Held(6, 7, kNoStep, 2), Held(5, 6, kNoStep, 2)}, 0, kNonePinned),
            std::nullopt);
}

TEST(PickBuffer, KeepsAStepThatAllRanksHaveWhenOneSkips) {
  // Rank 1 skipped 7 and has sealed 8: 7 can never be common, 6 was until 8 is, so rank 0 gives 7
  // away.
  const std::vector<HeldSteps> ranks{Held(6, 7, kNoStep, 2), Held(6, 8, kNoStep, 2)};
  EXPECT_EQ(CommonStep(ranks), 6);
  EXPECT_EQ(PickBuffer(ranks, 0, kNonePinned), 1);
}

TEST(PickBuffer, LeavesPinnedOnesAlone) {
  EXPECT_EQ(PickBuffer(std::vector{Held(5, 6, 7), Held(5, 6, 7)}, 0, {true, false, false}), 1);
  EXPECT_EQ(PickBuffer(std::vector{Held(5, 6, 7), Held(5, 6, 7)}, 0, {true, true, false}),
            std::nullopt);
}

// Ranks in lockstep that skip at random and look at rows at random moments never lose the newest
// step that all had.
TEST(PickBuffer, NeverLosesTheLastCommonStepInRandomRuns) {
  for (uint32_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(seed);
    uint32_t random = seed * 2654435761u;
    const auto next = [&](uint32_t below) {
      return (random = random * 1664525u + 1013904223u) / 65536 % below;
    };
    const size_t world = 1 + next(4);
    const int buffers = 2 + static_cast<int>(next(2));
    std::vector<HeldSteps> ranks(world, Held(kNoStep, kNoStep, kNoStep, buffers));
    std::vector<int64_t> step(world, 0);
    int64_t best = kNoStep;
    for (int event = 0; event < 2000; ++event) {
      const size_t rank = next(static_cast<uint32_t>(world));
      const int64_t slowest = *std::min_element(step.begin(), step.end());
      if (step[rank] > slowest) continue;  // the collective holds a rank that is ahead
      ++step[rank];
      if (next(5) != 0) {
        if (const auto picked = PickBuffer(ranks, rank, kNonePinned)) {
          ranks[rank].step[static_cast<size_t>(*picked)] = kNoStep;
          ASSERT_GE(CommonStep(ranks), best);  // filling must not have taken it
          if (next(10) != 0)
            ranks[rank].step[static_cast<size_t>(*picked)] =
                step[rank];  // else: died while filling
        }
      }
      best = std::max(best, CommonStep(ranks));
      ASSERT_GE(CommonStep(ranks), best);
    }
    EXPECT_GT(best, 0);
  }
}

TEST(SealTable, ReadersNeverSeeHalfARow) {
  SealTable table(Mapping::Anonymous(SealTable::BytesFor(2)).value(), 2);
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (int64_t step = 1; !stop; ++step) table.Write(1, Held(step, step, step));
  });
  for (int i = 0; i < 20000; ++i) {
    const HeldSteps held = table.Read()[1];
    EXPECT_EQ(held.step[0], held.step[1]);
    EXPECT_EQ(held.step[1], held.step[2]);
  }
  stop = true;
  writer.join();
}

TEST(SealTable, StartsEmptyAndCarriesTheKeepersWishes) {
  SealTable table(Mapping::Anonymous(SealTable::BytesFor(1)).value(), 1);
  EXPECT_EQ(table.Read()[0].newest(), kNoStep);
  EXPECT_EQ(table.wanted_step(), kNoStep);
  EXPECT_EQ(table.cadence().every, 1);
  table.SetWantedStep(0);
  EXPECT_EQ(table.wanted_step(), 0);
  table.SetCadence({1000, 16});
  EXPECT_EQ(table.cadence().from, 1000);
  EXPECT_EQ(table.cadence().every, 16);
}

}  // namespace
}  // namespace outlast
