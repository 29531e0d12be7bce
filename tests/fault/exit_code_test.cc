// Case O02, O12, D15, D17, D21 and "what bad input gets": the exit code says what happened, and a
// failed job never says 0.
#include "tests/fault/launched.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;
using testing::kSanitized;
using testing::Launched;
using ::testing::Not;
using testing::Output;

struct Failure {
  const char* script;
  int code;    // what the worker ends with, as 128 + signal
  int signal;  // or 0
};

constexpr Failure kFailures[] = {
    {"exit 1", 1, 0},
    {"exit 2", 2, 0},
    {"exit 7", 7, 0},
    {"exit 126", 126, 0},
    {"exit 127", 127, 0},
    {"exit 128", 128, 0},
    {"exit 255", 255, 0},
    {"ulimit -c 0; kill -SEGV $$", 139, SIGSEGV},
    {"kill -KILL $$", 137, SIGKILL},
    {"kill -TERM $$", 143, SIGTERM},
};

void CheckFailure(const Failure& failure, int rank, int restarts, Output output) {
  SCOPED_TRACE(::testing::Message() << failure.script << " of rank " << rank << ", restarts "
                                    << restarts << ", output " << static_cast<int>(output));
  Launched job;
  const int code = job.Run({"-n", "2", "--max-restarts", std::to_string(restarts), "--", "sh", "-c",
                            "echo a line; [ $RANK = " + std::to_string(rank) + " ] && { " +
                                failure.script + "; }; sleep 30"},
                           output);
  EXPECT_EQ(code, restarts == 0 ? failure.code : 83);
  const nlohmann::json report = job.Report();
  ASSERT_TRUE(report.is_object());
  EXPECT_EQ(report["exit_code"], code);
  EXPECT_EQ(report["root"]["rank"], rank);
  if (failure.signal != 0) {
    EXPECT_EQ(report["root"]["end"]["signal"], failure.signal);
  } else {
    EXPECT_EQ(report["root"]["end"]["code"], failure.code);
  }
  EXPECT_EQ(report["budget"], std::to_string(restarts) + " of " + std::to_string(restarts));
  EXPECT_EQ(report["faults"].size(), static_cast<size_t>(restarts + 1));
}

// Restarts 0: the worker's own code, or 128 + signal. Restarts 1: 83.
TEST(ExitCode, IsThatOfTheFirstFailedWorkerOrSaysThatRestartsAreUsedUp) {
  int row = 0;
  for (const Failure& failure : kFailures) {
    for (const int rank : {0, 1}) {
      for (const int restarts : {0, 1}) {
        for (const Output output : {Output::kTerminal, Output::kFile, Output::kPipeToHead}) {
          if (kSanitized && row++ % 20 != 0) continue;
          CheckFailure(failure, rank, restarts, output);
        }
      }
    }
  }
}

TEST(ExitCode, NeverTakesAWorkersCodeForOurs) {
  Launched job;
  EXPECT_EQ(job.Run({"-n", "1", "--max-restarts", "0", "--", "sh", "-c", "exit 80"}), 1);
  EXPECT_EQ(job.Report()["root"]["end"]["code"], 80);
}

TEST(ExitCode, IsZeroWhenAllFinish) {
  Launched job;
  EXPECT_EQ(job.Run({"-n", "3", "--", "sh", "-c", "exit 0"}), 0);
  EXPECT_TRUE(job.Report()["root"].is_null());
}

// Case O12: retryable codes and the limit.
TEST(ExitCode, CountsRetryableCodesAgainstTheLimit) {
  Launched job;
  EXPECT_EQ(job.Run({"-n", "1", "--retry", "128-255", "--max-restarts", "2", "--", "sh", "-c",
                     "echo x >>attempts; exit 137"}),
            83);
  EXPECT_EQ(job.Read("attempts"), "x\nx\nx\n");
  EXPECT_EQ(job.Report()["budget"], "2 of 2");
}

TEST(ExitCode, DoesNotRetryOtherCodes) {
  Launched job;
  EXPECT_EQ(job.Run({"-n", "1", "--retry", "128-255", "--max-restarts", "2", "--", "sh", "-c",
                     "echo x >>attempts; exit 1"}),
            1);
  EXPECT_EQ(job.Read("attempts"), "x\n");
  EXPECT_THAT(job.Report()["reason"], HasSubstr("not to be tried again"));
}

TEST(ExitCode, IsZeroWhenARetrySucceeds) {
  Launched job;
  EXPECT_EQ(job.Run({"-n", "1", "--retry", "128-255", "--max-restarts", "2", "--", "sh", "-c",
                     "[ $TORCHELASTIC_RESTART_COUNT -lt 2 ] && exit 137; exit 0"}),
            0);
  EXPECT_EQ(job.Report()["faults"].size(), 2u);
}

TEST(ExitCode, NeverBlamesAPeerThatWeStopped) {
  Launched job;
  EXPECT_EQ(job.Run({"-n", "2", "--max-restarts", "0", "--", "sh", "-c",
                     "[ $RANK = 0 ] && exit 5; sleep 30"}),
            5);
  const nlohmann::json report = job.Report();
  EXPECT_EQ(report["root"]["rank"], 0);
  ASSERT_EQ(report["victims"].size(), 1u);
  EXPECT_EQ(report["victims"][0]["rank"], 1);
  EXPECT_EQ(report["victims"][0]["how"], "stopped by us");
}

// Case D15: a worker's own "do not restart".
TEST(ExitCode, ObeysAWorkerThatWantsNoRestart) {
  Launched job;
  EXPECT_EQ(job.Run({"-n", "1", "--", "sh", "-c", "echo x >>attempts; exit 93"}), 93);
  EXPECT_EQ(job.Read("attempts"), "x\n");
}

// Case D17: several at once, rank 0 among them.
TEST(ExitCode, IsTheFirstOnesWhenSeveralAreKilled) {
  Launched job;
  EXPECT_EQ(job.Run({"-n", "3", "--max-restarts", "0", "--", "sh", "-c",
                     "[ $RANK != 2 ] && kill -KILL $$; sleep 30"}),
            137);
}

TEST(ExitCode, ComesWithTheLastLinesOfTheOneThatFailed) {
  Launched job;
  EXPECT_EQ(job.Run({"-n", "1", "--max-restarts", "0", "--", "sh", "-c",
                     "printf 'why: \\377\\n' >&2; exit 4"}),
            4);
  EXPECT_THAT(job.Report()["root"]["last_lines"], HasSubstr("why: "));
}

// A control group with 512 MiB for one test: much for the tool, also one with sanitizers, and
// little for the worker, so that the kernel takes the worker. Empty where none may be made.
class SmallGroup {
 public:
  SmallGroup() {
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; path_.empty() && std::getline(groups, line);) {
      const size_t at = line.find(":memory:");
      if (at != std::string::npos)
        Make("/sys/fs/cgroup/memory" + line.substr(at + 8), "memory.limit_in_bytes");
      if (line.starts_with("0::")) Make("/sys/fs/cgroup" + line.substr(3), "memory.max");
    }
  }
  ~SmallGroup() {
    if (!path_.empty()) rmdir(path_.c_str());
  }
  const std::string& path() const { return path_; }

 private:
  void Make(const std::string& parent, const std::string& limit) {
    const std::string path = parent + "/outlast-test-" + std::to_string(getpid());
    if (mkdir(path.c_str(), 0755) != 0) return;
    std::ofstream(path + "/memory.swap.max") << 0;
    std::ofstream file(path + "/" + limit);
    if (file << (512 << 20) && file.flush()) {
      path_ = path;
    } else {
      rmdir(path.c_str());
    }
  }
  std::string path_;
};

// Killed by the kernel for want of memory: not a crash among others.
TEST(ExitCode, OfAWorkerThatMemoryIsTooSmallForAsksForAHumanAfterOneMoreTry) {
  const SmallGroup group;
  if (group.path().empty()) GTEST_SKIP() << "no control group may be made here";
  if (access("/usr/bin/python3", X_OK) != 0) GTEST_SKIP() << "no python3";
  Launched job;
  job.Write("eat.py", "block = b'x' * (1 << 30)\n");
  job.StartProgram({"/bin/sh", "-c",
                    "echo $$ >" + group.path() + "/cgroup.procs && exec " + testing::ToolPath() +
                        " run -n 1 -- sh -c 'echo x >>attempts; exec python3 eat.py'"});
  EXPECT_EQ(job.Wait().code, 82) << job.Read("err");
  EXPECT_EQ(job.Read("attempts"), "x\nx\n");
  const nlohmann::json report = job.Report();
  ASSERT_EQ(report["faults"].size(), 2u) << report;
  for (const auto& fault : report["faults"]) EXPECT_EQ(fault["class"], "resource");
  EXPECT_THAT(report["reason"], HasSubstr("rank 0: killed by signal 9, out of memory"));
}

// --- Bad input ---

void ExpectRefused(std::vector<std::string> arguments, const std::string& line) {
  SCOPED_TRACE(::testing::PrintToString(arguments));
  Launched job;
  EXPECT_EQ(job.Run(std::move(arguments)), 85);
  const std::string errors = job.Read("err");
  EXPECT_THAT(errors, HasSubstr(line));
  EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), 1) << errors;
  EXPECT_EQ(job.Read("out"), "");
}

TEST(BadInput, IsRefusedInOneLineBeforeAWorkerRan) {
  ExpectRefused({"-n", "2", "--", "no-such-command"},
                "command 'no-such-command': not found in PATH");
  ExpectRefused({"-n", "2", "--", "./missing"}, "command './missing': no such file");
  ExpectRefused({"-n", "2", "--", "/etc/passwd"}, "the file is not executable");
  ExpectRefused({"-n", "2", "--", "/etc"}, "not a file");
  ExpectRefused({"-n", "2", "--", "missing.py"}, "command 'missing.py'");
  ExpectRefused({"-n", "0", "--", "true"}, "-n '0'");
  ExpectRefused({"-n", "-1", "--", "true"}, "-n '-1'");
  ExpectRefused({"-n", "1.5", "--", "true"}, "-n '1.5'");
  ExpectRefused({"-n", "99999999999999999999", "--", "true"}, "a whole number from 1 to");
  ExpectRefused({"--", "true"}, "-n is missing");
  ExpectRefused({"-n", "2"}, "no command");
  ExpectRefused({"-n", "2", "--frobnicate", "--", "true"}, "unknown flag '--frobnicate'");
  ExpectRefused({"-n", "2", "--max-restarts", "-1", "--", "true"}, "--max-restarts '-1'");
  ExpectRefused({"-n", "2", "--grace", "soon", "--", "true"},
                "--grace 'soon': seconds, 0 or more wanted");
  ExpectRefused({"-n", "2", "--preempt-exit", "256", "--", "true"}, "--preempt-exit '256'");
  ExpectRefused({"-n", "2", "--run-dir", "/proc/nowhere", "--", "true"},
                "--run-dir '/proc/nowhere'");
}

TEST(BadInput, OfTheEnvironmentIsNamedToo) {
  Launched job;
  job.StartProgram(
      {"/usr/bin/env", "WORLD_SIZE=8", testing::ToolPath(), "run", "-n", "2", "--", "true"});
  EXPECT_EQ(job.Wait().code, 85);
  EXPECT_THAT(job.Read("err"), HasSubstr("WORLD_SIZE=8"));
}

TEST(BadInput, AWorkingDirectoryThatIsGone) {
  Launched job;
  job.StartProgram({"/bin/sh", "-c",
                    std::string("mkdir gone; cd gone; rmdir ../gone; exec ") + testing::ToolPath() +
                        " run -n 1 -- true"});
  EXPECT_EQ(job.Wait().code, 85);
  EXPECT_THAT(job.Read("err"), HasSubstr("the working directory was removed"));
}

TEST(BadInput, AProgramThatTheKernelCannotRun) {
  Launched job;
  job.Write("garbage",
            "\x7f"
            "ELF but not really");
  ASSERT_EQ(chmod(job.Path("garbage").c_str(), 0755), 0);
  EXPECT_EQ(job.Run({"-n", "2", "--", "./garbage"}), 85);
  EXPECT_THAT(job.Read("err"), HasSubstr("run the command: Exec format error"));
}

TEST(BadInput, AScriptWhoseInterpreterIsMissingIsNotCalledMissingItself) {
  Launched job;
  job.Write("script", "#!/no/such/shell\n");
  ASSERT_EQ(chmod(job.Path("script").c_str(), 0755), 0);
  EXPECT_EQ(job.Run({"-n", "1", "--", "./script"}), 85);
  EXPECT_THAT(job.Read("err"), HasSubstr("the interpreter that it names is missing"));
}

TEST(BadInput, AFullDiskEndsTheRunWithALine) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root for a small tmpfs";
  Launched job;
  std::filesystem::create_directory(job.Path("small"));
  job.StartProgram({"/usr/bin/unshare", "-m", "sh", "-c",
                    std::string("mount -t tmpfs -o nr_inodes=6 tmpfs small || exit 99; exec ") +
                        testing::ToolPath() + " run -n 2 --run-dir small -- true"});
  const int code = job.Wait().code;
  if (code == 99) GTEST_SKIP() << "may not mount";
  EXPECT_EQ(code, 85);
  EXPECT_THAT(job.Read("err"), HasSubstr("No space left on device"));
}

TEST(Version, IsTheProjectsAndTellsTheBuild) {
  std::ifstream project(testing::SourceFolder() / "CMakeLists.txt");
  std::string version;
  for (std::string line; version.empty() && std::getline(project, line);) {
    if (line.starts_with("project(outlast VERSION "))
      version = line.substr(24, line.find(' ', 24) - 24);
  }
  ASSERT_NE(version, "");
  Launched job;
  job.StartProgram({testing::ToolPath(), "--version"});
  EXPECT_EQ(job.Wait().code, 0);
  EXPECT_THAT(job.Read("out"), ::testing::StartsWith("outlast " + version + "\nbuilt by "));
}

TEST(Help, HasAnExampleAndEndsWithZero) {
  Launched job;
  EXPECT_EQ(job.Run({"--help"}), 0);
  EXPECT_THAT(job.Read("out"), HasSubstr("Example:"));
}

}  // namespace
}  // namespace outlast
