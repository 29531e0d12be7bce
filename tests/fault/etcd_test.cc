// Coordinators that a real etcd elects, with real agents: leaders, and etcd itself, killed and
// stopped.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/socket.h"
#include "tests/support/etcd_server.h"
#include "tests/support/node_log.h"
#include "tests/support/paths.h"

namespace outlast::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

absl::Duration Within(int seconds) { return absl::Seconds(seconds) * TimeFactor(); }
// Leases, in seconds: one whose end is waited for, and one that does not end.
const int kShort = static_cast<int>(3 * TimeFactor());
constexpr int kLong = 3600;

class Elected : public ::testing::Test {
 protected:
  void SetUp() override {
    OUTLAST_ETCD_OR_SKIP();
    etcd_ = std::make_unique<EtcdServer>();
  }
  ~Elected() override {
    agents_.clear();
    coordinators_.clear();
  }

  std::string Path(const std::string& name) const { return folder_ / name; }
  std::string Read(const std::string& name) const {
    std::ifstream file(Path(name));
    return {std::istreambuf_iterator<char>(file), {}};
  }
  PipedProcess& Coordinate(int number, int lease, const std::string& job = "job") {
    std::vector<std::string> command = {BuildFolder() / "outlast",
                                        "coordinator",
                                        "--job",
                                        job,
                                        "--etcd",
                                        scheme_ + endpoints(),
                                        "--nnodes",
                                        "1:2",
                                        "-n",
                                        "2",
                                        "--lease",
                                        std::to_string(lease),
                                        "--last-call",
                                        "1",
                                        "--serve-late",
                                        "0.5"};
    command.insert(command.end(), trust_.begin(), trust_.end());
    coordinators_[number] = std::make_unique<PipedProcess>(command);
    return *coordinators_[number];
  }
  PipedProcess& Lead(int number, int lease, const std::string& job = "job") {
    PipedProcess& process = Coordinate(number, lease, job);
    EXPECT_NE(process.LineWith("coordinator of job " + job + " at ", Within(20)), "")
        << process.seen();
    return process;
  }
  PipedProcess& StandBy(int number, int lease) {
    PipedProcess& process = Coordinate(number, lease);
    EXPECT_NE(process.LineWith("stands by", Within(20)), "") << process.seen();
    return process;
  }
  // Node n<k> at 127.0.0.<k>.
  void StartAgent(int k, const std::string& job = "job") {
    const std::string number = std::to_string(k);
    std::vector<std::string> command = {BuildFolder() / "outlast",
                                        "run",
                                        "--nnodes",
                                        "1:2",
                                        "--coordinator",
                                        scheme_ + endpoints(),
                                        "--job",
                                        job,
                                        "--node",
                                        "n" + number,
                                        "--advertise",
                                        "127.0.0." + number,
                                        "--node-rank",
                                        number,
                                        "--run-dir",
                                        Path("runs"),
                                        "--grace",
                                        "3",
                                        "-n",
                                        "2"};
    command.insert(command.end(), trust_.begin(), trust_.end());
    command.insert(command.end(), {"--", BuildFolder() / "outlast_node_trainer", Path(job + ".log"),
                                   Path("until")});
    agents_[k] = std::make_unique<PipedProcess>(command);
  }
  std::string endpoints() const { return other_endpoints_ + etcd_->endpoint(); }
  void StartAgents() {
    for (const int k : {1, 2}) StartAgent(k);
    ASSERT_TRUE(AllTrain(4)) << Seen();
  }
  void EndTraining() const { std::ofstream(Path("until")) << "now\n"; }
  std::string Seen() const {
    std::string all;
    for (const auto& [k, agent] : agents_)
      all += "--- n" + std::to_string(k) + "\n" + agent->seen();
    for (const auto& [k, process] : coordinators_)
      all += "--- coordinator " + std::to_string(k) + "\n" + process->seen();
    return all;
  }

  std::vector<Round> Rounds(const std::string& job = "job") const {
    return ReadRounds(Path(job + ".log"));
  }
  int64_t LastRound() const {
    int64_t last = 0;
    for (const Round& one : Rounds()) last = std::max(last, one.round);
    return last;
  }
  // All `world` ranks have gone through `round` of `generation`.
  bool AllTrain(int world, uint64_t generation = 1, int64_t round = 20,
                const std::string& job = "job") const {
    const absl::Duration deadline = Clock::Real().Uptime() + Within(40);
    while (Clock::Real().Uptime() < deadline) {
      std::set<int> ranks;
      for (const Round& one : Rounds(job)) {
        if (one.generation == generation && one.round >= round && one.world == world)
          ranks.insert(one.rank);
      }
      if (static_cast<int>(ranks.size()) == world) return true;
      Clock::Real().SleepFor(absl::Milliseconds(5));
    }
    return false;
  }
  // By rank, of `generation`.
  std::map<int, pid_t> Pids(uint64_t generation) const {
    std::map<int, pid_t> pids;
    for (const Round& one : Rounds()) {
      if (one.generation == generation) pids[one.rank] = one.pid;
    }
    return pids;
  }
  void AllAgentsEndWith(int code) {
    for (const auto& [k, agent] : agents_)
      EXPECT_EQ(agent->Wait(Within(40)), code) << "n" << k << "\n" << Seen();
  }
  // In whatever order they take the lead and lose it.
  void AwaitCoordinatorAtAgents() {
    for (const auto& [k, agent] : agents_)
      ASSERT_NE(agent->LineWith("the coordinator is there", Within(40)), "") << Seen();
  }
  // Node 1 leads, and `next` stands by.
  void KillTheLeaderAndAwait(PipedProcess& next) {
    coordinators_.at(1)->Kill();
    ASSERT_NE(next.LineWith("goes on with job job at generation 1", Within(30)), "") << Seen();
    AwaitCoordinatorAtAgents();
    ASSERT_TRUE(AllTrain(4, 1, LastRound() + 20)) << Seen();
  }

  const TempFolder folder_;
  std::unique_ptr<EtcdServer> etcd_;
  std::string scheme_ = "etcd://";
  std::string other_endpoints_;     // before the one that serves, each with a comma behind it
  std::vector<std::string> trust_;  // flags of all
  std::map<int, std::unique_ptr<PipedProcess>> coordinators_;
  std::map<int, std::unique_ptr<PipedProcess>> agents_;
};

TEST_F(Elected, OneOfTwoLeadsAndHandsOverWhenItIsToldToLeave) {
  PipedProcess& first = Lead(1, kLong);
  PipedProcess& second = StandBy(2, kLong);
  EXPECT_THAT(second.seen(), HasSubstr("leads job job"));

  first.Signal(SIGTERM);

  EXPECT_EQ(first.Wait(Within(20)), 86) << first.seen();
  EXPECT_NE(second.LineWith("coordinator of job job at ", Within(20)), "") << second.seen();
  StandBy(3, kLong).Signal(SIGINT);
  EXPECT_EQ(coordinators_.at(3)->Wait(Within(20)), 86);
  second.Signal(SIGINT);
  EXPECT_EQ(second.Wait(Within(20)), 130) << "a person stops the job: " << second.seen();
}

TEST_F(Elected, WhenTheLeaderIsKilledTheNextGoesOnAndNobodyLosesAStep) {
  Lead(1, kShort);
  PipedProcess& next = StandBy(2, kShort);
  StartAgents();

  ASSERT_NO_FATAL_FAILURE(KillTheLeaderAndAwait(next));

  const std::map<int, pid_t> before = Pids(1);
  kill(before.at(3), SIGKILL);  // it decides, too
  ASSERT_TRUE(AllTrain(4, 2)) << Seen();
  const std::map<int, pid_t> after = Pids(2);
  for (const int rank : {0, 1, 2}) EXPECT_EQ(after.at(rank), before.at(rank)) << rank;
  EndTraining();
  AllAgentsEndWith(0);
  EXPECT_EQ(next.Wait(Within(20)), 0) << next.seen();
}

TEST_F(Elected, WhileEtcdIsAwayTheJobTrainsAndDecidesNothing) {
  PipedProcess& leader = Lead(1, kShort);
  StartAgents();

  etcd_->Kill();
  ASSERT_NE(leader.LineWith("etcd does not answer", Within(20)), "") << Seen();
  ASSERT_TRUE(AllTrain(4, 1, LastRound() + 20)) << Seen();
  const std::map<int, pid_t> before = Pids(1);
  kill(before.at(3), SIGKILL);
  ASSERT_NE(leader.LineWith("does not lead job job any more", Within(20)), "") << Seen();
  EXPECT_TRUE(Pids(2).empty()) << Seen();

  etcd_->Start();

  ASSERT_NE(leader.LineWith("goes on with job job at generation 1", Within(20)), "") << Seen();
  ASSERT_TRUE(AllTrain(4, 2)) << Seen();
  const std::map<int, pid_t> after = Pids(2);
  for (const int rank : {0, 1, 2}) EXPECT_EQ(after.at(rank), before.at(rank)) << rank;
  EndTraining();
  AllAgentsEndWith(0);
  EXPECT_EQ(leader.Wait(Within(20)), 0) << leader.seen();
}

TEST_F(Elected, ALeaderThatWasStoppedPastItsLeaseDoesNotSplitTheJob) {
  PipedProcess& stopped = Lead(1, kShort);
  PipedProcess& next = StandBy(2, kShort);
  StartAgents();

  stopped.Signal(SIGSTOP);
  ASSERT_NE(next.LineWith("goes on with job job at generation 1", Within(30)), "") << Seen();
  AwaitCoordinatorAtAgents();
  stopped.Signal(SIGCONT);

  ASSERT_NE(stopped.LineWith("does not lead job job any more", Within(20)), "") << Seen();
  ASSERT_NE(stopped.LineWith("stands by", Within(20)), "") << Seen();
  const std::map<int, pid_t> before = Pids(1);
  kill(before.at(3), SIGKILL);
  ASSERT_TRUE(AllTrain(4, 2)) << Seen();
  EndTraining();
  AllAgentsEndWith(0);
  EXPECT_EQ(next.Wait(Within(20)), 0) << Seen();
  EXPECT_EQ(stopped.Wait(Within(20)), 0) << "the job's end: " << stopped.seen();
}

TEST_F(Elected, TwoJobsOnOneEtcdDoNotMeet) {
  Lead(1, kLong, "a");
  Lead(2, kLong, "b");
  StartAgent(1, "a");
  StartAgent(2, "b");
  for (const char* job : {"a", "b"}) ASSERT_TRUE(AllTrain(2, 1, 20, job)) << job << Seen();
  EndTraining();
  AllAgentsEndWith(0);
  for (const int k : {1, 2}) EXPECT_EQ(coordinators_.at(k)->Wait(Within(20)), 0) << Seen();
}

TEST_F(Elected, UnderTlsAndAsAUserWhoMayDoNoMore) {
  etcd_ = std::make_unique<EtcdServer>(EtcdServer::Tls::kBothSides);
  etcd_->WantUsers("ada", "job");
  scheme_ = "etcd+https://";
  std::ofstream(Path("password")) << "secret\n";
  std::filesystem::permissions(Path("password"), std::filesystem::perms::owner_read);
  trust_ = {"--etcd-ca",
            etcd_->Path("ca.pem"),
            "--etcd-cert",
            etcd_->Path("client.pem"),
            "--etcd-key",
            etcd_->Path("client.key"),
            "--etcd-user",
            "ada",
            "--etcd-password-file",
            Path("password")};
  PipedProcess& leader = Lead(1, kLong);
  StartAgents();
  EndTraining();
  AllAgentsEndWith(0);
  EXPECT_EQ(leader.Wait(Within(20)), 0) << Seen();

  PipedProcess& other = Coordinate(2, kLong, "other");
  EXPECT_EQ(other.Wait(Within(20)), 85) << other.seen();
  EXPECT_THAT(other.seen(), HasSubstr("etcd refuses: "));
  EXPECT_THAT(other.seen(), HasSubstr("permission denied"));
}

// Of three servers one is gone and one takes connections and says nothing.
TEST_F(Elected, ServersOfEtcdThatAreDeadOrSilentAreDoneWithout) {
  MasterPorts ports("127.0.0.1");
  const std::string dead = "127.0.0.1:" + std::to_string(ports.Of(1).value());
  const UniqueFd silent = ListenOn(*NumericAddress({"127.0.0.1", 0})).value();
  other_endpoints_ = dead + "," + SocketAddress::Local(silent.get())->host_port().text() + ",";
  Lead(1, kShort);
  PipedProcess& next = StandBy(2, kShort);
  StartAgents();

  ASSERT_NO_FATAL_FAILURE(KillTheLeaderAndAwait(next));
  EndTraining();
  AllAgentsEndWith(0);
  EXPECT_EQ(next.Wait(Within(20)), 0) << next.seen();
}

// Also one that would wait for its coordinator for ten minutes.
TEST_F(Elected, AnAgentWhomEtcdRefusesEndsAtOnce) {
  etcd_->WantUsers("ada", "job");
  std::ofstream(Path("password")) << "guess\n";
  std::filesystem::permissions(Path("password"), std::filesystem::perms::owner_read);
  trust_ = {"--etcd-user", "ada", "--etcd-password-file", Path("password")};

  StartAgent(1);

  AllAgentsEndWith(85);
  EXPECT_THAT(Seen(), HasSubstr("as user 'ada'"));
  EXPECT_THAT(Seen(), HasSubstr("invalid user ID or password"));
  EXPECT_THAT(Seen(), HasSubstr(etcd_->endpoint()));
}

TEST_F(Elected, NonsenseIsRefusedInOneLine) {
  const auto refuses = [](const std::vector<std::string>& flags, const std::string& line) {
    std::vector<std::string> command = {BuildFolder() / "outlast", "coordinator", "--job", "job"};
    command.insert(command.end(), flags.begin(), flags.end());
    PipedProcess process(command);
    EXPECT_EQ(process.Wait(Within(20)), 85);
    EXPECT_EQ(process.seen(), "outlast: coordinator: " + line + "\n");
  };
  refuses({"--etcd", "here"},
          "etcd 'here': HOST:PORT is wanted, or several with commas between them");
  refuses({"--etcd", "h:1", "--journal", "j"}, "--journal 'j' and --etcd 'h:1': one wanted");
  refuses({"--journal", "j", "--lease", "3"}, "--lease '3' without --etcd");
  refuses({"--etcd", "h:1", "--listen", "0.0.0.0:7"},
          "--listen '0.0.0.0:7': with --etcd an address that agents reach wanted");
}

}  // namespace
}  // namespace outlast::testing
