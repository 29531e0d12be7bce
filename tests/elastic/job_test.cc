#include "outlast/elastic/job.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A job and what a keeper knows of it. Each event returns its actions; `all` has them since the
// start.
struct Bench {
  explicit Bench(JobOptions options)
      : job(std::move(options)), incarnation(job.options().world, 0) {
    Give(StartEvent{});
  }

  std::vector<JobAction> Give(const JobEvent& event) {
    last = job.Step(event, {.now = now, .newest_step = newest_step});
    for (const JobAction& action : last) {
      if (const auto* spawn = std::get_if<SpawnWorker>(&action))
        incarnation[spawn->slot] = spawn->incarnation;
      if (const auto* arm = std::get_if<ArmTimer>(&action)) timer = arm->at;
      if (std::holds_alternative<DisarmTimer>(action)) timer.reset();
      if (const auto* finish = std::get_if<FinishJob>(&action)) finished = *finish;
      all.push_back(action);
    }
    const bool may_wait = job.phase() == JobPhase::kRunning || job.phase() == JobPhase::kDone ||
                          job.phase() == JobPhase::kForming;
    EXPECT_TRUE(timer.has_value() || may_wait) << "nothing bounds this wait";
    return last;
  }
  void Pass(absl::Duration time) {
    const absl::Duration until = now + time;
    while (timer && *timer <= until) {
      now = std::max(now, *timer);
      timer.reset();
      Give(TimerFired{1});
    }
    now = until;
  }
  void Join(int slot) { Give(WorkerJoined{slot, incarnation[slot]}); }
  void Stage(int slot, uint64_t left) { Give(WorkerStaged{slot, incarnation[slot], left}); }
  void Enter(int slot) {
    Join(slot);
    Stage(slot, 0);
  }
  void Finished(int slot) { Give(WorkerFinished{slot, incarnation[slot]}); }
  void End(int slot, ProcessEnd end) { Give(WorkerEnded{slot, incarnation[slot], end}); }
  void EnterAll() {
    for (int slot = 0; slot < job.options().world; ++slot) Enter(slot);
  }
  // Rank 1 of two dies, and the job re-forms without trouble.
  void Lose(ProcessEnd end) {
    const uint64_t generation = job.generation();
    End(1, end);
    if (job.phase() != JobPhase::kReforming) return;
    Stage(0, generation);
    Pass(absl::Minutes(1));  // any back-off
    Enter(1);
    EXPECT_EQ(job.generation(), generation + 1);
  }

  template <typename Action>
  std::vector<Action> In(const std::vector<JobAction>& actions) const {
    std::vector<Action> found;
    for (const JobAction& action : actions) {
      if (const auto* typed = std::get_if<Action>(&action)) found.push_back(*typed);
    }
    return found;
  }
  template <typename Action>
  std::vector<Action> Last() const {
    return In<Action>(last);
  }
  template <typename Action>
  std::vector<Action> All() const {
    return In<Action>(all);
  }

  absl::Duration now = absl::Seconds(1000);
  int64_t newest_step = 0;
  Job job;
  std::vector<uint64_t> incarnation;
  std::vector<JobAction> last, all;
  std::optional<absl::Duration> timer;
  std::optional<FinishJob> finished;
};

constexpr ProcessEnd kKill9{.signal = SIGKILL};
constexpr ProcessEnd kClean{};
constexpr ProcessEnd kOurTerm{.signal = SIGTERM, .by_us = true};

// --- Forming ---

TEST(Job, TheFirstGenerationIsCommittedAndThenSpawned) {
  Bench bench({.world = 2});
  ASSERT_TRUE(std::holds_alternative<CommitGeneration>(bench.all[0]));
  EXPECT_THAT(std::get<CommitGeneration>(bench.all[0]).members, ElementsAre(0, 1));
  ASSERT_EQ(bench.All<SpawnWorker>().size(), 2u);
  EXPECT_EQ(bench.All<SpawnWorker>()[1].attempt, 0);
  EXPECT_EQ(bench.All<SpawnWorker>()[1].generation, 1u);
  EXPECT_EQ(bench.job.phase(), JobPhase::kRunning);
}

TEST(Job, AWorkerThatIsStagedInACommittedGenerationNeedsNoSecondCommit) {
  Bench bench({.world = 2});
  bench.EnterAll();
  EXPECT_EQ(bench.All<CommitGeneration>().size(), 1u);
  EXPECT_TRUE(bench.job.is_whole());
}

TEST(Job, IsFinishedWhenAllBodiesReturnedAndAllProcessesEnded) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.Finished(0);
  bench.Finished(1);
  bench.End(1, kClean);
  EXPECT_FALSE(bench.finished);
  bench.End(0, kClean);
  ASSERT_TRUE(bench.finished);
  EXPECT_EQ(bench.finished->exit_code, 0);
}

TEST(Job, AFinalSaveThatFailedOrACrashAfterTheWorkIsNotHiddenByZero) {
  Bench unsaved({.world = 1});
  unsaved.EnterAll();
  unsaved.Give(FinalSaveFailed{"disk full"});
  unsaved.Finished(0);
  unsaved.End(0, kClean);
  EXPECT_EQ(unsaved.finished->exit_code, 88);
  EXPECT_EQ(unsaved.finished->code_if_saved, 0);
  Bench crashed({.world = 1});
  crashed.EnterAll();
  crashed.Finished(0);
  crashed.End(0, {.signal = SIGSEGV});
  EXPECT_EQ(crashed.finished->exit_code, 139);
  EXPECT_EQ(crashed.finished->code_if_saved, std::nullopt);
  EXPECT_EQ(crashed.All<SpawnWorker>().size(), 1u);
}

TEST(Job, AWorkerThatEndsBecauseTheFinalSaveFailedIsNotRestarted) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.Give(FinalSaveFailed{"disk full"});
  bench.End(0, {.code = 1});
  bench.End(1, {.code = 1});
  ASSERT_TRUE(bench.finished);
  EXPECT_EQ(bench.finished->exit_code, 88);
  EXPECT_EQ(bench.finished->code_if_saved, 0);
  EXPECT_EQ(bench.finished->reason, "disk full");
  EXPECT_EQ(bench.All<SpawnWorker>().size(), 2u);
}

TEST(Job, AFinalSaveThatSucceedsLaterEndsWithZero) {
  Bench bench({.world = 1});
  bench.EnterAll();
  bench.Give(FinalSaveFailed{"disk full"});
  bench.Give(CheckpointCommitted{40});
  bench.Finished(0);
  bench.End(0, kClean);
  EXPECT_EQ(bench.finished->exit_code, 0);
}

// --- Re-forming ---

TEST(Job, SurvivorsKeepTheirProcessAndTheDeadSlotIsRefilledAtOnce) {
  Bench bench({.world = 3});
  bench.EnterAll();

  bench.End(1, kKill9);
  ASSERT_EQ(bench.Last<AbortGeneration>().size(), 1u);
  EXPECT_EQ(bench.Last<AbortGeneration>()[0].generation, 1u);
  ASSERT_EQ(bench.Last<SpawnWorker>().size(), 1u);
  EXPECT_EQ(bench.Last<SpawnWorker>()[0].slot, 1);
  EXPECT_EQ(bench.Last<SpawnWorker>()[0].generation, 2u);
  EXPECT_EQ(bench.Last<SpawnWorker>()[0].attempt, 1);
  EXPECT_EQ(bench.Last<RecordFault>()[0].budget_used, 1);
  bench.Stage(0, 1);
  bench.Enter(1);
  EXPECT_EQ(bench.job.phase(), JobPhase::kReforming);
  bench.Stage(2, 1);

  ASSERT_EQ(bench.Last<CommitGeneration>().size(), 1u);
  EXPECT_EQ(bench.Last<CommitGeneration>()[0].generation, 2u);
  EXPECT_THAT(bench.Last<CommitGeneration>()[0].members, ElementsAre(0, 1, 2));
  EXPECT_EQ(bench.All<SpawnWorker>().size(), 4u);
  EXPECT_THAT(bench.All<KillWorker>(), IsEmpty());
  EXPECT_TRUE(bench.job.is_whole());
}

TEST(Job, ADyingWorkerEndsTheGenerationAndIsRefilledWhenNothingOfItIsLeft) {
  Bench bench({.world = 2});
  bench.EnterAll();

  bench.Give(WorkerDying{1, bench.incarnation[1], SIGKILL});

  EXPECT_EQ(bench.Last<AbortGeneration>().size(), 1u);
  ASSERT_EQ(bench.Last<RecordFault>().size(), 1u);
  EXPECT_EQ(bench.Last<RecordFault>()[0].fault.found_by, "death notice");
  EXPECT_EQ(bench.Last<RecordFault>()[0].fault.end.signal, SIGKILL);
  EXPECT_THAT(bench.Last<SpawnWorker>(), IsEmpty()) << "it may still write";
  bench.Stage(0, 1);
  bench.End(1, kKill9);
  EXPECT_THAT(bench.Last<RecordFault>(), IsEmpty()) << "told once";
  ASSERT_EQ(bench.Last<SpawnWorker>().size(), 1u);
  bench.Enter(1);
  EXPECT_EQ(bench.job.generation(), 2u);
  EXPECT_EQ(bench.job.history().crashes, 1);
}

TEST(Job, AWorkerThatTheKernelTookTheMemoryFromIsNoCrash) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.Give(WorkerDying{1, bench.incarnation[1], SIGKILL, true});
  ASSERT_EQ(bench.Last<RecordFault>().size(), 1u);
  EXPECT_EQ(bench.Last<RecordFault>()[0].fault.fault_class, FaultClass::kResource);
  EXPECT_EQ(bench.Last<RecordFault>()[0].fault.detail, "rank 1: killed by signal 9, out of memory");
  EXPECT_EQ(bench.job.history().crashes, 0);
  EXPECT_EQ(bench.job.history().resources, 1);
}

TEST(Job, ADyingWorkerWithoutRestartsEndsTheJobWithItsSignal) {
  Bench bench({.world = 2, .max_restarts = 0});
  bench.EnterAll();
  bench.Give(WorkerDying{1, bench.incarnation[1], SIGSEGV});
  bench.End(1, {.signal = SIGSEGV});
  bench.Give(StopPersisted{0, false});
  bench.End(0, kOurTerm);
  ASSERT_TRUE(bench.finished);
  EXPECT_EQ(bench.finished->exit_code, 128 + SIGSEGV);
}

TEST(Job, AWorkerThatDiesForEverIsGivenUp) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.Give(WorkerDying{1, bench.incarnation[1], SIGKILL});
  bench.Stage(0, 1);
  bench.Pass(bench.job.options().respawn + absl::Seconds(1));
  bench.Give(StopPersisted{0, false});
  bench.End(0, kOurTerm);
  ASSERT_TRUE(bench.finished);
  EXPECT_EQ(bench.finished->exit_code, 87);
}

TEST(Job, ADeathNoticeOfAFinishedOrAKilledWorkerSaysNothingNew) {
  Bench bench({.world = 3});
  bench.EnterAll();
  bench.Finished(0);
  bench.Give(WorkerDying{0, bench.incarnation[0], SIGKILL});
  EXPECT_THAT(bench.last, IsEmpty());
  bench.End(1, kKill9);
  bench.Give(WorkerDying{2, bench.incarnation[2], SIGKILL});
  EXPECT_THAT(bench.Last<RecordFault>(), IsEmpty()) << "it unwinds; its end will tell";
}

TEST(Job, FailWhileReformingKeepsTheTargetAndTheVictimIsNotCharged) {
  Bench bench({.world = 3});
  bench.EnterAll();
  bench.End(1, kKill9);

  bench.End(2, {.code = 1});
  ASSERT_EQ(bench.Last<RecordFault>().size(), 1u);
  EXPECT_TRUE(bench.Last<RecordFault>()[0].fault.victim);
  EXPECT_EQ(bench.Last<RecordFault>()[0].budget_used, 1);
  EXPECT_EQ(bench.Last<SpawnWorker>()[0].slot, 2);
  EXPECT_THAT(bench.Last<AbortGeneration>(), IsEmpty());
  bench.Stage(0, 1);
  bench.Enter(1);
  bench.Enter(2);

  EXPECT_EQ(bench.job.generation(), 2u);
  EXPECT_EQ(bench.All<CommitGeneration>().size(), 2u);
}

TEST(Job, AReplacementThatDiesIsChargedSoNothingLoopsForFree) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.End(1, kKill9);
  bench.Join(1);
  bench.End(1, {.code = 4});
  EXPECT_FALSE(bench.Last<RecordFault>()[0].fault.victim);
  EXPECT_EQ(bench.Last<RecordFault>()[0].budget_used, 2);
  EXPECT_THAT(bench.Last<SpawnWorker>(), IsEmpty());  // the second restart backs off
  bench.Pass(absl::Seconds(1));
  EXPECT_EQ(bench.Last<SpawnWorker>().size(), 1u);
}

TEST(Job, BackOffDelaysTheSpawnButNotTheAbort) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.Lose({.code = 3});
  bench.End(1, {.code = 4});
  EXPECT_EQ(bench.Last<AbortGeneration>().size(), 1u);
  EXPECT_THAT(bench.Last<SpawnWorker>(), IsEmpty());
  const absl::Duration delay = BackOff(1, 0);  // this bench's run
  bench.Pass(delay - absl::Milliseconds(1));
  EXPECT_THAT(bench.Last<SpawnWorker>(), IsEmpty());
  bench.Pass(absl::Milliseconds(1));
  EXPECT_EQ(bench.Last<SpawnWorker>().size(), 1u);
}

TEST(Job, ASurvivorThatIgnoresAbortAndTermIsReplacedWithinTheDeadlines) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.End(1, kKill9);
  bench.Enter(1);

  bench.Pass(absl::Seconds(10));
  ASSERT_EQ(bench.Last<CaptureStacks>().size(), 1u);
  EXPECT_THAT(bench.Last<CaptureStacks>()[0].slots, ElementsAre(0));
  EXPECT_EQ(bench.Last<KillWorker>()[0].how, KillHow::kTerm);
  bench.Pass(absl::Seconds(2));
  EXPECT_EQ(bench.Last<KillWorker>()[0].how, KillHow::kKill);
  bench.End(0, {.signal = SIGKILL, .by_us = true});
  EXPECT_EQ(bench.Last<SpawnWorker>()[0].slot, 0);
  bench.Enter(0);

  EXPECT_EQ(bench.job.generation(), 2u);
  EXPECT_EQ(bench.job.faults().size(), 1u);
}

TEST(Job, OwnTermIsNotACauseWhateverTheWorkerMakesOfIt) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.End(1, kKill9);
  bench.Pass(absl::Seconds(10));
  bench.End(0, {.code = 1});  // its handler of our SIGTERM
  EXPECT_EQ(bench.job.faults().size(), 1u);
  EXPECT_EQ(bench.job.history().crashes, 1);
  Bench other({.world = 2});
  other.EnterAll();
  other.End(0, kOurTerm);
  EXPECT_THAT(other.job.faults(), IsEmpty());
  EXPECT_EQ(other.job.phase(), JobPhase::kReforming);
}

TEST(Job, AnUnkillableChildEndsTheJobInsteadOfWaitingForIt) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.End(1, kKill9);
  bench.Enter(1);
  bench.Pass(absl::Seconds(10 + 2 + 5));  // soft abort, TERM, reap
  EXPECT_EQ(bench.job.phase(), JobPhase::kEnding);
  bench.End(1, kOurTerm);
  bench.Pass(absl::Seconds(25));  // nobody answers PersistCommon either
  ASSERT_TRUE(bench.finished);
  EXPECT_EQ(bench.finished->exit_code, 87);
  EXPECT_THAT(bench.finished->reason, HasSubstr("rank 0 did not end 5s after SIGKILL"));
}

TEST(Job, AReplacementThatIsNeverStagedIsChargedAsAHang) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.End(1, kKill9);
  bench.Stage(0, 1);
  bench.Join(1);
  bench.Pass(absl::Seconds(120));
  EXPECT_EQ(bench.job.history().crashes, 2);
  EXPECT_EQ(bench.job.faults().back().fault_class, FaultClass::kHang);
  EXPECT_EQ(bench.All<KillWorker>()[0].slot, 1);
}

TEST(Job, LateEventsOfAnOldIncarnationAreIgnored) {
  Bench bench({.world = 2});
  bench.EnterAll();
  const uint64_t old = bench.incarnation[1];
  bench.End(1, kKill9);
  bench.Stage(0, 1);
  for (const JobEvent& late :
       std::vector<JobEvent>{WorkerJoined{1, old}, WorkerStaged{1, old, 1}, WorkerFinished{1, old},
                             WorkerEnded{1, old, kKill9}, WorkerStopped{1, old, 3}}) {
    EXPECT_THAT(bench.Give(late), IsEmpty());
  }
  EXPECT_EQ(bench.job.phase(), JobPhase::kReforming);
  EXPECT_EQ(bench.job.faults().size(), 1u);
}

TEST(Job, ASurvivorIsBackOnlyWhenItLeftTheAbortedGeneration) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.Lose(kKill9);
  bench.End(1, {.code = 3});
  bench.Pass(absl::Seconds(1));
  bench.Enter(1);
  bench.Stage(0, 1);  // an old report
  EXPECT_EQ(bench.job.phase(), JobPhase::kReforming);
  bench.Stage(0, 2);
  EXPECT_EQ(bench.job.generation(), 3u);
}

TEST(Job, RanksThatHadFinishedTakePartInTheNextGenerationAgain) {
  Bench bench({.world = 3});
  bench.EnterAll();
  bench.Finished(0);
  bench.End(0, kClean);

  bench.End(1, kKill9);
  bench.Finished(2);  // it was faster than the abort
  EXPECT_EQ(bench.All<SpawnWorker>().size(), 5u);
  bench.Enter(0);
  bench.Enter(1);
  EXPECT_EQ(bench.job.phase(), JobPhase::kReforming);
  bench.End(2, kClean);
  bench.Enter(2);

  ASSERT_EQ(bench.job.generation(), 2u);
  EXPECT_THAT(bench.Last<CommitGeneration>()[0].members, ElementsAre(0, 1, 2));
  EXPECT_EQ(bench.job.history().crashes, 1);
  EXPECT_EQ(bench.job.faults().size(), 1u);
  for (int slot : {0, 1, 2}) bench.Finished(slot);
  for (int slot : {0, 1, 2}) bench.End(slot, kClean);
  ASSERT_TRUE(bench.finished);
  EXPECT_EQ(bench.finished->exit_code, 0);
}

TEST(Job, AFinishedProcessThatLivesOnIsEndedWhenItsRankIsWantedAgain) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.Finished(0);
  bench.Pass(absl::Minutes(10));
  EXPECT_THAT(bench.All<KillWorker>(), IsEmpty());

  bench.End(1, kKill9);
  bench.Enter(1);
  bench.Pass(bench.job.options().soft_abort);
  ASSERT_EQ(bench.All<KillWorker>().size(), 1u);
  EXPECT_EQ(bench.All<KillWorker>()[0].slot, 0);
  bench.End(0, kOurTerm);
  bench.Enter(0);
  EXPECT_EQ(bench.job.generation(), 2u);
  EXPECT_EQ(bench.job.faults().size(), 1u);
}

TEST(Job, AFailureAfterTheWorkIsMendedWhenTheRankIsRunAgain) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.Finished(0);
  bench.End(0, {.code = 7});
  bench.End(1, kKill9);
  bench.Enter(0);
  bench.Enter(1);
  for (int slot : {0, 1}) bench.Finished(slot);
  for (int slot : {0, 1}) bench.End(slot, kClean);
  ASSERT_TRUE(bench.finished);
  EXPECT_EQ(bench.finished->exit_code, 0);
}

TEST(Job, NoGenerationFormsWhenAllWhoHadToUnwindHaveFinished) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.Finished(0);
  bench.End(0, kClean);
  bench.Give(VerdictGiven{1, "hung", "", 1, false});
  bench.Finished(1);
  bench.End(1, kClean);
  ASSERT_TRUE(bench.finished);
  EXPECT_EQ(bench.finished->exit_code, 0);
  EXPECT_EQ(bench.All<SpawnWorker>().size(), 2u);
}

TEST(Job, APlainProgramThatEndedWithZeroIsNotRunAgainWithFinishedRanks) {
  Bench bench({.world = 3});
  bench.Enter(0);
  bench.Enter(1);
  bench.End(2, kClean);
  bench.Finished(0);
  bench.End(0, kClean);
  bench.End(1, kKill9);
  bench.Enter(0);
  bench.Enter(1);
  EXPECT_THAT(bench.Last<CommitGeneration>()[0].members, ElementsAre(0, 1));
}

TEST(Job, ASlowStarterIsNotWaitedForAndEntersTheOpenGeneration) {
  Bench bench({.world = 3});
  bench.Enter(0);
  bench.Enter(1);
  bench.End(1, kKill9);
  bench.Stage(0, 1);
  bench.Enter(1);
  EXPECT_EQ(bench.job.generation(), 2u);
  EXPECT_THAT(bench.All<KillWorker>(), IsEmpty());
  bench.Enter(2);
  EXPECT_TRUE(bench.job.is_whole());
  EXPECT_EQ(bench.All<CommitGeneration>().size(), 2u);
}

TEST(Job, AWorkerThatLeavesAHealthyGenerationIsChargedAfterAWhile) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.Stage(1, 1);
  bench.Pass(absl::Seconds(10));
  EXPECT_EQ(bench.job.history().crashes, 1);
  bench.Stage(0, 1);
  EXPECT_EQ(bench.job.generation(), 2u);
  EXPECT_EQ(bench.All<SpawnWorker>().size(), 2u);
}

// --- Verdicts and early exits ---

TEST(Job, AStoppedCulpritIsKilledAtOnceAndRefilledWhenItHasEnded) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.Give(VerdictGiven{1, "stopped", "in T state", 2, true});
  ASSERT_EQ(bench.Last<KillWorker>().size(), 1u);
  EXPECT_EQ(bench.Last<KillWorker>()[0].how, KillHow::kKill);
  EXPECT_THAT(bench.Last<SpawnWorker>(), IsEmpty());
  bench.End(1, {.signal = SIGKILL, .by_us = true});
  EXPECT_EQ(bench.Last<SpawnWorker>().size(), 1u);
  EXPECT_EQ(bench.job.faults().size(), 1u);
  EXPECT_EQ(bench.job.faults()[0].found_by, "watchdog: stopped");
}

TEST(Job, AHungCulpritThatUnwindsKeepsItsProcess) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.Give(VerdictGiven{1, "hung", "blocked read", 1, false});
  EXPECT_THAT(bench.Last<KillWorker>(), IsEmpty());
  bench.Stage(0, 1);
  bench.Stage(1, 1);
  EXPECT_EQ(bench.job.generation(), 2u);
  EXPECT_EQ(bench.All<SpawnWorker>().size(), 2u);
}

TEST(Job, AVerdictOnNobodyOrOnASlotThatIsHandledAlreadyChangesNothing) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.End(1, kKill9);
  EXPECT_THAT(bench.Give(VerdictGiven{1, "hung", "", 0, false}), IsEmpty());
  EXPECT_THAT(bench.Give(VerdictGiven{7, "hung", "", 0, false}), IsEmpty());
}

TEST(Job, ExitZeroWhileAPeerHangsIsAFaultAfterTheGrace) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.End(0, kClean);
  bench.Pass(absl::Seconds(59));
  EXPECT_EQ(bench.job.phase(), JobPhase::kRunning);
  bench.Pass(absl::Seconds(1));
  ASSERT_EQ(bench.job.faults().size(), 1u);
  EXPECT_EQ(bench.job.faults()[0].fault_class, FaultClass::kEarlyExit);
  EXPECT_EQ(bench.incarnation[0], 3u);
}

TEST(Job, JoinedWorkersThatAllExitWithZeroInTimeAreFinished) {
  Bench bench({.world = 2});
  bench.Join(0);
  bench.Join(1);
  bench.End(0, kClean);
  bench.Pass(absl::Seconds(30));
  bench.End(1, kClean);
  ASSERT_TRUE(bench.finished);
  EXPECT_EQ(bench.finished->exit_code, 0);
}

// --- Budgets ---

TEST(Job, SameRootThreeTimesStopsAndSavesWhatIsInMemory) {
  Bench bench({.world = 2});
  bench.EnterAll();
  for (int i = 0; i < 3; ++i) bench.Lose({.code = 5});
  EXPECT_EQ(bench.job.phase(), JobPhase::kEnding);
  EXPECT_EQ(bench.All<PersistCommon>().size(), 1u);
  bench.End(0, kOurTerm);
  EXPECT_FALSE(bench.finished);
  bench.Give(StopPersisted{7, true});
  ASSERT_TRUE(bench.finished);
  EXPECT_EQ(bench.finished->exit_code, 82);
  EXPECT_THAT(bench.finished->reason, HasSubstr("rank 1: exit code 5; the same root 3 times"));
}

TEST(Job, FlappingRootsStopWithEightyThree) {
  Bench bench({.world = 2});
  bench.EnterAll();
  for (const int code : {5, 6, 5, 6}) bench.Lose({.code = code});
  bench.End(0, kOurTerm);
  bench.Give(StopPersisted{0, false});
  EXPECT_EQ(bench.finished->exit_code, 83);
}

TEST(Job, ACommittedStepRefundsTheBudgets) {
  Bench bench({.world = 2});
  bench.EnterAll();
  for (int i = 0; i < 10; ++i) {
    bench.Lose(kKill9);
    ASSERT_EQ(bench.job.phase(), JobPhase::kRunning) << i;
    bench.Give(CheckpointCommitted{i + 1});
  }
  bench.Give(CheckpointCommitted{10});  // no larger step: no progress
  for (int i = 0; i < 3; ++i) bench.Lose(kKill9);
  EXPECT_EQ(bench.job.phase(), JobPhase::kEnding);
}

// NVRx test_progress_tracker: exactly 200 new steps count, where nothing commits.
TEST(Job, TwoHundredNewStepsAreProgressWhereNothingCommits) {
  for (const int64_t steps : {199, 200}) {
    Bench bench({.world = 2});
    bench.EnterAll();
    bench.Lose(kKill9);
    bench.Lose(kKill9);
    bench.newest_step = steps;
    bench.Lose(kKill9);
    EXPECT_EQ(bench.job.phase(), steps == 200 ? JobPhase::kRunning : JobPhase::kEnding);
  }
}

TEST(Job, OneFailedWorkerWithoutRestartsGivesItsCodeAndEndsItsPeers) {
  Bench bench({.world = 2, .max_restarts = 0});
  bench.End(1, {.code = 7});
  ASSERT_EQ(bench.Last<KillWorker>().size(), 1u);
  EXPECT_EQ(bench.Last<KillWorker>()[0].how, KillHow::kTerm);
  bench.End(0, kOurTerm);
  EXPECT_EQ(bench.finished->exit_code, 7);
}

// --- Plain programs ---

TEST(Job, PlainProgramsRestartAfterTheCommitWhenAllOfTheFormerAttemptAreGone) {
  Bench bench({.world = 3, .max_restarts = 1});
  bench.End(1, {.code = 3});
  EXPECT_EQ(bench.Last<KillWorker>().size(), 2u);
  bench.End(0, kOurTerm);
  EXPECT_THAT(bench.Last<SpawnWorker>(), IsEmpty());
  bench.Pass(absl::Seconds(15));  // rank 2 ignores SIGTERM
  EXPECT_EQ(bench.Last<KillWorker>()[0].how, KillHow::kKill);
  bench.End(2, {.signal = SIGKILL, .by_us = true});

  ASSERT_TRUE(std::holds_alternative<CommitGeneration>(bench.last[0]));
  EXPECT_EQ(bench.job.generation(), 2u);
  ASSERT_EQ(bench.Last<SpawnWorker>().size(), 3u);
  EXPECT_EQ(bench.Last<SpawnWorker>()[0].attempt, 1);
  EXPECT_EQ(bench.Last<SpawnWorker>()[0].generation, 2u);
  EXPECT_EQ(bench.job.faults().size(), 1u);
}

TEST(Job, APlainProgramThatAlwaysFailsHasAsManyAttemptsAsAllowed) {
  Bench bench({.world = 1, .max_restarts = 2});
  for (int i = 0; i < 3; ++i) {
    bench.End(0, {.code = 1});
    bench.Pass(absl::Minutes(1));
  }
  EXPECT_EQ(bench.All<SpawnWorker>().size(), 3u);
  EXPECT_EQ(bench.finished->exit_code, 83);
  EXPECT_THAT(bench.All<PersistCommon>(), IsEmpty());
}

TEST(Job, PlainProgramsMayEndApart) {
  Bench bench({.world = 2});
  bench.End(0, kClean);
  bench.Pass(absl::Hours(5));
  EXPECT_EQ(bench.job.phase(), JobPhase::kRunning);
  bench.End(1, kClean);
  EXPECT_EQ(bench.finished->exit_code, 0);
}

TEST(Job, InAMixedJobAPlainFaultRestartsPlainOnesAndUnwindsJoinedOnes) {
  Bench bench({.world = 3});
  bench.Enter(0);
  bench.End(1, {.code = 3});
  ASSERT_EQ(bench.Last<KillWorker>().size(), 1u);
  EXPECT_EQ(bench.Last<KillWorker>()[0].slot, 2);
  EXPECT_EQ(bench.Last<AbortGeneration>().size(), 1u);
  bench.End(2, kOurTerm);
  EXPECT_EQ(bench.job.phase(), JobPhase::kReforming);
  bench.Stage(0, 1);
  EXPECT_THAT(bench.Last<CommitGeneration>()[0].members, ElementsAre(0, 1, 2));
  EXPECT_EQ(bench.Last<SpawnWorker>().size(), 2u);
}

// --- Stops ---

TEST(Job, TermAgreesOnAStepSavesAndEndsWithEighty) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.newest_step = 40;
  bench.Give(StopAsked{SIGTERM});
  ASSERT_EQ(bench.Last<AskStop>().size(), 1u);
  EXPECT_EQ(bench.Last<AskStop>()[0].step, 42);
  bench.Give(StopAnswered{0, bench.incarnation[0], true, 42});
  EXPECT_THAT(bench.Last<GoStop>(), IsEmpty());
  bench.Give(StopAnswered{1, bench.incarnation[1], true, 42});
  ASSERT_EQ(bench.Last<GoStop>().size(), 1u);
  EXPECT_EQ(bench.Last<GoStop>()[0].step, 42);
  for (int slot : {0, 1}) {
    bench.Give(WorkerStopped{slot, bench.incarnation[slot], 42});
    bench.End(slot, kClean);
  }
  EXPECT_FALSE(bench.finished);
  bench.Give(StopPersisted{42, true});
  EXPECT_EQ(bench.finished->exit_code, 80);
  EXPECT_THAT(bench.All<KillWorker>(), IsEmpty());
}

// The end of a stop of a job of two that seals in time.
int CodeOfAStop(int signal, bool durable, int preempt_exit = 80) {
  Bench bench({.world = 2, .preempt_exit = preempt_exit});
  bench.EnterAll();
  bench.Give(StopAsked{signal});
  for (int slot : {0, 1}) bench.Give(StopAnswered{slot, bench.incarnation[slot], true, 2});
  for (int slot : {0, 1}) bench.Give(WorkerStopped{slot, bench.incarnation[slot], 2});
  bench.Give(StopPersisted{2, durable});
  for (int slot : {0, 1}) bench.End(slot, kClean);
  return bench.finished->exit_code;
}

TEST(Job, TheCodeOfAStopTellsWhoAskedAndWhetherItWasSaved) {
  for (const int signal : {SIGTERM, SIGUSR1, SIGUSR2}) EXPECT_EQ(CodeOfAStop(signal, true), 80);
  EXPECT_EQ(CodeOfAStop(SIGTERM, false), 81);
  EXPECT_EQ(CodeOfAStop(SIGINT, true), 130);
  EXPECT_EQ(CodeOfAStop(SIGHUP, false), 129);
  EXPECT_EQ(CodeOfAStop(SIGTERM, true, 0), 0);
  EXPECT_EQ(CodeOfAStop(SIGTERM, false, 0), 81);
}

TEST(Job, ALateAnswerDoublesTheMarginAndAnswersToTheFormerStepDoNotCount) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.newest_step = 10;
  bench.Give(StopAsked{SIGTERM});
  bench.Give(StopAnswered{0, bench.incarnation[0], true, 12, 12});
  bench.newest_step = 13;
  bench.Give(StopAnswered{1, bench.incarnation[1], false, 13, 12});
  EXPECT_EQ(bench.Last<AskStop>()[0].step, 13 + 4);
  bench.Give(StopAnswered{1, bench.incarnation[1], true, 17, 17});
  EXPECT_THAT(bench.Give(StopAnswered{0, bench.incarnation[0], true, 12, 12}), IsEmpty());
  bench.Give(StopAnswered{0, bench.incarnation[0], true, 17, 17});
  EXPECT_EQ(bench.Last<GoStop>()[0].step, 17);
}

TEST(Job, ASecondTermIsHarmlessAndASecondInterruptHurries) {
  Bench bench({.world = 1});
  bench.EnterAll();
  bench.Give(StopAsked{SIGTERM});
  EXPECT_THAT(bench.Give(StopAsked{SIGTERM}), IsEmpty());
  EXPECT_THAT(bench.Give(StopAsked{SIGINT}), IsEmpty());
  bench.Give(StopAsked{SIGINT});
  ASSERT_EQ(bench.Last<KillWorker>().size(), 1u);
  EXPECT_EQ(bench.Last<KillWorker>()[0].how, KillHow::kKill);
  bench.End(0, {.signal = SIGKILL, .by_us = true});
  EXPECT_EQ(bench.finished->exit_code, 81);
}

TEST(Job, AStopStepThatDoesNotComeIsReplacedByTheCommonSnapshotWithinTheGrace) {
  Bench bench({.world = 2});
  bench.EnterAll();
  const absl::Duration asked = bench.now;
  bench.Give(StopAsked{SIGTERM});
  bench.Give(StopAnswered{0, bench.incarnation[0], true, 2});
  bench.Pass(absl::Seconds(13));
  EXPECT_EQ(bench.All<PersistCommon>().size(), 1u);
  EXPECT_EQ(bench.All<KillWorker>().size(), 2u);
  bench.Pass(absl::Seconds(2));
  EXPECT_EQ(bench.All<KillWorker>().size(), 4u);
  EXPECT_EQ(bench.now - asked, absl::Seconds(15));
  bench.End(0, kOurTerm);
  bench.End(1, kOurTerm);
  bench.Give(StopPersisted{1, true});
  EXPECT_EQ(bench.finished->exit_code, 80);
}

TEST(Job, AStopEndsInBoundedTimeWhenNobodyAnswersAtAll) {
  Bench bench({.world = 2});
  bench.EnterAll();
  const absl::Duration asked = bench.now;
  bench.Give(StopAsked{SIGTERM});
  while (bench.timer) bench.Pass(*bench.timer - bench.now);
  ASSERT_TRUE(bench.finished);
  EXPECT_EQ(bench.finished->exit_code, 81);
  EXPECT_LE(bench.now - asked, absl::Seconds(25));
}

TEST(Job, ADeathDuringAStopRestartsNobody) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.Give(StopAsked{SIGTERM});
  bench.End(1, {.signal = SIGTERM});
  EXPECT_EQ(bench.Last<PersistCommon>().size(), 1u);
  EXPECT_EQ(bench.Last<RecordFault>()[0].fault.fault_class, FaultClass::kPreempt);
  EXPECT_EQ(bench.Last<KillWorker>()[0].slot, 0);
  bench.End(0, kOurTerm);
  bench.Give(StopPersisted{1, true});
  EXPECT_EQ(bench.finished->exit_code, 80);
  EXPECT_EQ(bench.All<SpawnWorker>().size(), 2u);
}

TEST(Job, AStopWhileReformingSavesTheCommonSnapshotAndEnds) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.End(1, kKill9);
  bench.Give(StopAsked{SIGINT});
  EXPECT_EQ(bench.Last<PersistCommon>().size(), 1u);
  bench.End(0, kOurTerm);
  bench.End(1, {.signal = SIGINT});
  bench.Give(StopPersisted{1, true});
  EXPECT_EQ(bench.finished->exit_code, 130);
}

TEST(Job, AStopWhileRanksAreStillJoiningDoesNotWaitForAStep) {
  Bench bench({.world = 2});
  bench.Enter(0);
  const absl::Duration asked = bench.now;
  bench.Give(StopAsked{SIGTERM});
  EXPECT_EQ(bench.Last<ForwardSignal>()[0].slot, 1);
  ASSERT_EQ(bench.Last<KillWorker>().size(), 1u);
  EXPECT_EQ(bench.Last<KillWorker>()[0].slot, 0);
  bench.End(0, kOurTerm);
  bench.End(1, {.signal = SIGTERM});
  bench.Give(StopPersisted{0, false});
  EXPECT_EQ(bench.finished->exit_code, 81);
  EXPECT_EQ(bench.now, asked);
}

TEST(Job, APlainProgramGetsTheSignalItselfAndItsEndIsEightyOne) {
  for (const ProcessEnd end : {ProcessEnd{.code = 0}, ProcessEnd{.signal = SIGTERM}}) {
    Bench bench({.world = 1});
    bench.Give(StopAsked{SIGTERM});
    ASSERT_EQ(bench.Last<ForwardSignal>().size(), 1u);
    EXPECT_EQ(bench.Last<ForwardSignal>()[0].signal, SIGTERM);
    bench.End(0, end);
    EXPECT_EQ(bench.finished->exit_code, 81);
    EXPECT_THAT(bench.All<KillWorker>(), IsEmpty());
  }
}

TEST(Job, APlainProgramThatIgnoresTermIsKilledAtTheGrace) {
  Bench bench({.world = 1});
  bench.Give(StopAsked{SIGTERM});
  bench.Pass(absl::Seconds(15));
  ASSERT_EQ(bench.All<KillWorker>().size(), 1u);
  EXPECT_EQ(bench.All<KillWorker>()[0].how, KillHow::kKill);
}

TEST(Job, AllFinishedDuringAStopIsFinished) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.Give(StopAsked{SIGTERM});
  for (int slot : {0, 1}) bench.Finished(slot);
  for (int slot : {0, 1}) bench.End(slot, kClean);
  EXPECT_EQ(bench.finished->exit_code, 0);
}

// --- Checkpoint roots ---

TEST(Job, RootsThatAreRefusedLostOrDoNotRestoreEndTheJobWithTheirCodes) {
  Bench refused({.world = 1});
  refused.EnterAll();
  refused.Give(RootRefused{"foreign"});
  refused.End(0, kOurTerm);
  EXPECT_EQ(refused.finished->exit_code, 85);
  EXPECT_THAT(refused.All<PersistCommon>(), IsEmpty());

  Bench unrestored({.world = 1});
  unrestored.EnterAll();
  unrestored.Give(RestoreFailed{"all damaged"});
  unrestored.End(0, kOurTerm);
  EXPECT_EQ(unrestored.finished->exit_code, 82);

  Bench lost({.world = 1});
  lost.EnterAll();
  lost.Give(RootLost{"run 4711 took it"});
  EXPECT_EQ(lost.Last<AskStop>().size(), 1u);
  lost.Give(StopAnswered{0, lost.incarnation[0], true, 2});
  lost.Give(WorkerStopped{0, lost.incarnation[0], 2});
  lost.End(0, kClean);
  lost.Give(StopPersisted{2, false});
  EXPECT_EQ(lost.finished->exit_code, 88);
  EXPECT_EQ(lost.finished->code_if_saved, std::nullopt) << "the root is another run's";
  EXPECT_THAT(lost.finished->reason, HasSubstr("run 4711 took it"));
}

TEST(Job, LateEarlyAndStrangeTimersAreHarmless) {
  Bench bench({.world = 2});
  bench.EnterAll();
  bench.Give(TimerFired{1});
  bench.Give(TimerFired{99});
  EXPECT_TRUE(bench.job.is_whole());
  bench.End(1, kKill9);
  bench.Give(TimerFired{1});
  EXPECT_EQ(bench.Last<ArmTimer>().size(), 1u);  // too early: armed again
  bench.now += absl::Hours(1);
  bench.Give(TimerFired{1});
  EXPECT_EQ(bench.Last<KillWorker>().size(), 2u);
}

}  // namespace
}  // namespace outlast
