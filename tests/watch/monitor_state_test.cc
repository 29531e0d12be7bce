#include "watch/monitor_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/watch/sim_job.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// O25: steps of 0.2 s, time-out 2 s, polls of 1 s.
WatchdogOptions TwoSeconds() {
  WatchdogOptions options;
  options.floor = absl::Seconds(2);
  return options;
}

void ExpectOne(const SimWatch& watch, VerdictClass wanted, std::vector<int> culprits, double from,
               double to) {
  ASSERT_THAT(watch.findings, SizeIs(1));
  const SimWatch::Event& event = watch.findings.front();
  EXPECT_EQ(VerdictClassName(event.verdict.verdict_class), VerdictClassName(wanted))
      << event.verdict.reason;
  EXPECT_EQ(CulpritRanks(event.verdict), culprits);
  EXPECT_GE(event.at, from);
  EXPECT_LE(event.at, to);
}

SimJob::Extra Save(double seconds, double limit) {
  return {
      .seconds = seconds, .phase = Phase::kCheckpointWrite, .name = "save", .limit_seconds = limit};
}

// --- O25 ---

TEST(MonitorState, LeavesASaveWithinItsDeclaredLimitAlone) {
  for (const bool all_ranks : {true, false}) {
    SimJob job(4);
    job.extra = [all_ranks](int rank, uint64_t step) {
      return step % 100 == 0 && (all_ranks || rank == 0) ? Save(8, 10) : SimJob::Extra{};
    };
    SimWatch watch(job, TwoSeconds(), 4);
    watch.RunUntil(300);
    EXPECT_THAT(watch.findings, IsEmpty()) << watch.findings.front().verdict.reason;
  }
}

TEST(MonitorState, FindsASaveThatPassesItsDeclaredLimit) {
  SimJob job(4);
  double began = 0;
  job.extra = [&](int rank, uint64_t step) {
    if (step == 200 && rank == 0) began = job.step_end();
    return step == 200 && rank == 2 ? Save(15, 10) : SimJob::Extra{};
  };
  SimWatch watch(job, TwoSeconds(), 4);
  watch.RunUntil(100);
  ExpectOne(watch, VerdictClass::kCheckpointStall, {2}, began + 10, began + 12);
  EXPECT_EQ(watch.findings[0].verdict.culprits[0].section, "save");
  EXPECT_EQ(watch.findings[0].verdict.confidence, Confidence::kCertain);
}

TEST(MonitorState, FindsAStoppedRankBetweenTwoAndFourSeconds) {
  for (const double at :
       {60.01, 60.05, 60.1, 60.15, 60.2, 60.199}) {  // data, forward, backward, all-reduce
    SimJob job(4);
    job.holds = {{.rank = 1, .at = at, .is_stopped = true}};
    SimWatch watch(job, TwoSeconds(), 4);
    watch.RunUntil(90);
    // The deadline counts from the start of the section, up to a step before the stop.
    ExpectOne(watch, VerdictClass::kStopped, {1}, at + 2 - 0.2, at + 4);
  }
}

TEST(MonitorState, LeavesOneSlowStepAlone) {
  SimJob job(4);
  job.work = [](int rank, uint64_t step) { return rank == 3 && step == 300 ? 1.5 : 0.2; };
  SimWatch watch(job, TwoSeconds(), 4);
  watch.RunUntil(120);
  EXPECT_THAT(watch.findings, IsEmpty());
}

TEST(MonitorState, FreezesWhileTheWholeJobIsStopped) {
  SimJob job(4);
  for (int rank = 0; rank < 4; ++rank)
    job.holds.push_back({.rank = rank, .at = 60.05, .until = 70.05, .is_stopped = true});
  SimWatch watch(job, TwoSeconds(), 4);
  watch.RunUntil(120);
  EXPECT_EQ(watch.frozen_polls, 10);
  EXPECT_THAT(watch.findings, IsEmpty());
}

TEST(MonitorState, LearnsNothingFromAStopOfTheWholeJob) {
  SimJob job(4);
  for (int rank = 0; rank < 4; ++rank)
    job.holds.push_back({.rank = rank, .at = 60.05, .until = 70.05, .is_stopped = true});
  job.holds.push_back({.rank = 2, .at = 100.05, .is_stopped = true});
  SimWatch watch(job, TwoSeconds(), 4);
  watch.RunUntil(120);
  ExpectOne(watch, VerdictClass::kStopped, {2}, 100.05 + 2 - 0.2, 100.05 + 4);
}

// --- The fault plan ---

// Row 2: observe mode.
TEST(MonitorState, ReportsRecoveryAndIsArmedAgain) {
  SimJob job(4);
  job.holds = {{.rank = 1, .at = 60.05, .until = 90.05, .is_stopped = true},
               {.rank = 1, .at = 150.01, .until = 180, .is_stopped = true}};
  SimWatch watch(job, TwoSeconds(), 4);
  watch.RunUntil(140);
  ASSERT_THAT(watch.findings, SizeIs(1));
  ASSERT_THAT(watch.recoveries, SizeIs(1));
  EXPECT_GE(watch.recoveries[0].at, 90);
  EXPECT_LE(watch.recoveries[0].at, 92);
  watch.RunUntil(220);
  ASSERT_THAT(watch.findings, SizeIs(2));
  EXPECT_LE(watch.findings[1].at, 154);  // the first stop did not teach that steps take 30 s
  EXPECT_THAT(watch.recoveries, SizeIs(2));
}

// Row 3, and a read that blocks: found by the limit that steps taught.
TEST(MonitorState, FindsARankThatBlocksInItsLoader) {
  SimJob job(4);
  job.holds = {{.rank = 2, .at = 60.301}};
  job.work = [](int, uint64_t) { return 0.299; };
  SimWatch watch(job, TwoSeconds(), 4);
  watch.RunUntil(60.3);
  job.holds[0].at = job.step_end() + 0.01;  // the next step's data
  watch.RunUntil(90);
  ExpectOne(watch, VerdictClass::kDataLoaderStall, {2}, job.holds[0].at + 2, job.holds[0].at + 4);
  EXPECT_THAT(watch.findings[0].verdict.waiting, ElementsAre(0, 1, 3));
}

// Row 4: slow but progressing, 10 times the limit.
TEST(MonitorState, LeavesASlowSaveThatReportsProgressAlone) {
  SimJob job(2);
  job.extra = [](int, uint64_t step) {
    return step == 200 ? SimJob::Extra{.seconds = 100,
                                       .phase = Phase::kCheckpointWrite,
                                       .name = "save",
                                       .limit_seconds = 10,
                                       .makes_progress = true}
                       : SimJob::Extra{};
  };
  SimWatch watch(job, TwoSeconds(), 2);
  watch.RunUntil(300);
  EXPECT_THAT(watch.findings, IsEmpty());
}

// Row 14: late by twice the learned limit but within the declared one.
TEST(MonitorState, ListensToTheDeclaredLimitNotToTheLearnedOne) {
  SimJob job(2);
  job.extra = [](int, uint64_t step) {
    const double seconds = step == 500 ? 40 : 1;
    return step % 20 == 0 ? SimJob::Extra{.seconds = seconds,
                                          .phase = Phase::kInit,
                                          .name = "connect",
                                          .limit_seconds = 60}
                          : SimJob::Extra{};
  };
  SimWatch watch(job, TwoSeconds(), 2);
  watch.RunUntil(300);
  EXPECT_THAT(watch.findings, IsEmpty());
}

// Row 15: default options.
TEST(MonitorState, LeavesASlowFirstStepAlone) {
  SimJob job(4);
  job.work = [](int rank, uint64_t step) { return step == 1 && rank == 2 ? 100.0 : 5.0; };
  SimWatch watch(job, WatchdogOptions{}, 4);
  watch.RunUntil(1000);
  EXPECT_THAT(watch.findings, IsEmpty());
}

TEST(MonitorState, LeavesAnUnlearnedEvaluationOnOneRankAlone) {
  SimJob job(4);
  job.extra = [](int rank, uint64_t step) {
    return rank == 0 && step % 200 == 0
               ? SimJob::Extra{.seconds = 60, .phase = Phase::kEval, .name = "eval"}
               : SimJob::Extra{};
  };
  SimWatch watch(job, WatchdogOptions{}, 4);
  watch.RunUntil(3000);
  EXPECT_THAT(watch.findings, IsEmpty()) << watch.findings.front().verdict.reason;
}

// Row 16 and VLM-R1#257: nothing pending.
TEST(MonitorState, IsQuietWhileTheJobIdles) {
  SimJob job(2);
  job.extra = [](int, uint64_t step) {
    return step == 200 ? SimJob::Extra{.seconds = 3600, .in_section = false} : SimJob::Extra{};
  };
  SimWatch watch(job, TwoSeconds(), 2);
  watch.RunUntil(4000);
  EXPECT_THAT(watch.findings, IsEmpty());
}

TEST(MonitorState, FindsARankThatIsLostOutsideAnySection) {
  SimJob job(4);
  double began = 0;
  job.extra = [&](int rank, uint64_t step) {
    if (step == 200 && rank == 0) began = job.step_end();
    return step == 200 && rank == 1 ? SimJob::Extra{.seconds = 1e9, .in_section = false}
                                    : SimJob::Extra{};
  };
  SimWatch watch(job, TwoSeconds(), 4);
  watch.RunUntil(600);
  ExpectOne(watch, VerdictClass::kStuckOutsideComm, {1}, began + 300, began + 303);
}

// Row 17.
TEST(MonitorState, FreezesAfterSuspendLateLoopAndDebugger) {
  const auto hung_at_60 = [](SimJob* job) { job->holds = {{.rank = 1, .at = 60.05}}; };
  {
    SimJob job(2);
    hung_at_60(&job);
    SimWatch watch(job, TwoSeconds(), 2);
    watch.RunUntil(61);
    EXPECT_EQ(watch.Poll(1, 3600).frozen, FreezeReason::kSuspended);
    watch.RunUntil(64);
    EXPECT_THAT(watch.findings, IsEmpty());  // its deadline began again at 62
    watch.RunUntil(70);
    EXPECT_THAT(watch.findings, SizeIs(1));
  }
  {
    SimJob job(2);
    hung_at_60(&job);
    SimWatch watch(job, TwoSeconds(), 2);
    watch.RunUntil(61);
    EXPECT_EQ(watch.Poll(4).frozen, FreezeReason::kLateLoop);
    EXPECT_EQ(watch.Poll(3.9).frozen, FreezeReason::kNone);
  }
  {
    SimJob job(2);
    hung_at_60(&job);
    SimWatch watch(job, TwoSeconds(), 2);
    watch.adjust = [](PollInput* input) { input->looks[0].process = ProcessState::kTraced; };
    watch.RunUntil(100);
    EXPECT_THAT(watch.findings, IsEmpty());
  }
}

// O24: a rank died inside a section; the restarted job is healthy for ten times its limit.
TEST(MonitorState, IgnoresWhatAnOldIncarnationLeftOpen) {
  SimJob job(2);
  job.extra = [](int rank, uint64_t step) {
    return rank == 1 && step == 100 ? Save(1e9, 10) : SimJob::Extra{};
  };
  SimWatch watch(job, TwoSeconds(), 2);
  watch.RunUntil(25);
  ASSERT_GE(job.step(), 100u);
  const RankLook left_open = job.Looks()[1];
  ASSERT_THAT(left_open.progress.sections, SizeIs(1));

  // Generation 2: at first rank 1's tables are still the old ones, and now and then they come up
  // again.
  SimJob restarted(2);
  restarted.generation = 2;
  restarted.incarnation = 2;
  SimWatch again(restarted, TwoSeconds(), 2);
  int polls = 0;
  again.adjust = [&](PollInput* input) {
    if (++polls <= 5 || polls % 30 == 0) input->looks[1] = left_open;
  };
  again.RunUntil(100);
  EXPECT_THAT(again.findings, IsEmpty());
  EXPECT_GE(again.state().ignored_looks(), 5);
}

TEST(MonitorState, TellsTwoOpeningsOfOneSectionApart) {
  SimJob job(2);
  // 9 s of 10, again and again without a pause.
  job.extra = [](int, uint64_t) { return Save(9, 10); };
  SimWatch watch(job, TwoSeconds(), 2);
  watch.RunUntil(200);
  EXPECT_THAT(watch.findings, IsEmpty());
}

TEST(MonitorState, LearnsAnewInEachGeneration) {
  SimJob job(2);
  SimWatch watch(job, TwoSeconds(), 2);
  watch.RunUntil(60);
  const OpenSection data = job.Looks()[0].progress.sections[0];
  OpenSection section = data;
  section.phase = Phase::kData;
  section.name = "data";
  EXPECT_EQ(watch.state().book().For(&section, 0, true).limit, absl::Seconds(2));
  watch.state().Arm(2);
  EXPECT_EQ(watch.state().book().For(&section, 0, true).limit, absl::Seconds(180));
}

TEST(MonitorState, SaysNothingWhileDisarmed) {
  SimJob job(2);
  job.holds = {{.rank = 1, .at = 60.05, .is_stopped = true}};
  SimWatch watch(job, TwoSeconds(), 2);
  watch.RunUntil(60);
  watch.state().Disarm();
  watch.RunUntil(90);
  EXPECT_THAT(watch.findings, IsEmpty());
}

// The step log is exact: it teaches before polls alone would.
TEST(MonitorState, LearnsFromTheStepLog) {
  SimJob job(1);
  SimWatch watch(job, TwoSeconds(), 1);
  uint64_t logged = 0;
  watch.adjust = [&](PollInput* input) {
    for (; logged + 1 < job.step(); ++logged) {
      StepRecord record{};
      record.step = logged + 1;
      record.generation = 1;
      record.start_ns = 1;
      record.end_ns = 1 + 200'000'000;
      record.data_ns = 1'000'000'000;
      input->steps.push_back({0, record});
    }
  };
  watch.RunUntil(30);
  OpenSection data;
  data.phase = Phase::kData;
  data.name = "data";
  data.id = 5;
  // About 143 samples of 1 s: 5 s at first, and half the gap to 3 s less at 32, 64, 96 and 128.
  EXPECT_EQ(watch.state().book().For(&data, 0, true).limit, absl::Milliseconds(3125));
}

}  // namespace
}  // namespace outlast
