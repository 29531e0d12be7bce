// Who may join, and how the others are told.
#include "tests/control/control_fixture.h"

namespace outlast::testing {
namespace {

using ::testing::HasSubstr;

class Join : public ControlTest {};

TEST_F(Join, AgentsFormAGenerationOverGrpc) {
  ASSERT_TRUE(StartHost(HostOptions(3)).ok());
  for (int i = 0; i < 3; ++i) StartNode(i);
  EXPECT_TRUE(AllOpen(3, 1));
}

TEST_F(Join, TheJobsEndIsToldToAll) {
  ASSERT_TRUE(StartHost(HostOptions(2)).ok());
  for (int i = 0; i < 2; ++i) StartNode(i);
  ASSERT_TRUE(AllOpen(2, 1));

  loop_.Do([&] {
    for (auto& [index, node] : nodes_) node->Give(WorkerFinished{0, 1});
    for (auto& [index, node] : nodes_) node->Give(WorkerEnded{0, 1, {}});
  });

  EXPECT_TRUE(loop_.WaitFor([&] { return code_ == 0 && ended_.size() == 2; }));
  EXPECT_EQ(ended_[0].exit_code, 0);
  loop_.Do([this] { nodes_.clear(); });
  EXPECT_TRUE(loop_.WaitFor([&] { return all_told_; })) << "all have left";
}

// The job it came for is over: it took no part in it, so the job's success is not its own.
TEST_F(Join, ALateAgentIsToldThatTheJobHadEnded) {
  ASSERT_TRUE(StartHost(HostOptions(1)).ok());
  StartNode(0);
  ASSERT_TRUE(AllOpen(1, 1));
  loop_.Do([&] {
    nodes_[0]->Give(WorkerFinished{0, 1});
    nodes_[0]->Give(WorkerEnded{0, 1, {}});
  });
  ASSERT_TRUE(loop_.WaitFor([&] { return code_ == 0; }));

  StartNode(1);

  EXPECT_TRUE(loop_.WaitFor([&] { return ended_.count(1) == 1; }));
  EXPECT_EQ(ended_[1].exit_code, 85);
  EXPECT_THAT(ended_[1].reason, HasSubstr("had ended"));
}

TEST_F(Join, BothSidesProveTheToken) {
  const auto token = JobToken::Read(WriteToken("token", 'a'));
  ASSERT_TRUE(token.ok());
  CoordinatorHostOptions options = HostOptions(1);
  options.token = *token;
  ASSERT_TRUE(StartHost(options).ok());

  AgentLinkOptions link = LinkOptions(0);
  link.token = *token;
  StartNode(0, link);

  EXPECT_TRUE(AllOpen(1, 1));
}

TEST_F(Join, AnotherTokenIsRefusedOnBothSides) {
  CoordinatorHostOptions options = HostOptions(1);
  options.token = *JobToken::Read(WriteToken("token", 'a'));
  ASSERT_TRUE(StartHost(options).ok());

  AgentLinkOptions link = LinkOptions(0);
  link.token = *JobToken::Read(WriteToken("other", 'b'));
  StartNode(0, link);

  EXPECT_TRUE(loop_.WaitFor([&] { return ended_.count(0) == 1; }));
  EXPECT_EQ(ended_[0].exit_code, 85);
  EXPECT_THAT(ended_[0].reason, HasSubstr("did not prove that it knows this agent's job token"));
  EXPECT_TRUE(Says("agent n0: it did not prove that it knows the job token"));
}

TEST_F(Join, AnAgentWithoutTheTokenIsRefused) {
  CoordinatorHostOptions options = HostOptions(1);
  options.token = *JobToken::Read(WriteToken("token", 'a'));
  ASSERT_TRUE(StartHost(options).ok());

  StartNode(0);

  EXPECT_TRUE(loop_.WaitFor([&] { return ended_.count(0) == 1; }));
  EXPECT_EQ(ended_[0].exit_code, 85);
  EXPECT_TRUE(Says("it has no job token, this coordinator wants one"));
}

TEST_F(Join, AnAgentWithATokenObeysNoCoordinatorWithoutOne) {
  ASSERT_TRUE(StartHost(HostOptions(1)).ok());
  AgentLinkOptions link = LinkOptions(0);
  link.token = *JobToken::Read(WriteToken("token", 'a'));

  StartNode(0, link);

  EXPECT_TRUE(loop_.WaitFor([&] { return ended_.count(0) == 1; }));
  EXPECT_EQ(ended_[0].exit_code, 85);
  EXPECT_THAT(ended_[0].reason, HasSubstr("has no job token, this agent has one"));
}

TEST_F(Join, AForeignJobIsRefusedAndBothAreNamed) {
  ASSERT_TRUE(StartHost(HostOptions(1)).ok());
  AgentLinkOptions link = LinkOptions(0);
  link.job = "other";

  StartNode(0, link);

  EXPECT_TRUE(loop_.WaitFor([&] { return ended_.count(0) == 1; }));
  EXPECT_EQ(ended_[0].exit_code, 85);
  EXPECT_THAT(ended_[0].reason, HasSubstr("agent n0 is of job 'other', this is job 'job'"));
}

TEST_F(Join, ANodeThatIsHeldIsNotGivenToASecondAgent) {
  ASSERT_TRUE(StartHost(HostOptions(1)).ok());
  StartNode(0);
  ASSERT_TRUE(AllOpen(1, 1));

  StartNode(1, LinkOptions(0), 999);

  EXPECT_TRUE(Says("node name 'n0' is taken by the agent at 127.0.0.1:"));
  ASSERT_TRUE(loop_.WaitFor([&] { return ended_.count(1) == 1; }));
  EXPECT_EQ(ended_[1].exit_code, 85);
  EXPECT_TRUE(Says(", which lives: give this one another --node"));
}

TEST_F(Join, ThreeHundredAgentsInABurst) {
  constexpr int kAgents = 300;
  ASSERT_TRUE(StartHost(HostOptions(kAgents)).ok());
  for (int i = 0; i < kAgents; ++i) StartNode(i);
  EXPECT_TRUE(AllOpen(kAgents, 1, absl::Seconds(20)));
}

// Each time the last stream of the process ends on a thread of the transport.
TEST_F(Join, StreamsThatComeAndGoAloneDoNoHarm) {
  ASSERT_TRUE(StartHost(HostOptions(1)).ok());
  address_ = host_->address();
  loop_.Do([this] { host_.reset(); });
  for (int round = 0; round < 50; ++round) {
    StartNode(0);
    ASSERT_TRUE(loop_.WaitFor([&] { return !downs_[0].empty(); }));
    loop_.Do([this] { nodes_.clear(); });
    loop_.Note([this] { downs_.clear(); });
  }
}

TEST_F(Join, AnUnresolvableNameIsNamed) {
  address_ = "no-such-host.invalid:4000";
  StartNode(0);
  EXPECT_TRUE(loop_.WaitFor([&] { return !downs_[0].empty(); }, absl::Seconds(30)));
  EXPECT_THAT(downs_[0][0], HasSubstr("host 'no-such-host.invalid' does not resolve"));
}

TEST_F(Join, EachAddressThatWasTriedIsNamed) {
  ASSERT_TRUE(StartHost(HostOptions(1)).ok());
  address_ = host_->address();
  loop_.Do([this] { host_.reset(); });

  StartNode(0);

  EXPECT_TRUE(loop_.WaitFor([&] { return !downs_[0].empty(); }));
  EXPECT_THAT(downs_[0][0], HasSubstr(address_ + ": Connection refused"));
}

TEST_F(Join, AnIpv6LoopbackWorks) {
  CoordinatorHostOptions options = HostOptions(1);
  options.listen = "[::1]:0";
  ASSERT_TRUE(StartHost(options).ok());
  EXPECT_THAT(host_->address(), HasSubstr("[::1]:"));
  StartNode(0);
  EXPECT_TRUE(AllOpen(1, 1));
}

TEST_F(Join, BeyondLoopbackATokenIsWanted) {
  CoordinatorHostOptions options = HostOptions(1);
  options.listen = "0.0.0.0:0";
  const absl::Status status = StartHost(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(MessageOf(status)), HasSubstr("a job token is wanted"));
}

TEST_F(Join, APortThatIsTakenIsNamed) {
  ASSERT_TRUE(StartHost(HostOptions(1)).ok());
  CoordinatorHostOptions second = HostOptions(1);
  second.journal = folder_ + "/second";
  second.listen = host_->address();
  const absl::Status status = StartHost(second);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(MessageOf(status)), HasSubstr("Address already in use"));
}

}  // namespace
}  // namespace outlast::testing
