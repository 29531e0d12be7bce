// Saves that fail and roots that are not as they should be, by the real tool and a real trainer.
#include <sys/mount.h>

#include <array>
#include <random>
#include <set>

#include "outlast/base/crc32c.h"
#include "tests/fault/ckpt_job.h"
#include "tests/support/seed.h"

namespace outlast::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Not;

// A job of 40 steps that saves at 10, 20, 30 and 40 (one that the former save holds up is dropped)
// and keeps all.
CkptJob& WithFourSaves(CkptJob& job) {
  job.trainer["--steps"] = "40";
  job.trainer["--step-ms"] = "2";
  job.trainer["--keep"] = "9";
  return job;
}

// Folders of the root with a checkpoint's name.
std::set<std::string> CheckpointFolders(const CkptJob& job) {
  std::set<std::string> found;
  for (const auto& entry : fs::directory_iterator(job.root()))
    if (entry.path().filename().string().starts_with("step-"))
      found.insert(entry.path().filename());
  return found;
}

size_t StepsTrained(CkptJob& job) {
  const std::string log = job.launched().Read("log");
  return static_cast<size_t>(std::count(log.begin(), log.end(), '\n'));
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void WriteFile(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

// --- Failing calls

struct Failing {
  const char* fault;
  const char* said;
};

class FailingSave : public ::testing::TestWithParam<Failing> {};

// The second save fails, once: training goes on, nothing of it is left, later saves succeed.
TEST_P(FailingSave, HarmsNeitherTrainingNorOtherCheckpoints) {
  CkptJob job;
  WithFourSaves(job);
  ASSERT_EQ(job.Run(ShimOrder{.from_save = 2, .fault = GetParam().fault}), 0) << job.Said();
  EXPECT_EQ(job.page().faults, 1u);
  EXPECT_EQ(StepsTrained(job), 40u);
  EXPECT_THAT(job.Said(), HasSubstr("training goes on"));
  EXPECT_THAT(job.Said(), HasSubstr(GetParam().said));
  std::set<std::string> committed;
  for (const auto& [step, name] : job.Committed()) committed.insert(name);
  EXPECT_THAT(job.CommittedSteps(), IsSupersetOf({10, 40}));
  EXPECT_EQ(CheckpointFolders(job), committed);
  EXPECT_EQ(job.Tool("verify"), 0) << job.launched().Read("tool.out");
}

// Case O20
INSTANTIATE_TEST_SUITE_P(
    Save, FailingSave,
    ::testing::Values(
        Failing{"mkdir:EROFS:1", "(errno 30)"}, Failing{"open:EACCES:1", "(errno 13)"},
        Failing{"fallocate:ENOSPC:1", "(errno 28), wanted 270336 bytes, "},
        Failing{"pwrite:EIO:1", "(errno 5)"}, Failing{"pwrite:EDQUOT:2", "(errno 122), wanted "},
        Failing{"ftruncate:EIO:1", "(errno 5)"},
        Failing{"fdatasync:ENOSPC:1", "(errno 28), wanted "},
        Failing{"fdatasync:EDQUOT:1", "(errno 122), wanted "}, Failing{"fsync:EIO:1", "(errno 5)"},
        Failing{"fsync:EROFS:2", "(errno 30)"}, Failing{"fsync:ENOSPC:2", "(errno 28), wanted "},
        Failing{"write:EIO:1", "(errno 5)"}, Failing{"fsync:EIO:4", "(errno 5)"},
        Failing{"link:EIO:1", "(errno 5)"}, Failing{"link:ENOSPC:2", "(errno 28)"}),
    [](const auto& failing) {
      std::string name = failing.param.fault;
      std::replace(name.begin(), name.end(), ':', '_');
      return name;
    });

// Case D20: a save that failed in the middle, in the background, leaves nothing in the next one.
TEST(Save, AfterAFailedOneEqualsASynchronousOneByteForByte) {
  CkptJob failing, synchronous;
  WithFourSaves(failing);
  WithFourSaves(synchronous).trainer["--finish-each"] = "1";
  for (CkptJob* job : {&failing, &synchronous}) {
    job->world = 2;
    job->trainer["--state-mb"] = "3";
  }
  ASSERT_EQ(failing.Run(ShimOrder{.from_save = 2, .fault = "pwrite:EIO:2"}), 0) << failing.Said();
  EXPECT_EQ(failing.page().faults, 1u);
  ASSERT_EQ(synchronous.Run(), 0) << synchronous.Said();
  for (const char* file : {"/w00000.safetensors", "/w00001.safetensors"}) {
    const std::string found = ReadFile(failing.root() + "/" + failing.Committed()[40] + file);
    EXPECT_GT(found.size(), size_t{2} << 20);
    EXPECT_EQ(found, ReadFile(synchronous.root() + "/" + synchronous.Committed()[40] + file));
  }
}

// Case D20: who waits for a save does not wait until the old one is deleted; the job's end does.
TEST(Save, IsDurableBeforeTheOldOneIsDeleted) {
  CkptJob job;
  job.world = 2;
  ASSERT_EQ(job.Run(ShimOrder{.from_save = 2, .fault = "rmdir:sleep1000:1"}), 0) << job.Said();
  const int64_t ended = MonotonicNanos();
  EXPECT_EQ(job.page().faults, 1u);
  std::istringstream lines(job.launched().Read("log.finished"));
  int64_t rank = 0, finished = 0;
  for (int i = 0; i < 2; ++i) {
    lines >> rank >> finished;
    EXPECT_GE(ended - finished, int64_t{900'000'000}) << "rank " << rank;
  }
  EXPECT_EQ(CheckpointFolders(job).size(), 1u);
  EXPECT_THAT(job.CommittedSteps(), ElementsAre(20));
}

TEST(Save, SurvivesShortWrites) {
  for (const char* fault : {"pwrite:short:1+", "write:short:1+"}) {
    CkptJob job;
    WithFourSaves(job);
    ASSERT_EQ(job.Run(ShimOrder{.from_save = 1, .fault = fault}), 0) << job.Said();
    EXPECT_GT(job.page().faults, 1u);
    EXPECT_THAT(job.Said(), Not(HasSubstr("training goes on")));
    EXPECT_EQ(job.CommittedSteps().back(), 40);
    EXPECT_EQ(job.Tool("verify"), 0) << job.launched().Read("tool.out");
  }
}

// A disk that fails from the second save on: what is there stays, also with --keep 1, and the
// trainer hears of it once.
TEST(Save, EndsWith88WhenTheFinalStateIsNotDurable) {
  for (const char* fault : {"fsync:EIO:1+", "fdatasync:ENOSPC:1+", "link:EIO:1+"}) {
    CkptJob job;
    WithFourSaves(job);
    job.trainer["--keep"] = "1";
    ASSERT_EQ(job.Run(ShimOrder{.from_save = 2, .fault = fault}), 88) << fault << job.Said();
    const std::string heard = "[0] outlast: a checkpoint could not be saved, training goes on";
    const std::string said = job.launched().Read("err");
    EXPECT_NE(said.find(heard), std::string::npos) << said;
    EXPECT_EQ(said.find(heard), said.rfind(heard)) << said;
    EXPECT_EQ(StepsTrained(job), 40u);
    EXPECT_THAT(job.CommittedSteps(), ElementsAre(10)) << fault;
    EXPECT_EQ(job.Tool("verify"), 0) << job.launched().Read("tool.out");

    // The disk is well again.
    ASSERT_EQ(job.Run(), 0) << job.Said();
    EXPECT_EQ(job.RestoredStep(), 10);
    EXPECT_EQ(job.CommittedSteps().back(), 40);
    EXPECT_EQ(CheckpointFolders(job).size(), job.Committed().size());
  }
}

// The worker's save of the last state failed twice; what the agent saves of it once all workers
// have ended counts.
TEST(Save, IntoARootThatSomebodyEmptiedFailsAndSaysSo) {
  Launched job;
  job.Start({"-n", "1", "--", BuildFolder() / "outlast_toy_trainer", "--steps", "60", "--step-ms",
             "10", "--ckpt-dir", "ckpt", "--ckpt-every", "20"});
  while (job.Count("ckpt", "MANIFEST.json") == 0) Clock::Real().SleepFor(absl::Milliseconds(2));
  std::error_code error;
  do {
    std::filesystem::remove_all(job.Path("ckpt"), error);
  } while (error);  // a save in progress may add files meanwhile
  std::filesystem::create_directory(job.Path("ckpt"));

  EXPECT_EQ(job.Wait().code, 88) << job.Read("err");

  EXPECT_THAT(job.Read("err"), HasSubstr("root ckpt is gone"));
  EXPECT_EQ(job.Count("ckpt", "step-"), 0);
}

TEST(Save, EndsWithZeroWhereTheAgentSavesTheFinalStateAfterAll) {
  CkptJob job;
  job.world = 2;
  ASSERT_EQ(job.Run(ShimOrder{.from_save = 2, .fault = "mkdir:EIO:1-2"}), 0) << job.Said();
  EXPECT_EQ(job.page().faults, 2u);
  EXPECT_EQ(job.CommittedSteps().back(), 20);
  EXPECT_THAT(job.Said(), HasSubstr("the last state is in the root after all"));
  EXPECT_EQ(job.launched().Report()["exit_code"], 0);
  EXPECT_EQ(job.Tool("verify"), 0) << job.launched().Read("tool.out");
}

// A program of the user's judges the agent's saves.
TEST(Save, IsJudgedByAProgramOfTheUsers) {
  CkptJob job;
  job.world = 2;
  job.trainer["--keep"] = "9";
  job.launched().Write("judge.sh",
                       "echo \"$OUTLAST_STEP $OUTLAST_WORLD $(ls $1)\" | tr '\\n' ' ' >>" +
                           job.launched().Path("judged") +
                           "\nif test $OUTLAST_STEP = 10; then echo loss went up; exit 3; fi\n");
  job.trainer["--hook"] = job.launched().Path("judge.sh");
  ASSERT_EQ(job.Run(), 0) << job.Said();
  EXPECT_THAT(job.CommittedSteps(), ElementsAre(20));
  EXPECT_THAT(job.Said(), HasSubstr("hook 'judge' vetoes it: loss went up; training goes on"));
  EXPECT_THAT(job.launched().Read("outlast-runs/latest/events.jsonl"),
              HasSubstr("hook 'judge' vetoes it: loss went up"));
  EXPECT_THAT(job.launched().Read("judged"),
              HasSubstr("10 2 w00000.receipt.json w00000.safetensors w00001.receipt.json "
                        "w00001.safetensors"));
}

// LATEST is a hint, and retention comes after the commit: a failure of either is none of the save.
TEST(Save, IsDurableEvenWhenWhatFollowsTheCommitFails) {
  for (const char* fault : {"rename:EIO:1+", "rmdir:EIO:1+", "unlink:EIO:3+"}) {
    CkptJob job;
    WithFourSaves(job);
    job.trainer["--keep"] = "1";
    ASSERT_EQ(job.Run(ShimOrder{.from_save = 2, .fault = fault}), 0) << fault << job.Said();
    EXPECT_GT(job.page().faults, 0u) << fault;
    EXPECT_EQ(job.CommittedSteps().back(), 40);
    EXPECT_EQ(job.Tool("verify"), 0) << job.launched().Read("tool.out");
    job.trainer["--steps"] = "50";
    ASSERT_EQ(job.Run(), 0) << job.Said();
    EXPECT_EQ(job.RestoredStep(), 40);
    EXPECT_THAT(job.CommittedSteps(), ElementsAre(50));
    EXPECT_EQ(CheckpointFolders(job).size(), 1u);
  }
}

// Where two ranks or two saves could meet: every file operation is held up at random.
void ExpectInOrder(CkptJob& job) {
  EXPECT_THAT(job.Said(), Not(HasSubstr("training goes on")));
  EXPECT_EQ(job.page().strangers, 0u);
  EXPECT_EQ(job.Tool("verify"), 0) << job.launched().Read("tool.out");
  EXPECT_EQ(job.CommittedSteps().size(), 2u);
  EXPECT_EQ(CheckpointFolders(job).size(), 2u);
  for (const auto& entry : fs::recursive_directory_iterator(job.root()))
    EXPECT_NE(entry.path().extension(), ".tmp") << entry.path();
}

// Case O16: 4 ranks x 200 saves, in four jobs at once, since nearly all of it is waiting. Each rank
// waits for each save, and then looks for it.
TEST(Save, HasOneCommitterAndIsSeenByAllRanks) {
  constexpr size_t kJobs = 4;
  constexpr int kSaves = kSanitized ? 3 : 50;
  const uint32_t seed = DrawSeed();
  std::array<CkptJob, kJobs> jobs;
  for (uint32_t i = 0; i < kJobs; ++i) {
    jobs[i].world = 4;
    jobs[i].trainer["--steps"] = std::to_string(kSaves);
    jobs[i].trainer["--ckpt-every"] = "1";
    jobs[i].trainer["--finish-each"] = "1";
    jobs[i].trainer["--keep"] = "2";
    jobs[i].trainer["--state-mb"] = "0.05";
    jobs[i].Start(ShimOrder{.fault = "any:delay20:1+", .seed = seed + i});
  }
  for (CkptJob& job : jobs) {
    ASSERT_EQ(job.Wait(), 0) << job.Said();
    EXPECT_EQ(StepsTrained(job), size_t{4} * kSaves) << "no rank failed, so none trained twice";
    EXPECT_EQ(job.page().saves, uint32_t{kSaves});
    EXPECT_EQ(job.page().commits, uint32_t{kSaves});
    EXPECT_EQ(job.CommittedSteps().back(), kSaves);
    ExpectInOrder(job);
  }
}

// Case O16, and O18: the trainer does not wait, and changes its memory meanwhile, which the resumed
// one would find.
TEST(Save, HasOneCommitterHoweverSlowTheFileSystemIs) {
  CkptJob job;
  job.world = 4;
  job.trainer["--steps"] = kSanitized ? "200" : "1000";
  job.trainer["--step-ms"] = "5";
  job.trainer["--ckpt-every"] = "1";
  job.trainer["--keep"] = "2";
  ASSERT_EQ(job.Run(ShimOrder{.from_save = 0, .fault = "any:delay1:1+", .seed = DrawSeed()}), 0)
      << job.Said();
  std::printf("%u saves\n", job.page().saves.load());
  EXPECT_GT(job.page().saves, 2u);
  EXPECT_EQ(job.page().commits, job.page().saves);
  ExpectInOrder(job);
  job.trainer["--steps"] = "1002";
  ASSERT_EQ(job.Run(), 0) << job.Said();
  EXPECT_EQ(job.RestoredStep(), kSanitized ? 200 : 1000);
}

// --- A slow disk. Case O18; tests/checkpoint/slow_store_test.cc has the rest

// 5 MB of 4 ranks at 1 MB/s, while the trainers go on and change what they saved; then all are
// killed, so that the disk alone is left. The trainer checks what it restores.
TEST(SlowDisk, HoldsTheStateOfTheSaveCall) {
  CkptJob job;
  job.world = 4;
  job.trainer["--steps"] = "1000000";
  job.trainer["--step-ms"] = "5";
  job.trainer["--state-mb"] = kSanitized ? "0.5" : "2";
  job.trainer["--disk-rate"] = "1000000";
  const int64_t started = MonotonicNanos();
  job.Start();
  const auto is_committed = [&] {
    return fs::exists(job.root()) &&
           std::ranges::any_of(CheckpointFolders(job), [&](const auto& name) {
             return fs::exists(job.root() + "/" + name + "/MANIFEST.json");
           });
  };
  while (!is_committed() && is_alive(job.launched().pid())) absl::SleepFor(absl::Milliseconds(5));
  const absl::Duration least = absl::Seconds(kSanitized ? 1 : 5);
  EXPECT_GE(MonotonicNanos() - started, absl::ToInt64Nanoseconds(least));
  kill(job.launched().pid(), SIGKILL);
  EXPECT_EQ(job.Wait(), 128 + SIGKILL);
  const std::vector<int64_t> committed = job.CommittedSteps();
  ASSERT_FALSE(committed.empty()) << job.Said();
  job.trainer["--steps"] = std::to_string(committed.back() + 5);
  ASSERT_EQ(job.Run(), 0) << job.Said();
  EXPECT_EQ(job.RestoredStep(), committed.back());
}

// The error of a save in the background is said once; what it makes of the exit code is the final
// state's matter.
TEST(SlowDisk, FailsInTheBackgroundOnceAndInTheExitCodeWhenTheLastStateIsLost) {
  const std::string heard = "[0] outlast: a checkpoint could not be saved, training goes on";
  for (const bool for_good : {false, true}) {
    CkptJob job;
    WithFourSaves(job);
    job.trainer["--state-mb"] = "3";
    job.trainer["--disk-rate"] = "10000000";
    job.trainer["--step-ms"] = "20";
    const std::string fault = for_good ? "fdatasync:EIO:1+" : "fdatasync:EIO:1";
    EXPECT_EQ(job.Run(ShimOrder{.from_save = 2, .fault = fault}), for_good ? 88 : 0) << job.Said();
    const std::string said = job.launched().Read("err");
    EXPECT_NE(said.find(heard), std::string::npos) << said;
    EXPECT_EQ(said.find(heard), said.rfind(heard)) << said;
    EXPECT_EQ(StepsTrained(job), 40u);
    EXPECT_EQ(job.CommittedSteps().front(), 10);
    EXPECT_EQ(job.CommittedSteps().back(), for_good ? 10 : 40);
    EXPECT_EQ(job.Tool("verify"), 0) << job.launched().Read("tool.out");
  }
}

// --- A full disk

class FullDisk : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::create_directory(job_.root());
    if (mount("outlast-test", job_.root().c_str(), "tmpfs", 0, "size=20m") != 0)
      GTEST_SKIP() << "needs the right to mount a tmpfs";
    is_mounted_ = true;
    WithFourSaves(job_);
  }
  void TearDown() override {
    if (is_mounted_) umount2(job_.root().c_str(), MNT_DETACH);
  }

  CkptJob job_;
  bool is_mounted_ = false;
};

TEST_F(FullDisk, FailsASaveThatCannotFitWithBytesWantedAndFree) {
  job_.trainer["--state-mb"] = "30";
  ASSERT_EQ(job_.Run(), 88) << job_.Said();
  EXPECT_EQ(StepsTrained(job_), 40u);
  EXPECT_THAT(job_.Said(), HasSubstr("(errno 28), wanted 3146"));
  EXPECT_THAT(job_.Said(), HasSubstr(" free"));
  EXPECT_TRUE(CheckpointFolders(job_).empty());
}

TEST_F(FullDisk, KeepsTheCheckpointThatFitted) {
  job_.trainer["--state-mb"] = "12";
  ASSERT_EQ(job_.Run(), 88) << job_.Said();
  const std::vector<int64_t> committed = job_.CommittedSteps();
  ASSERT_EQ(committed.size(), 1u);
  EXPECT_EQ(CheckpointFolders(job_).size(), 1u);
  EXPECT_EQ(job_.Tool("verify"), 0);
  // Room is made for one more: the job ends well.
  ASSERT_EQ(mount("outlast-test", job_.root().c_str(), "tmpfs", MS_REMOUNT, "size=80m"), 0);
  ASSERT_EQ(job_.Run(), 0) << job_.Said();
  EXPECT_EQ(job_.RestoredStep(), committed[0]);
}

// --- LATEST. Case O17

class LatestIsAHint : public ::testing::Test {
 protected:
  void SetUp() override {
    WithFourSaves(job_);
    job_.trainer["--steps"] = "100000";  // the kill ends it
    ASSERT_EQ(job_.Run(ShimOrder{.from_save = 4, .kill_at = 1}), 128 + SIGKILL) << job_.Said();
    ASSERT_EQ(CountAliveAfter(job_.Pids(), absl::Seconds(10)), 0);
    ASSERT_EQ(job_.CommittedSteps().size(), 3u);
    newest_ = job_.CommittedSteps().back();
    job_.trainer["--steps"] = std::to_string(newest_ + 5);
  }
  void ResumesAtTheNewest() {
    ASSERT_EQ(job_.Run(), 0) << job_.Said();
    EXPECT_EQ(job_.RestoredStep(), newest_);
  }
  std::string latest() const { return job_.root() + "/LATEST.json"; }

  CkptJob job_;
  int64_t newest_ = 0;
};

TEST_F(LatestIsAHint, WhenItIsGone) {
  fs::remove(latest());
  ResumesAtTheNewest();
}
TEST_F(LatestIsAHint, WhenItIsEmpty) {
  WriteFile(latest(), "");
  ResumesAtTheNewest();
}
TEST_F(LatestIsAHint, WhenItIsGarbage) {
  WriteFile(latest(), std::string("\x7f"
                                  "ELF\0{]",
                                  7));
  ResumesAtTheNewest();
}
TEST_F(LatestIsAHint, WhenItNamesACheckpointThatIsGone) {
  WriteFile(
      latest(),
      R"({"format":"outlast.latest","version":1,"checkpoint":"step-000000099990-00000001","step":99990})");
  ResumesAtTheNewest();
}
TEST_F(LatestIsAHint, WhenItNamesAnOlderOne) {
  const auto committed = job_.Committed();
  WriteFile(latest(), R"({"format":"outlast.latest","version":1,"checkpoint":")" +
                          committed.begin()->second + R"(","step":10})");
  ResumesAtTheNewest();
}
TEST_F(LatestIsAHint, WhenItNamesAnIncompleteOne) {
  const std::string name = "step-000000099990-0000beef";
  fs::create_directory(job_.root() + "/" + name);
  WriteFile(latest(), R"({"format":"outlast.latest","version":1,"checkpoint":")" + name +
                          R"(","step":99990})");
  ResumesAtTheNewest();
}

// --- Damaged and hostile checkpoints. Case O14

// Checkpoints of step 10 and 20; the latter is damaged.
class DamagedCheckpoint : public ::testing::Test {
 protected:
  void SetUp() override {
    job_.trainer["--keep"] = "9";
    ASSERT_EQ(job_.Run(), 0) << job_.Said();
    ASSERT_THAT(job_.CommittedSteps(), ElementsAre(10, 20));
    name_ = job_.Committed()[20];
    job_.trainer["--steps"] = "30";
  }
  std::string PathOf(const std::string& file) const {
    return job_.root() + "/" + name_ + "/" + file;
  }
  void FallsBack(const std::string& why) {
    EXPECT_EQ(job_.Tool("verify"), 1) << why;
    ASSERT_EQ(job_.Run(), 0) << why << job_.Said();
    EXPECT_EQ(job_.RestoredStep(), 10) << why;
    EXPECT_THAT(job_.Said(), HasSubstr(name_)) << why;  // the one passed over is named
  }
  // A manifest or receipt with `from` replaced, and a CRC that fits.
  std::string Edited(const std::string& path, const std::string& from, const std::string& to) {
    std::string text = ReadFile(path);
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << text;
    text.replace(at, from.size(), to);
    const size_t digits = text.size() - 11;  // xxxxxxxx"}\n
    char crc[9];
    std::snprintf(crc, sizeof crc, "%08x", Crc32c(std::string_view(text).substr(0, digits)));
    return text.replace(digits, 8, crc);
  }

  CkptJob job_;
  std::string name_;
};

TEST_F(DamagedCheckpoint, IsPassedOverWhateverFileIsCutOrFlipped) {
  const fs::path kept = job_.launched().Path("kept");
  fs::copy(job_.root(), kept, fs::copy_options::recursive);
  for (const char* file : {"MANIFEST.json", "w00000.receipt.json", "w00000.safetensors"}) {
    const std::string whole = ReadFile(PathOf(file));
    std::string flipped = whole;
    flipped[whole.size() * 2 / 3] ^= 4;
    const std::vector<std::pair<std::string, std::optional<std::string>>> damages = {
        {"half", whole.substr(0, whole.size() / 2)},
        {"empty", ""},
        {"flipped", flipped},
        {"gone", std::nullopt}};
    for (const auto& [kind, content] : damages) {
      if (kind == "gone" && std::string(file) == "MANIFEST.json") continue;  // was never committed
      if (content) {
        WriteFile(PathOf(file), *content);
      } else {
        fs::remove(PathOf(file));
      }
      FallsBack(std::string(file) + " " + kind + ": ");
      if (HasFailure()) return;
      fs::remove_all(job_.root());
      fs::copy(kept, job_.root(), fs::copy_options::recursive);
    }
  }
}

// One bit somewhere in each file of two ranks; tests/checkpoint/damage_test.cc has many more.
TEST(DamagedCheckpointOfTwoRanks, IsPassedOverByBothWhicheverBitIsFlipped) {
  std::mt19937 random(DrawSeed());
  CkptJob job;
  job.world = 2;
  job.trainer["--keep"] = "9";
  ASSERT_EQ(job.Run(), 0) << job.Said();
  const std::string name = job.Committed()[20];
  const fs::path kept = job.launched().Path("kept");
  fs::copy(job.root(), kept, fs::copy_options::recursive);
  job.trainer["--steps"] = "25";
  for (const char* file : {"MANIFEST.json", "w00000.receipt.json", "w00001.receipt.json",
                           "w00000.safetensors", "w00001.safetensors"}) {
    const std::string path = job.root() + "/" + name + "/" + file;
    std::string text = ReadFile(path);
    const size_t bit = random() % (text.size() * 8);
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ 1 << bit % 8);
    WriteFile(path, text);
    SCOPED_TRACE(std::string(file) + ", bit " + std::to_string(bit));
    EXPECT_EQ(job.Tool("verify"), 1);
    EXPECT_THAT(job.launched().Read("tool.out"), HasSubstr(file));
    ASSERT_EQ(job.Run(), 0) << job.Said();
    EXPECT_EQ(job.RestoredStep(), 10);
    EXPECT_THAT(job.Said(), HasSubstr(name));
    EXPECT_THAT(job.Said(), HasSubstr(file));
    fs::remove_all(job.root());
    fs::copy(kept, job.root(), fs::copy_options::recursive);
  }
}

TEST_F(DamagedCheckpoint, IsPassedOverWhenItNamesAFileOutsideItsFolder) {
  const std::string older = job_.Committed()[10];
  WriteFile(PathOf("MANIFEST.json"), Edited(PathOf("MANIFEST.json"), "\"w00000.receipt.json\"",
                                            "\"../" + older + "/w00000.receipt.json\""));
  FallsBack("a receipt outside: ");
}

TEST_F(DamagedCheckpoint, EndsTheJobWhenThereIsNoOther) {
  fs::remove_all(job_.root() + "/" + job_.Committed()[10]);
  WriteFile(PathOf("w00000.safetensors"), "short");
  const int code = job_.Run();
  EXPECT_EQ(code, 82) << job_.Said();
  EXPECT_THAT(job_.Said(), HasSubstr(name_));
  EXPECT_THAT(job_.Said(), HasSubstr("--fresh"));
  EXPECT_EQ(StepsTrained(job_), 0u);  // never a silent step 0
  job_.run_options = {"--fresh"};
  EXPECT_EQ(job_.Run(), 0) << job_.Said();
}

// --- Whose root it is

TEST(Root, OfAnotherJobIsRefused) {
  CkptJob job;
  ASSERT_EQ(job.Run(), 0) << job.Said();
  job.run_options = {"--job", "other"};
  EXPECT_EQ(job.Run(), 85) << job.Said();
  EXPECT_THAT(job.Said(), HasSubstr("other"));
  EXPECT_EQ(StepsTrained(job), 0u);
}

TEST(Root, StartedAfreshKeepsTheOldCheckpointsAsAbandoned) {
  CkptJob job;
  ASSERT_EQ(job.Run(), 0) << job.Said();
  job.run_options = {"--fresh"};
  job.trainer["--steps"] = "15";
  ASSERT_EQ(job.Run(), 0) << job.Said();
  EXPECT_EQ(job.RestoredStep(), 0);
  EXPECT_THAT(job.CommittedSteps(), ElementsAre(15));
  EXPECT_THAT(job.launched().Read("tool.out"), HasSubstr("abandoned"));
  job.run_options = {};
  ASSERT_EQ(job.Run(), 0) << job.Said();
  EXPECT_EQ(job.RestoredStep(), 15);
}

// A job that trains until it is told to stop, on `root`.
class LiveJob {
 public:
  explicit LiveJob(CkptJob& job) : job_(job) {
    job_.trainer["--steps"] = "1000000";
    job_.trainer["--step-ms"] = "5";
    job_.Start();
    while (job_.launched().Read("log").empty() && is_alive(job_.launched().pid()))
      absl::SleepFor(absl::Milliseconds(5));
  }

 private:
  CkptJob& job_;
};

TEST(Root, ThatALiveJobHoldsIsRefusedAndTakenOverOnlyWhenAsked) {
  CkptJob owner;
  owner.trainer["--ckpt-every"] = "20";
  const LiveJob live(owner);
  CkptJob second;
  second.trainer["--ckpt-dir"] = owner.root();
  const int64_t started = MonotonicNanos();
  EXPECT_EQ(second.Run(), 85) << second.Said();
  EXPECT_LT(MonotonicNanos() - started, absl::ToInt64Nanoseconds(absl::Seconds(15) * TimeFactor()));
  EXPECT_THAT(second.Said(), HasSubstr("pid " + std::to_string(owner.launched().pid())));
  EXPECT_THAT(second.Said(), HasSubstr("--take-over"));
  EXPECT_TRUE(is_alive(owner.launched().pid()));

  second.run_options = {"--take-over"};
  second.Start();
  EXPECT_EQ(owner.Wait(), 88) << owner.Said();
  EXPECT_THAT(owner.Said(), HasSubstr("has taken it"));
  while (second.launched().Read("log").empty() && is_alive(second.launched().pid()))
    absl::SleepFor(absl::Milliseconds(5));
  kill(second.launched().pid(), SIGTERM);
  second.Wait();
  EXPECT_GT(second.RestoredStep(), 0) << second.Said();
}

// OUTLAST_TEST_STOPS says how many: `./dev torture` makes 200 of them.
int StopsWanted() {
  if (const char* wanted = std::getenv("OUTLAST_TEST_STOPS")) return std::atoi(wanted);
  return kSanitized ? 4 : 20;
}

// Case O08: the trainers are in the middle of an allocation, a line, a mutex, a look-up or a save.
// Every fourth one has no agent, so that the signal comes to the trainer itself.
TEST(Stop, AtARandomMomentSavesAndResumesAtThatStep) {
  constexpr uint32_t kSeed = 20261;
  RecordProperty("seed", static_cast<int>(kSeed));
  std::mt19937 random(kSeed);
  std::uniform_int_distribution<int> delay_ms(0, 120);
  std::uniform_int_distribution<size_t> which(0, 2);
  constexpr int kSignals[] = {SIGTERM, SIGUSR1, SIGUSR2};
  const int stops = StopsWanted();
  for (int i = 0; i < stops; ++i) {
    const int signal = kSignals[which(random)];
    SCOPED_TRACE(::testing::Message() << "stop " << i << " by signal " << signal);
    CkptJob job;
    job.is_alone = i % 4 == 3;
    job.world = job.is_alone ? 1 : 1 + i % 2;
    job.run_options = {"--grace", "20"};
    job.trainer["--step-ms"] = "1";
    job.trainer["--busy"] = "1";
    const LiveJob live(job);
    absl::SleepFor(absl::Milliseconds(delay_ms(random)));
    const int64_t asked = MonotonicNanos();
    kill(job.launched().pid(), signal);
    // The second one harms nothing; without an agent it may find the process on its way out.
    if (i % 2 == 1 && !job.is_alone) {
      absl::SleepFor(absl::Milliseconds(50));
      kill(job.launched().pid(), SIGTERM);
    }
    ASSERT_EQ(job.Wait(), 80) << job.Said();
    EXPECT_LT(MonotonicNanos() - asked, absl::ToInt64Nanoseconds(absl::Seconds(18) * TimeFactor()))
        << "not by the hard kill";
    EXPECT_EQ(job.launched().Read("err").find("toy_trainer:"), std::string::npos)
        << "an interrupted call: " << job.Said();
    const int64_t saved = job.CommittedSteps().back();
    EXPECT_EQ(job.Tool("verify"), 0);
    if (!job.is_alone) {
      const nlohmann::json stop = job.launched().Report()["stop"];
      EXPECT_EQ(stop["saved_step"], saved) << stop;
      EXPECT_GT(stop["service_seconds"], 0) << stop;
      EXPECT_THAT(job.Said(), HasSubstr("; saved step " + std::to_string(saved) + " in "));
    }
    job.trainer["--steps"] = std::to_string(saved + 5);
    ASSERT_EQ(job.Run(), 0) << job.Said();
    EXPECT_EQ(job.RestoredStep(), saved);
  }
}

}  // namespace
}  // namespace outlast::testing
