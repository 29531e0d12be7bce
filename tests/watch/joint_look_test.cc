// What all nodes' looks together say: node "a" has ranks 0 and 1 of four, node "b" 2 and 3.
#include "watch/joint_look.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/watch/fake_ranks.h"
#include "watch/look_wire.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kApart = absl::Seconds(2);
const std::vector<std::string> kNodes = {"a", "a", "b", "b"};

LooksTold Told(const LookAsked& asked, const std::vector<RankLook>& looks) {
  // Over the wire, as looks come.
  const auto decoded = DecodeWatchMessage(EncodeWatchMessage(LooksTold{asked, looks}));
  return decoded.ok() ? std::get<LooksTold>(*decoded) : LooksTold{};
}

// A judgement in which each node tells `first`, then `second`; an empty list: it does not answer.
struct Round {
  std::vector<RankLook> a, b;
};
Verdict JudgeTogether(const Round& first, const Round& second) {
  JointLook joint;
  joint.Arm(1, kNodes);
  absl::Duration now = absl::Seconds(100);
  joint.Begin(now, kApart);
  for (const Round* round : {&first, &second}) {
    JointLook::Next next;
    for (int i = 0; i < 5 && !next.ask; ++i) {
      next = joint.Step(now);
      if (!next.ask) now = joint.due();
    }
    EXPECT_TRUE(next.ask.has_value());
    if (!next.ask) return {};
    if (!round->a.empty()) joint.Take("a", Told(*next.ask, round->a));
    if (!round->b.empty()) joint.Take("b", Told(*next.ask, round->b));
  }
  for (int i = 0; i < 2; ++i) {
    const JointLook::Next next = joint.Step(now);
    if (next.verdict) return *next.verdict;
    now = joint.due();
  }
  ADD_FAILURE() << "no verdict";
  return {};
}
Verdict JudgeTogether(const Round& round) { return JudgeTogether(round, round); }

RankLook WaitsInWorld(int rank) { return WaitingIn(Rank(rank), Comm("world", Ranks(4), 58, 57)); }

TEST(JointLook, NamesTheRankOfAnotherNodeThatIdlesWhileAllWaitForIt) {
  // What its own node does not know: idling is no fault, unless somebody waits.
  const Round round{.a = {WaitsInWorld(0), WaitsInWorld(1)},
                    .b = {WaitsInWorld(2), With(Rank(3), Comm("world", Ranks(4), 57, 57))}};
  const Verdict verdict = JudgeTogether(round);
  EXPECT_EQ(VerdictClassName(verdict.verdict_class), "stuck_outside_comm") << verdict.reason;
  EXPECT_THAT(CulpritRanks(verdict), ElementsAre(3));
  EXPECT_EQ(verdict.culprits[0].node, 1);
  EXPECT_THAT(verdict.waiting, ElementsAre(0, 1, 2));
  EXPECT_EQ(verdict.confidence, Confidence::kLikely) << "every member is known";
}

TEST(JointLook, FindsOperationsThatTwoNodesIssuedInOppositeOrders) {
  const auto waits = [](int rank, const char* in, const char* other) {
    return With(WaitingIn(Rank(rank), Comm(in, Ranks(4), 5, 4)), Comm(other, Ranks(4), 4, 4));
  };
  const Round round{.a = {waits(0, "sum", "norm"), waits(1, "sum", "norm")},
                    .b = {waits(2, "norm", "sum"), waits(3, "norm", "sum")}};
  const Verdict verdict = JudgeTogether(round);
  EXPECT_EQ(VerdictClassName(verdict.verdict_class), "collective_order_deadlock") << verdict.reason;
  EXPECT_THAT(verdict.cycle, ElementsAre(0, 2));
}

TEST(JointLook, FindsTheMinorityWhoseOperationDiffersFromThatOfOtherNodes) {
  CommLook odd = Comm("world", Ranks(4), 58, 57);
  SetOperation(&odd, 58, AllReduce(2048));
  const Round round{.a = {WaitsInWorld(0), WaitsInWorld(1)},
                    .b = {WaitingIn(Rank(2), odd), WaitsInWorld(3)}};
  const Verdict verdict = JudgeTogether(round);
  EXPECT_EQ(VerdictClassName(verdict.verdict_class), "desync") << verdict.reason;
  EXPECT_EQ(verdict.kind, "size");
  EXPECT_THAT(CulpritRanks(verdict), ElementsAre(2));
}

TEST(JointLook, AnOperationThatAllHaveJoinedAndNobodyFinishesIsStuck) {
  const Round round{.a = {WaitsInWorld(0), WaitsInWorld(1)},
                    .b = {WaitsInWorld(2), WaitsInWorld(3)}};
  const Verdict verdict = JudgeTogether(round);
  EXPECT_EQ(VerdictClassName(verdict.verdict_class), "comm_stuck_unknown") << verdict.reason;
  EXPECT_THAT(verdict.culprits, IsEmpty());
  EXPECT_THAT(verdict.waiting, ElementsAre(0, 1, 2, 3));
}

// Each node's looks are of another moment: 0 and 1 were still waiting when they were first seen,
// and 2 and 3 are seen when the operation is over.
TEST(JointLook, BlamesNobodyForAnOperationThatEndedBetweenTwoNodesLooks) {
  const RankLook done = In(With(Rank(2), Comm("world", Ranks(4), 58, 58)), Phase::kForward);
  RankLook done_too = In(With(Rank(3), Comm("world", Ranks(4), 58, 58)), Phase::kForward);
  const auto moved_on = [](int rank) {
    return In(With(Rank(rank), Comm("world", Ranks(4), 58, 58)), Phase::kForward);
  };
  const Verdict verdict =
      JudgeTogether({.a = {WaitsInWorld(0), WaitsInWorld(1)}, .b = {done, done_too}},
                    {.a = {moved_on(0), moved_on(1)}, .b = {done, done_too}});
  EXPECT_FALSE(verdict.is_finding() && !verdict.waiting.empty()) << verdict.reason;
}

TEST(JointLook, SparesARankOfAnotherNodeThatIsWithinItsOwnLimit) {
  const RankLook saves =
      Within(In(With(Rank(3), Comm("world", Ranks(4), 57, 57)), Phase::kCheckpointWrite),
             absl::Minutes(10), LimitSource::kDeclared);
  const Round round{.a = {WaitsInWorld(0), WaitsInWorld(1)}, .b = {WaitsInWorld(2), saves}};
  const Verdict verdict = JudgeTogether(round);
  EXPECT_EQ(VerdictClassName(verdict.verdict_class), "none") << verdict.reason;
  EXPECT_THAT(verdict.reason, HasSubstr("rank 3 is within its own limit"));
}

TEST(JointLook, SparesARankThatMovesBetweenTheLooks) {
  const auto slow = [](uint64_t opened) {
    RankLook look = In(With(Rank(3), Comm("world", Ranks(4), 57, 57)), Phase::kData);
    look.progress.sections_opened = opened;
    return look;
  };
  const std::vector<RankLook> a = {WaitsInWorld(0), WaitsInWorld(1)};
  const Verdict verdict = JudgeTogether({.a = a, .b = {WaitsInWorld(2), slow(7)}},
                                        {.a = a, .b = {WaitsInWorld(2), slow(9)}});
  EXPECT_EQ(VerdictClassName(verdict.verdict_class), "none") << verdict.reason;
}

TEST(JointLook, BlamesNobodyThatMayWaitForANodeWhichDoesNotAnswer) {
  const std::vector<RankLook> a = {WaitsInWorld(0), WaitsInWorld(1)};
  const std::vector<RankLook> b = {WaitsInWorld(2), WaitsInWorld(3)};
  for (const auto& [first, second] :
       std::vector<std::pair<Round, Round>>{{{.a = a, .b = {}}, {.a = a, .b = {}}},
                                            {{.a = a, .b = b}, {.a = a, .b = {}}},
                                            {{.a = a, .b = {}}, {.a = a, .b = b}}}) {
    const Verdict verdict = JudgeTogether(first, second);
    EXPECT_EQ(VerdictClassName(verdict.verdict_class), "none") << verdict.reason;
    EXPECT_TRUE(verdict.needs_others);
  }
}

TEST(JointLook, AsksForTheSecondLookWhenAllFirstOnesAreThere) {
  JointLook joint;
  joint.Arm(1, kNodes);
  absl::Duration now = absl::Seconds(50);
  EXPECT_FALSE(joint.Step(now).ask.has_value()) << "nobody is stalled";
  joint.Begin(now, kApart);
  const auto first = joint.Step(now).ask;
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->look, 1);
  joint.Take("a", Told(*first, {WaitsInWorld(0), WaitsInWorld(1)}));
  now += absl::Seconds(1);
  EXPECT_FALSE(joint.Step(now).ask.has_value());
  joint.Take("b", Told(*first, {WaitsInWorld(2), WaitsInWorld(3)}));
  EXPECT_FALSE(joint.Step(now).ask.has_value()) << "the looks lie apart";
  EXPECT_EQ(joint.due(), now + kApart);
  now = joint.due();
  const auto second = joint.Step(now).ask;
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(second->look, 2);
  EXPECT_EQ(second->number, first->number);
  // What was the first look's is no second one.
  joint.Take("a", Told(*first, {WaitsInWorld(0), WaitsInWorld(1)}));
  joint.Take("b", Told(*second, {WaitsInWorld(2), WaitsInWorld(3)}));
  EXPECT_FALSE(joint.Step(now).verdict.has_value());
  joint.Take("a", Told(*second, {WaitsInWorld(0), WaitsInWorld(1)}));
  EXPECT_TRUE(joint.Step(now).verdict.has_value());

  joint.Begin(now, kApart);
  EXPECT_FALSE(joint.Step(now).ask.has_value()) << "not again at once";
  now += 2 * kApart;
  joint.Begin(now, kApart);
  EXPECT_TRUE(joint.Step(now).ask.has_value());
}

TEST(JointLook, HearsNothingOfRanksThatANodeDoesNotHold) {
  JointLook joint;
  joint.Arm(1, kNodes);
  const absl::Duration now = absl::Seconds(50);
  joint.Begin(now, kApart);
  const LookAsked asked = *joint.Step(now).ask;
  joint.Take("b", Told(asked, {WaitsInWorld(0)}));
  joint.Take("stranger", Told(asked, {WaitsInWorld(2)}));
  joint.Take("a", Told(asked, {WaitsInWorld(0), WaitsInWorld(1)}));
  EXPECT_FALSE(joint.Step(now).ask.has_value());
  EXPECT_EQ(joint.due(), now + JointLook::kPatience) << "b has told nothing yet";
}

TEST(JointLook, ConcernsTheNodesOfCulpritsAndOfThoseThatWait) {
  JointLook joint;
  joint.Arm(1, {"a", "b", "c", "c"});
  Verdict verdict;
  verdict.culprits.push_back({.rank = 2});
  verdict.waiting = {0, 3};
  EXPECT_THAT(joint.Concerned(verdict), ElementsAre("c", "a"));
}

// --- The wire ---

LooksTold Sample() {
  RankLook look = WaitsInWorld(1);
  look.process = ProcessState::kStopped;
  look.exit_code = 3;
  look.incarnation = look.progress.incarnation;
  look.pace.limit = absl::InfiniteDuration();
  PairRow pair{};
  pair.comm = 5;
  pair.peer = 3;
  pair.sends_entered = 4;
  look.pairs.push_back(pair);
  look.comms.push_back(Comm("idle", Ranks(4), 9, 9));
  return {{7, 8, 2}, {look, Rank(2)}};
}

TEST(LookWire, ALookComesThroughWithAllThatAVerdictNeeds) {
  const auto message = DecodeWatchMessage(EncodeWatchMessage(Sample()));
  ASSERT_TRUE(message.ok()) << message.status();
  const auto& told = std::get<LooksTold>(*message);
  EXPECT_EQ(told.asked, (LookAsked{7, 8, 2}));
  ASSERT_EQ(told.looks.size(), 2u);
  const RankLook& look = told.looks[0];
  const RankLook sent = Sample().looks[0];
  EXPECT_FALSE(look.MovedSince(sent));
  EXPECT_EQ(look.rank, 1);
  EXPECT_EQ(look.process, ProcessState::kStopped);
  EXPECT_EQ(look.exit_code, 3);
  EXPECT_EQ(look.progress.pid, 1001);
  EXPECT_EQ(look.progress.sections[0].name, "comm_wait");
  EXPECT_EQ(look.pace.age, absl::Seconds(60));
  EXPECT_EQ(look.pace.limit, absl::InfiniteDuration());
  EXPECT_EQ(look.comms[0].operations.size(), sent.comms[0].operations.size());
  EXPECT_EQ(*look.comms[0].members, *sent.comms[0].members);
  EXPECT_THAT(look.comms[1].operations, IsEmpty()) << "nothing is pending there";
  EXPECT_EQ(look.pairs[0].sends_entered, 4u);
  EXPECT_FALSE(told.looks[1].exit_code.has_value());
}

TEST(LookWire, AVerdictComesThroughWhole) {
  const Verdict verdict =
      JudgeTogether({.a = {WaitsInWorld(0), WaitsInWorld(1)},
                     .b = {WaitsInWorld(2), With(Rank(3), Comm("world", Ranks(4), 57, 57))}});
  const auto message =
      DecodeWatchMessage(EncodeWatchMessage(VerdictFound{4, absl::Milliseconds(3), verdict}));
  ASSERT_TRUE(message.ok()) << message.status();
  const auto& found = std::get<VerdictFound>(*message);
  EXPECT_EQ(found.number, 4u);
  EXPECT_EQ(found.took, absl::Milliseconds(3));
  EXPECT_EQ(found.verdict, verdict);
}

TEST(LookWire, WhatIsCutAnywhereOrChangedIsRefusedOrAMessage) {
  const std::string whole = EncodeWatchMessage(Sample());
  for (size_t bytes = 0; bytes < whole.size(); ++bytes)
    EXPECT_FALSE(DecodeWatchMessage(whole.substr(0, bytes)).ok()) << bytes;
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = static_cast<char>(changed[at] ^ 0xff);
    DecodeWatchMessage(changed).IgnoreError();  // neither crash nor unbounded memory
  }
}

TEST(LookWire, AnotherVersionIsRefusedAndNamed) {
  std::string bytes = EncodeWatchMessage(StallTold{3});
  bytes[0] = 2;
  EXPECT_THAT(DecodeWatchMessage(bytes).status().ToString(), HasSubstr("version 2, 1 wanted"));
}

}  // namespace
}  // namespace outlast
