// Where a run is told to begin, by --restore-from: the decision, without a disk.
#include "checkpoint/start_point.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "outlast/base/status.h"
#include "tests/support/temp_folder.h"

namespace outlast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Name(int64_t step, uint32_t nonce) { return CheckpointName(step, nonce); }

// Nonces tell checkpoints of one step apart.
CheckpointInfo Info(int64_t step, uint32_t nonce, uint64_t claim,
                    std::optional<std::string> parent = std::nullopt) {
  CheckpointInfo info;
  info.name = Name(step, nonce);
  info.step = step;
  info.state = CheckpointState::kCommitted;
  info.manifest.emplace();
  info.manifest->checkpoint = info.name;
  info.manifest->step = step;
  info.manifest->claim = claim;
  info.manifest->generation = 1;
  info.manifest->parent = std::move(parent);
  return info;
}

// Claim 1 made 10, 20, 30; claim 2 went back to 10 and made 20 and 25.
Listing TwoHistories() {
  Listing listing;
  listing.checkpoints = {Info(10, 1, 1), Info(20, 1, 1, Name(10, 1)), Info(20, 2, 2, Name(10, 1)),
                         Info(25, 2, 2, Name(20, 2)), Info(30, 1, 1, Name(20, 1))};
  return listing;
}

TEST(DecideStartAt, TakesTheStepOfTheChainBeforeOneOffIt) {
  const auto start = DecideStartAt(TwoHistories(), 20);
  ASSERT_TRUE(start.ok()) << start.status();
  EXPECT_THAT(start->candidates, ElementsAre(Name(20, 2), Name(20, 1)));
  EXPECT_THAT(start->skipped, ElementsAre(Name(25, 2) + ": of the former history, that goes on "
                                                        "behind step 20"));
}

TEST(DecideStartAt, GoesBackToAHistoryThatWasLeftBehind) {
  const auto start = DecideStartAt(TwoHistories(), 30);
  ASSERT_TRUE(start.ok()) << start.status();
  EXPECT_THAT(start->candidates, ElementsAre(Name(30, 1)));
}

TEST(DecideStartAt, NamesTheStepsThatAreThereWhenTheOneWantedIsNot) {
  const auto start = DecideStartAt(TwoHistories(), 15);
  EXPECT_EQ(start.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(MessageOf(start.status()),
            "--restore-from 15: no checkpoint of step 15, there are steps 30, 25, 20, 10");
  EXPECT_THAT(std::string(MessageOf(DecideStartAt({}, 15).status())),
              HasSubstr("there is no usable checkpoint at all"));
}

TEST(DecideStartAt, NeverTakesAnotherStepForOneThatIsDamaged) {
  Listing listing = TwoHistories();
  listing.checkpoints[1].state = CheckpointState::kDamaged;
  listing.checkpoints[1].reason = "w00000.safetensors: 3 bytes";
  listing.checkpoints[2].quarantined = "bad chunk";
  const auto start = DecideStartAt(listing, 20);
  EXPECT_EQ(start.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(MessageOf(start.status())),
              AllOf(HasSubstr("--restore-from 20: not usable: "), HasSubstr("bad chunk"),
                    HasSubstr("3 bytes"), HasSubstr("there are steps 30, 25, 10")));
  listing.checkpoints[2].quarantined.clear();
  EXPECT_THAT(DecideStartAt(listing, 20)->candidates, ElementsAre(Name(20, 2)));
}

// What the run then writes is the newest claim's, whose chain begins at the older step.
TEST(DecideStartAt, BeginsAChainThatLeavesTheLaterStepsBehind) {
  Listing listing = TwoHistories();
  listing.checkpoints.push_back(Info(24, 3, 3, DecideStartAt(listing, 20)->candidates.front()));
  const auto next = DecideStart(listing, StartMode::kResume);
  ASSERT_TRUE(next.ok());
  EXPECT_THAT(next->candidates, ElementsAre(Name(24, 3), Name(20, 2), Name(10, 1)));
}

TEST(ParseStartPoint, TakesLatestAStepOrAFolder) {
  EXPECT_TRUE(ParseStartPoint("latest")->is_latest());
  EXPECT_EQ(ParseStartPoint("120")->step, 120);
  const TempFolder temp;
  const std::string& folder = temp.path();
  EXPECT_EQ(ParseStartPoint(folder + "/")->folder, folder);
  EXPECT_EQ(ParseStartPoint("file://" + folder)->folder, folder);
  std::filesystem::create_directory(folder + "/7");
  EXPECT_EQ(ParseStartPoint(folder + "/./7")->folder, folder + "/7");
  for (const std::string odd : {"", "-1", "1.5", "lastest", "99999999999999999999", "s3://b/k"}) {
    const auto refused = ParseStartPoint(odd);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << odd;
    EXPECT_THAT(std::string(MessageOf(refused.status())),
                HasSubstr("--restore-from '" + odd + "': latest, a step of the checkpoint root, "));
  }
}

TEST(FindElsewhere, SaysWhatIsNoRoot) {
  const TempFolder temp;
  const auto found = FindElsewhere(temp.path());
  EXPECT_FALSE(found.ok());
  EXPECT_THAT(std::string(MessageOf(found.status())),
              HasSubstr("--restore-from '" + temp.path() + "'"));
  EXPECT_THAT(std::filesystem::is_empty(temp.path()), true) << "it is only read";
}

}  // namespace
}  // namespace outlast
