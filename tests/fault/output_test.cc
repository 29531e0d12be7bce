// Case O05, D19, D23: what workers write.
#include "tests/fault/launched.h"

namespace outlast {
namespace {

using namespace std::string_view_literals;
using ::testing::HasSubstr;
using testing::kSanitized;
using testing::Launched;
using testing::Output;
using ::testing::StartsWith;

constexpr std::string_view kOddLine = "\xff\xc3( cut \xe2\x82 nul \0 here\n"sv;

TEST(Output, BeginsWithTheRunsFolder) {
  Launched job;
  EXPECT_EQ(job.Run({"-n", "1", "--run-dir", "runs", "--job", "night", "--", "true"}), 0);
  const std::string first = job.Read("err").substr(0, job.Read("err").find('\n'));
  EXPECT_THAT(first,
              StartsWith("outlast: RUN_DIR " + std::filesystem::canonical(job.folder()).string() +
                         "/runs/night-"));
  EXPECT_TRUE(std::filesystem::exists(job.Path("runs/latest/logs/g1/rank0.out")));
}

TEST(Output, GoesToFilesAsItIsAndToTheConsoleLineByLine) {
  Launched job;
  job.Write("worker.sh",
            "printf '\\377\\303( cut \\342\\202'; printf ' nul \\000 here\\n'\n"
            "head -c 1048576 /dev/zero | tr '\\0' 'x'; echo\n"
            "printf '10%%\\r20%%\\r30%%\\r\\n'; printf '\\033[31mred\\033[0m\\n'\n"
            "i=0; while [ $i -lt 1000 ]; do echo \"line $i\"; i=$((i+1)); done\n"
            "echo to stderr >&2; printf 'no end'\n");
  ASSERT_EQ(job.Run({"-n", "2", "--", "sh", "worker.sh"}), 0);
  const std::string shown = job.Read("out");
  for (const char* rank : {"0", "1"}) {
    const std::string prefix = std::string("[") + rank + "] ";
    for (int i = 0; i < 1000; ++i) {
      ASSERT_NE(shown.find("\n" + prefix + "line " + std::to_string(i) + "\n"), std::string::npos)
          << rank << " " << i;
    }
    EXPECT_NE(shown.find(prefix + "no end\n"), std::string::npos);
    EXPECT_NE(shown.find(prefix + std::string(1 << 20, 'x') + "\n"), std::string::npos);
    EXPECT_NE(shown.find(prefix + std::string(kOddLine)), std::string::npos);
    EXPECT_NE(shown.find(prefix + "10%\r"), std::string::npos);
    EXPECT_THAT(job.Read("err"), HasSubstr(prefix + "to stderr\n"));
  }
  std::string expected(kOddLine);
  expected += std::string(1 << 20, 'x') + "\n10%\r20%\r30%\r\n\x1b[31mred\x1b[0m\n";
  for (int i = 0; i < 1000; ++i) expected += "line " + std::to_string(i) + "\n";
  expected += "no end";
  EXPECT_TRUE(job.Read("outlast-runs/latest/logs/g1/rank1.out") == expected);
}

TEST(Output, OfAFloodCostsBoundedMemoryAndNoTimeWhenNobodyReads) {
  Launched job;
  const std::string bytes = kSanitized ? "50000000" : "1000000000";
  job.Start({"-n", "1", "--", "sh", "-c", "yes a line of a flood | head -c " + bytes},
            Output::kPipeUnread);
  const testing::Ending ending = job.Wait();
  EXPECT_EQ(ending.code, 0);
  EXPECT_EQ(std::filesystem::file_size(job.Path("outlast-runs/latest/logs/g1/rank0.out")),
            std::stoull(bytes));
  if (!kSanitized) {
    EXPECT_LT(ending.max_rss_kib, 64 << 10);
  }
}

TEST(Output, ToAReaderThatLeavesHarmsNobody) {
  Launched job;
  EXPECT_EQ(job.Run({"-n", "2", "--", "sh", "-c",
                     "i=0; while [ $i -lt 5000 ]; do echo line; i=$((i+1)); done"},
                    Output::kPipeToHead),
            0);
  const std::string file = job.Read("outlast-runs/latest/logs/g1/rank0.out");
  EXPECT_EQ(std::count(file.begin(), file.end(), '\n'), 5000);
}

TEST(Output, InputReachesRankZeroWhenItIsAlone) {
  Launched job;
  job.StartProgram(
      {"/bin/sh", "-c", std::string("echo hello | ") + testing::ToolPath() + " run -n 1 -- cat"});
  EXPECT_EQ(job.Wait().code, 0);
  EXPECT_EQ(job.Read("out"), "[0] hello\n");
}

TEST(Output, OfPythonComesLineByLine) {
  if (access("/usr/bin/python3", X_OK) != 0) GTEST_SKIP() << "no python3";
  Launched job;
  job.Write(
      "program.py",
      "import os, sys\nprint('rank', os.environ['RANK'], sys.argv[1:])\nos._exit(0)\n");  // no
                                                                                          // flush
                                                                                          // at exit
  EXPECT_EQ(job.Run({"-n", "1", "program.py", "--lr", "3"}), 0);
  EXPECT_EQ(job.Read("out"), "[0] rank 0 ['--lr', '3']\n");
}

}  // namespace
}  // namespace outlast
