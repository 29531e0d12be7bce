// What coordinator and agents do together, told by small clusters without chance: eight nodes of
// one slot each, unless a test says otherwise.
#include "outlast/elastic/coordinator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "outlast/base/status.h"
#include "outlast/elastic/cut_links.h"
#include "tests/elastic/cluster_sim.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr ProcessEnd kKill9{.signal = SIGKILL};

ClusterOptions Nodes(int nodes, int min_world, int max_world) {
  ClusterOptions options{.capacities = std::vector<int>(static_cast<size_t>(nodes), 1)};
  options.elastic.job = "job";
  options.elastic.membership = {.min_world = min_world, .max_world = max_world};
  return options;
}

struct Bench {
  explicit Bench(ClusterOptions options, int started = 1000) : cluster(7, options, coverage) {
    cluster.StartCoordinator();
    for (int node = 0; node < std::min(started, cluster.nodes()); ++node) cluster.StartAgent(node);
  }
  ~Bench() { EXPECT_EQ(cluster.error(), ""); }

  // Until the job runs in `generation`, all ranks in their bodies.
  bool RunsIn(uint64_t generation, absl::Duration within = absl::Seconds(30)) {
    return cluster.Run(within, [&] {
      return cluster.coordinator_is_up() &&
             cluster.coordinator()->phase() == CoordinatorPhase::kRunning &&
             cluster.coordinator()->state().generation() == generation && cluster.IsWhole();
    });
  }
  bool Reforms() {
    return cluster.Run(absl::Seconds(30), [&] {
      return cluster.coordinator()->phase() == CoordinatorPhase::kReforming;
    });
  }
  bool Ends(int code, absl::Duration within = absl::Minutes(2)) {
    return cluster.Run(within, [&] { return cluster.AllAgentsAreOver(); }) &&
           cluster.job_code() == code;
  }
  void Train() { cluster.Run(absl::Seconds(5)); }
  std::vector<uint64_t> Processes() const {
    std::vector<uint64_t> processes;
    for (int node = 0; node < cluster.nodes(); ++node)
      processes.push_back(cluster.has_agent(node) ? cluster.process(node, 0) : 0);
    return processes;
  }
  std::vector<std::string> Holders() const {
    std::vector<std::string> nodes;
    for (const RankRun& run : cluster.newest_commit().map.runs) nodes.push_back(run.node);
    return nodes;
  }

  ClusterCoverage coverage;
  Cluster cluster;
};

// --- Forming and ending ---

TEST(Coordinator, FormsWhenAllAreThereAndEndsWithZeroWhenAllWorkIsDone) {
  Bench bench(Nodes(8, 8, 8));
  ASSERT_TRUE(bench.RunsIn(1, absl::Seconds(4))) << "no last call when the world is full";
  bench.cluster.FinishAllWork();
  EXPECT_TRUE(bench.Ends(0));
}

TEST(Coordinator, FormsWithFewerAfterTheLastCallAndLeavesSparesAside) {
  Bench bench(Nodes(8, 4, 8), 6);
  EXPECT_FALSE(bench.RunsIn(1, absl::Seconds(4)));
  ASSERT_TRUE(bench.RunsIn(1));
  EXPECT_EQ(bench.cluster.newest_commit().map.world, 6);
}

TEST(Coordinator, WaitsForTheSparesThatAreWantedNoLongerThanForTheLastCall) {
  ClusterOptions with_one_spare = Nodes(9, 8, 8);
  with_one_spare.elastic.spare_slots = 1;
  EXPECT_TRUE(Bench(with_one_spare).RunsIn(1, absl::Seconds(4))) << "all nine are there";

  Bench without(with_one_spare, 8);
  EXPECT_FALSE(without.RunsIn(1, absl::Seconds(4)));
  EXPECT_TRUE(without.RunsIn(1));
}

TEST(Coordinator, TooFewAgentsAtTheJoinDeadlineEndWithEightyFourAndTheNumbers) {
  Bench bench(Nodes(8, 8, 8), 5);
  EXPECT_TRUE(bench.Ends(84, absl::Minutes(11)));
  EXPECT_THAT(bench.cluster.coordinator()->state().ended->reason,
              HasSubstr("5 ranks can be placed, at least 8 are wanted"));
}

// --- Faults ---

TEST(Coordinator, ALostWorkerIsReplacedOnItsNodeAndSurvivorsKeepProcessAndRank) {
  Bench bench(Nodes(8, 8, 8));
  ASSERT_TRUE(bench.RunsIn(1));
  bench.Train();
  std::vector<uint64_t> before = bench.Processes();
  const std::vector<std::string> holders = bench.Holders();
  bench.cluster.KillWorker(3, 0, kKill9);
  ASSERT_TRUE(bench.RunsIn(2));
  std::vector<uint64_t> after = bench.Processes();
  EXPECT_NE(before[3], after[3]);
  before[3] = after[3] = 0;
  EXPECT_EQ(after, before);
  EXPECT_EQ(bench.Holders(), holders);
  EXPECT_EQ(bench.cluster.coordinator()->state().history.crashes, 1);
}

TEST(Coordinator, ALostNodeIsReplacedByASpareAfterTheGraceAndCostsNoRestart) {
  Bench bench(Nodes(9, 8, 8));
  ASSERT_TRUE(bench.RunsIn(1));
  const std::vector<std::string> before = bench.Holders();
  const int lost = static_cast<int>(before[2][2] - '0');
  bench.cluster.CrashAgent(lost);
  EXPECT_FALSE(bench.RunsIn(2, absl::Seconds(9)));
  ASSERT_TRUE(bench.RunsIn(2));
  std::vector<std::string> after = bench.Holders();
  EXPECT_NE(after[2], before[2]);
  after[2] = before[2];
  EXPECT_EQ(after, before) << "only the lost node's rank moved";
  EXPECT_EQ(bench.cluster.coordinator()->state().history.crashes, 0);
  EXPECT_EQ(bench.cluster.coordinator()->state().history.others, 1);
}

TEST(Coordinator, AnAgentThatComesDuringAReformIsASpareOfIt) {
  Bench bench(Nodes(9, 8, 8), 8);
  ASSERT_TRUE(bench.RunsIn(1));
  bench.Train();
  const std::vector<std::string> before = bench.Holders();
  bench.cluster.KillWorker(3, 0, kKill9);
  ASSERT_TRUE(bench.Reforms());
  bench.cluster.StartAgent(8);
  ASSERT_TRUE(bench.RunsIn(2));
  EXPECT_EQ(bench.Holders(), before) << "it disturbs nothing";

  bench.cluster.CrashAgent(5);
  ASSERT_TRUE(bench.RunsIn(3)) << "it takes the lost one's place";
  EXPECT_EQ(bench.cluster.newest_commit().map.world, 8);
  EXPECT_NE(bench.Holders(), before);
}

TEST(Coordinator, AnAgentThatIsLostDuringAReformIsReplacedInTheNext) {
  Bench bench(Nodes(9, 8, 8));
  ASSERT_TRUE(bench.RunsIn(1));
  bench.Train();
  const std::vector<std::string> holders = bench.Holders();
  const int lost = holders[5][2] - '0', killed = holders[3][2] - '0';
  bench.cluster.KillWorker(killed, 0, kKill9);
  ASSERT_TRUE(bench.Reforms());
  bench.cluster.CrashAgent(lost);
  ASSERT_TRUE(bench.RunsIn(2, absl::Minutes(2)) || bench.RunsIn(3, absl::Minutes(2)));
  EXPECT_EQ(bench.cluster.newest_commit().map.world, 8);
  const std::vector<std::string> after = bench.Holders();
  EXPECT_NE(after[5], holders[5]);
  EXPECT_EQ(after[3], holders[3]);
  EXPECT_EQ(bench.cluster.coordinator()->state().history.crashes, 1) << "a spare costs nothing";
}

// --- Ranks whose work is done ---

TEST(Coordinator, FinishedRanksTakePartAgainWhenAnotherOneFails) {
  Bench bench(Nodes(4, 4, 4));
  ASSERT_TRUE(bench.RunsIn(1));
  for (const int node : {0, 1, 2}) bench.cluster.FinishWork(node, 0);
  bench.Train();
  ASSERT_EQ(bench.cluster.coordinator()->state().finished.size(), 3u);
  const std::vector<uint64_t> before = bench.Processes();
  const std::vector<std::string> holders = bench.Holders();

  bench.cluster.KillWorker(3, 0, kKill9);
  ASSERT_TRUE(bench.RunsIn(2));
  const std::vector<uint64_t> after = bench.Processes();
  for (size_t node = 0; node < 4; ++node) EXPECT_NE(after[node], before[node]) << node;
  EXPECT_EQ(bench.Holders(), holders);
  EXPECT_THAT(bench.cluster.newest_commit().finished, ElementsAre());
  EXPECT_EQ(bench.cluster.coordinator()->state().history.crashes, 1);
  EXPECT_EQ(bench.cluster.faults().size(), 1u);

  bench.cluster.FinishAllWork();
  EXPECT_TRUE(bench.Ends(0));
}

TEST(Coordinator, ALostNodeWhoseRanksHadFinishedIsReplacedOnlyWhenAGenerationForms) {
  Bench bench(Nodes(4, 3, 3));
  ASSERT_TRUE(bench.RunsIn(1));
  const int lost = std::stoi(bench.Holders()[1].substr(2));
  const int killed = std::stoi(bench.Holders()[2].substr(2));
  bench.cluster.FinishWork(lost, 0);
  bench.Train();
  bench.cluster.CrashAgent(lost);
  bench.cluster.Run(absl::Minutes(1));
  EXPECT_TRUE(bench.RunsIn(1));
  EXPECT_TRUE(bench.cluster.faults().empty());

  bench.cluster.KillWorker(killed, 0, kKill9);
  ASSERT_TRUE(bench.RunsIn(2));
  EXPECT_EQ(bench.cluster.newest_commit().map.world, 3);
  EXPECT_NE(bench.Holders()[1], "n0" + std::to_string(lost));
  bench.cluster.FinishAllWork();
  EXPECT_TRUE(bench.Ends(0));
}

TEST(Coordinator, AFinishedRankIsWaitedForThatComesBackWhileAGenerationForms) {
  Bench bench(Nodes(4, 3, 3));
  ASSERT_TRUE(bench.RunsIn(1));
  const std::vector<std::string> holders = bench.Holders();
  const int done = std::stoi(holders[1].substr(2)), killed = std::stoi(holders[2].substr(2));
  bench.cluster.FinishWork(done, 0);
  bench.Train();
  bench.cluster.PauseAgent(done);
  bench.cluster.Run(absl::Seconds(4));  // its beats are missed
  bench.cluster.KillWorker(killed, 0, kKill9);
  bench.cluster.Run(absl::Seconds(3));
  bench.cluster.ResumeAgent(done);
  ASSERT_TRUE(bench.RunsIn(2));
  EXPECT_EQ(bench.Holders(), holders);
}

TEST(Coordinator, APlainProgramThatEndedWithZeroIsNeverRunAgain) {
  ClusterOptions options = Nodes(3, 3, 3);
  options.plain = true;
  Bench bench(options);
  ASSERT_TRUE(bench.RunsIn(1));
  bench.cluster.FinishWork(0, 0);
  bench.Train();
  bench.cluster.CrashCoordinator();
  bench.cluster.StartCoordinator();
  ASSERT_TRUE(bench.RunsIn(1));
  const std::vector<uint64_t> before = bench.Processes();
  bench.cluster.KillWorker(1, 0, kKill9);
  ASSERT_TRUE(bench.RunsIn(2));
  EXPECT_EQ(bench.Processes()[0], before[0]);
  EXPECT_NE(bench.Processes()[1], before[1]);
  EXPECT_EQ(bench.cluster.newest_commit().finished.size(), 1u);
  bench.cluster.FinishAllWork();
  EXPECT_TRUE(bench.Ends(0));
}

// --- Links between agents that both reach the coordinator ---

// Of `rank`, by the node's name in the newest map.
int NodeOf(const Bench& bench, size_t rank) { return std::stoi(bench.Holders()[rank].substr(2)); }

TEST(Coordinator, ACutLinkAloneEndsNothing) {
  Bench bench(Nodes(3, 2, 2));
  ASSERT_TRUE(bench.RunsIn(1));
  bench.cluster.CutBetween(NodeOf(bench, 0), NodeOf(bench, 1));
  bench.cluster.Run(absl::Minutes(5));
  EXPECT_TRUE(bench.RunsIn(1)) << bench.cluster.Story();
  EXPECT_TRUE(bench.cluster.faults().empty());
}

TEST(Coordinator, RanksThatFailForACutLinkCostTheirNodeItsPlaceAndNobodyARestart) {
  Bench bench(Nodes(3, 2, 2));
  ASSERT_TRUE(bench.RunsIn(1));
  const std::vector<std::string> before = bench.Holders();
  const int lead = NodeOf(bench, 0), follower = NodeOf(bench, 1);
  bench.cluster.CutBetween(lead, follower);
  bench.Train();
  // Whose rank fails first says nothing.
  bench.cluster.KillWorker(lead, 0, {.code = 1});
  bench.cluster.KillWorker(follower, 0, {.code = 1});

  ASSERT_TRUE(bench.RunsIn(2)) << bench.cluster.Story();
  EXPECT_EQ(bench.Holders()[0], before[0]);
  EXPECT_NE(bench.Holders()[1], before[1]) << "the spare's";
  EXPECT_EQ(bench.cluster.coordinator()->state().history.crashes, 0);
  const std::vector<FaultRecord> faults = bench.cluster.faults();
  ASSERT_FALSE(faults.empty());
  EXPECT_EQ(faults[0].fault_class, FaultClass::kLinkCut);
  EXPECT_EQ(faults[0].node, before[1]);
  EXPECT_THAT(faults[0].detail, HasSubstr("it and node " + before[0] +
                                          " do not reach each other, though both reach "
                                          "the coordinator"));
  EXPECT_FALSE(bench.cluster.exit_code(follower)) << "it stays, as a spare";
  for (size_t i = 1; i < faults.size(); ++i) EXPECT_TRUE(faults[i].victim) << faults[i].detail;
}

TEST(Coordinator, OfALeadThatASecondNodeDoesNotReachTheLeadIsToBlame) {
  Bench bench(Nodes(3, 2, 2));
  ASSERT_TRUE(bench.RunsIn(1));
  const int lead = NodeOf(bench, 0), first = NodeOf(bench, 1);
  const std::string lead_name = bench.Holders()[0];
  for (int node = 0; node < 3; ++node) {
    if (node != lead) bench.cluster.CutBetween(lead, node);
  }
  bench.Train();
  bench.cluster.KillWorker(first, 0, {.code = 1});
  ASSERT_TRUE(bench.RunsIn(2)) << bench.cluster.Story();
  bench.Train();
  bench.cluster.KillWorker(NodeOf(bench, 1), 0, {.code = 1});

  ASSERT_TRUE(bench.RunsIn(3)) << bench.cluster.Story();
  EXPECT_THAT(bench.Holders(), ::testing::Not(::testing::Contains(lead_name)));
}

TEST(Coordinator, ANodeThatIsNeededIsTakenAgainUntilTheRestartsAreUsedUp) {
  ClusterOptions options = Nodes(2, 2, 2);
  options.commits = false;
  Bench bench(options);
  ASSERT_TRUE(bench.RunsIn(1));
  const std::vector<std::string> before = bench.Holders();
  const int lead = NodeOf(bench, 0), follower = NodeOf(bench, 1);
  bench.cluster.CutBetween(lead, follower);
  const auto fail = [&] {
    bench.cluster.Run(absl::Seconds(2));  // the beats say it
    bench.cluster.KillWorker(follower, 0, {.code = 1});
  };
  fail();
  ASSERT_TRUE(bench.RunsIn(2, absl::Minutes(1))) << bench.cluster.Story();
  EXPECT_EQ(bench.Holders(), before);
  EXPECT_EQ(bench.cluster.coordinator()->state().history.crashes, 1) << "there is no spare";
  fail();
  ASSERT_TRUE(bench.RunsIn(3, absl::Minutes(1))) << bench.cluster.Story();
  fail();

  EXPECT_TRUE(bench.Ends(82)) << bench.cluster.Story();
  ASSERT_TRUE(bench.cluster.coordinator()->state().ended);
  EXPECT_THAT(bench.cluster.coordinator()->state().ended->reason,
              HasSubstr("do not reach each other"));
}

TEST(Coordinator, AWorldShrinksByWhoIsCutOffAndDoesNotGrowBackToIt) {
  Bench bench(Nodes(3, 2, 3));
  ASSERT_TRUE(bench.RunsIn(1));
  const std::string cut = bench.Holders()[2];
  bench.cluster.CutBetween(NodeOf(bench, 0), NodeOf(bench, 2));
  bench.Train();
  bench.cluster.KillWorker(NodeOf(bench, 1), 0, {.code = 1});
  ASSERT_TRUE(bench.RunsIn(2)) << bench.cluster.Story();
  EXPECT_THAT(bench.Holders(), ::testing::Not(::testing::Contains(cut)));
  bench.cluster.Run(absl::Minutes(2));
  EXPECT_TRUE(bench.RunsIn(2)) << bench.cluster.Story();
}

// A follower's link to another one: nobody is asked whose rank fails first.
TEST(Coordinator, ACutBetweenFollowersIsNamedAndCostsOneOfThemItsPlaceAndNobodyARestart) {
  for (const int first : {1, 2}) {
    Bench bench(Nodes(4, 3, 3));
    ASSERT_TRUE(bench.RunsIn(1));
    bench.Train();
    const std::vector<std::string> before = bench.Holders();
    bench.cluster.CutBetween(NodeOf(bench, 1), NodeOf(bench, 2));
    bench.Train();
    for (const int rank : {first, 3 - first})
      bench.cluster.KillWorker(std::stoi(before[static_cast<size_t>(rank)].substr(2)), 0,
                               {.code = 1});

    ASSERT_TRUE(bench.RunsIn(2)) << bench.cluster.Story();
    EXPECT_EQ(bench.Holders()[0], before[0]);
    EXPECT_EQ(bench.Holders()[1], before[1]);
    EXPECT_NE(bench.Holders()[2], before[2]) << "the spare's";
    EXPECT_EQ(bench.cluster.coordinator()->state().history.crashes, 0);
    const std::vector<FaultRecord> faults = bench.cluster.faults();
    ASSERT_FALSE(faults.empty());
    EXPECT_EQ(faults[0].fault_class, FaultClass::kLinkCut);
    EXPECT_EQ(faults[0].node, before[2]);
    EXPECT_THAT(faults[0].detail, HasSubstr("it and node " + before[1] +
                                            " do not reach each other, though both reach "
                                            "the coordinator"));
    for (size_t i = 1; i < faults.size(); ++i) EXPECT_TRUE(faults[i].victim) << faults[i].detail;
  }
}

// The spare that took over from the wrong end has never reached the other one either.
TEST(Coordinator, OfAFollowerThatASecondOneDoesNotReachThatFollowerIsToBlame) {
  Bench bench(Nodes(4, 3, 3));
  ASSERT_TRUE(bench.RunsIn(1));
  bench.Train();
  const std::string broken = bench.Holders()[1], lead = bench.Holders()[0];
  for (int node = 0; node < 4; ++node) {
    if (node != NodeOf(bench, 0) && node != NodeOf(bench, 1))
      bench.cluster.CutBetween(node, NodeOf(bench, 1));
  }
  bench.Train();
  bench.cluster.KillWorker(NodeOf(bench, 2), 0, {.code = 1});
  ASSERT_TRUE(bench.RunsIn(2)) << bench.cluster.Story();
  ASSERT_THAT(bench.Holders(), ::testing::Contains(broken));
  bench.cluster.Run(absl::Seconds(20));  // who was left out is back, as a spare
  bench.cluster.KillWorker(NodeOf(bench, 2), 0, {.code = 1});

  ASSERT_TRUE(bench.RunsIn(3)) << bench.cluster.Story();
  EXPECT_THAT(bench.Holders(), ::testing::Not(::testing::Contains(broken)));
  EXPECT_EQ(bench.Holders()[0], lead);
  EXPECT_EQ(bench.cluster.coordinator()->state().history.crashes, 0);
}

// A firewall lets followers reach the lead alone: a crash is a crash.
TEST(Coordinator, ALinkBetweenFollowersThatNeverStoodIsNotCut) {
  Bench bench(Nodes(5, 4, 4));
  for (int one = 0; one < 5; ++one) {
    for (int other = 0; other < one; ++other) bench.cluster.CutBetween(one, other);
  }
  ASSERT_TRUE(bench.RunsIn(1));
  const std::vector<std::string> before = bench.Holders();
  bench.cluster.HealBetween();
  for (size_t one = 1; one < 4; ++one) {
    for (size_t other = 1; other < one; ++other)
      bench.cluster.CutBetween(NodeOf(bench, one), NodeOf(bench, other));
  }
  bench.Train();
  bench.cluster.KillWorker(NodeOf(bench, 2), 0, kKill9);

  ASSERT_TRUE(bench.RunsIn(2)) << bench.cluster.Story();
  EXPECT_EQ(bench.Holders(), before);
  EXPECT_EQ(bench.cluster.coordinator()->state().history.crashes, 1);
}

TEST(PlanLinks, WatchesTheNextTwoFollowersOfEach) {
  RankMap map{.runs = {}, .world = 6};
  const auto add = [&](const std::string& node) {
    map.runs.push_back({.node = node, .first_rank = static_cast<int>(map.runs.size()), .count = 1});
  };
  EXPECT_TRUE(PlanLinks(map).empty());
  add("a");
  add("b");
  EXPECT_TRUE(PlanLinks(map).empty()) << "one follower";
  add("c");
  EXPECT_EQ(PlanLinks(map), (LinkPlan{{"b", {"c"}}, {"c", {"b"}}}));
  add("d");
  add("b");  // ranks with a gap
  add("e");
  add("f");
  EXPECT_EQ(PlanLinks(map), (LinkPlan{{"b", {"c", "d"}},
                                      {"c", {"d", "e"}},
                                      {"d", {"e", "f"}},
                                      {"e", {"f", "b"}},
                                      {"f", {"b", "c"}}}));
}

// Nodes a, b, c ...; pairs as "ab".
std::vector<NodePair> Pairs(const std::vector<std::string>& texts) {
  std::vector<NodePair> pairs;
  for (const std::string& text : texts) pairs.emplace_back(text.substr(0, 1), text.substr(1));
  return pairs;
}
std::vector<std::string> Names(const std::string& text) {
  std::vector<std::string> names;
  for (const char letter : text) names.emplace_back(1, letter);
  return names;
}
// The names of those to go on without, where a leads and only its own links are watched.
std::string OfStar(const std::string& nodes, const std::vector<std::string>& cut,
                   const std::vector<std::string>& before = {}) {
  CutLinks links{
      .nodes = Names(nodes), .watched = {}, .cut = Pairs(cut), .cut_before = Pairs(before)};
  for (size_t i = 1; i < nodes.size(); ++i) links.watched.emplace_back("a", nodes.substr(i, 1));
  std::string blamed;
  for (const CutOff& off : JudgeCutLinks(links)) blamed += off.node;
  return blamed;
}
// The same, where all links are watched.
std::string OfMesh(const std::string& nodes, const std::vector<std::string>& cut,
                   const std::vector<std::string>& before = {}) {
  CutLinks links{
      .nodes = Names(nodes), .watched = {}, .cut = Pairs(cut), .cut_before = Pairs(before)};
  for (size_t i = 0; i < nodes.size(); ++i) {
    for (size_t j = i + 1; j < nodes.size(); ++j)
      links.watched.emplace_back(nodes.substr(i, 1), nodes.substr(j, 1));
  }
  std::string blamed;
  for (const CutOff& off : JudgeCutLinks(links)) blamed += off.node;
  return blamed;
}

TEST(JudgeCutLinks, BlamesTheLeadWhereMostDoNotReachIt) {
  EXPECT_EQ(OfStar("abcd", {}), "");
  EXPECT_EQ(OfStar("ab", {"ab"}), "b");
  EXPECT_EQ(OfStar("abcd", {"ac"}), "c");
  EXPECT_EQ(OfStar("abcd", {"ab", "ad"}), "a");
  EXPECT_EQ(OfStar("abcde", {"ad", "ae"}), "de") << "a network in two halves: the lead's goes on";
}

TEST(JudgeCutLinks, BlamesWhatTwoCutsOneAfterTheOtherHaveInCommon) {
  EXPECT_EQ(OfStar("ac", {"ac"}, {"ab"}), "a");
  EXPECT_EQ(OfStar("ab", {"ab"}, {"ab"}), "b") << "the same cut again";
  EXPECT_EQ(OfMesh("abd", {"bd"}, {"bc"}), "b");
  EXPECT_EQ(OfMesh("abc", {"bc"}, {"bc"}), "c") << "the same cut again";
}

TEST(JudgeCutLinks, BlamesTheNodeWithTheMostCutLinks) {
  EXPECT_EQ(OfMesh("abcd", {}), "");
  EXPECT_EQ(OfMesh("abc", {"bc"}), "c") << "the higher rank of two alike";
  EXPECT_EQ(OfMesh("abc", {"ac"}), "c") << "never the lead of two alike";
  EXPECT_EQ(OfMesh("abcde", {"bc", "bd", "be"}), "b");
  EXPECT_EQ(OfMesh("abcde", {"bc", "cd"}), "c");
  EXPECT_EQ(OfMesh("abcde", {"bc", "de"}), "ec") << "two cuts have two nodes";
  EXPECT_EQ(OfMesh("abcd", {"ab", "ac"}), "a");
}

TEST(JudgeCutLinks, KeepsTheLargestPartOfANetworkInParts) {
  EXPECT_EQ(OfMesh("abcde", {"ad", "ae", "bd", "be", "cd", "ce"}), "de");
  EXPECT_EQ(OfMesh("abcde", {"ac", "ad", "ae", "bc", "bd", "be"}), "ab");
  EXPECT_EQ(OfMesh("abcd", {"ac", "ad", "bc", "bd"}), "cd") << "the lead's of two alike";
}

TEST(JudgeCutLinks, BlamesNobodyWhereAllIsCut) { EXPECT_EQ(OfMesh("abc", {"ab", "ac", "bc"}), ""); }

TEST(JudgeCutLinks, NeverBlamesANodeThatHasAllItsLinks) {
  const std::string nodes = "abcde";
  std::vector<std::string> all;
  for (size_t i = 0; i < nodes.size(); ++i) {
    for (size_t j = i + 1; j < nodes.size(); ++j) all.push_back({nodes[i], nodes[j]});
  }
  for (uint32_t set = 0; set < (1u << all.size()); ++set) {
    std::vector<std::string> cut;
    for (size_t i = 0; i < all.size(); ++i) {
      if ((set >> i & 1) != 0) cut.push_back(all[i]);
    }
    const std::string blamed = OfMesh(nodes, cut);
    const auto touches = [](const std::string& pair, char node) {
      return pair.find(node) != std::string::npos;
    };
    for (const char node : blamed) {
      ASSERT_TRUE(std::any_of(cut.begin(), cut.end(), [&](const std::string& pair) {
        return touches(pair, node);
      })) << blamed;
      ASSERT_EQ(std::count(blamed.begin(), blamed.end(), node), 1) << blamed;
    }
    ASSERT_LT(blamed.size(), nodes.size());
    if (cut.empty() || cut.size() == all.size()) continue;
    for (const std::string& pair : cut) {  // none of whose ends is left together
      ASSERT_TRUE(
          std::any_of(blamed.begin(), blamed.end(), [&](char node) { return touches(pair, node); }))
          << pair << ": " << blamed;
    }
  }
}

// --- Plain programs ---

TEST(Coordinator, PlainWorkersStartAgainWhenANodeOfTheirsIsLost) {
  ClusterOptions options = Nodes(4, 3, 3);
  options.plain = true;
  Bench bench(options);
  ASSERT_TRUE(bench.RunsIn(1));
  const std::vector<uint64_t> before = bench.Processes();
  const int lost = static_cast<int>(bench.Holders()[2][2] - '0');
  bench.cluster.CrashAgent(lost);
  ASSERT_TRUE(bench.RunsIn(2));
  const std::vector<uint64_t> after = bench.Processes();
  for (const std::string& holder : bench.Holders()) {
    const auto node = static_cast<size_t>(holder[2] - '0');
    EXPECT_NE(after[node], before[node]) << "its peers and its port are of another generation";
  }
}

TEST(Coordinator, WhoLeavesItsBodyBecauseANodeIsLostIsNotBlamed) {
  Bench bench(Nodes(4, 3, 3));
  ASSERT_TRUE(bench.RunsIn(1));
  bench.Train();
  const auto node_of = [&](int rank) { return static_cast<int>(bench.Holders()[rank][2] - '0'); };
  const int survivor = node_of(0), lost = node_of(2);
  bench.cluster.LeaveBody(survivor, 0);
  bench.cluster.CrashAgent(lost);
  ASSERT_TRUE(bench.RunsIn(2));
  EXPECT_EQ(bench.cluster.coordinator()->state().history.crashes, 0);
  EXPECT_EQ(bench.cluster.coordinator()->state().history.others, 1);
}

TEST(Coordinator, AStreamThatIsBackInItsGraceChangesNothing) {
  Bench bench(Nodes(8, 8, 8));
  ASSERT_TRUE(bench.RunsIn(1));
  const std::vector<uint64_t> before = bench.Processes();
  bench.cluster.CutAgent(2);
  EXPECT_TRUE(bench.cluster.Run(absl::Seconds(8), [&] {
    return bench.cluster.coordinator()->phase() == CoordinatorPhase::kSuspect;
  }));
  bench.cluster.network().Heal();
  ASSERT_TRUE(bench.RunsIn(1));
  EXPECT_EQ(bench.Processes(), before);
  EXPECT_TRUE(bench.cluster.faults().empty());
}

TEST(Coordinator, WithoutASpareTheWorldShrinksAndGrowsAgainAtACommittedStep) {
  Bench bench(Nodes(8, 4, 8));
  ASSERT_TRUE(bench.RunsIn(1));
  bench.cluster.CrashAgent(5);
  ASSERT_TRUE(bench.RunsIn(2));
  EXPECT_EQ(bench.cluster.newest_commit().map.world, 7);
  bench.cluster.StartAgent(5);
  ASSERT_TRUE(bench.RunsIn(3));
  EXPECT_EQ(bench.cluster.newest_commit().map.world, 8);
  EXPECT_GT(bench.cluster.coordinator()->state().step_committed, 0);
}

// Without a spare a lost node costs a restart, also when it is back at once.
TEST(Coordinator, AnAgentThatComesBackWithoutItsWorkersIsCountedWhateverItsHaste) {
  ClusterOptions options = Nodes(8, 8, 8);
  options.commits = false;
  options.elastic.budget.same_root_limit = 100;
  Bench bench(options);
  ASSERT_TRUE(bench.RunsIn(1));
  for (int times = 0; times < 3; ++times) {
    bench.cluster.CrashAgent(4);
    bench.cluster.StartAgent(4);
    ASSERT_TRUE(bench.RunsIn(static_cast<uint64_t>(times) + 2, absl::Minutes(3))) << times;
  }
  bench.cluster.CrashAgent(4);
  bench.cluster.StartAgent(4);
  EXPECT_TRUE(bench.Ends(83, absl::Minutes(5)));
}

TEST(Coordinator, TheSameRootThreeTimesWithoutProgressEndsWithEightyTwo) {
  ClusterOptions options = Nodes(8, 8, 8);
  options.commits = false;
  options.elastic.budget.max_restarts = 10;
  Bench bench(options);
  for (uint64_t generation = 1; generation <= 3; ++generation) {
    ASSERT_TRUE(bench.RunsIn(generation, absl::Minutes(2)));
    bench.Train();
    bench.cluster.KillWorker(1, 0, {.code = 9});
  }
  EXPECT_TRUE(bench.Ends(82));
}

TEST(Coordinator, ASecondHangOnOneNodeSwapsItForASpare) {
  Bench bench(Nodes(9, 8, 8));
  ASSERT_TRUE(bench.RunsIn(1));
  const std::vector<std::string> holders = bench.Holders();
  const int node = holders[0][2] - '0';
  bench.cluster.GiveVerdict(node, 0, true);
  ASSERT_TRUE(bench.RunsIn(2, absl::Minutes(2)));
  bench.cluster.GiveVerdict(node, 0, true);
  ASSERT_TRUE(bench.RunsIn(3, absl::Minutes(2)));
  EXPECT_NE(bench.Holders()[0], holders[0]);
  EXPECT_EQ(bench.cluster.exit_code(node), 87);
}

TEST(Coordinator, ABadCandidateIsFollowedByTheNextOneAndTheListsEndByEightyTwo) {
  Bench bench(Nodes(8, 8, 8));
  ASSERT_TRUE(bench.RunsIn(1));
  bench.cluster.Run(absl::Seconds(15));  // a checkpoint, and a snapshot that all have
  bench.cluster.FailRestore();
  bench.cluster.KillWorker(0, 0, kKill9);
  ASSERT_TRUE(bench.RunsIn(2));
  const control::Commit& commit = bench.cluster.coordinator()->state().commit;
  ASSERT_EQ(commit.resume.size(), 2u);
  EXPECT_EQ(commit.resume[0].generation, 1u);
  EXPECT_EQ(commit.resume[1].generation, 0u);
  EXPECT_EQ(commit.candidate, 1);
}

// --- Attribution, at the machine itself ---

struct Desk {
  Desk() : coordinator(Options(), {}, Id128::FromName("run")) { Give(StartEvent{}); }
  static ElasticOptions Options() {
    ElasticOptions options{.job = "job"};
    options.membership = {.min_world = 2, .max_world = 2};
    return options;
  }
  std::vector<CoordinatorAction> Give(const CoordinatorEvent& event) {
    now += absl::Milliseconds(1);
    return coordinator.Step(event, now);
  }
  std::vector<CoordinatorAction> Hello(uint64_t stream, control::Hello hello,
                                       std::string distrust = "") {
    return Give(HelloReceived{stream, std::move(hello), "10.0.0.1:5", std::move(distrust)});
  }
  std::vector<CoordinatorAction> Say(uint64_t stream, control::AgentMessage message) {
    return Give(AgentSaid{stream, std::move(message)});
  }
  void Form() {
    Hello(1, {.job = "job", .node = "a", .incarnation = 11, .capacity = 1, .terms = terms});
    Hello(2, {.job = "job", .node = "b", .incarnation = 12, .capacity = 1, .terms = terms});
    for (const uint64_t stream : {1, 2})
      Say(stream, control::Prepared{.generation = 1, .round = 1, .staged = true});
    for (const uint64_t stream : {1, 2}) Say(stream, control::Committed{1});
  }
  static std::optional<control::Refused> RefusedIn(const std::vector<CoordinatorAction>& actions) {
    for (const CoordinatorAction& action : actions) {
      const auto* send = std::get_if<SendToAgent>(&action);
      if (send == nullptr) continue;
      if (const auto* refused = std::get_if<control::Refused>(&send->message)) return *refused;
    }
    return std::nullopt;
  }
  static std::string RefusalIn(const std::vector<CoordinatorAction>& actions) {
    const auto refused = RefusedIn(actions);
    return refused ? refused->reason : "";
  }

  Coordinator coordinator;
  Terms terms;  // of the agents in Form
  absl::Duration now = absl::Seconds(50);
};

TEST(Coordinator, BeginsAboveItsJournalsIncarnationAndAtLeastWhereItIsTold) {
  const auto incarnation = [](uint64_t in_journal, uint64_t least) {
    CoordinatorState state;
    state.incarnation = in_journal;
    Coordinator coordinator({}, state, Id128::Random(), least);
    coordinator.Step(StartEvent{}, absl::Seconds(1));
    return coordinator.state().incarnation;
  };
  EXPECT_EQ(incarnation(0, 1), 1u);
  EXPECT_EQ(incarnation(0, 70), 70u);
  EXPECT_EQ(incarnation(69, 70), 70u);
  EXPECT_EQ(incarnation(70, 70), 71u);
}

TEST(Coordinator, APeersErrorIsAVictimOnceTheCauseIsHeardOf) {
  Desk desk;
  desk.Form();
  ASSERT_EQ(desk.coordinator.phase(), CoordinatorPhase::kRunning);
  desk.Say(1, control::Fault{.rank = 0,
                             .generation = 1,
                             .process = 1,
                             .born = 1,
                             .evidence = control::Evidence::kPeer,
                             .end = {.code = 1},
                             .what = "1",
                             .detail = "rank 0: connection reset"});
  EXPECT_EQ(desk.coordinator.state().history.seen_faults.back().node, "a");
  desk.Say(2, control::Fault{.rank = 1,
                             .generation = 1,
                             .process = 1,
                             .born = 1,
                             .end = {.signal = 11},
                             .what = "139",
                             .detail = "rank 1: signal 11"});
  const FaultHistory& history = desk.coordinator.state().history;
  EXPECT_EQ(history.crashes, 1);
  EXPECT_EQ(history.seen_faults.back().node, "b");
  // One more is a victim, and what is told twice is counted once.
  desk.Say(1, control::Fault{.rank = 0,
                             .generation = 1,
                             .process = 2,
                             .born = 1,
                             .end = {.signal = 6},
                             .what = "134"});
  desk.Say(2, control::Fault{.rank = 1,
                             .generation = 1,
                             .process = 1,
                             .born = 1,
                             .end = {.signal = 11},
                             .what = "139"});
  EXPECT_EQ(history.crashes, 1);
}

TEST(Coordinator, AnExcludedNodeIsNotTakenWhoeverIsStartedAgainUntilItsTimeIsOver) {
  ElasticOptions options = Desk::Options();
  options.exclude_for = absl::Minutes(10);
  Desk desk;
  desk.coordinator = Coordinator(options, {}, Id128::FromName("run"));
  desk.Give(StartEvent{});
  desk.Form();
  desk.Say(1, control::Fault{.rank = 0,
                             .generation = 1,
                             .process = 1,
                             .born = 1,
                             .fault_class = FaultClass::kHardware,
                             .what = "unkillable"});
  uint64_t stream = 2;
  const auto let_it_try_again = [&] {
    return desk.Hello(++stream, {.job = "job", .node = "a", .incarnation = stream, .capacity = 1});
  };
  const auto is_excluded = [](const std::vector<CoordinatorAction>& actions) {
    const auto refused = Desk::RefusedIn(actions);
    return refused && refused->kind == control::Refusal::kExcluded;
  };

  EXPECT_TRUE(is_excluded(let_it_try_again()));
  desk.coordinator = Coordinator(options, desk.coordinator.state(), Id128::FromName("run"));
  desk.Give(StartEvent{});
  EXPECT_TRUE(is_excluded(let_it_try_again())) << "its journal says so";
  desk.now += absl::Minutes(9);
  EXPECT_TRUE(is_excluded(let_it_try_again()));

  desk.now += absl::Minutes(2);
  EXPECT_FALSE(is_excluded(let_it_try_again()));
}

// What an agent says of a rank that left its body because of something that nobody had aborted.
TEST(Coordinator, ARankThatLeftForAnErrorOfItsPeersIsNotChargedForWhoDiedOfItself) {
  Bench bench(Nodes(8, 8, 8));
  ASSERT_TRUE(bench.RunsIn(1));
  bench.Train();
  bench.cluster.LeaveBody(0, 0);
  ASSERT_TRUE(bench.Reforms());
  ASSERT_EQ(bench.cluster.coordinator()->state().history.seen_faults.back().node, "n00");

  bench.cluster.KillWorker(5, 0, {.signal = SIGSEGV});

  ASSERT_TRUE(bench.cluster.Run(absl::Seconds(2), [&] {
    return bench.cluster.coordinator()->state().history.seen_faults.back().node == "n05";
  })) << bench.cluster.Story();
  EXPECT_EQ(bench.cluster.coordinator()->state().history.crashes, 1);
  ASSERT_TRUE(bench.RunsIn(2)) << bench.cluster.Story();
}

TEST(Coordinator, FaultsOfOlderGenerationsAreIgnoredAndCounted) {
  Desk desk;
  desk.Form();
  desk.Say(1, control::Fault{.rank = 0, .generation = 0, .process = 9, .end = {.code = 1}});
  EXPECT_EQ(desk.coordinator.phase(), CoordinatorPhase::kRunning);
  EXPECT_EQ(desk.coordinator.ignored(), 1u);
}

TEST(Coordinator, RefusesStrangersNamingBothSides) {
  Desk desk;
  desk.Form();
  const control::Hello good{.job = "job", .node = "c", .incarnation = 13, .capacity = 1};
  control::Hello foreign = good, claimed = good, other_run = good;
  foreign.job = "other";
  EXPECT_THAT(Desk::RefusalIn(desk.Hello(3, foreign)),
              HasSubstr("agent c is of job 'other', this is job 'job'"));
  other_run.run_id = Id128::FromName("another run");
  EXPECT_THAT(Desk::RefusalIn(desk.Hello(4, other_run)),
              HasSubstr(Id128::FromName("another run").hex()));
  claimed.node = "a";
  EXPECT_THAT(
      Desk::RefusalIn(desk.Hello(5, claimed)),
      HasSubstr(
          "node name 'a' is taken by the agent at 10.0.0.1:5, which may still live: give this "
          "one another --node"));
  EXPECT_THAT(Desk::RefusalIn(desk.Hello(6, good, "its proof of the token is wrong")),
              HasSubstr("proof of the token"));
  EXPECT_EQ(Desk::RefusalIn(desk.Hello(7, good)), "");
}

// --- A node name, twice ---

TEST(Coordinator, ANodeNameWhoseAgentIsHeardOfAfterItsTwinCameIsRefusedForGood) {
  Desk desk;
  desk.Form();
  const control::Hello twin{.job = "job", .node = "a", .incarnation = 13, .capacity = 1};
  desk.Hello(3, twin);
  desk.now += absl::Milliseconds(400);
  desk.Say(1, control::Beat{});
  ASSERT_TRUE(Desk::RefusedIn(desk.Hello(4, twin)));
  EXPECT_EQ(Desk::RefusedIn(desk.Hello(5, twin))->kind, control::Refusal::kLater)
      << "what it said may have been under way when it died";
  desk.now += absl::Milliseconds(600);
  desk.Say(1, control::Beat{});
  const auto refused = Desk::RefusedIn(desk.Hello(6, twin));
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->kind, control::Refusal::kNever);
  EXPECT_EQ(refused->reason,
            "node name 'a' is taken by the agent at 10.0.0.1:5, which lives: give this one another "
            "--node");
  EXPECT_EQ(desk.coordinator.phase(), CoordinatorPhase::kRunning);
}

TEST(Coordinator, AnAgentThatWasKilledAndStartedAgainIsLetInOnceTheFormerOneIsSilent) {
  Desk desk;
  desk.Form();
  const control::Hello again{.job = "job", .node = "a", .incarnation = 13, .capacity = 1};
  for (uint64_t stream = 3; stream < 8; ++stream) {
    const auto refused = Desk::RefusedIn(desk.Hello(stream, again));
    ASSERT_TRUE(refused) << stream;
    EXPECT_EQ(refused->kind, control::Refusal::kLater);
    desk.now += absl::Milliseconds(550);
    desk.Say(2, control::Beat{});
  }
  desk.now += absl::Milliseconds(300);  // 3 s of silence are over
  desk.Give(TimerFired{1});
  EXPECT_EQ(Desk::RefusalIn(desk.Hello(9, again)), "");
}

TEST(Coordinator, TwoTwinsAreBothRefusedForGood) {
  Desk desk;
  desk.Form();
  control::Hello one{.job = "job", .node = "a", .incarnation = 13, .capacity = 1}, other = one;
  other.incarnation = 14;
  desk.Hello(3, one);
  desk.Hello(4, other);
  desk.now += absl::Seconds(1);
  desk.Say(1, control::Beat{});
  EXPECT_EQ(Desk::RefusedIn(desk.Hello(5, one))->kind, control::Refusal::kNever);
  EXPECT_EQ(Desk::RefusedIn(desk.Hello(6, other))->kind, control::Refusal::kNever);
}

// --- Who is waited for ---

std::vector<std::string> SaidIn(const std::vector<CoordinatorAction>& actions) {
  std::vector<std::string> lines;
  for (const CoordinatorAction& action : actions) {
    if (const auto* announce = std::get_if<Announce>(&action)) lines.push_back(announce->line);
  }
  return lines;
}

TEST(Coordinator, SaysWhoIsHereAndHowLongTheOthersAreWaitedFor) {
  ElasticOptions options{.job = "job"};
  options.membership = {.min_world = 4, .max_world = 8};
  Coordinator coordinator(options, {}, Id128::FromName("run"));
  absl::Duration now = absl::Seconds(100);
  uint64_t stream = 0;
  const auto hello = [&](const std::string& node) {
    ++stream;
    return SaidIn(coordinator.Step(
        HelloReceived{
            stream, {.job = "job", .node = node, .incarnation = stream, .capacity = 2}, "", ""},
        now));
  };
  coordinator.Step(StartEvent{}, now);
  now += absl::Seconds(10);
  EXPECT_THAT(hello("a"), ElementsAre("waiting for nodes: 1 of 2 to 4 here (a); 590 s left "
                                      "(--join-timeout)"));

  // What changes soon after is told when people have read the last line, if it is still so.
  now += absl::Seconds(2);
  EXPECT_THAT(SaidIn(coordinator.Step(StreamLost{1}, now)), ElementsAre());
  now += absl::Seconds(2);
  EXPECT_THAT(SaidIn(coordinator.Step(TimerFired{1}, now)), ElementsAre());
  now += absl::Seconds(6);
  EXPECT_THAT(SaidIn(coordinator.Step(TimerFired{1}, now)),
              ElementsAre("waiting for nodes: none of 2 to 4 here; 580 s left (--join-timeout)"));
  now += absl::Seconds(60);
  EXPECT_THAT(SaidIn(coordinator.Step(TimerFired{1}, now)), ElementsAre()) << "nothing changed";

  hello("b");
  now += absl::Seconds(1);
  EXPECT_THAT(hello("c"), ElementsAre());
}

TEST(Coordinator, SaysAtTheLastCallWhenTheJobStarts) {
  ElasticOptions options{.job = "job"};
  options.membership = {.min_world = 1, .max_world = 4};
  options.spare_slots = 1;
  Coordinator coordinator(options, {}, Id128::FromName("run"));
  coordinator.Step(StartEvent{}, absl::Seconds(1));
  EXPECT_THAT(
      SaidIn(coordinator.Step(
          HelloReceived{1, {.job = "job", .node = "a", .incarnation = 1, .capacity = 1}, "", ""},
          absl::Seconds(2))),
      ElementsAre("waiting for nodes: 1 of 1 to 4 and 1 spare here (a); starts in 5 s "
                  "(--last-call)"));
}

TEST(Coordinator, SaysWhoIsHereWhileTooFewAreLeft) {
  Desk desk;
  desk.Form();
  desk.Give(StreamLost{2});
  std::vector<std::string> said;
  for (int second = 0; second < 12; ++second) {
    desk.now += absl::Seconds(1);
    for (std::string& line : SaidIn(desk.Say(1, control::Beat{}))) said.push_back(std::move(line));
  }
  ASSERT_EQ(said.size(), 1u);
  EXPECT_THAT(said[0], HasSubstr("waiting for nodes: 1 of 2 here (a); "));
}

// --- Agents that are not started alike ---

control::Hello HelloOf(const std::string& node, uint64_t incarnation, Terms terms) {
  return {.job = "job",
          .node = node,
          .incarnation = incarnation,
          .capacity = 1,
          .terms = std::move(terms)};
}

TEST(Coordinator, RefusesAnAgentThatIsNotStartedAsTheFirstOneWas) {
  Desk desk;
  EXPECT_EQ(Desk::RefusalIn(desk.Hello(1, HelloOf("a", 11, {{"--max-restarts", "3"}}))), "");
  const auto refused = Desk::RefusedIn(desk.Hello(2, HelloOf("b", 12, {{"--max-restarts", "5"}})));
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->kind, control::Refusal::kNever);
  EXPECT_EQ(refused->reason, "agent b is not started as agent a was: --max-restarts 5, 3 wanted");
  EXPECT_EQ(Desk::RefusalIn(desk.Hello(3, HelloOf("b", 13, {{"--max-restarts", "3"}}))), "");
  EXPECT_EQ(Desk::RefusalIn(desk.Hello(4, HelloOf("c", 14, {}))), "") << "it does not say";
}

TEST(Coordinator, HoldsAgentsToWhatItWasStartedWithItself) {
  ElasticOptions options = Desk::Options();
  options.terms = {{"-n", "2"}};
  Coordinator coordinator(options, {}, Id128::FromName("run"));
  coordinator.Step(StartEvent{}, absl::Seconds(1));
  const auto hello = [&](uint64_t stream, Terms terms) {
    return Desk::RefusalIn(coordinator.Step(
        HelloReceived{stream, HelloOf("a", stream, std::move(terms)), "", ""}, absl::Seconds(2)));
  };
  EXPECT_EQ(hello(1, {{"-n", "4"}, {"--fresh", "given"}}),
            "agent a is not started as the coordinator was: -n 4, 2 wanted");
  EXPECT_EQ(hello(2, {{"-n", "2"}, {"--fresh", "given"}}), "");
}

TEST(Coordinator, BeforeTheFirstGenerationTermsBindWhileSomebodyIsThereWhoHasThem) {
  Desk desk;
  desk.Hello(1, HelloOf("a", 11, {{"-n", "1"}}));
  desk.Give(StreamLost{1});
  EXPECT_EQ(Desk::RefusalIn(desk.Hello(2, HelloOf("b", 12, {{"-n", "2"}}))), "");
  EXPECT_EQ(Desk::RefusalIn(desk.Hello(3, HelloOf("a", 13, {{"-n", "1"}}))),
            "agent a is not started as agent b was: -n 1, 2 wanted");
  EXPECT_EQ(desk.coordinator.state().terms.node, "b");
}

TEST(Coordinator, ThatWasRestartedHoldsAllToTheTermsInItsJournal) {
  Desk desk;
  desk.terms = {{"-n", "1"}};
  desk.Form();
  ASSERT_EQ(desk.coordinator.state().generation(), 1u);

  Coordinator again(Desk::Options(), desk.coordinator.state(), Id128::FromName("run"));
  again.Step(StartEvent{}, absl::Seconds(1));
  const auto hello = [&](uint64_t stream, const std::string& node, uint64_t incarnation,
                         Terms terms) {
    control::Hello said = HelloOf(node, incarnation, std::move(terms));
    said.run_id = Id128::FromName("run");
    return Desk::RefusalIn(
        again.Step(HelloReceived{stream, std::move(said), "", ""}, absl::Seconds(2)));
  };
  EXPECT_EQ(hello(1, "b", 12, {{"-n", "1"}}), "") << "it comes back";
  EXPECT_EQ(hello(2, "a", 13, {{"-n", "2"}}),
            "agent a is not started as agent a was: -n 2, 1 wanted");
}

TEST(Coordinator, TellsAnAgentOfAFormerRunThatTheJobWasBegunAnew) {
  Desk desk;
  const Id128 former = Id128::FromName("the former run");
  const control::Hello hello{
      .job = "job", .node = "a", .incarnation = 9, .capacity = 1, .run_id = former};
  const std::string reason = "job job was begun anew as run " + Id128::FromName("run").hex() +
                             "; agent a is of run " + former.hex();

  auto refused = Desk::RefusedIn(desk.Hello(1, hello));
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->kind, control::Refusal::kBegunAnew);
  EXPECT_EQ(refused->reason, reason);
  refused = Desk::RefusedIn(desk.Hello(2, hello, "its proof of the token is wrong"));
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->kind, control::Refusal::kNever) << "it proved nothing";

  // Nor is it told how the new run ended.
  desk.now += absl::Hours(1);
  desk.Give(TimerFired{1});
  ASSERT_EQ(desk.coordinator.phase(), CoordinatorPhase::kDone);
  refused = Desk::RefusedIn(desk.Hello(3, hello));
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->kind, control::Refusal::kBegunAnew);
}

TEST(Coordinator, StepsDownBeforeOneThatIsNewer) {
  Desk desk;
  desk.Form();
  desk.Hello(3, {.job = "job", .node = "c", .incarnation = 13, .capacity = 1, .coordinator = 2});
  EXPECT_EQ(desk.coordinator.phase(), CoordinatorPhase::kSteppedDown);
  EXPECT_TRUE(desk.Give(StopAsked{SIGTERM}).empty());
}

// --- The coordinator's own death ---

TEST(Coordinator, ARestartedOneGoesOnWithTheSameGenerationAndItsBudgets) {
  ClusterOptions options = Nodes(8, 8, 8);
  options.commits = false;
  Bench bench(options);
  ASSERT_TRUE(bench.RunsIn(1));
  bench.cluster.KillWorker(3, 0, kKill9);
  ASSERT_TRUE(bench.RunsIn(2));
  const std::vector<uint64_t> before = bench.Processes();
  bench.cluster.CrashCoordinator();
  bench.cluster.Run(absl::Seconds(30));
  EXPECT_EQ(bench.Processes(), before) << "workers train on";
  bench.cluster.StartCoordinator();
  ASSERT_TRUE(bench.RunsIn(2));
  EXPECT_EQ(bench.Processes(), before);
  EXPECT_EQ(bench.cluster.coordinator()->state().incarnation, 2u);
  EXPECT_EQ(bench.cluster.coordinator()->state().history.crashes, 1);
}

TEST(Coordinator, WithoutACoordinatorAgentsEndWithEightyFourAfterItsGrace) {
  Bench bench(Nodes(8, 8, 8));
  ASSERT_TRUE(bench.RunsIn(1));
  bench.cluster.CrashCoordinator();
  ASSERT_TRUE(
      bench.cluster.Run(absl::Minutes(12), [&] { return bench.cluster.AllAgentsAreOver(); }));
  for (int node = 0; node < 8; ++node) EXPECT_EQ(bench.cluster.exit_code(node), 84);
}

TEST(Coordinator, OfTwoOnOneJournalTheOlderOneCanDoNothingMore) {
  Bench bench(Nodes(8, 8, 8));
  ASSERT_TRUE(bench.RunsIn(1));
  bench.cluster.PauseCoordinator();
  bench.cluster.Run(absl::Seconds(20));  // its streams break
  bench.cluster.StartSuccessor();
  ASSERT_TRUE(bench.RunsIn(1));
  bench.cluster.KillWorker(3, 0, kKill9);
  bench.cluster.ResumeCoordinators();
  ASSERT_TRUE(bench.RunsIn(2));
  EXPECT_EQ(bench.cluster.coordinator()->state().incarnation, 2u);
}

// A short job's journal, cut at every byte, under a cluster that was started anew: whatever is left
// of it, the job runs and ends.
TEST(Coordinator, GoesOnFromAJournalThatIsCutAtAnyByte) {
  ClusterOptions options = Nodes(8, 6, 8);
  options.elastic.budget.max_restarts = options.elastic.budget.other_class_limit = 1000;
  options.elastic.budget.same_root_limit = 1000;
  Bench story(options);
  ASSERT_TRUE(story.RunsIn(1));
  story.cluster.KillWorker(3, 0, kKill9);
  ASSERT_TRUE(story.RunsIn(2));
  const std::string journal = story.cluster.journal();
  ASSERT_GT(journal.size(), 500u);
#ifdef OUTLAST_SANITIZED
  constexpr size_t kStep = 23;
#else
  constexpr size_t kStep = 1;
#endif
  for (size_t cut = 0; cut <= journal.size(); cut += kStep) {
    ClusterCoverage coverage;
    Cluster cluster(cut + 1, options, coverage);
    cluster.SetJournal(journal.substr(0, cut));
    cluster.StartCoordinator();
    for (int node = 0; node < cluster.nodes(); ++node) cluster.StartAgent(node);
    ASSERT_TRUE(cluster.Run(absl::Minutes(3),
                            [&] {
                              return cluster.coordinator()->phase() == CoordinatorPhase::kRunning &&
                                     cluster.IsWhole();
                            }))
        << cut << ": " << cluster.error() << cluster.Story();
    cluster.FinishAllWork();
    ASSERT_TRUE(cluster.Run(absl::Minutes(2), [&] { return cluster.AllAgentsAreOver(); }))
        << cut << ": " << cluster.error() << cluster.Story();
    ASSERT_EQ(cluster.job_code(), 0) << cut;
  }
}

// --- Stops ---

TEST(Coordinator, TermOnAllNodesAgreesOnAStepSavesAndEndsWithEighty) {
  Bench bench(Nodes(8, 4, 8));
  ASSERT_TRUE(bench.RunsIn(1));
  for (int node = 0; node < 8; ++node) bench.cluster.Signal(node, SIGTERM);
  EXPECT_TRUE(bench.Ends(80));
  EXPECT_GT(bench.cluster.coordinator()->state().stop_went, 0);
  for (int node = 0; node < 8; ++node) EXPECT_EQ(bench.cluster.exit_code(node), 80);
}

TEST(Coordinator, TermOnOneNodeLetsItLeaveAndTheOthersGoOn) {
  Bench bench(Nodes(8, 4, 8));
  ASSERT_TRUE(bench.RunsIn(1));
  bench.cluster.Signal(6, SIGTERM);
  ASSERT_TRUE(bench.RunsIn(2));
  EXPECT_EQ(bench.cluster.newest_commit().map.world, 7);
  bench.Train();
  EXPECT_EQ(bench.cluster.exit_code(6), 86);
  EXPECT_EQ(bench.cluster.coordinator()->state().faults, 0);
}

// --- Changes of the world on request ---

bool IsSaid(const Cluster& cluster, const std::string& part) {
  return std::any_of(cluster.trace().begin(), cluster.trace().end(), [&](const auto& line) {
    return line.find("says: ") != std::string::npos && line.find(part) != std::string::npos;
  });
}
// The lead has been asked too.
bool Saves(Bench& bench) {
  const bool is_asked = bench.cluster.Run(absl::Seconds(20), [&] {
    return bench.cluster.coordinator_is_up() && bench.cluster.coordinator()->awaits_save();
  });
  bench.cluster.Run(absl::Milliseconds(500));
  return is_asked;
}

TEST(Coordinator, BeforeANodeLeavesAllSaveAStepAndTheOthersGoOnFromIt) {
  Bench bench(Nodes(8, 4, 8));
  bench.cluster.StartTrace();
  ASSERT_TRUE(bench.RunsIn(1));
  bench.Train();
  const int64_t step = bench.cluster.step();
  bench.cluster.Signal(6, SIGTERM);
  ASSERT_TRUE(bench.RunsIn(2, absl::Seconds(12)));
  EXPECT_EQ(bench.cluster.newest_commit().map.world, 7);
  EXPECT_GT(bench.cluster.promised(), step);
  EXPECT_TRUE(IsSaid(bench.cluster, "node n06 leaves: step "));
  bench.Train();
  EXPECT_EQ(bench.cluster.exit_code(6), 86);
  EXPECT_TRUE(bench.cluster.faults().empty());
}

TEST(Coordinator, ASpareTakesALeavingNodesRanksWithoutASaveBefore) {
  Bench bench(Nodes(8, 7, 7));
  ASSERT_TRUE(bench.RunsIn(1));
  bench.Train();
  bench.cluster.Signal(6, SIGTERM);
  ASSERT_TRUE(bench.cluster.Run(absl::Seconds(2), [&] {
    return bench.cluster.coordinator()->phase() == CoordinatorPhase::kReforming;
  }));
  ASSERT_TRUE(bench.RunsIn(2));
  EXPECT_EQ(bench.cluster.newest_commit().map.world, 7);
  EXPECT_EQ(bench.cluster.promised(), 0);
}

TEST(Coordinator, ANodeOfAJobThatSavesNothingLeavesAtOnce) {
  ClusterOptions options = Nodes(8, 4, 8);
  options.commits = false;
  Bench bench(options);
  bench.cluster.StartTrace();
  ASSERT_TRUE(bench.RunsIn(1));
  bench.cluster.Signal(6, SIGTERM);
  ASSERT_TRUE(bench.RunsIn(2, absl::Seconds(3)));
  EXPECT_FALSE(IsSaid(bench.cluster, "leaves"));
}

TEST(Coordinator, ASaveThatDoesNotEndHoldsALeavingNodeNoLongerThanItsRanksMayTrain) {
  Bench bench(Nodes(8, 4, 8));
  bench.cluster.StartTrace();
  ASSERT_TRUE(bench.RunsIn(1));
  bench.Train();
  bench.cluster.LoseSave();
  bench.cluster.Signal(6, SIGTERM);
  ASSERT_TRUE(bench.RunsIn(2, absl::Seconds(13)));
  EXPECT_TRUE(IsSaid(bench.cluster,
                     "node n06 leaves without a save: the save did not end in "
                     "time; "));
  bench.Train();
  EXPECT_EQ(bench.cluster.exit_code(6), 86);
}

TEST(Coordinator, ASaveThatFailsLetsANodeLeaveWithTheReasonSaid) {
  Bench bench(Nodes(8, 4, 8));
  bench.cluster.StartTrace();
  ASSERT_TRUE(bench.RunsIn(1));
  bench.cluster.FailSave();
  bench.cluster.Signal(6, SIGTERM);
  ASSERT_TRUE(bench.RunsIn(2));
  EXPECT_TRUE(IsSaid(bench.cluster, "node n06 leaves without a save: no space; no step is saved"));
}

TEST(Coordinator, AFaultEndsTheWaitForASave) {
  Bench bench(Nodes(8, 4, 8));
  bench.cluster.StartTrace();
  ASSERT_TRUE(bench.RunsIn(1));
  bench.cluster.LoseSave();
  bench.cluster.Signal(6, SIGTERM);
  ASSERT_TRUE(Saves(bench));
  bench.cluster.KillWorker(2, 0, kKill9);
  ASSERT_TRUE(bench.RunsIn(2, absl::Seconds(5)));
  EXPECT_TRUE(IsSaid(bench.cluster, "node n06 leaves: no save is waited for any more: rank "));
  EXPECT_EQ(bench.cluster.newest_commit().map.world, 7);
}

TEST(Coordinator, ANodeThatDiesWhileItLeavesIsWaitedForNoLonger) {
  Bench bench(Nodes(8, 4, 8));
  bench.cluster.StartTrace();
  ASSERT_TRUE(bench.RunsIn(1));
  bench.cluster.LoseSave();
  bench.cluster.Signal(6, SIGTERM);
  ASSERT_TRUE(Saves(bench));
  bench.cluster.CrashAgent(6);
  ASSERT_TRUE(bench.RunsIn(2));
  EXPECT_EQ(bench.cluster.newest_commit().map.world, 7);
  EXPECT_EQ(bench.cluster.coordinator()->state().history.crashes, 0) << "it was to leave";
}

TEST(Coordinator, ARestartedOneHearsAgainWhoLeavesAndHasAStepSaved) {
  Bench bench(Nodes(8, 4, 8));
  ASSERT_TRUE(bench.RunsIn(1));
  bench.cluster.LoseSave();
  bench.cluster.Signal(6, SIGTERM);
  ASSERT_TRUE(Saves(bench));
  bench.cluster.CrashCoordinator();
  bench.cluster.StartCoordinator();
  ASSERT_TRUE(bench.RunsIn(2));
  EXPECT_EQ(bench.cluster.newest_commit().map.world, 7);
  EXPECT_GT(bench.cluster.promised(), 0);
  bench.Train();
  EXPECT_EQ(bench.cluster.exit_code(6), 86);
}

// Nothing else is committed in this time.
TEST(Coordinator, NewcomersLetTheWorldGrowOnceAfterASave) {
  Bench bench(Nodes(8, 4, 8), 6);
  bench.cluster.StartTrace();
  ASSERT_TRUE(bench.RunsIn(1));
  const int64_t step = bench.cluster.step();
  bench.cluster.StartAgent(6);
  bench.cluster.Run(absl::Seconds(1));
  bench.cluster.StartAgent(7);
  ASSERT_TRUE(Saves(bench));
  ASSERT_TRUE(bench.RunsIn(2));
  EXPECT_EQ(bench.cluster.newest_commit().map.world, 8);
  EXPECT_GT(bench.cluster.promised(), step);
  EXPECT_TRUE(IsSaid(bench.cluster, "the world grows from 6 to 8 ranks: step "));
}

TEST(Coordinator, WhereNothingWasSavedTheWorldGrowsLater) {
  Bench bench(Nodes(8, 4, 8), 7);
  bench.cluster.StartTrace();
  ASSERT_TRUE(bench.RunsIn(1));
  bench.cluster.FailSave();
  bench.cluster.StartAgent(7);
  ASSERT_TRUE(Saves(bench));
  ASSERT_TRUE(bench.cluster.Run(absl::Seconds(5),
                                [&] { return !bench.cluster.coordinator()->awaits_save(); }));
  EXPECT_EQ(bench.cluster.coordinator()->phase(), CoordinatorPhase::kRunning);
  EXPECT_TRUE(IsSaid(bench.cluster, "the world grows from 7 to 8 ranks later: no space"));
  ASSERT_TRUE(bench.RunsIn(2)) << "at the next committed step";
  EXPECT_EQ(bench.cluster.newest_commit().map.world, 8);
}

TEST(Coordinator, TermOnOneNodeOfAJobThatNeedsAllStopsTheJob) {
  Bench bench(Nodes(8, 8, 8));
  ASSERT_TRUE(bench.RunsIn(1));
  bench.cluster.Signal(6, SIGTERM);
  EXPECT_TRUE(bench.Ends(80));
}

TEST(Coordinator, APersonsInterruptStopsTheWholeJobWithOneHundredAndThirty) {
  Bench bench(Nodes(8, 4, 8));
  ASSERT_TRUE(bench.RunsIn(1));
  bench.cluster.Signal(6, SIGINT);
  EXPECT_TRUE(bench.Ends(130));
}

// --- Links ---

// What each agent is asked to measure, by stream.
std::map<uint64_t, control::Measure> MeasuresIn(const std::vector<CoordinatorAction>& actions) {
  std::map<uint64_t, control::Measure> asked;
  for (const CoordinatorAction& action : actions) {
    const auto* send = std::get_if<SendToAgent>(&action);
    const auto* measure = send == nullptr ? nullptr : std::get_if<control::Measure>(&send->message);
    if (measure != nullptr) asked[send->stream] = *measure;
  }
  return asked;
}
std::string ExclusionIn(const std::vector<CoordinatorAction>& actions, uint64_t stream) {
  for (const CoordinatorAction& action : actions) {
    const auto* send = std::get_if<SendToAgent>(&action);
    if (send == nullptr || send->stream != stream) continue;
    if (const auto* exclude = std::get_if<control::Exclude>(&send->message)) return exclude->reason;
  }
  return {};
}

// Two nodes of three are wanted, on streams 1 to 3.
struct MeasuringDesk : Desk {
  explicit MeasuringDesk(double floor) {
    ElasticOptions options = Options();
    options.peer_rate_floor = floor;
    options.spare_slots = 1;
    coordinator = Coordinator(options, {}, Id128::FromName("run"));
    Give(StartEvent{});
  }
  std::vector<CoordinatorAction> Come(uint64_t stream) {
    const std::string node(1, static_cast<char>('a' + stream - 1));
    return Hello(stream, {.job = "job",
                          .node = node,
                          .incarnation = 10 + stream,
                          .capacity = 1,
                          .measure_address = node + ":3"});
  }
  std::vector<CoordinatorAction> Found(uint64_t stream, uint64_t number, double rate) {
    return Say(stream, control::Measured{number, rate, "so fast"});
  }
};

TEST(Coordinator, NewcomersMeasureTheirLinkBeforeTheyAreGivenRanks) {
  MeasuringDesk desk(100);
  EXPECT_TRUE(MeasuresIn(desk.Come(1)).empty()) << "with whom?";
  const auto asked = MeasuresIn(desk.Come(2));
  ASSERT_EQ(asked.size(), 2u);
  EXPECT_EQ(asked.at(1).address, "b:3") << "it calls";
  EXPECT_EQ(asked.at(2).address, "") << "it is called";
  EXPECT_EQ(asked.at(1).ticket, asked.at(2).ticket);
  EXPECT_TRUE(MeasuresIn(desk.Come(3)).empty()) << "both are busy";
  EXPECT_EQ(desk.coordinator.phase(), CoordinatorPhase::kForming) << "all are here";

  const auto next = MeasuresIn(desk.Found(1, 1, 900));
  ASSERT_EQ(next.size(), 2u);
  EXPECT_EQ(next.at(3).address, "a:3") << "the odd one, with the next in the ring";
  EXPECT_EQ(desk.coordinator.phase(), CoordinatorPhase::kForming);
  desk.Found(3, 2, 900);
  EXPECT_EQ(desk.coordinator.phase(), CoordinatorPhase::kReforming);
}

TEST(Coordinator, ANodeThatIsSlowWithTwoPartnersIsExcludedWithItsFigures) {
  MeasuringDesk desk(100);
  for (const uint64_t stream : {1, 2, 3}) desk.Come(stream);
  ASSERT_EQ(MeasuresIn(desk.Found(1, 1, 3)).at(3).address, "a:3");
  const auto third = MeasuresIn(desk.Found(3, 2, 4));
  ASSERT_EQ(third.at(2).address, "c:3");
  const auto actions = desk.Found(2, 3, 900);
  EXPECT_EQ(ExclusionIn(actions, 1),
            "preflight: peer bandwidth: 3 MB/s with b, 4 MB/s with c, at least 100 MB/s wanted");
  EXPECT_EQ(ExclusionIn(actions, 2) + ExclusionIn(actions, 3), "");
}

TEST(Coordinator, AMeasurementThatNobodyEndsHoldsNobodyUpForLong) {
  MeasuringDesk desk(100);
  desk.Come(1);
  desk.Come(2);
  const auto beat = [&] {
    for (const uint64_t stream : {1, 2}) desk.Say(stream, control::Beat{});
  };
  for (int second = 0; second < 30; ++second) {
    desk.now += absl::Seconds(1);
    beat();
  }
  EXPECT_EQ(desk.coordinator.phase(), CoordinatorPhase::kReforming);
}

TEST(Coordinator, ASpareThatComesLaterIsMeasuredWithWhoeverIsThere) {
  MeasuringDesk desk(0);
  desk.Come(1);
  desk.Come(2);
  desk.Found(1, 1, 900);
  for (int second = 0; second < 6; ++second) {
    desk.now += absl::Seconds(1);
    for (const uint64_t stream : {1, 2}) desk.Say(stream, control::Beat{});
  }
  for (const uint64_t stream : {1, 2})
    desk.Say(stream, control::Prepared{.generation = 1, .round = 1, .staged = true});
  for (const uint64_t stream : {1, 2}) desk.Say(stream, control::Committed{1});
  ASSERT_EQ(desk.coordinator.phase(), CoordinatorPhase::kRunning);

  const auto asked = MeasuresIn(desk.Come(3));
  ASSERT_EQ(asked.size(), 2u);
  EXPECT_EQ(asked.at(3).address, "a:3");
}

// What is asked to be saved, and on which stream; 0: nothing is.
std::pair<uint64_t, control::Save> SaveIn(const std::vector<CoordinatorAction>& actions) {
  for (const CoordinatorAction& action : actions) {
    const auto* send = std::get_if<SendToAgent>(&action);
    const auto* save = send == nullptr ? nullptr : std::get_if<control::Save>(&send->message);
    if (save != nullptr) return {send->stream, *save};
  }
  return {};
}

// Nodes a and b train, one of which would do; b leaves.
struct LeavingDesk : Desk {
  explicit LeavingDesk(bool saves_on_request) {
    ElasticOptions options = Options();
    options.membership.min_world = 1;
    coordinator = Coordinator(options, {}, Id128::FromName("run"));
    Give(StartEvent{});
    hello.saves_on_request = saves_on_request;
    Desk::Hello(1, hello);
    Desk::Hello(2, {.job = "job", .node = "b", .incarnation = 12, .capacity = 1});
    for (const uint64_t stream : {1, 2})
      Say(stream, control::Prepared{.generation = 1, .round = 1, .staged = true});
    for (const uint64_t stream : {1, 2}) Say(stream, control::Committed{1});
    for (const int rank : {0, 1}) {
      Say(static_cast<uint64_t>(rank + 1),
          control::Beat{.counter = 1, .ranks = {{rank, control::RankPhase::kJoined}}});
    }
    Say(2,
        control::Leave{.signal = SIGTERM, .within = absl::Seconds(25), .stays = absl::Seconds(8)});
    now += absl::Seconds(1);
  }
  control::Hello hello{.job = "job", .node = "a", .incarnation = 11, .capacity = 1};
};

TEST(Coordinator, AsksTheLeadForASaveAndAgainOnItsNextStream) {
  LeavingDesk desk(true);
  const auto [stream, save] = SaveIn(desk.Give(TimerFired{1}));
  EXPECT_EQ(stream, 1u);
  EXPECT_EQ(save.generation, 1u);
  EXPECT_EQ(save.reason, "node b leaves");
  const auto again = SaveIn(desk.Hello(3, desk.hello));
  EXPECT_EQ(again.first, 3u);
  EXPECT_EQ(again.second.number, save.number);
  desk.Say(3, control::Saved{save.number - 1, true, 9});
  EXPECT_EQ(desk.coordinator.phase(), CoordinatorPhase::kRunning) << "of another save";
  desk.Say(3, control::Saved{save.number, true, 9});
  EXPECT_EQ(desk.coordinator.phase(), CoordinatorPhase::kReforming);
  EXPECT_EQ(desk.coordinator.state().step_committed, 9);
}

TEST(Coordinator, ASaveIsWaitedForThreeQuartersOfTheTimeThatRanksMayTrain) {
  LeavingDesk desk(true);
  desk.Give(TimerFired{1});
  desk.now += absl::Milliseconds(1500);
  for (int beats = 0; beats < 3; ++beats) {
    for (const uint64_t stream : {1, 2}) desk.Say(stream, control::Beat{});
    EXPECT_EQ(desk.coordinator.phase(), CoordinatorPhase::kRunning);
    desk.now += absl::Seconds(1);
  }
  desk.now += absl::Milliseconds(500);
  desk.Give(TimerFired{1});
  EXPECT_EQ(desk.coordinator.phase(), CoordinatorPhase::kReforming);
}

TEST(Coordinator, WhatComesLateOrOutOfTurnChangesNothingOfASave) {
  LeavingDesk desk(true);
  const auto [stream, save] = SaveIn(desk.Give(TimerFired{1}));
  desk.Say(1, control::Prepared{.generation = 1, .round = 1, .staged = true});
  desk.Say(2, control::Saved{save.number, true, 9});
  EXPECT_TRUE(desk.coordinator.awaits_save()) << "node b does not lead";
  desk.Give(StopAsked{SIGTERM});
  EXPECT_FALSE(desk.coordinator.awaits_save());
  desk.Say(stream, control::Saved{save.number, true, 9});
  EXPECT_EQ(desk.coordinator.phase(), CoordinatorPhase::kDraining);
  for (const uint64_t each : {1, 2}) desk.Say(each, control::Bye{.generation = 1});
  ASSERT_EQ(desk.coordinator.phase(), CoordinatorPhase::kDone);
  desk.Say(stream, control::Saved{save.number, true, 9});
  EXPECT_EQ(desk.coordinator.phase(), CoordinatorPhase::kDone);
}

TEST(Coordinator, ASaveThatEndsWhileAnAgentIsAwayCounts) {
  LeavingDesk desk(true);
  const auto [stream, save] = SaveIn(desk.Give(TimerFired{1}));
  desk.Give(StreamLost{2});
  ASSERT_EQ(desk.coordinator.phase(), CoordinatorPhase::kSuspect);
  desk.Say(stream, control::Saved{save.number, true, 9});
  EXPECT_EQ(desk.coordinator.state().step_committed, 9);
  EXPECT_EQ(desk.coordinator.phase(), CoordinatorPhase::kReforming);
}

TEST(Coordinator, ASaveThatEndsWhileTheJobEndsChangesNothing) {
  LeavingDesk desk(true);
  const auto [stream, save] = SaveIn(desk.Give(TimerFired{1}));
  desk.Say(1, control::SaveReport{control::SaveOutcome::kRefused, 0, "a foreign root"});
  ASSERT_EQ(desk.coordinator.phase(), CoordinatorPhase::kEnding);
  EXPECT_FALSE(desk.coordinator.awaits_save());
  desk.Say(stream, control::Saved{save.number, true, 9});
  EXPECT_EQ(desk.coordinator.phase(), CoordinatorPhase::kEnding);
  EXPECT_EQ(desk.coordinator.state().ending->exit_code, 85);
}

TEST(Coordinator, AnAgentThatTakesNoSaveIsAskedForNone) {
  LeavingDesk desk(false);
  EXPECT_EQ(SaveIn(desk.Give(TimerFired{1})).first, 0u);
  EXPECT_EQ(desk.coordinator.phase(), CoordinatorPhase::kReforming);
}

// How the coordinator wants a stop to be made; nullopt: it did not say.
std::optional<control::StopHow> StopIn(const std::vector<CoordinatorAction>& actions) {
  std::optional<control::StopHow> how;
  for (const CoordinatorAction& action : actions) {
    const auto* send = std::get_if<SendToAgent>(&action);
    const auto* stop = send == nullptr ? nullptr : std::get_if<control::Stop>(&send->message);
    if (stop != nullptr) how = stop->how;
  }
  return how;
}

control::Beat BeatOf(int rank, control::RankPhase phase, int64_t step = 0) {
  return {.counter = 1, .newest_step = step, .ranks = {{rank, phase}}};
}

TEST(Coordinator, AStopWhileSomeRanksStillJoinWaitsForNoStep) {
  using control::RankPhase;
  using control::StopHow;
  const control::Leave term{.signal = SIGTERM, .within = absl::Seconds(25)};
  // Rank 0 waits for rank 1, which the stop ends before it has joined.
  Desk known;
  known.Form();
  known.Say(1, BeatOf(0, RankPhase::kJoined));
  EXPECT_EQ(StopIn(known.Say(2, term)), StopHow::kAtOnce);

  // It is heard of only after the stop has begun.
  Desk later;
  later.Form();
  EXPECT_EQ(StopIn(later.Say(2, term)), StopHow::kAtStep);
  EXPECT_EQ(StopIn(later.Say(1, BeatOf(0, RankPhase::kJoined))), StopHow::kAtOnce);

  // All have joined, or none ever does: as ever.
  Desk joined;
  joined.Form();
  joined.Say(1, BeatOf(0, RankPhase::kJoined));
  joined.Say(2, BeatOf(1, RankPhase::kJoined));
  EXPECT_EQ(StopIn(joined.Say(2, term)), StopHow::kAtStep);
  EXPECT_EQ(StopIn(joined.Say(1, BeatOf(0, RankPhase::kJoined))), std::nullopt);

  // Steps were done beside a rank that never joins: those who do them can agree on one.
  Desk helper;
  helper.Form();
  helper.Say(1, BeatOf(0, RankPhase::kJoined, 7));
  EXPECT_EQ(StopIn(helper.Say(2, term)), StopHow::kAtStep);
}

TEST(Coordinator, AWorkerThatFailsAfterItsFinalSaveFailedEndsTheJobWithEightyEight) {
  Desk desk;
  desk.Form();
  desk.Say(1, control::SaveReport{control::SaveOutcome::kFinalSaveFailed, 9, "root: disk full"});
  control::Fault fault{.rank = 0, .generation = 1, .process = 1, .born = 1, .end = {.code = 1}};
  desk.Say(1, fault);
  ASSERT_EQ(desk.coordinator.phase(), CoordinatorPhase::kEnding);
  EXPECT_EQ(desk.coordinator.state().ending->exit_code, 88);
  EXPECT_EQ(desk.coordinator.state().ending->reason, "root: disk full");
  EXPECT_FALSE(desk.coordinator.state().ending->keep) << "the save was tried again already";
}

TEST(Coordinator, AfterAFailedFinalSaveAWorkerThatWeEndedOurselvesIsReplaced) {
  Desk desk;
  desk.Form();
  desk.Say(1, control::SaveReport{control::SaveOutcome::kFinalSaveFailed, 9, "root: disk full"});
  desk.Say(1, control::Fault{.rank = 0,
                             .generation = 1,
                             .process = 1,
                             .born = 1,
                             .end = {.signal = SIGTERM, .by_us = true}});
  EXPECT_EQ(desk.coordinator.phase(), CoordinatorPhase::kReforming);
}

TEST(Coordinator, AStopThatIsAskedForWhileTheJobEndsChangesNothing) {
  Desk desk;
  desk.Form();
  desk.Say(1, control::SaveReport{control::SaveOutcome::kRefused, 0, "a foreign root"});
  ASSERT_EQ(desk.coordinator.phase(), CoordinatorPhase::kEnding);
  desk.Give(StopAsked{SIGTERM});
  EXPECT_EQ(desk.coordinator.phase(), CoordinatorPhase::kEnding);
  EXPECT_EQ(desk.coordinator.state().ending->exit_code, 85);
}

// One agent of node "a" with one slot, alone with what it is told.
struct Post {
  explicit Post(const ElasticOptions& elastic = Desk::Options())
      : agent({.elastic = elastic, .node = "a", .incarnation = 1}) {
    Give(StartEvent{});
  }
  std::vector<NodeAction> Give(const NodeEvent& event) {
    now += absl::Milliseconds(1);
    std::vector<NodeAction> actions = agent.Step(event, {.now = now});
    for (const NodeAction& action : actions) {
      if (const auto* finish = std::get_if<FinishJob>(&action)) over = *finish;
    }
    return actions;
  }
  std::vector<NodeAction> Say(control::CoordinatorMessage message) {
    return Give(CoordinatorSaid{std::move(message)});
  }
  void Wait(absl::Duration time) {
    now += time;
    Give(TimerFired{1});
  }
  void Welcome() {
    Give(StreamUp{});
    Say(control::Welcome{Id128::FromName("run"), 1, 0});
  }
  // Its rank 0 is in the body of generation 1.
  void Train() {
    Welcome();
    const RankMap map{.runs = {{.node = "a", .incarnation = 1, .count = 1}}, .world = 1};
    Say(control::Prepare{.generation = 1, .round = 1, .map = map});
    Give(WorkerJoined{0, 1});
    Give(WorkerStaged{0, 1, 0});
    Say(control::Commit{.generation = 1, .map = map});
  }
  // The link opens anew, and is refused.
  std::vector<NodeAction> Refuse(control::Refusal kind, const std::string& reason) {
    Wait(absl::Seconds(3));
    Give(StreamUp{});
    return Say(control::Refused{kind, reason});
  }
  template <typename Action>
  static bool Holds(const std::vector<NodeAction>& actions) {
    return std::any_of(actions.begin(), actions.end(), [](const NodeAction& action) {
      return std::holds_alternative<Action>(action);
    });
  }

  NodeAgent agent;
  absl::Duration now = absl::Seconds(9);
  std::optional<FinishJob> over;
};

const control::Saved* SavedIn(const std::vector<NodeAction>& actions) {
  for (const NodeAction& action : actions) {
    const auto* send = std::get_if<SendToCoordinator>(&action);
    const auto* saved = send == nullptr ? nullptr : std::get_if<control::Saved>(&send->message);
    if (saved != nullptr) return saved;
  }
  return nullptr;
}

TEST(NodeAgent, HasAWantedSaveMadeOnceAndSaysAsOftenAsItIsAskedWhatBecameOfIt) {
  Post post;
  post.Train();
  const control::Save save{.number = 7, .generation = 1, .reason = "node b leaves"};
  EXPECT_TRUE(Post::Holds<WantSave>(post.Say(save)));
  EXPECT_FALSE(Post::Holds<WantSave>(post.Say(save))) << "it is under way";
  const auto told = post.Give(WantedSaveEnded{7, true, 40});
  ASSERT_NE(SavedIn(told), nullptr);
  EXPECT_EQ(SavedIn(told)->step, 40);
  const auto again = post.Say(save);
  EXPECT_FALSE(Post::Holds<WantSave>(again));
  ASSERT_NE(SavedIn(again), nullptr);
  EXPECT_TRUE(SavedIn(again)->durable);
}

TEST(NodeAgent, SavesNothingOfAGenerationThatItIsNotIn) {
  Post post;
  post.Train();
  const auto told = post.Say(control::Save{.number = 7, .generation = 2});
  EXPECT_FALSE(Post::Holds<WantSave>(told));
  ASSERT_NE(SavedIn(told), nullptr);
  EXPECT_FALSE(SavedIn(told)->durable);
  EXPECT_EQ(SavedIn(told)->detail, "its generation has ended");
}

TEST(NodeAgent, SavesNothingMoreForAChangeWhileItUnwindsOrStops) {
  const RankMap map{.runs = {{.node = "a", .incarnation = 1, .count = 1}}, .world = 1};
  Post unwinds, stops;
  unwinds.Train();
  unwinds.Say(control::Prepare{.generation = 2, .round = 2, .map = map});
  stops.Train();
  stops.Say(control::Stop{.step = 9, .signal = SIGTERM, .within = absl::Seconds(25)});
  for (Post* post : {&unwinds, &stops}) {
    const auto told = post->Say(control::Save{.number = 7, .generation = 1});
    EXPECT_FALSE(Post::Holds<WantSave>(told));
    ASSERT_NE(SavedIn(told), nullptr);
    EXPECT_FALSE(SavedIn(told)->durable);
  }
}

TEST(NodeAgent, ThatIsExcludedWhileItStopsEndsWithEightySeven) {
  Post post;
  post.Welcome();
  post.Say(control::Stop{.how = control::StopHow::kAtOnce, .signal = SIGTERM});
  ASSERT_TRUE(post.agent.is_stopping());
  post.Say(control::Exclude{"ecc"});
  ASSERT_TRUE(post.over);
  EXPECT_EQ(post.over->exit_code, 87);
}

TEST(NodeAgent, ThatIsExcludedAsASpareEndsWithEightySeven) {
  Post post;
  post.Welcome();
  post.Say(control::Exclude{"ecc"});
  ASSERT_TRUE(post.over);
  EXPECT_EQ(post.over->exit_code, 87);
}

TEST(NodeAgent, WhoseCoordinatorNeverComesWaitsForItAsLongAsForTheOtherNodes) {
  ElasticOptions elastic = Desk::Options();
  elastic.join = absl::Seconds(20);
  Post post(elastic);
  post.Wait(absl::Seconds(19));
  EXPECT_FALSE(post.over);
  post.Wait(absl::Seconds(1));
  ASSERT_TRUE(post.over);
  EXPECT_EQ(post.over->exit_code, 84);
  EXPECT_EQ(post.over->reason, "no coordinator took this node in within 20s");
}

TEST(NodeAgent, ThatIsStoppedBeforeItHasACoordinatorEndsAtOnceWithTheSignalsCode) {
  for (const auto& [signal, code] : std::vector<std::pair<int, int>>{
           {SIGINT, 130}, {SIGHUP, 129}, {SIGTERM, 81}, {SIGUSR1, 81}}) {
    Post post;
    post.Give(StopAsked{signal});
    ASSERT_TRUE(post.over) << signal;
    EXPECT_EQ(post.over->exit_code, code);
  }
}

TEST(NodeAgent, ThatIsStoppedWhileItsCoordinatorIsAwayEndsWithinTheTimeOfAStop) {
  Post post;
  post.Train();
  post.Give(StreamDown{});
  const absl::Duration asked = post.now;
  post.Give(StopAsked{SIGTERM});
  bool ended = false;
  while (!post.over && post.now < asked + absl::Minutes(2)) {
    post.now += absl::Milliseconds(100);
    const auto actions = post.Give(TimerFired{1});
    if (Post::Holds<PersistCommon>(actions)) post.Give(StopPersisted{5, true});
    if (Post::Holds<KillWorker>(actions) && !std::exchange(ended, true))
      post.Give(WorkerEnded{0, 1, {.signal = SIGTERM, .by_us = true}});
  }
  ASSERT_TRUE(post.over);
  EXPECT_EQ(post.over->exit_code, 80);
  EXPECT_LE(post.now - asked, JobOptions().stop_within + absl::Seconds(1));
}

// It was cut off, say, and a spare has its ranks: what it holds is of no use to a save.
TEST(NodeAgent, WhoseRanksWentToAnotherNodeWaitsForNoSaveInAStop) {
  Post post;
  post.Train();
  const RankMap map{.runs = {{.node = "b", .incarnation = 2, .count = 1}}, .world = 1};
  EXPECT_TRUE(Post::Holds<AbortGeneration>(post.Say(control::Commit{.generation = 2, .map = map})));
  post.Give(WorkerEnded{0, 1, {.signal = SIGTERM, .by_us = true}});

  const control::Stop stop{
      .how = control::StopHow::kAtStep, .step = 9, .signal = SIGINT, .within = absl::Seconds(25)};
  post.Say(stop);
  post.Say(control::Go{9});
  post.Say(control::Done{130, "stopped"});
  ASSERT_TRUE(post.over);
  EXPECT_EQ(post.over->exit_code, 130);

  Post given_up;
  given_up.Train();
  given_up.Say(control::Commit{.generation = 2, .map = map});
  given_up.Give(WorkerEnded{0, 1, {.signal = SIGTERM, .by_us = true}});
  control::Stop at_once = stop;
  at_once.how = control::StopHow::kAtOnce;
  EXPECT_FALSE(Post::Holds<PersistCommon>(given_up.Say(at_once)));
  given_up.Say(control::Done{81, "stopped"});
  EXPECT_TRUE(given_up.over);
}

TEST(NodeAgent, OfARunThatWasBegunAnewSavesAndEndsWithEightyFour) {
  Post post;
  post.Train();
  ASSERT_EQ(post.agent.generation(), 1u);
  post.Give(StreamDown{});

  const auto actions = post.Refuse(control::Refusal::kBegunAnew, "begun anew");
  EXPECT_TRUE(Post::Holds<PersistCommon>(actions));
  EXPECT_TRUE(Post::Holds<KillWorker>(actions));
  post.Give(StopPersisted{5, true});
  post.Give(WorkerEnded{0, 1, {.signal = SIGTERM, .by_us = true}});
  ASSERT_TRUE(post.over);
  EXPECT_EQ(post.over->exit_code, 84);
  EXPECT_EQ(post.over->reason, "begun anew");
}

TEST(NodeAgent, ThatMetAStrangerWhileItTrainsAsksAgain) {
  Post post;
  post.Train();
  post.Give(StreamDown{});
  post.Refuse(control::Refusal::kNever, "of another job");
  EXPECT_FALSE(post.agent.is_stopping());
  post.now += absl::Seconds(3);
  EXPECT_TRUE(Post::Holds<OpenStream>(post.Give(TimerFired{1})));
}

// --- Small rules ---

TEST(ChooseCandidates, TakesSnapshotsOfWhichEveryRankIsHeldNewestFirstThenTheCheckpoint) {
  const std::vector<control::HeldSnapshot> held = {{{1, 9}, 0, 2},  {{1, 9}, 1, 2},
                                                   {{1, 9}, 1, 2},   // a replica besides
                                                   {{1, 10}, 0, 2},  // rank 1's is gone
                                                   {{2, 8}, 0, 1},  {{2, 9}, 0, 1}};
  EXPECT_THAT(ChooseCandidates(held, 6),
              ElementsAre(control::ResumeCandidate{2, 9}, control::ResumeCandidate{1, 9},
                          control::ResumeCandidate{2, 8}, control::ResumeCandidate{0, 6}));
  EXPECT_THAT(ChooseCandidates({}, 0), ElementsAre());
}

TEST(CheckDeadlines, NestAndAnErrorNamesBothTimers) {
  EXPECT_TRUE(CheckDeadlines({}).ok());
  ElasticOptions options;
  options.prepare = absl::Seconds(15);
  EXPECT_THAT(std::string(MessageOf(CheckDeadlines(options))),
              HasSubstr("prepare is 15s, but soft abort, SIGTERM, reap and two beats is 19s"));
  options = {};
  options.rejoin_grace = absl::Seconds(4);
  EXPECT_EQ(CheckDeadlines(options).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace outlast
