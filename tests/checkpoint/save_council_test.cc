#include "checkpoint/save_council.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <string>
#include <thread>
#include <vector>

#include "outlast/base/status.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(NewestCommonSnapshot, IsTheNewestThatEveryNodeHolds) {
  EXPECT_EQ(NewestCommon({{"a", {{1, 10}, {1, 20}}}, {"b", {{1, 10}, {1, 20}, {1, 30}}}}),
            (SnapshotKey{1, 20}));
}

TEST(NewestCommonSnapshot, IsNeverPutTogetherFromTwoGenerations) {
  EXPECT_EQ(NewestCommon({{"a", {{1, 10}, {2, 20}}}, {"b", {{1, 10}, {1, 20}}}}),
            (SnapshotKey{1, 10}));
}

TEST(NewestCommonSnapshot, GoesByTheGenerationBeforeTheStep) {
  EXPECT_EQ(NewestCommon({{"a", {{1, 50}, {2, 20}}}, {"b", {{2, 20}, {1, 50}}}}),
            (SnapshotKey{2, 20}));
}

TEST(NewestCommonSnapshot, IsNoneWhereANodeHoldsNothing) {
  EXPECT_EQ(NewestCommon({{"a", {{1, 10}}}, {"b", {}}}), std::nullopt);
  EXPECT_EQ(NewestCommon({}), std::nullopt);
}

SealedTold SealOf(int64_t step, bool last = false, uint64_t generation = 1) {
  return {{generation, step}, last};
}

TEST(SealTally, AStepIsCompleteOnceAllNodesHaveSealedIt) {
  SealTally tally({"a", "b"});

  EXPECT_THAT(tally.Sealed("a", SealOf(10)), IsEmpty());
  EXPECT_THAT(tally.Sealed("a", SealOf(10)), IsEmpty());  // said again
  const auto verdicts = tally.Sealed("b", SealOf(10, true));

  ASSERT_EQ(verdicts.size(), 1u);
  EXPECT_TRUE(verdicts[0].complete);
  EXPECT_EQ(verdicts[0].step, 10);
  EXPECT_TRUE(verdicts[0].sealed.last);  // as any of them says
  EXPECT_THAT(tally.Sealed("b", SealOf(10)), IsEmpty());
  EXPECT_TRUE(tally.is_decided(10));
}

TEST(SealTally, OlderStepsThatAreNotCompleteNeverWillBe) {
  SealTally tally({"a", "b"});
  EXPECT_THAT(tally.Sealed("a", SealOf(5)), IsEmpty());
  EXPECT_THAT(tally.Sealed("a", SealOf(10)), IsEmpty());

  const auto verdicts = tally.Sealed("b", SealOf(10));

  ASSERT_EQ(verdicts.size(), 2u);
  EXPECT_EQ(verdicts[0].step, 5);
  EXPECT_FALSE(verdicts[0].complete);
  EXPECT_EQ(verdicts[1].step, 10);
  EXPECT_TRUE(verdicts[1].complete);
}

TEST(SealTally, AStepThatOneSkippedIsDecidedForAll) {
  SealTally tally({"a", "b"});
  EXPECT_THAT(tally.Sealed("a", SealOf(10)), IsEmpty());

  const auto verdicts = tally.Skipped(10, "no buffer");

  ASSERT_EQ(verdicts.size(), 1u);
  EXPECT_FALSE(verdicts[0].complete);
  EXPECT_EQ(verdicts[0].why, "no buffer");
  EXPECT_THAT(tally.Sealed("b", SealOf(10)), IsEmpty());
  EXPECT_THAT(tally.Skipped(10, "again"), IsEmpty());
}

TEST(SealTally, OneStepOfTwoGenerationsIsNotOneInstant) {
  SealTally tally({"a", "b"});
  EXPECT_THAT(tally.Sealed("a", SealOf(10, false, 1)), IsEmpty());

  const auto verdicts = tally.Sealed("b", SealOf(10, false, 2));

  ASSERT_EQ(verdicts.size(), 1u);
  EXPECT_FALSE(verdicts[0].complete);
}

// What a row of the seal table has.
HeldSteps Row(std::array<int64_t, kMaxBuffers> steps) { return {.step = steps}; }

TEST(HeldByNode, IsWhatAllRanksHoldAndWhatTheSlowestHasReached) {
  const HeldTold told = HeldByNode(std::vector{Row({6, 4, 5}), Row({5, 4, kNoStep})}, 4);

  EXPECT_THAT(told.steps, ElementsAre(4, 5));
  EXPECT_EQ(told.reached, 5);
}

TEST(HeldByNode, LeavesOutWhatIsOlderThanTheCommonStep) {
  EXPECT_THAT(HeldByNode(std::vector{Row({6, 4, 5})}, 5).steps, ElementsAre(5, 6));
}

TEST(HeldTally, TheCommonStepIsTheNewestThatAllNodesHold) {
  HeldTally tally({"a", "b"}, 3);

  EXPECT_TRUE(tally.Told("a", {0, {4, 5, 6}, 6}));
  EXPECT_EQ(tally.common(), 3);
  EXPECT_TRUE(tally.Told("b", {0, {4, 5}, 5}));
  EXPECT_EQ(tally.common(), 5);
  EXPECT_FALSE(tally.Told("b", {0, {5}, 5})) << "nothing new was sealed";
  EXPECT_EQ(tally.common(), 5);
}

// Overwriting a step that somebody may still seal would leave no step that all have.
TEST(HeldTally, AStepThatOthersMayStillReachIsNotPassed) {
  HeldTally tally({"a", "b"});

  tally.Told("a", {0, {1, 2, 3}, 3});

  EXPECT_EQ(tally.passed(), 1);
}

TEST(HeldTally, AStepThatSomebodyWentPastWithoutItIsPassed) {
  HeldTally tally({"a", "b", "c"}, 1);

  tally.Told("a", {0, {1, 2, 4}, 4});
  tally.Told("b", {0, {1, 3}, 3});
  EXPECT_EQ(tally.passed(), 4) << "2 and 3 never come, 4 may";
  tally.Told("c", {0, {1, 5}, 5});
  EXPECT_EQ(tally.passed(), 5) << "nor 4";
  EXPECT_EQ(tally.common(), 1);
}

TEST(HeldTally, TheNewestOfAllIsPassedOnceNobodyElseCanHaveIt) {
  HeldTally tally({"a", "b"});

  tally.Told("a", {0, {2}, 2});
  tally.Told("b", {0, {}, 2});

  EXPECT_EQ(tally.passed(), 3);
}

TEST(MemoryPace, LeavesOutMoreWhileWhatIsSealedNeverBecomesCommon) {
  MemoryPace pace;
  for (int i = 0; i < 4; ++i) pace.OnSeal();
  EXPECT_EQ(pace.every(), 1);
  pace.OnSeal();
  EXPECT_EQ(pace.every(), 2);
  for (int i = 0; i < 5; ++i) pace.OnSeal();
  EXPECT_EQ(pace.every(), 4);
}

TEST(MemoryPace, GoesBackWhenAllIsWell) {
  MemoryPace pace;
  for (int i = 0; i < 5; ++i) pace.OnSeal();
  for (int i = 0; i < 127; ++i) pace.OnCommon();
  EXPECT_EQ(pace.every(), 2);
  pace.OnCommon();
  EXPECT_EQ(pace.every(), 1);
}

TEST(SealTally, StrangersDoNotCount) {
  SealTally tally({"a"});
  EXPECT_THAT(tally.Sealed("z", SealOf(10)), IsEmpty());
  EXPECT_FALSE(tally.is_decided(10));
}

// One of every kind, with no field at its default.
std::vector<CouncilMessage> OneOfEach() {
  const std::string folder = "step-000000000020-7f3a91c2";
  return {
      TablesTold{"digest", {{1, "one"}, {7, std::string("\0seven", 6)}}},
      SealedTold{{3, 40}, true},
      SkippedTold{40, "no buffer"},
      FinishAsked{{3, 40}},
      PersistAsked{{{3, 40}, {2, 30}}, "a node leaves"},
      RestoreAsked{{1, 2}, {{3, 40}}, {{5, {3, 38}}}},
      RestoreVoted{{1, 2}, true, true, {"rank 3: crc"}},
      AllTables{"digest", 1, 2, "bytes", absl::InternalError("why")},
      StepDecided{40, true, true, "why"},
      SaveOver{40, folder, 99, absl::Seconds(2), absl::InternalError("why"), true, false},
      RestoreChosen{{1, 2}, absl::InternalError("why"), RestoreSource::kDisk, {3, 40}, folder},
      RestoreJudged{{1, 2}, true, "names differ"},
      StepWanted{40},
      RootClaimed{2, "{}"},
      HeldTold{1, {40, 41}, 41},
      CommonTold{1, 40, 41, 2},
      DoorTold{{"n1", "127.0.0.1:4000", "rack 3"}},
      DoorsTold{{{"n1", "127.0.0.1:4000", "rack 3"}, {"n2", "127.0.0.2:4000", "n2"}}},
      CopyWanted{{3, 40}, SnapshotKey{3, 30}},
      CopyTold{{3, 40}, 99, absl::InternalError("why")},
      FetchWanted{7, {3, 40}, {{2, "n1"}, {3, "n1"}}},
      FetchTold{7, FetchPart{2, "n1"}, absl::InternalError("why")},
  };
}

TEST(CouncilMessages, ComeBackAsTheyWent) {
  const std::vector<CouncilMessage> messages = OneOfEach();
  ASSERT_EQ(messages.size(), std::variant_size_v<CouncilMessage>);
  for (size_t i = 0; i < messages.size(); ++i) {
    EXPECT_EQ(messages[i].index(), i);
    const std::string bytes = Encode(messages[i]);
    const auto back = DecodeCouncilMessage(bytes);
    ASSERT_TRUE(back.ok()) << i << ": " << back.status();
    EXPECT_EQ(back->index(), i);
    EXPECT_EQ(Encode(*back), bytes) << i;
  }
  const auto voted = std::get<RestoreVoted>(*DecodeCouncilMessage(Encode(messages[6])));
  EXPECT_EQ(voted.at, (RestoreTry{1, 2}));
  EXPECT_THAT(voted.reasons, ElementsAre("rank 3: crc"));
  const auto over = std::get<SaveOver>(*DecodeCouncilMessage(Encode(messages[9])));
  EXPECT_EQ(over.write_time, absl::Seconds(2));
  EXPECT_EQ(MessageOf(over.outcome), "why");
  EXPECT_FALSE(over.final);
  const auto fetch = std::get<FetchWanted>(*DecodeCouncilMessage(Encode(messages[20])));
  EXPECT_THAT(fetch.parts, ElementsAre(FetchPart{2, "n1"}, FetchPart{3, "n1"}));
  const auto copy = std::get<CopyWanted>(*DecodeCouncilMessage(Encode(messages[18])));
  EXPECT_EQ(copy.keep, (SnapshotKey{3, 30}));
}

TEST(CouncilMessages, ThatAreCutOrTooLongAreRefused) {
  for (const CouncilMessage& message : OneOfEach()) {
    const std::string bytes = Encode(message);
    for (size_t cut = 0; cut < bytes.size(); ++cut) {
      EXPECT_EQ(DecodeCouncilMessage(std::string_view(bytes).substr(0, cut)).status().code(),
                absl::StatusCode::kInvalidArgument)
          << message.index() << " cut at " << cut;
    }
    EXPECT_FALSE(DecodeCouncilMessage(bytes + "x").ok());
  }
}

TEST(CouncilMessages, OfAnotherVersionAreRefusedByItsNumber) {
  std::string bytes = Encode(CouncilMessage(StepWanted{1}));
  bytes[0] = 99;
  const absl::Status status = DecodeCouncilMessage(bytes).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(MessageOf(status)), HasSubstr("version 99"));
}

TEST(CouncilMessages, CannotNameAFolderOutsideTheRoot) {
  SaveOver over;
  over.checkpoint = "../../etc";
  EXPECT_FALSE(DecodeCouncilMessage(Encode(CouncilMessage(over))).ok());
  RestoreChosen chosen;
  chosen.checkpoint = "step-1/..";
  EXPECT_FALSE(DecodeCouncilMessage(Encode(CouncilMessage(chosen))).ok());
}

TEST(CouncilMessages, CountsOverTheirCapAreNotBelieved) {
  PersistAsked asked;
  asked.held.resize(1000);
  EXPECT_FALSE(DecodeCouncilMessage(Encode(CouncilMessage(asked))).ok());
}

// Peers whose connection breaks as the test says.
class TestPeers final : public Peers {
 public:
  void Listen(uint16_t, Ears ears) override { this->ears = std::move(ears); }
  std::string address() const override { return ""; }
  void Enter(const PeerGroup&) override {}
  void Leave(uint64_t) override {}
  absl::Status Send(const std::string& node, uint16_t, std::string bytes) override {
    sent.emplace_back(node, std::move(bytes));
    return absl::OkStatus();
  }
  Ears ears;
  std::vector<std::pair<std::string, std::string>> sent;
};

struct Heard {
  std::vector<std::pair<std::string, size_t>> messages;  // who, kind
  SaveCouncil::Ears Ears() {
    return {.on_message =
                [this](const std::string& node, const CouncilMessage& message) {
                  messages.emplace_back(node, message.index());
                },
            .on_team = [](const std::string&, const SaveTeamMessage&) {},
            .on_up = [](const std::string&) {},
            .on_lost = [](const std::string&, const std::string&) {}};
  }
};

void RunPosted(EventLoop& loop) {
  loop.Post([&] { loop.Stop(); });
  loop.Run();
}

TEST(SaveCouncil, AFollowerSaysAgainWhatWasNotAnsweredWhenTheLeadIsUpAgain) {
  const auto loop = EventLoop::Make().value();
  TestPeers peers;
  Heard heard;
  SaveCouncil council(*loop, peers, heard.Ears());
  council.Enter("b", "a", {"a", "b"});
  council.TellLead("step 10", SealedTold{{1, 10}, false});
  council.TellLead("step 20", SealedTold{{1, 20}, false});
  council.Answered("step 10");
  const auto second = peers.sent.at(1);
  peers.sent.clear();

  peers.ears.on_up("a");

  EXPECT_THAT(peers.sent, ElementsAre(second));
}

TEST(SaveCouncil, WhatANodeTellsItselfComesInALaterTurnAndNotAfterTheGroupWasLeft) {
  const auto loop = EventLoop::Make().value();
  TestPeers peers;
  Heard heard;
  SaveCouncil council(*loop, peers, heard.Ears());
  council.Enter("a", "a", {"a", "b"});

  council.TellAll(StepWanted{5});
  EXPECT_THAT(heard.messages, IsEmpty());
  RunPosted(*loop);
  EXPECT_EQ(heard.messages.size(), 1u);
  EXPECT_EQ(peers.sent.size(), 1u);

  council.TellLead("x", StepWanted{6});
  council.Enter("a", "a", {"a"});
  RunPosted(*loop);
  EXPECT_EQ(heard.messages.size(), 1u);
}

TEST(SaveCouncil, BytesThatAreNoMessageAreCountedAndLeftAlone) {
  const auto loop = EventLoop::Make().value();
  TestPeers peers;
  Heard heard;
  SaveCouncil council(*loop, peers, heard.Ears());
  council.Enter("a", "a", {"a", "b"});

  for (const std::string& bytes : {std::string(), std::string("X"), std::string("C\x01\xff")})
    peers.ears.on_message("b", bytes);

  EXPECT_EQ(council.refused(), 3u);
  EXPECT_THAT(heard.messages, IsEmpty());
}

}  // namespace
}  // namespace outlast
