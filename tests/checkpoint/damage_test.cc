// Case O14, D25: a bit flipped anywhere, a file cut, extended or gone, in any file of a root: it is
// found by name, the older checkpoint is restored, and nothing wrong is ever taken for right.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "tests/checkpoint/disk_fixture.h"
#include "tests/support/seed.h"

namespace outlast {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

#ifdef OUTLAST_SANITIZED
constexpr int kRounds = 8;
#else
constexpr int kRounds = 150;
#endif

constexpr const char* kFiles[] = {"MANIFEST.json", "w00000.receipt.json", "w00001.receipt.json",
                                  "w00000.safetensors", "w00001.safetensors"};

std::vector<OwnedState> StateOf(int64_t step) {
  std::vector<OwnedState> ranks(2);
  for (int64_t rank = 0; rank < 2; ++rank) {
    OwnedState& state = ranks[static_cast<size_t>(rank)];
    state.Add("rows", DType::kF32, {64, 8}, Box{{rank * 32, 0}, {32, 8}});
    state.Add("shared" + std::to_string(step), DType::kBF16, {48});
    state.view().extras = {{"cursor", "{\"step\":" + std::to_string(step) + "}"}};
  }
  return ranks;
}

// What a job would come back with.
struct Resumed {
  std::string name;    // empty: step 0
  std::string said;    // of what was passed over
  absl::Status error;  // it would not start
};

bool RestoresAs(const std::string& folder, int64_t step, std::string& said) {
  const auto reader = CheckpointReader::Open(folder);
  absl::Status status = reader.status();
  for (const OwnedState& rank : StateOf(step)) {
    if (!status.ok()) break;
    OwnedState blank = rank.Blank();
    status = (*reader)->ReadState(blank.view()).status();
    if (status.ok()) {
      EXPECT_EQ(blank.Digest(), rank.Digest()) << "wrong bytes, taken for right";
    }
  }
  if (!status.ok()) said += std::string(MessageOf(status)) + "\n";
  return status.ok();
}

// As the keeper chooses: the candidates, newest first, until one restores whole.
Resumed Resume(const std::string& path) {
  Resumed resumed;
  const auto root = Root::Open(path, {.run = Id128::FromName("next")});
  if (!root.ok()) return {"", "", root.status()};
  const Listing listing = (*root)->List().value();
  const auto decision = DecideStart(listing, StartMode::kResume);
  if (!decision.ok()) return {"", "", decision.status()};
  for (const std::string& skipped : decision->skipped) resumed.said += skipped + "\n";
  for (const std::string& name : decision->candidates) {
    resumed.name = name;
    if (RestoresAs((*root)->PathOf(name), ParseCheckpointName(name)->step, resumed.said))
      return resumed;
  }
  resumed.name.clear();
  return resumed;
}

// A root with whole checkpoints of step 10 and 20, the latter to be damaged.
class Damaged : public ::testing::Test {
 protected:
  void SetUp() override { Make({.run = Id128::FromName("run")}); }
  void Make(RootOptions options) {
    auto root = Root::Open(folder_.path(), std::move(options)).value();
    ASSERT_TRUE(root->TakeClaim().ok());
    older_ = Save(*root, 10, StateOf(10)).value();
    newest_ = Save(*root, 20, StateOf(20), {.parent = older_}).value();
    ASSERT_TRUE(root->WriteLatest({newest_, 20}).ok());
    ASSERT_TRUE(root->Release().ok());
    ASSERT_EQ(Resume(folder_.path()).name, newest_);
    ASSERT_TRUE(VerifyCheckpoint(PathOf("")).empty());
  }
  std::string PathOf(const std::string& file) const {
    return folder_ / (newest_ + (file.empty() ? "" : "/" + file));
  }

  // Found by `verify`, in that file, and passed over by name for the older one.
  void IsFoundAndPassedOver(const std::string& file) {
    const std::vector<Damage> damages = VerifyCheckpoint(PathOf(""));
    ASSERT_FALSE(damages.empty()) << "verify finds nothing";
    EXPECT_THAT(damages.front().message, HasSubstr(file));
    const Resumed resumed = Resume(folder_.path());
    ASSERT_TRUE(resumed.error.ok()) << resumed.error;
    EXPECT_EQ(resumed.name, older_);
    EXPECT_THAT(resumed.said, AnyOf(HasSubstr(newest_ + ": "), HasSubstr(newest_ + "/")));
    EXPECT_THAT(resumed.said, HasSubstr(file));
  }

  // `damage` of each file, many times; the file is whole again each time.
  void EachFile(const std::function<std::string(std::string whole, std::mt19937& random,
                                                std::string& what)>& damage) {
    std::mt19937 random(testing::DrawSeed());
    for (const char* file : kFiles) {
      const std::string whole = ReadFileText(PathOf(file));
      for (int round = 0; round < kRounds; ++round) {
        std::string what;
        WriteFileText(PathOf(file), damage(whole, random, what));
        SCOPED_TRACE(std::string(file) + ": " + what);
        IsFoundAndPassedOver(file);
        if (HasFailure()) return;
      }
      WriteFileText(PathOf(file), whole);
    }
    EXPECT_EQ(Resume(folder_.path()).name, newest_);
  }

  TempFolder folder_;
  std::string older_, newest_;
};

std::string Flipped(std::string text, std::mt19937& random, std::string& what) {
  const size_t bit = random() % (text.size() * 8);
  text[bit / 8] = static_cast<char>(text[bit / 8] ^ 1 << bit % 8);
  what = "bit " + std::to_string(bit % 8) + " of byte " + std::to_string(bit / 8);
  return text;
}

TEST_F(Damaged, ByOneBitAnywhereIsFoundAndPassedOver) { EachFile(Flipped); }

TEST_F(Damaged, ByACutOrAnExtensionIsFoundAndPassedOver) {
  EachFile([](std::string text, std::mt19937& random, std::string& what) {
    const bool cut = random() % 2 == 0;
    const size_t bytes = cut ? random() % text.size() : text.size() + 1 + random() % 5000;
    what = std::to_string(bytes) + " bytes of " + std::to_string(text.size());
    const char fill = random() % 2 == 0 ? '\0' : static_cast<char>(random());
    text.resize(bytes, fill);
    return text;
  });
}

TEST_F(Damaged, ByAFileThatIsGoneIsFoundAndPassedOver) {
  for (const char* file : kFiles) {
    if (std::string(file) == "MANIFEST.json") continue;  // then it was never committed
    const std::string whole = ReadFileText(PathOf(file));
    ASSERT_EQ(unlink(PathOf(file).c_str()), 0);
    SCOPED_TRACE(file);
    IsFoundAndPassedOver(file);
    WriteFileText(PathOf(file), whole);
  }
}

TEST_F(Damaged, BesideAnotherDamagedOneIsRefusedByTheNamesOfBoth) {
  std::mt19937 random(testing::DrawSeed());
  std::string what;
  for (const std::string& name : {older_, newest_}) {
    const std::string path = folder_ / (name + "/MANIFEST.json");
    WriteFileText(path, Flipped(ReadFileText(path), random, what));
  }
  const Resumed resumed = Resume(folder_.path());
  EXPECT_EQ(resumed.error.code(), absl::StatusCode::kFailedPrecondition) << "never a silent 0";
  EXPECT_THAT(std::string(MessageOf(resumed.error)), HasSubstr(older_ + ": MANIFEST.json"));
  EXPECT_THAT(std::string(MessageOf(resumed.error)), HasSubstr(newest_ + ": MANIFEST.json"));
}

// --- Files of the root

class DamagedRoot : public Damaged, public ::testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override { Make({.job_name = GetParam(), .run = Id128::FromName("run")}); }
};

// Every bit of it: refused by name, or every checkpoint is another job's. Never another history,
// never step 0.
TEST_P(DamagedRoot, ByOneBitOfItsRecordIsRefused) {
  const std::string path = folder_ / "OUTLAST.json";
  const std::string whole = ReadFileText(path);
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string text = whole;
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ 1 << bit % 8);
    WriteFileText(path, text);
    const Resumed resumed = Resume(folder_.path());
    ASSERT_FALSE(resumed.error.ok()) << text << resumed.name;
    ASSERT_THAT(std::string(MessageOf(resumed.error)),
                AnyOf(HasSubstr("OUTLAST.json"), HasSubstr(newest_ + ": of job ")));
  }
  // Whoever removes the record gets it back from the manifests.
  ASSERT_EQ(unlink(path.c_str()), 0);
  EXPECT_EQ(Resume(folder_.path()).name, newest_);
}

INSTANTIATE_TEST_SUITE_P(Job, DamagedRoot, ::testing::Values("", "gpt"),
                         [](const auto& job) { return job.index == 0 ? "Drawn" : "Named"; });

// They say who may write, not what is whole: the newest is restored, the next claim is the next
// number, and a claim that says nothing is named.
TEST_F(Damaged, InItsClaimsRestoresTheNewestAndIsClaimedAgain) {
  std::mt19937 random(testing::DrawSeed());
  for (const char* file : {"claims/1", "claims/1.beat"}) {
    const std::string whole = ReadFileText(folder_ / file);
    for (int round = 0; round < kRounds / 4; ++round) {
      std::string what;
      WriteFileText(folder_ / file, Flipped(whole, random, what));
      SCOPED_TRACE(std::string(file) + ": " + what);
      ASSERT_EQ(Resume(folder_.path()).name, newest_);
      const auto root = Root::Open(folder_.path(), {.run = Id128::FromName("next")}).value();
      const Listing listing = root->List().value();
      if (!listing.claims[0].claim.has_value()) {
        EXPECT_THAT(listing.notes, ::testing::ElementsAre(HasSubstr("claims/1: ")));
      }
      ASSERT_TRUE(root->TakeClaim().ok());
      ASSERT_EQ(root->claim(), 2u);
      for (const char* made : {"claims/2", "claims/2.beat"})
        ASSERT_EQ(unlink((folder_ / made).c_str()), 0);
    }
    WriteFileText(folder_ / file, whole);
  }
}

TEST_F(Damaged, InItsHintsRestoresTheNewest) {
  std::mt19937 random(testing::DrawSeed());
  const std::string path = folder_ / "LATEST.json";
  const std::string whole = ReadFileText(path);
  for (int round = 0; round < kRounds / 4; ++round) {
    std::string what;
    WriteFileText(path, Flipped(whole, random, what));
    ASSERT_EQ(Resume(folder_.path()).name, newest_) << what;
  }
}

}  // namespace
}  // namespace outlast
