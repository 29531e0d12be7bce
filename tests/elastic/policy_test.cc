#include "outlast/elastic/policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <string>
#include <vector>

namespace outlast {
namespace {

using ::testing::HasSubstr;

FaultRecord Crash(int code, uint64_t root = 0) {
  return {.fault_class = FaultClass::kCrash,
          .end = {.code = code},
          .root = root != 0 ? root : static_cast<uint64_t>(code)};
}

// Judges faults one after another, a second apart, as the job does.
struct Court {
  JobOptions options;
  FaultHistory history;
  absl::Duration now = absl::Seconds(100);
  uint64_t seed = 1;

  Judgement Judge(const FaultRecord& fault) {
    now += absl::Seconds(1);
    history.Add(fault);
    Judgement judgement = JudgeFault(history, fault, options, now, seed);
    if (judgement.restart) history.AddRestart(now);
    return judgement;
  }
};

TEST(JudgeFault, SameRootStopsWithEightyTwoAtItsThirdFaultWhileRestartsRemain) {
  Court court;
  EXPECT_TRUE(court.Judge(Crash(5)).restart);
  EXPECT_TRUE(court.Judge(Crash(5)).restart);
  const Judgement last = court.Judge(Crash(5));
  EXPECT_FALSE(last.restart);
  EXPECT_EQ(last.exit_code, 82);
  EXPECT_THAT(last.reason, HasSubstr("same root 3 times"));
}

TEST(JudgeFault, MixedRootsStopWithEightyThreeAtTheFourthFault) {
  Court court;
  for (const int code : {3, 4, 5}) EXPECT_TRUE(court.Judge(Crash(code)).restart);
  EXPECT_EQ(court.Judge(Crash(6)).exit_code, 83);
}

// kubeflow/trainer#2045: limit 2, always 137: three attempts, then the limit's code and not the
// root's.
TEST(JudgeFault, BudgetIsJudgedBeforeTheRoot) {
  Court court{.options = {.max_restarts = 2}};
  EXPECT_TRUE(court.Judge(Crash(137)).restart);
  EXPECT_TRUE(court.Judge(Crash(137)).restart);
  const Judgement last = court.Judge(Crash(137));
  EXPECT_EQ(last.exit_code, 83);
  EXPECT_THAT(last.reason, HasSubstr("--max-restarts"));
}

TEST(JudgeFault, WithoutRestartsTheWorkersOwnCodeIsTheJobs) {
  const JobOptions never{.max_restarts = 0};
  EXPECT_EQ(Court{.options = never}.Judge(Crash(7)).exit_code, 7);
  EXPECT_EQ(Court{.options = never}.Judge(Crash(81)).exit_code, 1);
  EXPECT_EQ(Court{.options = never}.Judge({.end = {.signal = SIGSEGV}}).exit_code, 139);
  EXPECT_EQ(Court{.options = never}.Judge({.fault_class = FaultClass::kEarlyExit}).exit_code, 1);
  EXPECT_EQ(Court{.options = never}.Judge({.fault_class = FaultClass::kHang}).exit_code, 137);
}

TEST(JudgeFault, ANoRetryCodeEndsTheJobWithTheWorkersOwnCode) {
  EXPECT_EQ(Court{}.Judge(Crash(93)).exit_code, 93);
  EXPECT_EQ(Court{}.Judge(Crash(82)).exit_code, 1);
  EXPECT_FALSE(Court{}.Judge(Crash(82)).restart);
}

TEST(JudgeFault, WithRetryCodesOnlyTheseAreTriedAgain) {
  Court court{.options = {.retry_codes = {137}}};
  EXPECT_TRUE(court.Judge({.end = {.signal = SIGKILL}}).restart);
  EXPECT_TRUE(court.Judge({.fault_class = FaultClass::kHang, .root = 9}).restart);
  EXPECT_EQ(court.Judge(Crash(1)).exit_code, 1);
}

TEST(JudgeFault, OtherClassesHaveABudgetOfTheirOwn) {
  Court court{.options = {.same_root_limit = 100}};
  for (int i = 0; i < 6; ++i)
    EXPECT_TRUE(court.Judge({.fault_class = FaultClass::kNodeLost}).restart);
  EXPECT_EQ(court.history.crashes, 0);
  EXPECT_EQ(court.Judge({.fault_class = FaultClass::kNodeLost}).exit_code, 83);
}

TEST(JudgeFault, MemoryOrDiskThatIsUsedUpIsTriedOnceMore) {
  Court court;
  const FaultRecord oom{.fault_class = FaultClass::kResource, .root = 5};
  EXPECT_TRUE(court.Judge(oom).restart);
  EXPECT_EQ(court.Judge(oom).exit_code, 82);
}

TEST(JudgePlace, TheSameRootAtTheSameStepIsTheNodeOrTheProgram) {
  const auto judge = [](std::vector<FaultRecord> faults) {
    FaultHistory history;
    for (const FaultRecord& fault : faults) history.Add(fault);
    return JudgePlace(history);
  };
  const FaultRecord on_a{.step_reached = 7, .root = 1, .node = "a"};
  FaultRecord on_b = on_a, later = on_a;
  on_b.node = "b";
  later.step_reached = 8;
  EXPECT_EQ(judge({on_a}), PlaceJudgement::kStay);
  EXPECT_EQ(judge({on_a, later}), PlaceJudgement::kStay);
  EXPECT_EQ(judge({on_a, on_a}), PlaceJudgement::kSwapNode);
  EXPECT_EQ(judge({on_a, on_b}), PlaceJudgement::kDeterministic);
  FaultRecord hang{.fault_class = FaultClass::kHang, .step_reached = 7, .root = 2, .node = "a"};
  FaultRecord other_hang = hang;
  other_hang.step_reached = 9;
  EXPECT_EQ(judge({hang, other_hang}), PlaceJudgement::kSwapNode);
  // Two nodes that are lost at one step say nothing about the program.
  FaultRecord lost{.fault_class = FaultClass::kNodeLost, .root = 3, .node = "a"}, other = lost;
  other.node = "b";
  EXPECT_EQ(judge({lost, other}), PlaceJudgement::kStay);
}

TEST(JudgeFault, AtMostTwentyRestartsInAnHourWhateverTheProgress) {
  Court court;
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(court.Judge(Crash(5)).restart) << i;
    court.history.Refund();
  }
  EXPECT_EQ(Court(court).Judge(Crash(5)).exit_code, 83);
  court.now += absl::Hours(1);
  EXPECT_TRUE(court.Judge(Crash(5)).restart);
}

TEST(JudgeFault, BacksOffFromTheSecondRestartWithoutProgress) {
  Court court{.options = {.max_restarts = 100, .same_root_limit = 100}};
  EXPECT_EQ(court.Judge(Crash(5)).delay, absl::ZeroDuration());
  for (const int most : {1, 2, 4, 8, 16, 32, 60, 60, 60}) {
    const absl::Duration delay = court.Judge(Crash(5)).delay;
    EXPECT_GE(delay, absl::Seconds(most) / 2);
    EXPECT_LE(delay, absl::Seconds(most));
  }
  court.history.Refund();
  EXPECT_EQ(court.Judge(Crash(5)).delay, absl::ZeroDuration());
}

// A thousand jobs that lost the same file system: each eighth of the time has its share of them.
TEST(BackOff, SpreadsJobsThatFellTogether) {
  for (const int restarts : {1, 4, 7, 30}) {
    const absl::Duration most = absl::Seconds(std::min(60, 1 << std::min(restarts - 1, 6)));
    std::vector<int> eighths(8, 0);
    for (int job = 0; job < 1000; ++job) {
      const Id128 run_id = Id128::FromName("job " + std::to_string(job));
      const double part =
          absl::FDivDuration(BackOff(restarts, BackOffSeed(run_id)) - most / 2, most / 2);
      ++eighths[static_cast<size_t>(std::min(7.0, part * 8))];
    }
    for (const int jobs : eighths) EXPECT_NEAR(jobs, 125, 45) << restarts;
  }
}

// What a restarted coordinator folds is the run's id and how many restarts there were: it backs off
// as the former one would have.
TEST(BackOff, IsTheSameForTheSameRunAndAttempt) {
  const uint64_t seed = BackOffSeed(Id128::FromName("run"));
  for (int restarts = 0; restarts < 10; ++restarts)
    EXPECT_EQ(BackOff(restarts, seed), BackOff(restarts, seed));
  EXPECT_NE(BackOff(8, seed), BackOff(9, seed)) << "of each attempt another part of 60 s";
  EXPECT_NE(BackOff(8, seed), BackOff(8, seed + 1));
}

TEST(JudgeFault, DecidesAlikeWhateverTheSeed) {
  for (const int limit : {0, 2, 100}) {
    Court one{.options = {.max_restarts = limit}};
    Court other = one;
    other.seed = 77;
    for (int i = 0; i < 10; ++i) {
      const Judgement a = one.Judge(Crash(5)), b = other.Judge(Crash(5));
      EXPECT_EQ(a.restart, b.restart) << i;
      EXPECT_EQ(a.exit_code, b.exit_code) << i;
      EXPECT_EQ(a.reason, b.reason) << i;
    }
  }
}

}  // namespace
}  // namespace outlast
