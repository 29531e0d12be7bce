// Jobs of several nodes whose remote root is a real object store.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <functional>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/fault/node_jobs.h"
#include "tests/support/radosgw.h"
#include "tests/support/tcp_relay.h"
#ifdef OUTLAST_HAS_S3
#include "outlast/adapters/s3.h"

namespace outlast::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kRemote[] = "s3://jobs/of/nodes";

class NodesWithS3 : public NodesThatSave {
 protected:
  // The store lies behind a relay, which can hold up what it sends.
  void PutRelayBefore(const std::string& endpoint) {
    relay_ = std::make_unique<TcpRelay>("127.0.0.1", endpoint.substr(endpoint.find("//") + 2));
    setenv("AWS_ENDPOINT_URL_S3", ("http://" + relay_->address()).c_str(), 1);
  }
  void StartJob(const std::vector<int>& nodes, int steps, const std::string& spares = "0") {
    fs::remove(Path("log"));
    fs::remove(Path("log.restores"));
    std::vector<std::string> command = Toy(steps);
    command.insert(command.end(), {"--state-mb", "8", "--remote", kRemote, "--remote-every", "10",
                                   "--remote-keep", "2"});
    for (const int k : nodes) Start(k, "2", {"--spares", spares}, command);
  }
  // The local root is gone, and the store answers no more once a node reads shards.
  void LoseTheDiskAndHoldTheStore() {
    fs::remove_all(Path("root"));
    relay_->CutAfter(3 << 20);
  }
  bool IsHeld(int seconds = 60) const {
    const absl::Duration deadline = Clock::Real().Uptime() + Within(seconds);
    while (!relay_->is_cut()) {
      if (Clock::Real().Uptime() > deadline) return false;
      Clock::Real().SleepFor(absl::Milliseconds(5));
    }
    return true;
  }
  // "generation step rank source", sorted.
  std::set<std::string> Restores() const {
    std::set<std::string> all;
    std::istringstream lines(Read("log.restores"));
    for (std::string line; std::getline(lines, line);) all.insert(line);
    return all;
  }
  // What `ckpt ls` says of the remote root.
  std::string List() const {
    const std::string command =
        "exec " + ToolPath() + " ckpt ls " + kRemote + " >" + Path("ls") + " 2>&1";
    EXPECT_EQ(std::system(command.c_str()), 0) << Read("ls");
    return Read("ls");
  }

  std::unique_ptr<TcpRelay> relay_;
};

// One test, since the store takes long to start. Each job goes on from what the one before left
// there.
TEST_F(NodesWithS3, ComeBackFromItAlsoWhenARankOrAnAgentIsKilledWhileItReads) {
  OUTLAST_RADOSGW_OR_SKIP(gateway);
  PutRelayBefore(gateway->endpoint());
  ASSERT_EQ(MakeS3Bucket("s3://jobs"), absl::OkStatus());

  // Two nodes save there, and count what they keep.
  for (const int steps : {10, 20, 30}) {
    StartJob({1, 2}, steps);
    for (const int k : {1, 2}) EndsWith(k, 0, 90);
  }
  EXPECT_THAT(List(), HasSubstr("step 30  committed"));
  EXPECT_THAT(List(), HasSubstr("step 20  committed"));
  EXPECT_THAT(List(), Not(HasSubstr("step 10  committed")));

  // A rank dies while its node reads: the next generation restores the same step.
  LoseTheDiskAndHoldTheStore();
  StartJob({1, 2}, 40);
  ASSERT_TRUE(IsHeld()) << Seen();
  EXPECT_THAT(Restores(), ElementsAre());
  kill(std::stoi(PidOf(Read("runs/latest-n2/events.jsonl"), 3)), SIGKILL);
  relay_->Heal();
  for (const int k : {1, 2}) EndsWith(k, 0, 90);
  EXPECT_THAT(Restores(),
              ElementsAre("2 30 0 remote", "2 30 1 remote", "2 30 2 remote", "2 30 3 remote"));

  // An agent dies while it reads: its ranks go to the spare.
  LoseTheDiskAndHoldTheStore();
  StartJob({1, 2, 3}, 50, "1");
  ASSERT_TRUE(IsHeld()) << Seen();
  EXPECT_THAT(Restores(), ElementsAre());
  agents_.at(2)->Kill();
  relay_->Heal();
  for (const int k : {1, 3}) EndsWith(k, 0, 120);
  EXPECT_THAT(Restores(),
              ElementsAre("2 40 0 remote", "2 40 1 remote", "2 40 2 remote", "2 40 3 remote"));
  EXPECT_THAT(List(), HasSubstr("step 50  committed"));
}

}  // namespace
}  // namespace outlast::testing
#endif
