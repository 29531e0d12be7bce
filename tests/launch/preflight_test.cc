#include "launch/preflight.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "base/child_program.h"
#include "outlast/base/status.h"
#include "tests/support/paths.h"

namespace outlast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kLimit = absl::Seconds(10);

std::string Tool() { return testing::BuildFolder() / "outlast"; }

TEST(JudgeProbe, OnlyAClearNoExcludesANode) {
  const auto fitness = [](const ProgramEnd& end) { return JudgeProbe("p", end, kLimit).fitness; };
  EXPECT_EQ(fitness({.code = 0}), Fitness::kFit);
  EXPECT_EQ(fitness({.code = 1}), Fitness::kUnfit);
  for (const int code : {2, 3, 77, 126, 127, 255})
    EXPECT_EQ(fitness({.code = code}), Fitness::kUnknown) << code;
  EXPECT_EQ(fitness({.code = 0, .signal = SIGSEGV}), Fitness::kUnknown);
  EXPECT_EQ(fitness({.code = 1, .signal = SIGKILL, .timed_out = true}), Fitness::kUnknown);
}

TEST(JudgeProbe, SaysWhatTheProgramSaid) {
  EXPECT_EQ(JudgeProbe("p", {.code = 1, .last_line = "GPU 3: 12 ECC errors"}, kLimit).detail,
            "GPU 3: 12 ECC errors");
  EXPECT_EQ(JudgeProbe("p", {.code = 7, .last_line = "no driver"}, kLimit).detail,
            "exit code 7 (0 fit, 1 unfit): no driver");
  EXPECT_EQ(JudgeProbe("p", {.timed_out = true}, kLimit).detail, "not done within 10s: killed");
}

// 32 MiB in 10 s is 3.4 MB/s: below a floor of 10, above one of 1.
TEST(JudgeCheck, AKilledOneIsSlowerThanItsLimitAllows) {
  Check disk = *FindCheck("disk");
  disk.floor = 10;
  const ProbeFinding slow = JudgeCheck(disk, {.timed_out = true}, kLimit);
  EXPECT_EQ(slow.fitness, Fitness::kUnfit);
  EXPECT_THAT(slow.detail, AllOf(HasSubstr("below 3.36 MB/s"), HasSubstr("at least 10 wanted")));

  disk.floor = 1;
  EXPECT_EQ(JudgeCheck(disk, {.timed_out = true}, kLimit).fitness, Fitness::kUnknown);
  EXPECT_EQ(JudgeCheck(*FindCheck("clock"), {.timed_out = true}, kLimit).fitness,
            Fitness::kUnknown);
}

TEST(JudgeNode, OnlyAClearNoKeepsANodeFromJoining) {
  const std::string json =
      R"([{"probe":"disk","fitness":"unfit","detail":"3 MB/s, at least 10 wanted"},)"
      R"({"probe":"memory","fitness":"fit","detail":"fast"},)"
      R"({"probe":"./health","fitness":"unknown","detail":"exit code 7"}])";
  const NodeLook look = JudgeNode(json, {.code = 87});
  EXPECT_EQ(look.unfit, "disk: 3 MB/s, at least 10 wanted");
  EXPECT_THAT(look.warnings, ElementsAre("./health: exit code 7"));

  for (const char* odd : {"", "{}", "[1, null]", "[{\"probe\": 3}]", "[{"})
    EXPECT_EQ(JudgeNode(odd, {.code = 87}).unfit, "") << odd;
  EXPECT_THAT(JudgeNode("", {.code = 85, .last_line = "no folder"}).warnings,
              ElementsAre("it ended with exit code 85, so nobody knows whether this node is fit: "
                          "no folder"));
  EXPECT_THAT(JudgeNode(json, {.timed_out = true}).warnings,
              ElementsAre(HasSubstr("was not done in time")));
}

TEST(Preflight, ChecksThatWouldBeginTooLateAreLeftOutAndPass) {
  const auto findings = RunPreflight(
      {.tool = "/no/such", .folder = ".", .limit = kLimit, .begin_within = absl::ZeroDuration()});
  ASSERT_EQ(findings.size(), Checks().size());
  for (const ProbeFinding& finding : findings) {
    EXPECT_EQ(finding.fitness, Fitness::kUnknown);
    EXPECT_EQ(finding.detail, "not begun: 0 were over");
  }
}

TEST(FindCheck, NamesThoseThatAre) {
  EXPECT_THAT(std::string(MessageOf(FindCheck("gpu").status())),
              AllOf(HasSubstr("'gpu'"), HasSubstr("memory, loopback, disk, shm, clock")));
}

TEST(Preflight, FindsThisMachineFit) {
  const auto findings =
      RunPreflight({.tool = Tool(), .folder = ::testing::TempDir(), .limit = absl::Seconds(60)});
  ASSERT_EQ(findings.size(), Checks().size());
  for (const ProbeFinding& finding : findings) {
    EXPECT_NE(finding.fitness, Fitness::kUnfit) << finding.probe << ": " << finding.detail;
    EXPECT_THAT(finding.detail, HasSubstr("wanted"));
  }
  EXPECT_THAT(WhyUnfit(findings), IsEmpty());
}

TEST(Preflight, AFloorThatIsNotReachedExcludes) {
  Check memory = *FindCheck("memory");
  memory.floor = 1e9;
  const auto findings =
      RunPreflight({.tool = Tool(), .folder = ".", .checks = {memory}, .limit = kLimit});
  EXPECT_EQ(findings[0].fitness, Fitness::kUnfit);
  EXPECT_THAT(WhyUnfit(findings),
              AllOf(HasSubstr("memory: copy 64 MiB"), HasSubstr("at least 1e+09 wanted")));
}

TEST(Preflight, AHangingProgramIsKilledAndPasses) {
  const auto findings = RunPreflight({.checks = {},
                                      .programs = {"sleep 600", "echo bad card; exit 1", "exit 0"},
                                      .limit = absl::Milliseconds(300)});
  ASSERT_EQ(findings.size(), 3u);
  EXPECT_EQ(findings[0].fitness, Fitness::kUnknown);
  EXPECT_LT(findings[0].took, absl::Seconds(20));
  EXPECT_EQ(findings[1].fitness, Fitness::kUnfit);
  EXPECT_EQ(findings[2].fitness, Fitness::kFit);
  EXPECT_EQ(WhyUnfit(findings), "echo bad card; exit 1: bad card");
}

TEST(RunCheck, AWrongFolderSaysNothingOfTheNode) {
  const Check disk = *FindCheck("disk");
  const CheckEnd wrong = RunCheck(disk, "/nowhere/at/all");
  EXPECT_EQ(wrong.code, kProbeUnknown);
  EXPECT_THAT(wrong.line, HasSubstr("'/nowhere/at/all'"));

  const CheckEnd here = RunCheck(disk, ::testing::TempDir());
  EXPECT_EQ(here.code, kProbeFit) << here.line;
}

TEST(RunCheck, AWriteThatFailsIsUnfit) {
  ProgramCall call;
  call.command = {"/bin/sh", "-c",
                  "trap '' XFSZ; ulimit -f 2048; exec " + Tool() +
                      " preflight --here --only disk --folder " + ::testing::TempDir()};
  call.deadline = absl::Seconds(60);
  const auto end = RunProgram(call);
  ASSERT_TRUE(end.ok());
  EXPECT_EQ(end->code, kProbeUnfit) << end->last_line;
  EXPECT_THAT(end->last_line, HasSubstr("File too large"));
}

TEST(RunCheck, LeavesNoFileBehind) {
  const auto folder =
      std::filesystem::path(::testing::TempDir()) / ("preflight-" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  RunCheck(*FindCheck("disk"), folder);
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace outlast
