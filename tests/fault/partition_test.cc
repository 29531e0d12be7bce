// Jobs of several nodes whose network is cut in two, by the packet filter of a router between them:
// between an agent and its coordinator, between agents that both reach the coordinator, one way
// and both ways.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/fault/node_jobs.h"
#include "tests/support/network_lab.h"

namespace outlast::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kCoordinator = 0;

// The coordinator on machine 0, node n<k> on machine k.
class NodesApart : public NodesThatSave {
 protected:
  using Way = NetworkLab::Way;
  using Deed = NetworkLab::Deed;
  ~NodesApart() override {
    if (IsSkipped()) return;
    EXPECT_EQ(lab_.why_not(), "") << "a cut was not made";
  }
  void SetUp() override {
    if (!lab_.why_not().empty()) GTEST_SKIP() << lab_.why_not();
    coordinator_ = lab_.address(kCoordinator) + ":29400";
    WriteToken("token", 'a');
    all_flags_["--token-file"] = Path("token");
  }
  std::vector<std::string> Place(int k) const override { return lab_.Place(k); }
  std::string Host(int k) const override { return lab_.address(k); }

  // Of n<k> from all others.
  std::vector<Way> Around(int k) const {
    std::vector<Way> ways;
    for (int other = 0; other < kMachines; ++other) {
      if (other == k) continue;
      for (const Way& way : NetworkLab::Both(k, other)) ways.push_back(way);
    }
    return ways;
  }
  void CutUntilItIsKnown(int k, const std::vector<Way>& ways, Deed deed = Deed::kDrop) {
    lab_.Cut(ways, deed);
    ASSERT_NE(agents_.at(k)->LineWith("no coordinator", Within(20)), "") << Seen();
  }
  void HealUntilItIsBack(int k) {
    lab_.Heal();
    ASSERT_NE(agents_.at(k)->LineWith("the coordinator is there", Within(20)), "") << Seen();
  }
  void ExpectTrainingGoesOn(int64_t rounds) {
    ASSERT_TRUE(AllTrain(4, 1, Rounds().back().round + rounds)) << Seen();
  }
  pid_t PidOfRank(int k, int rank) const {
    return std::stoi(PidOf(Read("runs/latest-n" + std::to_string(k) + "/events.jsonl"), rank));
  }
  std::string Lines(int k) { return agents_.at(k)->seen(); }

  // Once a generation trains no older one does: each line of the log is of the newest so far.
  void ExpectOneGenerationAtATime() const {
    std::istringstream lines(Read("log"));
    uint64_t newest = 0, generation = 0;
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      if (!(words >> generation)) continue;  // "done ..."
      EXPECT_GE(generation, newest) << line;
      newest = std::max(newest, generation);
    }
  }
  // One checkpoint a step, each the child of one before it, and every byte of each is there.
  void ExpectOneChainOfWholeCheckpoints() {
    std::map<int, int> of_step;
    std::map<std::string, int> children;
    for (const auto& entry : fs::directory_iterator(Path("root"))) {
      const std::string name = entry.path().filename();
      std::ifstream file(entry.path() / "MANIFEST.json");
      if (!name.starts_with("step-") || !file) continue;
      const auto manifest = nlohmann::json::parse(file, nullptr, false);
      EXPECT_EQ(++of_step[manifest.value("step", -1)], 1) << name;
      if (manifest["parent"].is_string()) ++children[manifest["parent"].get<std::string>()];
    }
    EXPECT_FALSE(of_step.empty()) << Seen();
    for (const auto& [parent, count] : children) EXPECT_EQ(count, 1) << parent;
    PipedProcess tool({BuildFolder() / "outlast", "ckpt", "verify", Path("root")});
    EXPECT_EQ(tool.Wait(Within(20)), 0) << tool.seen();
  }
  // The newest step that is committed; 0: none.
  int NewestStep() const {
    int newest = 0;
    if (!fs::exists(Path("root"))) return newest;
    for (const auto& entry : fs::directory_iterator(Path("root"))) {
      const std::string name = entry.path().filename();
      if (name.starts_with("step-") && fs::exists(entry.path() / "MANIFEST.json"))
        newest = std::max(newest, std::stoi(name.substr(5)));
    }
    return newest;
  }
  bool Commits(int after, int seconds = 30) const {
    const absl::Duration deadline = Clock::Real().Uptime() + Within(seconds);
    while (NewestStep() <= after) {
      if (Clock::Real().Uptime() > deadline) return false;
      Clock::Real().SleepFor(absl::Milliseconds(10));
    }
    return true;
  }

  static constexpr int kMachines = 5;
  NetworkLab lab_{kMachines};
};

// --- Between an agent and its coordinator ---

TEST_F(NodesApart, ACutFromTheCoordinatorThatHealsInTimeCostsNobodyAStepWhicheverWayItIs) {
  StartCoordinator("2");
  for (const int k : {1, 2}) StartTrainer(k, "2");
  ASSERT_TRUE(AllTrain(4)) << Seen();
  const std::map<int, pid_t> before = Pids();
  const std::vector<Way> both = NetworkLab::Both(kCoordinator, 2);

  // Too short for anybody to know of it.
  for (const Way& way : both) {
    lab_.Cut({way});
    ExpectTrainingGoesOn(40);
    lab_.Heal();
  }
  // Long enough for the stream to be given up: unheard, deaf, and refused.
  for (const Way& way : both) {
    CutUntilItIsKnown(2, {way});
    ExpectTrainingGoesOn(40);
    HealUntilItIsBack(2);
  }
  CutUntilItIsKnown(2, both, Deed::kReject);
  ExpectTrainingGoesOn(40);
  HealUntilItIsBack(2);

  EndTraining();
  for (const int k : {1, 2}) EndsWith(k, 0);
  EXPECT_EQ(Pids(), before);
  EXPECT_EQ(Rounds().back().generation, 1u);
  for (const int k : {1, 2}) EXPECT_TRUE(Report(k)["faults"].empty()) << Report(k)["faults"];
}

// A rank of n1 dies while n2 hears the coordinator and is not heard: it prepares, and nobody knows.
TEST_F(NodesApart, APrepareWhoseAnswerIsCutOffWaitsForItsAgentOrGoesOnWithoutIt) {
  StartCoordinator("2");
  for (const int k : {1, 2}) StartTrainer(k, "2", {"--spares", "0"});
  ASSERT_TRUE(AllTrain(4)) << Seen();
  const std::map<int, pid_t> before = Pids();

  lab_.Cut({{2, kCoordinator}});
  kill(before.at(1), SIGKILL);
  ASSERT_NE(agents_.at(2)->LineWith("no coordinator", Within(20)), "") << Seen();
  HealUntilItIsBack(2);

  ASSERT_TRUE(AllTrain(4, 2)) << Seen();
  for (const int rank : {0, 2, 3}) EXPECT_EQ(Pids().at(rank), before.at(rank)) << rank;
  EndTraining();
  for (const int k : {1, 2}) EndsWith(k, 0);
  EXPECT_TRUE(Report(2)["faults"].empty()) << Report(2)["faults"];
  ExpectOneGenerationAtATime();
}

// The node of rank 0, which commits the checkpoints, is cut off from everybody for longer than its
// grace, in the middle of a save: the spare takes its ranks.
TEST_F(NodesApart, ANodeThatIsAloneForTooLongSplitsNothingAndTearsNoCheckpoint) {
  std::vector<std::string> command = Toy(1'000'000);
  // A save is always under way.
  command.insert(command.end(), {"--state-mb", "4", "--disk-rate", "40000000"});
  StartCoordinator("2");
  for (const int k : {1, 2}) Start(k, "2", {}, command);
  ASSERT_TRUE(Commits(0)) << Seen();
  Start(3, "2", {}, command);
  const pid_t former = PidOfRank(1, 0), rank_2 = PidOfRank(2, 2);
  const int committed = NewestStep();

  CutUntilItIsKnown(1, Around(1));
  ASSERT_TRUE(HasLine("log.restores", "\n2 ", 60)) << Seen();
  ASSERT_TRUE(HasLine("log", "\n2 ", 60)) << Seen();
  ASSERT_TRUE(Commits(NewestStep())) << Seen();
  HealUntilItIsBack(1);

  EXPECT_EQ(CountAliveAfter({former}, absl::Seconds(20)), 0) << "two that hold rank 0: " << Seen();
  EXPECT_EQ(PidOfRank(2, 2), rank_2) << "survivors are not restarted";
  ASSERT_TRUE(Commits(NewestStep())) << Seen();
  agents_.at(2)->Signal(SIGINT);
  for (const int k : {1, 2, 3}) EndsWith(k, 130, 30);
  ExpectOneGenerationAtATime();
  ExpectOneChainOfWholeCheckpoints();
  std::istringstream restores(Read("log.restores"));
  uint64_t generation = 0;
  int64_t step = 0;
  for (std::string line; std::getline(restores, line);) {
    std::istringstream words(line);
    if (!(words >> generation >> step) || generation != 2) continue;
    EXPECT_GE(step, committed) << line;
  }
}

// --- Between agents that both reach the coordinator ---

TEST_F(NodesApart, ACutBetweenAgentsThatHealsCostsASaveAndNobodysLife) {
  std::vector<std::string> command = Toy(1'000'000);
  command.insert(command.end(), {"--state-mb", "4", "--disk-rate", "40000000"});
  StartCoordinator("2");
  for (const int k : {1, 2}) Start(k, "2", {}, command);
  ASSERT_TRUE(Commits(0)) << Seen();
  const pid_t rank_0 = PidOfRank(1, 0), rank_3 = PidOfRank(2, 3);

  for (const std::vector<Way>& ways : {NetworkLab::Both(1, 2), {Way{1, 2}}}) {
    lab_.Cut(ways);
    // Longer than the silence after which agents give each other up.
    Clock::Real().SleepFor(absl::Seconds(4));
    const int newest = NewestStep();
    lab_.Heal();
    ASSERT_TRUE(Commits(newest)) << Seen();
  }

  agents_.at(2)->Signal(SIGINT);
  for (const int k : {1, 2}) EndsWith(k, 130, 30);
  EXPECT_EQ(PidOfRank(1, 0), rank_0);
  EXPECT_EQ(PidOfRank(2, 3), rank_3);
  EXPECT_THAT(Read("log"), Not(HasSubstr("\n2 "))) << "no second generation";
  for (const int k : {1, 2}) EXPECT_TRUE(Report(k)["faults"].empty()) << Report(k)["faults"];
  ExpectOneChainOfWholeCheckpoints();
}

// Who can reach whom is known by both ends alone; the coordinator reaches them all.
TEST_F(NodesApart, ACutBetweenAgentsThatDoesNotHealIsNamedAndTheSpareTakesOver) {
  StartCoordinator("2");
  for (const int k : {1, 2}) StartTrainer(k, "2");
  ASSERT_TRUE(AllTrain(4)) << Seen();
  StartTrainer(3, "2");
  const std::map<int, pid_t> before = Pids();

  lab_.Cut(NetworkLab::Both(1, 2));

  ASSERT_TRUE(AllTrain(4, 2, 20, 90)) << Seen();
  EXPECT_EQ(CountAliveAfter({before.at(2), before.at(3)}, absl::Seconds(10)), 0) << Seen();
  EndTraining();
  for (const int k : {1, 3}) EndsWith(k, 0);
  EXPECT_NE(lead_->LineWith("node n2: it and node n1 do not reach each other, though both reach "
                            "the coordinator",
                            Within(10)),
            "")
      << lead_->seen();
  ExpectOneGenerationAtATime();
}

// Neither holds rank 0: the link is one that their ranks alone use, and their agents watch.
TEST_F(NodesApart, ACutBetweenTwoFollowersIsNamedAndTheSpareTakesOverForNoRestart) {
  StartCoordinator("3");
  for (const int k : {1, 2, 3}) StartTrainer(k, "3");
  ASSERT_TRUE(AllTrain(6)) << Seen();
  StartTrainer(4, "3");
  const std::map<int, pid_t> before = Pids();
  std::vector<int> followers;
  for (const int k : {1, 2, 3}) {
    const std::string events = Read("runs/latest-n" + std::to_string(k) + "/events.jsonl");
    if (PidOf(events, 0) != std::to_string(before.at(0))) followers.push_back(k);
  }
  ASSERT_EQ(followers.size(), 2u) << Seen();

  lab_.Cut(NetworkLab::Both(followers[0], followers[1]));

  ASSERT_TRUE(AllTrain(6, 2, 20, 90)) << Seen();
  const std::map<int, pid_t> after = Pids();
  int kept = 0;
  for (const auto& [rank, pid] : before) kept += after.at(rank) == pid ? 1 : 0;
  EXPECT_GE(kept, 2) << "the lead's ranks: " << Seen();
  EndTraining();
  const std::string said =
      lead_->LineWith(" do not reach each other, though both reach the", Within(10));
  for (const int k : followers) EXPECT_THAT(said, HasSubstr("node n" + std::to_string(k)));
  ExpectOneGenerationAtATime();
}

// --- Slow links ---

TEST_F(NodesApart, ANodeWhoseLinkIsSlowIsExcludedBeforeItIsGivenRanks) {
  constexpr int kMegabits = 16;  // 2 MB/s
  lab_.Slow(2, kMegabits);
  all_flags_["--preflight-peer-rate"] = "10";
  StartCoordinator("2");
  for (const int k : {1, 3}) StartTrainer(k, "2", {"--preflight", "on"});
  ASSERT_TRUE(AllTrain(4)) << Seen();

  StartTrainer(2, "2", {"--preflight", "on"});

  EndsWith(2, 87);
  const std::string said = agents_.at(2)->seen();
  const size_t at = said.find("preflight: peer bandwidth: ");
  ASSERT_NE(at, std::string::npos) << said;
  double with_1 = 0, with_3 = 0;
  ASSERT_EQ(std::sscanf(said.c_str() + at,
                        "preflight: peer bandwidth: %lf MB/s with n1, %lf MB/s with n3, at least "
                        "10 MB/s wanted",
                        &with_1, &with_3),
            2)
      << said;
  for (const double rate : {with_1, with_3}) {
    EXPECT_GT(rate, 0.2);
    EXPECT_LT(rate, 10);
  }
  ExpectTrainingGoesOn(20);
  EndTraining();
  for (const int k : {1, 3}) EndsWith(k, 0);
  EXPECT_NE(lead_->LineWith("peer bandwidth: 1 link, ", Within(10)), "") << lead_->seen();
}

}  // namespace
}  // namespace outlast::testing
