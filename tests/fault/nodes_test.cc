// Jobs of several nodes: real agents, one an address of the loopback network, their workers killed
// and their coordinator killed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/fault/node_jobs.h"
#include "tests/support/piped_process.h"
#include "tests/support/tcp_relay.h"

namespace outlast::testing {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

TEST_F(Nodes, TwoAgentsTrainOneJobToItsEnd) {
  for (const int k : {1, 2}) StartTrainer(k, "2");
  ASSERT_TRUE(AllTrain(4)) << Seen();
  EndTraining();
  for (const int k : {1, 2}) EndsWith(k, 0);

  for (const char* rank : {"0", "1", "2", "3"})
    EXPECT_THAT(Read("log"), HasSubstr(std::string("done ") + rank + " "));
  const nlohmann::json one = Report(1), two = Report(2);
  EXPECT_EQ(one["node"], "n1");
  EXPECT_EQ(two["node"], "n2");
  EXPECT_EQ(one["world"], 4);
  EXPECT_EQ(one["run_id"], two["run_id"]);
  EXPECT_EQ(two["exit_code"], 0);
  EXPECT_EQ(two["generations"], 1);
  const fs::path logs = fs::path(two["run_dir"].get<std::string>()) / "logs" / "g1";
  EXPECT_TRUE(fs::exists(logs / "rank2.out"));
  EXPECT_TRUE(fs::exists(logs / "rank3.err"));
}

TEST_F(Nodes, AKilledRankIsReplacedAndAllOthersKeepTheirProcess) {
  for (const int k : {1, 2}) StartTrainer(k, "2");
  ASSERT_TRUE(AllTrain(4)) << Seen();
  const std::map<int, pid_t> before = Pids();

  kill(before.at(3), SIGKILL);

  ASSERT_TRUE(AllTrain(4, 2)) << Seen();
  const std::map<int, pid_t> after = Pids();
  for (const int rank : {0, 1, 2}) EXPECT_EQ(after.at(rank), before.at(rank)) << rank;
  EXPECT_NE(after.at(3), before.at(3));
  EndTraining();
  for (const int k : {1, 2}) EndsWith(k, 0);
  EXPECT_EQ(Report(2)["faults"].at(0)["rank"], 3);
  EXPECT_EQ(Report(2)["faults"].at(0)["node"], "n2");
  EXPECT_EQ(Report(2)["restarts"], 1);
  EXPECT_EQ(Report(1)["restarts"], 0);
  EXPECT_EQ(Report(1)["job_faults"].at(0)["budget"], "1 of 3") << "the leader's";
  EXPECT_EQ(Report(1)["budget"], "1 of 3");
  EXPECT_TRUE(Report(2)["budget"].is_null()) << "it does not count";
}

TEST_F(Nodes, AKilledAgentsRanksGoToTheSpare) {
  for (const int k : {1, 2, 3}) StartTrainer(k, "2", {"--spares", "1"});
  ASSERT_TRUE(AllTrain(4)) << Seen();
  const std::map<int, pid_t> before = Pids();

  agents_.at(2)->Kill();

  ASSERT_TRUE(AllTrain(4, 2)) << Seen();
  for (const int rank : {0, 1}) EXPECT_EQ(Pids().at(rank), before.at(rank)) << rank;
  EXPECT_EQ(CountAliveAfter({before.at(2), before.at(3)}, absl::Seconds(1)), 0) << "orphans";
  EndTraining();
  EndsWith(1, 0, 60);
  EndsWith(3, 0);
  EXPECT_EQ(Report(3)["generations"], 1) << "it was a spare before";
}

TEST_F(Nodes, ASpareThatWasNotNeededEndsWithTheJob) {
  for (const int k : {1, 2, 3}) StartTrainer(k, "2", {"--spares", "1"});
  ASSERT_TRUE(AllTrain(4)) << Seen();
  EndTraining();
  for (const int k : {1, 2, 3}) EndsWith(k, 0);
  EXPECT_EQ(Report(3)["generations"], 0);
  EXPECT_EQ(Report(3)["run_id"], Report(1)["run_id"]);
}

TEST_F(Nodes, WithoutASpareTheWorldShrinks) {
  for (const int k : {1, 2}) StartTrainer(k, "1:2");
  ASSERT_TRUE(AllTrain(4)) << Seen();
  const std::map<int, pid_t> before = Pids();

  agents_.at(2)->Kill();

  ASSERT_TRUE(AllTrain(2, 2)) << Seen();
  for (const int rank : {0, 1}) EXPECT_EQ(Pids().at(rank), before.at(rank)) << rank;
  EndTraining();
  EndsWith(1, 0, 60);
}

TEST_F(Nodes, TheGlobalBatchStaysWhenTheWorldShrinks) {
  for (const int k : {1, 2, 3})
    StartTrainer(k, "1:3", {"--micro-batches", "12", "--ranks-per-replica", "2"});
  ASSERT_TRUE(AllTrain(6)) << Seen();
  agents_.at(3)->Kill();
  ASSERT_TRUE(AllTrain(4, 2)) << Seen();
  EndTraining();
  for (const int k : {1, 2}) EndsWith(k, 0, 60);

  EXPECT_THAT(agents_.at(1)->seen(),
              HasSubstr("generation 2 with 4 ranks, 2 of them here, 6 micro-batches each"));
  const std::string log = Read("log");
  for (int rank = 0; rank < 6; ++rank)
    EXPECT_THAT(log, HasSubstr("share 1 " + std::to_string(rank) + " 4\n")) << "of 3 replicas";
  for (int rank = 0; rank < 4; ++rank)
    EXPECT_THAT(log, HasSubstr("share 2 " + std::to_string(rank) + " 6\n")) << "of 2 replicas";
}

TEST_F(Nodes, AKilledCoordinatorComesBackAndNobodyLosesAStep) {
  StartCoordinator("2");
  for (const int k : {1, 2}) StartTrainer(k, "2");
  ASSERT_TRUE(AllTrain(4)) << Seen();
  const std::map<int, pid_t> before = Pids();

  lead_->Kill();
  ASSERT_NE(agents_.at(1)->LineWith("no coordinator", Within(10)), "") << Seen();
  const int64_t then = Rounds().back().round;
  ASSERT_TRUE(AllTrain(4, 1, then + 40)) << "without a coordinator" << Seen();
  StartCoordinator("2");
  for (const int k : {1, 2})
    ASSERT_NE(agents_.at(k)->LineWith("the coordinator is there", Within(20)), "") << Seen();

  EndTraining();
  for (const int k : {1, 2}) EndsWith(k, 0);
  EXPECT_EQ(Pids(), before);
  EXPECT_EQ(Rounds().back().generation, 1u);
  EXPECT_NE(lead_->LineWith("job job ends with 0", Within(10)), "") << lead_->seen();
}

// Nothing is saved here, so 81.
TEST_F(Nodes, TermOnAnyAgentOfAJobThatNeedsAllStopsThemAllAlike) {
  for (const int k : {1, 2}) StartTrainer(k, "2");
  ASSERT_TRUE(AllTrain(4)) << Seen();
  agents_.at(2)->Signal(SIGTERM);
  for (const int k : {1, 2}) EndsWith(k, 81);
}

// Ranks 2 and 3 have not joined yet, and ranks 0 and 1 wait for them: no step will come to stop at.
TEST_F(Nodes, TermWhileSomeRanksStillJoinWaitsForNoStep) {
  const std::string join = "touch " + Path("born") + "$RANK; [ $RANK -ge 2 ] && exec sleep 600; " +
                           "exec " + Trainer()[0] + " " + Path("log") + " " + Path("until");
  for (const int k : {1, 2}) Start(k, "2", {"--grace", "20"}, {"sh", "-c", join});
  ASSERT_TRUE(Comes([&](const std::vector<Round>&) {
    return fs::exists(Path("born0")) && fs::exists(Path("born1")) && fs::exists(Path("born2")) &&
           fs::exists(Path("born3"));
  })) << Seen();
  agents_.at(2)->Signal(SIGTERM);
  for (const int k : {1, 2}) EndsWith(k, 81, 8);
}

TEST_F(Nodes, CtrlCStopsThemAllWith130) {
  for (const int k : {1, 2}) StartTrainer(k, "2");
  ASSERT_TRUE(AllTrain(4)) << Seen();
  agents_.at(2)->Signal(SIGINT);
  for (const int k : {1, 2}) EndsWith(k, 130);
}

TEST_F(Nodes, AnAgentThatIsToldToLeaveLeavesAndTheRestGoesOn) {
  for (const int k : {1, 2}) StartTrainer(k, "1:2");
  ASSERT_TRUE(AllTrain(4)) << Seen();
  agents_.at(2)->Signal(SIGTERM);
  EndsWith(2, 86);
  ASSERT_TRUE(AllTrain(2, 2)) << Seen();
  EndTraining();
  EndsWith(1, 0, 60);
}

TEST_F(Nodes, ALeaderThatIsToldToLeaveStopsTheJob) {
  for (const int k : {1, 2}) StartTrainer(k, "1:2");
  ASSERT_TRUE(AllTrain(4)) << Seen();
  agents_.at(1)->Signal(SIGTERM);
  for (const int k : {1, 2}) EndsWith(k, 81);
}

// --- Arrivals, names and clocks ---

TEST_F(Nodes, NodesThatComeOneAfterAnotherMeet) {
  StartTrainer(2, "3");  // before there is anybody who leads
  ASSERT_NE(agents_.at(2)->LineWith("no coordinator", Within(10)), "") << Seen();
  StartTrainer(1, "3");
  ASSERT_NE(agents_.at(1)->LineWith("leads job job", Within(10)), "") << Seen();
  ASSERT_NE(agents_.at(2)->LineWith("the coordinator is there", Within(20)), "") << Seen();
  EXPECT_EQ(Read("log"), "") << "two of three are not enough";
  StartTrainer(3, "3");
  ASSERT_TRUE(AllTrain(6)) << Seen();
  EndTraining();
  for (const int k : {1, 2, 3}) EndsWith(k, 0);
}

// The name is in a hosts file of this test's own.
TEST_F(Nodes, ANameOfTheIpv6LoopbackServes) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root for a mount namespace";
  std::ofstream(Path("hosts")) << "::1 lead.of.the.job\n";
  const std::string lead = "lead.of.the.job:" + std::to_string(MasterPorts("::1").Of(1).value());
  const std::string run = "mount --bind " + Path("hosts") + " /etc/hosts || exit 99; exec " +
                          (BuildFolder() / "outlast").string() + " run -n 2 --nnodes 2 --job job" +
                          " --coordinator " + lead + " --run-dir " + Path("runs");
  std::string command;
  for (const std::string& word : Trainer()) command += " " + word;
  for (const int k : {1, 2}) {
    const std::string rank = std::to_string(k);
    agents_[k] = std::make_unique<PipedProcess>(std::vector<std::string>{
        "/usr/bin/unshare", "-m", "sh", "-c",
        run + " --node n" + rank + " --node-rank " + std::to_string(k - 1) + " --" + command});
  }
  EndTraining();
  const int code = agents_.at(1)->Wait(Within(40));
  if (code == 99) GTEST_SKIP() << "may not mount";
  EXPECT_EQ(code, 0) << Seen();
  EndsWith(2, 0);
}

TEST_F(Nodes, AStoppedAgentsRanksGoToTheSpareAndItGivesUpWhenItGoesOn) {
  for (const int k : {1, 2, 3}) StartTrainer(k, "2", {"--spares", "1"});
  ASSERT_TRUE(AllTrain(4)) << Seen();
  const std::map<int, pid_t> before = Pids();

  agents_.at(2)->Signal(SIGSTOP);

  ASSERT_TRUE(AllTrain(4, 2)) << Seen();
  for (const int rank : {0, 1}) EXPECT_EQ(Pids().at(rank), before.at(rank)) << rank;
  const uint64_t generation = Rounds().back().generation;
  agents_.at(2)->Signal(SIGCONT);
  EXPECT_EQ(CountAliveAfter({before.at(2), before.at(3)}, absl::Seconds(20)), 0)
      << "two that hold a rank: " << Seen();
  ASSERT_TRUE(AllTrain(4, generation, Rounds().back().round + 20)) << Seen();
  EXPECT_EQ(Rounds().back().generation, generation) << "its return disturbs nobody";
  EndTraining();
  EndsWith(1, 0, 60);
  EndsWith(3, 0);
  EndsWith(2, 0);
}

#ifndef OUTLAST_SANITIZED  // their run time wants to be the first of all libraries
TEST_F(Nodes, AWallClockThatJumpsAnHourChangesNothing) {
  setenv("LD_PRELOAD", (BuildFolder() / "tests" / "liboutlast_clock_shim.so").c_str(), 1);
  for (const int k : {1, 2}) {
    const std::string shift = Path("shift" + std::to_string(k));
    std::ofstream(shift) << "0";
    setenv("OUTLAST_TEST_CLOCK_SHIFT", shift.c_str(), 1);
    StartTrainer(k, "2");
  }
  unsetenv("LD_PRELOAD");
  unsetenv("OUTLAST_TEST_CLOCK_SHIFT");
  ASSERT_TRUE(AllTrain(4)) << Seen();
  const std::map<int, pid_t> before = Pids();
  for (const auto& [k, agent] : agents_) {
    std::ifstream maps("/proc/" + std::to_string(agent->pid()) + "/maps");
    EXPECT_THAT(std::string(std::istreambuf_iterator<char>(maps), {}), HasSubstr("clock_shim"));
  }

  for (const auto& [first, second] : {std::pair{3600, -3600}, {-7200, 86400}, {0, 0}}) {
    std::ofstream(Path("shift1")) << first;
    std::ofstream(Path("shift2")) << second;
    // Longer than the beats' limit of 3 s, all three together.
    ASSERT_TRUE(AllTrain(4, 1, Rounds().back().round + 500)) << Seen();
  }

  EXPECT_EQ(Pids(), before);
  EXPECT_EQ(Rounds().back().generation, 1u) << Seen();
  // A death is judged and mended as ever.
  std::ofstream(Path("shift1")) << 3600;
  kill(before.at(3), SIGKILL);
  ASSERT_TRUE(AllTrain(4, 2)) << Seen();
  EndTraining();
  for (const int k : {1, 2}) EndsWith(k, 0);
  EXPECT_EQ(Report(1)["job_faults"].size(), 1u);
}
#endif

// --- Checkpoints: the trainer knows its state of each step, and checks what it restores ---

TEST_F(NodesThatSave, TheAgentsCommitOneCheckpointTogetherAndTheNextJobRestoresIt) {
  StartToys({1, 2}, 30);
  for (const int k : {1, 2}) EndsWith(k, 0, 60);
  ASSERT_TRUE(Manifest(30).is_object()) << Seen();
  EXPECT_EQ(Manifest(30)["world"], 4);

  StartToys({1, 2}, 40);
  for (const int k : {1, 2}) EndsWith(k, 0, 60);
  EXPECT_THAT(Read("log.restores"), HasSubstr("1 30 3 disk"));
  EXPECT_TRUE(Manifest(40).is_object()) << Seen();
}

TEST_F(NodesThatSave, AllNodesBeginAtAnotherRootsCheckpointAndSaveToTheirOwn) {
  PipedProcess other({BuildFolder() / "outlast", "run", "-n", "4", "--run-dir", Path("runs0"), "--",
                      BuildFolder() / "outlast_toy_trainer", "--steps", "20", "--step-ms", "0",
                      "--ckpt-every", "10", "--ckpt-dir", Path("root0")});
  ASSERT_EQ(other.Wait(Within(60)), 0) << other.seen();

  StartToys({1, 2}, 30, {"--restore-from", Path("root0")});
  for (const int k : {1, 2}) EndsWith(k, 0, 60);
  EXPECT_THAT(Read("log.restores"), HasSubstr("1 20 3 disk"));
  EXPECT_TRUE(Manifest(30)["parent"].is_null()) << Manifest(30);

  StartToys({1, 2}, 40, {"--restore-from", "35"});
  for (const int k : {1, 2}) EndsWith(k, 85, 60);
  EXPECT_THAT(Seen(), HasSubstr("--restore-from 35: no checkpoint of step 35, there are steps 30"));
}

TEST_F(NodesThatSave, AKilledRankComesBackFromWhatAllHave) {
  StartToys({1, 2}, 60);
  ASSERT_TRUE(HasLine("log", "\n1 15 3 ")) << Seen();
  kill(std::stoi(PidOf(Read("runs/latest-n2/events.jsonl"), 3)), SIGKILL);
  for (const int k : {1, 2}) EndsWith(k, 0, 90);
  EXPECT_THAT(Read("log.restores"), HasSubstr("\n2 "));
  EXPECT_TRUE(Manifest(60).is_object()) << Seen();
}

// Rank 3 has gone through step 12, so all have sealed step 10; nothing is on the disk yet.
TEST_F(NodesThatSave, AKilledRankComesBackFromMemoryAndNeedsNoDisk) {
  std::vector<std::string> command = Toy(60);
  command.insert(command.end(), {"--ckpt-every", "1000000", "--snapshot-every", "5"});
  for (const int k : {1, 2}) Start(k, "2", {}, command);
  ASSERT_TRUE(HasLine("log", "\n1 12 3 ")) << Seen();
  kill(std::stoi(PidOf(Read("runs/latest-n2/events.jsonl"), 3)), SIGKILL);
  for (const int k : {1, 2}) EndsWith(k, 0, 90);

  std::istringstream lines(Read("log.restores"));
  std::map<int, std::string> sources;
  uint64_t generation = 0;
  int64_t step = 0;
  int rank = 0;
  for (std::string source; lines >> generation >> step >> rank >> source;) {
    if (generation != 2) continue;
    sources[rank] = source;
    EXPECT_GE(step, 10) << "rank " << rank;
  }
  ASSERT_EQ(sources.size(), 4u) << Read("log.restores");
  EXPECT_EQ(sources[3], "memory") << "of its agent";
  for (const auto& [survivor, source] : sources) EXPECT_NE(source, "disk") << survivor;
}

TEST_F(NodesThatSave, ASpareGoesOnFromTheDiskWithALostNodesRanks) {
  StartToys({1, 2, 3}, 60, {"--spares", "1"});
  ASSERT_TRUE(HasLine("log", "\n1 15 3 ")) << Seen();
  agents_.at(2)->Kill();
  EndsWith(1, 0, 120);
  EndsWith(3, 0, 60);
  EXPECT_THAT(Read("log.restores"), HasSubstr("\n2 "));
  EXPECT_TRUE(Manifest(60).is_object()) << Seen();
}

// Nothing is on the disk when the node is lost; what its ranks had sealed lies in the first node's
// agent. The end is that of a job that nothing happened to, byte for byte.
TEST_F(NodesThatSave, ASpareGoesOnFromTheCopiesThatAnotherNodeHasOfALostOnesRanks) {
  constexpr int kSteps = 300;
  std::vector<std::string> command = Toy(kSteps);
  command.insert(command.end(), {"--ckpt-every", "1000000", "--snapshot-every", "5"});
  for (const int k : {1, 2, 3}) Start(k, "2", {"--spares", "1", "--peer-every", "0.05"}, command);
  const std::string line = agents_.at(1)->LineWith(" lies on another node too", Within(60));
  ASSERT_NE(line, "") << Seen();
  const int copied = std::stoi(line.substr(line.find("step ") + 5));
  agents_.at(2)->Kill();
  EndsWith(1, 0, 120);
  EndsWith(3, 0, 60);

  std::istringstream lines(Read("log.restores"));
  std::map<int, std::string> sources;
  std::set<int64_t> steps;
  uint64_t generation = 0;
  int64_t step = 0;
  int rank = 0;
  for (std::string source; lines >> generation >> step >> rank >> source;) {
    if (generation != 2) continue;
    sources[rank] = source;
    steps.insert(step);
  }
  ASSERT_EQ(sources.size(), 4u) << Read("log.restores") << Seen();
  ASSERT_EQ(steps.size(), 1u) << "one instant: " << Read("log.restores");
  EXPECT_GE(*steps.begin(), copied) << "no step that was copied is lost";
  for (const int lost : {2, 3}) EXPECT_EQ(sources[lost], "peer") << lost << Seen();
  for (const int survivor : {0, 1}) EXPECT_NE(sources[survivor], "disk") << survivor;
  EXPECT_THAT(Read("runs/latest-n3/events.jsonl"), HasSubstr(R"("source":"peer")"));
  EXPECT_GT(Report(1)["peer_copies"]["count"], 0);

  PipedProcess undisturbed({BuildFolder() / "outlast", "run", "-n", "4", "--run-dir", Path("runs0"),
                            "--", BuildFolder() / "outlast_toy_trainer", "--steps",
                            std::to_string(kSteps), "--step-ms", "0", "--ckpt-every", "1000000",
                            "--ckpt-dir", Path("root0")});
  ASSERT_EQ(undisturbed.Wait(Within(60)), 0) << undisturbed.seen();
  const auto shard = [&](const std::string& root, int number) {
    for (const auto& entry : fs::directory_iterator(Path(root))) {
      const std::string name = entry.path().filename();
      if (!name.starts_with("step-") || std::stoi(name.substr(5)) != kSteps) continue;
      return Read(root + "/" + name + "/w0000" + std::to_string(number) + ".safetensors");
    }
    return std::string();
  };
  for (const int number : {0, 1, 2, 3}) {
    EXPECT_NE(shard("root", number), "") << number;
    EXPECT_EQ(shard("root", number), shard("root0", number)) << number;
  }
}

// Nothing is on the disk when a rank fails for good: the agents save what all had sealed.
TEST_F(NodesThatSave, WhatMemoryHoldsIsSavedByTheAgentsAfterTheTrainersEnd) {
  std::vector<std::string> command = Toy(100000);
  command.insert(command.end(), {"--ckpt-every", "1000000", "--snapshot-every", "5"});
  for (const int k : {1, 2}) Start(k, "2", {"--max-restarts", "0"}, command);
  ASSERT_TRUE(HasLine("log", "\n1 22 3 ")) << Seen();
  kill(std::stoi(PidOf(Read("runs/latest-n2/events.jsonl"), 3)), SIGKILL);
  for (const int k : {1, 2}) EndsWith(k, 128 + SIGKILL, 60);
  int saved = 0;
  for (const auto& entry : fs::directory_iterator(Path("root"))) {
    const std::string name = entry.path().filename();
    if (name.starts_with("step-") && fs::exists(entry.path() / "MANIFEST.json"))
      saved = std::stoi(name.substr(5));
  }
  ASSERT_GE(saved, 15) << Seen();
  EXPECT_EQ(Manifest(saved)["world"], 4);

  StartToys({1, 2}, saved + 10);
  for (const int k : {1, 2}) EndsWith(k, 0, 60);
  EXPECT_THAT(Read("log.restores"), HasSubstr("1 " + std::to_string(saved) + " 3 disk"));
}

TEST_F(NodesThatSave, AStopIsSavedByAllAndEndsWith80) {
  StartToys({1, 2}, 100000);
  ASSERT_TRUE(HasLine("log", "\n1 15 3 ")) << Seen();
  agents_.at(2)->Signal(SIGTERM);
  for (const int k : {1, 2}) EndsWith(k, 80);
}

// --- Nodes that leave and come: nothing is on the disk, and memory is of no use to another world

class NodesThatComeAndGo : public NodesThatSave {
 protected:
  // What world 4 or another trains, until it is told to stop.
  void Start(int k, const std::string& nodes = "1:2", const std::string& grace = "15") {
    std::vector<std::string> command = Toy(100000);
    command.insert(command.end(), {"--ckpt-every", "1000000", "--sharded-mb", "1"});
    Nodes::Start(k, nodes, {"--grace", grace}, command);
  }
  // By rank: step and source.
  std::map<int, std::pair<int64_t, std::string>> RestoredIn(uint64_t wanted, size_t ranks) const {
    const absl::Duration deadline = Clock::Real().Uptime() + Within(40);
    std::map<int, std::pair<int64_t, std::string>> restored;
    while (restored.size() < ranks && Clock::Real().Uptime() < deadline) {
      Clock::Real().SleepFor(absl::Milliseconds(10));
      restored.clear();
      std::istringstream lines(Read("log.restores"));
      uint64_t generation = 0;
      int64_t step = 0;
      int rank = 0;
      for (std::string source; lines >> generation >> step >> rank >> source;) {
        if (generation == wanted) restored[rank] = {step, source};
      }
    }
    return restored;
  }
  // All ranks of `generation` go on from one step on the disk; it, or -1.
  int64_t GoesOnFrom(uint64_t generation, size_t ranks) const {
    const auto restored = RestoredIn(generation, ranks);
    if (restored.size() != ranks) return -1;
    for (const auto& [rank, one] : restored) {
      if (one != std::make_pair(restored.begin()->second.first, std::string("disk"))) return -1;
    }
    return restored.begin()->second.first;
  }
  int64_t NewestStep() const {
    int64_t newest = 0;
    std::istringstream lines(Read("log"));
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      int64_t generation = 0, step = 0;
      if (words >> generation >> step) newest = std::max(newest, step);
    }
    return newest;
  }
  void Stop(int k) {
    agents_.at(k)->Signal(SIGTERM);
    EndsWith(k, 80);
  }
};

TEST_F(NodesThatComeAndGo, TheOthersGoOnFromAStepThatIsSavedWhenANodeLeaves) {
  for (const int k : {1, 2}) Start(k);
  ASSERT_TRUE(HasLine("log", "\n1 22 3 ")) << Seen();
  const int64_t step = NewestStep();
  agents_.at(2)->Signal(SIGTERM);
  EndsWith(2, 86);
  EXPECT_GE(GoesOnFrom(2, 2), step) << Read("log.restores") << Seen();
  EXPECT_NE(agents_.at(1)->LineWith("coordinator: node n2 leaves: step ", Within(10)), "")
      << Seen();
  Stop(1);
}

TEST_F(NodesThatComeAndGo, TheWorldGrowsFromAStepThatIsSavedForTheNewcomer) {
  Start(1);
  ASSERT_TRUE(HasLine("log", "\n1 22 1 ")) << Seen();
  const int64_t step = NewestStep();
  Start(2);
  EXPECT_GE(GoesOnFrom(2, 4), step) << Read("log.restores") << Seen();
  EXPECT_NE(agents_.at(1)->LineWith("the world grows from 2 to 4 ranks: step ", Within(10)), "")
      << Seen();
  Stop(1);
  EndsWith(2, 80);
}

TEST_F(NodesThatComeAndGo, ALeavingNodeWhoseRankIsStoppedIsLetGoInTimeWithAWordOfWhatIsLost) {
  for (const int k : {1, 2}) Start(k, "1:2", "6");
  ASSERT_TRUE(HasLine("log", "\n1 22 3 ")) << Seen();
  const int rank3 = std::stoi(PidOf(Read("runs/latest-n2/events.jsonl"), 3));
  kill(rank3, SIGSTOP);
  agents_.at(2)->Signal(SIGTERM);
  EXPECT_NE(agents_.at(1)->LineWith("node n2 leaves without a save: ", Within(20)), "") << Seen();
  EXPECT_THAT(Seen(), HasSubstr("; no step is saved"));
  EndsWith(2, 86);
  ASSERT_TRUE(HasLine("log", "\n2 10 1 ")) << Seen();
  Stop(1);
}

// As a batch system does it: all processes of the job get TERM at the same time, and the trainers
// die of it. The agents save what all had sealed.
TEST_F(NodesThatSave, ATermToEveryProcessIsSavedAndEndsWith80) {
  std::vector<std::string> command = Toy(100000);
  command.insert(command.end(), {"--ckpt-every", "1000000", "--snapshot-every", "5"});
  for (const int k : {1, 2}) Start(k, "2", {}, command);
  ASSERT_TRUE(HasLine("log", "\n1 22 3 ")) << Seen();
  for (const int k : {1, 2}) {
    const std::string events = Read("runs/latest-n" + std::to_string(k) + "/events.jsonl");
    for (const int rank : {2 * k - 2, 2 * k - 1}) kill(std::stoi(PidOf(events, rank)), SIGTERM);
    agents_.at(k)->Signal(SIGTERM);
  }
  for (const int k : {1, 2}) EndsWith(k, 80);
  EXPECT_THAT(Seen(), HasSubstr("without the trainers"));

  StartToys({1, 2}, 60);
  for (const int k : {1, 2}) EndsWith(k, 0, 60);
  EXPECT_TRUE(std::regex_search(Read("log.restores"), std::regex("\n1 [1-9][0-9]+ 3 disk")))
      << Read("log.restores");
}

// --- Hangs ---

// The two stop themselves in the data phase of one step; ranks 0 and 1 wait in its all-reduce.
TEST_F(Nodes, AllRanksOfANodeThatAreStoppedAreReplacedAndNobodyElseIsBlamed) {
  constexpr double kFirst = 3;
  const std::vector<std::string> trainer = {BuildFolder() / "tests" / "outlast_hang_trainer",
                                            "--folder",
                                            folder_,
                                            "--steps",
                                            "60",
                                            "--first",
                                            std::to_string(kFirst * TimeFactor()),
                                            "--do",
                                            "data:2:30",
                                            "--do",
                                            "data:3:30"};
  for (const int k : {1, 2}) Start(k, "2", {}, trainer);
  for (const int k : {1, 2}) EndsWith(k, 0, 60);

  int64_t sum = 0;
  for (int64_t step = 0; step < 60; ++step) sum += (1 + 2 + 3 + 4) * (step % 7);
  EXPECT_EQ(Read("result"), std::to_string(sum) + " " + std::to_string(sum));
  const nlohmann::json one = Report(1), two = Report(2);
  std::set<int> blamed;
  for (const auto& fault : two["faults"]) blamed.insert(fault["rank"].get<int>());
  EXPECT_EQ(blamed, std::set<int>({2, 3})) << two["faults"];
  EXPECT_EQ(two["restarts"], 2);
  EXPECT_TRUE(one["faults"].empty()) << one["faults"];
  EXPECT_EQ(one["restarts"], 0);
  for (const auto& fault : one["job_faults"]) EXPECT_EQ(fault["budget"], "1 of 3");
  // No freeze of the node; a leak check, at the end of a sanitizer's run, is a debugger.
  EXPECT_THAT(agents_.at(2)->seen(), Not(HasSubstr("stopped; deadlines start again")));
  const auto stopped_at = fs::last_write_time(Path("data.2.30"));
  const auto found_at = fs::last_write_time(Path("runs/latest-n2/boxes/g1-1-stopped/verdict.json"));
  EXPECT_LT(std::chrono::duration<double>(found_at - stopped_at).count(),
            (kFirst + 1) * TimeFactor());
}

// What no node sees by itself. Two nodes of `slots` ranks each.
class NodesThatHang : public Nodes {
 protected:
  void Train(int slots, const std::string& deed) {
    const std::vector<std::string> trainer = {BuildFolder() / "tests" / "outlast_hang_trainer",
                                              "--folder",
                                              folder_,
                                              "--steps",
                                              "60",
                                              "--floor",
                                              std::to_string(1.0 * TimeFactor()),
                                              "--first",
                                              std::to_string(3.0 * TimeFactor()),
                                              "--do",
                                              deed};
    for (const int k : {1, 2}) Start(k, "2", {"-n", std::to_string(slots)}, trainer);
    for (const int k : {1, 2}) EndsWith(k, 0, 60);
    int64_t sum = 0;
    for (int64_t step = 0; step < 60; ++step) sum += slots * (2 * slots + 1) * (step % 7);
    EXPECT_EQ(Read("result"), std::to_string(sum) + " " + std::to_string(sum));
  }
  // Of the one fault that node n<k> has reported.
  void ExpectFault(int k, int rank, const std::string& found_by) {
    const nlohmann::json faults = Report(k)["faults"];
    ASSERT_EQ(faults.size(), 1u) << faults << Seen();
    EXPECT_EQ(faults[0]["rank"], rank) << faults;
    EXPECT_EQ(faults[0]["found_by"], "watchdog: " + found_by) << faults;
  }
  nlohmann::json Verdict(int k, const std::string& name) const {
    return nlohmann::json::parse(
        Read("runs/latest-n" + std::to_string(k) + "/boxes/g1-1-" + name + "/verdict.json"),
        nullptr, false);
  }
};

// Rank 1 idles, which is no fault on its node; rank 0 waits in an all-reduce on the other.
TEST_F(NodesThatHang, ARankThatAnotherNodeWaitsForIsNamed) {
  Train(1, "idle:1:30");
  ExpectFault(2, 1, "stuck_outside_comm");
  EXPECT_TRUE(Report(1)["faults"].empty()) << Report(1)["faults"];
  const nlohmann::json verdict = Verdict(2, "stuck_outside_comm");
  EXPECT_EQ(verdict["culprits"][0]["section"], "idle") << verdict;
  EXPECT_EQ(verdict["culprits"][0]["step"], 30) << verdict;
  EXPECT_EQ(verdict["waiting"], nlohmann::json({0})) << verdict;
  EXPECT_EQ(Verdict(1, "stuck_outside_comm")["culprits"], verdict["culprits"]) << "both know";
}

// Rank 3 enters two all-reduces in the other order than ranks 0, 1 and 2.
TEST_F(NodesThatHang, OppositeOrdersOnTwoNodesAreACycle) {
  Train(2, "swap:3:30");
  ExpectFault(1, 0, "collective_order_deadlock");
  EXPECT_TRUE(Report(2)["faults"].empty()) << Report(2)["faults"];
  EXPECT_EQ(Verdict(1, "collective_order_deadlock")["cycle"], nlohmann::json({0, 3}));
}

// --- Cuts ---

// Node n<k>'s stream to a coordinator of its own goes through a relay.
class NodesThatAreCutOff : public NodesThatSave {
 protected:
  using Way = TcpRelay::Way;
  // Whoever cut its stream knows that it is down.
  void CutUntilItIsKnown(int k, Way way) {
    relay_->Cut(way);
    ASSERT_NE(agents_.at(k)->LineWith("no coordinator", Within(20)), "") << Seen();
  }
  void HealUntilItIsBack(int k) {
    relay_->Heal();
    ASSERT_NE(agents_.at(k)->LineWith("the coordinator is there", Within(20)), "") << Seen();
  }
  void MakeRelay() { relay_ = std::make_unique<TcpRelay>("127.0.0.9", coordinator_); }

  std::unique_ptr<TcpRelay> relay_;
};

TEST_F(NodesThatAreCutOff, ACutThatIsHealedInTimeCostsNobodyAStep) {
  StartCoordinator("2");
  MakeRelay();
  StartTrainer(1, "2");
  StartTrainer(2, "2", {"--coordinator", relay_->address()});
  ASSERT_TRUE(AllTrain(4)) << Seen();
  const std::map<int, pid_t> before = Pids();

  // Before anybody knows of it, and after the stream was given up.
  for (const Way way : {Way::kTowards, Way::kBack, Way::kBoth}) {
    relay_->Cut(way);
    ASSERT_TRUE(AllTrain(4, 1, Rounds().back().round + 60)) << Seen();
    relay_->Heal();
  }
  for (const Way way : {Way::kTowards, Way::kBack}) {
    CutUntilItIsKnown(2, way);
    const int64_t then = Rounds().back().round;
    ASSERT_TRUE(AllTrain(4, 1, then + 40)) << "without a coordinator" << Seen();
    HealUntilItIsBack(2);
  }

  EndTraining();
  for (const int k : {1, 2}) EndsWith(k, 0);
  EXPECT_EQ(Pids(), before);
  EXPECT_EQ(Rounds().back().generation, 1u);
  for (const int k : {1, 2}) EXPECT_TRUE(Report(k)["faults"].empty()) << Report(k)["faults"];
}

// The node of rank 0, which commits the checkpoints, is cut off for longer than its grace: the
// spare takes its ranks, and when it is back it does nothing with what it held.
TEST_F(NodesThatAreCutOff, ACutThatIsHealedTooLateSplitsNothing) {
  StartCoordinator("2");
  MakeRelay();
  Start(1, "2", {"--coordinator", relay_->address()}, Toy(1'000'000));
  StartToys({2}, 1'000'000);
  ASSERT_TRUE(HasLine("log", "\n1 15 3 ")) << Seen();
  StartToys({3}, 1'000'000);
  const std::string rank_2 = PidOf(Read("runs/latest-n2/events.jsonl"), 2);

  CutUntilItIsKnown(1, Way::kBoth);
  ASSERT_TRUE(HasLine("log.restores", "\n2 ", 60)) << Seen();
  ASSERT_TRUE(HasLine("log", "\n2 ", 60)) << Seen();
  HealUntilItIsBack(1);

  EXPECT_EQ(PidOf(Read("runs/latest-n2/events.jsonl"), 2), rank_2) << "survivors are not restarted";
  const pid_t former = std::stoi(PidOf(Read("runs/latest-n1/events.jsonl"), 0));
  EXPECT_EQ(CountAliveAfter({former}, absl::Seconds(20)), 0) << "two that hold rank 0: " << Seen();
  agents_.at(2)->Signal(SIGINT);
  // Not after --stop-within, 25 s: it has nothing to save.
  for (const int k : {1, 2, 3}) EndsWith(k, 130, 15);

  // One checkpoint a step, each the child of one before it: nobody committed beside the new holder.
  std::map<std::string, nlohmann::json> manifests;
  std::map<int, int> of_step;
  for (const auto& entry : fs::directory_iterator(Path("root"))) {
    const std::string name = entry.path().filename();
    std::ifstream file(entry.path() / "MANIFEST.json");
    if (!name.starts_with("step-") || !file) continue;
    manifests[name] = nlohmann::json::parse(file, nullptr, false);
    EXPECT_EQ(++of_step[manifests[name].value("step", -1)], 1) << name;
  }
  ASSERT_FALSE(manifests.empty()) << Seen();
  std::map<std::string, int> children;
  for (const auto& [name, manifest] : manifests) {
    if (manifest["parent"].is_string()) ++children[manifest["parent"].get<std::string>()];
  }
  for (const auto& [parent, count] : children) EXPECT_EQ(count, 1) << parent;
}

// --- Reports ---

TEST_F(NodesThatSave, AReportIsAboutOneNode) {
  StartToys({1, 2}, 30);
  for (const int k : {1, 2}) EndsWith(k, 0, 60);
  const std::string one = Path("runs/latest-n1"), two = Path("runs/latest-n2");
  const auto report = [](const std::vector<std::string>& folders) {
    std::vector<std::string> words = {BuildFolder() / "outlast", "report"};
    words.insert(words.end(), folders.begin(), folders.end());
    PipedProcess tool(words);
    const int code = tool.Wait(Within(20));
    return std::pair(code, tool.seen());
  };
  EXPECT_EQ(report({one}).first, 0);
  EXPECT_EQ(report({two}).first, 0);
  const auto [code, said] = report({one, two});
  EXPECT_EQ(code, 85) << said;
  EXPECT_THAT(said, HasSubstr(one + " (node n1) and " + two + " (node n2) are of one run"));

  const std::string first = fs::canonical(one);
  StartToys({1, 2}, 40);
  for (const int k : {1, 2}) EndsWith(k, 0, 60);
  const auto of_two_runs = report({first, two});
  EXPECT_EQ(of_two_runs.first, 0) << of_two_runs.second;
}

// --- Refusals ---

TEST_F(Nodes, AnotherTokenIsRefusedInOneLine) {
  WriteToken("right", 'a');
  WriteToken("wrong", 'b');
  StartTrainer(1, "2", {"--token-file", Path("right")});
  ASSERT_NE(agents_.at(1)->LineWith("leads job job", Within(10)), "") << Seen();
  StartTrainer(2, "2", {"--token-file", Path("wrong")});
  EndsWith(2, 85);
  EXPECT_THAT(agents_.at(2)->seen(),
              HasSubstr("exit code 85: the coordinator at " + coordinator_ +
                        " did not prove that it knows this agent's job token"));
  StartTrainer(2, "2", {"--token-file", Path("right")});
  ASSERT_TRUE(AllTrain(4)) << Seen();
  EndTraining();
  for (const int k : {1, 2}) EndsWith(k, 0);
}

TEST_F(Nodes, AForeignJobIsRefusedInOneLine) {
  StartTrainer(1, "2");
  ASSERT_NE(agents_.at(1)->LineWith("leads job job", Within(10)), "") << Seen();
  StartTrainer(2, "2", {"--job", "other"});
  EndsWith(2, 85);
  EXPECT_THAT(agents_.at(2)->seen(), HasSubstr("agent n2 is of job 'other', this is job 'job'"));
  agents_.at(1)->Signal(SIGTERM);
  EndsWith(1, 81);
}

TEST_F(Nodes, AnAgentThatIsStartedOtherwiseIsRefusedInOneLineWhichNamesFlagAndBothSides) {
  StartTrainer(1, "2");
  ASSERT_NE(agents_.at(1)->LineWith("leads job job", Within(10)), "") << Seen();
  const auto refused = [&](const std::string& flag, const std::string& value) {
    StartTrainer(2, "2", {flag, value});
    EndsWith(2, 85);
    return agents_.at(2)->seen();
  };
  const std::string unlike =
      "exit code 85: agent n2 is not started as agent n1, which leads, was: ";
  EXPECT_THAT(refused("--max-restarts", "5"), HasSubstr(unlike + "--max-restarts 5, 3 wanted\n"));
  EXPECT_THAT(refused("-n", "3"), HasSubstr(unlike + "-n 3, 2 wanted\n"));
  EXPECT_THAT(refused("--nnodes", "1:2"), HasSubstr(unlike + "--nnodes 1:2, 2 wanted\n"));
  Start(2, "2", {}, {BuildFolder() / "outlast_node_trainer", Path("log"), Path("other")});
  EndsWith(2, 85);
  EXPECT_THAT(agents_.at(2)->seen(), HasSubstr("/other, ..."));

  // What a node has of its own is its own business.
  StartTrainer(2, "2", {"--run-dir", Path("runs2"), "--grace", "4", "--join-timeout", "60"});
  ASSERT_TRUE(AllTrain(4)) << Seen();
  EndTraining();
  for (const int k : {1, 2}) EndsWith(k, 0);
}

TEST_F(Nodes, ACoordinatorOfItsOwnHoldsAllToItsFlagsAndElseToTheFirstAgents) {
  StartCoordinator("2");
  StartTrainer(1, "2", {"--max-restarts", "5"});
  EndsWith(1, 85);
  EXPECT_THAT(agents_.at(1)->seen(),
              HasSubstr("agent n1 is not started as the coordinator was: --max-restarts 5, "
                        "3 wanted\n"));
  StartTrainer(1, "2");
  ASSERT_NE(lead_->LineWith("1 of 2", Within(10)), "") << Seen();
  Start(2, "2", {}, {"/bin/true"});
  EndsWith(2, 85);
  EXPECT_THAT(agents_.at(2)->seen(),
              HasSubstr("agent n2 is not started as agent n1 was: the command /bin/true, "));
  StartTrainer(2, "2");
  ASSERT_TRUE(AllTrain(4)) << Seen();
  EndTraining();
  for (const int k : {1, 2}) EndsWith(k, 0);
}

TEST_F(Nodes, AnAgentOfARunThatWasBegunAnewEndsAtOnceAndJoinsTheNewOneWhenStartedAgain) {
  for (const int k : {1, 2}) StartTrainer(k, "2");
  ASSERT_TRUE(AllTrain(4)) << Seen();
  agents_.at(1)->Signal(SIGKILL);
  agents_.at(1)->Wait(Within(10));
  StartTrainer(1, "2");
  EndsWith(2, 84);
  EXPECT_THAT(agents_.at(2)->seen(), HasSubstr("exit code 84: job job was begun anew as run "));

  StartTrainer(2, "2");
  EndTraining();
  for (const int k : {1, 2}) EndsWith(k, 0);
}

TEST_F(Nodes, AnAddressThatIsNotThisMachinesIsRefused) {
  StartTrainer(1, "2", {"--advertise", "192.0.2.1"});
  EndsWith(1, 85);
  EXPECT_THAT(agents_.at(1)->seen(),
              HasSubstr("--advertise '192.0.2.1': an address of this machine wanted"));
}

TEST_F(Nodes, ANodeThatFindsNoCoordinatorFormsNoWorldOfItsOwn) {
  StartTrainer(2, "1:2", {"--join-timeout", "1"});
  EndsWith(2, 84);
  EXPECT_THAT(agents_.at(2)->seen(), HasSubstr(coordinator_ + ": Connection refused"));
  EXPECT_EQ(Read("log"), "") << "no worker ran";
}

TEST_F(Nodes, ATokenFileThatOthersMayReadIsRefused) {
  WriteToken("token", 'a');
  fs::permissions(Path("token"), fs::perms::group_read, fs::perm_options::add);
  StartTrainer(1, "2", {"--token-file", Path("token")});
  EndsWith(1, 85);
  EXPECT_EQ(agents_.at(1)->seen(), "outlast: token file " + Path("token") +
                                       ": mode 0640 lets others read or write it, 0600 wanted "
                                       "(chmod 600 " +
                                       Path("token") + ")\n");
  EXPECT_FALSE(fs::exists(Path("runs")));
}

TEST_F(Nodes, WaitsThatContradictEachOtherAreRefusedByTheirFlags) {
  StartTrainer(1, "2", {"--join-timeout", "3", "--last-call", "5"});
  EndsWith(1, 85);
  EXPECT_EQ(agents_.at(1)->seen(),
            "outlast: --join-timeout '3' is shorter than --last-call '5': as long or longer "
            "wanted\n");
  EXPECT_FALSE(fs::exists(Path("runs")));
}

TEST_F(Nodes, ASecondAgentOfANodesNameIsRefusedWhileTheFirstLivesAndNotForTheJoinTimeout) {
  StartTrainer(1, "2");
  ASSERT_NE(agents_.at(1)->LineWith("1 of 2 here (n1)", Within(10)), "") << Seen();
  StartTrainer(2, "2", {"--node", "n1"});
  EndsWith(2, 85, 20);
  EXPECT_THAT(agents_.at(2)->seen(),
              HasSubstr("exit code 85: node name 'n1' is taken by the agent at 127.0.0.1:"));
  StartTrainer(2, "2");
  ASSERT_TRUE(AllTrain(4)) << Seen();

  // A successor is another thing.
  agents_.at(2)->Kill();
  StartTrainer(2, "2");
  ASSERT_TRUE(AllTrain(4, 2)) << Seen();
  EndTraining();
  for (const int k : {1, 2}) EndsWith(k, 0, 60);
}

TEST_F(Nodes, ANodeThatAProbeCallsUnfitEndsWithEightySevenBeforeItJoins) {
  StartTrainer(1, "2", {"--preflight", "on", "--probe", "echo dusty; exit 1"});
  EndsWith(1, 87, 60);
  EXPECT_THAT(agents_.at(1)->seen(), AllOf(HasSubstr("exit code 87: preflight: "),
                                           HasSubstr("echo dusty; exit 1: dusty\n")));
  EXPECT_THAT(agents_.at(1)->seen(), Not(HasSubstr("leads job")));
  EXPECT_EQ(Report(1)["exit_code"], 87);
}

TEST_F(Nodes, AProbeThatSaysNothingPassesWithAWarningAndTheNodeJoins) {
  StartTrainer(1, "2", {"--preflight", "on", "--probe", "exit 7"});
  ASSERT_NE(agents_.at(1)->LineWith("leads job job", Within(60)), "") << Seen();
  EXPECT_THAT(agents_.at(1)->seen(),
              HasSubstr("preflight passes with a warning: exit 7: exit code 7 (0 fit, 1 unfit)\n"));
  agents_.at(1)->Signal(SIGTERM);
  EndsWith(1, 81);
}

// Within a few seconds, with the code of a stop, and nothing of the probe is left.
TEST_F(Nodes, ASignalThatComesWhileTheNodeIsLookedAtEndsTheAgentAndTheProbe) {
  const std::map<int, int> code_of = {{SIGTERM, 81}, {SIGUSR1, 81}, {SIGINT, 130}, {SIGHUP, 129}};
  for (const auto& [signal, code] : code_of) {
    fs::remove(Path("pid"));
    StartTrainer(1, "2", {"--preflight", "on", "--probe", ProbeWithHelper()});
    ASSERT_TRUE(Comes([&](const std::vector<Round>&) { return fs::exists(Path("pid")); }, 60))
        << Seen();
    const pid_t helper = std::stoi(Read("pid"));

    agents_.at(1)->Signal(SIGQUIT);  // asks for stacks, of which there are none yet
    agents_.at(1)->Signal(signal);

    EndsWith(1, code, 8);
    EXPECT_FALSE(is_alive(helper));
    EXPECT_THAT(agents_.at(1)->seen(), HasSubstr("before this node had joined"));
    EXPECT_THAT(agents_.at(1)->seen(), Not(HasSubstr("leads job")));
    EXPECT_EQ(Report(1)["exit_code"], code);
  }
}

TEST_F(Nodes, AnAgentThatIsKilledWhileItsNodeIsLookedAtLeavesNoProbe) {
  StartTrainer(1, "2", {"--preflight", "on", "--probe", ProbeWithHelper()});
  ASSERT_TRUE(Comes([&](const std::vector<Round>&) { return fs::exists(Path("pid")); }, 60))
      << Seen();
  const pid_t helper = std::stoi(Read("pid"));

  agents_.at(1)->Signal(SIGKILL);

  EXPECT_TRUE(Comes([&](const std::vector<Round>&) { return !is_alive(helper); }, 8));
}

TEST_F(Nodes, ASignalThatComesWhileTooFewNodesAreHereEndsTheAgent) {
  const std::map<int, int> code_of = {{SIGTERM, 81}, {SIGINT, 130}};
  for (const auto& [signal, code] : code_of) {
    StartTrainer(1, "3");
    ASSERT_NE(agents_.at(1)->LineWith("waiting for nodes", Within(20)), "") << Seen();
    agents_.at(1)->Signal(signal);
    EndsWith(1, code, 8);
  }
}

// One that leads nobody, and has found no coordinator yet.
TEST_F(Nodes, ASignalThatComesBeforeThereIsACoordinatorEndsTheAgent) {
  const std::map<int, int> code_of = {{SIGTERM, 81}, {SIGINT, 130}};
  for (const auto& [signal, code] : code_of) {
    StartTrainer(2, "2");
    ASSERT_NE(agents_.at(2)->LineWith("no coordinator", Within(20)), "") << Seen();
    agents_.at(2)->Signal(signal);
    EndsWith(2, code, 8);
  }
}

TEST_F(Nodes, TooFewNodesEndWithEightyFour) {
  StartTrainer(1, "2", {"--join-timeout", "1"});
  EndsWith(1, 84);
  EXPECT_THAT(agents_.at(1)->seen(), HasSubstr("exit code 84: "));
}

// --- Programs that never join ---

TEST_F(Nodes, APlainProgramFindsItsPlaceInItsEnvironment) {
  const std::string script =
      "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE "
      "$OUTLAST_ADDRESS $MASTER_ADDR >>" +
      Path("places") + "; echo $MASTER_PORT $OUTLAST_RUN_ID >>" + Path("masters");
  for (const int k : {1, 2}) Start(k, "2", {}, {"sh", "-c", script});
  for (const int k : {1, 2}) EndsWith(k, 0);

  std::istringstream places(Read("places")), masters(Read("masters"));
  std::vector<std::string> found;
  for (std::string line; std::getline(places, line);) found.push_back(line);
  EXPECT_THAT(found, UnorderedElementsAre(
                         "0 4 0 2 0 2 127.0.0.1 127.0.0.1", "1 4 1 2 0 2 127.0.0.1 127.0.0.1",
                         "2 4 0 2 1 2 127.0.0.2 127.0.0.1", "3 4 1 2 1 2 127.0.0.2 127.0.0.1"));
  std::set<std::string> of_all;
  for (std::string line; std::getline(masters, line);) of_all.insert(line);
  EXPECT_EQ(of_all.size(), 1u) << "one port and one run: " << Read("masters");
}

TEST_F(Nodes, APlainProgramIsRestartedWholeWhenOneRankFails) {
  // Rank 3 fails once; the others would run for ever in their first attempt.
  const std::string script = "echo $RANK $TORCHELASTIC_RESTART_COUNT >>" + Path("starts") +
                             "; [ $TORCHELASTIC_RESTART_COUNT != 0 ] && exit 0"
                             "; [ $RANK != 3 ] && exec sleep 600; while [ $(wc -l <" +
                             Path("starts") + ") -lt 4 ]; do sleep 0.01; done; exit 7";
  for (const int k : {1, 2}) Start(k, "2", {"--grace", "1"}, {"sh", "-c", script});
  for (const int k : {1, 2}) EndsWith(k, 0);

  std::istringstream starts(Read("starts"));
  std::multiset<std::string> found;
  for (std::string line; std::getline(starts, line);) found.insert(line);
  EXPECT_THAT(found, UnorderedElementsAre("0 0", "1 0", "2 0", "3 0", "0 1", "1 1", "2 1", "3 1"));
}

// Case O06
TEST_F(Nodes, EachLineSaysWhoseItIsAndTheReportHasTheOneCauseOfMuchNoise) {
  const std::string script =
      "if [ $RANK = 2 ]; then i=0; while [ $i -lt 40 ]; do echo \"cause $i\" >&2; i=$((i+1)); done;"
      " while [ $(ls " +
      folder_ + "/done* 2>/dev/null | wc -l) -lt 3 ]; do sleep 0.02; done; exit 9; fi; " +
      "i=0; while [ $i -lt 10000 ]; do echo \"noise $i\"; i=$((i+1)); done; touch " +
      Path("done$RANK") + "; exec sleep 600";
  for (const int k : {1, 2})
    Start(k, "2", {"--grace", "1", "--max-restarts", "0"}, {"sh", "-c", script});
  for (const int k : {1, 2}) EndsWith(k, 9);

  const std::regex known(R"(\[n[12] [0-3]\] (noise|cause) \d+|outlast: .*)");
  for (const int k : {1, 2}) {
    std::istringstream lines(agents_.at(k)->seen());
    for (std::string line; std::getline(lines, line);)
      ASSERT_TRUE(std::regex_match(line, known)) << line;
  }
  EXPECT_THAT(agents_.at(1)->seen(),
              AllOf(HasSubstr("[n1 0] noise 9999\n"), HasSubstr("[n1 1] noise 9999\n")));
  EXPECT_THAT(agents_.at(2)->seen(), HasSubstr("[n2 2] cause 39\n"));
  const nlohmann::json faults = Report(1)["job_faults"], root = Report(2)["root"],
                       victims = Report(2)["victims"];
  ASSERT_EQ(faults.size(), 1u) << faults;
  EXPECT_EQ(faults[0]["rank"], 2);
  EXPECT_EQ(faults[0]["node"], "n2");
  EXPECT_EQ(root["rank"], 2);
  EXPECT_EQ(root["end"]["code"], 9);
  EXPECT_THAT(root["last_lines"].get<std::string>(), HasSubstr("cause 39"));
  for (const auto& victim : victims) EXPECT_EQ(victim["how"], "stopped by us");
}

TEST_F(Nodes, WithoutRestartsAllAgentsEndWithTheFirstFailedWorkersCode) {
  for (const int k : {1, 2}) {
    Start(k, "2", {"--grace", "1", "--max-restarts", "0"},
          {"sh", "-c", "[ $RANK = 2 ] && exit 7; exec sleep 600"});
  }
  for (const int k : {1, 2}) EndsWith(k, 7);
}

// One that never joined and ended with 0 has done its work, whatever others do later.
TEST_F(Nodes, APlainProgramThatEndedWithZeroIsNotRunAgain) {
  const std::string script = "echo $RANK >>" + Path("ran") + "; [ $RANK != 0 ] && exit 0" +
                             "; [ $TORCHELASTIC_RESTART_COUNT != 0 ] && exit 0" +
                             "; while [ $(wc -l <" + Path("ran") +
                             ") -lt 4 ]; do sleep 0.01; done; sleep 1.5; exit 3";
  for (const int k : {1, 2}) Start(k, "2", {}, {"sh", "-c", script});
  for (const int k : {1, 2}) EndsWith(k, 0);

  std::istringstream lines(Read("ran"));
  std::multiset<std::string> ran;
  for (std::string line; std::getline(lines, line);) ran.insert(line);
  EXPECT_THAT(ran, UnorderedElementsAre("0", "1", "2", "3", "0"));
}

// A rank is killed after all others, `world` in all, have ended with 0; the next generation's
// collectives need them.
class KilledLast : public Nodes {
 protected:
  std::vector<std::string> TrainerWith(int killed) const {
    std::vector<std::string> command = Trainer();
    command.push_back(std::to_string(killed));
    return command;
  }
  void KillAfterTheOthers(int killed, int world) {
    ASSERT_TRUE(AllTrain(world)) << Seen();
    const std::map<int, pid_t> pids = Pids();
    EndTraining();
    const auto have_ended = [&](const std::vector<Round>&) {
      return Dones() == world && std::all_of(pids.begin(), pids.end(), [&](const auto& rank) {
               return rank.first == killed || kill(rank.second, 0) != 0;
             });
    };
    ASSERT_TRUE(Comes(have_ended)) << Seen();
    ASSERT_EQ(kill(pids.at(killed), SIGKILL), 0);
  }
  // Bodies that came to their end so far.
  int Dones() const {
    std::istringstream lines(Read("log"));
    int count = 0;
    for (std::string line; std::getline(lines, line);) count += line.starts_with("done ") ? 1 : 0;
    return count;
  }
};

TEST_F(KilledLast, OnOneNodeTheFinishedRanksTakePartAgain) {
  std::vector<std::string> command = {
      BuildFolder() / "outlast", "run", "-n", "2", "--run-dir", Path("runs"), "--"};
  for (const std::string& word : TrainerWith(0)) command.push_back(word);
  PipedProcess job(command);
  KillAfterTheOthers(0, 2);
  EXPECT_EQ(job.Wait(Within(30)), 0) << job.seen();
  EXPECT_EQ(Dones(), 4) << Read("log");
}

// Of the first node all ranks have finished.
TEST_F(KilledLast, OnTwoNodesTheFinishedRanksTakePartAgain) {
  for (const int k : {1, 2}) Start(k, "2", {}, TrainerWith(2));
  KillAfterTheOthers(2, 4);
  for (const int k : {1, 2}) EndsWith(k, 0, 30);
  EXPECT_EQ(Dones(), 8) << Read("log");
  EXPECT_EQ(Report(1)["job_faults"].size(), 1u) << Report(1);
}

}  // namespace
}  // namespace outlast::testing
