#include "outlast/checkpoint/interval.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace outlast {
namespace {

IntervalModel ModelOf(double mean, double cost, double restart) {
  return {absl::Seconds(mean), absl::Seconds(cost), absl::Seconds(restart), absl::ZeroDuration()};
}

struct Pin {
  double mean, cost, restart, young, daly, goodput_percent;
};

class IntervalPins : public ::testing::TestWithParam<Pin> {};

TEST_P(IntervalPins, MatchesTheClosedForms) {
  const Pin& pin = GetParam();
  const IntervalModel model = ModelOf(pin.mean, pin.cost, pin.restart);
  // The pins are rounded to a tenth of a second, or to seconds from 5,000 on.
  const double slack = pin.young > 5000 ? 0.6 : 0.06;
  EXPECT_NEAR(absl::ToDoubleSeconds(YoungInterval(model)), pin.young, slack);
  EXPECT_NEAR(absl::ToDoubleSeconds(DalyInterval(model)), pin.daly, slack);
  EXPECT_NEAR(100 * ExpectedGoodput(model, OptimalInterval(model)), pin.goodput_percent, 0.006);
}

// Worked out from Daly's formulas with an independent program, from public figures: 466
// interruptions in 54 days (Llama 3), one each 2.78 h, 7.9 h and 4 days.
INSTANTIATE_TEST_SUITE_P(Interval, IntervalPins,
                         ::testing::Values(Pin{6000, 10, 600, 346.4, 339.8, 85.36},
                                           Pin{10012, 30, 600, 775.1, 755.2, 87.08},
                                           Pin{10008, 60, 1800, 1095.9, 1056.2, 74.72},
                                           Pin{28440, 60, 300, 1847.4, 1807.6, 92.66},
                                           Pin{345600, 40, 1800, 5258, 5231, 97.97},
                                           Pin{10008, 2, 600, 200.1, 198.7, 92.31}));

TEST(Interval, TheOptimumBeatsItsNeighbours) {
  for (const double cost : {0.01, 1.0, 60.0, 5000.0}) {
    const IntervalModel model = ModelOf(10'000, cost, 600);
    const absl::Duration best = OptimalInterval(model);
    EXPECT_GE(ExpectedGoodput(model, best), ExpectedGoodput(model, best * 0.9)) << cost;
    EXPECT_GE(ExpectedGoodput(model, best), ExpectedGoodput(model, best * 1.1)) << cost;
  }
}

// Wall time of `work` seconds under random failures: t of work, then C; a failure costs R, itself
// interruptible, and what was done since the last save.
double SimulateWall(const IntervalModel& model, double t, double work, std::mt19937_64& random) {
  std::exponential_distribution<double> gap(
      1 / absl::ToDoubleSeconds(model.mean_between_interruptions));
  const double segment = t + absl::ToDoubleSeconds(model.cost);
  const double restart = absl::ToDoubleSeconds(model.restart);
  double wall = 0, saved = 0, next = gap(random), owed = 0;
  while (saved < work) {
    const double need = owed + segment;
    if (next >= need) {
      wall += need;
      next -= need;
      owed = 0;
      saved += t;
    } else {
      wall += next;
      next = gap(random);
      owed = restart;
    }
  }
  return wall;
}

TEST(Interval, IsWithinOnePercentOfBruteForceOverRandomFailures) {
  const IntervalModel model = ModelOf(6000, 10, 600);
  const double work = 200 * 6000;
  const auto wall_at = [&](double t) {
    std::mt19937_64 random(1);  // the same failures for each t
    double wall = 0;
    for (int i = 0; i < 50; ++i) wall += SimulateWall(model, t, work, random);
    return wall / 50;
  };
  double best = wall_at(100);
  for (double t = 120; t < 1200; t *= 1.05) best = std::min(best, wall_at(t));
  EXPECT_LE(wall_at(absl::ToDoubleSeconds(OptimalInterval(model))), best * 1.01);
}

TEST(Interval, ASaveEndsBeforeTheNextBegins) {
  IntervalModel model = ModelOf(10'000, 0.001, 60);
  model.write = absl::Seconds(90);
  EXPECT_EQ(OptimalInterval(model), absl::Seconds(90));
}

TEST(Interval, TheJobsOwnFaultsCorrectThePrior) {
  EXPECT_EQ(MeanBetweenInterruptions(1000, absl::ZeroDuration(), 0), absl::Hours(8));
  EXPECT_EQ(MeanBetweenInterruptions(1000, absl::Hours(12), 4), absl::Hours(4));
}

TEST(Interval, ALossInRankHoursIsAnInterval) {
  EXPECT_EQ(IntervalOfLoss(absl::Hours(125), 1000), absl::Minutes(15));
}

TEST(SaveCostMeter, ComparesTheStepsUnderAWriteWithTheOthers) {
  SaveCostMeter meter;
  meter.SaveBegan(absl::Seconds(0), 0);
  meter.SaveEnded(absl::Seconds(10), 100);
  EXPECT_FALSE(meter.cost()) << "nothing to compare with yet";
  meter.SaveBegan(absl::Seconds(20), 200);  // 10 steps a second
  meter.SaveEnded(absl::Seconds(30), 290);  // 9
  ASSERT_TRUE(meter.cost());
  EXPECT_NEAR(absl::ToDoubleSeconds(*meter.cost()), 1.0, 1e-6);
  EXPECT_EQ(meter.write(), absl::Seconds(10));
}

TEST(SaveCostMeter, SaysNothingOfFewStepsAndNeverLessThanNoise) {
  SaveCostMeter meter;
  meter.SaveBegan(absl::Seconds(0), 0);
  meter.SaveEnded(absl::Seconds(1), 3);
  meter.SaveBegan(absl::Seconds(10), 103);
  meter.SaveEnded(absl::Seconds(11), 113);
  EXPECT_FALSE(meter.cost()) << "10 steps are too few";
  meter.SaveBegan(absl::Seconds(21), 213);
  meter.SaveEnded(absl::Seconds(31), 333);  // quicker than without
  EXPECT_EQ(*meter.cost(), absl::Milliseconds(100));
  meter.Forget();
  meter.SaveBegan(absl::Seconds(40), 100);  // after a rollback
  meter.SaveEnded(absl::Seconds(50), 200);
  EXPECT_GE(*meter.cost(), absl::ZeroDuration());
}

TEST(IntervalTuner, StaysWhereItIsForSmallChangesAndInsideItsBounds) {
  IntervalTuner tuner({absl::Seconds(5), absl::Minutes(30)});
  const absl::Duration first = tuner.Tune(ModelOf(6000, 10, 600));
  EXPECT_NEAR(absl::ToDoubleSeconds(first), 340, 5);
  EXPECT_EQ(tuner.Tune(ModelOf(6000, 12, 600)), first) << "a tenth longer";
  EXPECT_GT(tuner.Tune(ModelOf(6000, 40, 600)), first * 1.8);
  EXPECT_EQ(tuner.Tune(ModelOf(1e9, 1000, 600)), absl::Minutes(30));
  EXPECT_EQ(tuner.Tune(ModelOf(6000, 1e-6, 600)), absl::Seconds(5));
}

}  // namespace
}  // namespace outlast
