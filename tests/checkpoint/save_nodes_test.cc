// Jobs of several nodes that save and restore: real agents' parts, peers over loopback TCP, and one
// folder that all see.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/replica_store.h"
#include "checkpoint/save_council.h"
#include "outlast/elastic/messages.h"
#include "tests/checkpoint/cluster_fixture.h"
#include "tests/checkpoint/disk_fixture.h"

namespace outlast {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

TEST(SaveNodes, TwoAgentsCommitOneCheckpointOfAllRanks) {
  const TempFolder folder;
  Saw saw;

  RunCluster({.steps = 20, .checkpoints = {.uri = folder.path(), .every = Every::Steps(10)}}, saw);

  ASSERT_THAT(saw.results, kEndsWithZero) << TextOf(saw);
  EXPECT_EQ(saw.finished, 4);
  EXPECT_EQ(saw.wrong_states, 0);
  EXPECT_THAT(CommittedSteps(folder.path()), ElementsAre(20, 10));
  const Manifest manifest = NewestManifest(folder.path());
  EXPECT_EQ(manifest.world, 4u);
  EXPECT_EQ(manifest.receipts.size(), 4u);
  EXPECT_EQ(manifest.committed_by.agent, "n0");
  EXPECT_THAT(saw.durable[0], ElementsAre(10, 20));
  EXPECT_THAT(saw.durable[1], ElementsAre(10, 20));
}

TEST(SaveNodes, RanksThatStayWhereTheyAreRestoreFromMemory) {
  const TempFolder folder;
  Saw saw;

  RunCluster({.steps = 20,
              .checkpoints = {.uri = folder.path(),
                              .every = Every::Steps(5),
                              .snapshot_every = Every::Steps(5)},
              .at_step =
                  [](LocalCluster& cluster, Generation& generation, int node, int64_t step) {
                    if (generation.number() != 1 || generation.rank() != 3 || step != 12) return;
                    cluster.KillRank(node, 1);
                    WaitForEnd(generation);
                  }},
             saw);

  ASSERT_THAT(saw.results, kEndsWithZero) << TextOf(saw);
  EXPECT_EQ(saw.wrong_states, 0) << TextOf(saw);
  EXPECT_THAT(saw.OfGeneration(2),
              ElementsAre(Saw::Restored{2, 0, 10, "memory"}, Saw::Restored{2, 1, 10, "memory"},
                          Saw::Restored{2, 2, 10, "memory"}, Saw::Restored{2, 3, 10, "memory"}))
      << TextOf(saw);
  EXPECT_EQ(NewestManifest(folder.path()).step, 20);
}

TEST(SaveNodes, NewAgentsRestoreWhatFormerOnesCommitted) {
  const TempFolder folder;
  const CheckpointerOptions options{.uri = folder.path(), .every = Every::Steps(10)};
  Saw first, second;

  RunCluster({.steps = 20, .checkpoints = options}, first);
  RunCluster({.steps = 30, .checkpoints = options}, second);

  ASSERT_THAT(first.results, kEndsWithZero) << TextOf(first);
  ASSERT_THAT(second.results, kEndsWithZero) << TextOf(second);
  EXPECT_EQ(second.wrong_states, 0);
  EXPECT_THAT(second.OfGeneration(1),
              ElementsAre(Saw::Restored{1, 0, 20, "disk"}, Saw::Restored{1, 1, 20, "disk"},
                          Saw::Restored{1, 2, 20, "disk"}, Saw::Restored{1, 3, 20, "disk"}));
  EXPECT_THAT(CommittedSteps(folder.path()), ElementsAre(30, 20, 10));
}

// All receipts are there, and the lead asks its hooks, when a follower's node goes.
TEST(SaveNodes, AFollowersEndAbortsTheSaveAndTheNextOneCommits) {
  const TempFolder folder;
  Saw saw;
  std::atomic<bool> is_killed{false}, is_over{false};

  RunCluster({.steps = 40,
              .min_world = 2,
              .waits_at = 10,
              .checkpoints = {.uri = folder.path(), .every = Every::Steps(10), .keep_last = 9},
              .at_hook =
                  [&](LocalCluster& cluster, int64_t step) {
                    if (step != 20 || is_killed.exchange(true)) return;
                    cluster.KillNode(1);
                    while (!is_over) usleep(1000);
                  },
              .at_step =
                  [&](LocalCluster&, Generation& generation, int, int64_t) {
                    if (generation.number() > 1) is_over = true;
                  }},
             saw);

  ASSERT_EQ(saw.results[0].exit_code, 0) << TextOf(saw);
  EXPECT_EQ(saw.wrong_states, 0);
  EXPECT_THAT(saw.OfGeneration(2),
              ElementsAre(Saw::Restored{2, 0, 10, "disk"}, Saw::Restored{2, 1, 10, "disk"}))
      << TextOf(saw);
  EXPECT_THAT(CommittedSteps(folder.path()), ElementsAre(40, 30, 20, 10)) << TextOf(saw);
  EXPECT_EQ(NewestManifest(folder.path()).world, 2u);
  EXPECT_THAT(saw.failures[0], Contains(HasSubstr("generation 1"))) << TextOf(saw);
}

// All wait for the last step's save when a rank goes. One that were begun between two generations
// would be announced to nobody, and hold up the next one's until its writers count as stalled.
TEST(SaveNodes, ARankThatGoesWhileAllWaitForTheLastSaveHoldsUpNobody) {
  const TempFolder folder;
  Saw saw;
  std::atomic<bool> is_killed{false};

  RunCluster({.steps = 20,
              .checkpoints = {.uri = folder.path(), .every = Every::Steps(10)},
              .at_hook =
                  [&](LocalCluster& cluster, int64_t step) {
                    if (step != 20 || is_killed.exchange(true)) return;
                    while (saw.finishing < 4) usleep(1000);
                    usleep(50'000);  // until the lead has heard of all, too
                    cluster.KillRank(1, 1);
                    while (saw.failed == 0) usleep(100);
                  }},
             saw);

  ASSERT_THAT(saw.results, kEndsWithZero) << TextOf(saw);
  EXPECT_EQ(saw.wrong_states, 0);
  EXPECT_THAT(saw.OfGeneration(2), AllOf(SizeIs(4), Each(Field(&Saw::Restored::step, 20))))
      << TextOf(saw);
  EXPECT_THAT(CommittedSteps(folder.path()), ElementsAre(20, 10)) << TextOf(saw);
  EXPECT_THAT(saw.failures[0], ElementsAre(HasSubstr("generation 1 ended"))) << TextOf(saw);
}

TEST(SaveNodes, ANewLeadTakesTheRootAndFinishesWhatTheFormerOneLeftWhole) {
  const TempFolder folder;
  Saw saw;
  std::atomic<bool> is_killed{false};

  RunCluster({.steps = 40,
              .min_world = 2,
              .waits_at = 10,
              .checkpoints = {.uri = folder.path(), .every = Every::Steps(10), .keep_last = 9},
              .at_hook =
                  [&](LocalCluster& cluster, int64_t step) {
                    if (step == 20 && !is_killed.exchange(true)) cluster.KillNode(0);
                  }},
             saw);

  ASSERT_EQ(saw.results[1].exit_code, 0) << TextOf(saw);
  EXPECT_EQ(saw.wrong_states, 0);
  EXPECT_THAT(saw.OfGeneration(2),
              ElementsAre(Saw::Restored{2, 0, 20, "disk"}, Saw::Restored{2, 1, 20, "disk"}))
      << TextOf(saw);
  EXPECT_THAT(CommittedSteps(folder.path()), ElementsAre(40, 30, 20, 10)) << TextOf(saw);
  EXPECT_EQ(NewestManifest(folder.path()).committed_by.agent, "n1");
  EXPECT_EQ(NewestManifest(folder.path()).claim, 2u);
}

// Node 2 holds no rank at first; its ranks' root, tables and buffers come when it takes over.
TEST(SaveNodes, ASpareThatTakesALostNodesRanksOpensTheRootAndRestoresFromDisk) {
  const TempFolder folder;
  Saw saw;
  std::atomic<bool> is_killed{false};

  RunCluster({.nodes = 3,
              .steps = 40,
              .world = 4,
              .waits_at = 10,
              .checkpoints = {.uri = folder.path(), .every = Every::Steps(10), .keep_last = 9},
              .at_step =
                  [&](LocalCluster& cluster, Generation& generation, int node, int64_t step) {
                    if (generation.rank() != 3 || step != 15 || is_killed.exchange(true)) return;
                    cluster.KillNode(node);
                    WaitForEnd(generation);
                  }},
             saw);

  EXPECT_EQ(saw.wrong_states, 0);
  EXPECT_THAT(saw.OfGeneration(2),
              ElementsAre(Saw::Restored{2, 0, 10, "disk"}, Saw::Restored{2, 1, 10, "disk"},
                          Saw::Restored{2, 2, 10, "disk"}, Saw::Restored{2, 3, 10, "disk"}))
      << TextOf(saw);
  EXPECT_THAT(CommittedSteps(folder.path()), ElementsAre(40, 30, 20, 10)) << TextOf(saw);
  EXPECT_EQ(NewestManifest(folder.path()).world, 4u);
}

// The lead's node is lost: the spare becomes the lead, though it has seen nothing of the job yet.
TEST(SaveNodes, ASpareThatTakesRankZeroBecomesTheLead) {
  const TempFolder folder;
  Saw saw;
  std::atomic<bool> is_killed{false};

  RunCluster({.nodes = 3,
              .steps = 30,
              .world = 4,
              .waits_at = 10,
              .checkpoints = {.uri = folder.path(), .every = Every::Steps(10), .keep_last = 9},
              .at_step =
                  [&](LocalCluster& cluster, Generation& generation, int node, int64_t step) {
                    if (generation.rank() != 0 || step != 15 || is_killed.exchange(true)) return;
                    cluster.KillNode(node);
                    WaitForEnd(generation);
                  }},
             saw);

  EXPECT_EQ(saw.wrong_states, 0);
  EXPECT_THAT(saw.OfGeneration(2), Contains(Saw::Restored{2, 0, 10, "disk"})) << TextOf(saw);
  EXPECT_THAT(CommittedSteps(folder.path()), ElementsAre(30, 20, 10)) << TextOf(saw);
  EXPECT_EQ(NewestManifest(folder.path()).claim, 2u);
}

TEST(SaveNodes, OneDamagedShardSendsAllRanksToTheNextOlderCheckpoint) {
  const TempFolder folder;
  const CheckpointerOptions options{.uri = folder.path(), .every = Every::Steps(10)};
  Saw first, second;
  RunCluster({.steps = 20, .waits_at = 10, .checkpoints = options}, first);
  ASSERT_THAT(first.results, kEndsWithZero) << TextOf(first);
  const std::string name = NewestManifest(folder.path()).checkpoint;
  const std::string shard = folder / name + "/" + ShardName(3);
  std::string bytes = ReadFileText(shard);
  bytes.back() ^= 1;
  WriteFileText(shard, bytes);

  RunCluster({.steps = 30, .checkpoints = options}, second);

  ASSERT_THAT(second.results, kEndsWithZero) << TextOf(second);
  EXPECT_EQ(second.wrong_states, 0);
  EXPECT_THAT(second.OfGeneration(1),
              ElementsAre(Saw::Restored{1, 0, 10, "disk"}, Saw::Restored{1, 1, 10, "disk"},
                          Saw::Restored{1, 2, 10, "disk"}, Saw::Restored{1, 3, 10, "disk"}))
      << TextOf(second);
  EXPECT_THAT(second.notes[0], Contains(HasSubstr("restore of step 20 from " + name)));
}

TEST(SaveNodes, ARootThatAnotherRunHoldsIsRefusedToAllNodes) {
  const TempFolder folder;
  RootOptions other;
  other.job_name = "job";
  const auto held = Root::Open(folder.path(), other).value();
  ASSERT_TRUE(held->TakeClaim().ok());
  std::atomic<bool> ended{false};
  std::thread beats([&] {
    while (!ended) {
      held->Beat().IgnoreError();
      usleep(100'000);
    }
  });
  Saw saw;

  RunCluster({.checkpoints = {.uri = folder.path(), .every = Every::Steps(10)}}, saw);
  ended = true;
  beats.join();

  EXPECT_THAT(saw.results, Each(Field(&LocalNodeResult::exit_code, 85))) << TextOf(saw);
  EXPECT_THAT(CommittedSteps(folder.path()), IsEmpty());
}

TEST(SaveNodes, ARootThatTheNodesDoNotShareIsRefusedBeforeAnyStep) {
  const TempFolder folder, other;
  Saw saw;

  RunCluster({.checkpoints = {.uri = folder.path(), .every = Every::Steps(10)},
              .other_uri = {{1, other.path()}},
              .claim_patience = absl::Milliseconds(300)},
             saw);

  EXPECT_THAT(saw.results, Each(Field(&LocalNodeResult::exit_code, 85))) << TextOf(saw);
  EXPECT_EQ(saw.results[0].reason,
            "checkpoint root '" + other.path() +
                "' on node 'n1' is not the folder that node 'n0' (the lead) has; a folder that all "
                "nodes see wanted")
      << TextOf(saw);
  EXPECT_THAT(saw.OfGeneration(1), IsEmpty());
  EXPECT_TRUE(std::filesystem::is_empty(other.path())) << "a folder of others is left as it is";
}

// As a network's file system may: node 1 sees the whole root late.
TEST(SaveNodes, ANodeWaitsForAClaimThatItSeesLate) {
  const TempFolder folder;
  const std::string root = folder / "root", late = folder / "late";
  Saw saw;
  std::thread shows([&] {
    while (!std::filesystem::exists(root + "/claims/1")) usleep(1000);
    usleep(150'000);  // some looks in vain
    std::filesystem::create_directory_symlink(root, late);
  });

  RunCluster({.steps = 20,
              .checkpoints = {.uri = root, .every = Every::Steps(10)},
              .other_uri = {{1, late}}},
             saw);
  shows.join();

  EXPECT_THAT(saw.results, kEndsWithZero) << TextOf(saw);
  EXPECT_THAT(CommittedSteps(root), ElementsAre(20, 10));
}

// Each rank goes on when it is known that all hold the last state but one, which all have sealed
// when they come here.
void AwaitsWord(const ClusterSpec& spec, Saw& saw, Generation& generation, int node, int64_t step) {
  const int64_t every = spec.checkpoints.snapshot_every.steps();
  while (step > every && saw.common(node) < (step - 1) / every * every && generation.Check().ok())
    usleep(200);
}

void LosesAtMost(int64_t every, int64_t wanted_step) {
  const TempFolder folder;
  Saw saw;
  ClusterSpec spec{.steps = 30,
                   .checkpoints = {.uri = folder.path(),
                                   .every = Every::Steps(10'000'000),
                                   .snapshot_every = Every::Steps(every)}};
  spec.at_step = [&](LocalCluster& cluster, Generation& generation, int node, int64_t step) {
    if (generation.number() > 1) return;
    AwaitsWord(spec, saw, generation, node, step);
    if (generation.rank() != 3 || step != 20) return;
    cluster.KillRank(node, 1);
    WaitForEnd(generation);
  };

  RunCluster(spec, saw);

  ASSERT_THAT(saw.results, kEndsWithZero) << TextOf(saw);
  EXPECT_EQ(saw.wrong_states, 0) << TextOf(saw);
  const auto restored = saw.OfGeneration(2);
  ASSERT_EQ(restored.size(), 4u) << TextOf(saw);
  for (const Saw::Restored& one : restored) {
    EXPECT_NE(one.from, "disk");  // its buffer, or its live state where that is the same
    EXPECT_GE(one.step, wanted_step) << TextOf(saw);
    EXPECT_EQ(one.step, restored[0].step);
  }
  EXPECT_THAT(CommittedSteps(folder.path()), ElementsAre(30));
}

// It was killed in step 20, as the snapshot of that state was being copied.
TEST(SaveNodes, AKilledRankCostsAtMostOneStepMoreThanTheSnapshotsAreApart) {
  LosesAtMost(1, 19);
  LosesAtMost(5, 15);
}

// Steps that are far shorter than the agents' word of them: what each seals must meet all the same.
TEST(SaveNodes, NodesThatRunAheadOfEachOthersWordStillSealCommonSteps) {
  const TempFolder folder;
  Saw saw;
  std::atomic<int64_t> first{kNoStep};

  RunCluster({.steps = 1'000'000,
              .checkpoints = {.uri = folder.path(), .every = Every::Steps(10'000'000)},
              .at_step =
                  [&](LocalCluster& cluster, Generation& generation, int node, int64_t step) {
                    if (generation.rank() != 3) return;
                    if (generation.number() == 2 && !saw.is_ended.exchange(true))
                      cluster.AskStop(node);
                    if (generation.number() != 1 || step % 64 != 0) return;
                    const int64_t common = saw.common(node);
                    if (first < 0) first = common;
                    if (first < 0 || common < first + 500) return;
                    cluster.KillRank(node, 1);
                    WaitForEnd(generation);
                  }},
             saw);

  EXPECT_THAT(saw.results, Each(Field(&LocalNodeResult::exit_code, 80))) << TextOf(saw);
  EXPECT_EQ(saw.wrong_states, 0);
  const auto restored = saw.OfGeneration(2);
  ASSERT_EQ(restored.size(), 4u) << TextOf(saw);
  for (const Saw::Restored& one : restored) {
    EXPECT_NE(one.from, "disk");
    EXPECT_GE(one.step, first + 500);
    EXPECT_EQ(one.step, restored[0].step);
  }
  EXPECT_EQ(CommittedSteps(folder.path()).size(), 1u);  // of the stop
}

// What all ranks have in memory becomes a checkpoint while no rank moves.
TEST(SaveNodes, WhatIsCommonIsPersistedWithoutTheTrainers) {
  const TempFolder folder;
  Saw saw;

  RunCluster({.steps = 1'000'000,
              .checkpoints = {.uri = folder.path(), .every = Every::Steps(10'000'000)},
              .at_step =
                  [&](LocalCluster& cluster, Generation& generation, int node, int64_t) {
                    if (generation.rank() != 3 || saw.is_ended || saw.common(node) < 2) return;
                    saw.persist();
                    while (saw.newest_durable == 0 && generation.Check().ok()) usleep(500);
                    saw.is_ended = true;
                    cluster.AskStop(node);
                  }},
             saw);

  ASSERT_GE(saw.durable[0].size(), 1u) << TextOf(saw);
  EXPECT_EQ(saw.durable[0], saw.durable[1]);
  EXPECT_THAT(saw.notes[0], Contains(HasSubstr("without the trainers: a test"))) << TextOf(saw);
  EXPECT_THAT(CommittedSteps(folder.path()), Contains(saw.durable[0][0]));
}

// A fresh start restores nothing that was there, but what its own former lead has committed.
TEST(SaveNodes, AFreshRunsNewLeadGoesOnFromWhatTheRunHasCommitted) {
  const TempFolder folder;
  CheckpointerOptions options{.uri = folder.path(), .every = Every::Steps(10), .keep_last = 9};
  Saw first, second;
  RunCluster({.steps = 50, .waits_at = 10, .checkpoints = options}, first);
  ASSERT_THAT(first.results, kEndsWithZero) << TextOf(first);
  options.start = CheckpointerOptions::Start::kFresh;
  std::atomic<bool> is_killed{false};

  RunCluster({.nodes = 3,
              .steps = 30,
              .world = 4,
              .waits_at = 10,
              .checkpoints = options,
              .at_step =
                  [&](LocalCluster& cluster, Generation& generation, int node, int64_t step) {
                    if (generation.rank() != 0 || step != 15 || is_killed.exchange(true)) return;
                    cluster.KillNode(node);
                    WaitForEnd(generation);
                  }},
             second);

  EXPECT_THAT(second.OfGeneration(1), Contains(Saw::Restored{1, 0, 0, ""})) << TextOf(second);
  EXPECT_THAT(second.OfGeneration(2), Contains(Saw::Restored{2, 0, 10, "disk"})) << TextOf(second);
  EXPECT_EQ(NewestManifest(folder.path()).step, 30);
}

TEST(SaveNodes, SavesByTimeAreOfOneStepOnAllNodes) {
  const TempFolder folder;
  Saw saw;
  std::atomic<bool> is_asked{false};

  RunCluster(
      {.steps = 100'000,
       .checkpoints = {.uri = folder.path()},
       .auto_interval = absl::Milliseconds(50),
       .at_step =
           [&](LocalCluster& cluster, Generation& generation, int node, int64_t) {
             if (generation.rank() == 0 && saw.newest_durable > 0 && !is_asked.exchange(true))
               cluster.AskStop(node);
           }},
      saw);

  EXPECT_THAT(saw.results, Each(Field(&LocalNodeResult::exit_code, 80))) << TextOf(saw);
  EXPECT_GE(saw.durable[0].size(), 2u);
  EXPECT_EQ(saw.durable[0], saw.durable[1]);
}

TEST(SaveNodes, AStopIsSavedByAllAndBothAgentsHearThatItIsDurable) {
  const TempFolder folder;
  Saw saw;

  RunCluster({.steps = 1'000'000,
              .checkpoints = {.uri = folder.path(), .every = Every::Steps(1000)},
              .at_step =
                  [](LocalCluster& cluster, Generation& generation, int node, int64_t step) {
                    if (generation.rank() == 3 && step == 7) cluster.AskStop(node);
                  }},
             saw);

  EXPECT_THAT(saw.results, Each(Field(&LocalNodeResult::exit_code, 80))) << TextOf(saw);
  ASSERT_EQ(saw.durable[0].size(), 1u) << TextOf(saw);
  EXPECT_EQ(saw.durable[0], saw.durable[1]);
  EXPECT_EQ(NewestManifest(folder.path()).step, saw.durable[0][0]);
}

// --- Copies on other nodes ---

PeerTierOptions CopiesAtOnce() {
  return {.bytes_per_second = 1'000'000'000, .most_bytes = 1 << 30};
}

// Waits at `step` until a copy of `least` or a later step is whole, as node 0 knows; then all
// others wait too, in their barrier.
int64_t WaitForCopies(const Saw& saw, const Generation& generation, int64_t least) {
  int64_t copied = kNoStep;
  while (generation.Check().ok() && (copied = saw.copied(0)) < least) usleep(500);
  return copied;
}

// Nothing is on the disk.
TEST(SaveNodes, ALostNodesRanksComeBackFromWhatAnotherNodeHasOfThem) {
  const TempFolder folder;
  Saw saw;
  std::atomic<bool> is_killed{false};
  std::atomic<int64_t> copied{0};

  RunCluster({.nodes = 3,
              .steps = 40,
              .world = 4,
              .checkpoints = {.uri = folder.path(),
                              .every = Every::Steps(1000),
                              .snapshot_every = Every::Steps(5)},
              .peers = CopiesAtOnce(),
              .at_step =
                  [&](LocalCluster& cluster, Generation& generation, int node, int64_t step) {
                    if (generation.rank() != 3 || step != 17 || is_killed.exchange(true)) return;
                    copied = WaitForCopies(saw, generation, 5);
                    cluster.KillNode(node);
                    WaitForEnd(generation);
                  }},
             saw);

  EXPECT_EQ(saw.wrong_states, 0) << TextOf(saw);
  EXPECT_EQ(saw.finished, 4) << TextOf(saw);
  const auto restored = saw.OfGeneration(2);
  ASSERT_EQ(restored.size(), 4u) << TextOf(saw);
  for (const Saw::Restored& one : restored) {
    EXPECT_EQ(one.step, restored[0].step);
    EXPECT_GE(one.step, copied) << "no step that was copied is lost";
    EXPECT_EQ(one.from == "peer", one.rank >= 2) << one.rank << " from " << one.from;
    EXPECT_NE(one.from, "disk") << one.rank;
  }
  EXPECT_THAT(saw.notes[0], Contains(HasSubstr("on node 'n2': rank 2 from node 'n0'")))
      << TextOf(saw);
}

// The chain of checkpoints goes on where the former lead's had ended.
TEST(SaveNodes, ASpareThatTakesRankZeroFromCopiesGoesOnWithTheChain) {
  const TempFolder folder;
  Saw saw;
  std::atomic<bool> is_killed{false};

  RunCluster({.nodes = 3,
              .steps = 30,
              .world = 4,
              .waits_at = 10,
              .checkpoints = {.uri = folder.path(), .every = Every::Steps(10), .keep_last = 9},
              .peers = CopiesAtOnce(),
              .at_step =
                  [&](LocalCluster& cluster, Generation& generation, int node, int64_t step) {
                    if (generation.rank() != 0 || step != 17 || is_killed.exchange(true)) return;
                    WaitForCopies(saw, generation, 11);
                    cluster.KillNode(node);
                    WaitForEnd(generation);
                  }},
             saw);

  EXPECT_EQ(saw.wrong_states, 0) << TextOf(saw);
  const auto restored = saw.OfGeneration(2);
  ASSERT_EQ(restored.size(), 4u) << TextOf(saw);
  EXPECT_EQ(restored[0].from, "peer") << TextOf(saw);
  EXPECT_GE(restored[0].step, 11) << TextOf(saw);
  EXPECT_THAT(CommittedSteps(folder.path()), ElementsAre(30, 20, 10)) << TextOf(saw);
  const Listing listing =
      Root::Open(folder.path(), {.access = Access::kRead}).value()->List().value();
  EXPECT_EQ(ResolveChain(listing.checkpoints).members.size(), 3u) << "one chain";
}

TEST(SaveNodes, ACopyWithAFlippedBitSendsAllRanksToTheDisk) {
  const TempFolder folder;
  Saw saw;
  std::atomic<bool> is_killed{false};

  RunCluster({.nodes = 3,
              .steps = 40,
              .world = 4,
              .waits_at = 10,
              .checkpoints = {.uri = folder.path(), .every = Every::Steps(10), .keep_last = 9},
              .peers = CopiesAtOnce(),
              .at_step =
                  [&](LocalCluster& cluster, Generation& generation, int node, int64_t step) {
                    if (generation.rank() != 3 || step != 15 || is_killed.exchange(true)) return;
                    WaitForCopies(saw, generation, 11);
                    cluster.KillNode(node);
                    // What was under way may still arrive.
                    for (int i = 0; i < 50; ++i) {
                      saw.flip(0);
                      usleep(1000);
                    }
                    WaitForEnd(generation);
                  }},
             saw);

  EXPECT_EQ(saw.wrong_states, 0) << TextOf(saw);
  EXPECT_THAT(saw.OfGeneration(2),
              ElementsAre(Saw::Restored{2, 0, 10, "disk"}, Saw::Restored{2, 1, 10, "disk"},
                          Saw::Restored{2, 2, 10, "disk"}, Saw::Restored{2, 3, 10, "disk"}))
      << TextOf(saw);
  EXPECT_THAT(saw.notes[0], Contains(HasSubstr("chunk 0 has crc"))) << TextOf(saw);
}

// The copies of the first rounds are whole; those of a later one would take for ever.
TEST(SaveNodes, ATornRoundLeavesTheFormerWholeOne) {
  const TempFolder folder;
  Saw saw;
  std::atomic<bool> is_killed{false};
  std::atomic<int64_t> copied{0};

  RunCluster({.nodes = 3,
              .steps = 60,
              .world = 4,
              .checkpoints = {.uri = folder.path(),
                              .every = Every::Steps(1000),
                              .snapshot_every = Every::Steps(2)},
              .peers = {.bytes_per_second = 1000, .most_bytes = 1 << 30},
              .at_step =
                  [&](LocalCluster& cluster, Generation& generation, int node, int64_t step) {
                    if (generation.rank() != 3 || step != 45 || is_killed.exchange(true)) return;
                    copied = WaitForCopies(saw, generation, 1);
                    cluster.KillNode(node);
                    WaitForEnd(generation);
                  }},
             saw);

  EXPECT_EQ(saw.wrong_states, 0) << TextOf(saw);
  const auto restored = saw.OfGeneration(2);
  ASSERT_EQ(restored.size(), 4u) << TextOf(saw);
  for (const Saw::Restored& one : restored) {
    EXPECT_EQ(one.step, restored[0].step);
    EXPECT_GE(one.step, copied) << TextOf(saw);
    EXPECT_EQ(one.from == "peer", one.rank >= 2) << one.rank << " from " << one.from;
  }
}

// Node 1 is lost, and then node 0, of which the spare was to have node 1's copies.
TEST(SaveNodes, ASecondLossDuringTheTransferLeavesTheDisk) {
  const TempFolder folder;
  Saw saw;
  std::atomic<bool> is_killed{false}, is_killed_again{false};

  RunCluster({.nodes = 4,
              .steps = 40,
              .world = 4,
              .waits_at = 10,
              .checkpoints = {.uri = folder.path(), .every = Every::Steps(10), .keep_last = 9},
              .peers = CopiesAtOnce(),
              .at_step =
                  [&](LocalCluster& cluster, Generation& generation, int node, int64_t step) {
                    if (generation.rank() != 3 || step != 15 || is_killed.exchange(true)) return;
                    WaitForCopies(saw, generation, 11);
                    cluster.KillNode(node);
                    WaitForEnd(generation);
                  },
              .on_note =
                  [&](LocalCluster& cluster, const std::string& line) {
                    if (line.starts_with("restoring step ") && !is_killed_again.exchange(true))
                      cluster.KillNode(0);
                  }},
             saw);

  EXPECT_TRUE(is_killed_again) << TextOf(saw);
  EXPECT_EQ(saw.wrong_states, 0) << TextOf(saw);
  EXPECT_EQ(saw.finished, 4) << TextOf(saw);
  EXPECT_THAT(saw.OfGeneration(3), Contains(Saw::Restored{3, 0, 10, "disk"})) << TextOf(saw);
  EXPECT_THAT(CommittedSteps(folder.path()), ElementsAre(40, 30, 20, 10)) << TextOf(saw);
}

TEST(SaveNodes, WhereThereIsNoRoomForCopiesOneLineSaysSoAndTrainingGoesOn) {
  const TempFolder folder;
  Saw saw;

  RunCluster({.steps = 30,
              .checkpoints = {.uri = folder.path(), .every = Every::Steps(10)},
              .peers = {.bytes_per_second = 1'000'000'000, .most_bytes = 1000}},
             saw);

  ASSERT_THAT(saw.results, kEndsWithZero) << TextOf(saw);
  EXPECT_EQ(std::ranges::count_if(
                saw.notes[0],
                [](const std::string& line) { return line.find("--peer-memory") != line.npos; }),
            1)
      << TextOf(saw);
}

}  // namespace
}  // namespace outlast
