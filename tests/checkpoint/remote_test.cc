// The remote tier: what is committed on disk is copied there in the background, and comes back
// where the local root has no whole copy.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/channel.h"
#include "checkpoint/remote_root.h"
#include "checkpoint/save_wire.h"
#include "outlast/base/plugins.h"
#include "outlast/store/blob.h"
#include "run/keeper.h"
#include "run/vault.h"
#include "tests/checkpoint/disk_fixture.h"
#include "tests/checkpoint/job_fixture.h"

namespace outlast {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
namespace fs = std::filesystem;

// A store in memory that outlives the runs of a test, and fails where the test says so.
class Store {
 public:
  using Fault = std::function<absl::Status(const std::string& what, const std::string& key)>;

  Store() {
    EXPECT_TRUE(RegisterStores(*plugins_).ok());
    EXPECT_TRUE(plugins_->Of<Blob>()
                    .Add("test",
                         [this](const std::string&, const Plugins&) {
                           return absl::StatusOr<std::unique_ptr<Blob>>(
                               std::make_unique<View>(*this));
                         })
                    .ok());
  }

  std::shared_ptr<const Plugins> plugins() const { return plugins_; }
  Blob& objects() { return *objects_; }
  std::unique_ptr<Blob> Open() { return std::make_unique<View>(*this); }
  // Asked before each call; called from several threads.
  void SetFault(Fault fault) {
    MutexLock lock(mutex_);
    fault_ = std::move(fault);
  }
  std::atomic<bool> keeps_gets{false};    // gets of shards then end only when they are cancelled
  std::atomic<bool> stands_still{false};  // puts of shards then end only when they are cancelled
  uint64_t shard_bytes_read() const { return shard_bytes_read_; }
  // Of the checkpoint's shards, as they stand there.
  uint64_t ShardBytes(const std::string& prefix) {
    uint64_t bytes = 0;
    const std::vector<BlobInfo> all = ListAll(*objects_, prefix).value();
    for (const BlobInfo& info : all) bytes += info.key.ends_with(".safetensors") ? info.bytes : 0;
    return bytes;
  }
  std::vector<std::string> puts() const {
    MutexLock lock(mutex_);
    return puts_;
  }
  std::vector<int64_t> CommittedSteps() {
    std::vector<int64_t> steps;
    const std::vector<BlobInfo> all = ListAll(*objects_, "").value();
    for (const BlobInfo& info : all) {
      const std::string folder = info.key.substr(0, info.key.find('/'));
      if (info.key.ends_with("/MANIFEST.json")) steps.push_back(ParseCheckpointName(folder)->step);
    }
    return steps;
  }

 private:
  class View final : public Blob {
   public:
    explicit View(Store& store) : store_(store) {}
    absl::Status Put(const std::string& key, const BlobSource& source, PutMode mode,
                     const BlobCall& call) override {
      OUTLAST_RETURN_IF_ERROR(store_.Ask("put", key));
      while (store_.stands_still && key.ends_with(".safetensors")) {
        if (call.is_cancelled && call.is_cancelled()) return absl::CancelledError("cancelled");
        absl::SleepFor(absl::Milliseconds(1));
      }
      OUTLAST_RETURN_IF_ERROR(store_.objects_->Put(key, source, mode, call));
      MutexLock lock(store_.mutex_);
      store_.puts_.push_back(key);
      return absl::OkStatus();
    }
    absl::Status Get(const std::string& key, uint64_t offset, std::span<std::byte> into,
                     const BlobCall& call) override {
      OUTLAST_RETURN_IF_ERROR(store_.Ask("get", key));
      while (store_.keeps_gets && key.ends_with(".safetensors")) {
        if (call.is_cancelled && call.is_cancelled()) return absl::CancelledError("cancelled");
        absl::SleepFor(absl::Milliseconds(1));
      }
      if (key.ends_with(".safetensors")) store_.shard_bytes_read_ += into.size();
      return store_.objects_->Get(key, offset, into, call);
    }
    absl::StatusOr<BlobInfo> Stat(const std::string& key, const BlobCall& call) override {
      OUTLAST_RETURN_IF_ERROR(store_.Ask("stat", key));
      return store_.objects_->Stat(key, call);
    }
    absl::StatusOr<BlobPage> List(const std::string& prefix, const std::string& after, int limit,
                                  const BlobCall& call) override {
      OUTLAST_RETURN_IF_ERROR(store_.Ask("list", prefix));
      return store_.objects_->List(prefix, after, limit, call);
    }
    absl::Status Remove(const std::string& key, const BlobCall& call) override {
      OUTLAST_RETURN_IF_ERROR(store_.Ask("remove", key));
      return store_.objects_->Remove(key, call);
    }
    std::string_view uri() const override { return "test://store"; }

   private:
    Store& store_;
  };

  absl::Status Ask(const std::string& what, const std::string& key) {
    Fault fault;
    {
      MutexLock lock(mutex_);
      fault = fault_;
    }
    return fault ? fault(what, key) : absl::OkStatus();
  }

  std::shared_ptr<Plugins> plugins_ = std::make_shared<Plugins>();
  std::unique_ptr<Blob> objects_ = MakeMemoryBlob();
  mutable Mutex mutex_;
  Fault fault_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> puts_ ABSL_GUARDED_BY(mutex_);
  std::atomic<uint64_t> shard_bytes_read_{0};
};

absl::Status OutOfReach(const std::string&, const std::string&) {
  return absl::UnavailableError("the network is down");
}

class RemoteTierTest : public ::testing::Test {
 protected:
  JobSpec Spec(int64_t steps) {
    JobSpec spec;
    spec.steps = steps;
    spec.checkpoints.uri = folder_ / "root";
    spec.checkpoints.every = Every::Steps(10);
    spec.checkpoints.remote = {.uri = "test://store", .every = Every::Steps(10)};
    spec.service.plugins = store_.plugins();
    spec.service.observer.on_uploaded = [this](int64_t step, const UploadResult& result) {
      uploaded_.push_back(step);
      results_.push_back(result);
    };
    spec.service.observer.on_upload_failed = [this](int64_t, const absl::Status& error) {
      upload_errors_.emplace_back(MessageOf(error));
    };
    return spec;
  }
  void Run(const JobSpec& spec, Seen& seen) {
    uploaded_.clear();
    results_.clear();
    upload_errors_.clear();
    RunJob(spec, seen);
    EXPECT_EQ(seen.result.exit_code, 0) << seen.result.reason;
    EXPECT_EQ(seen.wrong_states, 0);
  }
  // A job of 30 steps, of which the store keeps the last save and at least one before; its steps.
  std::vector<int64_t> SaveTwiceFarAway(Seen& seen) {
    JobSpec spec = Spec(30);
    spec.checkpoints.remote.keep_last = 9;
    spec.at_step = [&](LocalWorld&, outlast::Run&, int64_t step) {
      while (step == 25 && store_.CommittedSteps().empty()) absl::SleepFor(absl::Milliseconds(1));
    };
    Run(spec, seen);
    return store_.CommittedSteps();
  }

  TempFolder folder_;
  Store store_;
  std::vector<int64_t> uploaded_;
  std::vector<UploadResult> results_;
  std::vector<std::string> upload_errors_;
};

TEST_F(RemoteTierTest, RestoresOnAFreshMachineAndGoesOnWithTheSameHistory) {
  Seen first, second, third;
  Run(Spec(30), first);
  EXPECT_THAT(uploaded_, Contains(30));
  fs::remove_all(folder_ / "root");
  Run(Spec(50), second);
  EXPECT_THAT(second.restored_from, ElementsAre("remote"));
  EXPECT_THAT(second.restored_steps, ElementsAre(30));
  EXPECT_THAT(uploaded_, Contains(50));
  // What came after is newer than what was before: the claims were counted over both roots.
  fs::remove_all(folder_ / "root");
  Run(Spec(60), third);
  EXPECT_THAT(third.restored_steps, ElementsAre(50));
}

TEST_F(RemoteTierTest, RestoresInPlaceOfADamagedLocalOneBeforeAnOlderStep) {
  Seen first, second, third;
  JobSpec spec = Spec(30);
  spec.at_step = [&](LocalWorld&, outlast::Run&, int64_t step) {
    // Step 20 is on disk before 30 comes: there is an older one to fall back to.
    while (step == 25 && CommittedSteps(folder_ / "root").empty())
      absl::SleepFor(absl::Milliseconds(1));
  };
  Run(spec, first);
  for (const auto& entry : fs::directory_iterator(folder_ / "root")) {
    if (!entry.path().filename().string().starts_with("step-000000000030")) continue;
    const std::string shard = entry.path() / "w00000.safetensors";
    std::fstream file(shard, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(5000);
    file.put('\x5a');
  }
  Run(Spec(40), second);
  EXPECT_THAT(second.restored_from, ElementsAre("remote"));
  EXPECT_THAT(second.restored_steps, ElementsAre(30));
  EXPECT_THAT(second.notes, Contains(HasSubstr("the chunk at byte 0 has crc")));
  // What was saved since is on disk.
  Run(Spec(41), third);
  EXPECT_THAT(third.restored_from, ElementsAre("disk"));
}

// Eight ranks that hold the same state read it once; nothing goes by the local disk.
TEST_F(RemoteTierTest, ReadsEachByteOnceForAllRanksOfANode) {
  Seen first, second;
  JobSpec spec = Spec(10);
  spec.floats = 2'000'000;
  spec.ranks = 8;
  Run(spec, first);
  fs::remove_all(folder_ / "root");
  const uint64_t all = store_.ShardBytes("step-");
  spec.steps = 20;
  std::vector<int64_t> on_disk{-1};
  spec.at_step = [&](LocalWorld&, outlast::Run& run, int64_t step) {
    if (step == 10 && run.rank() == 0) on_disk = CommittedSteps(folder_ / "root");
  };
  Run(spec, second);
  EXPECT_THAT(second.restored_from, ElementsAre("remote"));
  EXPECT_THAT(on_disk, IsEmpty());
  EXPECT_FALSE(fs::exists(folder_ / "root/fetch"));
  EXPECT_GE(all, 8'000'000u);
  EXPECT_EQ(store_.shard_bytes_read(), all);
  EXPECT_EQ(second.restore_read, static_cast<int64_t>(all));
}

// Of what was saved by three ranks, five read each chunk that they need, and a chunk that two of
// them need twice.
TEST_F(RemoteTierTest, RestoresIntoAnotherWorld) {
  Seen first, second;
  JobSpec spec = Spec(10);
  spec.floats = 2'000'000;
  spec.ranks = 3;
  Run(spec, first);
  fs::remove_all(folder_ / "root");
  const uint64_t all = store_.ShardBytes("step-");
  spec.steps = 20;
  spec.ranks = 5;
  Run(spec, second);
  EXPECT_THAT(second.restored_from, ElementsAre("remote"));
  EXPECT_THAT(second.restored_steps, ElementsAre(10));
  EXPECT_GE(store_.shard_bytes_read(), 8'000'000u);
  EXPECT_LE(store_.shard_bytes_read(), all + (8u << 20));  // at most each cut twice, of 1 MiB
}

// A trainer that wants a part reads no more than that part's chunks.
TEST_F(RemoteTierTest, ReadsOnlyTheChunksOfWhatIsWanted) {
  Seen first;
  JobSpec spec = Spec(10);
  spec.floats = 4'000'000;
  Run(spec, first);
  fs::remove_all(folder_ / "root");
  const uint64_t all = store_.ShardBytes("step-");
  int64_t step = 0;
  StateView state;
  state.regions.push_back(
      {"step", DType::kI64, {}, {}, {}, std::as_writable_bytes(std::span(&step, 1))});
  const auto run = outlast::Run::Join().value();
  CheckpointerOptions options = spec.checkpoints;
  options.plugins = store_.plugins();
  const auto checkpoints = Checkpointer::Open(*run, options).value();
  EXPECT_EQ(run->ForEachGeneration([&](Generation&) -> absl::Status {
    return checkpoints->Restore(state, {.strictness = Strictness::kMatching}).status();
  }),
            absl::OkStatus());
  EXPECT_EQ(checkpoints->stats().restored_from, "remote");
  EXPECT_EQ(step, 10);
  EXPECT_GE(all, 16'000'000u);
  EXPECT_GE(store_.shard_bytes_read(), 8u);
  EXPECT_LE(store_.shard_bytes_read(), 1u << 20);  // a chunk
  EXPECT_EQ(checkpoints->stats().restore_read_bytes,
            static_cast<int64_t>(store_.shard_bytes_read()));
}

TEST_F(RemoteTierTest, PassesOverADamagedRemoteCopy) {
  Seen first, second;
  const std::vector<int64_t> steps = SaveTwiceFarAway(first);
  ASSERT_GE(steps.size(), 2u);
  const std::vector<BlobInfo> all = ListAll(store_.objects(), "step-000000000030").value();
  for (const BlobInfo& info : all) {
    if (!info.key.ends_with("w00000.safetensors")) continue;
    std::string content = GetSmall(store_.objects(), info.key, 1 << 30).value();
    content[9000] ^= 1;
    ASSERT_TRUE(PutSmall(store_.objects(), info.key, content, PutMode::kReplace).ok());
  }
  fs::remove_all(folder_ / "root");
  Run(Spec(40), second);
  EXPECT_THAT(second.restored_steps, ElementsAre(steps[steps.size() - 2]));
  EXPECT_THAT(second.notes, Contains(HasSubstr("has crc")));
}

// All ranks fall back together, whichever of them found it.
TEST_F(RemoteTierTest, PassesOverARemoteShardThatIsGoneAndNamesIt) {
  Seen first, second;
  const std::vector<int64_t> steps = SaveTwiceFarAway(first);
  ASSERT_GE(steps.size(), 2u);
  const std::vector<BlobInfo> all = ListAll(store_.objects(), "step-000000000030").value();
  for (const BlobInfo& info : all) {
    if (!info.key.ends_with("w00001.safetensors")) continue;
    ASSERT_TRUE(store_.objects().Remove(info.key, {}).ok());
  }
  fs::remove_all(folder_ / "root");
  Run(Spec(40), second);
  EXPECT_THAT(second.restored_steps, ElementsAre(steps[steps.size() - 2]));
  EXPECT_THAT(second.restored_from, ElementsAre("remote"));
  EXPECT_THAT(second.notes, Contains(AllOf(HasSubstr("restore of step 30 from test://store"),
                                           HasSubstr("w00001.safetensors"))));
}

// The same step's copy on disk is tried first, then afar, and only then an older one.
TEST_F(RemoteTierTest, PassesOverACheckpointWhoseReadIsCutInTheMiddle) {
  Seen first, second;
  JobSpec spec = Spec(30);
  spec.floats = 3'000'000;
  spec.checkpoints.remote.keep_last = 9;
  spec.at_step = [&](LocalWorld&, outlast::Run&, int64_t step) {
    while (step == 25 && store_.CommittedSteps().empty()) absl::SleepFor(absl::Milliseconds(1));
  };
  Run(spec, first);
  const auto steps = store_.CommittedSteps();
  ASSERT_GE(steps.size(), 2u);
  fs::remove_all(folder_ / "root");
  std::atomic<int> gets{0};
  store_.SetFault([&](const std::string& what, const std::string& key) {
    const bool is_newest = key.starts_with("step-000000000030") && key.ends_with(".safetensors");
    if (what != "get" || !is_newest || ++gets < 2) return absl::OkStatus();
    return absl::UnavailableError("connection reset");
  });
  spec.steps = 40;
  spec.at_step = [](LocalWorld&, outlast::Run&, int64_t) {};
  Run(spec, second);
  EXPECT_GE(gets, 2);
  EXPECT_THAT(second.restored_steps, ElementsAre(steps[steps.size() - 2]));
  EXPECT_THAT(second.notes, Contains(HasSubstr("connection reset")));
}

// One rank's share is gone while the store keeps the other's waiting for ever.
TEST_F(RemoteTierTest, GivesUpAtOnceWhatOthersStillReadWhenOneRankCannot) {
  Seen first, second;
  const std::vector<int64_t> steps = SaveTwiceFarAway(first);
  ASSERT_GE(steps.size(), 2u);
  fs::remove_all(folder_ / "root");
  store_.keeps_gets = true;
  store_.SetFault([&](const std::string& what, const std::string& key) {
    if (what != "get") return absl::OkStatus();
    const bool is_newest = key.starts_with("step-000000000030");
    if (key.starts_with("step-") && !is_newest) store_.keeps_gets = false;
    return is_newest && key.ends_with("w00001.safetensors")
               ? absl::UnavailableError("connection reset")
               : absl::OkStatus();
  });
  Run(Spec(40), second);
  EXPECT_THAT(second.restored_steps, ElementsAre(steps[steps.size() - 2]));
  EXPECT_THAT(second.notes, Contains(AllOf(HasSubstr("restore of step 30 from test://store"),
                                           HasSubstr("rank 1: "), HasSubstr("connection reset"))));
}

// An agent whose store hangs for ever in one generation serves the next.
TEST_F(RemoteTierTest, RestoresAgainAfterARankWasKilledWhileItRestored) {
  Seen first, second;
  Run(Spec(10), first);
  fs::remove_all(folder_ / "root");
  std::atomic<bool> was_killed{false};
  std::atomic<LocalWorld*> world{nullptr};
  store_.keeps_gets = true;
  store_.SetFault([&](const std::string& what, const std::string& key) {
    if (what == "get" && key.ends_with(".safetensors") && !was_killed.exchange(true))
      world.load()->KillRank(1);
    return absl::OkStatus();
  });
  JobSpec spec = Spec(20);
  spec.at_restore = [&](LocalWorld& of, outlast::Run& run) {
    world = &of;
    if (run.generation() > 1) store_.keeps_gets = false;
  };
  Run(spec, second);
  EXPECT_TRUE(was_killed);
  EXPECT_EQ(second.result.spawns, 3);
  EXPECT_THAT(second.restored_from, ElementsAre("remote"));
  EXPECT_THAT(second.restored_steps, ElementsAre(10));
}

// What the local root lacks of the history is known all the same: remote retention counts it.
TEST_F(RemoteTierTest, KeepsTheRemoteHistoryBehindWhatItRestored) {
  JobSpec spec = Spec(0);
  spec.checkpoints.remote.keep_last = 3;
  for (const int64_t steps : {10, 20, 30, 40, 50}) {
    Seen seen;
    spec.steps = steps;
    Run(spec, seen);
    fs::remove_all(folder_ / "root");
  }
  EXPECT_THAT(store_.CommittedSteps(), ElementsAre(30, 40, 50));
  auto remote = RemoteRoot::Open(store_.Open(), {}).value();
  const Listing listing = remote->List().value();
  EXPECT_THAT(listing.checkpoints.back().manifest->ancestors, SizeIs(3));
  EXPECT_THAT(ResolveChain(listing.checkpoints).members, SizeIs(3));
}

// K6, for the remote tier too.
TEST_F(RemoteTierTest, HarmsNothingWhileItIsOutOfReachAndCatchesUp) {
  Seen first, second;
  const JobSpec spec = Spec(30);
  std::atomic<int> refused{0};
  store_.SetFault([&](const std::string& what, const std::string& key) {
    if (what != "put" || !key.ends_with(".safetensors")) return absl::OkStatus();
    ++refused;
    return absl::UnavailableError("the network is down");
  });
  Run(spec, first);
  EXPECT_THAT(first.failures, IsEmpty());
  EXPECT_THAT(upload_errors_, Contains(HasSubstr("the network is down")));
  EXPECT_THAT(uploaded_, IsEmpty());
  EXPECT_EQ(CommittedSteps(folder_ / "root").front(), 30);
  store_.SetFault(nullptr);
  // Nothing is left to train: the upload that failed is gone on with from what lies on disk.
  Run(Spec(30), second);
  EXPECT_THAT(second.restored_from, ElementsAre("disk"));
  EXPECT_THAT(uploaded_, ElementsAre(30));
}

TEST_F(RemoteTierTest, BeginsWithoutAStoreThatIsOutOfReachWhereTheDiskHasSome) {
  Seen first, second;
  Run(Spec(20), first);
  store_.SetFault(OutOfReach);
  Run(Spec(40), second);
  EXPECT_THAT(second.restored_from, ElementsAre("disk"));
  EXPECT_THAT(second.notes, Contains(HasSubstr("the remote root cannot be reached")));
  EXPECT_THAT(upload_errors_, Not(IsEmpty()));
}

// Reading needs no write: it serves a restore, and what is saved stays on the disk.
TEST_F(RemoteTierTest, ThatMayOnlyBeReadIsRestoredFromAndNamedByEachUpload) {
  Seen first, second;
  Run(Spec(30), first);
  const std::vector<std::string> before = store_.puts();
  fs::remove_all(folder_ / "root");
  store_.SetFault([](const std::string& what, const std::string& key) {
    return what == "put" || what == "remove" ? absl::PermissionDeniedError(key + ": AccessDenied")
                                             : absl::OkStatus();
  });
  Run(Spec(40), second);
  EXPECT_THAT(second.restored_from, ElementsAre("remote"));
  EXPECT_THAT(second.restored_steps, ElementsAre(30));
  EXPECT_THAT(second.notes, Contains(AllOf(HasSubstr("can only be read"),
                                           HasSubstr("remote root test://store"))));
  EXPECT_EQ(CommittedSteps(folder_ / "root").front(), 40);
  EXPECT_THAT(upload_errors_, Contains(AllOf(HasSubstr("upload of step 40"),
                                             HasSubstr("remote root test://store: it must be "
                                                       "writable"),
                                             HasSubstr("AccessDenied"))));
  EXPECT_EQ(store_.puts(), before);
}

TEST_F(RemoteTierTest, ThatMayOnlyBeReadAndIsNobodysYetIsRefusedByItsName) {
  store_.SetFault([](const std::string& what, const std::string& key) {
    return what == "put" ? absl::PermissionDeniedError(key + ": AccessDenied") : absl::OkStatus();
  });
  Seen seen;
  RunJob(Spec(20), seen);
  EXPECT_EQ(seen.result.exit_code, 85);
  EXPECT_THAT(seen.result.reason, HasSubstr("remote root test://store: it must be writable"));
}

// It was there when the job began, and cannot be listed when a restore is chosen.
TEST_F(RemoteTierTest, ThatCannotBeListedAnyMoreIsNoReasonToBeginAtZero) {
  Seen first, second;
  Run(Spec(30), first);
  fs::remove_all(folder_ / "root");
  JobSpec spec = Spec(40);
  spec.at_restore = [&](LocalWorld&, outlast::Run&) {
    store_.SetFault([](const std::string& what, const std::string&) {
      return what == "list" ? absl::UnavailableError("SlowDown") : absl::OkStatus();
    });
  };
  RunJob(spec, second);
  EXPECT_NE(second.result.exit_code, 0);
  EXPECT_THAT(second.restored_steps, IsEmpty());
  EXPECT_THAT(second.result.reason, HasSubstr("SlowDown"));
}

// Its ranks train, and memory holds their state; on the disk there is nothing yet.
TEST_F(RemoteTierTest, OutOfReachRefusesNoAgentThatGoesOnWithARunningJob) {
  Seen first;
  Run(Spec(30), first);
  fs::remove_all(folder_ / "root");
  store_.SetFault(OutOfReach);
  JobSpec spec = Spec(40);
  std::vector<std::string> notes;
  spec.service.observer.on_note = [&](const std::string& line) { notes.push_back(line); };
  absl::Status went_on = absl::UnknownError("was not asked");
  LocalWorldOptions options;
  options.prepare = [&](Keeper& keeper) {
    SaveService service(keeper, spec.service);
    Kept kept;  // as a former agent keeps what the ranks have opened
    kept["save.open"].bytes =
        PayloadWriter().Text(EncodeOptions(spec.checkpoints)).Int(uint8_t{1}).bytes();
    went_on = service.GoOn(kept);
  };
  LocalWorld world(1, options);
  world.Run([](outlast::Run&) { return absl::OkStatus(); });
  EXPECT_EQ(went_on, absl::OkStatus());
  EXPECT_THAT(notes, Contains(HasSubstr("the remote root cannot be reached")));
}

// K12: never a silent step 0.
TEST_F(RemoteTierTest, IsRefusedWhereNeitherRootTellsAnything) {
  store_.SetFault(OutOfReach);
  Seen seen;
  RunJob(Spec(20), seen);
  EXPECT_EQ(seen.result.exit_code, 85);
  EXPECT_THAT(seen.result.reason, HasSubstr("--fresh begins at step 0"));
}

TEST_F(RemoteTierTest, GoesOnWithAnUploadThatWasCutOff) {
  Seen first, second;
  store_.SetFault([](const std::string& what, const std::string& key) {
    const bool is_second = what == "put" && key.ends_with("w00001.safetensors");
    return is_second ? absl::UnavailableError("cut off") : absl::OkStatus();
  });
  Run(Spec(10), first);
  EXPECT_THAT(store_.CommittedSteps(), IsEmpty());
  store_.SetFault(nullptr);
  Run(Spec(10), second);
  ASSERT_THAT(results_, SizeIs(1));
  EXPECT_GT(results_[0].bytes_kept, 0u);
  EXPECT_GT(results_[0].bytes, 0u);
  EXPECT_THAT(store_.CommittedSteps(), ElementsAre(10));
}

// The manifest is the last thing that comes.
TEST_F(RemoteTierTest, PutsTheManifestAfterAllThatItNames) {
  Seen seen;
  Run(Spec(10), seen);
  std::vector<std::string> files;
  for (const std::string& key : store_.puts())
    if (key.starts_with("step-")) files.push_back(key.substr(key.find('/') + 1));
  EXPECT_THAT(files, ElementsAre("w00000.safetensors", "w00000.receipt.json", "w00001.safetensors",
                                 "w00001.receipt.json", "MANIFEST.json"));
}

TEST_F(RemoteTierTest, HoldsUpNeitherTrainingNorLocalSaves) {
  // An upload that stands still until training and all local saves are over.
  Seen seen;
  std::atomic<bool> is_over{false};
  std::atomic<int64_t> durable{0};
  store_.SetFault([&](const std::string& what, const std::string& key) {
    while (what == "put" && key.ends_with(".safetensors") && !is_over)
      absl::SleepFor(absl::Milliseconds(1));
    return absl::OkStatus();
  });
  seen.on_durable = [&](int64_t step) {
    durable = step;
    if (step == 60) is_over = true;
  };
  JobSpec spec = Spec(60);
  spec.checkpoints.keep_last = 1;
  spec.at_step = [&](LocalWorld&, outlast::Run&, int64_t step) {
    while (step % 10 == 5 && step > 10 && durable < step - 5) absl::SleepFor(absl::Milliseconds(1));
  };
  Run(spec, seen);
  EXPECT_THAT(seen.durable, ElementsAre(10, 20, 30, 40, 50, 60));
  // The first was being uploaded all the time, so that local retention spared it; of those that
  // waited, the newest was kept.
  EXPECT_THAT(uploaded_, ElementsAre(10, 60));
}

TEST_F(RemoteTierTest, AnUploadUnderWayIsTheOneOfItsPeriod) {
  Seen seen;
  std::atomic<int64_t> durable{0};
  store_.SetFault([&](const std::string& what, const std::string& key) {
    while (what == "put" && key.ends_with(".safetensors") && durable < 15)
      absl::SleepFor(absl::Milliseconds(1));
    return absl::OkStatus();
  });
  seen.on_durable = [&](int64_t step) { durable = step; };
  JobSpec spec = Spec(20);
  spec.checkpoints.every = Every::Steps(5);
  spec.checkpoints.remote.every = Every::Steps(10);
  spec.at_step = [&](LocalWorld&, outlast::Run&, int64_t step) {
    while (step % 5 == 4 && step > 5 && durable < step - 4) absl::SleepFor(absl::Milliseconds(1));
  };
  Run(spec, seen);
  EXPECT_THAT(uploaded_, ElementsAre(10, 20));
}

// The remote chain holds together even where its cadence leaves out more than the disk keeps.
TEST_F(RemoteTierTest, KeepsItsOwnNumberOfCheckpoints) {
  Seen seen;
  std::atomic<int64_t> durable{0};
  seen.on_durable = [&](int64_t step) { durable = step; };
  JobSpec spec = Spec(100);
  spec.checkpoints.every = Every::Steps(5);
  spec.checkpoints.keep_last = 1;
  spec.checkpoints.remote.every = Every::Steps(20);
  spec.checkpoints.remote.keep_last = 2;
  spec.at_step = [&](LocalWorld&, outlast::Run&, int64_t step) {
    if (step % 5 != 4 || step < 5) return;
    while (durable < step - 4) absl::SleepFor(absl::Milliseconds(1));
    const auto has = [&](int64_t wanted) {
      const auto steps = store_.CommittedSteps();
      return std::ranges::find(steps, wanted) != steps.end();
    };
    while (step % 20 == 9 && step > 20 && !has(step / 20 * 20))
      absl::SleepFor(absl::Milliseconds(1));
  };
  Run(spec, seen);
  EXPECT_THAT(uploaded_, ElementsAre(20, 40, 60, 80, 100));
  EXPECT_THAT(store_.CommittedSteps(), ElementsAre(80, 100));
  EXPECT_THAT(CommittedSteps(folder_ / "root"), ElementsAre(100));
  auto remote = RemoteRoot::Open(store_.Open(), {}).value();
  const Listing listing = remote->List().value();
  EXPECT_THAT(ResolveChain(listing.checkpoints).members, SizeIs(2));
}

TEST_F(RemoteTierTest, RefusesAnotherJobsRoot) {
  Seen seen;
  JobSpec spec = Spec(10);
  spec.checkpoints.job = "mine";
  ASSERT_TRUE(PutSmall(store_.objects(), "OUTLAST.json",
                       ToText(RootRecord{Id128::FromName("yours"), "yours"}).value(),
                       PutMode::kCreate)
                  .ok());
  RunJob(spec, seen);
  EXPECT_EQ(seen.result.exit_code, 85);
  EXPECT_THAT(seen.result.reason, HasSubstr("foreign"));
}

TEST_F(RemoteTierTest, RefusesAnUnknownScheme) {
  Seen seen;
  JobSpec spec = Spec(10);
  spec.checkpoints.remote.uri = "gs://bucket";
  RunJob(spec, seen);
  EXPECT_EQ(seen.result.exit_code, 85);
  EXPECT_THAT(seen.result.reason, HasSubstr("no plug-in for its scheme 'gs'"));
}

// A store that cannot be listed is not an empty one (dlio_benchmark#348).
TEST_F(RemoteTierTest, NeverTakesAFailedListingForAnEmptyOne) {
  Seen first, second;
  Run(Spec(30), first);
  fs::remove_all(folder_ / "root");
  store_.SetFault([](const std::string& what, const std::string&) {
    return what == "list" ? absl::UnavailableError("SlowDown") : absl::OkStatus();
  });
  RunJob(Spec(40), second);
  EXPECT_EQ(second.result.exit_code, 85);
  EXPECT_THAT(second.result.reason, HasSubstr("SlowDown"));
}

TEST_F(RemoteTierTest, LosesTheRemoteRootToALargerClaimAndTrainsOn) {
  Seen seen;
  std::atomic<bool> is_taken{false};
  JobSpec spec = Spec(30);
  spec.at_step = [&](LocalWorld&, outlast::Run& run, int64_t step) {
    if (step != 5 || run.rank() != 0 || is_taken.exchange(true)) return;
    Claim other;
    other.run = Id128::Random();
    other.host = "elsewhere";
    ASSERT_TRUE(
        PutSmall(store_.objects(), "claims/99", ToText(other).value(), PutMode::kCreate).ok());
  };
  Run(spec, seen);
  EXPECT_THAT(store_.CommittedSteps(), IsEmpty());
  EXPECT_THAT(upload_errors_, SizeIs(1));
  EXPECT_THAT(upload_errors_[0], HasSubstr("on host 'elsewhere'"));
  EXPECT_EQ(CommittedSteps(folder_ / "root").front(), 30);
}

// Whoever told a job to stop kills it soon: the next run goes on with the upload.
TEST_F(RemoteTierTest, DoesNotKeepAJobThatWasToldToStop) {
  Seen seen;
  store_.stands_still = true;
  JobSpec spec = Spec(1'000'000);
  spec.checkpoints.remote.stop_limit = absl::Milliseconds(100);
  spec.at_step = [&](LocalWorld& world, outlast::Run& run, int64_t step) {
    if (step == 15 && run.rank() == 0) world.AskStop();
  };
  const int64_t started = MonotonicNanos();
  RunJob(spec, seen);
  EXPECT_EQ(seen.result.exit_code, 80) << seen.result.reason;
  EXPECT_LT(MonotonicNanos() - started, 30'000'000'000);
  EXPECT_THAT(store_.CommittedSteps(), IsEmpty());
  EXPECT_THAT(upload_errors_, Contains(HasSubstr("cancelled")));
}

// The process saves by itself, and hears what became of it.
TEST_F(RemoteTierTest, WorksWithoutAnAgentAndTellsTheTrainer) {
  float weight = 0;
  StateView state;
  state.regions.push_back(
      {"weight", DType::kF32, {1}, {}, {1}, std::as_writable_bytes(std::span(&weight, 1))});
  const auto train = [&](const std::function<void(Checkpointer&, int64_t)>& body) {
    const auto run = outlast::Run::Join().value();
    const auto checkpoints =
        Checkpointer::Open(*run, {.uri = folder_ / "root",
                                  .every = Every::Steps(1),
                                  .remote = {.uri = "test://store", .every = Every::Steps(1)},
                                  .plugins = store_.plugins()})
            .value();
    return run->ForEachGeneration([&](Generation&) -> absl::Status {
      OUTLAST_ASSIGN_OR_RETURN(const int64_t step, checkpoints->Restore(state));
      body(*checkpoints, step);
      return absl::OkStatus();
    });
  };
  EXPECT_EQ(
      train([&](Checkpointer& checkpoints, int64_t) {
        weight = 7;
        ASSERT_TRUE(checkpoints.SaveIfDue(1, state).ok());
        while (checkpoints.stats().remote_step != 1 && checkpoints.stats().failed_uploads == 0)
          absl::SleepFor(absl::Milliseconds(1));
        EXPECT_EQ(checkpoints.stats().remote_step, 1);
      }),
      absl::OkStatus());
  fs::remove_all(folder_ / "root");
  weight = 0;
  EXPECT_EQ(train([&](Checkpointer& checkpoints, int64_t step) {
              EXPECT_EQ(step, 1);
              EXPECT_EQ(checkpoints.stats().restored_from, "remote");
            }),
            absl::OkStatus());
  EXPECT_EQ(weight, 7);
}

// The same files at both ends, by a folder on another mount.
TEST_F(RemoteTierTest, MakesTheSameFolderAsTheDisks) {
  Seen seen;
  JobSpec spec = Spec(10);
  spec.checkpoints.remote.uri = "file://" + (folder_ / "mount");
  Run(spec, seen);
  size_t files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder_ / "mount")) {
    const std::string path = entry.path().lexically_relative(folder_ / "mount");
    if (!entry.is_regular_file() || !path.starts_with("step-")) continue;
    EXPECT_EQ(ReadFileText(entry.path()), ReadFileText(folder_ / "root" + "/" + path)) << path;
    ++files;
  }
  EXPECT_EQ(files, 5u);
  // It is a root of its own.
  EXPECT_THAT(CommittedSteps(folder_ / "mount"), ElementsAre(10));
}

}  // namespace
}  // namespace outlast
