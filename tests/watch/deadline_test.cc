#include "watch/deadline.h"

#include <gtest/gtest.h>

namespace outlast {
namespace {

constexpr absl::Duration kFloor = absl::Seconds(10);
constexpr absl::Duration kCeiling = absl::Minutes(8);

void AddMany(LearnedLimit* limit, int count, absl::Duration sample) {
  for (int i = 0; i < count; ++i) limit->Add(sample, kFloor, kCeiling);
}

OpenSection Named(std::string name, Phase phase) {
  OpenSection section;
  section.name = std::move(name);
  section.phase = phase;
  section.id = 7;
  return section;
}

// D16.
TEST(LearnedLimit, SaysNothingBelowEightSamples) {
  LearnedLimit limit;
  AddMany(&limit, 7, absl::Seconds(4));
  EXPECT_FALSE(limit.limit().has_value());
  AddMany(&limit, 1, absl::Seconds(4));
  EXPECT_EQ(*limit.limit(), absl::Seconds(20));  // 5 * 4 s
}

TEST(LearnedLimit, StaysBetweenFloorAndCeiling) {
  LearnedLimit quick, slow;
  AddMany(&quick, 8, absl::Milliseconds(100));
  AddMany(&slow, 8, absl::Minutes(3));
  EXPECT_EQ(*quick.limit(), kFloor);
  EXPECT_EQ(*slow.limit(), kCeiling);
}

TEST(LearnedLimit, RisesAtOnceWithALongerHealthySample) {
  LearnedLimit limit;
  AddMany(&limit, 9, absl::Seconds(4));
  limit.Add(absl::Seconds(12), kFloor, kCeiling);
  EXPECT_EQ(*limit.limit(), absl::Seconds(60));
}

TEST(LearnedLimit, FallsByHalfTheGapInAWindow) {
  LearnedLimit limit;
  AddMany(&limit, 31, absl::Seconds(20));
  EXPECT_EQ(*limit.limit(), absl::Seconds(100));
  AddMany(&limit, 1, absl::Seconds(20));  // 32: factor 3, so 60 is the target
  EXPECT_EQ(*limit.limit(), absl::Seconds(80));
  AddMany(&limit, 32, absl::Seconds(20));
  EXPECT_EQ(*limit.limit(), absl::Seconds(70));
}

TEST(LearnedLimit, GrowsWithTheSpread) {
  LearnedLimit limit;
  // Median 10, deviations 0 or 8 in halves: the nearest-rank median of them is 0 or 8 by who is
  // more.
  for (int i = 0; i < 5; ++i) limit.Add(absl::Seconds(18), kFloor, kCeiling);
  for (int i = 0; i < 6; ++i) limit.Add(absl::Seconds(2), kFloor, kCeiling);
  // p99 18 -> 90; median 2, deviations six 0 and five 16 -> 0: 2.
  EXPECT_EQ(*limit.limit(), absl::Seconds(90));
}

TEST(DeadlineBook, UsesFirstLimitsUntilItMayLearn) {
  DeadlineBook book(WatchdogOptions{}, 100);
  const OpenSection data = Named("data", Phase::kData);
  for (int i = 0; i < 20; ++i) book.Observe(0, WorkKey::Step(), absl::Seconds(1));
  EXPECT_EQ(book.For(&data, 0, false).limit, absl::Seconds(180));
  EXPECT_EQ(book.For(&data, 0, true).limit, absl::Seconds(10));
  EXPECT_TRUE(book.For(&data, 0, true).is_learned);
}

TEST(DeadlineBook, NeverLearnsInitRebuildCompileAndOutside) {
  DeadlineBook book(WatchdogOptions{}, 100);
  const OpenSection init = Named("init", Phase::kInit);
  const OpenSection rebuild = Named("rebuild", Phase::kRebuild);
  const OpenSection compile = Named("compile", Phase::kCompile);
  for (int i = 0; i < 20; ++i) {
    for (const OpenSection* section : {&init, &rebuild, &compile}) {
      book.Observe(0, {section->id, section->phase, 0}, absl::Seconds(1));
    }
    book.Observe(0, WorkKey::Step(), absl::Seconds(1));
  }
  EXPECT_EQ(book.For(&init, 0, true).limit, absl::Seconds(601));  // 600 s and 10 ms a rank
  EXPECT_EQ(book.For(&rebuild, 0, true).limit, absl::Seconds(181));
  EXPECT_EQ(book.For(&compile, 0, true).limit, absl::Seconds(480));
  EXPECT_EQ(book.For(nullptr, 0, true).limit, absl::Seconds(300));
}

TEST(DeadlineBook, LearnsASectionOfTheUsersByItsOwnSamplesOnly) {
  DeadlineBook book(WatchdogOptions{}, 2);
  const OpenSection refill = Named("refill", Phase::kData);
  for (int i = 0; i < 40; ++i) book.Observe(0, WorkKey::Step(), absl::Seconds(1));
  EXPECT_EQ(book.For(&refill, 0, true).limit, absl::Seconds(180));
  for (int i = 0; i < 8; ++i) book.Observe(0, {refill.id, refill.phase, 0}, absl::Seconds(30));
  EXPECT_EQ(book.For(&refill, 0, true).limit, absl::Seconds(150));
  // With an operation pending it is another kind of work.
  EXPECT_EQ(book.For(&refill, 1, true).limit, absl::Seconds(180));
}

TEST(DeadlineBook, BoundsACollectiveInsideAPhaseByTheStep) {
  DeadlineBook book(WatchdogOptions{}, 2);
  const OpenSection reduce = Named("AllReduceSum", Phase::kCommWait);
  const OpenSection wait = Named("comm_wait", Phase::kCommWait);
  const OpenSection eval = Named("eval", Phase::kEval);
  for (int i = 0; i < 40; ++i) book.Observe(0, WorkKey::Step(), absl::Seconds(5));
  // 5 x 5 s after 8 samples; half the way to 3 x 5 s after 32.
  EXPECT_EQ(book.For(&reduce, 1, true, &wait).limit, absl::Seconds(20));
  EXPECT_EQ(book.For(&reduce, 1, false, &wait).limit, absl::Seconds(180));
  // Elsewhere a step says nothing of it.
  EXPECT_EQ(book.For(&reduce, 1, true, &eval).limit, absl::Seconds(180));
  EXPECT_EQ(book.For(&reduce, 1, true).limit, absl::Seconds(180));
  // Its own samples say more.
  for (int i = 0; i < 8; ++i) book.Observe(1, {reduce.id, reduce.phase, 1}, absl::Seconds(8));
  EXPECT_EQ(book.For(&reduce, 1, true, &wait).limit, absl::Seconds(40));
}

// D16: the same value on all ranks, learned anew after a restart, and it may go down.
TEST(DeadlineBook, UsesTheLongestOfAllRanksAndForgetsOnReset) {
  DeadlineBook book(WatchdogOptions{}, 2);
  const OpenSection eval = Named("eval", Phase::kEval);
  for (int i = 0; i < 8; ++i) {
    book.Observe(0, {eval.id, eval.phase, 0}, absl::Seconds(4));
    book.Observe(1, {eval.id, eval.phase, 0}, absl::Seconds(40));
  }
  EXPECT_EQ(book.For(&eval, 0, true).limit, absl::Seconds(200));
  book.Reset(2);
  EXPECT_EQ(book.For(&eval, 0, true).limit, absl::Seconds(180));
  for (int i = 0; i < 8; ++i) book.Observe(0, {eval.id, eval.phase, 0}, absl::Seconds(4));
  EXPECT_EQ(book.For(&eval, 0, true).limit, absl::Seconds(20));
}

TEST(DeadlineBook, KeepsALimitThatIsSwitchedOffOff) {
  WatchdogOptions options;
  options.first_limits.step = absl::InfiniteDuration();
  DeadlineBook book(options, 1);
  const OpenSection data = Named("data", Phase::kData);
  for (int i = 0; i < 40; ++i) book.Observe(0, WorkKey::Step(), absl::Seconds(1));
  EXPECT_EQ(book.For(&data, 0, true).limit, absl::InfiniteDuration());
}

}  // namespace
}  // namespace outlast
