// Jobs of several nodes: keepers that drive NodeMachines, their coordinator and peers.
#include "run/node_machine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/event_loop.h"
#include "outlast/base/mutex.h"
#include "outlast/base/status.h"
#include "outlast/run/collectives.h"
#include "outlast/testing/time_factor.h"
#include "run/keeper.h"
#include "run/tcp_peers.h"
#include "testing/local_cluster.h"

namespace outlast {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::LocalCluster;
using testing::LocalClusterOptions;
using testing::LocalNodeResult;
using ::testing::SizeIs;
using testing::TimeFactor;

constexpr absl::Duration kLong = absl::Seconds(30);

// What bodies saw, by generation and rank.
class Notes {
 public:
  struct Seen {
    int node = -1;  // the agent that started it
    int world = 0;
    std::vector<int> node_of;
    Id128 run_id;
    const outlast::Run* process = nullptr;
    bool operator==(const Seen&) const = default;
  };
  void Write(const outlast::Run& run, const Generation& generation, int node) {
    Seen seen{node, generation.world(), {}, run.run_id(), &run};
    for (int rank = 0; rank < generation.world(); ++rank)
      seen.node_of.push_back(generation.node_of(rank));
    MutexLock lock(mutex_);
    EXPECT_TRUE(seen_[generation.number()].emplace(generation.rank(), seen).second)
        << "two processes are rank " << generation.rank();
    changed_.NotifyAll();
  }
  // Until `ranks` ranks have entered `generation`.
  void WaitFor(uint64_t generation, size_t ranks) {
    MutexLock lock(mutex_);
    while (seen_[generation].size() < ranks) changed_.Wait(mutex_);
  }
  std::map<int, Seen> Of(uint64_t generation) {
    MutexLock lock(mutex_);
    return seen_[generation];
  }
  uint64_t newest() {
    MutexLock lock(mutex_);
    return seen_.empty() ? 0 : seen_.rbegin()->first;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::map<uint64_t, std::map<int, Seen>> seen_ ABSL_GUARDED_BY(mutex_);
};

// Stays in the body until the generation ends.
absl::Status Train(const Generation& generation) {
  Mutex mutex;
  CondVar changed;
  bool ended = false;
  Generation& standing = const_cast<Generation&>(generation);
  standing.OnAbort([&] {
    MutexLock lock(mutex);
    ended = true;
    changed.NotifyAll();
  });
  MutexLock lock(mutex);
  while (!ended) changed.Wait(mutex);
  return generation.Check();
}

std::vector<int> NodesOfRanks(const std::map<int, Notes::Seen>& seen) {
  std::vector<int> nodes;
  for (const auto& [rank, one] : seen) nodes.push_back(one.node);
  return nodes;
}

LocalClusterOptions Quick(int nodes, int slots) {
  LocalClusterOptions options{.nodes = nodes, .slots = slots};
  options.elastic.rejoin_grace = absl::Milliseconds(200) * TimeFactor();
  options.elastic.last_call = absl::Milliseconds(100) * TimeFactor();
  return options;
}

const auto kEndsWithZero = Each(Field(&LocalNodeResult::exit_code, 0));

TEST(NodeMachine, TheFirstGenerationHasTheRanksAndNodesOfTheCoordinatorsMap) {
  LocalCluster cluster(Quick(2, 2));
  Notes notes;

  const auto results = cluster.Run([&](outlast::Run& run, int node) {
    EXPECT_EQ(run.rank() / 2, node);
    EXPECT_EQ(run.world(), 4);
    return run.ForEachGeneration([&](Generation& generation) {
      EXPECT_EQ(run.rank(), generation.rank());
      notes.Write(run, generation, node);
      return absl::OkStatus();
    });
  });

  EXPECT_THAT(results, kEndsWithZero);
  const auto seen = notes.Of(1);
  EXPECT_THAT(NodesOfRanks(seen), ElementsAre(0, 0, 1, 1));
  for (const auto& [rank, one] : seen) {
    EXPECT_EQ(one.world, 4);
    EXPECT_THAT(one.node_of, ElementsAre(0, 0, 1, 1));
    EXPECT_EQ(one.run_id, seen.at(0).run_id);
    EXPECT_FALSE(one.run_id.is_zero());
  }
  for (const LocalNodeResult& result : results) {
    EXPECT_EQ(result.refused, 0);
    EXPECT_THAT(result.lines, IsEmpty());
    EXPECT_THAT(result.faults, IsEmpty());
  }
}

TEST(NodeMachine, ADeadRankIsReplacedAndAllOthersEnterTheNextGenerationAsTheyAre) {
  LocalCluster cluster(Quick(2, 2));
  Notes notes;

  const auto results = cluster.Run([&](outlast::Run& run, int node) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      notes.Write(run, generation, node);
      if (generation.number() == 2) return absl::OkStatus();
      if (generation.rank() == 3) {
        notes.WaitFor(1, 4);
        return absl::InternalError("a broken card");
      }
      return Train(generation);
    });
  });

  EXPECT_THAT(results, kEndsWithZero);
  const auto first = notes.Of(1), second = notes.Of(2);
  EXPECT_THAT(NodesOfRanks(second), ElementsAre(0, 0, 1, 1));
  for (const int rank : {0, 1, 2}) EXPECT_EQ(second.at(rank), first.at(rank)) << rank;
  EXPECT_EQ(second.at(3).run_id, first.at(3).run_id);
  ASSERT_THAT(results[1].faults, SizeIs(1));
  EXPECT_EQ(results[1].faults[0].rank, 3);
  EXPECT_EQ(results[1].faults[0].end.code, 1);
  EXPECT_FALSE(results[1].faults[0].victim);
  EXPECT_EQ(results[1].faults[0].node, "n1");
  EXPECT_THAT(results[0].faults, IsEmpty());
  EXPECT_EQ(results[0].spawns, 2);
  EXPECT_EQ(results[1].spawns, 3);
}

TEST(NodeMachine, ASpareTakesOverTheRanksOfALostNode) {
  LocalClusterOptions options = Quick(3, 2);
  options.elastic.membership = {.min_world = 4, .max_world = 4};
  LocalCluster cluster(options);
  Notes notes;

  const auto results = cluster.Run([&](outlast::Run& run, int node) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      notes.Write(run, generation, node);
      if (generation.number() == 2) return absl::OkStatus();
      if (generation.rank() == 0) {
        notes.WaitFor(1, 4);
        cluster.KillNode(notes.Of(1).at(3).node);
      }
      return Train(generation);
    });
  });

  const auto first = notes.Of(1), second = notes.Of(2);
  const int lost = first.at(3).node;
  for (size_t node = 0; node < results.size(); ++node) {
    EXPECT_EQ(results[node].exit_code, static_cast<int>(node) == lost ? -1 : 0) << node;
  }
  ASSERT_THAT(second, SizeIs(4));
  for (const auto& [rank, one] : second) EXPECT_NE(one.node, lost);
  EXPECT_EQ(second.at(0), first.at(0));
  EXPECT_EQ(second.at(1), first.at(1));
}

TEST(NodeMachine, WithoutASpareTheWorldShrinksAndSurvivorsGetOtherRanks) {
  LocalClusterOptions options = Quick(3, 2);
  options.elastic.membership = {.min_world = 2, .max_world = 6};
  LocalCluster cluster(options);
  Notes notes;

  const auto results = cluster.Run([&](outlast::Run& run, int node) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      EXPECT_EQ(run.rank(), generation.rank());
      EXPECT_EQ(run.world(), generation.world());
      notes.Write(run, generation, node);
      if (generation.number() == 2) return absl::OkStatus();
      if (generation.rank() == 2) {
        notes.WaitFor(1, 6);
        cluster.KillNode(0);
      }
      return Train(generation);
    });
  });

  EXPECT_EQ(results[1].exit_code, 0) << results[1].reason;
  EXPECT_EQ(results[2].exit_code, 0) << results[2].reason;
  const auto first = notes.Of(1), second = notes.Of(2);
  EXPECT_THAT(NodesOfRanks(second), ElementsAre(1, 1, 2, 2));
  for (const int rank : {0, 1, 2, 3}) {
    EXPECT_EQ(second.at(rank).process, first.at(rank + 2).process) << "a survivor was replaced";
    EXPECT_THAT(second.at(rank).node_of, ElementsAre(0, 0, 1, 1));
  }
}

TEST(NodeMachine, ACoordinatorThatGoesAndComesBackAbortsNothing) {
  LocalCluster cluster(Quick(2, 2));
  Notes notes;

  const auto results = cluster.Run([&](outlast::Run& run, int node) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      notes.Write(run, generation, node);
      notes.WaitFor(1, 4);
      if (generation.rank() != 0) return absl::OkStatus();
      cluster.CrashCoordinator();
      // Until all agents know.
      bool down = false;
      cluster.OnCoordinator([&](const Coordinator* coordinator) { down = coordinator == nullptr; });
      EXPECT_TRUE(down);
      cluster.RestartCoordinator();
      return generation.Check();
    });
  });

  EXPECT_THAT(results, kEndsWithZero);
  EXPECT_EQ(notes.newest(), 1);
  for (const LocalNodeResult& result : results) {
    EXPECT_EQ(result.spawns, 2);
    EXPECT_THAT(result.lines,
                ElementsAre("no coordinator: the coordinator crashed; training goes on",
                            "the coordinator is there"));
  }
}

// Whatever it is told comes from the test.
struct SilentLink : CoordinatorLink {
  void Listen(Ears to) override { ears = std::move(to); }
  void Open() override {}
  void Hello(const control::Hello&) override {}
  void Send(const control::AgentMessage&) override {}
  void Drop(const std::string&) override {}
  Ears ears;
};

TEST(NodeMachine, TellsWhyItHasNoCoordinatorInOneLineAMinuteForEachReason) {
  const auto loop = std::move(EventLoop::Make()).value();
  const auto peers = MakeTcpPeers(*loop, {.job = "job", .node = "a", .token = "secret"}).value();
  SilentLink link;
  absl::Duration now = absl::Seconds(100);
  std::vector<std::string> lines;
  NodeMachine machine({.node = {.elastic = {.job = "job"}, .node = "a", .incarnation = 1},
                       .say = [&](const std::string& line) { lines.push_back(line); }},
                      link, *peers);
  machine.Listen([&](const JobMachine::Happening& happening) { happening({.now = now}); });
  const auto retry = [&] {
    now += absl::Seconds(2);
    machine.Step(TimerFired{1}, {.now = now});
  };
  const auto refuse = [&](const std::string& reason) {
    link.ears.on_up();
    link.ears.on_said(control::Refused{control::Refusal::kLater, reason});
    retry();
  };
  machine.Step(StartEvent{}, {.now = now});

  for (int port = 40000; port < 40020; ++port) {
    refuse("taken by 1f" + std::to_string(port) + " at 10.0.0.1:" + std::to_string(port));
    link.ears.on_down("10.0.0.9:" + std::to_string(port) + ": connection refused");
    retry();
  }

  EXPECT_THAT(lines, ElementsAre("refused: taken by 1f40000 at 10.0.0.1:40000",
                                 "no coordinator: 10.0.0.9:40000: connection refused",
                                 "refused: taken by 1f40015 at 10.0.0.1:40015",
                                 "no coordinator: 10.0.0.9:40015: connection refused"));
}

TEST(NodeMachine, WhatARankPutsOnOneNodeAllOthersGet) {
  LocalCluster cluster(Quick(3, 2));

  const auto results = cluster.Run([&](outlast::Run& run, int) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      for (int round = 0; round < 4; ++round) {
        const auto key = [&](int rank) {
          return "round " + std::to_string(round) + " of " + std::to_string(rank);
        };
        const std::string mine = std::to_string(100 * round + generation.rank());
        OUTLAST_RETURN_IF_ERROR(generation.Put(key(generation.rank()), mine));
        for (int rank = 0; rank < generation.world(); ++rank) {
          OUTLAST_ASSIGN_OR_RETURN(const std::string theirs, generation.Get(key(rank), kLong));
          EXPECT_EQ(theirs, std::to_string(100 * round + rank));
        }
      }
      return absl::OkStatus();
    });
  });

  EXPECT_THAT(results, kEndsWithZero);
}

TEST(NodeMachine, KeysAreOfTheirGeneration) {
  LocalCluster cluster(Quick(2, 1));

  const auto results = cluster.Run([&](outlast::Run& run, int) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      const std::string number = std::to_string(generation.number());
      if (generation.rank() == 1) OUTLAST_RETURN_IF_ERROR(generation.Put("key", number));
      OUTLAST_ASSIGN_OR_RETURN(const std::string value, generation.Get("key", kLong));
      EXPECT_EQ(value, number);
      if (generation.number() == 2) return absl::OkStatus();
      if (generation.rank() == 0) return absl::InternalError("a broken card");
      // Waits at the lead, on a generation that ends.
      const auto waits = generation.Get("nobody puts it", kLong);
      EXPECT_EQ(waits.status().code(), absl::StatusCode::kAborted);
      return waits.status();
    });
  });

  EXPECT_THAT(results, kEndsWithZero);
}

TEST(NodeMachine, AGroupSumsOverAllNodesAndAgainAfterALoss) {
  LocalCluster cluster(Quick(2, 2));

  const auto results = cluster.Run([&](outlast::Run& run, int) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      OUTLAST_ASSIGN_OR_RETURN(Group group, Group::Make(generation, run, "data", 4 << 20));
      std::vector<float> data(100'000, static_cast<float>(generation.rank() + 1));
      OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(data));
      EXPECT_EQ(std::count(data.begin(), data.end(), 10.0f), 100'000);
      if (generation.number() == 2) return absl::OkStatus();
      if (generation.rank() == 2) return absl::InternalError("a broken card");
      // Nobody comes: the barrier ends with the generation.
      return group.Barrier();
    });
  });

  EXPECT_THAT(results, kEndsWithZero);
  for (const LocalNodeResult& result : results) EXPECT_EQ(result.generation, 2);
}

TEST(NodeMachine, AStopIsAgreedOverAllNodesAndEndsAtOneStep) {
  LocalCluster cluster(Quick(2, 2));
  Mutex mutex;
  std::vector<int64_t> stopped_at;

  const auto results = cluster.Run([&](outlast::Run& run, int node) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      OUTLAST_ASSIGN_OR_RETURN(Group group, Group::Make(generation, run, "data", 4096));
      for (int64_t step = 1;; ++step) {
        OUTLAST_RETURN_IF_ERROR(group.Barrier());
        if (step == 3 && generation.rank() == 3) cluster.AskStop(node, SIGINT);
        OUTLAST_ASSIGN_OR_RETURN(const auto verdict, run.CompleteStep(step));
        if (verdict == outlast::Run::StepVerdict::kGoOn) continue;
        run.MarkStopped(step);
        MutexLock lock(mutex);
        stopped_at.push_back(step);
        return generation.Check();
      }
    });
  });

  for (const LocalNodeResult& result : results) EXPECT_EQ(result.exit_code, 130) << result.reason;
  ASSERT_THAT(stopped_at, SizeIs(4));
  EXPECT_THAT(stopped_at, Each(stopped_at.front()));
}

}  // namespace
}  // namespace outlast
