// Random schedules of a root's whole life: invocations that claim, restore, save, commit, retire
// and crash, several at once, with a switch or a crash before any of their file operations. The
// root is the real one, in memory; the calls that change it go through the stage below, where one
// of the invocations runs at a time. A schedule that fails is seen again by OUTLAST_SEED=n.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <semaphore>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/reader.h"
#include "checkpoint/root.h"
#include "checkpoint/writer.h"
#include "outlast/base/status.h"
#include "store/folder.h"
#include "tests/support/seed.h"
#include "tests/support/temp_folder.h"

namespace outlast {
namespace {

#ifdef OUTLAST_SANITIZED
constexpr uint32_t kSchedules = 125;
#else
constexpr uint32_t kSchedules = 2500;
#endif
constexpr uint32_t kShards = 4;  // of the schedules, so that they may run beside each other

// --- The stage

// Lets one actor run at a time, by chance.
class Stage {
 public:
  explicit Stage(uint32_t seed) : random_(seed) {}

  // Runs all to their ends.
  void Play(const std::vector<std::function<void()>>& parts) {
    turns_.clear();
    for (size_t i = 0; i < parts.size(); ++i)
      turns_.push_back(std::make_unique<std::binary_semaphore>(0));
    alive_.clear();
    for (size_t i = 0; i < parts.size(); ++i) alive_.push_back(i);
    std::vector<std::thread> actors;
    for (size_t i = 0; i < parts.size(); ++i) {
      actors.emplace_back([this, i, &part = parts[i]] {
        turns_[i]->acquire();
        part();
        std::erase(alive_, i);
        if (!alive_.empty()) turns_[Next()]->release();
      });
    }
    turns_[Next()]->release();
    for (std::thread& actor : actors) actor.join();
  }

  // By the one whose turn it is: one time in `one_in` it is perhaps another one's now.
  void MaySwitch(size_t self, uint32_t one_in) {
    if (random_() % one_in != 0) return;
    const size_t next = Next();
    if (next == self) return;
    turns_[next]->release();
    turns_[self]->acquire();
  }
  std::mt19937& random() { return random_; }
  absl::Duration now;

 private:
  size_t Next() { return alive_[random_() % alive_.size()]; }

  // All of it belongs to the one whose turn it is.
  std::mt19937 random_;
  std::vector<size_t> alive_;
  std::vector<std::unique_ptr<std::binary_semaphore>> turns_;
};

struct Actor {
  Stage* stage = nullptr;
  size_t index = 0;
  int operations_left = -1;  // before it crashes; -1: never
  bool is_dead = false;

  // Before each call that changes the disk. False: a crash came first, and nothing happens any
  // more.
  bool MayAct() {
    if (is_dead) return false;
    stage->MaySwitch(index, 4);
    if (operations_left > 0 && --operations_left == 0) is_dead = true;
    return !is_dead;
  }
};

thread_local Actor* self = nullptr;

template <typename Result>
bool Crashed(Result& result) {
  if (self == nullptr || self->MayAct()) return false;
  errno = EIO;
  result = -1;
  return true;
}

}  // namespace
}  // namespace outlast

// The calls of store/folder.h that change a disk.
extern "C" {

int open(const char* path, int flags, ...) {
  mode_t mode = 0;
  if ((flags & (O_CREAT | O_TMPFILE)) != 0) {
    va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
  }
  int result;
  if ((flags & O_CREAT) != 0 && outlast::Crashed(result)) return result;
  return static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}
ssize_t write(int fd, const void* data, size_t bytes) {
  ssize_t result;
  return outlast::Crashed(result) ? result : syscall(SYS_write, fd, data, bytes);
}
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) {
  ssize_t result;
  return outlast::Crashed(result) ? result : syscall(SYS_pwrite64, fd, data, bytes, at);
}
int fsync(int) {
  int result;
  return outlast::Crashed(result) ? result : 0;
}
int mkdir(const char* path, mode_t mode) noexcept {
  int result;
  return outlast::Crashed(result) ? result : static_cast<int>(syscall(SYS_mkdir, path, mode));
}
int link(const char* from, const char* to) noexcept {
  int result;
  return outlast::Crashed(result) ? result : static_cast<int>(syscall(SYS_link, from, to));
}
int rename(const char* from, const char* to) noexcept {
  int result;
  return outlast::Crashed(result) ? result : static_cast<int>(syscall(SYS_rename, from, to));
}
int unlink(const char* path) noexcept {
  int result;
  return outlast::Crashed(result) ? result : static_cast<int>(syscall(SYS_unlink, path));
}
int rmdir(const char* path) noexcept {
  int result;
  return outlast::Crashed(result) ? result : static_cast<int>(syscall(SYS_rmdir, path));
}
// Names of checkpoints too follow from the seed.
ssize_t getrandom(void* target, size_t bytes, unsigned flags) {
  if (outlast::self == nullptr) return syscall(SYS_getrandom, target, bytes, flags);
  auto* to = static_cast<uint8_t*>(target);
  for (size_t i = 0; i < bytes; ++i) to[i] = static_cast<uint8_t>(outlast::self->stage->random()());
  return static_cast<ssize_t>(bytes);
}

}  // extern "C"

namespace outlast {
namespace {

// --- What is true, whatever the disk says

using Rank = std::tuple<uint64_t, uint64_t, int64_t>;  // claim, generation, step

struct Facts {
  std::map<std::string, std::vector<std::string>> lineage;  // of a folder: what it was made from
  std::map<std::string, Rank> acknowledged;                 // Commit said yes
  std::map<uint64_t, Id128> claims;                         // by number
  std::map<std::string, std::string> manifests;             // text, when first seen
  std::set<std::string> damaged;
  uint64_t newest_claim = 0;
};

Rank RankOf(const CheckpointInfo& info) {
  return {info.manifest->claim, info.manifest->generation, info.manifest->step};
}

// Each candidate was made from the next: one history.
void IsOneHistory(const Facts& facts, const std::vector<std::string>& candidates) {
  for (size_t i = 0; i + 1 < candidates.size(); ++i) {
    const auto& made_from = facts.lineage.at(candidates[i]);
    EXPECT_NE(std::ranges::find(made_from, candidates[i + 1]), made_from.end())
        << candidates[i] << " was not made from " << candidates[i + 1];
  }
}

void ManifestsStay(Facts& facts, const std::string& path) {
  const std::vector<FolderEntry> entries = ListFolder(path).value();
  for (const FolderEntry& entry : entries) {
    if (!ParseCheckpointName(entry.name)) continue;
    const auto text = ReadSmall(path + "/" + entry.name + "/MANIFEST.json", kMaxManifestBytes);
    if (!text.ok() || facts.damaged.contains(entry.name)) continue;
    const auto [seen, is_new] = facts.manifests.emplace(entry.name, *text);
    EXPECT_EQ(seen->second, *text) << "a second manifest in " << entry.name;
  }
}

// Of a root that nobody works on now.
void CheckRoot(Facts& facts, const std::string& path) {
  const auto root = Root::Open(path, {.access = Access::kRead});
  if (!root.ok()) {
    EXPECT_TRUE(facts.acknowledged.empty()) << root.status();
    return;
  }
  ManifestsStay(facts, path);
  const Listing listing = (*root)->List().value();
  const auto decision = DecideStart(listing, StartMode::kResume);
  Rank newest{0, 0, -1};
  std::string newest_name;
  for (const auto& [name, rank] : facts.acknowledged) {
    if (rank > newest) newest = rank, newest_name = name;
  }
  if (newest_name.empty()) return;
  if (facts.damaged.empty()) {
    ASSERT_TRUE(decision.ok()) << decision.status();
  }
  if (!decision.ok()) return;  // all damaged: said, and no silent step 0
  ASSERT_FALSE(decision->candidates.empty()) << "a silent step 0";
  IsOneHistory(facts, decision->candidates);
  if (!facts.damaged.empty()) return;
  const auto head =
      std::ranges::find(listing.checkpoints, decision->candidates[0], &CheckpointInfo::name);
  EXPECT_GE(RankOf(*head), newest) << newest_name << " was durable; found " << head->name;
  EXPECT_TRUE(VerifyCheckpoint(path + "/" + head->name).empty());
}

// --- Invocations

class StageClock final : public Clock {
 public:
  absl::Duration Uptime() override { return self->stage->now; }
  absl::Time WallTime() override { return absl::UnixEpoch() + Uptime(); }
  void SleepFor(absl::Duration duration) override {
    self->stage->now += duration;
    self->stage->MaySwitch(self->index, 1);
  }
};

struct Plans {
  int saves = 2;
  uint32_t world = 1;
  int keep_last = 1;
  bool fresh = false;
  bool release = true;
  TakeOver take_over = TakeOver::kNo;
  int crash_after = -1;
};

// What a keeper does with a root, from its start to its end or crash.
class Invocation {
 public:
  Invocation(Facts& facts, std::string path, Id128 run, Plans plans)
      : facts_(facts), path_(std::move(path)), run_(run), plans_(plans) {}

  void Live() {
    if (!Start() || !Restore(plans_.fresh ? StartMode::kFresh : StartMode::kResume)) return;
    for (int i = 0; i < plans_.saves && !self->is_dead; ++i) {
      if (i > 0 && Chance(5)) {  // its ranks restart
        ++generation_;
        if (!Restore(committed_ || !plans_.fresh ? StartMode::kResume : StartMode::kFresh)) return;
      }
      const absl::Status saved = Save();
      if (absl::IsAborted(saved)) return;  // another run has the root
      if (Chance(2)) root_->Beat().IgnoreError();
    }
    if (plans_.release) root_->Release().IgnoreError();
  }

 private:
  bool Chance(uint32_t one_in) { return self->stage->random()() % one_in == 0; }

  bool Start() {
    OwnerIdentity owner;  // of a host that nobody can look into
    owner.host = "node-" + std::to_string(self->index);
    auto root =
        Root::Open(path_, {.run = run_, .take_over = plans_.take_over, .owner = owner}, clock_);
    if (!root.ok()) {
      EXPECT_TRUE(self->is_dead) << root.status();
      return false;
    }
    root_ = *std::move(root);
    const absl::Status claimed = root_->TakeClaim();
    if (!claimed.ok()) {
      // A claim that was made is one, though its maker died before he heard of it.
      EXPECT_TRUE(self->is_dead || absl::IsFailedPrecondition(claimed)) << claimed;
      return false;
    }
    const auto [other, is_new] = facts_.claims.emplace(root_->claim(), run_);
    EXPECT_TRUE(is_new) << "claim " << root_->claim() << " was given twice";
    facts_.newest_claim = std::max(facts_.newest_claim, root_->claim());
    const auto rolled = root_->RollForward({}, {"sim", root_->claim(), 0});
    EXPECT_TRUE(rolled.ok() || self->is_dead || absl::IsAborted(rolled.status()) ||
                root_->claim() < facts_.newest_claim)
        << rolled.status();
    return !self->is_dead;
  }

  bool Restore(StartMode mode) {
    std::set<std::string> bad;
    for (int attempt = 0; attempt < 8; ++attempt) {
      const auto listing = root_->List();
      if (!listing.ok()) return false;
      const auto decision = DecideStart(*listing, mode);
      if (!decision.ok()) {
        EXPECT_TRUE(!facts_.damaged.empty() || root_->claim() < facts_.newest_claim)
            << decision.status();
        return false;
      }
      IsOneHistory(facts_, decision->candidates);
      parent_.reset();
      history_.clear();
      step_ = 0;
      const auto next = std::ranges::find_if(decision->candidates,
                                             [&](const auto& name) { return !bad.contains(name); });
      if (next == decision->candidates.end()) return bad.empty();
      if (CheckpointReader::Open(root_->PathOf(*next)).ok()) {
        parent_ = *next;
        step_ = ParseCheckpointName(*next)->step;
        history_ = facts_.lineage.at(*next);
        history_.push_back(*next);
        return true;
      }
      bad.insert(*next);
    }
    return false;
  }

  absl::Status Save() {
    const int64_t step = step_ + 10;
    const auto name = root_->NewCheckpoint(step);
    if (!name.ok()) return name.status();
    facts_.lineage[*name] = history_;
    const bool was_fenced = root_->claim() < facts_.newest_claim;
    const absl::Status status = WriteAndCommit(*name, step);
    if (!status.ok()) {
      if (root_->CheckClaim().ok()) root_->Delete(*name).IgnoreError();
      return status;
    }
    EXPECT_FALSE(was_fenced) << "committed under a larger claim";
    facts_.acknowledged[*name] = {root_->claim(), generation_, step};
    committed_ = true;
    parent_ = *name;
    history_.push_back(*name);
    step_ = step;
    root_->WriteLatest({*name, step}).IgnoreError();
    Retire(*name);
    return absl::OkStatus();
  }

  absl::Status WriteAndCommit(const std::string& name, int64_t step) {
    Receipt receipt;
    receipt.job = root_->job();
    receipt.run = run_;
    receipt.claim = root_->claim();
    receipt.checkpoint = name;
    receipt.parent = parent_;
    receipt.step = step;
    receipt.generation = generation_;
    receipt.world = plans_.world;
    receipt.plan = std::string(64, 'a');
    for (receipt.rank = 0; receipt.rank < plans_.world; ++receipt.rank) {
      receipt.writer = receipt.rank;
      OUTLAST_RETURN_IF_ERROR(WriteReceipt(root_->PathOf(name), receipt).status());
    }
    OUTLAST_ASSIGN_OR_RETURN(Manifest manifest, root_->ComposeManifest(name, plans_.world));
    OUTLAST_ASSIGN_OR_RETURN(const Listing listing, root_->List());
    manifest.ancestors = root_->AncestorsOf(parent_, listing);
    manifest.committed_by = {"sim", root_->claim(), generation_};
    return root_->Commit(manifest);
  }

  void Retire(const std::string& newest) {
    const auto deleted = root_->Retain({.keep_last = plans_.keep_last}, {});
    if (!deleted.ok()) return;
    EXPECT_EQ(std::ranges::find(*deleted, newest), deleted->end());
    for (const std::string& name : *deleted) facts_.manifests.erase(name);
  }

  Facts& facts_;
  const std::string path_;
  const Id128 run_;
  const Plans plans_;
  StageClock clock_;
  std::unique_ptr<Root> root_;
  uint64_t generation_ = 1;
  bool committed_ = false;
  std::optional<std::string> parent_;
  std::vector<std::string> history_;
  int64_t step_ = 0;
};

// --- Schedules

class Schedule {
 public:
  explicit Schedule(uint32_t seed) : stage_(seed) {}

  void Run() {
    const int keep_last = 1 + static_cast<int>(Draw(3));
    const uint32_t world = 1 + Draw(2);
    const uint32_t phases = 1 + Draw(3);
    for (uint32_t phase = 0; phase < phases && !::testing::Test::HasFailure(); ++phase) {
      std::vector<std::function<void()>> parts;
      const uint32_t actors = 1 + Draw(3);
      for (uint32_t i = 0; i < actors; ++i) {
        Plans plans;
        plans.saves = static_cast<int>(Draw(3));
        plans.world = world;
        plans.keep_last = keep_last;
        plans.fresh = Draw(10) == 0;
        plans.release = Draw(4) != 0;
        plans.take_over = Draw(3) == 0 ? TakeOver::kYes : TakeOver::kNo;
        if (Draw(2) == 0) plans.crash_after = 1 + static_cast<int>(Draw(120));
        const Id128 run = Id128::FromName(std::to_string(++runs_));
        parts.push_back([this, i, plans, run] {
          Actor actor{&stage_, i, plans.crash_after};
          self = &actor;
          Invocation(facts_, path_, run, plans).Live();
          self = nullptr;
        });
      }
      stage_.Play(parts);
      CheckRoot(facts_, path_);
      if (Draw(8) == 0) Rot();
    }
  }

 private:
  uint32_t Draw(uint32_t below) { return stage_.random()() % below; }

  // A bit of one committed checkpoint's manifest or receipt.
  void Rot() {
    if (facts_.manifests.empty()) return;
    const auto victim =
        std::next(facts_.manifests.begin(), Draw(static_cast<uint32_t>(facts_.manifests.size())));
    const std::string name = victim->first;
    const std::string file =
        path_ + "/" + name + (Draw(2) == 0 ? "/MANIFEST.json" : "/w00000.receipt.json");
    auto text = ReadSmall(file, kMaxReceiptBytes);
    if (!text.ok() || text->empty()) return;
    const size_t bit = Draw(static_cast<uint32_t>(text->size() * 8));
    (*text)[bit / 8] = static_cast<char>((*text)[bit / 8] ^ 1 << bit % 8);
    RemoveFile(file).IgnoreError();
    EXPECT_TRUE(WriteNew(file, *text).ok());
    facts_.damaged.insert(name);
  }

  Stage stage_;
  Facts facts_;
  const TempFolder temp_{access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp"};
  const std::string path_ = temp_.path();
  int runs_ = 0;
};

class Simulator : public ::testing::TestWithParam<uint32_t> {};

TEST_P(Simulator, FindsWhatWasDurableAfterAnySchedule) {
  const bool is_replay = std::getenv("OUTLAST_SEED") != nullptr;
  const uint32_t first = testing::DrawSeed() + (is_replay ? 0 : GetParam() * kSchedules);
  for (uint32_t seed = first; seed < first + (is_replay ? 1 : kSchedules); ++seed) {
    Schedule(seed).Run();
    ASSERT_FALSE(HasFailure()) << "see it again: OUTLAST_SEED=" << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Part, Simulator, ::testing::Range(0u, kShards));

}  // namespace
}  // namespace outlast
