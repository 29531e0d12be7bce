// Jobs of several nodes with a remote root: one lead uploads what all have saved, and every node
// reads for its own ranks.
#include <filesystem>
#include <fstream>

#include "checkpoint/remote_root.h"
#include "outlast/base/plugins.h"
#include "outlast/store/blob.h"
#include "tests/checkpoint/cluster_fixture.h"
#include "tests/checkpoint/disk_fixture.h"

namespace outlast {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

void FlipBitOf(const std::string& path, std::streamoff at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const char byte = static_cast<char>(file.get());
  file.seekp(at);
  file.put(static_cast<char>(byte ^ 1));
}

// A folder far away, which counts what each node does there.
class FarStore {
 public:
  explicit FarStore(std::string folder) : folder_(std::move(folder)) {}

  // "far://store", as `node` sees it.
  std::shared_ptr<const Plugins> PluginsOf(int node) {
    auto plugins = std::make_shared<Plugins>();
    EXPECT_TRUE(plugins->Of<Blob>()
                    .Add("far",
                         [this, node](const std::string&, const Plugins&) {
                           return absl::StatusOr<std::unique_ptr<Blob>>(
                               std::make_unique<View>(*this, node));
                         })
                    .ok());
    return plugins;
  }
  std::unique_ptr<Blob> Open() { return MakeFolderBlob(folder_).value(); }
  const std::string& folder() const { return folder_; }

  std::atomic<bool> holds_puts{false};  // those of shards then end only when they are cancelled
  std::atomic<int> held{0};
  std::atomic<int> dead{-1};  // this node puts nothing any more
  // Of shards, by node.
  std::map<int, uint64_t> read() {
    MutexLock lock(mutex_);
    return read_;
  }
  void ForgetRead() {
    MutexLock lock(mutex_);
    read_.clear();
  }
  // "node key", of checkpoints.
  std::multiset<std::string> puts() {
    MutexLock lock(mutex_);
    return puts_;
  }

 private:
  class View final : public Blob {
   public:
    View(FarStore& store, int node) : store_(store), node_(node), inner_(store.Open()) {}
    absl::Status Put(const std::string& key, const BlobSource& source, PutMode mode,
                     const BlobCall& call) override {
      while (store_.holds_puts && store_.dead != node_ && key.ends_with(".safetensors")) {
        ++store_.held;
        if (call.is_cancelled && call.is_cancelled()) return absl::CancelledError("cancelled");
        usleep(1000);
      }
      if (store_.dead == node_) return absl::UnavailableError("its node is lost");
      OUTLAST_RETURN_IF_ERROR(inner_->Put(key, source, mode, call));
      MutexLock lock(store_.mutex_);
      if (key.starts_with("step-")) store_.puts_.insert(std::to_string(node_) + " " + key);
      return absl::OkStatus();
    }
    absl::Status Get(const std::string& key, uint64_t offset, std::span<std::byte> into,
                     const BlobCall& call) override {
      if (key.ends_with(".safetensors")) {
        MutexLock lock(store_.mutex_);
        store_.read_[node_] += into.size();
      }
      return inner_->Get(key, offset, into, call);
    }
    absl::StatusOr<BlobInfo> Stat(const std::string& key, const BlobCall& call) override {
      return inner_->Stat(key, call);
    }
    absl::StatusOr<BlobPage> List(const std::string& prefix, const std::string& after, int limit,
                                  const BlobCall& call) override {
      return inner_->List(prefix, after, limit, call);
    }
    absl::Status Remove(const std::string& key, const BlobCall& call) override {
      return inner_->Remove(key, call);
    }
    std::string_view uri() const override { return "far://store"; }

   private:
    FarStore& store_;
    const int node_;
    const std::unique_ptr<Blob> inner_;
  };

  const std::string folder_;
  Mutex mutex_;
  std::map<int, uint64_t> read_ ABSL_GUARDED_BY(mutex_);
  std::multiset<std::string> puts_ ABSL_GUARDED_BY(mutex_);
};

class RemoteNodes : public ::testing::Test {
 protected:
  ClusterSpec Spec(int64_t steps) {
    ClusterSpec spec;
    spec.steps = steps;
    spec.checkpoints.uri = folder_ / "root";
    spec.checkpoints.every = Every::Steps(10);
    spec.checkpoints.remote = {.uri = "far://store", .every = Every::Steps(10), .keep_last = 2};
    spec.plugins = [this](int node) { return store_.PluginsOf(node); };
    return spec;
  }
  std::vector<int64_t> FarSteps() const { return CommittedSteps(store_.folder()); }
  bool IsFarAway(int64_t step) const {
    if (!fs::exists(store_.folder() + "/OUTLAST.json")) return false;
    const auto steps = FarSteps();
    return std::ranges::find(steps, step) != steps.end();
  }

  TempFolder folder_;
  FarStore store_{folder_ / "far"};
};

TEST_F(RemoteNodes, TheLeadUploadsEachShardOnceAndRetentionCountsThere) {
  Saw saw;
  ClusterSpec spec = Spec(40);
  spec.waits_at = 10;
  spec.at_step = [&](LocalCluster&, Generation& generation, int, int64_t step) {
    while (step % 10 == 5 && step > 10 && !IsFarAway(step / 10 * 10) && generation.Check().ok())
      usleep(500);
  };

  RunCluster(spec, saw);

  ASSERT_THAT(saw.results, kEndsWithZero) << TextOf(saw);
  EXPECT_THAT(FarSteps(), ElementsAre(40, 30));
  const std::multiset<std::string> puts = store_.puts();
  EXPECT_THAT(puts, Each(::testing::StartsWith("0 ")));
  for (const std::string& put : puts) EXPECT_EQ(puts.count(put), 1u) << put;
}

// Two nodes of two ranks: half of the sharded state, and once what all hold.
TEST_F(RemoteNodes, EachNodeReadsOnceWhatItsRanksNeedWhenTheRootIsLost) {
  Saw first, second;
  ClusterSpec spec = Spec(10);
  spec.floats = 2'000'000;
  spec.sharded = 4'000'000;
  RunCluster(spec, first);
  ASSERT_THAT(first.results, kEndsWithZero) << TextOf(first);
  fs::remove_all(folder_ / "root");
  store_.ForgetRead();
  spec.steps = 20;

  RunCluster(spec, second);

  ASSERT_THAT(second.results, kEndsWithZero) << TextOf(second);
  EXPECT_EQ(second.wrong_states, 0);
  EXPECT_THAT(second.OfGeneration(1),
              ElementsAre(Saw::Restored{1, 0, 10, "remote"}, Saw::Restored{1, 1, 10, "remote"},
                          Saw::Restored{1, 2, 10, "remote"}, Saw::Restored{1, 3, 10, "remote"}))
      << TextOf(second);
  const std::map<int, uint64_t> read = store_.read();
  constexpr uint64_t kAll = 24'000'000, kNeeded = 16'000'000, kChunk = 1 << 20;
  for (const int node : {0, 1}) {
    EXPECT_GE(read.at(node), kNeeded) << node;
    // The chunks at both ends of what is read of each foreign shard.
    EXPECT_LE(read.at(node), kNeeded + 4 * kChunk) << node;
    EXPECT_LT(read.at(node), kAll) << node;
  }
}

TEST_F(RemoteNodes, AnotherNumberOfNodesRestoresWhatTwoHaveSaved) {
  Saw first, second;
  RunCluster(Spec(10), first);
  ASSERT_THAT(first.results, kEndsWithZero) << TextOf(first);
  fs::remove_all(folder_ / "root");
  ClusterSpec spec = Spec(20);
  spec.nodes = 1;
  spec.slots = 1;

  RunCluster(spec, second);

  ASSERT_THAT(second.results, kEndsWithZero) << TextOf(second);
  EXPECT_EQ(second.wrong_states, 0);
  EXPECT_THAT(second.OfGeneration(1), ElementsAre(Saw::Restored{1, 0, 10, "remote"}));
}

TEST_F(RemoteNodes, ABadChunkOnOneNodeSendsAllToAnOlderStep) {
  Saw first, second;
  ClusterSpec spec = Spec(20);
  spec.waits_at = 10;
  spec.at_step = [&](LocalCluster&, Generation& generation, int, int64_t step) {
    while (step == 15 && !IsFarAway(10) && generation.Check().ok()) usleep(500);
  };
  RunCluster(spec, first);
  ASSERT_THAT(first.results, kEndsWithZero) << TextOf(first);
  ASSERT_THAT(FarSteps(), ElementsAre(20, 10));
  for (const auto& entry : fs::directory_iterator(store_.folder())) {
    if (entry.path().filename().string().starts_with("step-000000000020"))
      FlipBitOf(entry.path() / "w00003.safetensors", 5000);
  }
  fs::remove_all(folder_ / "root");
  spec.steps = 30;
  spec.at_step = [](LocalCluster&, Generation&, int, int64_t) {};

  RunCluster(spec, second);

  ASSERT_THAT(second.results, kEndsWithZero) << TextOf(second);
  EXPECT_EQ(second.wrong_states, 0);
  for (const Saw::Restored& one : second.OfGeneration(1)) {
    EXPECT_EQ(one.step, 10) << one.rank;
    EXPECT_EQ(one.from, "remote") << one.rank;
  }
  EXPECT_THAT(second.notes[0], Contains(AllOf(HasSubstr("restore of step 20 from"),
                                              HasSubstr("w00003.safetensors"), HasSubstr("crc"))));
}

TEST_F(RemoteNodes, ANewLeadGoesOnWithTheUploadOfOneThatWasLost) {
  Saw saw;
  store_.holds_puts = true;
  ClusterSpec spec = Spec(40);
  spec.min_world = 2;
  spec.waits_at = 10;
  spec.at_step = [&](LocalCluster& cluster, Generation& generation, int, int64_t step) {
    if (generation.number() != 1) store_.holds_puts = false;
    if (generation.number() != 1 || generation.rank() != 2 || step != 15) return;
    while (store_.held == 0) usleep(500);
    store_.dead = 0;
    cluster.KillNode(0);
    WaitForEnd(generation);
  };

  RunCluster(spec, saw);

  ASSERT_EQ(saw.results[1].exit_code, 0) << TextOf(saw);
  EXPECT_EQ(saw.wrong_states, 0);
  EXPECT_EQ(FarSteps().front(), 40);
  EXPECT_THAT(store_.puts(), Each(::testing::StartsWith("1 ")));
  auto far = RemoteRoot::Open(store_.Open(), {}).value();
  const Listing listing = far->List().value();
  for (const CheckpointInfo& info : listing.checkpoints) {
    if (info.state != CheckpointState::kCommitted) continue;
    EXPECT_THAT(far->Verify(info.name).value(), IsEmpty()) << info.name;
  }
}

// --- After the trainers' end

TEST_F(RemoteNodes, WhatMemoryHoldsIsSavedOnceAllAgentsAskForIt) {
  Saw saw;
  ClusterSpec spec = Spec(20);
  spec.checkpoints.every = Every::Steps(1000);
  spec.checkpoints.snapshot_every = Every::Steps(1);
  spec.checkpoints.remote = {};
  std::vector<int64_t> steps;
  int64_t held = 0;  // a busy machine may skip some snapshots
  std::atomic<bool> is_saved{false};
  spec.at_step = [&](LocalCluster&, Generation& generation, int, int64_t step) {
    if (step != 12) return;
    while (generation.rank() == 0 && saw.common(1) < 1 && generation.Check().ok()) usleep(500);
    if (generation.rank() == 0) {
      held = saw.common(1);
      saw.persist_last({0, 1});
      while (generation.Check().ok()) {
        usleep(500);
        MutexLock lock(saw.mutex);
        if (saw.last.size() == 2) break;
      }
      steps = CommittedSteps(folder_ / "root");
      is_saved = true;
    }
    while (!is_saved && generation.Check().ok()) usleep(500);
  };

  RunCluster(spec, saw);

  MutexLock lock(saw.mutex);
  EXPECT_EQ(saw.last[0], absl::OkStatus()) << TextOf(saw);
  EXPECT_EQ(saw.last[1], absl::OkStatus()) << TextOf(saw);
  EXPECT_THAT(steps, ElementsAre(::testing::AllOf(::testing::Ge(held), ::testing::Le(12))))
      << TextOf(saw);
}

TEST_F(RemoteNodes, AnAgentThatDoesNotAskIsNamedAndNothingIsSaved) {
  Saw saw;
  ClusterSpec spec = Spec(20);
  spec.last_patience = absl::Milliseconds(300);
  spec.checkpoints.every = Every::Steps(1000);
  spec.checkpoints.snapshot_every = Every::Steps(1);
  spec.checkpoints.remote = {};
  std::vector<int64_t> steps{-1};
  std::atomic<bool> is_over{false};
  spec.at_step = [&](LocalCluster&, Generation& generation, int, int64_t step) {
    if (step != 12) return;
    while (generation.rank() == 0 && saw.common(1) < 1 && generation.Check().ok()) usleep(500);
    if (generation.rank() == 0) {
      saw.persist_last({0});
      while (generation.Check().ok()) {
        usleep(500);
        MutexLock lock(saw.mutex);
        if (saw.last.size() == 1) break;
      }
      steps = CommittedSteps(folder_ / "root");
      is_over = true;
    }
    while (!is_over && generation.Check().ok()) usleep(500);
  };

  RunCluster(spec, saw);

  MutexLock lock(saw.mutex);
  EXPECT_EQ(saw.last[0].code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(MessageOf(saw.last[0])), HasSubstr("the agent of node 'n1'"));
  EXPECT_THAT(steps, IsEmpty());
}

}  // namespace
}  // namespace outlast
