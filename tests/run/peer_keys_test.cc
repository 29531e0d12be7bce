// Put and Get between two keepers' keys, over peers that a test breaks by hand.
#include "run/peer_keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/event_loop.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// One end of a connection whose messages travel when the test says so.
class HandPeers final : public Peers {
 public:
  void Listen(uint16_t, Ears ears) override { ears_ = std::move(ears); }
  std::string address() const override { return "hand:1"; }
  void Enter(const PeerGroup&) override {}
  void Leave(uint64_t) override {}
  absl::Status Send(const std::string& node, uint16_t channel, std::string bytes) override {
    EXPECT_EQ(channel, kPeerKeys);
    sent.emplace_back(node, std::move(bytes));
    return send_result;
  }
  const Ears& ears() const { return ears_; }

  std::deque<std::pair<std::string, std::string>> sent;
  absl::Status send_result;

 private:
  Ears ears_;
};

struct Answer {
  int slot;
  uint64_t request;
  absl::StatusCode code;
  std::string text;
  bool operator==(const Answer&) const = default;
};

// The keys of a keeper, and what they answered.
struct Side {
  Side(EventLoop& loop, const std::string& node)
      : keys(loop, &peers, node,
             {.answer =
                  [this, &loop](int slot, uint64_t request, const absl::Status& status,
                                std::string_view value) {
                    answers.push_back(
                        {slot, request, status.code(),
                         status.ok() ? std::string(value) : std::string(status.message())});
                    loop.Stop();
                  },
              .on_refused = [this](const std::string& from,
                                   const absl::Status&) { refused.push_back(from); }}) {}
  HandPeers peers;
  std::vector<Answer> answers;
  std::vector<std::string> refused;
  PeerKeys keys;
};

class PeerKeysTest : public ::testing::Test {
 protected:
  void EnterBoth(uint64_t generation) {
    auto commit = std::make_shared<control::Commit>();
    commit->generation = generation;
    commit->map = {.runs = {{.node = "a", .count = 1}, {.node = "b", .first_rank = 1, .count = 1}},
                   .world = 2};
    lead_.keys.Enter({.generation = generation, .members = {0}, .ranks = {0}, .job = commit});
    follower_.keys.Enter({.generation = generation, .members = {0}, .ranks = {1}, .job = commit});
  }
  void Connect() {
    lead_.peers.ears().on_up("b");
    follower_.peers.ears().on_up("a");
  }
  // All that waits arrives, and what follows from it.
  void Deliver() {
    while (!lead_.peers.sent.empty() || !follower_.peers.sent.empty()) {
      for (auto& [to, bytes] : std::exchange(follower_.peers.sent, {}))
        lead_.peers.ears().on_message("b", bytes);
      for (auto& [to, bytes] : std::exchange(lead_.peers.sent, {}))
        follower_.peers.ears().on_message("a", bytes);
    }
  }
  void LoseAll() {
    lead_.peers.sent.clear();
    follower_.peers.sent.clear();
    lead_.peers.ears().on_down("b", "cut");
    follower_.peers.ears().on_down("a", "cut");
  }

  const std::unique_ptr<EventLoop> loop_ = std::move(EventLoop::Make()).value();
  Side lead_{*loop_, "a"}, follower_{*loop_, "b"};
};

constexpr absl::Duration kLong = absl::Hours(1);
constexpr auto kOk = absl::StatusCode::kOk;

TEST_F(PeerKeysTest, WhatOneNodePutsTheOtherGets) {
  EnterBoth(1);
  Connect();
  lead_.keys.Get(0, 7, "from b", kLong);
  follower_.keys.Put(1, 5, "from b", "value b");
  lead_.keys.Put(0, 8, "from a", "value a");
  follower_.keys.Get(1, 6, "from a", kLong);
  Deliver();
  EXPECT_THAT(lead_.answers, ElementsAre(Answer{0, 8, kOk, ""}, Answer{0, 7, kOk, "value b"}));
  EXPECT_THAT(follower_.answers, ElementsAre(Answer{1, 5, kOk, ""}, Answer{1, 6, kOk, "value a"}));
}

TEST_F(PeerKeysTest, AFollowerAsksWhenTheConnectionStands) {
  EnterBoth(1);
  follower_.keys.Put(0, 5, "k", "v");
  EXPECT_THAT(follower_.peers.sent, IsEmpty());
  Connect();
  Deliver();
  EXPECT_THAT(follower_.answers, ElementsAre(Answer{0, 5, kOk, ""}));
}

TEST_F(PeerKeysTest, WhatABrokenConnectionLostIsAskedForAgain) {
  EnterBoth(1);
  Connect();
  follower_.keys.Get(0, 5, "k", kLong);
  follower_.keys.Put(0, 6, "other", "v");
  LoseAll();
  Connect();
  Deliver();
  EXPECT_THAT(follower_.answers, ElementsAre(Answer{0, 6, kOk, ""}));
  lead_.keys.Put(0, 1, "k", "value");
  LoseAll();  // the answer
  Connect();
  Deliver();
  EXPECT_THAT(follower_.answers, ElementsAre(Answer{0, 6, kOk, ""}, Answer{0, 5, kOk, "value"}));
}

TEST_F(PeerKeysTest, AQuestionThatCameTwiceIsAnsweredOnce) {
  EnterBoth(1);
  Connect();
  follower_.keys.Get(0, 5, "k", kLong);
  follower_.peers.sent.push_back(follower_.peers.sent.front());
  Deliver();
  lead_.keys.Put(0, 1, "k", "value");
  EXPECT_EQ(lead_.peers.sent.size(), 1);
  Deliver();
  EXPECT_THAT(follower_.answers, ElementsAre(Answer{0, 5, kOk, "value"}));
}

TEST_F(PeerKeysTest, AnotherValueOfAKeyIsRefusedFromAnyNode) {
  EnterBoth(1);
  Connect();
  lead_.keys.Put(0, 1, "k", "one");
  follower_.keys.Put(0, 2, "k", "two");
  Deliver();
  ASSERT_EQ(follower_.answers.size(), 1);
  EXPECT_EQ(follower_.answers[0].code, absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(follower_.answers[0].text, HasSubstr("key 'k' holds another value"));
}

TEST_F(PeerKeysTest, AGetEndsAtItsDeadlineWithOrWithoutTheLead) {
  EnterBoth(3);
  follower_.keys.Get(0, 5, "k", absl::Milliseconds(20));
  loop_->Run();  // until it answers
  ASSERT_EQ(follower_.answers.size(), 1);
  EXPECT_EQ(follower_.answers[0].code, absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(follower_.answers[0].text, "key 'k' of generation 3: nobody put it within 20ms");
  Connect();
  EXPECT_THAT(follower_.peers.sent, IsEmpty());
}

TEST_F(PeerKeysTest, NothingOfAnotherGenerationIsHeard) {
  EnterBoth(1);
  Connect();
  follower_.keys.Put(0, 5, "k", "old");
  follower_.keys.Get(0, 6, "later", kLong);
  const auto old = follower_.peers.sent;
  follower_.peers.sent.clear();
  EnterBoth(2);
  Connect();
  follower_.peers.sent = old;
  Deliver();
  EXPECT_THAT(follower_.answers, IsEmpty());
  lead_.keys.Put(0, 1, "k", "new");
  EXPECT_THAT(lead_.answers, ElementsAre(Answer{0, 1, kOk, ""}));
}

TEST_F(PeerKeysTest, AfterLeaveNobodyIsAnswered) {
  EnterBoth(1);
  Connect();
  follower_.keys.Get(0, 5, "k", kLong);
  Deliver();
  lead_.keys.Get(0, 9, "k", kLong);
  lead_.keys.Leave();
  follower_.keys.Leave();
  follower_.keys.Put(0, 6, "k", "v");
  lead_.keys.Put(0, 6, "k", "v");
  Deliver();
  EXPECT_THAT(lead_.answers, IsEmpty());
  EXPECT_THAT(follower_.answers, IsEmpty());
}

TEST_F(PeerKeysTest, AProcessThatIsGoneIsForgotten) {
  EnterBoth(1);
  Connect();
  follower_.keys.Get(0, 5, "k", kLong);
  lead_.keys.Get(0, 5, "k", kLong);
  Deliver();
  follower_.keys.Forget(0);
  lead_.keys.Forget(0);
  lead_.keys.Put(1, 1, "k", "v");
  Deliver();
  EXPECT_THAT(follower_.answers, IsEmpty());
  EXPECT_THAT(lead_.answers, ElementsAre(Answer{1, 1, kOk, ""}));
}

TEST_F(PeerKeysTest, TooManyThatWaitAreRefused) {
  EnterBoth(1);
  for (size_t i = 0; i <= kMostWaitingKeys; ++i) follower_.keys.Get(0, i, "k", kLong);
  ASSERT_EQ(follower_.answers.size(), 1);
  EXPECT_EQ(follower_.answers[0].code, absl::StatusCode::kResourceExhausted);
}

TEST_F(PeerKeysTest, WhatCannotBeSentIsAnsweredWithTheReason) {
  EnterBoth(1);
  Connect();
  follower_.peers.send_result = absl::ResourceExhaustedError("too much waits");
  follower_.keys.Put(0, 5, "k", "v");
  EXPECT_THAT(follower_.answers,
              ElementsAre(Answer{0, 5, absl::StatusCode::kResourceExhausted, "too much waits"}));
}

TEST_F(PeerKeysTest, BytesThatAreNoMessageAreRefused) {
  EnterBoth(1);
  lead_.peers.ears().on_message("b", "");
  lead_.peers.ears().on_message("b", std::string(21, '\x7f'));
  follower_.peers.ears().on_message("a", std::string("\x03", 1) + std::string(19, '\0'));
  EXPECT_THAT(lead_.refused, ElementsAre("b", "b"));
  EXPECT_THAT(follower_.refused, ElementsAre("a"));
}

}  // namespace
}  // namespace outlast
