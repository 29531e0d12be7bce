// The coordinator as a process of its own, killed and stopped; agents in other processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "base/socket.h"
#include "outlast/base/fd.h"
#include "outlast/testing/time_factor.h"
#include "tests/support/paths.h"
#include "tests/support/piped_process.h"
#include "tests/support/temp_folder.h"

namespace outlast::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

absl::Duration Within(int seconds) { return absl::Seconds(seconds) * TimeFactor(); }

class CoordinatorProcess : public ::testing::Test {
 protected:
  ~CoordinatorProcess() override {
    agents_.clear();
    coordinator_.reset();
  }

  std::unique_ptr<PipedProcess> Coordinate(const std::string& nodes,
                                           const std::vector<std::string>& more = {}) {
    std::vector<std::string> command = {BuildFolder() / "outlast",
                                        "coordinator",
                                        "--job",
                                        "job",
                                        "--journal",
                                        folder_ + "/journal",
                                        "--nnodes",
                                        nodes,
                                        "--listen",
                                        listen_,
                                        "--last-call",
                                        "0.5"};
    command.insert(command.end(), more.begin(), more.end());
    return std::make_unique<PipedProcess>(command);
  }
  // Later ones take the same address.
  void StartCoordinator(const std::string& nodes, const std::vector<std::string>& more = {}) {
    coordinator_ = Coordinate(nodes, more);
    const std::string line = coordinator_->LineWith("coordinator of job job at ", Within(10));
    ASSERT_NE(line, "") << coordinator_->seen();
    listen_ = line.substr(line.rfind(' ') + 1);
  }
  PipedProcess& StartAgents(int first, int count) {
    agents_.push_back(std::make_unique<PipedProcess>(
        std::vector<std::string>{BuildFolder() / "outlast_agent_streams", listen_, "job",
                                 std::to_string(first), std::to_string(count)}));
    agents_.back()->Go();
    return *agents_.back();
  }

  const TempFolder temp_;
  const std::string folder_ = temp_.path();
  std::string listen_ = "127.0.0.1:0";
  std::unique_ptr<PipedProcess> coordinator_;
  std::vector<std::unique_ptr<PipedProcess>> agents_;
};

TEST_F(CoordinatorProcess, KilledAndRestartedItGoesOnWithTheSameGeneration) {
  StartCoordinator("3");
  PipedProcess& agents = StartAgents(0, 3);
  ASSERT_NE(agents.LineWith("open 1", Within(10)), "");

  coordinator_->Kill();
  ASSERT_NE(agents.LineWith("down", Within(10)), "");
  StartCoordinator("3");
  coordinator_->Signal(SIGTERM);  // a stop ends what runs: the agents have come back

  EXPECT_NE(coordinator_->LineWith("job job ends with 8", Within(40)), "") << coordinator_->seen();
  EXPECT_THAT(agents.seen(), Not(HasSubstr("open 2")));
}

TEST_F(CoordinatorProcess, AnotherOneOnTheSameJournalIsRefused) {
  StartCoordinator("1:2");
  listen_ = "127.0.0.1:0";
  const auto second = Coordinate("1:2");
  EXPECT_EQ(second->Wait(Within(10)), 85);
  EXPECT_THAT(second->seen(), HasSubstr("another coordinator has this journal (job job process "));
}

TEST_F(CoordinatorProcess, AJournalOfAnotherJobIsRefused) {
  std::filesystem::create_directories(folder_ + "/journal");
  std::ofstream(folder_ + "/journal/coordinator.lock") << "job other\nprocess 1\n";
  const auto coordinator = Coordinate("1:2");
  EXPECT_EQ(coordinator->Wait(Within(10)), 85);
  EXPECT_THAT(coordinator->seen(), HasSubstr("of job other, this is job job"));
}

TEST_F(CoordinatorProcess, OfAJobOfOneNodeIsRefusedForNoAgentOfOneWouldCome) {
  for (const char* nodes : {"1", "1:1"}) {
    const auto coordinator = Coordinate(nodes);
    EXPECT_EQ(coordinator->Wait(Within(10)), 85);
    EXPECT_EQ(coordinator->seen(), std::string("outlast: coordinator: --nnodes '") + nodes +
                                       "': as its agents have it, 2 or more, or MIN:MAX wanted\n");
  }
}

TEST_F(CoordinatorProcess, ThatIsNotStartedAsTheJobsAgentsDoesNotGoOnWithIt) {
  StartCoordinator("1:2", {"--max-restarts", "5"});
  PipedProcess agent({BuildFolder() / "outlast", "run", "--nnodes", "1:2", "--coordinator", listen_,
                      "--job", "job", "--max-restarts", "5", "--preflight", "off", "--run-dir",
                      folder_ + "/runs", "-n", "1", "--", "sleep", "100"});
  ASSERT_NE(agent.LineWith("generation 1 with 1 ranks", Within(20)), "") << agent.seen();
  coordinator_->Kill();

  const auto unlike = Coordinate("1:2");
  EXPECT_EQ(unlike->Wait(Within(20)), 85) << unlike->seen();
  EXPECT_THAT(unlike->seen(), HasSubstr("not started as the job's agents were: --max-restarts 3, "
                                        "5 wanted"));

  StartCoordinator("1:2", {"--max-restarts", "5"});
  EXPECT_NE(agent.LineWith("the coordinator is there", Within(20)), "") << agent.seen();
}

TEST_F(CoordinatorProcess, OneThatSomebodyElseWroteBehindStepsDown) {
  StartCoordinator("1:2");
  std::ofstream(folder_ + "/journal/coordinator.journal", std::ios::app) << "x";
  StartAgents(0, 1);
  EXPECT_NE(coordinator_->LineWith("another one writes to it", Within(10)), "")
      << coordinator_->seen() << agents_.back()->seen();
  EXPECT_EQ(coordinator_->Wait(Within(10)), 84);
}

TEST_F(CoordinatorProcess, AStoppedOneIsNoticedByItsAgents) {
  StartCoordinator("1:2");
  PipedProcess& agent = StartAgents(0, 1);
  ASSERT_NE(agent.LineWith("open 1", Within(10)), "");

  coordinator_->Signal(SIGSTOP);

  EXPECT_NE(agent.LineWith("down", Within(6)), "");
}

TEST_F(CoordinatorProcess, AStoppedAgentIsLostAndTheOthersGoOn) {
  StartCoordinator("2:3");
  StartAgents(0, 2);
  PipedProcess& stopped = StartAgents(2, 1);
  ASSERT_NE(stopped.LineWith("open 1", Within(10)), "");

  stopped.Signal(SIGSTOP);

  EXPECT_NE(coordinator_->LineWith("node n2: lost", Within(25)), "") << coordinator_->seen();
  EXPECT_NE(agents_[0]->LineWith("open 2", Within(20)), "");
}

TEST_F(CoordinatorProcess, StoppedBeforeAnybodyCameItEndsAtOnceAndItsJournalIsUsedUp) {
  StartCoordinator("1:2", {"--serve-late", "600"});
  coordinator_->Signal(SIGTERM);
  EXPECT_EQ(coordinator_->Wait(Within(10)), 81) << coordinator_->seen();

  const auto again = Coordinate("1:2", {"--serve-late", "0"});
  EXPECT_EQ(again->Wait(Within(10)), 85);
  EXPECT_THAT(again->seen(), HasSubstr("it had ended before, with 81"));
  EXPECT_THAT(again->seen(), HasSubstr("a new job wants a new folder"));
}

TEST_F(CoordinatorProcess, ASecondSignalEndsTheWaitForLateAgents) {
  StartCoordinator("1:2", {"--serve-late", "600"});
  PipedProcess& agent = StartAgents(0, 1);
  ASSERT_NE(agent.LineWith("open 1", Within(10)), "");
  coordinator_->Signal(SIGTERM);
  ASSERT_NE(coordinator_->LineWith("job job ends with 8", Within(60)), "") << coordinator_->seen();
  coordinator_->Signal(SIGTERM);
  EXPECT_NE(coordinator_->Wait(Within(10)), -1);
}

TEST_F(CoordinatorProcess, AThousandAgentsThatComeAtOnceAllJoin) {
#ifdef OUTLAST_SANITIZED
  constexpr int kProcesses = 4, kStreams = 32;
#else
  constexpr int kProcesses = 16, kStreams = 64;
#endif
  StartCoordinator(std::to_string(kProcesses * kStreams));
  for (int i = 0; i < kProcesses; ++i) {
    agents_.push_back(std::make_unique<PipedProcess>(
        std::vector<std::string>{BuildFolder() / "outlast_agent_streams", listen_, "job",
                                 std::to_string(i * kStreams), std::to_string(kStreams)}));
  }
  for (const auto& agent : agents_)
    ASSERT_NE(agent->LineWith("ready", Within(20)), "") << agent->seen();
  for (const auto& agent : agents_) agent->Go();
  for (const auto& agent : agents_)
    EXPECT_NE(agent->LineWith("open 1", Within(20)), "") << agent->seen();
  EXPECT_THAT(coordinator_->seen(), Not(HasSubstr("refused")));
}

// gRPC gives up listening for good where accept finds no descriptor.
TEST_F(CoordinatorProcess, ManyWhoSayNothingDoNotStopItFromListening) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit low{64, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  StartCoordinator("1:2");
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  {
    std::vector<UniqueFd> silent;
    const auto address = NumericAddress(*HostPort::Parse(listen_));
    for (int i = 0; i < 200; ++i) silent.push_back(StartConnect(*address).value());
    EXPECT_NE(StartAgents(0, 1).LineWith("open 1", Within(20)), "") << coordinator_->seen();
  }
}

TEST_F(CoordinatorProcess, AJobOfOneNodeLoadsNoGrpc) {
  PipedProcess tool({BuildFolder() / "outlast", "run", "-n", "1", "--run-dir", folder_ + "/runs",
                     "--", "/bin/sh", "-c", "cat /proc/$PPID/maps; echo; echo up; sleep 60"});
  ASSERT_NE(tool.LineWith("up", Within(10)), "") << tool.seen();
  std::ifstream file("/proc/" + std::to_string(tool.pid()) + "/maps");
  const std::string maps(std::istreambuf_iterator<char>(file), {});
  EXPECT_THAT(maps, HasSubstr("libc.so"));
  EXPECT_THAT(maps, Not(HasSubstr("grpc")));
  EXPECT_THAT(tool.seen(), Not(HasSubstr("grpc"))) << "the guardian's";
  tool.Signal(SIGTERM);
  EXPECT_NE(tool.Wait(Within(20)), -1);
}

TEST_F(CoordinatorProcess, RefusesNonsenseInOneLine) {
  const auto coordinator = Coordinate("3:x");
  EXPECT_EQ(coordinator->Wait(Within(10)), 85);
  EXPECT_EQ(coordinator->seen(),
            "outlast: coordinator: --nnodes '3:x': N or MIN:MAX is wanted, such as 4 or 2:4\n");
  const auto refuses = [&](const std::string& flag, const std::string& value) {
    const auto other = Coordinate("1:2", {flag, value});
    EXPECT_EQ(other->Wait(Within(10)), 85) << flag << " " << value;
    EXPECT_THAT(other->seen(), HasSubstr(flag + " '" + value + "': "));
  };
  for (const char* value : {"-1", "nan", "inf", "1e300", "x"}) {
    refuses("--serve-late", value);
    refuses("--join-timeout", value);
  }
  refuses("--token-fd", "-1");
  refuses("--max-restarts", "-1");
}

}  // namespace
}  // namespace outlast::testing
