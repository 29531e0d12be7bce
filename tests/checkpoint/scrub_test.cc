// Bytes that a disk loses after a commit are found by reading them again, and what was found whole
// is kept.
#include "checkpoint/scrub.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/checkpoint/disk_fixture.h"
#include "tests/checkpoint/job_fixture.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kFast = uint64_t{1} << 40;  // bytes a second

CheckpointInfo Info(int64_t step, std::optional<int64_t> parent, uint64_t claim = 1) {
  const auto name = [](int64_t of) { return CheckpointName(of, 7); };
  CheckpointInfo info{.name = name(step), .step = step, .state = CheckpointState::kCommitted};
  Manifest manifest;
  manifest.checkpoint = info.name;
  manifest.step = step;
  manifest.claim = claim;
  manifest.generation = 1;
  if (parent.has_value()) manifest.parent = name(*parent);
  info.manifest = manifest;
  return info;
}

class ScrubChoiceOfThree : public ::testing::Test {
 protected:
  std::string Choose(const Scrubbed& scrubbed, absl::Duration now = absl::Hours(30)) const {
    return ChooseScrub(infos_, scrubbed, now, absl::Hours(24)).checkpoint;
  }
  std::vector<CheckpointInfo> infos_ = {Info(10, std::nullopt), Info(20, 10), Info(30, 20)};
};

TEST_F(ScrubChoiceOfThree, TakesTheNewestThatWasNeverRead) {
  EXPECT_EQ(Choose({}), infos_[2].name);
  EXPECT_EQ(Choose({{infos_[2].name, absl::Hours(1)}}), infos_[1].name);
}

TEST_F(ScrubChoiceOfThree, ThenTakesTheOneReadLongestAgoOnceAPeriodIsOver) {
  const Scrubbed all = {{infos_[0].name, absl::Hours(7)},
                        {infos_[1].name, absl::Hours(6)},
                        {infos_[2].name, absl::Hours(8)}};
  EXPECT_EQ(Choose(all, absl::Hours(29)), "");
  EXPECT_EQ(Choose(all, absl::Hours(30)), infos_[1].name);
}

TEST_F(ScrubChoiceOfThree, LeavesOutWhatNobodyWouldRestore) {
  infos_[2].quarantined = "a bad chunk";
  infos_[1].state = CheckpointState::kDamaged;
  EXPECT_EQ(Choose({}), infos_[0].name);
  infos_.push_back(Info(15, std::nullopt, 2));  // the chain of a newer claim
  EXPECT_EQ(Choose({}), infos_[3].name);
  EXPECT_EQ(Choose({{infos_[3].name, absl::Hours(20)}}), "") << "10 is abandoned now";
  infos_[0].pinned = true;
  EXPECT_EQ(Choose({{infos_[3].name, absl::Hours(20)}}), infos_[0].name);
}

TEST(Retention, KeepsTheNewestThatWasVerifiedUntilANewerOneIs) {
  const std::vector<CheckpointInfo> infos = {Info(10, std::nullopt), Info(20, 10), Info(30, 20),
                                             Info(40, 30)};
  const auto deletions = [&](std::vector<std::string> verified) {
    return ChooseDeletions(infos, {.keep_last = 1, .verified = std::move(verified)}, {});
  };
  EXPECT_THAT(deletions({infos[0].name, infos[1].name}), ElementsAre(infos[2].name, infos[0].name));
  EXPECT_THAT(deletions({infos[3].name, infos[1].name}),
              ElementsAre(infos[2].name, infos[1].name, infos[0].name));
  EXPECT_THAT(deletions({}).size(), 3u);
}

TEST(Retention, TakesNoQuarantinedOneForVerified) {
  std::vector<CheckpointInfo> infos = {Info(10, std::nullopt), Info(20, 10), Info(30, 20)};
  infos[1].quarantined = "went bad later";
  EXPECT_THAT(
      ChooseDeletions(infos, {.keep_last = 1, .verified = {infos[0].name, infos[1].name}}, {}),
      IsEmpty());
}

// --- Reading

void FlipBit(const std::string& path, size_t offset) {
  std::string text = ReadFileText(path);
  text.at(offset) = static_cast<char>(text.at(offset) ^ 4);
  WriteFileText(path, text);
}

class ScrubberTest : public ::testing::Test {
 protected:
  ScrubberTest() {
    ranks_.resize(2);
    for (OwnedState& rank : ranks_) rank.Add("wte", DType::kF32, {700, 512});
    for (const int64_t step : {10, 20, 30}) {
      SaveOptions options;
      if (!names_.empty()) options.parent = names_.back();
      names_.push_back(Save(*root_, step, ranks_, options).value());
    }
    options_.bytes_per_second = kFast;
    options_.on_damaged = [this](const std::string& checkpoint, const std::string& reason) {
      MutexLock lock(mutex_);
      damaged_.emplace_back(checkpoint, reason);
    };
  }
  // Until all three were judged.
  void Await(const Scrubber& scrubber) {
    const int64_t deadline = MonotonicNanos() + 30'000'000'000;
    const auto judged = [&] {
      MutexLock lock(mutex_);
      return damaged_.size() + scrubber.Verified().size();
    };
    while (judged() < 3 && MonotonicNanos() < deadline) absl::SleepFor(absl::Milliseconds(1));
  }

  TempFolder folder_;
  std::unique_ptr<Root> root_ = OpenRoot(folder_ / "root");
  std::vector<OwnedState> ranks_;
  std::vector<std::string> names_;
  ScrubOptions options_;
  Mutex mutex_;
  std::vector<std::pair<std::string, std::string>> damaged_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(ScrubberTest, FindsWholeWhatIsWhole) {
  Scrubber scrubber(*root_, options_);
  scrubber.Resume();
  Await(scrubber);
  EXPECT_THAT(scrubber.Verified(), ElementsAre(names_[0], names_[1], names_[2]));
}

TEST_F(ScrubberTest, NamesAFlippedBitByFileAndChunk) {
  FlipBit(root_->PathOf(names_[1]) + "/w00000.safetensors", 400'000);
  Scrubber scrubber(*root_, options_);
  scrubber.Resume();
  Await(scrubber);
  EXPECT_THAT(scrubber.Verified(), ElementsAre(names_[0], names_[2]));
  MutexLock lock(mutex_);
  ASSERT_EQ(damaged_.size(), 1u);
  EXPECT_EQ(damaged_[0].first, names_[1]);
  EXPECT_THAT(damaged_[0].second, HasSubstr("w00000.safetensors: the chunk at byte 0 has crc"));
}

TEST_F(ScrubberTest, ReadsNothingWhileItIsPaused) {
  Scrubber scrubber(*root_, options_);  // paused as it starts
  absl::SleepFor(absl::Milliseconds(30));
  EXPECT_THAT(scrubber.Verified(), IsEmpty());
}

TEST_F(ScrubberTest, KeepsToItsRateAndEndsAtOnce) {
  options_.bytes_per_second = 1000;  // an hour for one of them
  const int64_t started = MonotonicNanos();
  {
    Scrubber scrubber(*root_, options_);
    scrubber.Resume();
    absl::SleepFor(absl::Milliseconds(50));
    EXPECT_THAT(scrubber.Verified(), IsEmpty());
  }
  EXPECT_LT(MonotonicNanos() - started, 20'000'000'000);
}

// A job whose checkpoint of step 10 loses a bit behind its back.
TEST(ScrubbedJob, PutsADamagedCheckpointInQuarantineAndGoesOn) {
  TempFolder folder;
  Seen seen;
  JobSpec spec;
  spec.steps = 30;
  spec.checkpoints = {.uri = folder / "root", .every = Every::Steps(10), .keep_last = 9};
  spec.checkpoints.scrub_bytes_per_second = kFast;
  std::atomic<int64_t> durable{0};
  seen.on_durable = [&](int64_t step) {
    if (step == 10) {  // on the loop's thread: before the scrubber may go on
      const std::vector<FolderEntry> entries = ListFolder(folder / "root").value();
      for (const FolderEntry& entry : entries)
        if (entry.name.starts_with("step-000000000010-"))
          FlipBit(folder / ("root/" + entry.name + "/w00000.safetensors"), 5000);
    }
    durable = step;
  };
  spec.at_step = [&](LocalWorld&, outlast::Run& run, int64_t step) {
    const int64_t deadline = MonotonicNanos() + 20'000'000'000;
    while (step == 19 && durable < 10 && MonotonicNanos() < deadline)
      absl::SleepFor(absl::Milliseconds(1));
    const std::string mark = folder / "root/QUARANTINE.json";
    while (step == 25 && run.rank() == 0 && !Exists(mark).value() && MonotonicNanos() < deadline)
      absl::SleepFor(absl::Milliseconds(1));
  };
  RunJob(spec, seen);
  EXPECT_EQ(seen.result.exit_code, 0) << seen.result.reason;
  EXPECT_THAT(seen.notes, ::testing::Contains(::testing::AllOf(
                              HasSubstr("checkpoint step-000000000010-"),
                              HasSubstr("is damaged on disk"), HasSubstr("w00000.safetensors"))));
  const auto root = Root::Open(folder / "root", {.access = Access::kRead}).value();
  const Listing listing = root->List().value();
  for (const CheckpointInfo& info : listing.checkpoints)
    EXPECT_EQ(!info.quarantined.empty(), info.step == 10) << info.name;
}

}  // namespace
}  // namespace outlast
