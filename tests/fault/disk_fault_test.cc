// Disks that fail, fill up, freeze or lose their power, under the real tool and a real trainer.
#include <sys/mount.h>

#include <array>
#include <set>
#include <thread>

#include "tests/fault/ckpt_job.h"
#include "tests/fault/loop_disk.h"
#include "tests/support/seed.h"

namespace outlast::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Not;

size_t StepsTrained(CkptJob& job) {
  const std::string log = job.launched().Read("log");
  return static_cast<size_t>(std::count(log.begin(), log.end(), '\n'));
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
  calls += 6;  // into the next save, which may be the final one
  for (int k = 1; k <= calls; k += kSanitized ? 20 : 1) {
    const std::string fault = "any:" + std::string(errors[k % 5]) + ":" + std::to_string(k);
    CkptJob job;
    SaveFourTimes(job);
    ASSERT_EQ(job.Run(ShimOrder{.from_save = 2, .fault = fault}), 0) << fault << job.Said();
    SCOPED_TRACE(fault + ", " + job.CallName(k));
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

}  // namespace
}  // namespace outlast::testing
