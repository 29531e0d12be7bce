#include "run/peers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/event_loop.h"
#include "base/socket.h"
#include "outlast/base/clock.h"
#include "outlast/base/mutex.h"
#include "outlast/base/status.h"
#include "outlast/testing/time_factor.h"
#include "run/peer_frames.h"
#include "run/peer_greeting.h"
#include "run/tcp_peers.h"

namespace outlast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::TimeFactor;

const Id128 kRun = Id128::FromName("a run");
const absl::Duration kPatience = absl::Seconds(20) * TimeFactor();

// An agent of its own: a loop, its thread, and what was heard.
class Node {
 public:
  explicit Node(TcpPeersOptions options) {
    loop_ = std::move(EventLoop::Make()).value();
    options.say = [this](const std::string& line) { Note("said: " + line); };
    auto peers = MakeTcpPeers(*loop_, std::move(options));
    EXPECT_TRUE(peers.ok()) << peers.status();
    peers_ = std::move(*peers);
    Hear(kPeerKeys, "keys");
    Hear(kPeerSaves, "saves");
    thread_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "node");
      loop_->Run();
    });
  }
  ~Node() {
    if (!thread_.joinable()) return;
    loop_->Post([this] { peers_.reset(); });
    loop_->Stop();
    thread_.join();
  }

  void On(const std::function<void(Peers&)>& work) {
    std::promise<void> done;
    loop_->Post([&] {
      work(*peers_);
      done.set_value();
    });
    done.get_future().wait();
  }
  void Enter(const PeerGroup& group) {
    On([&](Peers& peers) { peers.Enter(group); });
  }
  absl::Status Send(const std::string& node, std::string bytes, uint16_t channel = kPeerKeys) {
    absl::Status sent;
    On([&](Peers& peers) { sent = peers.Send(node, channel, std::move(bytes)); });
    return sent;
  }
  std::string address() {
    std::string address;
    On([&](Peers& peers) { address = peers.address(); });
    return address;
  }
  EventLoop& loop() { return *loop_; }

  // Waits until something was noted that holds `text`, after all that was found before; returns it.
  std::string Await(const std::string& text) {
    const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(kPatience);
    MutexLock lock(mutex_);
    for (size_t at = seen_;;) {
      for (; at < notes_.size(); ++at) {
        if (notes_[at].find(text) == std::string::npos) continue;
        seen_ = at + 1;
        return notes_[at];
      }
      const int64_t left = deadline - MonotonicNanos();
      if (left <= 0) break;
      changed_.WaitFor(mutex_, absl::Nanoseconds(left));
    }
    ADD_FAILURE() << "never noted: " << text;
    return {};
  }
  std::vector<std::string> notes() {
    MutexLock lock(mutex_);
    return notes_;
  }

 private:
  void Hear(uint16_t channel, const std::string& name) {
    peers_->Listen(
        channel, {.on_message =
                      [this, name](const std::string& node, const std::string& bytes) {
                        Note(name + " " + node + ": " +
                             (bytes.size() > 64 ? std::to_string(bytes.size()) + " bytes" : bytes));
                      },
                  .on_up = [this, name](const std::string& node) { Note(name + " up " + node); },
                  .on_down =
                      [this, name](const std::string& node, const std::string& why) {
                        Note(name + " down " + node + ": " + why);
                      }});
  }
  void Note(const std::string& note) {
    MutexLock lock(mutex_);
    notes_.push_back(note);
    changed_.NotifyAll();
  }

  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<Peers> peers_;
  Mutex mutex_;
  CondVar changed_;
  std::vector<std::string> notes_ ABSL_GUARDED_BY(mutex_);
  size_t seen_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

TcpPeersOptions OptionsOf(const std::string& node, const std::string& host = "127.0.0.1") {
  return {.job = "job", .node = node, .token = "secret", .bind = host + ":0"};
}

// Generation 3 of a and b, a being the lead.
PeerGroup GroupOf(const std::string& self, const std::string& lead_address) {
  return {.run_id = kRun,
          .generation = 3,
          .self = self,
          .lead = "a",
          .nodes = {"a", "b"},
          .lead_address = lead_address};
}

TEST(Peers, TheLeadAndItsFollowersHearEachOtherByChannel) {
  Node a(OptionsOf("a")), b(OptionsOf("b", "127.0.0.2")), c(OptionsOf("c", "127.0.0.3"));
  PeerGroup group = GroupOf("a", a.address());
  group.nodes = {"a", "b", "c"};
  EXPECT_THAT(b.address(), ::testing::StartsWith("127.0.0.2:"));

  a.Enter(group);
  for (Node* follower : {&b, &c}) {
    group.self = follower == &b ? "b" : "c";
    follower->Enter(group);
  }
  a.Await("keys up b");
  c.Await("saves up a");
  ASSERT_TRUE(b.Send("a", "from b").ok());
  ASSERT_TRUE(a.Send("c", "to c", kPeerSaves).ok());
  ASSERT_TRUE(c.Send("a", "").ok());

  EXPECT_EQ(a.Await("from b"), "keys b: from b");
  EXPECT_EQ(c.Await("to c"), "saves a: to c");
  a.Await("keys c: ");
  EXPECT_EQ(b.Send("c", "x").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(a.Send("a", "x").code(), absl::StatusCode::kFailedPrecondition);
}

TEST(Peers, WhatIsSentBeforeTheConnectionStandsComesInOrder) {
  Node a(OptionsOf("a")), b(OptionsOf("b"));
  const std::string address = a.address();
  b.Enter(GroupOf("b", address));
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(b.Send("a", std::to_string(i)).ok());
  ASSERT_TRUE(b.Send("a", std::string(4 << 20, 'x')).ok());
  const absl::Status over = b.Send("a", std::string((4 << 20) + 1, 'x'));
  EXPECT_EQ(over.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(MessageOf(over)), HasSubstr("4194305 bytes, at most 4194304 wanted"));
  ASSERT_TRUE(b.Send("a", "last").ok());

  a.Enter(GroupOf("a", address));
  a.Await("keys b: last");
  const std::vector<std::string> heard = a.notes();
  ASSERT_EQ(heard.size(), 24u);
  EXPECT_EQ(heard[0], "keys up b");
  for (int i = 0; i < 20; ++i)
    EXPECT_EQ(heard[static_cast<size_t>(i) + 2], "keys b: " + std::to_string(i));
  EXPECT_EQ(heard[22], "keys b: 4194304 bytes");
}

TEST(Peers, SpeakIpv6) {
  if (!ListenOn(*NumericAddress({"::1", 0})).ok()) GTEST_SKIP() << "no IPv6 here";
  Node a(OptionsOf("a", "[::1]")), b(OptionsOf("b", "[::1]"));
  const std::string address = a.address();
  EXPECT_THAT(address, ::testing::StartsWith("[::1]:"));
  a.Enter(GroupOf("a", address));
  b.Enter(GroupOf("b", address));
  a.Await("keys up b");
}

TEST(Peers, AnnounceTheHostThatTheyAreToldAndFindALeadByName) {
  TcpPeersOptions options = OptionsOf("a");
  options.announced_host = "localhost";
  Node a(options), b(OptionsOf("b"));
  const std::string address = a.address();
  EXPECT_THAT(address, ::testing::StartsWith("localhost:"));
  a.Enter(GroupOf("a", address));
  b.Enter(GroupOf("b", address));
  b.Await("keys up a");
}

TEST(Peers, MakeNamesAnAddressThatIsNoneOfThisMachine) {
  const auto loop = std::move(EventLoop::Make()).value();
  EXPECT_EQ(MakeTcpPeers(*loop, OptionsOf("a", "192.0.2.1")).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_EQ(MakeTcpPeers(*loop, OptionsOf("a", "::1")).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// --- Who is refused ---

TEST(Peers, RefuseAnotherTokenOnBothSidesNamingBoth) {
  TcpPeersOptions other = OptionsOf("b");
  other.token = "guessed";
  Node a(OptionsOf("a")), b(other);
  const std::string address = a.address();
  a.Enter(GroupOf("a", address));
  b.Enter(GroupOf("b", address));
  EXPECT_THAT(b.Await("token"), AllOf(HasSubstr("node 'a'"), HasSubstr("node 'b'")));
  EXPECT_THAT(a.Await("token"), AllOf(HasSubstr("node 'a'"), HasSubstr("node 'b'")));
  EXPECT_EQ(b.notes().size(), 1u);  // once, and nobody was up
}

TEST(Peers, RefuseANodeWithoutTheTokenThatTheyHave) {
  TcpPeersOptions none = OptionsOf("b");
  none.token.clear();
  Node a(OptionsOf("a")), b(none);
  const std::string address = a.address();
  a.Enter(GroupOf("a", address));
  b.Enter(GroupOf("b", address));
  b.Await("token");
}

TEST(Peers, RefuseAnotherJobAndAnotherRun) {
  TcpPeersOptions other = OptionsOf("b");
  other.job = "foreign";
  Node a(OptionsOf("a")), b(other), c(OptionsOf("b"));
  const std::string address = a.address();
  a.Enter(GroupOf("a", address));
  b.Enter(GroupOf("b", address));
  EXPECT_THAT(a.Await("foreign"), HasSubstr("it is of job 'foreign', this node of job 'job'"));
  b.Await("it refused: node 'a' of job 'job', generation 3: it is of job 'foreign'");

  PeerGroup group = GroupOf("b", address);
  group.run_id = Id128::FromName("another run");
  c.Enter(group);
  EXPECT_THAT(a.Await("it is of run"), AllOf(HasSubstr(kRun.hex()), HasSubstr(group.run_id.hex())));
  c.Await("it refused");
}

TEST(Peers, RefuseANodeThatHasNoPartAndOneThatLooksForAnother) {
  Node a(OptionsOf("a")), c(OptionsOf("c")), b(OptionsOf("b"));
  const std::string address = a.address();
  a.Enter(GroupOf("a", address));
  c.Enter(GroupOf("c", address));
  EXPECT_THAT(a.Await("no part"), AllOf(HasSubstr("'c'"), HasSubstr("generation 3")));
  c.Await("no part");

  PeerGroup group = GroupOf("b", address);
  group.lead = "z";
  group.nodes = {"b", "z"};
  b.Enter(group);
  EXPECT_THAT(a.Await("looks for"), AllOf(HasSubstr("node 'z'"), HasSubstr("node 'a'")));
}

TEST(Peers, RefuseAnOlderGenerationAndWaitForANewerOne) {
  Node a(OptionsOf("a")), b(OptionsOf("b"));
  const std::string address = a.address();
  PeerGroup group = GroupOf("a", address);
  group.generation = 4;
  a.Enter(group);
  b.Enter(GroupOf("b", address));
  EXPECT_THAT(a.Await("generation 3 is over"), AllOf(HasSubstr("'b'"), HasSubstr("in 4")));
  b.Await("generation 3 is over");

  group.generation = 5;
  group.self = "b";
  b.Enter(group);
  ASSERT_TRUE(b.Send("a", "early").ok());
  group.self = "a";
  a.Enter(group);  // that its follower may be here already
  a.Await("keys b: early");
}

TEST(Peers, TheWaitForALeadsEnterHasADeadline) {
  TcpPeersOptions options = OptionsOf("a");
  options.enter = absl::Milliseconds(20);
  Node a(options), b(OptionsOf("b"));
  b.Enter(GroupOf("b", a.address()));
  EXPECT_THAT(a.Await("not entered"), HasSubstr("generation 3"));
  b.Await("not entered");
}

// --- Losses ---

TEST(Peers, FindALeadThatCameBackAtItsAddress) {
  auto a = std::make_unique<Node>(OptionsOf("a"));
  Node b(OptionsOf("b"));
  TcpPeersOptions same_place = OptionsOf("a");
  same_place.bind = a->address();
  a->Enter(GroupOf("a", same_place.bind));
  b.Enter(GroupOf("b", same_place.bind));
  b.Await("saves up a");

  a.reset();
  EXPECT_THAT(b.Await("keys down a"), HasSubstr("closed"));
  ASSERT_TRUE(b.Send("a", "kept").ok());
  a = std::make_unique<Node>(same_place);
  a->Enter(GroupOf("a", same_place.bind));
  b.Await("keys up a");
  a->Await("keys b: kept");
}

TEST(Peers, AreDownWhenTheyStandStillAndUpWhenTheyGoOn) {
  TcpPeersOptions of_a = OptionsOf("a"), of_b = OptionsOf("b");
  of_a.beat = of_b.beat = absl::Milliseconds(50) * TimeFactor();
  of_a.loss = of_b.loss = absl::Milliseconds(300) * TimeFactor();
  Node a(of_a), b(of_b);
  const std::string address = a.address();
  a.Enter(GroupOf("a", address));
  b.Enter(GroupOf("b", address));
  b.Await("keys up a");
  a.Await("keys up b");

  std::promise<void> go_on;
  const int64_t stopped_ns = MonotonicNanos();
  a.loop().Post([&] { go_on.get_future().wait(); });  // as SIGSTOP would do
  EXPECT_THAT(b.Await("keys down a"), HasSubstr("nothing was heard"));
  const absl::Duration took = absl::Nanoseconds(MonotonicNanos() - stopped_ns);
  go_on.set_value();

  EXPECT_GT(took, of_b.loss - of_a.beat - absl::Milliseconds(10));
  EXPECT_LT(took, of_b.loss * 2);
  a.Await("keys down b");
  b.Await("keys up a");
  a.Await("keys up b");
}

TEST(Peers, AfterLeaveNothingIsHeardAndNobodyCallsAgain) {
  Node a(OptionsOf("a")), b(OptionsOf("b"));
  const std::string address = a.address();
  a.Enter(GroupOf("a", address));
  b.Enter(GroupOf("b", address));
  a.Await("saves up b");
  b.Await("saves up a");

  ASSERT_TRUE(a.Send("b", "the last word").ok());
  a.On([](Peers& peers) { peers.Leave(3); });
  b.Await("keys a: the last word");
  EXPECT_THAT(b.Await("keys down a"), HasSubstr("has left generation 3"));
  EXPECT_EQ(a.Send("b", "x").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(a.notes(), ElementsAre("keys up b", "saves up b"));

  // The next generation, the other way round; that b never asked again shows in what was said.
  PeerGroup group{.run_id = kRun,
                  .generation = 4,
                  .self = "b",
                  .lead = "b",
                  .nodes = {"a", "b"},
                  .lead_address = b.address()};
  b.Enter(group);
  group.self = "a";
  a.Enter(group);
  a.Await("keys up b");
  a.Enter(GroupOf("a", address));  // an old one is not entered again
  ASSERT_TRUE(b.Send("a", "in 4").ok());
  a.Await("keys b: in 4");
  for (const std::string& note : a.notes()) EXPECT_THAT(note, ::testing::Not(HasSubstr("said")));
}

// --- Broken input. A follower by hand ---

class RawFollower {
 public:
  explicit RawFollower(const std::string& address) {
    fd_ = std::move(StartConnect(*NumericAddress(*HostPort::Parse(address)))).value();
    pollfd decided{.fd = fd_.get(), .events = POLLOUT};
    poll(&decided, 1, 20'000);
  }
  static FollowerGreeting Greeting(const std::string& token = "secret") {
    return FollowerGreeting(
        {.job = "job", .run_id = kRun, .generation = 3, .node = "b", .lead = "a"}, token,
        Id128::FromName("nonce"));
  }
  static std::string Word(PeerWord word, const std::string& rest) {
    const Frame frame = MakeFrame(kLinkChannel, std::string(1, static_cast<char>(word)) + rest);
    return frame.header + frame.payload;
  }
  void Write(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t count = send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (count > 0) bytes.remove_prefix(static_cast<size_t>(count));
      if (count < 0 && errno != EAGAIN) return;
    }
  }
  // The payload of the next frame but beats; empty at the end.
  std::string Read() {
    FrameParser::Parsed frame;
    while (true) {
      std::string_view bytes = buffer_;
      EXPECT_TRUE(parser_.Take(&bytes, &frame).ok());
      buffer_.erase(0, buffer_.size() - bytes.size());
      if (parser_.is_whole() && frame.payload != std::string(1, '\5')) return frame.payload;
      if (parser_.is_whole() || !buffer_.empty()) continue;
      pollfd readable{.fd = fd_.get(), .events = POLLIN};
      if (poll(&readable, 1, 20'000) != 1) return "silence";
      char piece[4096];
      const ssize_t count = recv(fd_.get(), piece, sizeof piece, 0);
      if (count <= 0) return {};
      buffer_.assign(piece, static_cast<size_t>(count));
    }
  }
  // Until the end of the stream; the last payload.
  std::string ReadLast() {
    std::string last;
    for (std::string next = Read(); !next.empty(); next = Read()) last = next;
    return last;
  }
  // Greets as it should, up to the WELCOME.
  void Greet() {
    const FollowerGreeting greeting = Greeting();
    Write(Word(PeerWord::kHello, greeting.hello()));
    const std::string challenge = Read();
    ASSERT_EQ(challenge[0], static_cast<char>(PeerWord::kChallenge));
    const auto proof = greeting.Answer(std::string_view(challenge).substr(1));
    ASSERT_TRUE(proof.ok()) << proof.status();
    Write(Word(PeerWord::kProof, *proof));
    ASSERT_EQ(Read(), std::string(1, static_cast<char>(PeerWord::kWelcome)));
  }
  void Close() { fd_.Reset(); }
  int fd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
  FrameParser parser_{4 << 20};
  std::string buffer_;
};

class BrokenInput : public ::testing::Test {
 protected:
  BrokenInput() { a.Enter(GroupOf("a", a.address())); }
  // The lead still takes a follower.
  void ExpectAWorkingLead() {
    RawFollower good(a.address());
    good.Greet();
    a.Await("keys up b");
  }
  Node a{OptionsOf("a")};
};

TEST_F(BrokenInput, EveryPrefixOfAGreetingAndTheEnd) {
  const std::string hello = RawFollower::Word(PeerWord::kHello, RawFollower::Greeting().hello());
  for (size_t count = 0; count < hello.size(); ++count) {
    RawFollower cut(a.address());
    cut.Write(std::string_view(hello).substr(0, count));
  }
  for (size_t count = 1; count < 60; ++count) {  // byte by byte, then half a proof
    RawFollower cut(a.address());
    const FollowerGreeting greeting = RawFollower::Greeting();
    for (const char byte : hello) cut.Write(std::string_view(&byte, 1));
    const auto proof = greeting.Answer(cut.Read().substr(1));
    ASSERT_TRUE(proof.ok());
    cut.Write(std::string_view(RawFollower::Word(PeerWord::kProof, *proof)).substr(0, count));
    if (count < 53) continue;  // 16 of the frame, 1 of the word, 4 of the length, 32 of the proof
    EXPECT_EQ(cut.Read(), std::string(1, static_cast<char>(PeerWord::kWelcome)));
    break;
  }
  ExpectAWorkingLead();
}

TEST_F(BrokenInput, EveryFlippedByteOfAHelloIsRefusedOrNoHello) {
  const std::string hello = RawFollower::Word(PeerWord::kHello, RawFollower::Greeting().hello());
  for (size_t at = 0; at < hello.size(); ++at) {
    std::string flipped = hello;
    flipped[at] = static_cast<char>(flipped[at] ^ 0x11);
    RawFollower bad(a.address());
    bad.Write(flipped);
    shutdown(bad.fd(), SHUT_WR);
    const std::string last = bad.ReadLast();
    if (last.empty()) continue;
    EXPECT_EQ(last[0], static_cast<char>(PeerWord::kRefused)) << at;
  }
  ExpectAWorkingLead();
}

TEST_F(BrokenInput, EveryWrongPayloadUnderAGoodChecksum) {
  const std::string hello = RawFollower::Greeting().hello();
  for (size_t at = 0; at < hello.size(); ++at) {
    RawFollower cut(a.address());
    cut.Write(RawFollower::Word(PeerWord::kHello, hello.substr(0, at)));
    EXPECT_EQ(cut.ReadLast()[0], static_cast<char>(PeerWord::kRefused)) << at;
  }
  for (const PeerWord word :
       {PeerWord::kProof, PeerWord::kWelcome, PeerWord::kBeat, PeerWord{77}}) {
    RawFollower odd(a.address());
    odd.Write(RawFollower::Word(word, "not yet"));
    EXPECT_EQ(odd.ReadLast()[0], static_cast<char>(PeerWord::kRefused));
  }
  ExpectAWorkingLead();
}

TEST_F(BrokenInput, AStrangersBytesAreNamed) {
  RawFollower browser(a.address());
  browser.Write("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
  EXPECT_THAT(a.Await("stranger"),
              AllOf(HasSubstr("GET"), HasSubstr("127.0.0.1"), HasSubstr("node 'a' of job 'job'")));
  ExpectAWorkingLead();
}

TEST_F(BrokenInput, AnotherVersionAndAnOversizedGreetingAreNamed) {
  std::string newer = RawFollower::Word(PeerWord::kHello, RawFollower::Greeting().hello());
  newer[4] = 2;
  RawFollower other(a.address());
  other.Write(newer);
  EXPECT_THAT(a.Await("version 2"), HasSubstr("this side version 1"));
  EXPECT_THAT(other.ReadLast(), HasSubstr("version 2"));

  RawFollower large(a.address());
  large.Write(RawFollower::Word(PeerWord::kHello, std::string(4096, 'x')));
  a.Await("4097 bytes, at most 4096 wanted");
  ExpectAWorkingLead();
}

TEST_F(BrokenInput, AProofOfAnotherTokenOrForTheOtherSideIsRefused) {
  for (const bool is_reflected : {false, true}) {
    RawFollower liar(a.address());
    const std::string hello = RawFollower::Greeting().hello();
    liar.Write(RawFollower::Word(PeerWord::kHello, hello));
    const std::string challenge = liar.Read();
    ASSERT_GT(challenge.size(), 36u);
    // The lead's own proof comes last in its challenge.
    const std::string proof = is_reflected ? challenge.substr(challenge.size() - 36)
                                           : std::string("\x20\0\0\0", 4) + std::string(32, 'x');
    liar.Write(RawFollower::Word(PeerWord::kProof, proof));
    EXPECT_THAT(liar.ReadLast(), HasSubstr("token"));
  }
  ExpectAWorkingLead();
}

TEST_F(BrokenInput, AMessageOverTheLimitOrWithAWrongChecksumEndsAConnectionThatStood) {
  Frame frame = MakeFrame(kPeerKeys, "hello");
  frame.payload[0] = 'j';
  Frame large = MakeFrame(kPeerKeys, std::string((4 << 20) + 1, 'x'));
  large.payload.resize(1);
  for (const auto& [bad, why] : {std::pair(frame, "crc"), std::pair(large, "at most 4194304")}) {
    RawFollower follower(a.address());
    follower.Greet();
    follower.Write(bad.header + bad.payload);
    EXPECT_THAT(follower.ReadLast(), HasSubstr(why));
    EXPECT_THAT(a.Await("keys down b"), HasSubstr(why));
  }
  ExpectAWorkingLead();
}

TEST_F(BrokenInput, ANewerConnectionOfANodeTakesTheOldOnesPlaceOnceItIsProven) {
  RawFollower old(a.address());
  old.Greet();
  a.Await("saves up b");
  RawFollower unproven(a.address());
  unproven.Write(RawFollower::Word(PeerWord::kHello, RawFollower::Greeting().hello()));
  unproven.Read();
  ASSERT_TRUE(a.Send("b", "to the old one").ok());
  EXPECT_EQ(old.Read(), "to the old one");

  RawFollower newer(a.address());
  newer.Greet();
  EXPECT_THAT(a.Await("keys down b"), HasSubstr("newer"));
  a.Await("keys up b");
  EXPECT_THAT(old.ReadLast(), HasSubstr("newer"));
  ASSERT_TRUE(a.Send("b", "to the newer one").ok());
  EXPECT_EQ(newer.Read(), "to the newer one");
}

TEST_F(BrokenInput, APeerThatDoesNotReadCostsALimitedAmount) {
  RawFollower slow(a.address());
  slow.Greet();
  a.Await("saves up b");
  const std::string large(1 << 20, 'x');
  absl::Status sent;
  int count = 0;
  for (; sent.ok() && count < 1000; ++count) sent = a.Send("b", large);
  EXPECT_EQ(sent.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(MessageOf(sent)), AllOf(HasSubstr("'b'"), HasSubstr("16777216")));
  EXPECT_GE(count, 16);
  // What it was promised comes, once it reads.
  for (int i = 0; i + 1 < count; ++i) EXPECT_EQ(slow.Read().size(), large.size());
}

TEST(FrameParser, GivesTheSameFramesHoweverTheyAreCut) {
  std::string stream;
  for (const char* text : {"one", "", "three"}) {
    const Frame frame = MakeFrame(7, text);
    stream += frame.header + frame.payload;
  }
  for (size_t cut = 1; cut <= stream.size(); ++cut) {
    FrameParser parser(100);
    std::vector<std::string> found;
    for (size_t at = 0; at < stream.size(); at += cut) {
      std::string_view piece = std::string_view(stream).substr(at, cut);
      while (!piece.empty()) {
        FrameParser::Parsed frame;
        ASSERT_TRUE(parser.Take(&piece, &frame).ok());
        if (parser.is_whole()) found.push_back(frame.payload);
      }
    }
    EXPECT_THAT(found, ElementsAre("one", "", "three")) << cut;
  }
}

}  // namespace
}  // namespace outlast
