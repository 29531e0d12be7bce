// Disks that fail, fill up, freeze or lose their power, under the real tool and a real trainer.
#include <sys/mount.h>
#include <sys/statvfs.h>

#include <random>

#include "tests/fault/ckpt_job.h"
#include "tests/fault/loop_disk.h"
#include "tests/support/seed.h"

namespace outlast::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Not;

size_t StepsTrained(CkptJob& job) {
  const std::string log = job.launched().Read("log");
  return static_cast<size_t>(std::count(log.begin(), log.end(), '\n'));
}

// The largest step in a checkpoint folder's name; 0: there is none.
int64_t NewestFolder(const std::string& root) {
  int64_t newest = 0;
  if (!fs::exists(root)) return newest;
  for (const auto& entry : fs::directory_iterator(root)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("step-")) newest = std::max<int64_t>(newest, std::stoll(name.substr(5)));
  }
  return newest;
}

// Checkpoint folders of the root that have no manifest.
std::vector<std::string> LeftOvers(const std::string& root) {
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator(root))
    if (entry.path().filename().string().starts_with("step-") &&
        !fs::exists(entry.path() / "MANIFEST.json"))
      found.push_back(entry.path().filename());
  return found;
}

// --- One call fails. Case O20

// A job of 40 steps that saves at 10, 20, 30 and 40 (one that the former save holds up is dropped)
// and keeps all.
void SaveFourTimes(CkptJob& job) {
  job.trainer["--steps"] = "40";
  job.trainer["--step-ms"] = "2";
  job.trainer["--keep"] = "9";
}

// Whichever call it is, from the second save's first on: training goes on, the first and the last
// checkpoint are whole, nothing half is left, and the next job goes on from the last.
TEST(FailingCall, OfASaveHarmsNothingElseWhicheverItIs) {
  const char* errors[] = {"EIO", "ENOSPC", "EDQUOT", "EROFS", "EFAULT"};
  int calls = 0;
  {
    CkptJob job;
    SaveFourTimes(job);
    job.trainer["--steps"] = "20";
    ASSERT_EQ(job.Run(ShimOrder{.from_save = 2}), 0) << job.Said();
    calls = static_cast<int>(job.page().calls);
  }
  ASSERT_GT(calls, 15);
  std::printf("%d calls\n", calls);
  const int counted = calls;
  calls += 6;  // into the next save, which may be the final one
  for (int k = 1; k <= calls; k += kSanitized ? 20 : 1) {
    const std::string fault = "any:" + std::string(errors[k % 5]) + ":" + std::to_string(k);
    CkptJob job;
    SaveFourTimes(job);
    ASSERT_EQ(job.Run(ShimOrder{.from_save = 2, .fault = fault}), 0) << fault << job.Said();
    SCOPED_TRACE(fault + ", " + job.CallName(k));
    // Where the second save was the final one, there is no next.
    if (k > counted && job.page().faults == 0) continue;
    ASSERT_EQ(job.page().faults, 1u);
    EXPECT_EQ(StepsTrained(job), 40u);
    const bool was_said = job.Said().find("training goes on") != std::string::npos;
    EXPECT_TRUE(!was_said || job.Said().find("(errno ") != std::string::npos) << job.Said();
    const std::vector<int64_t> committed = job.CommittedSteps();
    EXPECT_THAT(committed, IsSupersetOf({10, 40}));
    EXPECT_TRUE(was_said || committed.size() == job.page().saves) << job.Said();
    EXPECT_THAT(LeftOvers(job.root()), ElementsAre());
    ASSERT_EQ(job.Tool("verify"), 0) << job.launched().Read("tool.out");
  }
}

// --- One read fails

// A start whose n-th read fails, for each n: what it cannot read it names, and it never takes that
// for "nothing there".
void FailEachRead(const char* call) {
  CkptJob job;
  job.trainer["--keep"] = "9";
  ASSERT_EQ(job.Run(), 0) << job.Said();
  const fs::path kept = job.launched().Path("kept");
  fs::copy(job.root(), kept, fs::copy_options::recursive);
  job.trainer["--steps"] = "30";
  int reached = 0;
  for (int n = 1;; n += kSanitized ? 10 : 1) {
    fs::remove_all(job.root());
    fs::copy(kept, job.root(), fs::copy_options::recursive);
    const std::string fault = std::string(call) + ":EIO:" + std::to_string(n);
    SCOPED_TRACE(fault);
    const int code = job.Run(ShimOrder{.fault = fault});
    if (job.page().faults == 0) break;
    ++reached;
    ASSERT_THAT(code, AnyOf(0, 82, 85)) << job.Said();
    if (code == 0) {
      ASSERT_THAT(job.RestoredStep(), AnyOf(10, 20)) << job.Said();
    } else {
      EXPECT_EQ(StepsTrained(job), 0u);
      EXPECT_THAT(job.Said(), HasSubstr("(errno 5)"));
    }
    if (code == 0 && job.RestoredStep() == 10) {
      EXPECT_THAT(job.Said(), HasSubstr("(errno 5)")) << "passed over without a reason";
    }
    // The disk is well again.
    ASSERT_EQ(job.Run(), 0) << job.Said();
    ASSERT_THAT(job.RestoredStep(), AnyOf(10, 20, 30)) << job.Said();
    EXPECT_TRUE(code != 0 || job.RestoredStep() == 30);
    ASSERT_EQ(job.Tool("verify"), 0) << job.launched().Read("tool.out");
    if (::testing::Test::HasFailure()) break;
  }
  std::printf("%s: %d calls\n", call, reached);
  EXPECT_GT(reached, 0);
}

TEST(FailingRead, OfAFolderIsNeverAnEmptyOne) { FailEachRead("opendir"); }
TEST(FailingRead, OfAFilesOpeningIsNeverAMissingOne) { FailEachRead("open_to_read"); }
TEST(FailingRead, OfASmallFileIsNamed) { FailEachRead("read"); }
TEST(FailingRead, OfAShardIsNamed) { FailEachRead("pread"); }

// One of two ranks alone cannot read, wherever in its restore that is: the other is not left
// waiting for it, and both take the older step.
TEST(FailingRead, OfOneRankAloneSendsBothToAnOlderStepAtOnce) {
  CkptJob job;
  job.world = 2;
  job.trainer["--keep"] = "9";
  ASSERT_EQ(job.Run(), 0) << job.Said();
  const fs::path kept = job.launched().Path("kept");
  fs::copy(job.root(), kept, fs::copy_options::recursive);
  job.trainer["--steps"] = "30";
  for (const std::string call : {"open_to_read", "read", "pread"}) {
    for (int n = 1;; n += kSanitized ? 3 : 1) {
      fs::remove_all(job.root());
      fs::copy(kept, job.root(), fs::copy_options::recursive);
      const std::string fault = call + ":EIO:" + std::to_string(n);
      SCOPED_TRACE(fault);
      const int64_t began = MonotonicNanos();
      ASSERT_EQ(job.Run(ShimOrder{.fault = fault, .fault_rank = 1}), 0) << job.Said();
      // Far below any deadline of a restore.
      EXPECT_LT(absl::Nanoseconds(MonotonicNanos() - began), absl::Seconds(20) * TimeFactor());
      if (job.page().faults == 0) {
        EXPECT_GT(n, 1);
        break;
      }
      ASSERT_EQ(job.RestoredStep(), 10) << job.Said();
      // Rank, object and cause in one line.
      EXPECT_THAT(job.Said(), ContainsRegex("restore of step 20 from [^\n]*failed: rank 1: "
                                            "[^\n]*/step-000000000020-[^\n]*\\(errno 5\\)"));
    }
  }
}

// A disk that gives nothing back at all.
TEST(FailingRead, ForGoodRefusesTheJobAndLosesNothing) {
  for (const char* call : {"opendir", "open_to_read", "read", "pread"}) {
    CkptJob job;
    ASSERT_EQ(job.Run(), 0) << job.Said();
    job.trainer["--steps"] = "30";
    SCOPED_TRACE(call);
    EXPECT_THAT(job.Run(ShimOrder{.fault = std::string(call) + ":EIO:1+"}), AnyOf(82, 85))
        << job.Said();
    EXPECT_EQ(StepsTrained(job), 0u);
    EXPECT_THAT(job.Said(), HasSubstr("(errno 5)"));
    EXPECT_EQ(job.Tool("verify"), 0) << job.launched().Read("tool.out");
    EXPECT_EQ(job.Tool("ls"), 0);
    // A shard that could not be read is in quarantine until somebody verifies it.
    EXPECT_THAT(job.launched().Read("tool.out"), HasSubstr("step 20  committed"));
  }
}

// --- File systems that lack something

// No error at all: what a file system refuses is done in another way.
TEST(PoorFileSystem, TakesSavesWithoutOneComplaint) {
  for (const char* fault : {"pwrite:EINVAL:1",  // O_DIRECT, refused at the first block only
                            "fallocate:EOPNOTSUPP:1+", "sync_file_range:ENOSYS:1+", "link:EPERM:1+",
                            "link:EOPNOTSUPP:1+", "pwrite:short:1+", "pwrite:EINTR:1",
                            "write:EINTR:1", "fallocate:EINTR:1"}) {
    SCOPED_TRACE(fault);
    CkptJob job;
    job.world = 2;
    SaveFourTimes(job);
    ASSERT_EQ(job.Run(ShimOrder{.from_save = 1, .fault = fault}), 0) << job.Said();
    EXPECT_TRUE(job.page().faults > 0 || std::string(fault).starts_with("sync_file_range"));
    EXPECT_THAT(job.Said(), Not(HasSubstr("training goes on")));
    EXPECT_EQ(job.CommittedSteps().back(), 40);
    EXPECT_EQ(job.Tool("verify"), 0) << job.launched().Read("tool.out");
    job.trainer["--steps"] = "45";
    ASSERT_EQ(job.Run(), 0) << job.Said();
    EXPECT_EQ(job.RestoredStep(), 40);
  }
}

// --- Clocks

// By up to a year, at each reading: which checkpoint is newer, who holds a root and when something
// is due is never the wall clock's to say.
TEST(WallClock, MayJumpAsItLikes) {
  const uint32_t seed = DrawSeed();
  CkptJob job;
  job.world = 2;
  job.trainer["--keep"] = "2";
  int64_t steps = 0;
  for (uint32_t run = 0; run < 4; ++run) {
    job.trainer["--steps"] = std::to_string(steps + 40);
    ASSERT_EQ(job.Run(ShimOrder{.seed = seed + run, .clock_jumps_s = 365 * 86400}), 0)
        << job.Said();
    EXPECT_GT(job.page().clock_readings, 0u);
    EXPECT_EQ(job.RestoredStep(), steps);
    steps += 40;
    EXPECT_EQ(job.CommittedSteps().back(), steps);
    EXPECT_LE(job.CommittedSteps().size(), 2u);
    EXPECT_THAT(job.Said(), Not(HasSubstr("training goes on")));
    ASSERT_EQ(job.Tool("verify"), 0) << job.launched().Read("tool.out");
  }
}

// --- A disk that fills up in the middle. Case O20

uint64_t FreeBlocks(const std::string& path) {
  struct statvfs facts {};
  EXPECT_EQ(statvfs(path.c_str(), &facts), 0);
  return facts.f_bavail * facts.f_frsize / 4096;
}

// A checkpoint is there; then room is left for the next one's shard and `spare` blocks more, which
// are used up by the claim, the receipt, the manifest, or never.
void FillUpAt(const std::string& disk, int spare) {
  constexpr uint64_t kShardBlocks = 270336 / 4096;
  SCOPED_TRACE(std::to_string(spare) + " blocks to spare");
  CkptJob job;
  job.trainer["--ckpt-dir"] = disk + "/ckpt";
  job.trainer["--keep"] = "9";
  job.trainer["--steps"] = "10";
  ASSERT_EQ(job.Run(), 0) << job.Said();
  const uint64_t left = FreeBlocks(disk);
  const uint64_t wanted = kShardBlocks + static_cast<uint64_t>(spare);
  ASSERT_GT(left, wanted);
  const std::string filler = disk + "/filler";
  {
    const UniqueFd fd(open(filler.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
    ASSERT_EQ(posix_fallocate(fd.get(), 0, static_cast<off_t>((left - wanted) * 4096)), 0);
  }
  job.trainer["--steps"] = "20";
  const int code = job.Run();
  EXPECT_THAT(code, AnyOf(0, 85, 88)) << job.Said();
  if (code != 0) {
    EXPECT_THAT(job.Said(), HasSubstr("(errno 28), wanted "));
    EXPECT_THAT(job.Said(), HasSubstr(" free"));
  }
  EXPECT_EQ(StepsTrained(job), code == 85 ? 0u : 10u);
  EXPECT_EQ(job.Tool("verify"), 0) << job.launched().Read("tool.out");
  const std::vector<int64_t> committed = job.CommittedSteps();
  EXPECT_EQ(committed.front(), 10);
  EXPECT_EQ(committed.back(), code == 0 ? 20 : committed.back());
  EXPECT_THAT(LeftOvers(job.root()), ElementsAre());

  fs::remove(filler);
  job.trainer["--steps"] = "30";
  EXPECT_EQ(job.Run(), 0) << job.Said();
  EXPECT_EQ(job.RestoredStep(), committed.back());
  EXPECT_EQ(job.CommittedSteps().back(), 30);
  EXPECT_EQ(job.Tool("verify"), 0) << job.launched().Read("tool.out");
  fs::remove_all(job.root());
}

constexpr int kFillStride = kSanitized ? 6 : 1;

TEST(FillingDisk, OfMemoryFailsTheSaveWithNumbersWhereverItIsFull) {
  Launched folder;
  const std::string disk = folder.Path("disk");
  fs::create_directory(disk);
  if (mount("outlast-test", disk.c_str(), "tmpfs", 0, "size=4m") != 0)
    GTEST_SKIP() << "needs the right to mount a tmpfs";
  for (int spare = -1; spare <= 8 && !HasFailure(); spare += kFillStride) FillUpAt(disk, spare);
  umount2(disk.c_str(), MNT_DETACH);
}

TEST(FillingDisk, OfExt4FailsTheSaveWithNumbersWhereverItIsFull) {
  Launched folder;
  LoopDisk disk(folder.Path("disk.img"), folder.Path("disk"));
  if (!disk.Make(16)) GTEST_SKIP() << "needs the right to mount a loop device";
  for (int spare = -1; spare <= 12 && !HasFailure(); spare += kFillStride)
    FillUpAt(disk.path(), spare);
}

// --- The power goes

// What a machine would find that lost its power now: the disk as it is, without what the page cache
// still holds. Then the journal is replayed.
class PowerLoss : public ::testing::Test {
 protected:
  void SetUp() override {
    disk_.emplace(folder_.Path("disk.img"), folder_.Path("disk"));
    if (!disk_->Make(kDiskMib)) GTEST_SKIP() << "needs the right to mount a loop device";
  }

  void Use(CkptJob& job) { job.trainer["--ckpt-dir"] = disk_->path() + "/ckpt"; }

  // Looks at a copy of the disk: all that is committed there is whole, and a job goes on from its
  // newest. The step that it went on from; -1: there was no checkpoint yet.
  int64_t StepAfterwards(const CkptJob& before) {
    const std::string image = folder_.Path("copy.img");
    fs::copy_file(disk_->image(), image, fs::copy_options::overwrite_existing);
    return StepAfterwards(before, image);
  }
  int64_t StepAfterwards(const CkptJob& before, const std::string& image) {
    LoopDisk copy(image, folder_.Path("copy"));
    EXPECT_TRUE(copy.Mount()) << "the file system itself is torn";
    CkptJob job;
    job.world = before.world;
    job.trainer = before.trainer;
    job.trainer["--ckpt-dir"] = copy.path() + "/ckpt";
    const int listed = job.Tool("ls");
    EXPECT_THAT(listed, AnyOf(0, 85)) << job.launched().Read("tool.err");
    const std::vector<int64_t> committed =
        listed == 0 ? job.CommittedSteps() : std::vector<int64_t>();
    EXPECT_EQ(job.Tool("verify"), listed) << job.launched().Read("tool.out");
    const int64_t newest = committed.empty() ? -1 : committed.back();
    // What is rolled forward is newer than what was committed.
    job.trainer["--steps"] = std::to_string(NewestFolder(job.root()) + 3);
    job.run_options = {"--take-over"};  // after a power cut nobody beats
    EXPECT_EQ(job.Run(), 0) << job.Said();
    EXPECT_GE(job.RestoredStep(), std::max<int64_t>(newest, 0)) << job.Said();
    EXPECT_EQ(job.Tool("verify"), 0) << job.launched().Read("tool.out");
    return newest < 0 && job.RestoredStep() == 0 ? -1 : job.RestoredStep();
  }

  static constexpr int kDiskMib = 24;
  Launched folder_;
  std::optional<LoopDisk> disk_;
};

// After each call of a second save that removes the first one: the first until the manifest is
// durable, then the second. Never neither.
TEST_F(PowerLoss, AfterEachCallOfASaveLeavesOneWholeCheckpoint) {
  std::vector<std::string> names;
  {
    CkptJob job;
    Use(job);
    ASSERT_EQ(job.Run(ShimOrder{.from_save = 2}), 0) << job.Said();
    for (uint32_t k = 1; k <= job.page().calls; ++k)
      names.push_back(job.CallName(static_cast<int>(k)));
  }
  ASSERT_GT(names.size(), 15u);
  // The last link is the manifest's; the fsync after it makes it durable.
  const auto linked = names.rend() - std::find(names.rbegin(), names.rend(), "link");
  const auto durable = std::find(names.begin() + linked, names.end(), "fsync") - names.begin() + 1;
  std::printf("%zu calls, durable after %td\n", names.size(), durable);
  for (size_t k = 1; k <= names.size() && !HasFailure(); k += kSanitized ? 9 : 1) {
    SCOPED_TRACE("after call " + std::to_string(k) + ", " + names[k - 1]);
    disk_->Unmount();
    ASSERT_TRUE(disk_->Make(kDiskMib));
    CkptJob job;
    Use(job);
    ASSERT_EQ(job.Run(ShimOrder{.from_save = 2, .kill_at = static_cast<int>(k)}), 128 + SIGKILL)
        << job.Said();
    ASSERT_EQ(CountAliveAfter(job.Pids(), absl::Seconds(10)), 0);
    const int64_t step = StepAfterwards(job);
    EXPECT_THAT(step, AnyOf(10, 20));
    EXPECT_TRUE(step == 20 || static_cast<std::ptrdiff_t>(k) < durable) << step;
  }
}

// At any moment of a job that saves without a pause. It is stopped meanwhile, since a copy that
// the disk changes under is no moment's.
TEST_F(PowerLoss, AtAnyMomentOfARunningJobLosesNothingThatWasCommitted) {
  std::mt19937 random(DrawSeed());
  CkptJob job;
  Use(job);
  job.world = 2;
  job.trainer["--steps"] = "1000000";
  job.trainer["--ckpt-every"] = "1";
  job.trainer["--keep"] = "2";
  job.Start(ShimOrder{});
  const auto commits = [&] { return job.page().commits.load(); };
  const std::string image = folder_.Path("copy.img");
  int64_t step = -1;
  for (int moment = 0; moment < (kSanitized ? 2 : 30) && !HasFailure(); ++moment) {
    const uint32_t seen = commits();
    while (commits() < seen + 2 && is_alive(job.launched().pid()))
      absl::SleepFor(absl::Milliseconds(1));
    absl::SleepFor(absl::Microseconds(random() % 20'000));
    const std::vector<pid_t> pids = job.Pids();
    for (const pid_t pid : pids) kill(pid, SIGSTOP);
    bool is_still = false;
    for (int i = 0; i < 50 && !is_still; ++i) {
      fs::copy_file(disk_->image(), image, fs::copy_options::overwrite_existing);
      is_still = std::system(("cmp -s " + disk_->image() + " " + image).c_str()) == 0;
    }
    ASSERT_TRUE(is_still);
    const int64_t found = StepAfterwards(job, image);
    for (const pid_t pid : pids) kill(pid, SIGCONT);
    EXPECT_GT(found, step) << "two saves were committed meanwhile";
    step = found;
  }
  std::printf("up to step %ld\n", static_cast<long>(step));
  kill(job.launched().pid(), SIGTERM);
  EXPECT_EQ(job.Wait(), 80) << job.Said();
}

// --- A frozen disk

class FrozenDisk : public ::testing::Test {
 protected:
  void SetUp() override {
    disk_.emplace(job_.launched().Path("disk.img"), job_.launched().Path("disk"));
    if (!disk_->Make(24)) GTEST_SKIP() << "needs the right to mount a loop device";
    job_.trainer["--ckpt-dir"] = disk_->path() + "/ckpt";
    job_.world = 2;
    job_.trainer["--step-ms"] = "2";
    job_.trainer["--keep"] = "2";
  }
  // Whatever the test does, who hangs in the kernel is let go.
  ~FrozenDisk() override {
    if (disk_) disk_->Thaw();
  }
  void StartAndFreeze() {
    job_.Start(ShimOrder{});
    while (job_.page().commits == 0 && is_alive(job_.launched().pid()))
      absl::SleepFor(absl::Milliseconds(1));
    ASSERT_TRUE(disk_->Freeze());
    frozen_at_ = StepsTrained(job_);
  }
  // False: not within 30 s.
  bool AwaitSteps(size_t count) {
    const int64_t deadline =
        MonotonicNanos() + absl::ToInt64Nanoseconds(absl::Seconds(30) * TimeFactor());
    while (StepsTrained(job_) < count && MonotonicNanos() < deadline)
      absl::SleepFor(absl::Milliseconds(2));
    return StepsTrained(job_) >= count;
  }

  CkptJob job_;
  std::optional<LoopDisk> disk_;
  size_t frozen_at_ = 0;
};

TEST_F(FrozenDisk, HoldsUpNoStepAndEndsWithTheThaw) {
  job_.trainer["--steps"] = "400";
  StartAndFreeze();
  ASSERT_TRUE(AwaitSteps(800)) << StepsTrained(job_) << " from " << frozen_at_;
  EXPECT_LT(frozen_at_, 700u) << "too late to say anything";
  // All is trained; the last state is not durable, so the job stays.
  EXPECT_EQ(CountAliveAfter({job_.launched().pid()}, absl::Milliseconds(300)), 1);
  disk_->Thaw();
  const int64_t thawed = MonotonicNanos();
  EXPECT_EQ(job_.Wait(), 0) << job_.Said();
  EXPECT_LT(MonotonicNanos() - thawed, absl::ToInt64Nanoseconds(absl::Seconds(10) * TimeFactor()));
  EXPECT_EQ(job_.CommittedSteps().back(), 400);
  EXPECT_EQ(job_.Tool("verify"), 0) << job_.launched().Read("tool.out");
}

TEST_F(FrozenDisk, LetsAJobThatIsToldToStopEndWithTheThaw) {
  job_.trainer["--steps"] = "1000000";
  StartAndFreeze();
  ASSERT_TRUE(AwaitSteps(frozen_at_ + 100));
  kill(job_.launched().pid(), SIGTERM);
  EXPECT_EQ(CountAliveAfter({job_.launched().pid()}, absl::Milliseconds(300)), 1);
  disk_->Thaw();
  EXPECT_EQ(job_.Wait(), 80) << job_.Said();
  const int64_t saved = job_.CommittedSteps().back();
  EXPECT_GE(saved, static_cast<int64_t>(frozen_at_ / 2));
  job_.trainer["--steps"] = std::to_string(saved + 5);
  EXPECT_EQ(job_.Run(), 0) << job_.Said();
  EXPECT_EQ(job_.RestoredStep(), saved);
}

}  // namespace
}  // namespace outlast::testing
