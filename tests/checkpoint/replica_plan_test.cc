// Who keeps copies for whom, when, and what a restore makes of them.
#include "checkpoint/replica_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;
using Outcome = ReplicaRounds::Outcome;

// "a" or "a/rack": name and domain.
std::vector<ReplicaDoor> Doors(const std::vector<std::string>& nodes) {
  std::vector<ReplicaDoor> doors;
  for (const std::string& node : nodes) {
    const size_t slash = node.find('/');
    const std::string name = node.substr(0, slash);
    doors.push_back({name, "", slash == std::string::npos ? name : node.substr(slash + 1)});
  }
  return doors;
}

TEST(ChoosePartners, GoesRoundARingWhereEachNodeFailsAlone) {
  EXPECT_THAT(ChoosePartners(Doors({"b", "a", "c"})),
              UnorderedElementsAre(Pair("b", "a"), Pair("a", "c"), Pair("c", "b")));
}

TEST(ChoosePartners, AloneThereIsNone) {
  EXPECT_THAT(ChoosePartners(Doors({"a"})), IsEmpty());
  EXPECT_THAT(ChoosePartners({}), IsEmpty());
}

TEST(ChoosePartners, LeadsOutOfTheDomainAndGivesEachOneOthersCopies) {
  const auto partners = ChoosePartners(Doors({"a/1", "b/1", "c/2", "d/2", "e/3", "f/3"}));

  std::map<std::string, std::string> domain;
  for (const ReplicaDoor& door : Doors({"a/1", "b/1", "c/2", "d/2", "e/3", "f/3"}))
    domain[door.node] = door.domain;
  std::map<std::string, int> kept;
  ASSERT_EQ(partners.size(), 6u);
  for (const auto& [node, partner] : partners) {
    EXPECT_NE(domain[node], domain[partner]) << node << " on " << partner;
    ++kept[partner];
  }
  for (const auto& [node, count] : kept) EXPECT_EQ(count, 1) << node;
}

TEST(ChoosePartners, OfADomainWithMoreThanHalfAllGoOutOfItAllTheSame) {
  const auto partners = ChoosePartners(Doors({"a/1", "b/1", "c/1", "d/2"}));

  for (const char* node : {"a", "b", "c"}) EXPECT_EQ(partners.at(node), "d") << node;
  EXPECT_NE(partners.at("d"), "d");
}

TEST(ChoosePartners, InOneDomainAnotherNodeIsBetterThanNone) {
  EXPECT_THAT(ChoosePartners(Doors({"a/1", "b/1"})),
              UnorderedElementsAre(Pair("a", "b"), Pair("b", "a")));
}

TEST(ReplicaRounds, ARoundIsWholeWhenEveryNodeHasDoneItsPart) {
  ReplicaRounds rounds({"a", "b"});

  EXPECT_TRUE(rounds.Begin({1, 10}, absl::Seconds(1)));
  EXPECT_EQ(rounds.Told("a", {1, 10}, true), Outcome::kGoesOn);
  EXPECT_EQ(rounds.Told("a", {1, 10}, true), Outcome::kGoesOn) << "said again";
  EXPECT_EQ(rounds.whole(), std::nullopt);
  EXPECT_EQ(rounds.Told("b", {1, 10}, true), Outcome::kWhole);
  EXPECT_EQ(rounds.whole(), (SnapshotKey{1, 10}));
}

TEST(ReplicaRounds, AFailedOneLeavesTheFormerWholeOneAsItWas) {
  ReplicaRounds rounds({"a", "b"}, SnapshotKey{1, 5});

  EXPECT_TRUE(rounds.Begin({1, 10}, absl::Seconds(1)));
  rounds.Told("a", {1, 10}, false);
  EXPECT_EQ(rounds.Told("b", {1, 10}, true), Outcome::kFailed);
  EXPECT_EQ(rounds.whole(), (SnapshotKey{1, 5}));
  EXPECT_TRUE(rounds.Begin({1, 12}, absl::Seconds(2))) << "the next one may do";
}

TEST(ReplicaRounds, OneAtATimeNoSoonerThanWantedAndNoneOfAnOlderStep) {
  ReplicaRounds rounds({"a", "b"}, SnapshotKey{2, 5}, absl::Seconds(10));

  EXPECT_FALSE(rounds.Begin({1, 9}, absl::Seconds(100))) << "of an older generation";
  EXPECT_FALSE(rounds.Begin({2, 5}, absl::Seconds(100)));
  EXPECT_TRUE(rounds.Begin({2, 6}, absl::Seconds(100)));
  EXPECT_FALSE(rounds.Begin({2, 7}, absl::Seconds(120))) << "one is under way";
  rounds.Told("a", {2, 6}, true);
  EXPECT_EQ(rounds.Told("b", {2, 5}, true), Outcome::kGoesOn) << "of another round";
  rounds.Told("b", {2, 6}, true);
  EXPECT_FALSE(rounds.Begin({2, 8}, absl::Seconds(109)));
  EXPECT_TRUE(rounds.Begin({2, 9}, absl::Seconds(110)));
}

TEST(ReplicaRounds, WhoHasNoRoomEndsThem) {
  ReplicaRounds rounds({"a", "b"});
  rounds.Stop();
  EXPECT_FALSE(rounds.Begin({1, 10}, absl::Seconds(1)));
}

// Nodes a (ranks 0, 1) and b (ranks 2, 3), each other's partners; both hold step 20, and step 10
// was copied.
MemoryView TwoNodes() {
  MemoryView view;
  view.ranks = {{"a", {0, 1}}, {"b", {2, 3}}};
  view.held = {{"a", {{1, 20}}}, {"b", {{1, 20}}}};
  for (const char* node : {"a", "b"}) {
    for (uint32_t rank = 0; rank < 4; ++rank) view.copies[node].push_back({rank, {1, 10}});
  }
  return view;
}

TEST(PlanFromMemory, TakesWhatAllHoldInTheirBuffers) {
  const auto plan = PlanFromMemory(TwoNodes());
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->snapshot, (SnapshotKey{1, 20}));
  EXPECT_THAT(plan->fetches, IsEmpty());
}

TEST(PlanFromMemory, AnEmptyNodeFetchesAndOthersTakeTheirOwnCopies) {
  MemoryView view = TwoNodes();
  view.held["b"] = {};
  view.copies.erase("b");

  const auto plan = PlanFromMemory(view);

  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->snapshot, (SnapshotKey{1, 10}));
  EXPECT_THAT(plan->fetches.at("a"), ElementsAre(FetchPart{0, "a"}, FetchPart{1, "a"}));
  EXPECT_THAT(plan->fetches.at("b"), ElementsAre(FetchPart{2, "a"}, FetchPart{3, "a"}));
}

TEST(PlanFromMemory, WhoHoldsTheStepInItsBuffersFetchesNothing) {
  MemoryView view = TwoNodes();
  view.held = {{"a", {{1, 10}, {1, 20}}}, {"b", {}}};
  view.copies.erase("b");

  const auto plan = PlanFromMemory(view);

  ASSERT_TRUE(plan);
  EXPECT_FALSE(plan->fetches.contains("a"));
  EXPECT_EQ(plan->fetches.at("b").size(), 2u);
}

TEST(PlanFromMemory, ABadCopySendsAllToTheNextSource) {
  MemoryView view = TwoNodes();
  view.held = {{"a", {}}, {"b", {}}};
  view.bad_copies = {{"b", {2, {1, 10}}}};
  EXPECT_EQ(PlanFromMemory(view)->fetches.at("b").front(), (FetchPart{2, "a"}));

  view.bad_copies.insert({"a", {2, {1, 10}}});
  EXPECT_EQ(PlanFromMemory(view), std::nullopt) << "nobody has rank 2 well";
}

TEST(PlanFromMemory, ABadBufferIsServedByACopyOfTheSameStep) {
  MemoryView view = TwoNodes();
  view.held = {{"a", {{1, 10}}}, {"b", {{1, 10}}}};
  view.bad_buffers = {{"b", {1, 10}}};

  const auto plan = PlanFromMemory(view);

  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->snapshot, (SnapshotKey{1, 10}));
  EXPECT_THAT(plan->fetches.at("b"), ElementsAre(FetchPart{2, "b"}, FetchPart{3, "b"}));
}

TEST(PlanFromMemory, NeverPutsTwoGenerationsTogether) {
  MemoryView view = TwoNodes();
  view.held = {{"a", {{2, 10}}}, {"b", {}}};
  view.copies = {{"a", {{2, {1, 10}}, {3, {1, 10}}}}};

  EXPECT_EQ(PlanFromMemory(view), std::nullopt);
}

TEST(NewestWholeRound, IsTheNewestOfWhichEveryCopyLiesInTwoPlaces) {
  MemoryView view = TwoNodes();
  EXPECT_EQ(NewestWholeRound(view), (SnapshotKey{1, 10}));
  view.copies["a"].push_back({0, {1, 15}});
  EXPECT_EQ(NewestWholeRound(view), (SnapshotKey{1, 10})) << "a round that was torn";
  view.copies.erase("b");
  EXPECT_EQ(NewestWholeRound(view), std::nullopt);
}

}  // namespace
}  // namespace outlast
