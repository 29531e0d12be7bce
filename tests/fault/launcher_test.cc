// The tool under other launchers, and with torchrun's command lines.
#include "tests/fault/launched.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;
using testing::Launched;
using testing::ToolPath;
using ::testing::UnorderedElementsAre;

// What `outlast env --json` says in each of two processes of a launcher: "launcher rank/world".
std::vector<std::string> PlacesUnder(std::vector<std::string> launcher) {
  Launched job;
  launcher.insert(launcher.end(), {ToolPath(), "env", "--json"});
  job.StartProgram(launcher);
  EXPECT_EQ(job.Wait().code, 0) << job.Read("err");
  std::istringstream lines(job.Read("out"));
  std::vector<std::string> places;
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json json = nlohmann::json::parse(line, nullptr, false);
    if (!json.is_object()) continue;
    places.push_back(json["launcher"].get<std::string>() + " " +
                     std::to_string(json["rank"].get<int>()) + "/" +
                     std::to_string(json["world"].get<int>()));
  }
  return places;
}

std::vector<std::string> OpenMpi() {
  return {"/usr/bin/mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"};
}
std::vector<std::string> Mpich() { return {"/usr/bin/mpirun.mpich", "-n", "2"}; }

bool IsMissing(const std::vector<std::string>& launcher) {
  return access(launcher[0].c_str(), X_OK) != 0;
}

TEST(OtherLauncher, GivesEachProcessItsRankUnderOpenMpi) {
  if (IsMissing(OpenMpi())) GTEST_SKIP() << "needs Debian's openmpi-bin";
  EXPECT_THAT(PlacesUnder(OpenMpi()), UnorderedElementsAre("Open MPI 0/2", "Open MPI 1/2"));
}

TEST(OtherLauncher, GivesEachProcessItsRankUnderMpich) {
  if (IsMissing(Mpich())) GTEST_SKIP() << "needs Debian's mpich";
  EXPECT_THAT(PlacesUnder(Mpich()), UnorderedElementsAre("MPICH 0/2", "MPICH 1/2"));
}

// Two agents that know nothing of each other would train two models over one root.
TEST(OtherLauncher, NeverStartsAWorldInEachOfItsProcesses) {
  if (IsMissing(Mpich())) GTEST_SKIP() << "needs Debian's mpich";
  Launched job;
  std::vector<std::string> command = Mpich();
  command.insert(command.end(), {ToolPath(), "run", "-n", "2", "--", "touch", job.Path("ran")});
  job.StartProgram(command);
  EXPECT_NE(job.Wait().code, 0);
  EXPECT_THAT(job.Read("err"), HasSubstr("PMI_SIZE=2"));
  EXPECT_FALSE(std::filesystem::exists(job.Path("ran")));
}

TEST(TorchrunsCommandLine, RunsAScriptUnchanged) {
  Launched job;
  job.Write("train.py", "import os, sys\nprint(os.environ['RANK'], *sys.argv[1:])\n");
  ASSERT_EQ(job.Run({"--standalone", "--nnodes=1", "--nproc_per_node=2", "--max-restarts", "0",
                     "train.py", "--lr", "1"}),
            0)
      << job.Read("err");
  EXPECT_THAT(job.Read("out"), HasSubstr("0 --lr 1\n"));
  EXPECT_THAT(job.Read("out"), HasSubstr("1 --lr 1\n"));
}

TEST(TorchrunsCommandLine, RunsAModuleOrWhatIsNoPython) {
  Launched job;
  std::filesystem::create_directory(job.Path("pkg"));
  job.Write("pkg/__init__.py", "");
  job.Write("pkg/train.py", "import sys\nprint('module', *sys.argv[1:])\n");
  ASSERT_EQ(job.Run({"--nproc-per-node", "1", "-m", "pkg.train", "a"}), 0) << job.Read("err");
  EXPECT_THAT(job.Read("out"), HasSubstr("module a\n"));

  ASSERT_EQ(job.Run({"--nproc-per-node", "1", "--no-python", "echo", "plain"}), 0);
  EXPECT_THAT(job.Read("out"), HasSubstr("plain\n"));
}

}  // namespace
}  // namespace outlast
