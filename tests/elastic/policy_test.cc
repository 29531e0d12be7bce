#include "outlast/elastic/policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
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

  Judgement Judge(const FaultRecord& fault) {
    now += absl::Seconds(1);
    history.Add(fault);
    Judgement judgement = JudgeFault(history, fault, options, now);
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
  std::vector<int64_t> delays;
  for (int i = 0; i < 10; ++i) delays.push_back(absl::ToInt64Seconds(court.Judge(Crash(5)).delay));
  EXPECT_EQ(delays, (std::vector<int64_t>{0, 1, 2, 4, 8, 16, 32, 60, 60, 60}));
  court.history.Refund();
  EXPECT_EQ(court.Judge(Crash(5)).delay, absl::ZeroDuration());
}

}  // namespace
}  // namespace outlast
