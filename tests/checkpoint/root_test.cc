#include "checkpoint/root.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <utime.h>

#include <algorithm>
#include <functional>
#include <thread>

#include "tests/checkpoint/disk_fixture.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

std::vector<OwnedState> SmallState(int ranks = 1, int64_t salt = 0) {
  std::vector<OwnedState> states(static_cast<size_t>(ranks));
  for (OwnedState& state : states) {
    state.Add("wte" + std::to_string(salt), DType::kF32, {64, 8});
    state.Add("bias", DType::kBF16, {16});
    state.view().extras = {{"cursor", R"({"samples":7})"}};
  }
  return states;
}

std::vector<int64_t> ChainSteps(const Root& root) {
  const Listing listing = root.List().value();
  std::vector<int64_t> steps;
  for (const size_t i : ResolveChain(listing.checkpoints).members)
    steps.push_back(listing.checkpoints[i].step);
  return steps;
}

// A chain of checkpoints at these steps; their names.
std::vector<std::string> SaveAll(Root& root, std::initializer_list<int64_t> steps) {
  std::vector<std::string> names;
  for (const int64_t step : steps) {
    SaveOptions options;
    if (!names.empty()) options.parent = names.back();
    auto name = Save(root, step, SmallState(), options);
    EXPECT_TRUE(name.ok()) << name.status();
    names.push_back(*name);
  }
  return names;
}

const CheckpointInfo& Find(const Listing& listing, const std::string& name) {
  return *std::ranges::find(listing.checkpoints, name, &CheckpointInfo::name);
}

TEST(Root, DrawsTheJobOnceAndKeepsIt) {
  TempFolder folder;
  const Id128 job = OpenRoot(folder / "a/b")->job();
  EXPECT_EQ(Root::Open("file://" + folder.path() + "/a/b/", {})->get()->job(), job);
  EXPECT_EQ(ParseRootRecord(ReadFileText(folder / "a/b/OUTLAST.json"))->job, job);
}

TEST(Root, TakesTheJobIdFromItsName) {
  TempFolder folder;
  const auto root = Root::Open(folder.path(), {.job_name = "gpt"}).value();
  EXPECT_EQ(root->job(), Id128::FromName("gpt"));
  EXPECT_EQ(root->job_name(), "gpt");
  EXPECT_EQ(Root::Open(folder.path(), {}).value()->job_name(), "gpt");

  const absl::Status foreign = Root::Open(folder.path(), {.job_name = "other"}).status();
  EXPECT_EQ(foreign.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(MessageOf(foreign)), HasSubstr("foreign"));
}

TEST(Root, AdoptsTheIdOfItsManifestsWhenOutlastJsonIsLost) {
  TempFolder folder;
  Id128 job;
  {
    const auto root = OpenRoot(folder.path());
    job = root->job();
    SaveAll(*root, {1});
  }
  ASSERT_EQ(unlink((folder / "OUTLAST.json").c_str()), 0);
  EXPECT_EQ(Root::Open(folder.path(), {.access = Access::kRead}).value()->job(), job);
  EXPECT_EQ(Root::Open(folder.path(), {}).value()->job(), job);
  EXPECT_EQ(ParseRootRecord(ReadFileText(folder / "OUTLAST.json"))->job, job);
}

TEST(Root, RefusesOtherSchemesAndFoldersThatAreNone) {
  TempFolder folder;
  EXPECT_EQ(Root::Open("s3://bucket/x", {}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Root::Open("", {}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Root::Open(folder.path(), {.access = Access::kRead}).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(Root::Open(folder / "none", {.access = Access::kRead}).status().code(),
            absl::StatusCode::kNotFound);
  WriteFileText(folder / "file", "x");
  EXPECT_EQ(Root::Open(folder / "file", {}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Root, RefusesAForeignManifest) {
  TempFolder folder, other;
  const auto mine = OpenRoot(folder.path());
  const auto theirs = OpenRoot(other.path());
  const std::string name = SaveAll(*theirs, {7})[0];
  ASSERT_EQ(rename((other / name).c_str(), (folder / name).c_str()), 0);

  const Listing listing = mine->List().value();
  EXPECT_EQ(Find(listing, name).state, CheckpointState::kForeign);
  EXPECT_EQ(DecideStart(listing, StartMode::kResume).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

// Not damage that an older one could stand in for: it is what the job has reached.
TEST(Root, OfANewerProgramIsRefusedByNameAndLeftAsItIs) {
  TempFolder folder;
  std::string name;
  {
    const auto root = OpenRoot(folder.path());
    name = SaveAll(*root, {1, 2}).back();
    ASSERT_TRUE(root->Release().ok());
  }
  const std::string manifest = folder / (name + "/MANIFEST.json");
  WriteFileText(manifest, Forged(ReadFileText(manifest), "\"version\":1", "\"version\":2"));

  const auto root = Root::Open(folder.path(), {.run = Id128::FromName("later")}).value();
  const Listing listing = root->List().value();
  EXPECT_EQ(Find(listing, name).state, CheckpointState::kNewer);
  for (const absl::Status& status :
       {root->TakeClaim(), DecideStart(listing, StartMode::kResume).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(std::string(MessageOf(status)), HasSubstr(name));
    EXPECT_THAT(std::string(MessageOf(status)), HasSubstr("version 2, this program reads 1"));
  }
  EXPECT_FALSE(Exists(folder / "claims/2").value());
  EXPECT_TRUE(root->Retain({.keep_last = 1}, {}).value().empty());
  EXPECT_TRUE(Exists(manifest).value());

  // A flipped bit is damage, whatever it makes of the version.
  std::string torn = Forged(ReadFileText(manifest), "\"version\":2", "\"version\":1");
  torn[torn.find("\"version\":1") + 10] = '3';
  WriteFileText(manifest, torn);
  EXPECT_EQ(Find(root->List().value(), name).state, CheckpointState::kDamaged);
}

TEST(Claim, CountsUpAndIsTakenAtOnceAfterARelease) {
  TempFolder folder;
  const auto first = OpenRoot(folder.path(), "one");
  EXPECT_EQ(first->claim(), 1u);
  ASSERT_TRUE(first->Release().ok());
  EXPECT_EQ(OpenRoot(folder.path(), "two")->claim(), 2u);
  EXPECT_EQ(ParseClaim(ReadFileText(folder / "claims/2"))->run, Id128::FromName("two"));
  EXPECT_EQ(ReadFileText(folder / "claims/2.beat"), "1\n");
  EXPECT_EQ(ReadFileText(folder / "claims/1.released"), "");
}

TEST(Claim, CountsTheManifestsTooWhenTheClaimsAreLost) {
  TempFolder folder;
  auto root = OpenRoot(folder.path());
  SaveAll(*root, {1});
  ASSERT_TRUE(RemoveTree(folder / "claims").ok());
  EXPECT_EQ(OpenRoot(folder.path(), "next")->claim(), 2u);
}

TEST(Claim, IsTakenAtOnceFromAProcessOfThisHostThatIsGone) {
  TempFolder folder;
  const pid_t child = fork();
  if (child == 0) {
    auto root = Root::Open(folder.path(), {});
    _exit(root.ok() && (*root)->TakeClaim().ok() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  EXPECT_EQ(OpenRoot(folder.path())->claim(), 2u);
}

// Time that passes only while somebody sleeps; `during` runs in each sleep.
class SleepingClock final : public Clock {
 public:
  absl::Duration Uptime() override { return uptime_; }
  absl::Time WallTime() override { return absl::UnixEpoch() + uptime_; }
  void SleepFor(absl::Duration duration) override {
    uptime_ += duration;
    if (during) during();
  }

  std::function<void()> during;

 private:
  absl::Duration uptime_;
};

TEST(Claim, OfALivingOwnerIsRefusedAndOfASilentOneTakenAfterTwoBeats) {
  TempFolder folder;
  const auto owner = OpenRoot(folder.path(), "owner");
  SleepingClock clock;
  auto newcomer = Root::Open(folder.path(), {.run = Id128::FromName("new")}, clock).value();

  clock.during = [&] { ASSERT_TRUE(owner->Beat().ok()); };
  const absl::Status refused = newcomer->TakeClaim();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(MessageOf(refused)), HasSubstr(OwnerIdentity::Self().host));

  clock.during = nullptr;
  const absl::Duration before = clock.Uptime();
  EXPECT_TRUE(newcomer->TakeClaim().ok());
  EXPECT_GE(clock.Uptime() - before, kSilence);
  EXPECT_EQ(newcomer->claim(), 2u);
}

TEST(Commit, AbortsUnderALargerClaimAndNamesItsOwner) {
  TempFolder folder;
  const auto older = OpenRoot(folder.path(), "run");
  auto newer =
      Root::Open(folder.path(), {.run = Id128::FromName("thief"), .take_over = TakeOver::kYes})
          .value();
  ASSERT_TRUE(newer->TakeClaim().ok());

  const auto saved = Save(*older, 5, SmallState());
  EXPECT_EQ(saved.status().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(MessageOf(saved.status())), HasSubstr(Id128::FromName("thief").hex()));
  EXPECT_THAT(ChainSteps(*newer), IsEmpty());
  const Listing listing = newer->List().value();
  ASSERT_EQ(listing.checkpoints.size(), 1u);
  EXPECT_EQ(listing.checkpoints[0].state, CheckpointState::kIncomplete);
}

// The folder was removed, or emptied, or its disk unmounted.
TEST(Commit, IntoARootThatIsGoneFailsAndSaysSo) {
  for (const bool is_emptied : {false, true}) {
    TempFolder folder;
    const std::string path = folder.path() + "/root";
    const auto root = OpenRoot(path);
    ASSERT_TRUE(Save(*root, 5, SmallState()).ok());
    std::filesystem::remove_all(path);
    if (is_emptied) std::filesystem::create_directory(path);

    const auto saved = Save(*root, 6, SmallState());

    EXPECT_EQ(saved.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(MessageOf(saved.status())), HasSubstr("root " + path + " is gone"));
    if (is_emptied) {
      EXPECT_TRUE(std::filesystem::is_empty(path)) << "nothing is made anew";
    }
  }
}

TEST(Commit, RefusesAnOlderGenerationAndNeedsAClaim) {
  TempFolder folder;
  const auto root = OpenRoot(folder.path());
  ASSERT_TRUE(Save(*root, 5, SmallState(), {.generation = 2}).ok());
  EXPECT_EQ(Save(*root, 6, SmallState(), {.generation = 1}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  const auto unclaimed = Root::Open(folder.path(), {}).value();
  EXPECT_EQ(Save(*unclaimed, 7, SmallState()).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(Commit, CountsGenerationsFromOneInASecondInvocation) {
  TempFolder folder;
  auto first = OpenRoot(folder.path(), "one");
  const std::string parent = Save(*first, 5, SmallState(), {.generation = 9}).value();
  ASSERT_TRUE(first->Release().ok());
  const auto second = OpenRoot(folder.path(), "two");
  ASSERT_TRUE(Save(*second, 6, SmallState(), {.parent = parent, .generation = 1}).ok());
  EXPECT_THAT(ChainSteps(*second), ElementsAre(6, 5));
}

TEST(Commit, MakesOneManifestWithTwoCommitters) {
  TempFolder folder;
  const auto root = OpenRoot(folder.path());
  const std::string name = Save(*root, 5, SmallState(4), {.commit = false}).value();
  Manifest manifest = root->ComposeManifest(name, 4).value();
  manifest.committed_by = {"0", 1, 1};
  std::vector<absl::Status> results(8);
  std::vector<std::thread> committers;
  for (size_t i = 0; i < results.size(); ++i) {
    committers.emplace_back([&, i] {
      Manifest mine = manifest;
      mine.committed_by.agent = std::to_string(i % 2);
      results[i] = root->Commit(mine);
    });
  }
  for (std::thread& committer : committers) committer.join();
  const std::string winner =
      ParseManifest(ReadFileText(root->PathOf(name) + "/MANIFEST.json"))->committed_by.agent;
  for (size_t i = 0; i < results.size(); ++i) {
    const absl::StatusCode wanted =
        std::to_string(i % 2) == winner ? absl::StatusCode::kOk : absl::StatusCode::kAborted;
    EXPECT_EQ(results[i].code(), wanted) << results[i];
  }
  const auto entries = ListFolder(root->PathOf(name)).value();
  EXPECT_EQ(std::ranges::count_if(entries,
                                  [](const auto& entry) { return entry.name.ends_with(".tmp"); }),
            0);
}

TEST(Commit, NamesTheRankWhoseReceiptIsMissing) {
  TempFolder folder;
  const auto root = OpenRoot(folder.path());
  const std::string name = Save(*root, 5, SmallState(3), {.commit = false}).value();
  ASSERT_EQ(unlink((root->PathOf(name) + "/w00001.receipt.json").c_str()), 0);
  EXPECT_THAT(std::string(MessageOf(root->ComposeManifest(name, 3).status())),
              HasSubstr("rank 1 of 3"));
}

// Case O15: what is old is said by numbers along the chain, whatever the file times and the text
// order say.
TEST(Retention, LeavesStrangersAlone) {
  TempFolder folder;
  const auto root = OpenRoot(folder.path());
  const std::vector<std::string> names = SaveAll(*root, {9, 10, 100, 900, 1000, 1100});
  for (size_t i = 0; i < names.size(); ++i) {
    const utimbuf times{static_cast<time_t>(2'000'000'000 - 1000 * static_cast<time_t>(i)),
                        static_cast<time_t>(2'000'000'000 - 1000 * static_cast<time_t>(i))};
    ASSERT_EQ(utime(root->PathOf(names[i]).c_str(), &times), 0);
    ASSERT_EQ(utime((root->PathOf(names[i]) + "/MANIFEST.json").c_str(), &times), 0);
  }
  ASSERT_TRUE(MakeFolders(folder / "step-abc").ok());
  WriteFileText(folder / "step-000000000001-0000000a", "a file");
  ASSERT_EQ(symlink(names[5].c_str(), (folder / "step-000000009999-0000000b").c_str()), 0);
  WriteFileText(folder / "notes.txt", "mine");

  const std::vector<std::string> deleted = root->Retain({.keep_last = 3}, {}).value();

  EXPECT_THAT(deleted, UnorderedElementsAre(names[0], names[1], names[2]));
  EXPECT_THAT(ChainSteps(*root), ElementsAre(1100, 1000, 900));
  const Listing listing = root->List().value();
  std::vector<std::string> strangers;
  for (const Stranger& stranger : listing.strangers) strangers.push_back(stranger.name);
  EXPECT_THAT(strangers, UnorderedElementsAre("step-abc", "step-000000000001-0000000a",
                                              "step-000000009999-0000000b", "notes.txt"));
  EXPECT_EQ(ReadFileText(folder / "step-000000000001-0000000a"), "a file");
}

TEST(Retention, KeepsTheChainOverWhatItTookOut) {
  TempFolder folder;
  const auto root = OpenRoot(folder.path());
  std::vector<std::string> names = SaveAll(*root, {1, 2, 3});
  WriteFileText(root->PathOf(names[0]) + "/PINNED", "");
  ASSERT_TRUE(root->Retain({.keep_last = 1}, {}).ok());  // takes 2 out of the middle
  ASSERT_TRUE(Save(*root, 4, SmallState(), {.parent = names[2]}).ok());
  EXPECT_THAT(ChainSteps(*root), ElementsAre(4, 3, 1));
}

TEST(Retention, KeepsEveryNthStepBesideTheLast) {
  TempFolder folder;
  const auto root = OpenRoot(folder.path());
  SaveAll(*root, {10, 15, 20, 25, 30});
  ASSERT_TRUE(root->Retain({.keep_last = 1, .keep_every = 20}, {}).ok());
  EXPECT_THAT(ChainSteps(*root), ElementsAre(30, 20));
}

TEST(Pin, SparesACheckpointUntilItIsReleased) {
  TempFolder folder;
  const auto root = OpenRoot(folder.path());
  const std::vector<std::string> names = SaveAll(*root, {1, 2, 3});
  ASSERT_TRUE(root->Pin(names[0]).ok());
  EXPECT_TRUE(Find(root->List().value(), names[0]).pinned);
  EXPECT_THAT(root->Retain({.keep_last = 1}, {}).value(), ElementsAre(names[1]));
  const absl::Status refused = root->Delete(names[0]);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(Exists(root->PathOf(names[0]) + "/DELETED").value());

  ASSERT_TRUE(root->Unpin(names[0]).ok());
  ASSERT_TRUE(root->Unpin(names[0]).ok()) << "nothing to do is fine";
  EXPECT_THAT(root->Retain({.keep_last = 1}, {}).value(), ElementsAre(names[0]));
}

TEST(Pin, IsForCommittedCheckpointsOnly) {
  TempFolder folder;
  const auto root = OpenRoot(folder.path());
  const std::string half = Save(*root, 5, SmallState(), {.commit = false}).value();
  EXPECT_EQ(root->Pin(half).code(), absl::StatusCode::kNotFound);
  const std::string going = SaveAll(*root, {6})[0];
  WriteFileText(root->PathOf(going) + "/DELETED", "");
  EXPECT_EQ(root->Pin(going).code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(Exists(root->PathOf(going) + "/PINNED").value());
  EXPECT_EQ(root->Pin("step-000000000001-00000001").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(root->Pin("../x").code(), absl::StatusCode::kInvalidArgument);
}

TEST(Delete, IsFinishedAfterACrashInItsMiddle) {
  TempFolder folder;
  const auto root = OpenRoot(folder.path());
  const std::vector<std::string> names = SaveAll(*root, {1, 2});
  WriteFileText(root->PathOf(names[0]) + "/DELETED", "");

  EXPECT_THAT(ChainSteps(*root), ElementsAre(2));
  EXPECT_THAT(root->RollForward({}, {"0", 1, 1}).value(), IsEmpty());
  EXPECT_THAT(root->Retain({}, {}).value(), ElementsAre(names[0]));
  EXPECT_FALSE(Exists(root->PathOf(names[0])).value());
  EXPECT_EQ(root->Delete("../x").code(), absl::StatusCode::kInvalidArgument);
}

TEST(RollForward, CommitsWhatLacksOnlyItsManifest) {
  TempFolder folder;
  const auto crashed = OpenRoot(folder.path(), "run");
  const std::string parent = Save(*crashed, 4, SmallState(2)).value();
  const std::string name =
      Save(*crashed, 5, SmallState(2), {.parent = parent, .commit = false}).value();
  const std::string torn =
      Save(*crashed, 6, SmallState(2), {.parent = parent, .commit = false}).value();
  ASSERT_EQ(truncate((crashed->PathOf(torn) + "/w00001.safetensors").c_str(), 4097), 0);
  const std::string hooked =
      Save(*crashed, 7, SmallState(2), {.parent = parent, .hooks = {"gate"}, .commit = false})
          .value();
  ASSERT_TRUE(crashed->Release().ok());

  // The same run goes on (an adopting agent): its newer claim does not stand in the way. A
  // stranger's would.
  auto stranger = Root::Open(folder.path(), {.run = Id128::FromName("stranger")}).value();
  auto adopter = Root::Open(folder.path(), {.run = Id128::FromName("run")}).value();
  ASSERT_TRUE(adopter->TakeClaim().ok());
  ASSERT_EQ(adopter->claim(), 2u);
  EXPECT_THAT(stranger->RollForward({}, {"0", 2, 1}).value(), IsEmpty());
  const std::vector<std::string> busy = {name};
  EXPECT_THAT(adopter->RollForward(busy, {"0", 2, 1}).value(), IsEmpty());

  EXPECT_THAT(adopter->RollForward({}, {"0", 2, 1}).value(), ElementsAre(name));
  const Manifest manifest = *Find(adopter->List().value(), name).manifest;
  EXPECT_EQ(manifest.claim, 1u);
  EXPECT_EQ(manifest.parent, parent);
  EXPECT_EQ(manifest.committed_by.claim, 2u);
  EXPECT_THAT(ChainSteps(*adopter), ElementsAre(5, 4));
  EXPECT_THAT(VerifyCheckpoint(adopter->PathOf(name)), IsEmpty());
}

// Case O14: each damage of a finished checkpoint is reported and passed over; the older one is
// taken.
TEST(Restore, PassesOverEachDamagedCheckpointWithItsReason) {
  struct Row {
    std::string file;
    std::string what;
    std::string reason;
  };
  std::vector<Row> rows;
  for (const std::string file :
       {"w00000.safetensors", "w00001.safetensors", "w00000.receipt.json", "MANIFEST.json"}) {
    for (const std::string what : {"half", "empty", "flip", "gone"})
      rows.push_back({file, what, file});
  }
  for (const Row& row : rows) {
    SCOPED_TRACE(row.file + " " + row.what);
    TempFolder folder;
    const auto root = OpenRoot(folder.path());
    const std::string older = Save(*root, 10, SmallState(2)).value();
    const std::string newer = Save(*root, 20, SmallState(2), {.parent = older}).value();
    const std::string path = root->PathOf(newer) + "/" + row.file;
    const std::string content = ReadFileText(path);
    std::string damaged = content;
    if (row.what == "half") damaged.resize(content.size() / 2);
    if (row.what == "empty") damaged.clear();
    if (row.what == "flip") damaged[content.size() / 2] ^= 4;
    if (row.what == "gone") {
      ASSERT_EQ(unlink(path.c_str()), 0);
    } else {
      WriteFileText(path, damaged);
    }

    const Listing listing = root->List().value();
    const StartDecision start = DecideStart(listing, StartMode::kResume).value();

    const bool in_data = row.what == "flip" && row.file.ends_with("safetensors");
    if (in_data) {  // sizes fit, so the listing cannot know: the read finds it, then the quarantine
                    // says it
      ASSERT_THAT(start.candidates, ElementsAre(newer, older));
      auto reader = CheckpointReader::Open(root->PathOf(newer)).value();
      OwnedState target = SmallState(2)[0].Blank();
      const absl::Status status = reader->ReadState(target.view()).status();
      ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss);
      EXPECT_THAT(std::string(MessageOf(status)), HasSubstr(row.file));
      ASSERT_TRUE(root->Quarantine(newer, MessageOf(status)).ok());
      const StartDecision again = DecideStart(root->List().value(), StartMode::kResume).value();
      EXPECT_THAT(again.candidates, ElementsAre(older));
      EXPECT_THAT(again.skipped, ElementsAre(HasSubstr(row.file)));
      ASSERT_TRUE(root->ClearQuarantine(newer).ok());
      EXPECT_EQ(DecideStart(root->List().value(), StartMode::kResume)->candidates.size(), 2u);
    } else if (row.file == "MANIFEST.json" && row.what == "gone") {
      EXPECT_THAT(start.candidates,
                  ElementsAre(older));  // never committed, as far as anyone can see
    } else {
      EXPECT_THAT(start.candidates, ElementsAre(older));
      ASSERT_EQ(start.skipped.size(), 1u);
      EXPECT_THAT(start.skipped[0], HasSubstr(newer));
      EXPECT_THAT(start.skipped[0], HasSubstr(row.reason));
    }
    EXPECT_THAT(VerifyCheckpoint(root->PathOf(newer)), ::testing::Not(IsEmpty()));
    OwnedState target = SmallState(2)[0].Blank();
    ASSERT_TRUE(CheckpointReader::Open(root->PathOf(older)).value()->ReadState(target.view()).ok());
    EXPECT_EQ(target.Digest(), SmallState(2)[0].Digest());
  }
}

// Case O14, a folder that cannot be read: as nobody, since root may read anything.
TEST(Restore, ReportsAFolderThatCannotBeRead) {
  if (getuid() != 0) GTEST_SKIP() << "needs root, to become nobody";
  TempFolder folder;
  const auto root = OpenRoot(folder.path());
  const std::vector<std::string> names = SaveAll(*root, {10, 20});
  ASSERT_EQ(chmod(folder.path().c_str(), 0755), 0);
  ASSERT_EQ(chmod(root->PathOf(names[1]).c_str(), 0), 0);
  const pid_t child = fork();
  if (child == 0) {
    if (setgid(65534) != 0 || setuid(65534) != 0) _exit(2);
    const auto listing = Root::Open(folder.path(), {.access = Access::kRead}).value()->List();
    if (!listing.ok()) _exit(3);
    const auto start = DecideStart(*listing, StartMode::kResume);
    if (!start.ok() || start->candidates != std::vector<std::string>{names[0]}) _exit(4);
    _exit(start->skipped.size() == 1 &&
                  start->skipped[0].find("Permission denied") != std::string::npos
              ? 0
              : 5);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// Case O17: LATEST is a hint; the manifests decide.
TEST(Restore, FindsTheNewestWhateverThePointerSays) {
  TempFolder folder;
  const auto root = OpenRoot(folder.path());
  const std::vector<std::string> names = SaveAll(*root, {10, 20, 30});
  const auto newest = [&] {
    return DecideStart(root->List().value(), StartMode::kResume)->candidates.at(0);
  };
  ASSERT_TRUE(root->WriteLatest({names[2], 30}).ok());
  EXPECT_EQ(newest(), names[2]);
  EXPECT_THAT(root->List()->notes, IsEmpty());
  for (const std::string& pointer :
       {std::string(), std::string("garbage"), std::string("\0\0", 2),
        ToText(Latest{CheckpointName(99, 1), 99}).value(), ToText(Latest{names[0], 10}).value(),
        std::string(R"({"format":"outlast.latest","version":1,"checkpoint":"../x","step":1})")}) {
    WriteFileText(folder / "LATEST.json", pointer);
    EXPECT_EQ(newest(), names[2]) << pointer;
  }
  WriteFileText(folder / "LATEST.json", "garbage");
  EXPECT_THAT(root->List()->notes, ElementsAre(HasSubstr("LATEST.json")));
  ASSERT_EQ(unlink((folder / "LATEST.json").c_str()), 0);
  EXPECT_EQ(newest(), names[2]);
  WriteFileText(folder / "QUARANTINE.json", "garbage");
  EXPECT_EQ(newest(), names[2]);
}

TEST(Restore, TreatsAListingErrorAsAnError) {
  TempFolder folder;
  auto root = OpenRoot(folder / "root");
  ASSERT_EQ(rename((folder / "root").c_str(), (folder / "moved").c_str()), 0);
  EXPECT_FALSE(root->List().ok());
}

TEST(Restore, TakesACopyInAnotherPlaceAsItIs) {
  TempFolder folder;
  const auto root = OpenRoot(folder / "a");
  SaveAll(*root, {10});
  ASSERT_EQ(system(("cp -r " + (folder / "a") + " " + (folder / "b")).c_str()), 0);
  const auto copy = Root::Open(folder / "b", {.access = Access::kRead}).value();
  EXPECT_EQ(DecideStart(copy->List().value(), StartMode::kResume)->candidates.size(), 1u);
}

// Case O20: the disk is full. The save fails with the numbers, and what was there before is whole.
TEST(Save, FailsWithNumbersOnAFullDiskAndSparesTheOlderOnes) {
  TempFolder folder;
  if (mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=20m") != 0)
    GTEST_SKIP() << "may not mount a tmpfs here";
  {
    const auto root = OpenRoot(folder.path());
    OwnedState small, large;
    small.Add("w", DType::kU8, {12 << 20});
    large.Add("w", DType::kU8, {30 << 20});
    const std::vector<OwnedState> smalls = [&] {
      std::vector<OwnedState> v;
      v.push_back(std::move(small));
      return v;
    }();
    const std::vector<OwnedState> larges = [&] {
      std::vector<OwnedState> v;
      v.push_back(std::move(large));
      return v;
    }();
    const auto first = Save(*root, 1, smalls);
    EXPECT_TRUE(first.ok()) << first.status();
    for (const auto* states : {&larges, &smalls}) {
      const absl::Status status = Save(*root, 2, *states).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
      for (const std::string_view part : {"errno 28", "wanted", "free", "w00000.safetensors"}) {
        EXPECT_THAT(std::string(MessageOf(status)), HasSubstr(std::string(part)));
      }
    }
    EXPECT_THAT(ChainSteps(*root), ElementsAre(1));
    EXPECT_THAT(VerifyCheckpoint(root->PathOf(*first)), IsEmpty());
    EXPECT_EQ(root->Retain({}, {})->size(), 2u);  // the folders of the two failed saves
    EXPECT_THAT(ChainSteps(*root), ElementsAre(1));
  }
  EXPECT_EQ(umount(folder.path().c_str()), 0);
}

}  // namespace
}  // namespace outlast
