// The remote tier by the real tool and a real trainer, which checks every byte that it restores.
#include "tests/fault/ckpt_job.h"
#include "tests/support/radosgw.h"
#ifdef OUTLAST_HAS_S3
#include "outlast/adapters/s3.h"
#endif

namespace outlast::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

// Steps of whole checkpoints in a folder.
std::vector<int64_t> StepsIn(const std::string& folder) {
  std::vector<int64_t> steps;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("step-") && fs::exists(entry.path() / "MANIFEST.json"))
      steps.push_back(std::atoll(name.substr(5, 12).c_str()));
  }
  std::ranges::sort(steps);
  return steps;
}

// Trains, loses the local root, and goes on.
void LosesItsMachineAndGoesOn(CkptJob& job, const std::string& remote) {
  job.world = 2;
  job.trainer["--state-mb"] = "20";
  job.trainer["--remote"] = remote;
  ASSERT_EQ(job.Run(), 0) << job.Said();
  fs::remove_all(job.root());
  job.trainer["--steps"] = "40";
  ASSERT_EQ(job.Run(), 0) << job.Said();
  EXPECT_EQ(job.RestoredStep(), 20) << job.Said();
  for (const Restored& one : job.Restores()) EXPECT_EQ(one.source, "remote");
  const std::string events = job.launched().Read("outlast-runs/latest/events.jsonl");
  EXPECT_THAT(events, HasSubstr("\"event\":\"uploaded\""));
  EXPECT_THAT(events, HasSubstr("\"source\":\"remote\""));
  EXPECT_EQ(job.Tool("verify"), 0) << job.launched().Read("tool.out");
  const std::vector<int64_t> here = StepsIn(job.root());
  EXPECT_EQ(std::ranges::count(here, 20), 0) << "it was brought to the local disk";
}

TEST(Remote, RestoresOnAFreshMachineFromAFolder) {
  CkptJob job;
  LosesItsMachineAndGoesOn(job, "file://" + job.launched().Path("mount"));
  EXPECT_EQ(StepsIn(job.launched().Path("mount")).back(), 40);
}

#ifdef OUTLAST_HAS_S3
TEST(Remote, RestoresOnAFreshMachineFromS3) {
  OUTLAST_RADOSGW_OR_SKIP(gateway);
  ASSERT_EQ(MakeS3Bucket("s3://jobs"), absl::OkStatus());
  CkptJob job;
  LosesItsMachineAndGoesOn(job, "s3://jobs/my/run");
  const std::string events = job.launched().Read("outlast-runs/latest/events.jsonl");
  EXPECT_THAT(events + job.Said(), Not(HasSubstr("not-a-secret-of-anybody")));
  // The tool, on the bucket itself.
  const auto tool = [&](const std::string& words) {
    const std::string command = "exec " + ToolPath() + " ckpt " + words + " >" +
                                job.launched().Path("tool.out") + " 2>" +
                                job.launched().Path("tool.err");
    const int status = std::system(command.c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  };
  const std::string back = job.launched().Path("back");
  EXPECT_EQ(tool("ls s3://jobs/my/run"), 0) << job.launched().Read("tool.err");
  EXPECT_THAT(job.launched().Read("tool.out"), HasSubstr("step 40  committed"));
  EXPECT_EQ(tool("show s3://jobs/my/run"), 0) << job.launched().Read("tool.err");
  EXPECT_EQ(tool("verify s3://jobs/my/run"), 0) << job.launched().Read("tool.err");
  EXPECT_EQ(tool("copy s3://jobs/my/run " + back), 0) << job.launched().Read("tool.err");
  EXPECT_EQ(tool("verify " + back), 0) << job.launched().Read("tool.out");
  EXPECT_EQ(tool("copy " + back + " s3://jobs/second"), 0) << job.launched().Read("tool.err");
  EXPECT_EQ(tool("verify s3://jobs/second"), 0) << job.launched().Read("tool.err");
  EXPECT_EQ(tool("ls s3://jobs/nothing"), 85);
  EXPECT_EQ(tool("ls s3://no-such-bucket/x"), 85) << job.launched().Read("tool.err");
}
#endif

TEST(Remote, GoesOnWithTheUploadOfAnAgentThatWasKilled) {
  CkptJob job;
  job.world = 2;
  job.trainer["--state-mb"] = "4";
  job.trainer["--steps"] = "100000";
  job.trainer["--remote"] = job.launched().Path("mount");
  job.trainer["--remote-rate"] = "300000";  // a shard in some 10 s
  job.Start();
  const auto is_uploading = [&] {
    if (!fs::exists(job.launched().Path("mount"))) return false;
    for (const auto& entry : fs::recursive_directory_iterator(job.launched().Path("mount")))
      if (entry.path().string().find("/step-") != std::string::npos) return true;
    return false;
  };
  const int64_t deadline = MonotonicNanos() + 30'000'000'000 * static_cast<int64_t>(TimeFactor());
  while (!is_uploading() && MonotonicNanos() < deadline)
    Clock::Real().SleepFor(absl::Milliseconds(5));
  kill(job.launched().pid(), SIGKILL);
  EXPECT_EQ(job.Wait(), 128 + SIGKILL);
  EXPECT_TRUE(StepsIn(job.launched().Path("mount")).empty());
  // The next one begins at what is on disk, and uploads that, at full speed at its end.
  const auto on_disk = StepsIn(job.root());
  ASSERT_FALSE(on_disk.empty());
  job.trainer["--steps"] = std::to_string(on_disk.back());
  ASSERT_EQ(job.Run(), 0) << job.Said();
  EXPECT_EQ(StepsIn(job.launched().Path("mount")), std::vector<int64_t>{on_disk.back()});
}

}  // namespace
}  // namespace outlast::testing
