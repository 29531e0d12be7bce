// `outlast preflight` as a user runs it: nothing is left behind, and a slip is not taken for a fit
// node.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "launch/process.h"
#include "outlast/base/clock.h"
#include "outlast/testing/time_factor.h"
#include "tests/support/paths.h"
#include "tests/support/piped_process.h"
#include "tests/support/temp_folder.h"

namespace outlast::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

absl::Duration Within(int seconds) { return absl::Seconds(seconds) * TimeFactor(); }

class PreflightTool : public ::testing::Test {
 protected:
  std::unique_ptr<PipedProcess> Start(const std::vector<std::string>& more) {
    std::vector<std::string> command = {BuildFolder() / "outlast", "preflight", "--only", "clock"};
    command.insert(command.end(), more.begin(), more.end());
    return std::make_unique<PipedProcess>(command);
  }
  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  // Waits for a probe to write a process id there.
  pid_t AwaitPid(const std::string& name) const {
    const absl::Duration limit = Clock::Real().Uptime() + Within(20);
    pid_t pid = 0;
    while (pid == 0 && Clock::Real().Uptime() < limit) {
      std::ifstream(Path(name)) >> pid;
      Clock::Real().SleepFor(absl::Milliseconds(5));
    }
    return pid;
  }
  static bool IsAlive(pid_t pid) {
    const auto process = ReadProcess(pid);
    return process.has_value() && !process->is_zombie();
  }

  const TempFolder temp_;
  const std::string folder_ = temp_.path();
};

TEST_F(PreflightTool, EndsWhatItsProbesStartedWhenItIsStopped) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    std::filesystem::remove(Path("pid"));
    const auto tool =
        Start({"--probe", "setsid sh -c 'echo $$ > " + Path("pid") + "; exec sleep 600' & wait"});
    const pid_t helper = AwaitPid("pid");
    ASSERT_GT(helper, 0) << tool->seen();

    tool->Signal(signal);

    EXPECT_EQ(tool->Wait(Within(10)), 128 + signal);
    EXPECT_FALSE(IsAlive(helper));
    EXPECT_THAT(tool->seen(), HasSubstr("fit      clock"));
  }
}

TEST_F(PreflightTool, EndsHelpersThatAProbeLeaves) {
  const auto tool = Start(
      {"--probe", "setsid sh -c 'echo $$ > " + Path("pid") + "; exec sleep 600' & sleep 0.2"});
  EXPECT_EQ(tool->Wait(Within(20)), 0) << tool->seen();
  const pid_t helper = AwaitPid("pid");
  EXPECT_GT(helper, 0);
  EXPECT_FALSE(IsAlive(helper));
}

TEST_F(PreflightTool, RefusesASlipInsteadOfPassingIt) {
  std::ofstream(Path("file")) << "x";
  const auto refuses = [&](const std::vector<std::string>& words, const char* why) {
    const auto tool = Start(words);
    EXPECT_EQ(tool->Wait(Within(20)), 85) << words[1];
    EXPECT_THAT(tool->seen(), HasSubstr(why));
  };
  refuses({"--folder", Path("none")}, "No such file");
  refuses({"--folder", Path("file")}, "a folder wanted");
  refuses({"--limit", "0"}, "more than 0 wanted");
  refuses({"--limit", "nan"}, "seconds, 0 or more wanted");
  refuses({"--floor", "clock=inf"}, "a number from 0");
  refuses({"--floor", "clock=0x10"}, "a number from 0");
  refuses({"--floor", "disk=5"}, "that --only names");
  refuses({"--probe", ""}, "a command wanted");
}

TEST_F(PreflightTool, SaysThatSomeSayNothing) {
  const auto tool = Start({"--probe", "/no/such/program"});
  EXPECT_EQ(tool->Wait(Within(20)), 0);
  EXPECT_THAT(tool->seen(), AllOf(HasSubstr("unknown"), HasSubstr("1 of 2 say nothing")));
}

}  // namespace
}  // namespace outlast::testing
