// Case O01: nothing of a worker's process tree outlives it, the job, the agent or the guardian.
#include "tests/fault/launched.h"

namespace outlast {
namespace {

using testing::CountAliveAfter;
using ::testing::HasSubstr;
using testing::HidingHelpers;
using testing::is_alive;
using testing::kSanitized;
using testing::Launched;
using testing::Output;

constexpr int kKillRuns = kSanitized ? 5 : 100;

// Rank 0 is ready when its helpers run; then the test goes on.
std::string ReadyScript() {
  return "echo $$ >>pids; " + HidingHelpers("pids") +
         "[ $RANK = 0 ] && echo ready >ready; wait; sleep 300";
}

void ExpectNoneAlive(const std::vector<pid_t>& pids, absl::Duration limit) {
  EXPECT_GE(pids.size(), 5u);
  EXPECT_EQ(CountAliveAfter(pids, limit), 0);
  for (const pid_t pid : pids) {
    if (is_alive(pid)) kill(pid, SIGKILL);
  }
}

TEST(ProcessTree, OfAnAttemptIsGoneBeforeTheNextOneStarts) {
  Launched job;
  job.MakeFifo("fifo");
  const std::string helpers =
      "sleep 300 & echo $! >>pids.a$A; setsid sleep 301 & echo $! >>pids.a$A; (setsid sh -c 'sleep "
      "302 & echo $! >>pids.a'$A); ";
  const int code =
      job.Run({"-n", "2", "--max-restarts", "1", "--", "sh", "-c",
               "A=$TORCHELASTIC_RESTART_COUNT; "
               "[ $A = 1 ] && { for p in $(cat pids.a0); do kill -0 $p 2>/dev/null && echo $p "
               ">>survivors; done; }; "
               "echo $$ >>pids.a$A; " +
                   helpers +
                   "[ $A = 1 ] && { echo checked >>checks; exit 0; }; "
                   "[ $RANK = 0 ] && { echo here >fifo; wait; }; cat fifo >/dev/null; exit 3"});
  EXPECT_EQ(code, 0);
  EXPECT_EQ(job.Read("checks"), "checked\nchecked\n");
  EXPECT_EQ(job.Read("survivors"), "");
  EXPECT_EQ(job.ReadPids("pids.a0").size(), 8u);
  ExpectNoneAlive(job.ReadPids("pids.a0"), absl::ZeroDuration());
  ExpectNoneAlive(job.ReadPids("pids.a1"), absl::ZeroDuration());
}

TEST(ProcessTree, EndsWithCtrlCInATerminal) {
  Launched job;
  job.MakeFifo("ready");
  job.Start({"-n", "2", "--grace", "0.2", "--", "sh", "-c", ReadyScript()}, Output::kTerminal);
  job.AwaitFifo("ready");
  job.Type("\x03");
  EXPECT_EQ(job.Wait().code, 130);
  ExpectNoneAlive(job.ReadPids("pids"), absl::ZeroDuration());
}

TEST(ProcessTree, EndsWithinASecondWhenTheAgentIsKilled) {
  for (int run = 0; run < kKillRuns; ++run) {
    SCOPED_TRACE(run);
    Launched job;
    job.MakeFifo("ready");
    job.Start({"-n", "1", "--", "sh", "-c", ReadyScript()});
    job.AwaitFifo("ready");
    std::vector<pid_t> pids = job.ReadPids("pids");
    for (const pid_t guardian : ChildrenOf(job.pid())) pids.push_back(guardian);
    kill(job.pid(), SIGKILL);
    ASSERT_EQ(job.Wait().code, 137);
    ExpectNoneAlive(pids, absl::Seconds(1));
    if (HasFailure()) return;
  }
}

TEST(ProcessTree, EndsWhenTheGuardianIsKilledAndTheAgentSaysSo) {
  for (int run = 0; run < kKillRuns; ++run) {
    SCOPED_TRACE(run);
    Launched job;
    job.MakeFifo("ready");
    job.Start({"-n", "1", "--", "sh", "-c", ReadyScript()});
    job.AwaitFifo("ready");
    const std::vector<pid_t> guardian = ChildrenOf(job.pid());
    ASSERT_EQ(guardian.size(), 1u);
    kill(guardian[0], SIGKILL);
    EXPECT_EQ(job.Wait().code, 84);
    EXPECT_THAT(job.Read("err"),
                HasSubstr("the guardian (process " + std::to_string(guardian[0]) + ") was killed"));
    ExpectNoneAlive(job.ReadPids("pids"), absl::ZeroDuration());
    if (HasFailure()) return;
  }
}

TEST(ProcessTree, LeavesNoZombieWhileTheJobRuns) {
  Launched job;
  job.MakeFifo("ready");
  job.MakeFifo("go");
  job.Start({"-n", "1", "--", "sh", "-c",
             "for i in 1 2 3 4 5; do (setsid true &); done; echo ready >ready; cat go"});
  job.AwaitFifo("ready");
  const pid_t guardian = ChildrenOf(job.pid()).at(0);
  job.Write("go", "now\n");
  EXPECT_EQ(job.Wait().code, 0);
  EXPECT_FALSE(ReadProcess(guardian).has_value());
}

// Case D19.
TEST(ProcessTree, CostsTheAgentNoDescriptorsOverRestarts) {
  Launched job;
  // The least of some counts: others hold one for a moment, such as the console.
  job.Write("count.sh",
            "agent=$(sed -n 's/^PPid:.//p' /proc/$PPID/status)\n"
            "least() { n=9999; for i in 1 2 3 4 5 6 7 8 9 10; do c=$(ls /proc/$1/fd | wc -l);\n"
            "  [ $c -ge $n ] || n=$c; sleep 0.03; done; echo $n; }\n"
            "[ $RANK = 0 ] || exec sleep 300\n"
            "least $agent >>agent_fds\n"
            "least $PPID >>guardian_fds\n"
            "exit $((TORCHELASTIC_RESTART_COUNT + 1))\n");
  const int code = job.Run({"-n", "2", "--max-restarts", "3", "--", "sh", "count.sh"});
  EXPECT_EQ(code, 83);
  for (const char* name : {"agent_fds", "guardian_fds"}) {
    const std::vector<pid_t> counts = job.ReadPids(name);
    ASSERT_EQ(counts.size(), 4u);
    EXPECT_LE(counts[3], counts[1]) << name;
  }
}

}  // namespace
}  // namespace outlast
