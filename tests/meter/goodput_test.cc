// Cases A to D are those that a published goodput library was run on; the true parts are sums of
// what happened.
#include "outlast/meter/goodput.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "tests/meter/ledger_builder.h"

namespace outlast {
namespace {

double Seconds(const Timeline& timeline, JobState state) {
  return static_cast<double>(timeline.in(state)) / 1e9;
}

int64_t SumOfParts(const Timeline& timeline) {
  return std::accumulate(timeline.state_ns.begin(), timeline.state_ns.end(), int64_t{0});
}

void ExpectParts(const Timeline& timeline, std::vector<std::pair<JobState, double>> parts) {
  double sum = 0;
  for (size_t i = 0; i < kJobStates; ++i) {
    const auto state = static_cast<JobState>(i);
    double want = 0;
    for (const auto& [name, seconds] : parts) want += name == state ? seconds : 0;
    EXPECT_EQ(timeline.in(state), Nanos(want)) << StateName(state);
    sum += want;
  }
  EXPECT_EQ(timeline.wall_ns, Nanos(sum));
  EXPECT_EQ(SumOfParts(timeline), timeline.wall_ns);
}

double GoodputPercent(const Timeline& timeline) { return *RatiosOf(timeline, {}).goodput * 100; }

// Start-up 10 s, 51 steps of 10 s, down for 1000 s, then steps from `resume` on.
LedgerBuilder OneOutage(int64_t resume, int64_t count) {
  LedgerBuilder ledger;
  ledger.Up(0, 1)
      .Steps(10, 1, 0, 51, 10)
      .Killed(520, 1)
      .Up(1520, 2)
      .Steps(1530, 2, resume, count, 10);
  return ledger;
}

TEST(Goodput, OfACleanRunIsProductiveOverWall) {  // case A
  const Timeline timeline = LedgerBuilder().Up(0, 1).Steps(10, 1, 0, 101, 10).Build();
  ExpectParts(timeline, {{JobState::kProductive, 1010}, {JobState::kInit, 10}});
  EXPECT_NEAR(GoodputPercent(timeline), 99.02, 0.005);
  EXPECT_TRUE(timeline.interruptions.empty());
}

TEST(Goodput, SeesAnOutageBeforeAStepNeverLogged) {  // case B
  const Timeline timeline = OneOutage(51, 50).Build();
  ExpectParts(timeline,
              {{JobState::kProductive, 1010}, {JobState::kRecovery, 1000}, {JobState::kInit, 20}});
  EXPECT_NEAR(GoodputPercent(timeline), 49.75, 0.005);
  ASSERT_EQ(timeline.interruptions.size(), 1u);
  EXPECT_EQ(timeline.interruptions[0].steps_lost, 0);
}

TEST(Goodput, CountsStepsThatRunAgainAsLostOnce) {  // case C
  const Timeline timeline = OneOutage(41, 60).Build();
  ExpectParts(timeline, {{JobState::kProductive, 1010},
                         {JobState::kLostWork, 100},
                         {JobState::kRecovery, 1000},
                         {JobState::kInit, 20}});
  EXPECT_NEAR(GoodputPercent(timeline), 47.42, 0.005);
  EXPECT_EQ(timeline.interruptions.at(0).steps_lost, 10);
}

TEST(Goodput, TakesTheLoadersTimeOutOfTheStep) {  // case D
  const Timeline timeline = LedgerBuilder().Up(0, 1).Steps(2, 1, 0, 101, 2, 8).Build();
  ExpectParts(timeline,
              {{JobState::kProductive, 202}, {JobState::kDataWait, 808}, {JobState::kInit, 2}});
  EXPECT_NEAR(GoodputPercent(timeline), 19.96, 0.005);
}

TEST(Goodput, WorksForStepsBelowASecondAndWithoutAnEnd) {
  const Timeline timeline = LedgerBuilder().Up(0, 1).Steps(1, 1, 0, 100, 0.5).Build();
  ExpectParts(timeline, {{JobState::kProductive, 50}, {JobState::kInit, 1}});
}

TEST(Goodput, RelabelsOnlyProductiveTime) {
  // The ten lost steps waited 3 s each for data: that was not work, and stays what it was.
  LedgerBuilder ledger;
  ledger.Up(0, 1).Steps(10, 1, 0, 51, 7, 3).Killed(520, 1).Up(530, 2).Steps(540, 2, 41, 10, 7, 3);
  ExpectParts(ledger.Build(), {{JobState::kInit, 20},
                               {JobState::kDataWait, 153 + 30},
                               {JobState::kProductive, 41 * 7 + 70},
                               {JobState::kLostWork, 70},
                               {JobState::kRecovery, 10}});
}

TEST(Goodput, LosesAnUnfinishedStepWithItsDataWaitUpToTheLastProgress) {
  // Step 5 began at 60, moved last at 64, was found hung at 94; the new generation came at 95 and
  // stepped at 100.
  LedgerBuilder ledger;
  ledger.Up(0, 1, 0).Up(0, 1, 1).Steps(10, 1, 0, 5, 10);
  StepEntry unfinished = LedgerBuilder::Step(60, 1, 5, 36, 2);
  unfinished.flags = kStepAborted;
  ledger.Add(unfinished).Detected(94, 64, 1, 1, 5, "hang", "rank 1 is stopped");
  ledger.Add(CommitEntry{.time_ns = Nanos(95), .generation = 2, .world = 2})
      .Steps(100, 2, 5, 5, 10);
  const Timeline timeline = ledger.Build();
  ExpectParts(timeline, {{JobState::kInit, 10 + 5},
                         {JobState::kProductive, 100},
                         {JobState::kLostWork, 4},
                         {JobState::kHangWait, 30},
                         {JobState::kRecovery, 1}});
  const Interruption& it = timeline.interruptions.at(0);
  EXPECT_EQ(it.rank, 1);
  EXPECT_EQ(it.detected_ns - it.failed_ns, Nanos(30));
  EXPECT_EQ(*it.recovered_ns, Nanos(95));
  EXPECT_EQ(*it.first_step_ns, Nanos(100));
  EXPECT_EQ(it.steps_lost, 0);
}

// Killed at 52 s, in step 4; its ranks left that at 53, and waited for the agent that came at 90.
LedgerBuilder LostAgent() {
  LedgerBuilder ledger;
  ledger.Up(0, 1).Steps(10, 1, 0, 4, 10);
  StepEntry left = LedgerBuilder::Step(50, 1, 4, 3);
  left.flags = kStepAborted;
  ledger.Add(left).Detected(90, 52, 1, -1, -1, kAgentLost, "the next agent");
  ledger.Add(CommitEntry{.time_ns = Nanos(91), .generation = 2, .world = 1});
  return ledger;
}

TEST(Goodput, OfALostAgentIsAnOutageAndNoLostWork) {
  const Timeline timeline = LostAgent().Steps(93, 2, 5, 2, 10).Build();
  ExpectParts(timeline, {{JobState::kInit, 10 + 2},
                         {JobState::kProductive, 43 + 20},
                         {JobState::kRecovery, 91 - 53}});
  const Interruption& it = timeline.interruptions.at(0);
  EXPECT_EQ(it.detected_ns - it.failed_ns, Nanos(38));
  EXPECT_EQ(*it.first_step_ns, Nanos(93));
  EXPECT_EQ(it.steps_lost, 0);
  EXPECT_EQ(it.step, -1);
  EXPECT_TRUE(it.is_recovered());
  EXPECT_FALSE(it.is_unattended()) << "somebody started the next agent";
}

TEST(Goodput, OfALostAgentLosesTheStepThatIsRunAgain) {
  const Timeline timeline = LostAgent().Steps(93, 2, 4, 3, 10).Build();
  ExpectParts(timeline, {{JobState::kInit, 10 + 2},
                         {JobState::kProductive, 40 + 30},
                         {JobState::kLostWork, 3},
                         {JobState::kRecovery, 91 - 53}});
}

TEST(Goodput, OfALostAgentKeepsTheStepsThatRanksMadeMeanwhile) {
  // A rank that nobody could tell went on to 80.
  LedgerBuilder ledger;
  ledger.Up(0, 1).Steps(10, 1, 0, 7, 10).Detected(90, 52, 1, -1, -1, kAgentLost, "the next agent");
  ledger.Add(CommitEntry{.time_ns = Nanos(91), .generation = 2, .world = 1}).Steps(93, 2, 7, 1, 10);
  ExpectParts(ledger.Build(),
              {{JobState::kInit, 10 + 2}, {JobState::kProductive, 80}, {JobState::kRecovery, 11}});
}

TEST(Goodput, OfALostAgentSaysNothingOfProgramsWithoutSteps) {
  LedgerBuilder ledger;
  ledger.Up(0, 1).Detected(90, 52, 1, -1, -1, kAgentLost, "the next agent");
  ledger.Add(CommitEntry{.time_ns = Nanos(91), .generation = 2, .world = 1}).End(100);
  const Timeline timeline = ledger.Build();
  ExpectParts(timeline, {{JobState::kInit, 100}});
  EXPECT_TRUE(timeline.interruptions.at(0).is_recovered());
}

TEST(Goodput, KeepsAStepThatWasLeftEarlyWhenTrainingWentOnBehindIt) {
  // The abort came after step 3 was sealed: generation 2 goes on with step 4.
  LedgerBuilder ledger;
  ledger.Up(0, 1).Steps(0, 1, 0, 3, 10);
  StepEntry left = LedgerBuilder::Step(30, 1, 3, 10);
  left.flags = kStepAborted;
  ledger.Add(left).Killed(40, 1).Up(41, 2).Steps(42, 2, 4, 1, 10);
  ExpectParts(ledger.Build(),
              {{JobState::kProductive, 50}, {JobState::kRecovery, 1}, {JobState::kInit, 1}});
}

TEST(Goodput, KeepsAStepThatWasCutAndRunAgainLost) {
  // Step 3 is cut, and run again by generation 2; that generation 3 goes on behind it, with step 6,
  // does not make the first attempt whole.
  LedgerBuilder ledger;
  ledger.Up(0, 1).Steps(0, 1, 0, 3, 10);
  StepEntry left = LedgerBuilder::Step(30, 1, 3, 5);
  left.flags = kStepAborted;
  ledger.Add(left).Killed(35, 1).Up(36, 2).Steps(36, 2, 3, 3, 10);
  ledger.Killed(66, 2).Up(67, 3).Steps(67, 3, 6, 1, 10);
  const Timeline timeline = ledger.Build();
  ExpectParts(timeline,
              {{JobState::kProductive, 70}, {JobState::kLostWork, 5}, {JobState::kRecovery, 2}});
  int lost = 0;
  for (const JobStep& step : timeline.steps) {
    lost += step.is_lost ? 1 : 0;
    EXPECT_EQ(step.is_lost, (step.flags & kStepAborted) != 0);
  }
  EXPECT_EQ(lost, 1);
}

TEST(Goodput, CountsWorkLostTwiceAsTwoLosses) {
  // Steps 200..211, back to 200, 200..204, back to 200 again: 17 lost seconds, each once.
  LedgerBuilder ledger;
  ledger.Up(0, 1).Steps(0, 1, 200, 12, 1).Killed(12, 1).Up(12, 2).Steps(12, 2, 200, 5, 1);
  ledger.Killed(17, 2).Up(17, 3).Steps(17, 3, 200, 30, 1);
  const Timeline timeline = ledger.Build();
  ExpectParts(timeline, {{JobState::kProductive, 30}, {JobState::kLostWork, 17}});
  EXPECT_EQ(timeline.interruptions.at(0).steps_lost, 12);
  EXPECT_EQ(timeline.interruptions.at(1).steps_lost, 5);
}

TEST(Goodput, FallsBackFurtherThanTheGenerationBefore) {
  // Generation 2 went on with 8, generation 3 had to take an older checkpoint: 4.
  LedgerBuilder ledger;
  ledger.Up(0, 1).Steps(0, 1, 0, 10, 1).Killed(10, 1).Up(10, 2).Steps(10, 2, 8, 2, 1);
  ledger.Killed(12, 2).Up(12, 3).Steps(12, 3, 4, 6, 1);
  ExpectParts(ledger.Build(), {{JobState::kProductive, 4 + 6}, {JobState::kLostWork, 2 + 6}});
}

TEST(Goodput, LosesStepsThatWereNotRunAgainYet) {
  // The rollback is known, but no step of the new generation: what was past it is lost all the
  // same.
  LedgerBuilder ledger;
  ledger.Up(0, 1).Steps(0, 1, 0, 10, 1).Killed(10, 1).Up(11, 2);
  ledger.Add(RollbackEntry{.time_ns = Nanos(12),
                           .generation = 2,
                           .resume_step = 7,
                           .reached_step = 10,
                           .source = StateSource::kDisk});
  const Timeline timeline = ledger.Build();
  ExpectParts(timeline, {{JobState::kProductive, 7},
                         {JobState::kLostWork, 3},
                         {JobState::kRecovery, 1},
                         {JobState::kInit, 1}});
  EXPECT_EQ(timeline.interruptions.at(0).steps_lost, 3);
  EXPECT_EQ(timeline.interruptions.at(0).source, "disk");
  EXPECT_FALSE(timeline.interruptions.at(0).is_recovered());
}

TEST(Goodput, ShowsSavesEvalAndRestoreApart) {
  LedgerBuilder ledger;
  ledger.Up(1, 1);
  ledger.Add(RestoreEntry{.start_ns = Nanos(2),
                          .end_ns = Nanos(5),
                          .generation = 1,
                          .step = 0,
                          .source = StateSource::kDisk});
  StepEntry step = LedgerBuilder::Step(6, 1, 0, 10);
  step.end_ns += Nanos(2);
  step.checkpoint_stall_ns = Nanos(2);
  ledger.Add(step);
  ledger.Add(SectionEntry{
      .start_ns = Nanos(18), .end_ns = Nanos(21), .generation = 1, .phase = Phase::kEval});
  ledger.Steps(22, 1, 1, 1, 10).End(40);
  ExpectParts(ledger.Build(), {{JobState::kQueue, 1},
                               {JobState::kInit, 2},
                               {JobState::kRestore, 3},
                               {JobState::kProductive, 20},
                               {JobState::kCheckpointStall, 2},
                               {JobState::kEval, 3},
                               {JobState::kIdleHeld, 9}});
}

TEST(Goodput, TakesTheExcessOfTheFirstStepsAsWarmUp) {
  LedgerBuilder ledger;
  ledger.Up(0, 1).Steps(0, 1, 0, 1, 25).Steps(25, 1, 1, 1, 10.5).Steps(35.5, 1, 2, 20, 10);
  // 15 s of the first; half a second is noise.
  ExpectParts(ledger.Build(),
              {{JobState::kWarmUp, 15}, {JobState::kProductive, 25 + 10.5 + 200 - 15}});
}

TEST(Goodput, CountsTheStepOfOneRankAndTheTokensOfAll) {
  LedgerBuilder ledger;
  ledger.Up(0, 1, 0).Up(0, 1, 1).Steps(0, 1, 0, 5, 10, 0, 1).Steps(0, 1, 0, 5, 10, 0, 0);
  const Timeline timeline = ledger.Build();
  ExpectParts(timeline, {{JobState::kProductive, 50}});
  ASSERT_EQ(timeline.steps.size(), 5u);
  EXPECT_EQ(timeline.steps[0].tokens_real, 2000u);
  EXPECT_EQ(timeline.steps[0].ranks, 2);
}

TEST(Goodput, ReadsTheSameStepTwiceOnce) {
  LedgerBuilder ledger;
  ledger.Up(0, 1).Steps(0, 1, 0, 5, 10).Steps(0, 1, 0, 5, 10);
  const Timeline timeline = ledger.Build();
  ExpectParts(timeline, {{JobState::kProductive, 50}});
  EXPECT_EQ(timeline.steps[0].tokens_real, 1000u);
}

TEST(Goodput, JoinsTwoInvocationsOfAKilledJob) {
  // The agent died at 100; 30 s later the same command ran again and went on with step 9.
  LedgerBuilder first;
  first.Up(0, 1).Steps(0, 1, 0, 10, 10);
  LedgerBuilder second(130, 1e9 + 130);
  second.Up(130, 1).Steps(140, 1, 9, 10, 10).End(240);
  const std::vector<RunEntries> runs = {second.entries(), first.entries()};  // in any order
  const Timeline timeline = BuildTimeline(runs);
  ExpectParts(timeline, {{JobState::kProductive, 190},
                         {JobState::kLostWork, 10},
                         {JobState::kRecovery, 30},
                         {JobState::kInit, 10}});
  ASSERT_EQ(timeline.interruptions.size(), 1u);
  EXPECT_EQ(timeline.interruptions[0].fault_class, "job killed");
  EXPECT_EQ(timeline.interruptions[0].steps_lost, 1);
  EXPECT_FALSE(timeline.interruptions[0].is_unattended());
  EXPECT_FALSE(timeline.is_estimated);
  EXPECT_DOUBLE_EQ(*RatiosOf(timeline, {}).unattended_recovery_rate, 0);
}

TEST(Goodput, JoinsInvocationsThatOverlapWhileTheFirstDies) {
  // The agent was killed at 100 and started again at once; its last rank lived until 100.5.
  LedgerBuilder first;
  StepEntry open = LedgerBuilder::Step(100, 1, 10, 0.5);
  open.flags = kStepAborted;
  first.Up(0, 1).Steps(0, 1, 0, 10, 10).Add(open);
  LedgerBuilder second(100.25, 1e9 + 100.25);
  second.Up(101, 1).Steps(102, 1, 10, 1, 10).End(112);
  const std::vector<RunEntries> runs = {first.entries(), second.entries()};
  const Timeline timeline = BuildTimeline(runs);
  EXPECT_FALSE(timeline.is_estimated);
  EXPECT_EQ(timeline.in(JobState::kProductive), Nanos(110));
  EXPECT_EQ(timeline.in(JobState::kUnknown), 0);
  EXPECT_EQ(SumOfParts(timeline), timeline.wall_ns);
  EXPECT_EQ(timeline.wall_ns, Nanos(112));
  ASSERT_EQ(timeline.interruptions.size(), 1u);
  EXPECT_EQ(timeline.interruptions[0].detected_ns, Nanos(100.25));
  EXPECT_EQ(timeline.interruptions[0].first_step_ns, Nanos(102));
}

TEST(Goodput, WaitsInTheQueueBetweenARunThatEndedAndTheNext) {
  LedgerBuilder first;
  first.Up(0, 1).Steps(0, 1, 0, 10, 1).End(10, 80);
  LedgerBuilder second(50, 1e9 + 50);
  second.Up(50, 1).Steps(50, 1, 10, 10, 1).End(60);
  const std::vector<RunEntries> runs = {first.entries(), second.entries()};
  const Timeline timeline = BuildTimeline(runs);
  ExpectParts(timeline, {{JobState::kProductive, 20}, {JobState::kQueue, 40}});
  EXPECT_DOUBLE_EQ(GoodputPercent(timeline), 100);
  EXPECT_NEAR(*RatiosOf(timeline, {}).occupancy_goodput, 1.0 / 3, 1e-12);
}

TEST(Goodput, BridgesAnotherBootByWallTimeAndSaysSo) {
  LedgerBuilder first(1000, 1e9, "one boot");
  first.Up(1000, 1).Steps(1000, 1, 0, 10, 1);
  LedgerBuilder second(5, 1e9 + 70, "another boot");
  second.Up(5, 1).Steps(5, 1, 10, 10, 1).End(15);
  const std::vector<RunEntries> runs = {first.entries(), second.entries()};
  const Timeline timeline = BuildTimeline(runs);
  ExpectParts(timeline, {{JobState::kProductive, 20}, {JobState::kUnknown, 60}});
  EXPECT_TRUE(timeline.is_estimated);
}

TEST(Goodput, NeverGoesBackWhenTheWallClockDid) {
  LedgerBuilder first(1000, 1e9, "one boot");
  first.Up(1000, 1).Steps(1000, 1, 0, 10, 1);
  LedgerBuilder second(5, 1e9 + 3, "another boot");
  second.Up(5, 1).Steps(5, 1, 10, 10, 1).End(15);
  const std::vector<RunEntries> runs = {first.entries(), second.entries()};
  ExpectParts(BuildTimeline(runs), {{JobState::kProductive, 20}});
}

TEST(Goodput, GivesTheRatiosTheirThreeNames) {
  LedgerBuilder ledger;
  ledger.Up(20, 1).Steps(30, 1, 0, 10, 10);
  ledger.Detected(130, 130, 1, 0, 10, "crash", "exit code 1")
      .Up(131, 2)
      .Steps(140, 2, 10, 1, 10)
      .End(150);
  const GoodputRatios ratios = RatiosOf(ledger.Build(), 0.4);
  EXPECT_DOUBLE_EQ(*ratios.goodput, 110.0 / 130);
  EXPECT_DOUBLE_EQ(*ratios.occupancy_goodput, 110.0 / 150);
  EXPECT_DOUBLE_EQ(*ratios.effective_flops_ratio, 0.4 * 110 / 130);
  EXPECT_EQ(*ratios.mtbi_ns, Nanos(130));
  EXPECT_EQ(*ratios.restore_time_ns, Nanos(10));
  EXPECT_DOUBLE_EQ(*ratios.unattended_recovery_rate, 1);
}

TEST(Goodput, DoesNotCountAPreemptionAsAFailure) {
  LedgerBuilder ledger;
  ledger.Up(0, 1)
      .Steps(0, 1, 0, 10, 10)
      .Detected(100, 100, 1, 0, 10, "preempt", "SIGTERM")
      .End(101, 80);
  const GoodputRatios ratios = RatiosOf(ledger.Build(), {});
  EXPECT_FALSE(ratios.mtbi_ns.has_value());
  EXPECT_FALSE(ratios.unattended_recovery_rate.has_value());
}

TEST(Goodput, OfNothingIsNothing) {
  const Timeline timeline = BuildTimeline({});
  EXPECT_EQ(timeline.wall_ns, 0);
  EXPECT_EQ(SumOfParts(timeline), 0);
  EXPECT_FALSE(RatiosOf(timeline, 0.5).goodput.has_value());
  EXPECT_FALSE(RatiosOf(timeline, 0.5).effective_flops_ratio.has_value());
}

TEST(Goodput, OfAJobThatNeverStepsIsInit) {
  ExpectParts(LedgerBuilder().Up(2, 1).End(10, 1).Build(),
              {{JobState::kQueue, 2}, {JobState::kInit, 8}});
}

TEST(Goodput, PartsSumToWallForEveryEventOrder) {
  // The order of the records changes nothing at all.
  LedgerBuilder ledger = OneOutage(41, 60);
  ledger.Detected(3000, 2990, 2, 0, 101, "hang", "no progress")
      .Up(3010, 3)
      .Steps(3020, 3, 100, 5, 10)
      .End(3100);
  const Timeline want = ledger.Build();
  std::mt19937 random(11);
  for (int i = 0; i < 50; ++i) {
    RunEntries shuffled = ledger.entries();
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    const Timeline got = BuildTimeline({&shuffled, 1});
    EXPECT_EQ(got.state_ns, want.state_ns);
    EXPECT_EQ(SumOfParts(got), got.wall_ns);
  }
}

TEST(Goodput, PartsSumToWallForAnyRecordsAtAll) {
  const unsigned seed = 4711;
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  const auto time = [&]() -> int64_t {
    const int64_t kind = pick(0, 40);
    if (kind == 0) return INT64_MIN;
    if (kind == 1) return INT64_MAX;
    return pick(-5, 300);
  };
  for (int round = 0; round < 3000; ++round) {
    std::vector<RunEntries> runs(static_cast<size_t>(pick(1, 3)));
    for (RunEntries& run : runs) {
      for (int64_t n = pick(0, 25); n > 0; --n) {
        const auto generation = static_cast<uint64_t>(pick(0, 4));
        const auto slot = static_cast<int32_t>(pick(-1, 3));
        switch (pick(0, 10)) {
          case 0:
            run.push_back(ClockDomainEntry{.boottime_ns = time(), .realtime_ns = time()});
            break;
          case 1:
            run.push_back(UpEntry{.time_ns = time(), .generation = generation, .slot = slot});
            break;
          case 2:
            run.push_back(DownEntry{.time_ns = time(),
                                    .generation = generation,
                                    .slot = slot,
                                    .cause = static_cast<DownCause>(pick(0, 3))});
            break;
          case 3:
            run.push_back(CommitEntry{.time_ns = time(), .generation = generation});
            break;
          case 4:
            run.push_back(DetectedEntry{
                .time_ns = time(), .last_progress_ns = time(), .generation = generation});
            break;
          case 5:
            run.push_back(RollbackEntry{.time_ns = time(),
                                        .generation = generation,
                                        .resume_step = time(),
                                        .reached_step = time(),
                                        .source = static_cast<StateSource>(pick(0, 9))});
            break;
          case 6:
            run.push_back(SectionEntry{
                .start_ns = time(), .end_ns = time(), .phase = static_cast<Phase>(pick(0, 99))});
            break;
          case 7:
            run.push_back(RestoreEntry{.start_ns = time(),
                                       .end_ns = time(),
                                       .generation = generation,
                                       .step = time(),
                                       .source = static_cast<StateSource>(pick(0, 9))});
            break;
          case 8:
            run.push_back(EndEntry{.time_ns = time()});
            break;
          default:
            run.push_back(StepEntry{.start_ns = time(),
                                    .end_ns = time(),
                                    .generation = generation,
                                    .slot = slot,
                                    .step = pick(0, 9),
                                    .data_ns = time(),
                                    .forward_ns = time(),
                                    .backward_ns = time(),
                                    .checkpoint_stall_ns = time(),
                                    .flags = static_cast<uint16_t>(pick(0, 15))});
        }
      }
    }
    const Timeline timeline = BuildTimeline(runs);
    ASSERT_EQ(SumOfParts(timeline), timeline.wall_ns) << "round " << round;
    for (const int64_t part : timeline.state_ns) ASSERT_GE(part, 0) << "round " << round;
  }
}

TEST(Goodput, OfAYearOfInterruptionsMeetsTheTruth) {
  // Steps of 100 s; on average every 3 hours a fault, found after 20 s, 40 s of recovery, 30 s of
  // init, up to 10 steps lost.
  const unsigned seed = 365;
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  std::exponential_distribution<double> until_fault(1.0 / 108);
  LedgerBuilder ledger;
  double now = 0, lost = 0, down = 0;
  int64_t step = 0;
  uint64_t generation = 1;
  ledger.Up(0, 1);
  while (now < 365 * 86400.0) {
    const auto count = static_cast<int64_t>(until_fault(random)) + 1;
    ledger.Steps(now, generation, step, count, 100);
    now += static_cast<double>(count) * 100;
    step += count;
    const int64_t back =
        std::min<int64_t>(count, std::uniform_int_distribution<int64_t>(0, 10)(random));
    ledger.Detected(now + 20, now, generation, 0, step, "crash", "pidfd");
    ledger.Up(now + 60, ++generation);
    now += 90;
    down += 90;
    step -= back;
    lost += static_cast<double>(back) * 100;
  }
  ledger.Steps(now, generation, step, 1, 100);
  now += 100;
  const Timeline timeline = ledger.Build();
  EXPECT_EQ(SumOfParts(timeline), timeline.wall_ns);
  EXPECT_EQ(Seconds(timeline, JobState::kLostWork), lost);
  EXPECT_NEAR(*RatiosOf(timeline, {}).goodput, (now - lost - down) / now, 1e-9);
}

}  // namespace
}  // namespace outlast
