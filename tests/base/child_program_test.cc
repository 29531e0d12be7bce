#include "base/child_program.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>

#include "outlast/base/clock.h"
#include "outlast/base/fd.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;

ProgramCall Shell(const std::string& text) {
  ProgramCall call;
  call.command = {"sh", "-c", text};
  return call;
}

TEST(RunProgram, TellsExitCodeAndLastLine) {
  const auto end = RunProgram(Shell("echo one; echo two >&2; echo; exit 7")).value();
  EXPECT_EQ(end.code, 7);
  EXPECT_EQ(end.signal, 0);
  EXPECT_EQ(end.last_line, "two");
}

TEST(RunProgram, KeepsAsMuchOfTheOutputAsIsWanted) {
  ProgramCall call = Shell("seq 20000; echo end");
  call.keep_output = 1 << 20;
  EXPECT_EQ(RunProgram(call)->output.size(), 108'894u + 4);  // "1" to "20000", and "end"
  call.keep_output = 1 << 10;
  const std::string output = RunProgram(call)->output;
  EXPECT_GE(output.size(), 1024u);
  EXPECT_LE(output.size(), 2048u);
  EXPECT_EQ(output.substr(output.size() - 5), "\nend\n");
}

TEST(RunProgram, TellsTheSignalThatEndedIt) {
  EXPECT_EQ(RunProgram(Shell("kill -ABRT $$"))->signal, SIGABRT);
}

TEST(RunProgram, GivesArgumentsEnvironmentAndNoInput) {
  ASSERT_EQ(setenv("OUTLAST_TEST_WORD", "old", 1), 0);
  ProgramCall call = Shell("cat; echo \"$1 $OUTLAST_TEST_WORD $PWD\"");
  call.command.insert(call.command.end(), {"sh", "argument"});
  call.environment = {{"OUTLAST_TEST_WORD", "new"}};
  call.folder = "/usr";
  EXPECT_EQ(RunProgram(call)->last_line, "argument new /usr");
  unsetenv("OUTLAST_TEST_WORD");
}

TEST(RunProgram, SaysThatAProgramCannotBeStarted) {
  ProgramCall call;
  call.command = {"/nowhere/at/all"};
  const auto end = RunProgram(call).value();
  EXPECT_EQ(end.code, 127);
  EXPECT_EQ(end.last_line, "No such file or directory");
}

// A loop that ignores what can be ignored, and a helper that holds its output open.
TEST(RunProgram, KillsTheWholeGroupAtTheDeadline) {
  ProgramCall call = Shell("trap '' TERM; sleep 300 & echo $!; while :; do sleep 300; done");
  call.deadline = absl::Milliseconds(300);
  const int64_t started = MonotonicNanos();
  const auto end = RunProgram(call).value();
  EXPECT_TRUE(end.timed_out);
  EXPECT_EQ(end.signal, SIGKILL);
  EXPECT_GE(MonotonicNanos() - started, 300'000'000);
  EXPECT_LT(MonotonicNanos() - started, 100'000'000'000);
  const pid_t helper = std::atoi(end.last_line.c_str());
  ASSERT_GT(helper, 0);
  // It has SIGKILL; whoever it belongs to now reaps it soon.
  while (kill(helper, 0) == 0 && MonotonicNanos() - started < 20'000'000'000) {
    const std::string state = "/proc/" + std::to_string(helper) + "/stat";
    FILE* file = fopen(state.c_str(), "re");
    char text[256] = {};
    if (file != nullptr) (void)!fread(text, 1, sizeof text - 1, file);
    if (file != nullptr) fclose(file);
    if (std::string(text).find(") Z ") != std::string::npos) break;
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_LT(MonotonicNanos() - started, 20'000'000'000);
}

// Who has left the group and keeps the output open holds nobody up.
TEST(RunProgram, WaitsForNoHelperThatLeftItsGroup) {
  const int64_t started = MonotonicNanos();
  const auto end = RunProgram(Shell("setsid sleep 5 & echo done")).value();
  EXPECT_EQ(end.last_line, "done");
  EXPECT_LT(MonotonicNanos() - started, 4'000'000'000);
}

TEST(RunProgram, TellsAProgramToEndWhenItIsStopped) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  const UniqueFd stop(ends[0]), teller(ends[1]);
  ASSERT_EQ(write(teller.get(), "12", 2), 2);
  ProgramCall call =
      Shell("trap 'echo told; exit 3' TERM; kill -0 $$; while true; do sleep 0.01; done");
  int asked = 0;
  call.stop_fd = stop.get();
  call.stops = [&] {
    // The first byte says nothing.
    char byte = 0;
    return read(stop.get(), &byte, 1) == 1 && ++asked == 2;
  };
  const auto end = RunProgram(call).value();
  EXPECT_TRUE(end.stopped);
  EXPECT_EQ(asked, 2);
  EXPECT_FALSE(end.timed_out);
  // It may not have come as far as its trap.
  EXPECT_TRUE(end.signal == SIGTERM || end.code == 3) << end.last_line;
}

TEST(RunProgram, KillsAProgramThatIsStoppedAndDoesNotEnd) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  const UniqueFd stop(ends[0]);
  ProgramCall call = Shell("trap '' TERM; while true; do sleep 0.01; done");
  call.stop_fd = stop.get();
  call.stop_grace = absl::Milliseconds(50);
  // Closed at both ends it can be read at once.
  close(ends[1]);
  const auto end = RunProgram(call).value();
  EXPECT_TRUE(end.stopped);
  EXPECT_NE(end.signal, 0);
}

TEST(RunProgram, EndsAProgramThatNeverStopsPrinting) {
  ProgramCall call;
  call.command = {"yes", "line"};
  call.deadline = absl::Milliseconds(200);
  EXPECT_TRUE(RunProgram(call)->timed_out);
}

TEST(RunProgram, MakesTheLastLinePrintable) {
  EXPECT_EQ(RunProgram(Shell("printf 'caf\\303\\251 \\377 \\033[1m\\n'"))->last_line,
            "caf\xc3\xa9 ? ?[1m");
  EXPECT_EQ(RunProgram(Shell("head -c 5000 /dev/zero | tr '\\0' x"))->last_line.size(), 1024u);
}

TEST(RunProgram, RefusesAnEmptyCommand) {
  EXPECT_EQ(RunProgram({}).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace outlast
