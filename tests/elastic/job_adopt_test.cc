// A job whose agent was killed, under the next one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <string>
#include <variant>
#include <vector>

#include "outlast/elastic/job.h"
#include "outlast/elastic/job_memo.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using Where = JobMemo::Where;

JobOptions World(int world) {
  JobOptions options;
  options.world = world;
  return options;
}

template <typename Action>
std::vector<Action> All(const std::vector<JobAction>& actions) {
  std::vector<Action> found;
  for (const JobAction& action : actions) {
    if (const auto* one = std::get_if<Action>(&action)) found.push_back(*one);
  }
  return found;
}

// Two joined trainers in generation 1; their incarnations are 1 and 2.
Job TwoTrainers() {
  Job job(World(2));
  job.Step(StartEvent{}, {});
  for (int slot = 0; slot < 2; ++slot) {
    const auto incarnation = static_cast<uint64_t>(slot) + 1;
    job.Step(WorkerJoined{slot, incarnation}, {});
    job.Step(WorkerStaged{slot, incarnation, 0}, {});
  }
  return job;
}

TEST(AdoptedJob, AbortsTheGenerationAndFormsTheNextWithTheLiving) {
  Job next(World(2), TwoTrainers().Memo());

  const auto start = next.Step(StartEvent{}, {});
  ASSERT_EQ(All<AbortGeneration>(start).size(), 1u);
  EXPECT_EQ(All<AbortGeneration>(start)[0].generation, 1u);
  EXPECT_TRUE(All<SpawnWorker>(start).empty());
  EXPECT_TRUE(All<CommitGeneration>(start).empty());
  EXPECT_TRUE(All<CommitGeneration>(next.Step(WorkerStaged{0, 1, 1}, {})).empty());
  const auto commits = All<CommitGeneration>(next.Step(WorkerStaged{1, 2, 1}, {}));
  ASSERT_EQ(commits.size(), 1u);
  EXPECT_EQ(commits[0].generation, 2u);
  EXPECT_THAT(commits[0].members, ElementsAre(0, 1));
}

TEST(AdoptedJob, TakesASurvivorThatNeverHeardOfTheLastCommit) {
  JobMemo memo = TwoTrainers().Memo();
  memo.generation = 5;  // committed in the moment of the kill
  Job next(World(2), memo);
  next.Step(StartEvent{}, {});
  next.Step(WorkerStaged{0, 1, 1}, {});

  EXPECT_EQ(All<CommitGeneration>(next.Step(WorkerStaged{1, 2, 1}, {})).size(), 1u);
}

TEST(AdoptedJob, WaitsForNobodyWhoNeverJoinsAndRestartsNobody) {
  Job job(World(2));
  job.Step(StartEvent{}, {});
  Job next(World(2), job.Memo());

  const auto start = next.Step(StartEvent{}, {});
  ASSERT_EQ(All<CommitGeneration>(start).size(), 1u);
  EXPECT_EQ(All<CommitGeneration>(start)[0].generation, 2u);
  EXPECT_TRUE(All<SpawnWorker>(start).empty());
  EXPECT_TRUE(All<KillWorker>(start).empty());
  next.Step(WorkerEnded{0, 1, {}}, {});
  const auto finish = All<FinishJob>(next.Step(WorkerEnded{1, 2, {}}, {}));
  ASSERT_EQ(finish.size(), 1u);
  EXPECT_EQ(finish[0].exit_code, 0);
}

// It hung before its agent was killed, or hangs since: nobody else is to blame.
TEST(AdoptedJob, NamesAndReplacesASurvivorThatDoesNotComeBackInTime) {
  Job next(World(2), TwoTrainers().Memo());
  next.Step(StartEvent{}, {});
  next.Step(WorkerStaged{0, 1, 1}, {});

  const auto late = next.Step(TimerFired{1}, {.now = next.options().soft_abort});
  ASSERT_EQ(All<KillWorker>(late).size(), 1u);
  EXPECT_EQ(All<KillWorker>(late)[0].slot, 1);
  const auto faults = All<RecordFault>(late);
  ASSERT_EQ(faults.size(), 1u);
  EXPECT_EQ(faults[0].fault.fault_class, FaultClass::kHang);
  EXPECT_EQ(faults[0].fault.rank, 1);
  EXPECT_EQ(faults[0].fault.found_by, "adoption");
  EXPECT_FALSE(faults[0].fault.victim);
  EXPECT_EQ(faults[0].budget_used, 1);
  // A later generation's end finds nobody late for that adoption.
  next.Step(WorkerEnded{1, 2, {.signal = SIGTERM, .by_us = true}}, {.now = absl::Seconds(11)});
  next.Step(WorkerJoined{1, 3}, {.now = absl::Seconds(11)});
  next.Step(WorkerStaged{1, 3, 0}, {.now = absl::Seconds(11)});
  next.Step(WorkerEnded{0, 1, {.signal = SIGSEGV}}, {.now = absl::Seconds(12)});
  const auto unwinding = next.Step(TimerFired{1}, {.now = absl::Seconds(23)});
  EXPECT_TRUE(All<RecordFault>(unwinding).empty());
}

TEST(AdoptedJob, ChargesSeveralThatAreLateAsOneFault) {
  JobOptions options = World(2);
  options.max_restarts = 1;
  Job next(options, TwoTrainers().Memo());
  next.Step(StartEvent{}, {});

  const auto late = next.Step(TimerFired{1}, {.now = next.options().soft_abort});
  ASSERT_EQ(All<RecordFault>(late).size(), 1u);
  EXPECT_THAT(All<RecordFault>(late)[0].fault.detail, ::testing::HasSubstr("rank 0, rank 1: "));
  EXPECT_EQ(All<KillWorker>(late).size(), 2u);
}

TEST(AdoptedJob, FillsTheSlotOfATrainerThatIsGone) {
  JobMemo memo = TwoTrainers().Memo();
  memo.slots[1].where = Where::kNone;
  memo.slots[1].joined = memo.slots[1].plain = false;
  Job next(World(2), memo);

  const auto spawns = All<SpawnWorker>(next.Step(StartEvent{}, {}));
  ASSERT_EQ(spawns.size(), 1u);
  EXPECT_EQ(spawns[0].slot, 1);
  EXPECT_EQ(spawns[0].incarnation, 3u);  // never one that was there before
  EXPECT_EQ(spawns[0].generation, 2u);
  EXPECT_EQ(spawns[0].attempt, 1);
}

TEST(AdoptedJob, KeepsWhatWasChargedBefore) {
  Job job = TwoTrainers();
  job.Step(WorkerEnded{1, 2, {.signal = SIGSEGV}}, {});  // 1 of 3
  ASSERT_EQ(job.Memo().history.crashes, 1);
  JobMemo memo = job.Memo();
  memo.slots[1] = {.where = Where::kInside, .joined = true, .incarnation = 3, .born = 2};
  Job next(World(2), memo);
  next.Step(StartEvent{}, {});
  next.Step(WorkerStaged{0, 1, 1}, {});
  next.Step(WorkerStaged{1, 3, 1}, {});

  const auto faults = All<RecordFault>(next.Step(WorkerEnded{1, 3, {.signal = SIGBUS}}, {}));
  ASSERT_EQ(faults.size(), 1u);
  EXPECT_EQ(faults[0].budget_used, 2);
}

TEST(JobMemo, SaysThatAJobThatStopsIsNotToBeAdopted) {
  Job job = TwoTrainers();
  EXPECT_FALSE(job.Memo().is_ending);
  job.Step(StopAsked{SIGTERM}, {});
  EXPECT_TRUE(job.Memo().is_ending);
}

TEST(JobMemo, IsTheSameAfterItsBytesAndRefusedWhenTheyAreCut) {
  Job job = TwoTrainers();
  job.Step(WorkerEnded{1, 2, {.signal = SIGSEGV}}, {.now = absl::Seconds(7)});
  const JobMemo memo = job.Memo();
  const std::string bytes = EncodeJobMemo(memo);

  const auto read = DecodeJobMemo(bytes);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(*read == memo);
  for (size_t length = 0; length < bytes.size(); ++length)
    EXPECT_FALSE(DecodeJobMemo(bytes.substr(0, length)).ok()) << length;
}

TEST(JobMemo, OfTheLargestJobFitsAMessage) {
  JobMemo memo;
  memo.slots.resize(4096);
  EXPECT_LT(EncodeJobMemo(memo).size(), (128u << 10) - 256);
}

}  // namespace
}  // namespace outlast
