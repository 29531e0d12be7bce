// What a node of several judges, which sees its own ranks only: ranks 0 and 1 of four.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "tests/watch/fake_ranks.h"
#include "tests/watch/sim_job.h"
#include "watch/monitor_state.h"
#include "watch/verdict.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::vector<bool> kTwoElsewhere = {false, false, true, true};

Verdict JudgeHere(Looks& looks) {
  return JudgeRanks(looks.pairs(), {.world = 4, .elsewhere = kTwoElsewhere});
}

void ExpectNoVerdict(const Verdict& verdict) {
  EXPECT_EQ(VerdictClassName(verdict.verdict_class), "none") << verdict.reason;
  EXPECT_THAT(verdict.culprits, IsEmpty());
  EXPECT_THAT(verdict.waiting, IsEmpty());
  EXPECT_EQ(verdict.reason, "who waits here may wait for ranks of other nodes");
}

CommLook WithoutList(CommLook comm) {
  comm.members = nullptr;
  return comm;
}
CommLook WithoutDone(CommLook comm) {
  comm.row.done_seq = kUnknownSeq;
  return comm;
}

TEST(OtherNodes, WhoWaitsWhereRanksOfOthersAreMissingIsNotBlamed) {
  Looks looks;
  for (int rank = 0; rank < 2; ++rank)
    looks.Add(WaitingIn(Rank(rank), Comm("world", Ranks(4), 58, 57)));
  ExpectNoVerdict(JudgeHere(looks));
}

TEST(OtherNodes, ACommWithoutAListOfMembersIsJudgedByItsSize) {
  Looks looks;
  for (int rank = 0; rank < 2; ++rank)
    looks.Add(WaitingIn(Rank(rank), WithoutList(Comm("world", Ranks(4), 58, 57))));
  ExpectNoVerdict(JudgeHere(looks));

  Looks of_three;
  for (int rank = 0; rank < 2; ++rank)
    of_three.Add(WaitingIn(Rank(rank), WithoutList(Comm("three", Ranks(3), 58, 57))));
  ExpectNoVerdict(JudgeHere(of_three));
}

TEST(OtherNodes, ARankThatAnotherOneHereWaitsForMayItselfWaitForThem) {
  Looks looks;
  looks.Add(With(WaitingIn(Rank(0), Comm("pair", {0, 1}, 5, 4)), Comm("far", {1, 2}, 0, 0)));
  looks.Add(With(WaitingIn(Rank(1), Comm("far", {1, 2}, 9, 8)), Comm("pair", {0, 1}, 4, 4)));
  ExpectNoVerdict(JudgeHere(looks));
}

TEST(OtherNodes, ADeclaredLimitOfWhoWaitsForThemBlamesNobodyHere) {
  Looks looks;
  looks.Add(Within(WaitingIn(Rank(0), Comm("world", Ranks(4), 58, 57)), absl::Seconds(30),
                   LimitSource::kDeclared));
  looks.Add(WaitingIn(Rank(1), Comm("world", Ranks(4), 58, 57)));
  ExpectNoVerdict(JudgeHere(looks));
}

TEST(OtherNodes, WhereDoneIsNotKnownAWaitIsAWait) {
  Looks looks;
  for (int rank = 0; rank < 2; ++rank)
    looks.Add(WaitingIn(Rank(rank), WithoutDone(Comm("world", Ranks(4), 58, 57))));
  ExpectNoVerdict(JudgeHere(looks));
}

TEST(OtherNodes, ASendOrReceiveMayWaitForThem) {
  RankLook look = WaitingIn(Rank(1), Comm("world", Ranks(4), 0, 0));
  PairRow pair{};
  pair.comm = Fnv1a64("world");
  pair.peer = 3;
  pair.sends_entered = 4;
  pair.sends_done = 3;
  look.pairs.push_back(pair);
  Looks looks;
  looks.Add(look);
  looks.Add(With(Rank(0), Comm("world", Ranks(4), 0, 0)));
  ExpectNoVerdict(JudgeHere(looks));
}

TEST(OtherNodes, WhoHasNotComeHereIsBlamedAllTheSame) {
  Looks looks;
  looks.Add(WaitingIn(Rank(0), Comm("world", Ranks(4), 58, 57)));
  looks.Add(With(In(Rank(1), Phase::kData), Comm("world", Ranks(4), 57, 57)));
  const Verdict verdict = JudgeHere(looks);
  EXPECT_EQ(VerdictClassName(verdict.verdict_class), "data_loader_stall") << verdict.reason;
  EXPECT_THAT(CulpritRanks(verdict), ElementsAre(1));
  EXPECT_THAT(verdict.waiting, ElementsAre(0));
  EXPECT_EQ(verdict.confidence, Confidence::kWeak);
}

TEST(OtherNodes, ACommOfRanksOfThisNodeAloneIsJudgedAsEver) {
  Looks looks;
  for (int rank = 0; rank < 2; ++rank)
    looks.Add(WaitingIn(Rank(rank), Comm("pair", {0, 1}, 58, 57)));
  const Verdict verdict = JudgeHere(looks);
  EXPECT_EQ(VerdictClassName(verdict.verdict_class), "comm_stuck_unknown") << verdict.reason;
  EXPECT_THAT(verdict.waiting, ElementsAre(0, 1));
}

TEST(OtherNodes, OfDifferentOperationsTheMajorityMayBeThere) {
  CommLook odd = Comm("world", Ranks(4), 58, 57);
  SetOperation(&odd, 58, AllReduce(2048));
  Looks looks;
  looks.Add(WaitingIn(Rank(0), Comm("world", Ranks(4), 58, 57)));
  looks.Add(WaitingIn(Rank(1), odd));
  const Verdict verdict = JudgeHere(looks);
  EXPECT_EQ(VerdictClassName(verdict.verdict_class), "desync") << verdict.reason;
  EXPECT_TRUE(verdict.ambiguous);
  EXPECT_EQ(verdict.confidence, Confidence::kWeak);
  EXPECT_THAT(CulpritRanks(verdict), ElementsAre(0, 1));
}

TEST(OtherNodes, TheOnlyRankOfANodeCanBeFoundStopped) {
  RankLook look = WaitingIn(Rank(0), Comm("world", Ranks(4), 58, 57));
  look.process = ProcessState::kStopped;
  Looks looks;
  looks.Add(look);
  const Verdict alone = JudgeRanks(looks.pairs(), {.world = 1});
  EXPECT_EQ(VerdictClassName(alone.verdict_class), "frozen");
  const Verdict verdict =
      JudgeRanks(looks.pairs(), {.world = 4, .elsewhere = {false, true, true, true}});
  EXPECT_EQ(VerdictClassName(verdict.verdict_class), "stopped") << verdict.reason;
  EXPECT_THAT(CulpritRanks(verdict), ElementsAre(0));
}

TEST(OtherNodes, AllRanksOfANodeCanBeFoundStopped) {
  Looks looks;
  for (int rank = 0; rank < 2; ++rank) {
    RankLook look = In(With(Rank(rank), Comm("world", Ranks(4), 57, 57)), Phase::kData);
    look.process = ProcessState::kStopped;
    looks.Add(look);
  }
  const Verdict alone = JudgeRanks(looks.pairs(), {.world = 2});
  EXPECT_EQ(VerdictClassName(alone.verdict_class), "frozen") << alone.reason;
  const Verdict verdict = JudgeHere(looks);
  EXPECT_EQ(VerdictClassName(verdict.verdict_class), "stopped") << verdict.reason;
  EXPECT_THAT(CulpritRanks(verdict), ElementsAre(0, 1));
}

// The finding of ranks 0 and 1 of four, of which the first `stopped` are stopped from the start;
// the second in which it came, -1: none did.
std::pair<int, Verdict> FindingOf(int stopped, const std::vector<bool>& elsewhere) {
  MonitorState state({}, 4);
  state.Arm(1, 4, elsewhere);
  for (int second = 0; second < 1000; ++second) {
    PollInput input{.monotonic_ns = second * kSecondNs, .boottime_ns = second * kSecondNs};
    for (int rank = 0; rank < 2; ++rank) {
      RankLook look = In(With(Rank(rank), Comm("world", Ranks(4), 57, 57)), Phase::kData);
      if (rank < stopped) look.process = ProcessState::kStopped;
      input.looks.push_back(std::move(look));
    }
    if (auto finding = state.Poll(std::move(input)).finding) return {second, *std::move(finding)};
  }
  return {-1, {}};
}

TEST(OtherNodes, AWatchFindsAllItsRanksStoppedAsSoonAsOneOfThem) {
  const auto [one_at, one] = FindingOf(1, kTwoElsewhere);
  const auto [all_at, all] = FindingOf(2, kTwoElsewhere);
  EXPECT_GT(one_at, 0);
  EXPECT_EQ(all_at, one_at);
  EXPECT_EQ(VerdictClassName(all.verdict_class), "stopped") << all.reason;
  EXPECT_THAT(CulpritRanks(one), ElementsAre(0));
  EXPECT_THAT(CulpritRanks(all), ElementsAre(0, 1));
  EXPECT_EQ(FindingOf(2, {}).first, -1) << "somebody stopped the whole job";
}

TEST(OtherNodes, AWatchHasNoFindingWhileItsRanksWaitForThem) {
  WatchdogOptions options;
  MonitorState state(options, 4);
  state.Arm(1, 4, kTwoElsewhere);
  int findings = 0;
  for (int second = 0; second < 4000; ++second) {
    PollInput input{.monotonic_ns = second * kSecondNs, .boottime_ns = second * kSecondNs};
    for (int rank = 0; rank < 2; ++rank)
      input.looks.push_back(WaitingIn(Rank(rank), Comm("world", Ranks(4), 58, 57)));
    const PollResult result = state.Poll(std::move(input));
    findings += result.finding.has_value() ? 1 : 0;
    EXPECT_EQ(result.frozen, FreezeReason::kNone);
  }
  EXPECT_EQ(findings, 0);
}

}  // namespace
}  // namespace outlast
