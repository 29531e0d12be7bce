#include "launch/guardian.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "launch/process.h"
#include "outlast/base/clock.h"
#include "outlast/testing/time_factor.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;

class GuardianTest : public ::testing::Test {
 protected:
  void Start(std::vector<std::string> command) {
    GuardianCommand wanted{command[0], command, "cafe", {}};
    sigprocmask(SIG_SETMASK, nullptr, &wanted.signal_mask);
    guardian_ = Guardian::Fork(wanted).value();
    folder_ = ::testing::TempDir() + "/guardian_test_" + std::to_string(getpid()) + "_" +
              std::to_string(guardian_->pid());
    ASSERT_EQ(mkdir(folder_.c_str(), 0755), 0);
  }

  void Spawn(int slot, uint64_t incarnation = 1, std::vector<std::string> environment = {}) {
    const UniqueFd null(open("/dev/null", O_RDWR | O_CLOEXEC));
    const UniqueFd output(
        open((folder_ + "/out").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    environment.push_back("SLOT=" + std::to_string(slot));
    environment.push_back("FOLDER=" + folder_);
    WorkerSpec spec{slot,
                    incarnation,
                    environment,
                    {null.get(), output.get(), output.get()},
                    {{"EXTRA_FD", output.get()}}};
    ASSERT_TRUE(guardian_->Spawn(spec).ok());
  }

  // The next report of that kind; others are dropped.
  template <typename Report>
  Report Await() {
    while (true) {
      pollfd wait{guardian_->fd(), POLLIN, 0};
      EXPECT_EQ(poll(&wait, 1, static_cast<int>(10'000 * testing::TimeFactor())), 1) << "no report";
      if (wait.revents == 0) return {};
      auto report = guardian_->Receive();
      EXPECT_TRUE(report.ok() && report->has_value()) << "the guardian is gone";
      if (!report.ok() || !report->has_value()) return {};
      if (auto* wanted = std::get_if<Report>(&**report)) return std::move(*wanted);
    }
  }

  // Blocks until a worker has opened the fifo, and reads what it says.
  std::string ReadFifo(const std::string& name) {
    const std::string path = folder_ + "/" + name;
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }
  void MakeFifo(const std::string& name) {
    ASSERT_EQ(mkfifo((folder_ + "/" + name).c_str(), 0600), 0);
  }

  std::string Output() const { return ReadProcFile(folder_ + "/out", 1 << 20); }
  static bool is_alive(pid_t pid) {
    const auto info = ReadProcess(pid);
    return info.has_value() && !info->is_zombie();
  }

  std::unique_ptr<Guardian> guardian_;
  std::string folder_;
};

TEST_F(GuardianTest, TellsHowAWorkerEnded) {
  Start({"/bin/sh", "-c", "[ $SLOT = 0 ] && exit 7; kill -SEGV $$"});
  Spawn(0);
  EXPECT_GT(Await<WorkerStarted>().pid, 0);
  const auto first = Await<WorkerExited>();
  EXPECT_EQ(first.code, 7);
  EXPECT_EQ(first.signal, 0);
  Spawn(1);
  const auto second = Await<WorkerExited>();
  EXPECT_EQ(second.slot, 1);
  EXPECT_EQ(second.signal, SIGSEGV);
  EXPECT_TRUE(second.error.empty());
}

TEST_F(GuardianTest, GivesAWorkerItsGroupItsVariablesAndItsDescriptors) {
  setenv("OUTLAST_TEST_INHERITED", "yes", 1);
  Start({"/bin/sh", "-c",
         "echo $OUTLAST_TEST_INHERITED $OUTLAST_SLOT_TAG >>/proc/self/fd/$EXTRA_FD; cut -d' ' -f5 "
         "/proc/self/stat; echo $$"});
  Spawn(3, 5);
  const pid_t pid = Await<WorkerStarted>().pid;
  Await<TreeGone>();
  EXPECT_EQ(Output(), "yes cafe.3.5\n" + std::to_string(pid) + "\n" + std::to_string(pid) + "\n");
}

TEST_F(GuardianTest, TellsWhyACommandCouldNotBeRun) {
  Start({"/etc/passwd"});
  Spawn(0);
  const auto exited = Await<WorkerExited>();
  EXPECT_EQ(exited.code, 127);
  EXPECT_EQ(exited.error, "run the command: Permission denied");
}

// Case O01 (d, e): a helper that changed its session, and one that was forked twice besides.
TEST_F(GuardianTest, KillsTheHelpersOfAWorkerThatEndedBeforeItsSlotIsFilled) {
  Start({"/bin/sh", "-c",
         "[ $ATTEMPT = 1 ] && { for p in $(cat $FOLDER/pids); do kill -0 $p 2>/dev/null && echo "
         "alive $p; done; echo checked; exit 0; };"
         "sleep 300 & echo $! >>$FOLDER/pids;"
         "setsid sleep 301 & echo $! >>$FOLDER/pids;"
         "(setsid sh -c 'sleep 302 & echo $! >>$FOLDER/pids') ;"
         "exit 3"});
  Spawn(0, 1, {"ATTEMPT=0"});
  Await<WorkerExited>();
  Spawn(0, 2, {"ATTEMPT=1"});
  EXPECT_EQ(Await<TreeGone>().incarnation, 1u);
  EXPECT_EQ(Await<TreeGone>().incarnation, 2u);
  EXPECT_EQ(Output(), "checked\n");
}

TEST_F(GuardianTest, LeavesTheHelpersOfOtherSlotsAlone) {
  Start({"/bin/sh", "-c",
         "[ $SLOT = 1 ] && { sleep 300 & echo $! >$FOLDER/helper; wait; };"
         "setsid sleep 301 & exit 3"});
  MakeFifo("helper");
  Spawn(1);
  const pid_t helper = std::stoi(ReadFifo("helper"));
  Spawn(0);
  EXPECT_EQ(Await<TreeGone>().slot, 0);
  EXPECT_TRUE(is_alive(helper));
}

TEST_F(GuardianTest, LetsHelpersFinishAfterTerm) {
  Start({"/bin/sh", "-c",
         "sh -c 'trap \"echo saved; exit 0\" TERM; echo ready >$FOLDER/ready; while :; do sleep "
         "0.01; done'; true"});
  MakeFifo("ready");
  Spawn(0);
  EXPECT_EQ(ReadFifo("ready"), "ready\n");
  ASSERT_TRUE(guardian_->Terminate(0, 1).ok());
  Await<TreeGone>();
  EXPECT_THAT(Output(), HasSubstr("saved\n"));
}

TEST_F(GuardianTest, ForwardsASignalToWhoCatchesIt) {
  Start({"/bin/sh", "-c",
         "trap 'echo warned' USR1; echo ready >$FOLDER/ready; sleep 0.1; while [ ! -s $FOLDER/out "
         "]; do sleep 0.01; done"});
  MakeFifo("ready");
  Spawn(0);
  EXPECT_EQ(ReadFifo("ready"), "ready\n");
  ASSERT_TRUE(guardian_->Forward(0, 1, SIGUSR1).ok());
  EXPECT_EQ(Await<WorkerExited>().code, 0);
  EXPECT_EQ(Output(), "warned\n");
}

TEST_F(GuardianTest, ForwardsTermToWhoDoesNotCatchTheSignal) {
  Start({"/bin/sleep", "300"});
  Spawn(0);
  Await<WorkerStarted>();
  ASSERT_TRUE(guardian_->Forward(0, 1, SIGUSR1).ok());
  EXPECT_EQ(Await<WorkerExited>().signal, SIGTERM);
}

TEST_F(GuardianTest, KillsAWorkerThatIgnoresTerm) {
  Start({"/bin/sh", "-c", "trap '' TERM; echo ready >$FOLDER/ready; while :; do sleep 300; done"});
  MakeFifo("ready");
  Spawn(0);
  EXPECT_EQ(ReadFifo("ready"), "ready\n");
  ASSERT_TRUE(guardian_->Terminate(0, 1).ok());
  ASSERT_TRUE(guardian_->Kill(0, 1).ok());
  EXPECT_EQ(Await<WorkerExited>().signal, SIGKILL);
  Await<TreeGone>();
}

TEST_F(GuardianTest, EndsEverythingWhenItIsFinished) {
  // A helper that hides from its slot: own session, forked twice, cleared environment.
  Start({"/bin/sh", "-c",
         "(setsid env -i sh -c 'sleep 300 & echo $! >'$FOLDER'/hidden'); sleep 301"});
  MakeFifo("hidden");
  Spawn(0);
  const pid_t worker = Await<WorkerStarted>().pid;
  const pid_t hidden = std::stoi(ReadFifo("hidden"));
  ASSERT_TRUE(is_alive(hidden));
  ASSERT_TRUE(guardian_->Finish(absl::Seconds(5)).ok());
  EXPECT_FALSE(is_alive(worker));
  EXPECT_FALSE(is_alive(hidden));
  EXPECT_TRUE(ChildrenOf(getpid()).empty());
}

TEST_F(GuardianTest, TakesAllWorkersAlongWhenItIsKilled) {
  Start({"/bin/sh", "-c",
         "(setsid env -i sh -c 'sleep 300 & echo $! >'$FOLDER'/hidden'); sleep 301"});
  MakeFifo("hidden");
  Spawn(0);
  Await<WorkerStarted>();
  const pid_t hidden = std::stoi(ReadFifo("hidden"));
  kill(guardian_->pid(), SIGKILL);
  EXPECT_FALSE(guardian_->Receive()->has_value());
  EXPECT_TRUE(EndDescendants(absl::Seconds(5)).ok());
  EXPECT_FALSE(is_alive(hidden));
  EXPECT_TRUE(ChildrenOf(getpid()).empty());
}

// Case D19.
TEST_F(GuardianTest, KeepsNoDescriptorsOverFiftyWorkers) {
  Start({"/bin/true"});
  const std::string descriptors = "/proc/" + std::to_string(guardian_->pid()) + "/fd";
  const auto count = [&] {
    return std::distance(std::filesystem::directory_iterator(descriptors), {});
  };
  Spawn(0, 1);
  Await<TreeGone>();  // now it is set up
  const auto before = count();
  for (uint64_t incarnation = 2; incarnation <= 50; ++incarnation) {
    Spawn(0, incarnation);
    EXPECT_EQ(Await<TreeGone>().incarnation, incarnation);
  }
  EXPECT_EQ(count(), before);
}

TEST(SendSignal, NeverReachesAProcessThatStartedAtAnotherTime) {
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  ProcessInfo stranger = ReadProcess(child).value();
  ProcessInfo same = stranger;
  stranger.start_ticks -= 1;
  EXPECT_FALSE(SendSignal(stranger, SIGKILL));
  EXPECT_EQ(kill(child, 0), 0);
  EXPECT_TRUE(SendSignal(same, SIGKILL));
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
  EXPECT_FALSE(SendSignal(same, SIGKILL));
}

}  // namespace
}  // namespace outlast
