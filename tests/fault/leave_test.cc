// Cases O03, O07, O11, O13: real agents that leave, are killed again and again, or belong to
// somebody else's job.
#include <gmock/gmock.h>

#include <map>
#include <set>

#include "base/socket.h"
#include "outlast/base/clock.h"
#include "tests/fault/node_jobs.h"

namespace outlast::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class NodesThatLeave : public NodesThatSave {
 protected:
  // One rank a node, and nothing on the disk but what a leave or a stop saves.
  void Train(int k, const std::string& nodes, const std::vector<std::string>& more = {}) {
    std::vector<std::string> flags = {"-n", "1", "--grace", "8"};
    flags.insert(flags.end(), more.begin(), more.end());
    std::vector<std::string> command = Toy(100000);
    command.insert(command.end(), {"--ckpt-every", "1000000", "--sharded-mb", "1"});
    Start(k, nodes, flags, command);
  }
  void TrainThreeOfTwoOrThree() {
    for (const int k : {1, 2, 3}) Train(k, "2:3");
    ASSERT_TRUE(HasLine("log", "\n1 12 2 ")) << Seen();
  }
  // All ranks of `generation` go on from one step; it, or -1.
  int64_t GoesOnFrom(uint64_t generation, size_t ranks) const {
    const absl::Duration deadline = Clock::Real().Uptime() + Within(40);
    std::map<int, int64_t> restored;
    while (restored.size() < ranks && Clock::Real().Uptime() < deadline) {
      Clock::Real().SleepFor(absl::Milliseconds(10));
      restored.clear();
      std::istringstream lines(Read("log.restores"));
      uint64_t number = 0;
      int64_t step = 0;
      int rank = 0;
      for (std::string source; lines >> number >> step >> rank >> source;) {
        if (number == generation) restored[rank] = step;
      }
    }
    if (restored.size() != ranks) return -1;
    for (const auto& [rank, step] : restored) {
      if (step != restored.begin()->second) return -1;
    }
    return restored.begin()->second;
  }
  int64_t NewestStepOf(uint64_t generation) const {
    int64_t newest = -1, step = 0;
    uint64_t number = 0;
    int rank = 0;
    std::istringstream lines(Read("log"));
    for (std::string digest; lines >> number >> step >> rank >> digest;) {
      if (number == generation) newest = std::max(newest, step);
    }
    return newest;
  }
  // Ranks 0 and 1 of `generation` have made steps, each one's digests those of one state.
  bool TrainsOn(uint64_t generation, int64_t from) const {
    const std::string head = "\n" + std::to_string(generation) + " " + std::to_string(from + 5);
    return HasLine("log", head + " 0 ") && HasLine("log", head + " 1 ");
  }
};

// --- Case O07 ---

TEST_F(NodesThatLeave, OfThreeTheTwoOthersGoOnWhenOneIsToldTo) {
  TrainThreeOfTwoOrThree();
  const int64_t step = NewestStepOf(1);
  agents_.at(3)->Signal(SIGTERM);
  EndsWith(3, 86);
  const int64_t from = GoesOnFrom(2, 2);
  EXPECT_GE(from, step) << Read("log.restores") << Seen();
  ASSERT_TRUE(TrainsOn(2, from)) << Seen();
  agents_.at(1)->Signal(SIGTERM);
  for (const int k : {1, 2}) EndsWith(k, 80);
  EXPECT_EQ(Report(2)["world"], 2);
}

// Its rank is compacted away, and the two others agree on a step that is no older than the last
// common one: the killed agent's own state is gone with it.
TEST_F(NodesThatLeave, OfThreeTheTwoOthersGoOnWhenOneIsKilled) {
  TrainThreeOfTwoOrThree();
  agents_.at(2)->Kill();
  const int64_t from = GoesOnFrom(2, 2);
  EXPECT_GE(from, 0) << Read("log.restores") << Seen();
  ASSERT_TRUE(TrainsOn(2, from)) << Seen();
  agents_.at(1)->Signal(SIGTERM);
  for (const int k : {1, 3}) EndsWith(k, 80);
  EXPECT_EQ(Report(3)["world"], 2);
}

// A person who presses Ctrl-C means the job, on whichever node.
TEST_F(NodesThatLeave, OfThreeAllAreSavedAndEndWhenAPersonInterruptsOne) {
  TrainThreeOfTwoOrThree();
  agents_.at(3)->Signal(SIGINT);
  for (const int k : {1, 2, 3}) EndsWith(k, 130);
  EXPECT_THAT(Seen(), HasSubstr("saved step "));
}

// The journal is not handed on: a clear end, saved, and all at once.
TEST_F(NodesThatLeave, OfThreeAllAreSavedAndEndWhenTheLeaderIsToldTo) {
  TrainThreeOfTwoOrThree();
  agents_.at(1)->Signal(SIGTERM);
  for (const int k : {1, 2, 3}) EndsWith(k, 80);
}

// --- Case O13 ---

// The world stays 2, so that nobody's place changes but the leaver's.
TEST_F(NodesThatLeave, SurvivorsAndTheOneWhoWaitedForThePlaceTakeOnePath) {
  for (const int k : {1, 2, 3}) {
    Train(k, "2", {"--spares", "1"});
    if (k == 2) {
      ASSERT_NE(agents_.at(1)->LineWith("leads job job", Within(10)), "") << Seen();
    }
  }
  ASSERT_TRUE(HasLine("log", "\n1 12 1 ")) << Seen();
  const int64_t step = NewestStepOf(1);
  agents_.at(2)->Signal(SIGTERM);
  EndsWith(2, 86);
  const int64_t from = GoesOnFrom(2, 2);
  EXPECT_GE(from, step) << Read("log.restores") << Seen();
  ASSERT_TRUE(TrainsOn(2, from)) << Seen();
  std::istringstream lines(Read("log.restores"));
  std::set<std::string> sources;
  uint64_t generation = 0;
  int64_t restored = 0;
  int rank = 0;
  for (std::string source; lines >> generation >> restored >> rank >> source;) {
    if (generation == 2) sources.insert(source);
  }
  // The survivor goes back to the step whose copy the newcomer gets, or both to the one that was
  // saved: never one of them alone to either.
  const bool all_from_disk = sources == std::set<std::string>({"disk"});
  EXPECT_TRUE(all_from_disk || !sources.contains("disk")) << Read("log.restores");
  EXPECT_FALSE(sources.contains("-")) << Read("log.restores");
  agents_.at(1)->Signal(SIGTERM);
  for (const int k : {1, 3}) EndsWith(k, 80);
}

// --- Case O11 ---

class NodesThatComeBack : public Nodes {
 protected:
  // Node n2 is killed and started again, `gap` later, until the job has ended.
  void KillAndStartAgain(absl::Duration gap) {
    const std::vector<std::string> flags = {"-n", "1", "--max-restarts", "1"};
    for (const int k : {1, 2}) StartTrainer(k, "2", flags);
    int kills = 0;
    while (kills < 5 && is_alive(agents_.at(1)->pid()) &&
           AllTrain(2, static_cast<uint64_t>(kills) + 1, 20, 15)) {
      ++kills;
      agents_.at(2)->Kill();
      Clock::Real().SleepFor(gap);
      StartTrainer(2, "2", flags);
      if (kills == 2) break;  // one restart is allowed
    }
    EXPECT_EQ(kills, 2) << Seen();
    for (const int k : {1, 2}) EndsWith(k, 83, 30);
    EXPECT_THAT(agents_.at(1)->seen(),
                HasSubstr("1 of 1 restarts since the last progress are used up (--max-restarts)"))
        << Seen();
    EXPECT_EQ(Report(1)["budget"], "1 of 1");
    EXPECT_EQ(Report(1)["job_faults"].size(), 2u) << Report(1)["job_faults"];
  }
};

// Shorter than the silence after which a stream counts as lost (3 s), and longer.
TEST_F(NodesThatComeBack, AtOnceAreCountedAsTheJobsRestarts) {
  KillAndStartAgain(absl::Milliseconds(200));
}
TEST_F(NodesThatComeBack, LateAreCountedAsTheJobsRestarts) {
  KillAndStartAgain(absl::Seconds(3.5));
}

// --- Case O03 ---

TEST_F(Nodes, ASecondJobAtThePortOfAnotherIsRefusedAndDisturbsNobody) {
  const std::vector<std::string> one = {"-n", "1"};
  const std::vector<std::string> other = {"-n", "1", "--job", "other"};
  StartTrainer(1, "2", one);
  ASSERT_NE(agents_.at(1)->LineWith("leads job job", Within(10)), "") << Seen();
  StartTrainer(2, "2", one);
  ASSERT_TRUE(AllTrain(2)) << Seen();
  const std::map<int, pid_t> before = Pids();

  // The one that would lead at the same address, and one of its followers.
  const absl::Duration begun = Clock::Real().Uptime();
  Start(3, "2", {"-n", "1", "--job", "other", "--advertise", "127.0.0.1"}, Trainer());
  Start(4, "2", other, Trainer());
  for (const int k : {3, 4}) EndsWith(k, 85, 20);
  EXPECT_LT(Clock::Real().Uptime() - begun, Within(5));
  for (const int k : {3, 4}) {
    EXPECT_THAT(agents_.at(k)->seen(), AllOf(HasSubstr("exit code 85: "), HasSubstr("job 'other'"),
                                             HasSubstr("job 'job'"), HasSubstr(coordinator_)))
        << k;
  }

  const int64_t then = Rounds().back().round;
  ASSERT_TRUE(AllTrain(2, 1, then + 40)) << Seen();
  EXPECT_EQ(Pids(), before);
  EXPECT_EQ(Rounds().back().generation, 1u);
  EndTraining();
  for (const int k : {1, 2}) EndsWith(k, 0);
}

// What listens there speaks another protocol, or none.
TEST_F(Nodes, APortThatAStrangerHoldsIsNamed) {
  const auto held = NumericAddress(HostPort::Parse(coordinator_).value());
  ASSERT_TRUE(held.ok());
  const auto stranger = ListenOn(*held);
  ASSERT_TRUE(stranger.ok()) << stranger.status();
  StartTrainer(1, "2", {"-n", "1", "--join-timeout", "2", "--last-call", "1"});
  EndsWith(1, 84, 20);
  EXPECT_THAT(agents_.at(1)->seen(), HasSubstr(coordinator_)) << Seen();
  EXPECT_EQ(Read("log"), "") << "no worker ran";
}

}  // namespace
}  // namespace outlast::testing
