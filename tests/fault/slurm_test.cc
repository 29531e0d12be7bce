// Jobs that `outlast submit` sends to a real Slurm of three nodes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "base/child_program.h"
#include "outlast/base/clock.h"
#include "outlast/testing/time_factor.h"
#include "tests/support/node_log.h"
#include "tests/support/paths.h"
#include "tests/support/slurm_cluster.h"
#include "tests/support/temp_folder.h"

namespace outlast::testing {
namespace {

using ::testing::HasSubstr;

class Slurm : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) const { return folder_ / name; }
  std::string Read(const std::string& name) const {
    std::ifstream file(Path(name));
    return {std::istreambuf_iterator<char>(file), {}};
  }

  // `outlast submit --to slurm --json FLAGS -- COMMAND`, in the folder.
  ProgramEnd Submit(const std::vector<std::string>& flags,
                    const std::vector<std::string>& command) const {
    std::vector<std::string> words = {BuildFolder() / "outlast",
                                      "submit",
                                      "--to",
                                      "slurm",
                                      "--json",
                                      "-n",
                                      "2",
                                      "--notice",
                                      "20",
                                      "--time",
                                      "10:00"};
    words.insert(words.end(), flags.begin(), flags.end());
    words.emplace_back("--");
    words.insert(words.end(), command.begin(), command.end());
    words.insert(words.begin(), before_.begin(), before_.end());
    return RunProgram({.command = words, .folder = folder_.path()}).value();
  }
  nlohmann::json Answer(const ProgramEnd& end) const {
    return nlohmann::json::parse(end.output, nullptr, false);
  }
  std::string SubmitOne(const std::vector<std::string>& flags,
                        const std::vector<std::string>& command) {
    const ProgramEnd end = Submit(flags, command);
    EXPECT_EQ(end.code, 0) << end.output;
    id_ = end.code == 0 ? Answer(end).value("slurm_job", "") : "";
    return id_;
  }
  // On two nodes; it saves nothing before its end, unless it is stopped.
  std::string SubmitToy() {
    return SubmitOne(
        {"--job", "toy", "--nnodes", "2"},
        {BuildFolder() / "outlast_toy_trainer", "--steps", "150", "--step-ms", "20", "--ckpt-dir",
         Path("ckpt"), "--ckpt-every", "1000", "--state-mb", "1", "--log", "log"});
  }
  // Until the file "until" is there.
  std::vector<std::string> Trainer() const {
    return {BuildFolder() / "outlast_node_trainer", Path("log"), Path("until")};
  }
  void EndTraining() const { std::ofstream(Path("until")) << "now\n"; }
  // What the batch script and its step said.
  std::string Said() const { return Read("slurm-" + id_ + ".out"); }

  bool Comes(const std::function<bool()>& what) const {
    const absl::Duration deadline = Clock::Real().Uptime() + absl::Seconds(60) * TimeFactor();
    while (!what()) {
      if (Clock::Real().Uptime() > deadline) return false;
      Clock::Real().SleepFor(absl::Milliseconds(20));
    }
    return true;
  }
  bool EndsAs(const std::string& state) const {
    return Comes([&] { return SlurmCluster::JobField(id_, "JobState") == state; });
  }
  // Of the ranks that the trainer has logged in `generation` or later: the newest process of each.
  std::map<int, pid_t> Ranks(uint64_t generation) const {
    std::map<int, pid_t> ranks;
    for (const Round& one : ReadRounds(Path("log"))) {
      if (one.generation >= generation && one.round > 0) ranks[one.rank] = one.pid;
    }
    return ranks;
  }

  int64_t Lines(const std::string& name) const {
    const std::string text = Read(name);
    return std::count(text.begin(), text.end(), '\n');
  }
  // Ranks that went on from beyond `step` of a former attempt: "generation step rank source".
  int Restored(int64_t least) const {
    std::istringstream restores(Read("log.restores"));
    int restored = 0;
    for (std::string line; std::getline(restores, line);) {
      std::istringstream words(line);
      int64_t generation = 0, step = 0;
      if ((words >> generation >> step) && step > least) ++restored;
    }
    return restored;
  }

  const TempFolder folder_;
  std::vector<std::string> before_;  // what submits, such as "setpriv --reuid nobody"
  std::string id_;
};

TEST_F(Slurm, AJobOfTwoNodesIsSubmittedOnceAndRestartsAKilledWorkerInside) {
  OUTLAST_SLURM_OR_SKIP(cluster);
  const ProgramEnd refused =
      Submit({"--job", "toy", "--nnodes", "2", "--partition", "nowhere"}, Trainer());
  EXPECT_EQ(refused.code, 85);
  EXPECT_THAT(refused.output, HasSubstr("Invalid partition name specified"));

  const std::vector<std::string> flags = {"--job", "toy", "--nnodes", "2", "--run=--no-retry=7"};
  ASSERT_NE(SubmitOne(flags, Trainer()), "");
  const ProgramEnd again = Submit(flags, Trainer());
  EXPECT_EQ(Answer(again).value("slurm_job", ""), id_) << again.output;
  EXPECT_TRUE(Answer(again).value("was_there", false));

  ASSERT_TRUE(Comes([&] { return Ranks(1).size() == 4; })) << Said();
  ASSERT_EQ(kill(Ranks(1)[3], SIGKILL), 0);
  ASSERT_TRUE(Comes([&] { return Ranks(2).size() == 4; })) << Said();
  EndTraining();

  EXPECT_TRUE(EndsAs("COMPLETED")) << Said();
  EXPECT_THAT(Said(), HasSubstr("ends with 0"));
  EXPECT_EQ(cluster->JobField(id_, "Restarts"), "0");
}

TEST_F(Slurm, AJobOfOneNodeEndsWithItsOwnCodeAndIsNotRequeued) {
  OUTLAST_SLURM_OR_SKIP(cluster);
  ASSERT_NE(SubmitOne({"--job", "one", "--max-restarts", "0"}, {"sh", "-c", "exit 3"}), "");
  EXPECT_TRUE(EndsAs("FAILED")) << Said();
  EXPECT_EQ(cluster->JobField(id_, "ExitCode"), "3:0");
  EXPECT_EQ(cluster->JobField(id_, "Restarts"), "0");
}

TEST_F(Slurm, AWarnedJobSavesIsRequeuedAndGoesOnWhereItWas) {
  OUTLAST_SLURM_OR_SKIP(cluster);
  ASSERT_NE(SubmitToy(), "");
  ASSERT_TRUE(Comes([&] { return Lines("log") > 100; })) << Said();

  cluster->Command({"scancel", "--batch", "--signal=USR1", id_});  // as before the time limit

  ASSERT_TRUE(Comes([&] { return cluster->JobField(id_, "Restarts") == "1"; })) << Said();
  EXPECT_THAT(Said(), HasSubstr("attempt 0: 80: requeued"));
  EXPECT_TRUE(EndsAs("COMPLETED")) << Said();
  EXPECT_THAT(Said(), HasSubstr("attempt 1: ends with 0"));
  EXPECT_EQ(Restored(20), 4) << Read("log.restores");
}

TEST_F(Slurm, AJobThatIsPushedOutSavesIsRequeuedAndGoesOnWhereItWas) {
  OUTLAST_SLURM_OR_SKIP(cluster);
  ASSERT_NE(SubmitToy(), "");
  ASSERT_TRUE(Comes([&] { return Lines("log") > 100; })) << Said();

  const std::string urgent =
      cluster->Command({"sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive",
                        "--output=/dev/null", "--wrap=sleep 1"});
  ASSERT_NE(urgent, "");

  ASSERT_TRUE(Comes([&] { return cluster->JobField(id_, "Restarts") == "1"; })) << Said();
  EXPECT_THAT(Said(), HasSubstr("attempt 0: 80: "));
  const std::string number = urgent.substr(0, urgent.find('\n'));
  EXPECT_TRUE(Comes([&] { return cluster->JobField(number, "JobState") == "COMPLETED"; }));
  EXPECT_TRUE(EndsAs("COMPLETED")) << Said();
  EXPECT_THAT(Said(), HasSubstr("attempt 1: ends with 0"));
  EXPECT_EQ(Restored(20), 4) << Read("log.restores");
}

TEST_F(Slurm, ADeadNodeCostsItsRanksAndACoordinatorThatIsKilledNobody) {
  OUTLAST_SLURM_OR_SKIP(cluster);
  ASSERT_NE(SubmitOne({"--job", "toy", "--nnodes", "2:3"}, Trainer()), "");
  ASSERT_TRUE(Comes([&] { return Ranks(1).size() == 6; })) << Said();
  const std::map<int, pid_t> before = Ranks(1);

  pid_t coordinator = 0;
  for (const pid_t pid : cluster->Find({"SLURM_JOB_ID=" + id_})) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/cmdline");
    const std::string words(std::istreambuf_iterator<char>(file), {});
    if (words.find(std::string("outlast\0coordinator", 19)) != std::string::npos) coordinator = pid;
  }
  ASSERT_GT(coordinator, 0);
  ASSERT_EQ(kill(coordinator, SIGKILL), 0);
  ASSERT_TRUE(Comes([&] {
    return Said().find("the coordinator was killed (137) and starts again") != std::string::npos;
  })) << Said();
  cluster->KillNode(3);

  ASSERT_TRUE(Comes([&] { return Ranks(2).size() == 4; })) << Said();
  for (const auto& [rank, pid] : Ranks(2)) EXPECT_EQ(pid, before.at(rank)) << rank << Said();
  EndTraining();
  EXPECT_TRUE(EndsAs("COMPLETED")) << Said();
  EXPECT_EQ(cluster->JobField(id_, "Restarts"), "0");
}

TEST_F(Slurm, AnyUserMaySubmit) {
  if (getuid() != 0) GTEST_SKIP() << "one who may become another user is wanted";
  OUTLAST_SLURM_OR_SKIP(cluster);
  before_ = {"/usr/bin/setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"};
  std::filesystem::permissions(folder_.path(), std::filesystem::perms::all);

  ASSERT_NE(SubmitOne({"--job", "toy", "--nnodes", "2"}, Trainer()), "");
  ASSERT_TRUE(Comes([&] { return Ranks(1).size() == 4; })) << Said();
  EndTraining();

  EXPECT_TRUE(EndsAs("COMPLETED")) << Said();
  EXPECT_THAT(cluster->JobField(id_, "UserId"), HasSubstr("nobody"));
}

TEST_F(Slurm, AnUnfitNodeIsDrainedAndGivenBackAndACancelledJobIsNotRequeued) {
  OUTLAST_SLURM_OR_SKIP(cluster);
  // On the last node the tool says that the node is unfit.
  std::ofstream(Path("tool")) << "#!/bin/sh\n[ \"$1 $SLURM_NODEID\" != 'run 2' ] || exit 87\nexec '"
                              << (BuildFolder() / "outlast").string() << "' \"$@\"\n";
  std::filesystem::permissions(Path("tool"), std::filesystem::perms::owner_all);
  ASSERT_NE(SubmitOne({"--job", "toy", "--nnodes", "2:3", "--drain-excluded", "--tool",
                       Path("tool"), "--last-call", "0.5"},
                      Trainer()),
            "");

  ASSERT_TRUE(Comes([&] { return cluster->JobField(id_, "NumNodes") == "2"; })) << Said();
  EXPECT_TRUE(Comes([&] { return cluster->NodeField("n3", "State") == "IDLE+DRAIN"; }));
  EXPECT_EQ(cluster->JobField(id_, "NodeList"), "n[1-2]");
  ASSERT_TRUE(Comes([&] { return Ranks(1).size() == 4; })) << Said();

  cluster->Command({"scancel", id_});
  EXPECT_TRUE(EndsAs("CANCELLED")) << Said();
  ASSERT_TRUE(Comes([&] { return Said().find(": ends with ") != std::string::npos; })) << Said();
  EXPECT_THAT(Said(), HasSubstr("not requeued, Slurm ends it"));
  EXPECT_EQ(cluster->JobField(id_, "Restarts"), "0");
}

}  // namespace
}  // namespace outlast::testing
