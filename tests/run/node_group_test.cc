// Groups of ranks on several nodes: each rank is told where all are, as if agents had said so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/socket.h"
#include "outlast/base/clock.h"
#include "outlast/base/mutex.h"
#include "outlast/base/status.h"
#include "outlast/blackbox/flight_log.h"
#include "outlast/run/collectives.h"
#include "outlast/testing/local_world.h"
#include "outlast/testing/time_factor.h"
#include "run/chain_plan.h"
#include "run/group_access.h"

namespace outlast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::LocalWorld;
using testing::LocalWorldOptions;
using testing::LocalWorldResult;
using testing::TimeFactor;

using Nodes = std::vector<int>;

GroupPlace PlaceOf(const Generation& generation, const Nodes& node_of) {
  const int node = node_of[static_cast<size_t>(generation.rank())];
  return {.node_of = node_of, .address = "127.0.0." + std::to_string(node + 1)};
}

LocalWorldResult InGroups(const Nodes& node_of, size_t max_bytes,
                          const std::function<absl::Status(Generation&, Group&)>& body) {
  LocalWorld world(static_cast<int>(node_of.size()));
  return world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      OUTLAST_ASSIGN_OR_RETURN(Group group, GroupAccess::Make(generation, run, "data", max_bytes,
                                                              PlaceOf(generation, node_of)));
      return body(generation, group);
    });
  });
}

// One node, one rank a node, several, unevenly, and ranks of a node with gaps between them.
const std::vector<Nodes> kPlacements = {{0, 0, 0, 0}, {0, 1, 2, 3}, {0, 0, 1, 1}, {0, 1, 1, 1},
                                        {2, 2, 2, 5}, {0, 1, 0, 1}, {1, 0, 0, 1}, {0, 1, 2, 0}};

std::string NameOf(const Nodes& nodes) {
  std::string name;
  for (const int node : nodes) name += std::to_string(node);
  return name;
}

TEST(PlanChain, MakesAStageOfRanksThatFollowEachOtherOnANode) {
  const ChainPlan plan = PlanChain({7, 7, 3, 3, 7}, 1);
  EXPECT_THAT(plan.stages, ElementsAre(Stage{7, 0, 2}, Stage{3, 2, 2}, Stage{7, 4, 1}));
  EXPECT_THAT(plan.own_stages, ElementsAre(0, 2));
  EXPECT_THAT(plan.local_ranks, ElementsAre(0, 1, 4));
  EXPECT_EQ(plan.local_index, 1);
  EXPECT_EQ(plan.lanes, 2);  // node 3 has two ranks
  EXPECT_THAT(plan.lane_of_stage, ElementsAre(1, 3, 1));
  EXPECT_EQ(plan.StageOf(3), 1);
  EXPECT_FALSE(PlanChain({7, 7, 3, 3, 7}, 4).holds_a_lane());
}

class Placement : public ::testing::TestWithParam<Nodes> {};
INSTANTIATE_TEST_SUITE_P(OfFourRanks, Placement, ::testing::ValuesIn(kPlacements),
                         [](const auto& placed) { return "on_" + NameOf(placed.param); });

TEST_P(Placement, AllReduceSumGivesEveryRankTheSumOfEverySize) {
  const LocalWorldResult result =
      InGroups(GetParam(), 4 << 20, [](Generation& generation, Group& group) -> absl::Status {
        for (const size_t count : {0, 1, 3, 16384, 16385, 262144 + 5, 1 << 20}) {
          std::vector<float> data(count, static_cast<float>(generation.rank() + 1));
          OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(data));
          EXPECT_EQ(std::count(data.begin(), data.end(), 10.0f),
                    static_cast<long>(count));  // 1 + 2 + 3 + 4
        }
        return absl::OkStatus();
      });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

TEST_P(Placement, BroadcastReachesAllFromEveryRoot) {
  const LocalWorldResult result =
      InGroups(GetParam(), 3 << 20, [](Generation& generation, Group& group) -> absl::Status {
        for (int round = 0; round < 12; ++round) {
          const int root = round % 4;
          std::vector<uint8_t> data(
              round < 8 ? static_cast<size_t>(round) * 77 : 3 << 20,
              static_cast<uint8_t>(generation.rank() == root ? round + 1 : 0));
          OUTLAST_RETURN_IF_ERROR(group.Broadcast(std::as_writable_bytes(std::span(data)), root));
          EXPECT_EQ(std::count(data.begin(), data.end(), static_cast<uint8_t>(round + 1)),
                    static_cast<long>(data.size()));
        }
        return absl::OkStatus();
      });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

TEST_P(Placement, OperationsFollowEachOtherWithoutMixing) {
  const int rounds = TimeFactor() > 1 ? 20 : 100;
  const LocalWorldResult result =
      InGroups(GetParam(), 4096, [&](Generation& generation, Group& group) -> absl::Status {
        for (int round = 0; round < rounds; ++round) {
          std::array<int, 2> word = {generation.rank() == round % 4 ? round : -1, 0};
          OUTLAST_RETURN_IF_ERROR(
              group.Broadcast(std::as_writable_bytes(std::span(word)), round % 4));
          EXPECT_EQ(word[0], round);
          std::array<float, 1> one = {1};
          OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(one));
          EXPECT_EQ(one[0], 4);
          if (round % 4 == 0) OUTLAST_RETURN_IF_ERROR(group.Barrier());
        }
        return absl::OkStatus();
      });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

TEST(NodeGroup, GivesTheSameBitsOnEveryRankAndForEveryPlacement) {
  constexpr size_t kCount = 600'000;  // two lanes' worth
  std::vector<std::vector<float>> sums;
  Mutex mutex;
  for (const Nodes& nodes : kPlacements) {
    const LocalWorldResult result =
        InGroups(nodes, kCount * 4, [&](Generation& generation, Group& group) -> absl::Status {
          std::mt19937 random(static_cast<unsigned>(generation.rank()));
          std::vector<float> data(kCount);
          for (float& value : data)
            value = std::ldexp(static_cast<float>(random()), static_cast<int>(random() % 60) - 60);
          OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(data));
          MutexLock lock(mutex);
          sums.push_back(data);
          return absl::OkStatus();
        });
    EXPECT_EQ(result.exit_code, 0) << result.reason;
  }
  ASSERT_EQ(sums.size(), 4 * kPlacements.size());
  for (const auto& sum : sums) ASSERT_EQ(std::memcmp(sum.data(), sums[0].data(), kCount * 4), 0);
}

TEST_P(Placement, ARankThatCalledSomethingElseIsNamedOnAllRanks) {
  for (const int odd : {0, 1, 3}) {
    std::atomic<int> told = 0;
    const LocalWorldResult result =
        InGroups(GetParam(), 64, [&](Generation& generation, Group& group) -> absl::Status {
          std::array<float, 2> data = {5, 5};
          const absl::Status status =
              generation.rank() == odd ? group.Barrier() : group.AllReduceSum(data);
          EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
          EXPECT_THAT(std::string(MessageOf(status)),
                      AllOf(HasSubstr("rank " + std::to_string(odd) + " called Barrier"),
                            HasSubstr("AllReduceSum")));
          EXPECT_THAT(data, ElementsAre(5, 5));
          ++told;
          return absl::OkStatus();
        });
    EXPECT_EQ(result.exit_code, 0) << result.reason;
    EXPECT_EQ(told, 4);
  }
}

// Whoever came after all may still see that one barrier through; then the group is of no use to it
// either.
TEST(NodeGroup, OneThatGivesUpIsNamedOnTheOthersAndTheGroupIsOfNoUse) {
  const LocalWorldResult result =
      InGroups({0, 0, 1, 1}, 64, [](Generation& generation, Group& group) -> absl::Status {
        OUTLAST_RETURN_IF_ERROR(group.Barrier({.timeout = absl::Seconds(20)}));
        if (generation.rank() == 0) {
          const absl::Status alone = group.Barrier({.timeout = absl::Milliseconds(30)});
          EXPECT_EQ(alone.code(), absl::StatusCode::kDeadlineExceeded) << alone;
          EXPECT_THAT(std::string(MessageOf(alone)), HasSubstr("not all 4 ranks"));
          EXPECT_EQ(group.Barrier().code(), absl::StatusCode::kFailedPrecondition);
          return generation.Put("tried", "");
        }
        if (generation.rank() == 3)
          OUTLAST_RETURN_IF_ERROR(generation.Get("tried", absl::Seconds(20)).status());
        absl::Status other = group.Barrier({.timeout = absl::Seconds(20)});
        if (other.ok() && generation.rank() != 1)
          other = group.Barrier({.timeout = absl::Seconds(20)});
        EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition) << other;
        EXPECT_THAT(std::string(MessageOf(other)), HasSubstr("rank 0 gave up"));
        return absl::OkStatus();
      });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

TEST(NodeGroup, ALostConnectionWithoutAnAbortNamesTheRank) {
  LocalWorld world(2);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      auto group = GroupAccess::Make(generation, run, "data", 64, PlaceOf(generation, {0, 1}));
      OUTLAST_RETURN_IF_ERROR(group.status());
      if (generation.rank() == 1) {
        { const Group dropped = std::move(*group); }
        return generation.Get("tried", absl::Seconds(20)).status();
      }
      std::array<float, 1> data = {3};
      const absl::Status lost = group->AllReduceSum(data, {.timeout = absl::Seconds(1)});
      EXPECT_EQ(lost.code(), absl::StatusCode::kUnavailable) << lost;
      EXPECT_THAT(std::string(MessageOf(lost)), HasSubstr("rank 1"));
      EXPECT_EQ(data[0], 3);
      return generation.Put("tried", "");
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

TEST(NodeGroup, AnAbortEndsItAtOnceAndTheNextGenerationWorks) {
  for (const Nodes& nodes : {Nodes{0, 1, 2, 3}, Nodes{0, 0, 1, 1}, Nodes{0, 1, 1, 0}}) {
    LocalWorld world(4);
    std::atomic<int64_t> killed_ns{0}, slowest_ns{0};
    std::atomic<int> sums{0};
    const LocalWorldResult result = world.Run([&](outlast::Run& run) {
      return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
        OUTLAST_ASSIGN_OR_RETURN(Group group, GroupAccess::Make(generation, run, "data", 4096,
                                                                PlaceOf(generation, nodes)));
        std::vector<float> data(1000, 1);
        if (generation.number() == 1 && generation.rank() == 3) {
          for (int peer = 0; peer < 3; ++peer) {
            OUTLAST_RETURN_IF_ERROR(
                generation.Get(std::to_string(peer), absl::Seconds(20)).status());
          }
          Clock::Real().SleepFor(absl::Milliseconds(5));  // so that they sleep in the kernel
          killed_ns = MonotonicNanos();
          return absl::InternalError("a crash");
        }
        OUTLAST_RETURN_IF_ERROR(generation.Put(std::to_string(generation.rank()), "enters"));
        const absl::Status left = group.AllReduceSum(data);
        if (generation.number() > 1) {
          EXPECT_EQ(data[999], 4);
          ++sums;
          return left;
        }
        slowest_ns = std::max(slowest_ns.load(), MonotonicNanos() - killed_ns);
        EXPECT_EQ(left.code(), absl::StatusCode::kAborted) << left;
        EXPECT_EQ(std::count(data.begin(), data.end(), 1.0f), 1000);
        return left;
      });
    });
    EXPECT_EQ(result.exit_code, 0) << result.reason;
    EXPECT_EQ(sums, 4);
    EXPECT_LT(absl::Nanoseconds(slowest_ns.load()), absl::Milliseconds(30) * TimeFactor());
  }
}

TEST(NodeGroup, OutlastsKillsInsideAndWhileItConnects) {
  constexpr int kKills = 15;
  LocalWorldOptions options;
  options.job.max_restarts = options.job.same_root_limit = options.job.restarts_per_hour_limit =
      1000;
  options.job.progress_steps = 1;
  LocalWorld world(4, options);
  std::atomic<int> kills{0};
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      std::mt19937 random(static_cast<unsigned>(generation.number()));
      const auto at = static_cast<int>(random() % 12);
      const auto victim = static_cast<int>(random() % 4);
      const Nodes& nodes = kPlacements[1 + random() % (kPlacements.size() - 1)];
      if (at < 2 && generation.rank() == victim && kills++ < kKills)
        world.KillRank(generation.rank());
      OUTLAST_ASSIGN_OR_RETURN(Group group, GroupAccess::Make(generation, run, "data", 1 << 21,
                                                              PlaceOf(generation, nodes)));
      for (int step = 1; step < 30; ++step) {
        OUTLAST_RETURN_IF_ERROR(
            run.CompleteStep(static_cast<int64_t>(generation.number()) * 100 + step).status());
        if (step == at && generation.rank() == victim && kills++ < kKills)
          world.KillRank(generation.rank());
        std::vector<float> data(step % 2 == 0 ? 1 << 14 : 1 << 19, static_cast<float>(step));
        OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(data));
        EXPECT_EQ(data[data.size() - 1], static_cast<float>(4 * step));
      }
      return absl::OkStatus();
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
  EXPECT_GE(kills, kKills);
}

TEST(NodeGroup, AnotherSizeOnANeighbourIsNamed) {
  LocalWorld world(2);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      const auto group = GroupAccess::Make(
          generation, run, "data", generation.rank() == 0 ? 64 : 128, PlaceOf(generation, {0, 1}));
      EXPECT_EQ(group.status().code(), absl::StatusCode::kInvalidArgument) << group.status();
      EXPECT_THAT(std::string(MessageOf(group.status())),
                  AllOf(HasSubstr("64"), HasSubstr("128"), HasSubstr("bytes")));
      return absl::OkStatus();
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

TEST(NodeGroup, TakesInNobodyWhoDoesNotKnowTheTicket) {
  LocalWorld world(2);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      if (generation.rank() == 1) {
        OUTLAST_ASSIGN_OR_RETURN(const std::string text,
                                 generation.Get("group/data/at/0", absl::Seconds(20)));
        const SocketAddress at = *NumericAddress(*HostPort::Parse(text));
        // Strangers first: one that says nothing, one of many words, one that hangs up.
        const UniqueFd silent = *StartConnect(at);
        const UniqueFd browser = *StartConnect(at);
        (void)!send(browser.get(), std::string(4096, 'G').data(), 4096, MSG_NOSIGNAL);
        { const UniqueFd gone = *StartConnect(at); }
        OUTLAST_ASSIGN_OR_RETURN(Group group, GroupAccess::Make(generation, run, "data", 64,
                                                                PlaceOf(generation, {0, 1})));
        return group.Barrier();
      }
      OUTLAST_ASSIGN_OR_RETURN(
          Group group, GroupAccess::Make(generation, run, "data", 64, PlaceOf(generation, {0, 1})));
      return group.Barrier();
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

TEST(NodeGroup, TheBlackBoxTellsWhoHasNotEntered) {
  LocalWorld world(2);
  const LocalWorldResult result = world.Run([&](outlast::Run& run) {
    return run.ForEachGeneration([&](Generation& generation) -> absl::Status {
      OUTLAST_ASSIGN_OR_RETURN(
          Group group, GroupAccess::Make(generation, run, "data", 64, PlaceOf(generation, {0, 1})));
      OUTLAST_RETURN_IF_ERROR(group.Barrier());
      if (generation.rank() == 0) {
        EXPECT_EQ(group.Barrier({.timeout = absl::Milliseconds(1)}).code(),
                  absl::StatusCode::kDeadlineExceeded);
        OUTLAST_RETURN_IF_ERROR(generation.Put("tried", ""));
      }
      OUTLAST_RETURN_IF_ERROR(generation.Get("tried", absl::Seconds(20)).status());
      const auto view = SegmentView::Open(run.black_box().fd());
      const std::vector<CommSnapshot> comms = ReadComms(*view);
      EXPECT_EQ(comms.size(), 1u);
      if (comms.size() != 1) return absl::OkStatus();
      EXPECT_EQ(comms[0].size, 2u);
      EXPECT_EQ(comms[0].api_seq, generation.rank() == 0 ? 2u : 1u);
      EXPECT_EQ(comms[0].done_seq, 1u);
      return absl::OkStatus();
    });
  });
  EXPECT_EQ(result.exit_code, 0) << result.reason;
}

}  // namespace
}  // namespace outlast
