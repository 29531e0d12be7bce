// The watch of a job of two nodes, the whole way: ranks as threads, keepers, peers over TCP, a
// coordinator.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "outlast/base/clock.h"
#include "outlast/base/status.h"
#include "outlast/run/collectives.h"
#include "outlast/testing/time_factor.h"
#include "outlast/watch/watchdog.h"
#include "testing/local_cluster.h"
#include "tests/support/temp_folder.h"
#include "tests/watch/no_stacks.h"
#include "watch/monitor.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::LocalCluster;
using testing::LocalClusterOptions;
using testing::LocalNodeResult;
using ::testing::SizeIs;
using testing::TimeFactor;

WatchdogOptions Quick(WatchMode mode) {
  return {.mode = mode,
          .poll = absl::Milliseconds(50),
          .floor = absl::Milliseconds(200),
          .looks_apart = absl::Milliseconds(100)};
}

// Two nodes with a rank each; what each node's watch has found.
class WatchedCluster {
 public:
  WatchedCluster() {
    options_.slots = 1;
    options_.timeout = absl::Seconds(60) * TimeFactor();
    options_.prepare = [this](Keeper& keeper, int node) {
      monitors_[node] = std::make_unique<Monitor>(
          keeper, hosts_[static_cast<size_t>(node)],
          MonitorListener{.on_finding = [this, node](const Verdict& verdict, const std::string&) {
            findings_[node].push_back(verdict);
          }});
      keeper.Attach(monitors_[node].get());
    };
    options_.finish = [this](Keeper& keeper, int node) {
      keeper.Detach(monitors_[node].get());
      monitors_.erase(node);
    };
  }

  std::vector<LocalNodeResult> Run(const LocalCluster::Body& body) {
    return LocalCluster(options_).Run(body);
  }
  const std::vector<Verdict>& findings(int node) { return findings_[node]; }

 private:
  LocalClusterOptions options_;
  std::array<NoStacks, 2> hosts_;  // each on its node's thread
  std::map<int, std::unique_ptr<Monitor>> monitors_;
  std::map<int, std::vector<Verdict>> findings_;
};

std::vector<int> CulpritsOf(const Verdict& verdict) {
  std::vector<int> ranks;
  for (const Culprit& culprit : verdict.culprits) ranks.push_back(culprit.rank);
  return ranks;
}

// Waits in an all-reduce, in the first generation no longer than it declares.
absl::Status Sum(Run& run, const Generation& generation, Group& group) {
  const SectionScope section =
      run.Section("sum", {.phase = Phase::kCommWait,
                          .limit = generation.number() == 1 ? absl::Milliseconds(300) * TimeFactor()
                                                            : absl::InfiniteDuration()});
  std::array<float, 4> values = {1, 1, 1, 1};
  return group.AllReduceSum(values);
}

// Idling is no fault that its own node could see.
TEST(WatchOfNodes, NamesTheRankOfTheOtherNodeThatNeverComes) {
  WatchedCluster cluster;
  const auto results = cluster.Run([](outlast::Run& run, int) -> absl::Status {
    OUTLAST_ASSIGN_OR_RETURN(auto watchdog, Watchdog::Start(run, Quick(WatchMode::kAct)));
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      OUTLAST_ASSIGN_OR_RETURN(auto group, Group::Make(generation, run, "sum", 64));
      while (generation.number() == 1 && generation.rank() == 1 && !generation.is_aborted())
        Clock::Real().SleepFor(absl::Milliseconds(5));
      OUTLAST_RETURN_IF_ERROR(generation.Check());
      return Sum(run, generation, group);
    });
  });

  for (const LocalNodeResult& node : results) {
    EXPECT_EQ(node.exit_code, 0) << node.reason;
    EXPECT_EQ(node.generation, 2u);
    EXPECT_EQ(node.spawns, 1) << "survivors keep their process";
  }
  EXPECT_THAT(results[0].faults, IsEmpty());
  ASSERT_THAT(results[1].faults, SizeIs(1));
  EXPECT_EQ(results[1].faults[0].rank, 1);
  EXPECT_EQ(results[1].faults[0].found_by, "watchdog: stuck_outside_comm");
  // Both nodes know: one holds the culprit, the other who waits.
  for (const int node : {0, 1}) {
    ASSERT_THAT(cluster.findings(node), SizeIs(1)) << node;
    EXPECT_THAT(CulpritsOf(cluster.findings(node)[0]), ElementsAre(1));
    EXPECT_THAT(cluster.findings(node)[0].waiting, ElementsAre(0));
  }
}

TEST(WatchOfNodes, FindsCollectivesThatTheNodesIssueInOppositeOrders) {
  WatchedCluster cluster;
  const auto results = cluster.Run([](outlast::Run& run, int) -> absl::Status {
    OUTLAST_ASSIGN_OR_RETURN(auto watchdog, Watchdog::Start(run, Quick(WatchMode::kAct)));
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      OUTLAST_ASSIGN_OR_RETURN(auto one, Group::Make(generation, run, "one", 64));
      OUTLAST_ASSIGN_OR_RETURN(auto two, Group::Make(generation, run, "two", 64));
      const bool swaps = generation.number() == 1 && generation.rank() == 1;
      OUTLAST_RETURN_IF_ERROR(Sum(run, generation, swaps ? two : one));
      return Sum(run, generation, swaps ? one : two);
    });
  });

  for (const LocalNodeResult& node : results) {
    EXPECT_EQ(node.exit_code, 0) << node.reason;
    EXPECT_EQ(node.generation, 2u);
    EXPECT_EQ(node.spawns, 1);
  }
  ASSERT_THAT(results[0].faults, SizeIs(1)) << "the first of the cycle ends the generation";
  EXPECT_EQ(results[0].faults[0].found_by, "watchdog: collective_order_deadlock");
  EXPECT_THAT(results[1].faults, IsEmpty());
  // The lead holds it, and ends the generation, perhaps before the other node has heard.
  ASSERT_THAT(cluster.findings(0), SizeIs(1));
  EXPECT_THAT(cluster.findings(0)[0].cycle, ElementsAre(0, 1));
}

// Rank 0 is past its learned or configured limit; rank 1 says how long it may take.
TEST(WatchOfNodes, SparesARankOfTheOtherNodeWithinItsOwnLimit) {
  WatchedCluster cluster;
  const auto results = cluster.Run([](outlast::Run& run, int) -> absl::Status {
    WatchdogOptions options = Quick(WatchMode::kAct);
    options.first_limits.step = absl::Milliseconds(200);
    OUTLAST_ASSIGN_OR_RETURN(auto watchdog, Watchdog::Start(run, options));
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      OUTLAST_ASSIGN_OR_RETURN(auto group, Group::Make(generation, run, "sum", 64));
      if (generation.rank() == 1) {
        const SectionScope save = run.Section(
            "save", {.phase = Phase::kCheckpointWrite, .limit = absl::Seconds(30) * TimeFactor()});
        // Five of the other's limits, and some judgements.
        Clock::Real().SleepFor(absl::Seconds(1));
      }
      OUTLAST_RETURN_IF_ERROR(generation.Check());
      std::array<float, 4> values = {1, 1, 1, 1};
      return group.AllReduceSum(values);
    });
  });

  for (const LocalNodeResult& node : results) {
    EXPECT_EQ(node.exit_code, 0) << node.reason;
    EXPECT_EQ(node.generation, 1u);
    EXPECT_THAT(node.faults, IsEmpty());
  }
}

// In observe mode nothing is done, and a finding is told once.
TEST(WatchOfNodes, OnlyTellsInObserveMode) {
  WatchedCluster cluster;
  const auto results = cluster.Run([](outlast::Run& run, int) -> absl::Status {
    OUTLAST_ASSIGN_OR_RETURN(auto watchdog, Watchdog::Start(run, Quick(WatchMode::kObserve)));
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      OUTLAST_ASSIGN_OR_RETURN(auto group, Group::Make(generation, run, "sum", 64));
      if (generation.rank() == 1) Clock::Real().SleepFor(absl::Milliseconds(1500) * TimeFactor());
      return Sum(run, generation, group);
    });
  });
  for (const LocalNodeResult& node : results) {
    EXPECT_EQ(node.exit_code, 0) << node.reason;
    EXPECT_EQ(node.generation, 1u);
    EXPECT_THAT(node.faults, IsEmpty());
  }
  for (const int node : {0, 1}) {
    ASSERT_THAT(cluster.findings(node), SizeIs(1)) << node;
    EXPECT_THAT(CulpritsOf(cluster.findings(node)[0]), ElementsAre(1));
  }
}

}  // namespace
}  // namespace outlast
