#include "adapters/slurm_script.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "base/child_program.h"
#include "outlast/base/status.h"
#include "tests/support/temp_folder.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

SlurmJob TwoToThree() {
  SlurmJob job;
  job.job = "gpt";
  job.nodes = {2, 3};
  job.ranks_per_node = 8;
  job.command = {"./train", "--name", "a b"};
  job.tool = "/opt/outlast/bin/outlast";
  job.folder = "/home/ada/gpt runs";
  return job;
}

// What bash makes of it.
std::string BashReads(const std::string& word) {
  return RunProgram({.command = {"bash", "-c", "printf '%s.' " + word}})->output;
}

std::string WhyNot(const SlurmJob& job) {
  const auto request = RenderSlurm(job);
  EXPECT_EQ(request.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(MessageOf(request.status()));
}

TEST(ShellWord, IsReadBackByBashAsItWas) {
  for (const std::string word :
       {"plain", "", "a b", "it's", "$HOME `id` $(id)", "\\", "a\\nb", "\"x\"", "*?[a]", "#", "~",
        "!!", "-n", "tab\tnewline\nbell\a", "'\n\\'", "\xc3\xa4", "a\n0"}) {
    EXPECT_EQ(BashReads(ShellWord(word)), word + ".") << ShellWord(word);
    EXPECT_EQ(ShellWord(word).find('\n'), std::string::npos);
  }
}

TEST(RenderSlurm, StatesTheWholeRequest) {
  SlurmJob job = TwoToThree();
  job.partition = "a100";
  job.account = "lab";
  job.time = "2-12:00:00";
  job.sbatch_options = {"--gres=gpu:8"};
  job.run_flags = {"--bind=numa", "--no-retry=7"};
  job.terms = {"--no-retry=7"};
  const auto request = RenderSlurm(job);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_THAT(request->script, StartsWith("#!/bin/bash\n"
                                          "#SBATCH --job-name=gpt\n"
                                          "#SBATCH --nodes=2-3\n"
                                          "#SBATCH --exclusive\n"
                                          "#SBATCH --partition=a100\n"
                                          "#SBATCH --account=lab\n"
                                          "#SBATCH --time=2-12:00:00\n"
                                          "#SBATCH --signal=B:USR1@120\n"
                                          "#SBATCH --no-kill\n"
                                          "#SBATCH --requeue\n"
                                          "#SBATCH --open-mode=append\n"
                                          "#SBATCH --gres=gpu:8\n"
                                          "#SBATCH --comment=outlast-key=" +
                                          request->key +
                                          "\n"
                                          "# Rendered by outlast submit --to slurm.\n"
                                          "tool=/opt/outlast/bin/outlast\n"
                                          "folder='/home/ada/gpt runs'\n"
                                          "job=gpt\n"
                                          "nodes=2:3\n"
                                          "ranks=8\n"
                                          "max_restarts=3\n"
                                          "max_requeues=200\n"
                                          "grace=72\n"
                                          "stop_within=108\n"
                                          "last_call=5\n"
                                          "port=0\n"
                                          "terms=(--no-retry=7)\n"
                                          "drain=no\n"
                                          "flags=(--bind=numa --no-retry=7)\n"
                                          "command=(./train --name 'a b')\n"));
}

TEST(RenderSlurm, OfOneNodeHasNoCoordinatorAndNoStep) {
  SlurmJob job = TwoToThree();
  job.nodes = {1, 1};
  job.cpus_per_node = 16;
  const SlurmRequest request = RenderSlurm(job).value();
  EXPECT_THAT(request.script, HasSubstr("#SBATCH --nodes=1\n#SBATCH --cpus-per-task=16\n"));
  EXPECT_THAT(request.script, Not(HasSubstr("srun")));
  EXPECT_THAT(request.script, Not(HasSubstr("coordinator")));
}

TEST(RenderSlurm, OfAnyNodesIsAScriptThatBashCanRead) {
  for (const NodeCount nodes : {NodeCount{1, 1}, NodeCount{4, 4}}) {
    SlurmJob job = TwoToThree();
    job.nodes = nodes;
    job.command = {"./it's", "a\nb", "$(exit 9)", "#SBATCH --x"};
    const TempFolder folder;
    std::ofstream(folder / "script") << RenderSlurm(job)->script;
    const auto end = RunProgram({.command = {"bash", "-n", folder / "script"}});
    EXPECT_EQ(end->code, 0) << end->output;
  }
}

TEST(RenderSlurm, HasAKeyThatIsTheSameForTheSameRequestAlone) {
  const std::string key = RenderSlurm(TwoToThree())->key;
  EXPECT_EQ(RenderSlurm(TwoToThree())->key, key);
  SlurmJob other = TwoToThree();
  other.folder = "/home/ada/other";
  EXPECT_NE(RenderSlurm(other)->key, key);
  other = TwoToThree();
  other.partition = "a100";
  EXPECT_NE(RenderSlurm(other)->key, key);
  other.key = "mine-1";
  EXPECT_THAT(RenderSlurm(other)->script, HasSubstr("#SBATCH --comment=outlast-key=mine-1\n"));
}

TEST(RenderSlurm, RefusesWhatAnOptionLineCannotCarry) {
  for (const std::string value : {"a b", "a\nb", "a\"b", "a'b", "a#b", "$(id)", "a\\b"}) {
    SlurmJob job = TwoToThree();
    job.partition = value;
    EXPECT_THAT(WhyNot(job), HasSubstr("--partition"));
    EXPECT_EQ(WhyNot(job).find('\n'), std::string::npos);
  }
  SlurmJob job = TwoToThree();
  job.job = "a b";
  EXPECT_THAT(WhyNot(job), StartsWith("--job 'a b'"));
}

TEST(RenderSlurm, RefusesOptionsThatItSetsItself) {
  for (const std::string option :
       {"--nodes=4", "--comment=x", "--no-requeue", "--signal=TERM", "-p x", "x", "--"}) {
    SlurmJob job = TwoToThree();
    job.sbatch_options = {option};
    EXPECT_THAT(WhyNot(job), StartsWith("--sbatch '" + option + "'"));
  }
}

}  // namespace
}  // namespace outlast
