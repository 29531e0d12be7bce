// Signals to the agent of plain programs (they never join). Those that join: the tests of run/.
#include "tests/fault/launched.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;
using testing::Launched;
using testing::Output;

// A worker that says what it got. `traps` is shell text; "ready" is written when it waits.
std::string Waiting(const std::string& traps) {
  return traps + " echo ready >ready; while :; do sleep 0.02; done";
}

TEST(Signal, TermEndsAPlainProgramAndSaysRequeue) {
  Launched job;
  job.MakeFifo("ready");
  job.Start({"-n", "1", "--", "sh", "-c", Waiting("trap 'echo got TERM; exit 0' TERM;")});
  job.AwaitFifo("ready");
  kill(job.pid(), SIGTERM);
  EXPECT_EQ(job.Wait().code, 81);
  EXPECT_EQ(job.Read("out"), "[0] got TERM\n");
}

TEST(Signal, TermThatIsIgnoredEndsInAKillAfterTheGrace) {
  Launched job;
  job.MakeFifo("ready");
  job.Start({"-n", "1", "--grace", "0.1", "--", "sh", "-c", Waiting("trap '' TERM;")});
  job.AwaitFifo("ready");
  kill(job.pid(), SIGTERM);
  EXPECT_EQ(job.Wait().code, 81);
}

TEST(Signal, WarningsReachAProgramThatCatchesThem) {
  for (const auto& [signal, name] : {std::pair{SIGUSR1, "USR1"}, {SIGUSR2, "USR2"}}) {
    Launched job;
    job.MakeFifo("ready");
    job.Start({"-n", "1", "--", "sh", "-c",
               Waiting(std::string("trap 'echo got ") + name + "; exit 0' " + name + ";")});
    job.AwaitFifo("ready");
    kill(job.pid(), signal);
    EXPECT_EQ(job.Wait().code, 81);
    EXPECT_EQ(job.Read("out"), std::string("[0] got ") + name + "\n");
  }
}

TEST(Signal, WarningsAreTermToAProgramThatDoesNotCatchThem) {
  Launched job;
  job.MakeFifo("ready");
  job.Start({"-n", "1", "--", "sh", "-c", Waiting("trap 'echo got TERM; exit 0' TERM;")});
  job.AwaitFifo("ready");
  kill(job.pid(), SIGUSR1);
  EXPECT_EQ(job.Wait().code, 81);
  EXPECT_EQ(job.Read("out"), "[0] got TERM\n");
}

TEST(Signal, InterruptAndHangUpKeepTheirOwnCodes) {
  for (const auto& [signal, code] : {std::pair{SIGINT, 130}, {SIGHUP, 129}}) {
    Launched job;
    job.MakeFifo("ready");
    job.Start({"-n", "1", "--", "sh", "-c", Waiting("")});
    job.AwaitFifo("ready");
    kill(job.pid(), signal);
    EXPECT_EQ(job.Wait().code, code);
    EXPECT_EQ(job.Report()["stop_signals"], nlohmann::json({signal}));
  }
}

TEST(Signal, ASecondTermChangesNothing) {
  Launched job;
  job.MakeFifo("ready");
  job.MakeFifo("saving");
  job.MakeFifo("go");
  job.Start({"-n", "1", "--grace", "60", "--", "sh", "-c",
             Waiting("trap 'echo here >saving; read line <go; echo saved; exit 0' TERM;")});
  job.AwaitFifo("ready");
  kill(job.pid(), SIGTERM);
  job.AwaitFifo("saving");
  kill(job.pid(), SIGTERM);
  job.Write("go", "now\n");
  EXPECT_EQ(job.Wait().code, 81);
  EXPECT_THAT(job.Read("out"), HasSubstr("saved"));
}

TEST(Signal, ASecondCtrlCHurries) {
  Launched job;
  job.MakeFifo("ready");
  job.MakeFifo("first");
  job.Start({"-n", "1", "--grace", "600", "--", "sh", "-c",
             Waiting("trap '' TERM; trap 'echo here >first' INT;")},
            Output::kTerminal);
  job.AwaitFifo("ready");
  job.Type("\x03");
  job.AwaitFifo("first");
  job.Type("\x03");
  EXPECT_EQ(job.Wait().code, 130);  // long before the grace
}

TEST(Signal, QuitWritesTheStacksOfAllRanksAndGoesOn) {
  Launched job;
  job.MakeFifo("ready");
  job.MakeFifo("go0");  // one each: of two readers of one pipe, the first might take both lines
  job.MakeFifo("go1");
  job.Start({"-n", "2", "--", "sh", "-c",
             "[ $RANK = 0 ] && { echo ready >ready; read line <go0; exit 0; }; [ -e "
             "outlast-runs/latest/stacks/1 ]; read line <go1"});
  job.AwaitFifo("ready");
  kill(job.pid(), SIGQUIT);
  // The event is written when all stacks are; a worker reads it for us, so the test needs no clock.
  while (job.Read("outlast-runs/latest/events.jsonl").find("\"stacks\"") == std::string::npos)
    sched_yield();
  const std::string stacks = job.Read("outlast-runs/latest/stacks/1/rank0.txt") +
                             job.Read("outlast-runs/latest/stacks/1/rank1.txt");
  EXPECT_THAT(stacks, HasSubstr("State:"));
  EXPECT_THAT(stacks, HasSubstr("wchan"));
  if (access("/usr/bin/eu-stack", X_OK) == 0) {
    EXPECT_THAT(stacks, HasSubstr("#0"));
  }
  job.Write("go0", "now\n");
  job.Write("go1", "now\n");
  EXPECT_EQ(job.Wait().code, 0);
}

TEST(Signal, StacksSayWhyThereAreNone) {
  Launched job;
  job.MakeFifo("ready");
  job.MakeFifo("go");
  std::filesystem::create_directory(job.Path("bin"));
  std::filesystem::create_symlink("/bin/sh", job.Path("bin/sh"));
  job.StartProgram({"/usr/bin/env", "PATH=" + job.Path("bin"), testing::ToolPath(), "run", "-n",
                    "1", "--", "sh", "-c", "echo ready >ready; read line <go"});
  job.AwaitFifo("ready");
  kill(job.pid(), SIGQUIT);
  while (job.Read("outlast-runs/latest/events.jsonl").find("\"stacks\"") == std::string::npos)
    sched_yield();
  EXPECT_THAT(job.Read("outlast-runs/latest/stacks/1/rank0.txt"),
              HasSubstr("eu-stack was not found"));
  job.Write("go", "now\n");
  EXPECT_EQ(job.Wait().code, 0);
}

TEST(Signal, ThatWasIgnoredFromTheStartStaysIgnored) {
  Launched job;
  job.MakeFifo("ready");
  job.MakeFifo("go");
  job.StartProgram({"/bin/sh", "-c",
                    std::string("trap '' HUP; exec ") + testing::ToolPath() +
                        " run -n 1 -- sh -c 'echo ready >ready; read line <go'"});
  job.AwaitFifo("ready");
  kill(job.pid(), SIGHUP);  // as nohup promises
  job.Write("go", "now\n");
  EXPECT_EQ(job.Wait().code, 0);
}

}  // namespace
}  // namespace outlast
