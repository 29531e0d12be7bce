#include "outlast/checkpoint/checkpointer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/checkpoint/disk_fixture.h"
#include "tests/checkpoint/job_fixture.h"

namespace outlast {
namespace {

namespace fs = std::filesystem;

TEST(Checkpointer, SavesTheLastStepInFinish) {
  TempFolder folder;
  Seen seen;
  RunJob({.steps = 7, .checkpoints = {.uri = folder / "root"}}, seen);
  EXPECT_EQ(seen.result.exit_code, 0) << seen.result.reason;
  EXPECT_EQ(seen.finished, 2);
  EXPECT_EQ(CommittedSteps(folder / "root"), std::vector<int64_t>{7});
}

TEST(Checkpointer, SavesAtItsCadenceAndKeepsTheLast) {
  TempFolder folder;
  Seen seen;
  RunJob({.steps = 30,
          .checkpoints = {.uri = folder / "root", .every = Every::Steps(5), .keep_last = 2},
          .at_step = [](LocalWorld&, outlast::Run&, int64_t) { usleep(2000); }},
         seen);
  EXPECT_EQ(seen.result.exit_code, 0) << seen.result.reason;
  const std::vector<int64_t> kept = CommittedSteps(folder / "root");
  ASSERT_EQ(kept.size(), 2u);
  EXPECT_EQ(kept[0], 30);
  EXPECT_EQ(kept[1] % 5, 0);
  EXPECT_GE(seen.durable.size(), 2u);
}

// Another run takes the root in the middle: the saves after that fail, and retention, which would
// keep one, takes nothing for them.
TEST(Retention, KeepsTheOldOneWhenASaveFails) {
  TempFolder folder;
  Seen seen;
  Claim other;
  other.run = Id128::FromName("another run");
  other.host = "elsewhere";
  RunJob({.steps = 30,
          .checkpoints = {.uri = folder / "root", .every = Every::Steps(5), .keep_last = 1},
          .at_step =
              [&](LocalWorld&, outlast::Run&, int64_t step) {
                if (step < 12) return;
                for (int i = 0; i < 20'000 && CommittedSteps(folder / "root").empty(); ++i)
                  usleep(1000);
                std::ofstream(folder / "root/claims/99") << *ToText(other);
              }},
         seen);
  EXPECT_NE(seen.result.exit_code, 0);
  const std::vector<int64_t> kept = CommittedSteps(folder / "root");
  ASSERT_EQ(kept.size(), 1u);
  EXPECT_LT(kept[0], 30);
}

TEST(Checkpointer, AutoSavesByTimeAStepThatAllRanksSeeComing) {
  TempFolder folder;
  Seen seen;
  RunJob(
      {.ranks = 3,
       .steps = 400,
       .checkpoints = {.uri = folder / "root"},
       .service = {.shortest_auto = absl::Milliseconds(1), .longest_auto = absl::Milliseconds(20)},
       .at_step = [](LocalWorld&, outlast::Run&, int64_t) { usleep(1000); }},
      seen);
  EXPECT_EQ(seen.result.exit_code, 0) << seen.result.reason;
  EXPECT_GE(seen.durable.size(), 3u) << "at least two by time, and the last step";
  EXPECT_EQ(seen.durable.back(), 400);
}

// Of each step that is due one rank's snapshot is lost, by turns, while the other has sealed and
// pinned its own: no step is common, and no buffer stays pinned for one that never will be.
TEST(Checkpointer, LostSnapshotsLeaveNoBufferPinned) {
  TempFolder folder;
  Seen seen;
  RunJob({.ranks = 2,
          .steps = 41,
          .floats = 4'000'000,
          .checkpoints = {.uri = folder / "root", .every = Every::Steps(2)},
          .is_idle = [](outlast::Run& run, int64_t step) { return step % 4 == 2 * run.rank(); }},
         seen);
  EXPECT_EQ(seen.result.exit_code, 0) << seen.result.reason;
  ASSERT_FALSE(seen.durable.empty());
  EXPECT_EQ(seen.durable.back(), 41);
  EXPECT_LT(seen.skipped, 12) << "of 82: there was a free buffer nearly each time";
}

// A step that is nothing but the copy of its state cannot pay for one each time: the ranks agree on
// fewer.
TEST(Checkpointer, AutoSpacesSnapshotsThatCostTooMuchOfAStep) {
  TempFolder folder;
  Seen seen;
  std::atomic<bool> killed{false};
  RunJob({.ranks = 2,
          .steps = 300,
          .floats = 400'000,
          .checkpoints = {.uri = folder / "root", .every = Every::Steps(100'000)},
          .at_step =
              [&](LocalWorld& world, outlast::Run& run, int64_t step) {
                if (run.rank() == 1 && step == 250 && !killed.exchange(true)) world.KillRank(1);
              }},
         seen);
  EXPECT_EQ(seen.result.exit_code, 0) << seen.result.reason;
  EXPECT_EQ(seen.wrong_states, 0);
  EXPECT_LT(seen.sealed + seen.skipped, 200);
  ASSERT_EQ(seen.restored_steps.size(), 2u);
  EXPECT_GT(seen.restored_steps[1], 0) << "spaced, and still common to all";
}

TEST(Checkpointer, GoesOnFromMemoryWhenARankIsKilled) {
  TempFolder folder;
  Seen seen;
  std::atomic<bool> killed{false};
  RunJob({.ranks = 3,
          .steps = 40,
          .checkpoints = {.uri = folder / "root", .every = Every::Steps(1000)},
          .at_step =
              [&](LocalWorld& world, outlast::Run& run, int64_t step) {
                if (run.generation() == 1) seen.reached = std::max<int64_t>(seen.reached, step);
                if (run.rank() == 1 && step == 20 && !killed.exchange(true)) world.KillRank(1);
              }},
         seen);
  EXPECT_EQ(seen.result.exit_code, 0) << seen.result.reason;
  EXPECT_EQ(seen.wrong_states, 0);
  ASSERT_EQ(seen.restored_steps.size(), 2u);
  EXPECT_EQ(seen.restored_steps[0], 0);
  // At most one step that all had finished is lost. A survivor may be in step n + 1 while the dead
  // rank had not sealed the state before its update in step n: then n - 1 is what all have.
  EXPECT_GE(seen.restored_steps[1], seen.reached - 2);
  EXPECT_LE(seen.restored_steps[1], seen.reached);
  EXPECT_TRUE(seen.restored_from[1] == "live" || seen.restored_from[1] == "memory")
      << seen.restored_from[1];
  EXPECT_EQ(CommittedSteps(folder / "root"), std::vector<int64_t>{40});
}

// A trainer that goes back on purpose: what it gets is the newest that all have now, not what there
// was when the generation began.
TEST(Checkpointer, RestoresAgainInTheSameGeneration) {
  for (int round = 0; round < 5; ++round) {
    TempFolder folder;
    Seen seen;
    RunJob({.ranks = 3,
            .steps = 40,
            .checkpoints = {.uri = folder / "root",
                            .every = Every::Steps(1000),
                            .snapshot_every = Every::Steps(1)},
            .at_step =
                [&](LocalWorld&, outlast::Run& run, int64_t step) {
                  usleep(static_cast<useconds_t>((run.rank() * 7 + step * 3 + round) % 11 * 50));
                },
            .restore_at = 22},
           seen);
    EXPECT_EQ(seen.result.exit_code, 0) << seen.result.reason;
    EXPECT_EQ(seen.result.generation, 1u);
    EXPECT_EQ(seen.wrong_states, 0);
    ASSERT_EQ(seen.restored_steps.size(), 2u);
    EXPECT_GE(seen.restored_steps[1], 20);
    EXPECT_LE(seen.restored_steps[1], 22);
    EXPECT_EQ(CommittedSteps(folder / "root").front(), 40);
  }
}

// A verdict ends the generation in the middle of a step while every rank lives: that step leaves
// nothing behind.
TEST(Checkpointer, AnAbortWithAllRanksAliveSealsNothing) {
  TempFolder folder;
  Seen seen;
  std::atomic<bool> aborted{false};
  RunJob({.ranks = 3,
          .steps = 30,
          .checkpoints = {.uri = folder / "root", .every = Every::Steps(1000)},
          .at_step =
              [&](LocalWorld& world, outlast::Run& run, int64_t step) {
                if (run.rank() != 1 || step != 12 || aborted.exchange(true)) return;
                world.OnKeeper([](Keeper& keeper) {
                  keeper.Dispatch(
                      VerdictGiven{.culprit = 2, .verdict_class = "test", .detail = "for a test"});
                });
              }},
         seen);
  EXPECT_EQ(seen.result.exit_code, 0) << seen.result.reason;
  EXPECT_EQ(seen.wrong_states, 0);
  ASSERT_EQ(seen.restored_steps.size(), 2u);
  EXPECT_LE(seen.restored_steps[1], 12);
  EXPECT_GE(seen.restored_steps[1], 10);
  EXPECT_EQ(seen.result.spawns, 3) << "nobody was replaced";
}

TEST(Checkpointer, ASecondInvocationGoesOnFromDisk) {
  TempFolder folder;
  Seen first, second;
  RunJob({.steps = 10, .checkpoints = {.uri = folder / "root"}}, first);
  RunJob({.ranks = 3, .steps = 20, .checkpoints = {.uri = folder / "root"}},
         second);  // another world size too
  EXPECT_EQ(second.result.exit_code, 0) << second.result.reason;
  EXPECT_EQ(second.restored_steps, std::vector<int64_t>{10});
  EXPECT_EQ(second.restored_from, std::vector<std::string>{"disk"});
  EXPECT_EQ(second.wrong_states, 0);
  EXPECT_EQ(CommittedSteps(folder / "root"), (std::vector<int64_t>{20, 10}));
}

// 16 MB of weights in four ranks: no chunk is read twice but those that lie across two shares.
TEST(Checkpointer, ReadsEachByteOnceAMachine) {
  TempFolder folder;
  JobSpec spec{.ranks = 4,
               .steps = 3,
               .floats = 4'000'000,
               .checkpoints = {.uri = folder / "root", .every = Every::Steps(3)}};
  Seen first;
  RunJob(spec, first);
  ASSERT_EQ(first.result.exit_code, 0) << first.result.reason;

  Seen second;
  spec.steps = 4;
  RunJob(spec, second);

  EXPECT_EQ(second.result.exit_code, 0) << second.result.reason;
  EXPECT_EQ(second.wrong_states, 0);
  EXPECT_THAT(second.restored_from, ::testing::ElementsAre("disk"));
  EXPECT_GE(second.restore_read, 16'000'000);
  EXPECT_LE(second.restore_read, 16'000'000 + 4 * (2 << 20));
}

// One share cannot be read: no rank restores from there, and the note names the chunk.
TEST(Checkpointer, ADamagedShareIsEverybodys) {
  TempFolder folder;
  JobSpec spec{.ranks = 3,
               .steps = 10,
               .floats = 1'000'000,
               .checkpoints = {.uri = folder / "root", .every = Every::Steps(5)}};
  Seen first;
  RunJob(spec, first);
  for (const auto& entry : fs::directory_iterator(folder / "root")) {
    if (!entry.path().filename().string().starts_with("step-000000000010")) continue;
    std::fstream shard(entry.path() / "w00001.safetensors");
    shard.seekp(-5, std::ios::end);
    shard.put('\x55').put('\x2a');
  }

  Seen second;
  spec.steps = 12;
  RunJob(spec, second);

  EXPECT_EQ(second.result.exit_code, 0) << second.result.reason;
  EXPECT_EQ(second.wrong_states, 0);
  EXPECT_THAT(second.restored_steps, ::testing::ElementsAre(5));
  EXPECT_THAT(second.notes, ::testing::Contains(::testing::HasSubstr("w00001.safetensors")));
}

TEST(Checkpointer, NeverSavesAStateUnderAnOlderStepsName) {
  TempFolder folder;
  Seen first, second;
  RunJob({.steps = 10, .checkpoints = {.uri = folder / "root"}}, first);
  RunJob({.steps = 6, .checkpoints = {.uri = folder / "root"}, .job = {.max_restarts = 0}}, second);
  EXPECT_NE(second.result.exit_code, 0) << "the root is at step 10 already";
  EXPECT_EQ(second.finished, 0);
  EXPECT_EQ(CommittedSteps(folder / "root"), std::vector<int64_t>{10});
}

TEST(Checkpointer, AFreshStartRestoresNothingAndBeginsAChainOfItsOwn) {
  TempFolder folder;
  Seen first, second;
  RunJob({.steps = 10, .checkpoints = {.uri = folder / "root"}}, first);
  RunJob({.steps = 5, .checkpoints = {.uri = folder / "root"}, .service = {.fresh = true}}, second);
  EXPECT_EQ(second.restored_steps, std::vector<int64_t>{0});
  EXPECT_EQ(second.wrong_states, 0);
  EXPECT_EQ(CommittedSteps(folder / "root"), std::vector<int64_t>{5});
}

TEST(Checkpointer, FallsBackTogetherPastADamagedCheckpoint) {
  TempFolder folder;
  Seen first, second;
  RunJob({.steps = 10, .checkpoints = {.uri = folder / "root"}}, first);
  Seen more;
  RunJob({.steps = 20, .checkpoints = {.uri = folder / "root"}}, more);
  for (const auto& entry : fs::directory_iterator(folder / "root")) {
    if (entry.path().filename().string().starts_with("step-000000000020")) {
      const std::string shard = entry.path() / "w00000.safetensors";
      FILE* file = fopen(shard.c_str(), "r+b");
      ASSERT_NE(file, nullptr);
      fseek(file, 5000, SEEK_SET);
      fputc(0x5a, file);
      fclose(file);
    }
  }
  RunJob({.ranks = 3, .steps = 25, .checkpoints = {.uri = folder / "root"}}, second);
  EXPECT_EQ(second.result.exit_code, 0) << second.result.reason;
  EXPECT_EQ(second.restored_steps, std::vector<int64_t>{10});
  EXPECT_EQ(second.wrong_states, 0);
  EXPECT_FALSE(second.notes.empty());
}

// Saves come faster than the disk, so ranks skip some for want of a buffer, each its own: also the
// last step's. What one rank has sealed for the disk and another has not must not leave the last
// save waiting for ever.
TEST(Checkpointer, FinishesWhenSomeRanksSkippedTheLastSave) {
  for (int round = 0; round < 10; ++round) {
    TempFolder folder;
    Seen seen;
    RunJob({.ranks = 3,
            .steps = 12 + round,
            .checkpoints = {.uri = folder / "root", .every = Every::Steps(1), .buffers = 2},
            .at_step =
                [&](LocalWorld&, outlast::Run& run, int64_t step) {
                  usleep(static_cast<useconds_t>((run.rank() * 7 + step * 3) % 11 * 100));
                }},
           seen);
    ASSERT_EQ(seen.result.exit_code, 0) << seen.result.reason;
    ASSERT_EQ(CommittedSteps(folder / "root").front(), 12 + round);
  }
}

TEST(Checkpointer, AStopSavesTheAgreedStep) {
  TempFolder folder;
  Seen seen;
  std::atomic<bool> asked{false};
  RunJob({.ranks = 3,
          .steps = 100000,
          .checkpoints = {.uri = folder / "root", .every = Every::Steps(1000000)},
          .at_step =
              [&](LocalWorld& world, outlast::Run& run, int64_t step) {
                usleep(500);
                if (run.rank() == 2 && step == 15 && !asked.exchange(true)) world.AskStop();
              }},
         seen);
  EXPECT_EQ(seen.result.exit_code, 80) << seen.result.reason;
  const std::vector<int64_t> steps = CommittedSteps(folder / "root");
  ASSERT_EQ(steps.size(), 1u);
  EXPECT_GE(steps[0], 16);
}

TEST(Checkpointer, AFailedSaveNeverKillsTraining) {
  TempFolder folder;
  Seen seen;
  const std::string root = folder / "root";
  std::atomic<bool> broken{false};
  RunJob({.ranks = 2,
          .steps = 30,
          .checkpoints = {.uri = root, .every = Every::Steps(5)},
          .at_step =
              [&](LocalWorld&, outlast::Run& run, int64_t step) {
                usleep(3000);
                // A file where the next folder's entry is synced: every save fails from here to
                // step 20.
                if (run.rank() == 0 && step == 7 && !broken.exchange(true))
                  fs::rename(root, root + ".gone");
                if (run.rank() == 0 && step == 20 && fs::exists(root + ".gone")) {
                  fs::remove_all(root);
                  fs::rename(root + ".gone", root);
                }
              }},
         seen);
  EXPECT_EQ(seen.result.exit_code, 0) << seen.result.reason;
  EXPECT_FALSE(seen.failures.empty());
  EXPECT_EQ(CommittedSteps(root).front(), 30);
}

TEST(Checkpointer, RefusesARootThatCannotBeOpened) {
  Seen seen;
  RunJob({.steps = 3, .checkpoints = {.uri = "/proc/outlast-cannot-be-made"}}, seen);
  EXPECT_EQ(seen.result.exit_code, 85) << seen.result.reason;
  EXPECT_NE(seen.result.reason.find("/proc/outlast-cannot-be-made"), std::string::npos)
      << seen.result.reason;
}

TEST(Checkpointer, RefusesBadOptionsByName) {
  const auto run = outlast::Run::Join().value();
  EXPECT_NE(MessageOf(Checkpointer::Open(*run, {}).status()).find("uri"), std::string_view::npos);
  EXPECT_NE(MessageOf(Checkpointer::Open(*run, {.uri = "/tmp/x", .keep_last = 0}).status())
                .find("keep_last"),
            std::string_view::npos);
  EXPECT_NE(MessageOf(Checkpointer::Open(*run, {.uri = "/tmp/x", .keep_every = -1}).status())
                .find("keep_every"),
            std::string_view::npos);
  EXPECT_NE(
      MessageOf(Checkpointer::Open(*run, {.uri = "/tmp/x", .buffers = 7}).status()).find("buffers"),
      std::string_view::npos);
}

TEST(Checkpointer, WorksAsAWorldOfOneWithoutAnAgent) {
  TempFolder folder;
  for (int64_t last : {6, 12}) {
    const auto run = outlast::Run::Join().value();
    Toy toy;
    const auto checkpoints =
        Checkpointer::Open(*run, {.uri = folder / "root", .every = Every::Steps(3)}).value();
    const absl::Status status = run->ForEachGeneration([&](Generation&) -> absl::Status {
      OUTLAST_ASSIGN_OR_RETURN(int64_t step, checkpoints->Restore(toy.State()));
      EXPECT_EQ(step, last - 6);
      EXPECT_TRUE(toy.IsStateOf(step));
      for (; step < last; ++step) {
        OUTLAST_RETURN_IF_ERROR(checkpoints->BeforeUpdate());
        toy.Update(step);
        OUTLAST_RETURN_IF_ERROR(checkpoints->SaveIfDue(step + 1, toy.State()));
      }
      return checkpoints->Finish(last, toy.State());
    });
    EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_EQ(CommittedSteps(folder / "root").front(), 12);
}

// Each kill waits for a new checkpoint, so that the budgets are refunded and no back-off slows the
// test.
TEST(Checkpointer, SurvivesManyKillsAtRandomMoments) {
  TempFolder folder;
  Seen seen;
  std::atomic<int> kills{0};
  std::atomic<int64_t> newest_durable{0}, durable_at_kill{0};
  JobSpec spec{
      .ranks = 4, .steps = 400, .checkpoints = {.uri = folder / "root", .every = Every::Steps(7)}};
  spec.job.restarts_per_hour_limit = 1000;
  seen.on_durable = [&](int64_t step) { newest_durable = step; };
  spec.at_step = [&](LocalWorld& world, outlast::Run& run, int64_t step) {
    usleep(100);
    if (run.rank() != static_cast<int>(step % 4) || step % 13 != 5) return;
    for (int i = 0; i < 5000 && kills < 3 && newest_durable <= durable_at_kill; ++i) usleep(1000);
    if (newest_durable <= durable_at_kill) return;
    durable_at_kill = newest_durable.load();
    ++kills;
    world.KillRank(static_cast<int>((step / 4) % 4));
  };
  RunJob(spec, seen);
  EXPECT_EQ(seen.result.exit_code, 0) << seen.result.reason;
  EXPECT_EQ(seen.wrong_states, 0);
  EXPECT_GE(kills, 3);
}

}  // namespace
}  // namespace outlast
