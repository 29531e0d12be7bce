// The keeper against workers that a test plays by hand, hostile ones too.
#include "run/keeper.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <map>
#include <random>

#include "outlast/base/clock.h"
#include "outlast/base/memory.h"
#include "outlast/base/mutex.h"
#include "outlast/base/status.h"
#include "outlast/blackbox/progress.h"
#include "outlast/run/run.h"
#include "run/keeper_thread.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;

// Keeps the workers' ends of the sockets for the test.
class HandHost final : public WorkerHost {
 public:
  void Spawn(SpawnRequest request) override {
    MutexLock lock(mutex_);
    const int slot = request.worker.slot;
    incarnations_[slot] = request.worker.incarnation;
    black_boxes_[slot] = std::move(Duplicate(request.black_box_fd)).value();
    sockets_[slot] = Channel(std::move(request.socket));
    spawned_.NotifyAll();
  }
  void Kill(const KillWorker&) override {}
  void Forward(const ForwardSignal&) override {}
  void CaptureStacks(const outlast::CaptureStacks&, std::function<void()> done) override { done(); }
  void OnFault(const RecordFault&) override {}
  void OnCommit(const CommitGeneration&) override {}
  void OnEnter(int, uint64_t) override {}
  void OnFinish(const FinishJob&) override {}

  // The worker's end of the slot's present process; waits for incarnations after `than`.
  Channel Take(int slot, uint64_t than = 0) {
    MutexLock lock(mutex_);
    while (incarnations_[slot] <= than) spawned_.Wait(mutex_);
    return std::move(sockets_[slot]);
  }
  uint64_t incarnation(int slot) {
    MutexLock lock(mutex_);
    return incarnations_[slot];
  }
  UniqueFd TakeBlackBox(int slot) {
    MutexLock lock(mutex_);
    return std::move(black_boxes_[slot]);
  }

 private:
  Mutex mutex_;
  CondVar spawned_;
  std::map<int, Channel> sockets_ ABSL_GUARDED_BY(mutex_);
  std::map<int, UniqueFd> black_boxes_ ABSL_GUARDED_BY(mutex_);
  std::map<int, uint64_t> incarnations_ ABSL_GUARDED_BY(mutex_);
};

class KeeperTest : public ::testing::Test {
 protected:
  void StartWorld(int world) {
    KeeperOptions options;
    options.job.world = world;
    options.run_id = Id128::FromName("a run");
    options.run_dir = "/runs/1";
    thread_ = std::move(KeeperThread::Make(host_, std::move(options))).value();
    ASSERT_TRUE(thread_->Start().ok());
  }

  static void Send(const Channel& channel, const Message& message) {
    ASSERT_TRUE(channel.Send(Encode(message)).ok());
  }
  static Message Next(const Channel& channel) {
    auto packet = channel.Receive();
    EXPECT_TRUE(packet.ok() && packet->has_value());
    return std::move(Decode(std::move(**packet))).value();
  }
  static Message Ask(const Channel& channel, const Message& message) {
    Send(channel, message);
    return Next(channel);
  }
  Message JoinMessage(int slot, uint32_t version = kWireVersion) {
    return {.kind = MessageKind::kJoined,
            .request = 1,
            .payload =
                PayloadWriter().Int(version).Int(host_.incarnation(slot)).Int(int32_t{1}).bytes()};
  }
  // A worker in the body of the present generation.
  Channel Enter(int slot) {
    Channel channel = host_.Take(slot);
    EXPECT_EQ(Ask(channel, JoinMessage(slot)).status, absl::StatusCode::kOk);
    Send(channel, Staged(0));
    EXPECT_EQ(Next(channel).kind, MessageKind::kGeneration);
    return channel;
  }
  static Message Staged(uint64_t left) {
    return {.kind = MessageKind::kStaged,
            .payload = PayloadWriter().Int(left).Int(uint32_t{0}).Text("").bytes()};
  }
  uint64_t refused() {
    uint64_t count = 0;
    thread_->RunOnLoop([&] { count = thread_->keeper().refused(); });
    return count;
  }

  HandHost host_;
  std::unique_ptr<KeeperThread> thread_;
};

TEST_F(KeeperTest, TellsAWorkerWhoItIsAndWhichGenerationToEnter) {
  StartWorld(2);
  const Channel worker = host_.Take(1);

  const Message answer = Ask(worker, JoinMessage(1));
  PayloadReader reader(answer.payload);
  const auto run_id = reader.Int<std::array<std::byte, 16>>();
  EXPECT_EQ(run_id, Id128::FromName("a run").bytes);
  EXPECT_EQ(reader.Text(), "/runs/1");
  EXPECT_EQ(reader.Int<uint32_t>(), 2u);  // world
  EXPECT_EQ(reader.Int<uint32_t>(), 1u);  // rank

  Send(worker, Staged(0));
  const Message enter = Next(worker);
  EXPECT_EQ(enter.kind, MessageKind::kGeneration);
  EXPECT_EQ(PayloadReader(enter.payload).Int<uint64_t>(), 1u);
}

TEST_F(KeeperTest, RefusesAnotherProtocolVersionNamingBoth) {
  StartWorld(1);
  const Channel worker = host_.Take(0);

  const Message answer = Ask(worker, JoinMessage(0, 77));

  EXPECT_EQ(answer.status, absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(answer.payload, HasSubstr("version 77"));
  EXPECT_THAT(answer.payload, HasSubstr("version 1"));
}

TEST_F(KeeperTest, SaysNothingToAWorkerThatHasNotJoined) {
  StartWorld(1);
  const Channel worker = host_.Take(0);

  const Message answer = Ask(worker, {.kind = MessageKind::kPut,
                                      .generation = 1,
                                      .request = 5,
                                      .payload = PayloadWriter().Text("k").Text("v").bytes()});

  EXPECT_EQ(answer.status, absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(answer.request, 5u);
  EXPECT_EQ(refused(), 1u);
}

TEST_F(KeeperTest, RaisesTheWordInTheBlackBoxBeforeItSendsAbort) {
  StartWorld(2);
  const Channel survivor = Enter(0);
  const Segment box = std::move(Segment::Open(host_.TakeBlackBox(0))).value();
  const Channel victim = Enter(1);
  EXPECT_EQ(LoadWord(box.header().abort_generation), 0u);

  const uint64_t first = host_.incarnation(1);
  thread_->RunOnLoop([&] { thread_->keeper().OnWorkerEnded(1, first, {.signal = 9}); });

  const Message abort = Next(survivor);
  EXPECT_EQ(abort.kind, MessageKind::kAbort);
  EXPECT_EQ(PayloadReader(abort.payload).Int<uint64_t>(), 1u);
  EXPECT_EQ(LoadWord(box.header().abort_generation), 1u);
}

TEST_F(KeeperTest, AnswersWhatAnEndedGenerationStillWaitsForAndRefusesWhatItAsksLater) {
  StartWorld(2);
  const Channel survivor = Enter(0);
  const Channel victim = Enter(1);
  const auto get = [](uint64_t request) {
    return Message{.kind = MessageKind::kGet,
                   .generation = 1,
                   .request = request,
                   .payload = PayloadWriter()
                                  .Text("never")
                                  .Int(absl::ToInt64Nanoseconds(absl::Seconds(100)))
                                  .bytes()};
  };
  Send(survivor, get(2));
  (void)refused();  // the keeper has read it

  thread_->RunOnLoop(
      [&] { thread_->keeper().OnWorkerEnded(1, host_.incarnation(1), {.signal = 9}); });

  EXPECT_EQ(Next(survivor).kind, MessageKind::kAbort);
  const Message answer = Next(survivor);
  EXPECT_EQ(answer.request, 2u);
  EXPECT_EQ(answer.status, absl::StatusCode::kAborted);
  EXPECT_EQ(Ask(survivor, get(3)).status, absl::StatusCode::kAborted);
  EXPECT_EQ(refused(), 1u);
}

TEST_F(KeeperTest, HearsWhatAWorkerSaidBeforeItEnded) {
  StartWorld(2);
  const Channel worker = Enter(0);
  std::promise<bool> finished;
  thread_->RunOnLoop([&] {
    // While the loop is busy here, the worker reports and ends.
    ASSERT_TRUE(worker.Send(Encode({.kind = MessageKind::kFinished})).ok());
    thread_->keeper().OnWorkerEnded(0, host_.incarnation(0), {.code = 0});
    finished.set_value(thread_->keeper().is_finished(0));
  });
  EXPECT_TRUE(finished.get_future().get());
}

TEST_F(KeeperTest, AClosedSocketIsNoDeath) {
  StartWorld(2);
  Channel worker = Enter(0);
  worker = Channel();
  const Channel other = Enter(1);
  const Message answer = Ask(other, {.kind = MessageKind::kPut,
                                     .generation = 1,
                                     .request = 9,
                                     .payload = PayloadWriter().Text("k").Text("v").bytes()});
  EXPECT_EQ(answer.status, absl::StatusCode::kOk);
  thread_->RunOnLoop([&] { EXPECT_EQ(thread_->keeper().faults(), 0); });
}

TEST_F(KeeperTest, SurvivesNoiseFromAWorker) {
  StartWorld(2);
  const Channel worker = Enter(0);
  std::mt19937 random(7);
  for (int i = 0; i < 3000; ++i) {
    Message message{.kind = static_cast<MessageKind>(random() % 70),
                    .generation = random() % 3,
                    .request = random() % 4 == 0 ? 0 : 100 + random() % 50,
                    .payload = std::string(random() % 64, static_cast<char>(random()))};
    if (message.kind == MessageKind::kFinished || message.kind == MessageKind::kStaged)
      continue;  // these are believed
    std::string bytes = Encode(message);
    if (random() % 4 == 0) bytes[random() % bytes.size()] ^= 1 << random() % 8;
    ASSERT_TRUE(worker.Send(bytes).ok());
    while (worker.TryReceive().ok()) {
    }
  }
  const Channel other = Enter(1);
  EXPECT_EQ(Ask(other, {.kind = MessageKind::kPut,
                        .generation = 1,
                        .request = 9,
                        .payload = PayloadWriter().Text("fine").Text("v").bytes()})
                .status,
            absl::StatusCode::kOk);
  EXPECT_GT(refused(), 1000u);
}

TEST_F(KeeperTest, AWorkerThatDoesNotReadDelaysNobody) {
  StartWorld(2);
  const Channel deaf = Enter(0);
  const Channel other = Enter(1);
  const std::string value(60'000, 'v');
  ASSERT_EQ(Ask(other, {.kind = MessageKind::kPut,
                        .generation = 1,
                        .request = 2,
                        .payload = PayloadWriter().Text("big").Text(value).bytes()})
                .status,
            absl::StatusCode::kOk);
  // 40 answers of 60 kB: far more than a socket's queue holds.
  for (uint64_t request = 10; request < 50; ++request) {
    Send(deaf, {.kind = MessageKind::kGet,
                .generation = 1,
                .request = request,
                .payload = PayloadWriter().Text("big").Int(int64_t{1'000'000'000}).bytes()});
  }
  EXPECT_EQ(Ask(other, {.kind = MessageKind::kGet,
                        .generation = 1,
                        .request = 3,
                        .payload = PayloadWriter().Text("big").Int(int64_t{1'000'000'000}).bytes()})
                .status,
            absl::StatusCode::kOk);
  for (uint64_t request = 10; request < 50; ++request)
    EXPECT_EQ(Next(deaf).request, request);  // none is lost
}

TEST(RunJoin, FailsOnAnAgentThatDoesNotAnswer) {
  auto ends = std::move(Channel::MakePair()).value();
  Segment box = std::move(Segment::Create({})).value();
  WorkerEnvironment environment;
  environment.socket_fd = ends.first.Release().Release();
  environment.black_box_fd = std::move(Duplicate(box.fd())).value().Release();

  const auto run = Run::Join({.environment = environment, .join_timeout = absl::Milliseconds(20)});

  EXPECT_EQ(run.status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(RunJoin, FailsOnAnAgentThatIsGone) {
  auto ends = std::move(Channel::MakePair()).value();
  Segment box = std::move(Segment::Create({})).value();
  WorkerEnvironment environment;
  environment.socket_fd = ends.first.Release().Release();
  environment.black_box_fd = std::move(Duplicate(box.fd())).value().Release();
  ends.second = Channel();

  const auto run = Run::Join({.environment = environment});

  EXPECT_EQ(run.status().code(), absl::StatusCode::kUnavailable);
}

// --- Of several nodes ---

// Says what a test has it say. Ranks change when the test says so.
class HandMachine final : public JobMachine {
 public:
  void Listen(Tell tell) override { tell_ = std::move(tell); }
  std::vector<JobAction> Step(const JobEvent& event, const JobView&) override {
    if (std::holds_alternative<StartEvent>(event)) return {SpawnWorker{1, 1, 1, 0}};
    return {};
  }
  int slots() const override { return 2; }
  int rank(int slot) const override { return ranks[static_cast<size_t>(slot)]; }
  int world() const override { return world_now; }
  Id128 run_id() const override { return Id128::FromName("a run"); }
  std::string node() const override { return "b"; }

  // Slots 0 and 1 of this node hold `ranks`.
  void Commit(uint64_t generation, std::vector<int> members, RankMap map) {
    tell_([=, this](const JobView&) -> std::vector<JobAction> {
      auto job = std::make_shared<control::Commit>();
      job->generation = generation;
      job->map = map;
      return {CommitGeneration{generation, members, ranks, std::move(job)}};
    });
  }

  std::vector<int> ranks = {-1, 3};
  int world_now = 4;

 private:
  Tell tell_;
};

class NodeKeeperTest : public KeeperTest {
 protected:
  NodeKeeperTest() {
    auto machine = std::make_unique<HandMachine>();
    machine_ = machine.get();
    thread_ = std::move(KeeperThread::Make(host_, {}, std::move(machine))).value();
    EXPECT_TRUE(thread_->Start().ok());
  }
  HandMachine* machine_;
};

TEST_F(NodeKeeperTest, AWorkerWhoseRankChangedJoinsAsItWasBornAndEntersAsTheMapSays) {
  const Channel worker = host_.Take(1);
  // Another round, before it has joined: the world shrinks.
  thread_->RunOnLoop([&] {
    machine_->ranks = {-1, 1};
    machine_->world_now = 3;
  });

  const Message joined = Ask(worker, JoinMessage(1));
  Send(worker, Staged(0));
  thread_->RunOnLoop([&] {
    machine_->Commit(2, {1},
                     {.runs = {{.node = "c", .first_rank = 0, .count = 1},
                               {.node = "b", .first_rank = 1, .count = 1, .first_slot = 1},
                               {.node = "c", .first_rank = 2, .count = 1, .first_slot = 1}},
                      .world = 3});
  });

  PayloadReader answer(joined.payload);
  answer.Int<decltype(Id128::bytes)>();
  answer.Text();
  EXPECT_EQ(answer.Int<uint32_t>(), 4u);  // as its environment says
  EXPECT_EQ(answer.Int<uint32_t>(), 3u);
  const Message enters = Next(worker);
  ASSERT_EQ(enters.kind, MessageKind::kGeneration);
  PayloadReader told(enters.payload);
  EXPECT_EQ(told.Int<uint64_t>(), 2u);
  EXPECT_EQ(told.Int<uint32_t>(), 1u);
  EXPECT_EQ(told.Int<uint32_t>(), 3u);
  EXPECT_EQ(told.Int<uint32_t>(), 3u);
  std::vector<uint32_t> runs;
  for (int i = 0; i < 9; ++i) runs.push_back(told.Int<uint32_t>());
  EXPECT_TRUE(told.ok());
  EXPECT_EQ(runs, (std::vector<uint32_t>{0, 0, 1, 1, 1, 1, 0, 2, 1}));  // node, first rank, ranks
}

TEST_F(NodeKeeperTest, ASlotWithoutARankEntersNothing) {
  const Channel worker = host_.Take(1);
  EXPECT_EQ(Ask(worker, JoinMessage(1)).status, absl::StatusCode::kOk);
  Send(worker, Staged(0));
  thread_->RunOnLoop([&] {
    machine_->ranks = {0, -1};
    machine_->Commit(1, {0, 1}, {.runs = {{.node = "b", .count = 1}}, .world = 1});
    machine_->ranks = {-1, 0};
    machine_->Commit(2, {1}, {.runs = {{.node = "b", .count = 1, .first_slot = 1}}, .world = 1});
  });
  const Message enters = Next(worker);
  EXPECT_EQ(PayloadReader(enters.payload).Int<uint64_t>(), 2u);
}

}  // namespace
}  // namespace outlast
