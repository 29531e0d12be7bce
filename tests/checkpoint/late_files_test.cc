// K11: what a manifest names may appear late (NFS, Lustre; NeMo Speech#8153, DeepSpeed#4536).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <thread>

#include "checkpoint/reader.h"
#include "outlast/base/clock.h"
#include "tests/checkpoint/disk_fixture.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class LateFiles : public ::testing::TestWithParam<const char*> {
 protected:
  LateFiles() {
    ranks_.resize(2);
    for (OwnedState& rank : ranks_) rank.Add("wte", DType::kF32, {700, 512});
    name_ = Save(*root_, 10, ranks_).value();
    root_->Release().IgnoreError();
  }
  ~LateFiles() override {
    if (appears_.joinable()) appears_.join();
  }
  std::string file() const { return root_->PathOf(name_) + "/" + GetParam(); }
  // The file is gone, and comes back in a moment.
  void Hide() { ASSERT_EQ(rename(file().c_str(), (folder_ / "hidden").c_str()), 0); }
  void AppearSoon() {
    appears_ = std::thread([this] {
      absl::SleepFor(absl::Milliseconds(150));
      (void)rename((folder_ / "hidden").c_str(), file().c_str());
    });
  }
  std::unique_ptr<Root> Open(absl::Duration wait) {
    return Root::Open(folder_ / "root", {.access = Access::kRead, .late_names = wait}).value();
  }

  TempFolder folder_;
  std::unique_ptr<Root> root_ = OpenRoot(folder_ / "root");
  std::vector<OwnedState> ranks_;
  std::string name_;
  std::thread appears_;
};

INSTANTIATE_TEST_SUITE_P(Names, LateFiles,
                         ::testing::Values("w00001.receipt.json", "w00000.safetensors"),
                         [](const auto& param) {
                           return std::string(param.index == 0 ? "receipt" : "shard");
                         });

TEST_P(LateFiles, AreWaitedForByARestore) {
  Hide();
  AppearSoon();
  const Listing listing = Open(absl::Seconds(20))->List().value();
  EXPECT_EQ(listing.checkpoints.at(0).state, CheckpointState::kCommitted)
      << listing.checkpoints.at(0).reason;
  EXPECT_THAT(DecideStart(listing, StartMode::kResume)->candidates, ::testing::ElementsAre(name_));
}

TEST_P(LateFiles, AreWaitedForByAReader) {
  Hide();
  AppearSoon();
  const auto reader = CheckpointReader::Open(root_->PathOf(name_), absl::Seconds(20));
  ASSERT_TRUE(reader.ok()) << reader.status();
  OwnedState blank = ranks_[0].Blank();
  EXPECT_TRUE((*reader)->ReadState(blank.view()).ok());
  EXPECT_EQ(blank.Digest(), ranks_[0].Digest());
}

TEST_P(LateFiles, AreWaitedForByVerify) {
  Hide();
  AppearSoon();
  EXPECT_THAT(VerifyCheckpoint(root_->PathOf(name_), IoMode::kDirect, {}, absl::Seconds(20)),
              IsEmpty());
}

TEST_P(LateFiles, AreMissingAfterTheDeadlineAndNamed) {
  Hide();
  const Listing listing = Open(absl::Milliseconds(50))->List().value();
  EXPECT_EQ(listing.checkpoints.at(0).state, CheckpointState::kDamaged);
  EXPECT_THAT(listing.checkpoints.at(0).reason, HasSubstr(GetParam()));
  const auto damages =
      VerifyCheckpoint(root_->PathOf(name_), IoMode::kDirect, {}, absl::Milliseconds(50));
  ASSERT_FALSE(damages.empty());
  EXPECT_THAT(damages[0].message, HasSubstr(GetParam()));
}

// A manifest that appears after its folder was listed: the rank that restores was told of it.
TEST_P(LateFiles, ManifestIsWaitedForByAReader) {
  const std::string manifest = root_->PathOf(name_) + "/MANIFEST.json";
  ASSERT_EQ(rename(manifest.c_str(), (folder_ / "hidden").c_str()), 0);
  appears_ = std::thread([&] {
    absl::SleepFor(absl::Milliseconds(100));
    (void)rename((folder_ / "hidden").c_str(), manifest.c_str());
  });
  EXPECT_TRUE(CheckpointReader::Open(root_->PathOf(name_), absl::Seconds(20)).ok());
  appears_.join();
}

}  // namespace
}  // namespace outlast
