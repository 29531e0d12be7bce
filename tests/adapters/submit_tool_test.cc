// `outlast submit` with commands of Slurm that tests wrote.
#include "adapters/submit_tool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "adapters/slurm.h"
#include "tests/support/temp_folder.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;

class SubmitTool : public ::testing::Test {
 protected:
  SubmitTool() { setenv("PATH", (folder_.path() + ":/usr/bin:/bin").c_str(), 1); }
  ~SubmitTool() override { setenv("PATH", path_.c_str(), 1); }

  // A command that does this; each call adds its arguments to the file "calls".
  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << "#!/bin/sh\necho " << name << " \"$@\" >>'" << folder_.path()
                                  << "/calls'\n"
                                  << text << "\n";
    std::filesystem::permissions(folder_ / name, std::filesystem::perms::owner_all);
  }
  std::string Calls() const {
    std::ifstream file(folder_ / "calls");
    return {std::istreambuf_iterator<char>(file), {}};
  }
  int Submit(const std::vector<std::string>& more = {}) {
    std::vector<std::string> words = {"--to", "slurm", "--job", "j",     "--nnodes",
                                      "2",    "-n",    "4",     "--key", "k"};
    words.insert(words.end(), more.begin(), more.end());
    words.insert(words.end(), {"--", "true"});
    out_.str("");
    err_.str("");
    return RunSubmitTool(words, out_, err_);
  }

  const TempFolder folder_;
  const std::string path_ = std::getenv("PATH");
  std::ostringstream out_, err_;
};

TEST_F(SubmitTool, SendsTheOptionsAsArgumentsTooForVariablesOutrankTheScript) {
  Write("squeue", "");
  Write("sbatch", "echo '4711;cluster'");
  EXPECT_EQ(Submit({"--partition", "a100"}), 0) << err_.str();
  EXPECT_EQ(out_.str(), "Slurm job 4711 submitted, key k\n");
  EXPECT_THAT(Calls(), HasSubstr("sbatch --parsable --job-name=j --nodes=2 --exclusive "
                                 "--partition=a100 --signal=B:USR1@120"));
}

TEST_F(SubmitTool, FindsAnEarlierSubmissionOfTheSameKey) {
  Write("squeue", "echo '12|RUNNING|outlast-key=kk'; echo '13|PENDING|outlast-key=k'");
  Write("sbatch", "echo 14");
  EXPECT_EQ(Submit(), 0) << err_.str();
  EXPECT_EQ(out_.str(), "Slurm job 13 is there already (PENDING), key k\n");
  EXPECT_EQ(Calls().find("sbatch"), std::string::npos);
}

TEST_F(SubmitTool, CancelsTheHigherOfTwoThatCameAtTheSameMoment) {
  Write("squeue", "[ ! -e " + (folder_ / "sent") + " ] || echo '13|PENDING|outlast-key=k'");
  Write("sbatch", "touch " + (folder_ / "sent") + "; echo 14");
  Write("scancel", "");
  EXPECT_EQ(Submit(), 0) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("Slurm job 13 is there already"));
  EXPECT_THAT(Calls(), HasSubstr("scancel 14"));
}

TEST_F(SubmitTool, PassesSlurmsRefusalOn) {
  Write("squeue", "");
  Write("sbatch", "echo 'sbatch: error: one' >&2; echo 'sbatch: error: two' >&2; exit 1");
  EXPECT_EQ(Submit(), 85);
  EXPECT_EQ(err_.str(), "outlast: submit: sbatch: sbatch: error: one; sbatch: error: two\n");
}

TEST_F(SubmitTool, AsksToSendItAgainWhereSlurmDoesNotAnswer) {
  Write("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1");
  EXPECT_EQ(Submit(), 1);
  Write("squeue", "");
  Write("sbatch", "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1");
  EXPECT_EQ(Submit(), 1);
  Write("squeue", "echo '13|COMPLETING|outlast-key=k'");
  EXPECT_EQ(Submit(), 1);
  EXPECT_THAT(err_.str(), HasSubstr("job 13 with the same key is just ending"));
}

TEST_F(SubmitTool, NamesTheCommandThatIsMissing) {
  setenv("PATH", folder_.path().c_str(), 1);
  EXPECT_EQ(Submit(), 85);
  EXPECT_EQ(err_.str(),
            "outlast: submit: squeue: not found in PATH: a machine with Slurm's commands wanted\n");
}

TEST_F(SubmitTool, ShowsTheScriptAndSendsNothing) {
  Write("squeue", "");
  Write("sbatch", "echo 1");
  EXPECT_EQ(Submit({"--dry"}), 0) << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("#SBATCH --job-name=j\n"));
  EXPECT_EQ(Calls(), "");
}

TEST_F(SubmitTool, ShowsTheScriptAsJsonToo) {
  EXPECT_EQ(Submit({"--dry", "--json"}), 0) << err_.str();
  const auto json = nlohmann::json::parse(out_.str());
  EXPECT_EQ(json["job"], "j");
  EXPECT_EQ(json["key"], "k");
  EXPECT_EQ(json["options"][0], "--job-name=j");
  EXPECT_THAT(json["script"].get<std::string>(), HasSubstr("#SBATCH --job-name=j\n"));
}

TEST_F(SubmitTool, TellsTheCoordinatorTheTermsThatTheAgentsAreGiven) {
  EXPECT_EQ(Submit({"--dry", "--run=--bind=numa", "--run=--no-retry=7,9",
                    "--run=--early-exit-grace", "--run=60"}),
            0)
      << err_.str();
  EXPECT_THAT(out_.str(), HasSubstr("\nterms=(--no-retry=7,9)\n")) << "60 is what it has anyway";
}

TEST_F(SubmitTool, RefusesBeforeAnythingWaitsInTheQueue) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"--run=--nonsense"}, "unknown flag '--nonsense'"},
      {{"--run=--fresh"}, "--run '--fresh'"},
      {{"--run=--grace=9"}, "--run '--grace=9': --notice wanted"},
      {{"--notice", "5"}, "--notice '5': a whole number from 20 to 65535 wanted"},
      {{"--port", "0"}, "--port '0'"},
      {{"--partition="}, "--partition '': a value wanted"},
      {{"--partition", ""}, "--partition '': a value wanted"},
      {{"--key", "z"}, "--key 'k', 'z': given 2 times, once wanted"},
      {{"--tool", "t", "--run=--job=x\ny"}, "--job 'j', 'x\\ny': given 2 times, once wanted"},
      {{"--nonsense"}, "--nonsense"}};
  for (const auto& [flags, why] : cases) {
    EXPECT_EQ(Submit(flags), 85);
    const std::string said = err_.str();
    EXPECT_THAT(said, HasSubstr(why));
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  }
}

TEST(EntriesWithKey, AreByNumberAndOfThatKeyAlone) {
  const auto entries = EntriesWithKey(
      "squeue: a warning\n100|PENDING|outlast-key=k\n99|RUNNING|outlast-key=k\n"
      "7_1|PENDING|outlast-key=k\n8|PENDING|outlast-key=k2\n9|PENDING|(null)\n",
      "k");
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[0].id, "99");
  EXPECT_EQ(entries[1].id, "100");
}

}  // namespace
}  // namespace outlast
