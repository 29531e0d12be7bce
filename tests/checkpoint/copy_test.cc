#include "checkpoint/copy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/root_hold.h"
#include "tests/checkpoint/disk_fixture.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CopyTest : public ::testing::Test {
 protected:
  CopyTest() {
    ranks_.resize(2);
    for (OwnedState& rank : ranks_) {
      rank.Add("wte", DType::kF32, {700, 512});  // 1.4 MB: more than one chunk
      rank.view().extras = {{"cursor", R"({"samples":7})"}};
    }
    name_ = Save(*source_, 10, ranks_).value();
    reader_ = CheckpointReader::Open(source_->PathOf(name_)).value();
  }
  std::unique_ptr<Root> Target(const std::string& name) {
    auto root = Root::Open(folder_ / name, {.job = source_->job()}).value();
    EXPECT_TRUE(root->TakeClaim().ok());
    return root;
  }

  TempFolder folder_;
  std::unique_ptr<Root> source_ = OpenRoot(folder_ / "source");
  std::vector<OwnedState> ranks_;
  std::string name_;
  std::unique_ptr<CheckpointReader> reader_;
};

TEST_F(CopyTest, MakesTheSameFilesOfEachByte) {
  ASSERT_TRUE(source_->Pin(name_).ok());
  const auto target = Target("target");
  uint64_t seen = 0;

  const CopyResult result =
      CopyCheckpoint(*reader_, *target, [&](uint64_t bytes) { seen += bytes; }).value();

  EXPECT_FALSE(result.was_there);
  EXPECT_EQ(seen, 2 * result.bytes) << "written, and read back";
  for (const std::string file : {"w00000.safetensors", "w00001.safetensors", "w00000.receipt.json",
                                 "w00001.receipt.json", "MANIFEST.json"}) {
    EXPECT_EQ(ReadFileText(target->PathOf(name_) + "/" + file),
              ReadFileText(source_->PathOf(name_) + "/" + file))
        << file;
  }
  EXPECT_THAT(VerifyCheckpoint(target->PathOf(name_)), IsEmpty());
  EXPECT_FALSE(target->List()->checkpoints[0].pinned) << "a pin is of one root";
}

// Orbax#394: a copied checkpoint is valid as it is, without a marker.
TEST_F(CopyTest, IsACheckpointToRestoreFrom) {
  const auto target = Target("target");
  ASSERT_TRUE(CopyCheckpoint(*reader_, *target).ok());
  EXPECT_THAT(DecideStart(target->List().value(), StartMode::kResume)->candidates,
              ElementsAre(name_));
}

TEST_F(CopyTest, LeavesACopyThatIsThereAsItIs) {
  const auto target = Target("target");
  ASSERT_TRUE(CopyCheckpoint(*reader_, *target).ok());
  EXPECT_TRUE(CopyCheckpoint(*reader_, *target)->was_there);

  const std::string shard = target->PathOf(name_) + "/w00001.safetensors";
  std::string content = ReadFileText(shard);
  content.back() ^= 1;
  WriteFileText(shard, content);
  EXPECT_EQ(CopyCheckpoint(*reader_, *target).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(CopyTest, BeginsAnewWhereABrokenCopyLies) {
  const auto target = Target("target");
  ASSERT_TRUE(MakeFolder(target->PathOf(name_)).ok());
  WriteFileText(target->PathOf(name_) + "/w00000.safetensors", "half");
  EXPECT_FALSE(CopyCheckpoint(*reader_, *target)->was_there);
  EXPECT_THAT(VerifyCheckpoint(target->PathOf(name_)), IsEmpty());
}

TEST_F(CopyTest, RefusesAnotherJobsRoot) {
  const auto foreign = OpenRoot(folder_ / "foreign");
  const absl::Status status = CopyCheckpoint(*reader_, *foreign).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(MessageOf(status)), HasSubstr("foreign"));
  EXPECT_THAT(foreign->List()->checkpoints, IsEmpty());
}

TEST_F(CopyTest, RefusesAnotherCheckpointOfItsName) {
  const auto target = Target("target");
  ASSERT_TRUE(CopyCheckpoint(*reader_, *target).ok());
  // The same name, of another save.
  Manifest manifest = ParseManifest(ReadFileText(target->PathOf(name_) + "/MANIFEST.json")).value();
  manifest.receipts[0].crc32c ^= 1;
  WriteFileText(target->PathOf(name_) + "/MANIFEST.json", ToText(manifest).value());
  EXPECT_EQ(CopyCheckpoint(*reader_, *target).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(CopyTest, LeavesNothingOfADamagedSource) {
  const std::string shard = source_->PathOf(name_) + "/w00001.safetensors";
  std::string content = ReadFileText(shard);
  content[content.size() / 2] ^= 1;
  WriteFileText(shard, content);
  const auto target = Target("target");
  const absl::Status status = CopyCheckpoint(*reader_, *target).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(MessageOf(status)), HasSubstr("w00001.safetensors"));
  EXPECT_FALSE(Exists(target->PathOf(name_)).value());
}

TEST_F(CopyTest, CommitsNothingOnceAnotherRunTookTheRoot) {
  const auto target = Target("target");
  auto other = Root::Open(folder_ / "target", {.take_over = TakeOver::kYes}).value();
  ASSERT_TRUE(other->TakeClaim().ok());
  EXPECT_EQ(CopyCheckpoint(*reader_, *target).status().code(), absl::StatusCode::kAborted);
  EXPECT_FALSE(Exists(target->PathOf(name_)).value());
}

TEST(RootHold, ClaimsAndReleasesAndFinishesWhatACrashLeft) {
  TempFolder folder;
  std::string name;
  {
    const auto crashed = OpenRoot(folder.path());
    std::vector<OwnedState> ranks(1);
    ranks[0].Add("t", DType::kF32, {4});
    name = Save(*crashed, 5, ranks, {.commit = false}).value();
    ASSERT_TRUE(crashed->Release().ok());
  }
  {
    const auto hold = RootHold::Take(folder.path(), {}).value();
    EXPECT_EQ(hold->root().claim(), 2u);
    EXPECT_THAT(hold->rolled_forward(), ElementsAre(name));
    EXPECT_TRUE(Exists(folder / "claims/2.beat").value());
    EXPECT_FALSE(Exists(folder / "claims/2.released").value());
  }
  EXPECT_TRUE(Exists(folder / "claims/2.released").value());
}

}  // namespace
}  // namespace outlast
