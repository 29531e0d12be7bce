// Saves by several agents: real buffers, a real folder, and a wire in the process.
#include "checkpoint/save_team.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/event_loop.h"
#include "checkpoint/snapshotter.h"
#include "store/rate_limit.h"
#include "tests/checkpoint/disk_fixture.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

const Id128 kRun = Id128::FromName("run");

// One rank's state, sealed in a buffer as its trainer would.
struct SealedRank {
  OwnedState state;
  Assignment assignment;
  std::vector<std::pair<std::string, std::string>> aliases;
  std::unique_ptr<SealTable> table;
  std::unique_ptr<Snapshotter> snapshotter;
  std::optional<Buffer> buffer;
  uint32_t turn = 0;
};

// Nodes n0, n1 ... with `ranks_a_node` ranks each; node n0 is the lead.
class Team {
 public:
  Team(const std::string& root, int nodes, int ranks_a_node, uint64_t generation = 7)
      : generation_(generation), path_(root) {
    loop_ = EventLoop::Make().value();
    limiter.Lift();
    const int world = nodes * ranks_a_node;
    MakeRanks(world);
    root_ = Root::Open(root, {.run = kRun, .fences_own_run = true}).value();
    EXPECT_TRUE(root_->TakeClaim().ok());
    disk_ = std::make_unique<SerialThread>("disk");
    lead_ = std::make_unique<SaveLead>(
        *loop_, *root_, *disk_,
        [this](const std::string& node, const SaveTeamMessage& message) { ToNode(node, message); });
    for (int i = 0; i < nodes; ++i) MakeMember(i, ranks_a_node);
    thread_ = std::thread([this] { loop_->Run(); });
  }
  ~Team() {
    limiter.Lift();
    OnLoop([this] {
      members_.clear();
      lead_.reset();
    });
    loop_->Stop();
    thread_.join();
    disk_.reset();
  }

  TeamSaveRequest Request(int64_t step = 10) {
    TeamSaveRequest request;
    request.generation = generation_;
    for (const auto& [node, ranks] : ranks_of_) request.parts.push_back({node, ranks});
    request.run_id = kRun;
    request.step = step;
    request.snapshot_generation = 3;
    request.world = static_cast<uint32_t>(ranks_.size());
    request.plan = plan_;
    request.committer = "host";
    return request;
  }
  // The save's first outcome.
  absl::StatusOr<PersistResult> Save(
      TeamSaveRequest request, const std::function<void()>& after_start = [] {}) {
    auto outcome = std::make_shared<std::promise<absl::StatusOr<PersistResult>>>();
    OnLoop([&] {
      const absl::Status started =
          lead_->Start(std::move(request), [outcome, told = false](const auto& result) mutable {
            if (!std::exchange(told, true)) outcome->set_value(result);
          });
      if (!started.ok()) outcome->set_value(started);
    });
    after_start();
    return outcome->get_future().get();
  }
  void OnLoop(const std::function<void()>& work) {
    std::promise<void> done;
    loop_->Post([&] {
      work();
      done.set_value();
    });
    done.get_future().get();
  }
  void OnLoopLater(std::function<void()> work) { loop_->Post(std::move(work)); }
  // All work of the disk, the writers and the loop that was posted until now has ended.
  void Settle() {
    for (int i = 0; i < 3; ++i) {
      std::promise<void> done;
      disk_->Post([&] { done.set_value(); });
      done.get_future().get();
      OnLoop([] {});
    }
  }
  SaveLead& lead() { return *lead_; }
  SaveMember& member(const std::string& node) { return *members_.at(node); }
  Root& root() { return *root_; }
  SealedRank& rank(size_t index) { return ranks_[index]; }

  // Looks at what a node says to the lead (or is told); false: it is lost on its way.
  std::function<bool(const std::string& node, const SaveTeamMessage&)> on_said =
      [](const std::string&, const SaveTeamMessage&) { return true; };
  std::function<bool(const std::string& node, const SaveTeamMessage&)> on_told =
      [](const std::string&, const SaveTeamMessage&) { return true; };
  std::map<std::string, std::string> plan_of;      // where it is another one
  std::multimap<std::string, absl::Status> overs;  // by node
  RateLimiter limiter{1000};                       // of n1's disk; enforced, it nearly hangs
  std::string plan() const { return plan_; }

 private:
  void MakeRanks(int world) {
    std::vector<RankTable> tables;
    for (int rank = 0; rank < world; ++rank) {
      SealedRank& one = ranks_.emplace_back();
      one.state.Add("wte", DType::kF32, {300'000});
      one.state.Add("shard", DType::kF32, {world * 1000}, Box{Shape{rank * 1000}, Shape{1000}});
      one.state.view().extras["rank"] = std::to_string(rank);
      tables.push_back(TableOfRank(one.state.view(), static_cast<uint32_t>(rank)).value());
    }
    SettleAliases(tables);
    const Plan plan = MakePlan(MergeTables(tables).value()).value();
    plan_ = ToHex(plan.digest);
    for (int rank = 0; rank < world; ++rank) Seal(plan, rank, world);
  }
  void Seal(const Plan& plan, int rank, int world) {
    SealedRank& one = ranks_[static_cast<size_t>(rank)];
    one.assignment = AssignmentOf(plan, static_cast<uint32_t>(rank)).value();
    const BufferLayout layout{one.assignment.image_bytes(), one.assignment.replicated_bytes, 4096};
    one.buffer = Buffer::Create(
                     layout, {{}, kRun, static_cast<uint32_t>(rank), static_cast<uint32_t>(world)})
                     .value();
    one.table =
        std::make_unique<SealTable>(Mapping::Anonymous(SealTable::BytesFor(world)).value(), world);
    std::vector<Buffer> buffers;
    buffers.push_back(Buffer::Open(Duplicate(one.buffer->fd()).value()).value());
    Snapshotter::Options options;
    options.run_id = kRun;
    options.rank = static_cast<uint32_t>(rank);
    options.world = static_cast<uint32_t>(world);
    options.is_aborted = [](uint64_t) { return false; };
    options.on_wanted_sealed = [](int64_t, uint64_t, int, uint32_t, bool) {};
    one.snapshotter = Snapshotter::Make(std::move(options), *one.table, std::move(buffers),
                                        one.assignment, one.state.view())
                          .value();
    const Snapshotter::Request request{10, 3, 1, Snapshotter::Want::kMemory,
                                       Snapshotter::Mode::kEager};
    EXPECT_TRUE(one.snapshotter->Begin(request, one.state.view()).value());
    one.turn = one.buffer->control().Read().turn;
  }
  void MakeMember(int index, int ranks_a_node) {
    const std::string node = "n" + std::to_string(index);
    for (int i = 0; i < ranks_a_node; ++i)
      ranks_of_[node].push_back(static_cast<uint32_t>(index * ranks_a_node + i));
    SaveMemberOptions options;
    options.root = path_;
    if (node == "n1") options.limiter = &limiter;
    options.send_to_lead = [this, node](const SaveTeamMessage& message) {
      if (!on_said(node, message)) return;
      loop_->Post([this, node, bytes = Encode(message)] {
        if (lead_) lead_->OnMessage(node, DecodeSaveTeamMessage(bytes).value());
      });
    };
    options.plan = [this, node] { return plan_of.contains(node) ? plan_of[node] : plan_; };
    options.pin = [this, node](const SaveOrder&) -> absl::StatusOr<std::vector<LocalRank>> {
      std::vector<LocalRank> pinned;
      for (const uint32_t rank : ranks_of_[node]) {
        SealedRank& one = ranks_[rank];
        if (!one.buffer->control().TryPin(BufferPin::kPersist, one.turn))
          return absl::InternalError("pinned already");
        pinned.push_back({rank, {&*one.buffer, one.turn, &one.assignment, one.aliases}});
      }
      return pinned;
    };
    options.over = [this, node](const SaveOrder&, const absl::Status& outcome) {
      for (const uint32_t rank : ranks_of_[node])
        EXPECT_TRUE(ranks_[rank].buffer->control().Unpin(BufferPin::kPersist, ranks_[rank].turn));
      overs.emplace(node, outcome);
    };
    members_[node] = std::make_unique<SaveMember>(*loop_, std::move(options));
  }
  void ToNode(const std::string& node, const SaveTeamMessage& message) {
    if (!on_told(node, message)) return;
    loop_->Post([this, node, bytes = Encode(message)] {
      if (const auto member = members_.find(node); member != members_.end())
        member->second->OnMessage(DecodeSaveTeamMessage(bytes).value());
    });
  }

  const uint64_t generation_;
  const std::string path_;
  std::unique_ptr<EventLoop> loop_;
  std::deque<SealedRank> ranks_;
  std::string plan_;
  std::map<std::string, std::vector<uint32_t>> ranks_of_;
  std::unique_ptr<Root> root_;
  std::unique_ptr<SerialThread> disk_;
  std::unique_ptr<SaveLead> lead_;
  std::map<std::string, std::unique_ptr<SaveMember>> members_;
  std::thread thread_;
};

std::vector<std::string> Committed(Root& root) {
  std::vector<std::string> names;
  const Listing listing = root.List().value();
  for (const CheckpointInfo& info : listing.checkpoints) {
    if (info.state == CheckpointState::kCommitted) names.push_back(info.name);
  }
  return names;
}

TEST(SaveTeam, CommitsWhatThreeNodesWroteAndEveryByteIsThere) {
  TempFolder folder;
  Team team(folder / "root", 3, 2);
  const auto saved = team.Save(team.Request());
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_GE(saved->bytes, 1'200'000u + 24'000);
  team.Settle();
  EXPECT_THAT(VerifyCheckpoint(team.root().PathOf(saved->checkpoint)), IsEmpty());
  const auto reader = CheckpointReader::Open(team.root().PathOf(saved->checkpoint)).value();
  EXPECT_EQ(reader->manifest().world, 6u);
  EXPECT_EQ(reader->manifest().generation, 3u) << "of the snapshot";
  OwnedState restored;
  restored.AddZeros("wte", DType::kF32, {300'000});
  restored.AddZeros("shard", DType::kF32, {6000});
  OwnedState wanted;
  wanted.Add("wte", DType::kF32, {300'000});
  wanted.Add("shard", DType::kF32, {6000});
  ASSERT_TRUE(reader->ReadState(restored.view(), Strictness::kStrict).ok());
  EXPECT_EQ(restored.Digest(), wanted.Digest());
  EXPECT_EQ(team.overs.size(), 3u) << "all have unpinned";
}

TEST(SaveTeam, NamesASlowWriterAndTrainingMaySaveAgain) {
  TempFolder folder;
  Team team(folder / "root", 2, 2);
  team.on_said = [](const std::string& node, const SaveTeamMessage& message) {
    const auto* written = std::get_if<SaveRankWritten>(&message);
    return node != "n1" || written == nullptr || written->written.rank != 3;
  };
  TeamSaveRequest request = team.Request();
  request.limits.stall = absl::Milliseconds(300);
  const auto slow = team.Save(std::move(request));
  EXPECT_TRUE(absl::IsDeadlineExceeded(slow.status())) << slow.status();
  EXPECT_THAT(std::string(MessageOf(slow.status())), HasSubstr("rank 3 on node 'n1'"));
  team.Settle();
  EXPECT_THAT(Committed(team.root()), IsEmpty());
  team.OnLoop([&] { team.on_said = [](const auto&, const auto&) { return true; }; });
  EXPECT_TRUE(team.Save(team.Request()).ok());
}

// What a slow disk has begun cannot be called back; the lead has given it up meanwhile.
TEST(SaveTeam, ANodeBeginsTheNewestOrderWhenItsDiskIsDoneWithTheFormerSave) {
  TempFolder folder;
  Team team(folder / "root", 2, 1);
  int announced = 0;
  team.on_told = [&](const std::string& node, const SaveTeamMessage& message) {
    if (node == "n1" && std::holds_alternative<SaveAnnounced>(message) && ++announced == 3)
      team.OnLoopLater([&] { team.limiter.Lift(); });  // the node has heard it by then
    return true;
  };
  team.limiter.Enforce();
  TeamSaveRequest request = team.Request();
  request.limits.stall = absl::Milliseconds(200);
  for (int i = 0; i < 2; ++i) {
    const auto slow = team.Save(request);
    EXPECT_TRUE(absl::IsDeadlineExceeded(slow.status())) << slow.status();
  }
  const auto saved = team.Save(team.Request());
  ASSERT_TRUE(saved.ok()) << saved.status();
  team.Settle();
  EXPECT_THAT(Committed(team.root()), ::testing::ElementsAre(saved->checkpoint));
  EXPECT_EQ(team.overs.count("n1"), 2u) << "the first and the last; of the second nothing began";
}

TEST(SaveTeam, AFollowersFailedWriteEndsTheSaveByName) {
  TempFolder folder;
  Team team(folder / "root", 2, 1);
  // Its shard's name is taken.
  team.on_told = [&](const std::string& node, const SaveTeamMessage& message) {
    if (const auto* told = std::get_if<SaveAnnounced>(&message); told != nullptr && node == "n1")
      WriteFileText(team.root().PathOf(told->order.key.checkpoint) + "/w00001.safetensors", "x");
    return true;
  };
  const auto failed = team.Save(team.Request());
  EXPECT_FALSE(failed.ok());
  EXPECT_THAT(std::string(MessageOf(failed.status())),
              ::testing::AllOf(HasSubstr("rank 1 on node 'n1'"), HasSubstr("w00001.safetensors")));
  team.Settle();
  EXPECT_THAT(Committed(team.root()), IsEmpty());
}

TEST(SaveTeam, ADifferentPlanIsNamed) {
  TempFolder folder;
  Team team(folder / "root", 2, 1);
  team.plan_of["n1"] = std::string(64, 'b');
  const auto failed = team.Save(team.Request());
  EXPECT_TRUE(absl::IsFailedPrecondition(failed.status())) << failed.status();
  EXPECT_THAT(std::string(MessageOf(failed.status())),
              ::testing::AllOf(HasSubstr("node 'n1'"), HasSubstr("bbbbbbbbbbbbbbbb"),
                               HasSubstr(team.plan().substr(0, 16))));
}

TEST(SaveTeam, AReceiptThatIsNotWhatItsWriterSaidIsDamage) {
  TempFolder folder;
  Team team(folder / "root", 2, 1);
  bool lied = false;
  team.on_said = [&](const std::string& node, const SaveTeamMessage& message) {
    const auto* written = std::get_if<SaveRankWritten>(&message);
    if (node != "n1" || written == nullptr || lied) return true;
    lied = true;
    SaveRankWritten other = *written;
    other.written.receipt.crc32c ^= 1;
    team.lead().OnMessage("n1", other);
    return false;
  };
  const auto failed = team.Save(team.Request());
  EXPECT_TRUE(absl::IsDataLoss(failed.status())) << failed.status();
  EXPECT_THAT(std::string(MessageOf(failed.status())), HasSubstr("rank 1"));
}

TEST(SaveTeam, AFollowerThatIsLostInTheMiddleEndsTheSave) {
  TempFolder folder;
  Team team(folder / "root", 3, 1);
  team.on_told = [](const std::string& node, const SaveTeamMessage&) { return node != "n2"; };
  const auto failed = team.Save(
      team.Request(), [&] { team.OnLoop([&] { team.lead().OnLost("n2", "connection reset"); }); });
  EXPECT_TRUE(absl::IsUnavailable(failed.status())) << failed.status();
  EXPECT_THAT(std::string(MessageOf(failed.status())),
              ::testing::AllOf(HasSubstr("rank 2 on node 'n2'"), HasSubstr("connection reset")));
}

TEST(SaveTeam, WhatAConnectionLostIsToldAgain) {
  TempFolder folder;
  Team team(folder / "root", 2, 1);
  std::promise<void> lost;
  bool is_first = true;
  team.on_said = [&](const std::string& node, const SaveTeamMessage&) {
    if (node != "n1" || !std::exchange(is_first, false)) return true;
    lost.set_value();
    return false;
  };
  const auto saved = team.Save(team.Request(), [&] {
    lost.get_future().get();
    team.OnLoop([&] { team.lead().OnUp("n1"); });
  });
  EXPECT_TRUE(saved.ok()) << saved.status();
}

// The lead goes between the last receipt and the manifest; the next lead takes a claim and commits.
TEST(SaveTeam, ANewLeadRollsForwardAndTheOldOneIsFenced) {
  TempFolder folder;
  Team team(folder / "root", 2, 1);
  std::string name;
  std::unique_ptr<Root> next;
  int written = 0;
  team.on_said = [&](const std::string&, const SaveTeamMessage& message) {
    const auto* one = std::get_if<SaveRankWritten>(&message);
    if (one == nullptr || ++written < 2) return true;
    name = one->save.checkpoint;
    next = Root::Open(folder / "root", {.run = kRun, .fences_own_run = true}).value();
    EXPECT_TRUE(next->TakeClaim().ok());
    EXPECT_EQ(next->claim(), 2u);
    EXPECT_THAT(next->RollForward({}, {"new", 2, 8}).value(), ::testing::ElementsAre(name));
    return true;
  };
  const auto old = team.Save(team.Request());
  EXPECT_TRUE(absl::IsAborted(old.status())) << old.status();
  team.Settle();
  EXPECT_THAT(Committed(*next), ::testing::ElementsAre(name)) << "and the old one removed nothing";
  EXPECT_THAT(VerifyCheckpoint(next->PathOf(name)), IsEmpty());
}

TEST(SaveTeam, AFollowerWritesNoReceiptOfAGenerationWhoseAbortItAcknowledged) {
  TempFolder folder;
  Team team(folder / "root", 2, 1);
  team.OnLoop([&] { team.member("n1").OnAbort(7, "a rank died"); });
  const auto failed = team.Save(team.Request());
  EXPECT_TRUE(absl::IsAborted(failed.status())) << failed.status();
  EXPECT_THAT(std::string(MessageOf(failed.status())), HasSubstr("node 'n1'"));
  team.Settle();
  EXPECT_THAT(Committed(team.root()), IsEmpty());
}

class Veto final : public CommitHook {
 public:
  explicit Veto(HookVerdict::Outcome outcome) : outcome_(outcome) {}
  std::string_view name() const override { return "look"; }
  absl::Duration deadline() const override { return absl::Seconds(60); }
  HookVerdict Check(const HookView& view, const std::function<bool()>&) override {
    for (const HookShard& shard : view.shards) {
      for (const HookTensor& tensor : shard.tensors) bytes_ += tensor.bytes.size();
    }
    return {outcome_, "seen " + std::to_string(bytes_)};
  }

 private:
  const HookVerdict::Outcome outcome_;
  size_t bytes_ = 0;
};

TEST(SaveTeam, ShowsTheHooksTheBytesOfAllNodes) {
  TempFolder folder;
  Team team(folder / "root", 2, 2);
  TeamSaveRequest request = team.Request();
  request.hooks = {std::make_shared<Veto>(HookVerdict::Outcome::kVeto)};
  const auto vetoed = team.Save(std::move(request));
  EXPECT_TRUE(absl::IsFailedPrecondition(vetoed.status())) << vetoed.status();
  EXPECT_THAT(std::string(MessageOf(vetoed.status())), HasSubstr("seen 1216000"));
}

TEST(SaveTeamMessages, RefuseWhatIsCutOrNamesNoCheckpoint) {
  const SaveTeamMessage message =
      SavePartFailed{{7, "step-000000000120-0000000a"}, 2, absl::ResourceExhaustedError("full")};
  const std::string bytes = Encode(message);
  for (size_t size = 0; size < bytes.size(); ++size)
    EXPECT_FALSE(DecodeSaveTeamMessage(std::string_view(bytes).substr(0, size)).ok()) << size;
  EXPECT_EQ(std::get<SavePartFailed>(*DecodeSaveTeamMessage(bytes)).why,
            absl::ResourceExhaustedError("full"));
  EXPECT_FALSE(DecodeSaveTeamMessage(Encode(SaveProgressed{{7, "../../etc"}, 1})).ok());
  std::string newer = bytes;
  newer[0] = 2;
  EXPECT_TRUE(absl::IsUnimplemented(DecodeSaveTeamMessage(newer).status()));
}

}  // namespace
}  // namespace outlast
