#include "outlast/elastic/membership.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "outlast/base/status.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

LiveAgent Node(std::string name, int capacity, std::string segment = "s") {
  return {.node = std::move(name), .incarnation = 1, .capacity = capacity, .segment = segment};
}
// "a:0-3@0": ranks 0 to 3 in slots 0 to 3 of node a.
std::vector<std::string> Text(const RankMap& map) {
  std::vector<std::string> lines;
  for (const RankRun& run : map.runs) {
    lines.push_back(run.node + ":" + std::to_string(run.first_rank) + "-" +
                    std::to_string(run.first_rank + run.count - 1) + "@" +
                    std::to_string(run.first_slot));
  }
  return lines;
}
RankMap First(std::vector<LiveAgent> live, const MembershipOptions& options) {
  return Assign({.live = std::move(live)}, options).value();
}

constexpr MembershipOptions kTwelve{.min_world = 4, .max_world = 12};

TEST(Assign, TheFirstWorldIsInTheOrderOfHintsThenSegmentsThenNames) {
  std::vector<LiveAgent> live = {Node("d", 2, "s2"), Node("c", 2, "s1"), Node("b", 2, "s2"),
                                 Node("a", 2, "s2")};
  live[3].slot_hint = 7;
  EXPECT_THAT(Text(First(live, {.max_world = 8})),
              ElementsAre("a:0-1@0", "c:2-3@0", "b:4-5@0", "d:6-7@0"));
}

TEST(Assign, AnEqualInputGivesAnEqualMapWhateverTheArrivalOrder) {
  std::vector<LiveAgent> live = {Node("a", 4), Node("b", 4), Node("c", 4)};
  const RankMap first = First(live, kTwelve);
  std::reverse(live.begin(), live.end());
  EXPECT_EQ(First(live, kTwelve), first);
}

TEST(Assign, SurvivorsKeepTheirSlotsAndASpareTakesThoseOfTheDead) {
  const RankMap last = First({Node("a", 4), Node("b", 4), Node("c", 4)}, kTwelve);
  const auto next =
      Assign({.last = last, .live = {Node("z", 4), Node("a", 4), Node("c", 4)}}, kTwelve);
  EXPECT_THAT(Text(*next), ElementsAre("a:0-3@0", "z:4-7@0", "c:8-11@0"));
}

TEST(Assign, ANodeThatIsBackTakesItsOwnRanksBeforeAnySpare) {
  const RankMap last = First({Node("b", 4), Node("c", 4)}, kTwelve);
  LiveAgent again = Node("c", 4);
  again.incarnation = 2;
  const auto next = Assign({.last = last, .live = {Node("a", 4), again, Node("b", 4)}}, kTwelve);
  EXPECT_THAT(Text(*next), ElementsAre("b:0-3@0", "c:4-7@0"));
  EXPECT_EQ(next->runs[1].incarnation, 2u);
}

TEST(Assign, AMemberWithAFreeSlotGoesBeforeSparesAndTheSameSegmentBeforeOthers) {
  const MembershipOptions four{.max_world = 4};
  const RankMap last = First({Node("a", 1, "s1"), Node("b", 1, "s2"), Node("c", 2, "s2")}, four);
  LiveAgent larger = Node("b", 2, "s2");
  EXPECT_THAT(
      Text(*Assign({.last = last, .live = {larger, Node("c", 2, "s2"), Node("d", 1, "s1")}}, four)),
      ElementsAre("b:0-0@1", "b:1-1@0", "c:2-3@0"));
  EXPECT_THAT(Text(*Assign({.last = last,
                            .live = {Node("b", 1, "s2"), Node("c", 2, "s2"), Node("d", 1, "s2"),
                                     Node("e", 1, "s1")}},
                           four)),
              ElementsAre("e:0-0@0", "b:1-1@0", "c:2-3@0"));
}

TEST(Assign, WithoutASpareTheWorldShrinksAndCompactsInOrder) {
  const RankMap last = First({Node("a", 4), Node("b", 4), Node("c", 4)}, kTwelve);
  const auto next = Assign({.last = last, .live = {Node("a", 4), Node("c", 4)}}, kTwelve);
  EXPECT_THAT(Text(*next), ElementsAre("a:0-3@0", "c:4-7@0"));
}

TEST(Assign, ShrinkingKeepsWholeBlocksAndGroupsWhatIsLeftOfOthers) {
  const MembershipOptions blocks{.min_world = 4, .max_world = 12, .unit = 4};
  const RankMap last =
      First({Node("a", 2), Node("b", 2), Node("c", 4), Node("d", 2), Node("e", 2)}, blocks);
  const auto next =
      Assign({.last = last, .live = {Node("a", 2), Node("c", 4), Node("e", 2)}}, blocks);
  EXPECT_THAT(Text(*next), ElementsAre("c:0-3@0", "a:4-5@0", "e:6-7@0"));
  const auto broken =
      Assign({.last = last, .live = {Node("a", 2), Node("c", 4), Node("d", 1)}}, blocks);
  EXPECT_THAT(Text(*broken), ElementsAre("c:0-3@0"));
}

TEST(Assign, ScarceSparesMendTheBlocksThatLackTheLeast) {
  const MembershipOptions blocks{.min_world = 4, .max_world = 8, .unit = 4};
  const RankMap last = First({Node("a", 1), Node("b", 3), Node("c", 3), Node("d", 1)}, blocks);
  const auto next = Assign(
      {.last = last, .live = {Node("a", 1), Node("c", 3), Node("z", 1)}, .trusts_link = true},
      blocks);
  EXPECT_THAT(Text(*next), ElementsAre("c:0-2@0", "z:3-3@0"));
}

TEST(Assign, TheGlobalBatchIsSplitAgainEvenly) {
  const MembershipOptions options{.min_world = 2, .max_world = 6, .global_micro_batches = 24};
  const RankMap last = First({Node("a", 2), Node("b", 2), Node("c", 2)}, options);
  EXPECT_EQ(last.micro_batches, 4);
  const auto four = Assign({.last = last, .live = {Node("a", 2), Node("b", 2)}}, options);
  EXPECT_EQ(four->world, 4);
  EXPECT_EQ(four->micro_batches, 6);
  // Five ranks can't share 24: one of them waits.
  const auto five =
      Assign({.last = last, .live = {Node("a", 2), Node("b", 2), Node("c", 1)}}, options);
  EXPECT_EQ(five->world, 4);
  EXPECT_EQ(five->micro_batches, 6);
}

TEST(Assign, WhereNoWorldFitsTheReasonNamesThoseThatWould) {
  const MembershipOptions options{.min_world = 3, .max_world = 8, .global_micro_batches = 32};
  const RankMap last = First({Node("a", 4), Node("b", 4)}, options);
  const auto next = Assign({.last = last, .live = {Node("a", 3)}, .trusts_link = true}, options);
  ASSERT_EQ(next.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(
      std::string(MessageOf(next.status())),
      HasSubstr("3 ranks can be placed, at least 3 are wanted; world sizes that fit: 4, 8"));
}

TEST(Assign, WhenMostMembersAreGoneAtOnceTheLinkIsDoubtedBeforeShrinking) {
  const RankMap last = First({Node("a", 4), Node("b", 4), Node("c", 4)}, kTwelve);
  AssignRequest request{.last = last, .live = {Node("a", 4)}};
  EXPECT_EQ(Assign(request, kTwelve).status().code(), absl::StatusCode::kUnavailable);
  request.trusts_link = true;
  EXPECT_THAT(Text(*Assign(request, kTwelve)), ElementsAre("a:0-3@0"));
  // Spares that fill all of it leave nothing to doubt.
  AssignRequest filled{.last = last, .live = {Node("a", 4), Node("y", 4), Node("z", 4)}};
  EXPECT_THAT(Text(*Assign(filled, kTwelve)), ElementsAre("a:0-3@0", "y:4-7@0", "z:8-11@0"));
}

TEST(Assign, GrowsAtTheEndAndOnlyWhenAsked) {
  const RankMap last = First({Node("b", 4)}, kTwelve);
  AssignRequest request{.last = last, .live = {Node("a", 4), Node("b", 4)}};
  EXPECT_THAT(Text(*Assign(request, kTwelve)), ElementsAre("b:0-3@0"));
  request.may_grow = true;
  EXPECT_THAT(Text(*Assign(request, kTwelve)), ElementsAre("b:0-3@0", "a:4-7@0"));
}

TEST(Assign, RanksThatAreDoneNeedNoNewHolder) {
  const RankMap last = First({Node("a", 2), Node("b", 2)}, {.min_world = 4, .max_world = 4});
  const auto next = Assign({.last = last, .live = {Node("a", 2)}, .finished = {2, 3}},
                           {.min_world = 4, .max_world = 4});
  EXPECT_THAT(Text(*next), ElementsAre("a:0-1@0", "b:2-3@0"));
}

// --- Properties ---

struct Draw {
  std::mt19937_64 random;
  int Below(int limit) { return static_cast<int>(random() % static_cast<uint64_t>(limit)); }
  std::vector<LiveAgent> Cluster() {
    std::vector<LiveAgent> live;
    for (int i = 0, nodes = 1 + Below(12); i < nodes; ++i) {
      live.push_back(
          Node("n" + std::to_string(Below(16)), 1 + Below(4), "s" + std::to_string(Below(3))));
      live.back().slot_hint = Below(3) - 1;
    }
    std::sort(live.begin(), live.end(), [](auto& a, auto& b) { return a.node < b.node; });
    live.erase(
        std::unique(live.begin(), live.end(), [](auto& a, auto& b) { return a.node == b.node; }),
        live.end());
    return live;
  }
};

void CheckWhole(const RankMap& map, const std::vector<LiveAgent>& live,
                const MembershipOptions& options) {
  std::set<std::pair<std::string, int>> held;
  int next = 0;
  for (const RankRun& run : map.runs) {
    ASSERT_EQ(run.first_rank, next);
    ASSERT_GT(run.count, 0);
    next += run.count;
    const auto agent =
        std::find_if(live.begin(), live.end(), [&](auto& one) { return one.node == run.node; });
    ASSERT_NE(agent, live.end());
    ASSERT_LE(run.first_slot + run.count, agent->capacity);
    for (int i = 0; i < run.count; ++i)
      ASSERT_TRUE(held.insert({run.node, run.first_slot + i}).second);
  }
  ASSERT_EQ(next, map.world);
  ASSERT_TRUE(FitsWorld(map.world, options));
  if (options.global_micro_batches > 0) {
    ASSERT_EQ(map.micro_batches * (map.world / options.unit), options.global_micro_batches);
  }
}

TEST(Assign, KeepsItsPromisesForAnyClusterThatLosesAndGainsNodes) {
  int shrunk = 0, refused = 0;
  for (uint64_t seed = 1; seed <= 4000; ++seed) {
    SCOPED_TRACE(seed);
    Draw draw{std::mt19937_64(seed)};
    const int units[] = {1, 1, 2, 4};
    MembershipOptions options{.min_world = 1 + draw.Below(4), .max_world = 4 + draw.Below(30)};
    options.unit = units[draw.Below(4)];
    options.global_micro_batches = draw.Below(2) == 0 ? 0 : 48;
    RankMap last;
    std::vector<LiveAgent> live = draw.Cluster();
    for (int round = 0; round < 4; ++round) {
      AssignRequest request{.last = last, .live = live};
      request.may_grow = draw.Below(3) == 0;
      request.trusts_link = draw.Below(2) == 0;
      const auto map = Assign(request, options);
      std::shuffle(request.live.begin(), request.live.end(), draw.random);
      const auto again = Assign(request, options);
      ASSERT_EQ(map.status(), again.status());
      if (map.ok()) {
        ASSERT_EQ(*map, *again);
        CheckWhole(*map, live, options);
        if (::testing::Test::HasFatalFailure()) return;
        for (int rank = 0; map->world >= last.world && rank < last.world; ++rank) {
          const RankRun& was = *last.Find(rank);
          const int slot = was.first_slot + rank - was.first_rank;
          const auto agent = std::find_if(live.begin(), live.end(),
                                          [&](auto& one) { return one.node == was.node; });
          if (agent == live.end() || slot >= agent->capacity) continue;
          ASSERT_EQ(map->RankOf(was.node, slot), rank) << "only shrinking renumbers";
        }
        shrunk += map->world < last.world ? 1 : 0;
        last = *map;
      } else {
        ++refused;
        ASSERT_THAT(std::string(MessageOf(map.status())),
                    ::testing::AnyOf(HasSubstr("world sizes that fit"), HasSubstr("own link")));
      }
      live = draw.Cluster();
    }
  }
  EXPECT_GT(shrunk, 100);
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace outlast
