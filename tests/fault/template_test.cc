// The second rung of the ladder: ranks that died are forks of a warm template.
#include "tests/fault/launched.h"

namespace outlast {
namespace {

using testing::BuildFolder;
using testing::CountAliveAfter;
using ::testing::HasSubstr;
using testing::is_alive;
using testing::Launched;
using ::testing::SizeIs;

// As no command that is quoted in an event has it.
constexpr char kReady[] = R"("event":"template_ready")";
constexpr char kNote[] = R"("line":"template: )";
constexpr char kEvents[] = "outlast-runs/latest/events.jsonl";
#ifdef __SANITIZE_THREAD__
constexpr bool kHasSecondThread = true;  // its own
#else
constexpr bool kHasSecondThread = false;
#endif

std::string Trainer() { return BuildFolder() / "outlast_template_trainer"; }

class Template : public ::testing::Test {
 protected:
  void SetUp() override {
    if (kHasSecondThread) GTEST_SKIP() << "a template has one thread";
  }
  // Of `ranks` ranks the first dies once FILE holds TEXT.
  static std::vector<std::string> Command(int ranks, const std::string& what,
                                          const std::string& text = kReady,
                                          const std::string& file = kEvents) {
    return {"-n",         std::to_string(ranks),
            "--template", Trainer() + " as-template",
            "--",         Trainer(),
            what,         file,
            text};
  }
  std::vector<nlohmann::json> Events(const std::string& name) const {
    std::vector<nlohmann::json> found;
    std::istringstream lines(job_.Read(kEvents));
    for (std::string line; std::getline(lines, line);) {
      const auto event = nlohmann::json::parse(line, nullptr, false);
      if (event.value("event", "") == name) found.push_back(event);
    }
    return found;
  }
  std::vector<std::string> Lines(const std::string& name) const {
    std::vector<std::string> lines;
    std::istringstream text(job_.Read(name));
    for (std::string line; std::getline(text, line);) lines.push_back(line);
    return lines;
  }

  // Forks that wait to become ranks: the guardian's children besides ranks and template.
  std::vector<pid_t> AwaitForks(size_t count) const {
    std::vector<pid_t> forks;
    const int64_t deadline =
        MonotonicNanos() + absl::ToInt64Nanoseconds(absl::Seconds(10) * testing::TimeFactor());
    while (forks.size() < count && MonotonicNanos() < deadline) {
      usleep(10'000);
      const auto ready = Events("template_ready");
      if (ready.empty()) continue;
      const pid_t of_template = ready[0]["pid"].get<pid_t>();
      const auto process = ReadProcess(of_template);
      if (!process) continue;
      forks = ChildrenOf(process->parent);
      std::erase(forks, of_template);
      for (const auto& started : Events("worker_started"))
        std::erase(forks, started["pid"].get<pid_t>());
    }
    return forks;
  }

  Launched job_;
};

TEST_F(Template, FillsADeadRankWithAForkThatDoesNotDoTheSetUpAgain) {
  EXPECT_EQ(job_.Run(Command(3, "join")), 0) << job_.Read("err");
  // Three ranks and the template; the fourth process of a rank is a fork.
  EXPECT_THAT(Lines("setups"), SizeIs(4));
  EXPECT_THAT(Lines("starts"),
              ::testing::UnorderedElementsAre("rank 0 forked", "rank 1 fresh", "rank 2 fresh"));
  const auto started = Events("worker_started");
  ASSERT_THAT(started, SizeIs(4));
  EXPECT_EQ(started[2].value("from", ""), "");
  EXPECT_EQ(started[3].value("from", ""), "template");
}

TEST_F(Template, FillsAllRanksOfAPlainProgramThatStartsAgain) {
  EXPECT_EQ(job_.Run(Command(2, "plain")), 0) << job_.Read("err");
  EXPECT_THAT(Lines("setups"), SizeIs(3));
  EXPECT_THAT(Lines("starts"), ::testing::UnorderedElementsAre("rank 0 forked", "rank 1 forked"));
}

// Forks begin at the same instant: those that would look for rank 0's server in vain are held back.
TEST_F(Template, LetsRankZeroListenBeforeTheOthersLook) {
  EXPECT_EQ(job_.Run(Command(3, "meet")), 0) << job_.Read("err");
  EXPECT_THAT(Lines("starts"), SizeIs(3));
  EXPECT_THAT(Lines("meetings"), ::testing::ElementsAre("met", "met"));
}

// Forks are made ahead, one a rank, once nobody starts any more.
TEST_F(Template, HasAForkReadyForEachRank) {
  job_.Start(Command(2, "plain", "word", "nothing"));
  const std::vector<pid_t> forks = AwaitForks(2);
  EXPECT_THAT(forks, SizeIs(2));
  kill(job_.pid(), SIGINT);
  EXPECT_EQ(job_.Wait().code, 130);
  EXPECT_EQ(CountAliveAfter(forks, absl::Seconds(1)), 0);
}

// Somebody stopped them while they waited: they are let go all the same.
TEST_F(Template, ForksThatWereStoppedMeanwhileFillDeadRanks) {
  job_.Start(Command(2, "plain", "word", "go"));
  const std::vector<pid_t> forks = AwaitForks(2);
  ASSERT_THAT(forks, SizeIs(2));
  for (const pid_t fork : forks) kill(fork, SIGSTOP);
  job_.Write("go", "word");
  EXPECT_EQ(job_.Wait().code, 0) << job_.Read("err");
  EXPECT_THAT(Lines("starts"), ::testing::UnorderedElementsAre("rank 0 forked", "rank 1 forked"));
}

TEST_F(Template, EndsWithTheJob) {
  EXPECT_EQ(job_.Run(Command(1, "plain")), 0) << job_.Read("err");
  const auto ready = Events("template_ready");
  ASSERT_THAT(ready, SizeIs(1));
  EXPECT_FALSE(is_alive(ready[0]["pid"].get<pid_t>()));
}

TEST_F(Template, LeavesNothingBehindWhenTheAgentIsKilled) {
  job_.MakeFifo("ready");
  job_.Start(Command(1, "stay"));
  job_.AwaitFifo("ready");
  std::vector<pid_t> pids = job_.ReadPids("pids");
  ASSERT_THAT(pids, SizeIs(2));
  pids.push_back(Events("template_ready").at(0)["pid"]);
  ASSERT_TRUE(is_alive(pids[2]));
  kill(job_.pid(), SIGKILL);
  EXPECT_EQ(job_.Wait().code, 137);
  EXPECT_EQ(CountAliveAfter(pids, absl::Seconds(1)), 0);
}

TEST_F(Template, LetsNoHelperOfAForkHideFromTheNextAttempt) {
  EXPECT_EQ(job_.Run(Command(1, "helper")), 0) << job_.Read("err");
  EXPECT_EQ(job_.Read("helpers"), "gone\n");
}

// A template that does not do what it should: the rank gets a fresh process, and one line says why.
struct Fault {
  const char* name;     // TEMPLATE_FAULT
  const char* awaited;  // when rank 0 may die
  const char* file;
  const char* line;
};
class TemplateFault : public Template, public ::testing::WithParamInterface<Fault> {};

TEST_P(TemplateFault, GivesTheRankAFreshProcessAndSaysSoOnce) {
  const Fault& fault = GetParam();
  setenv("TEMPLATE_FAULT", fault.name, 1);
  const int code = job_.Run(Command(1, "plain", fault.awaited, fault.file));
  unsetenv("TEMPLATE_FAULT");
  EXPECT_EQ(code, 0);
  EXPECT_EQ(job_.Read("starts"), "rank 0 fresh\n");
  const std::string said = job_.Read("err");
  EXPECT_THAT(said, HasSubstr(fault.line));
  EXPECT_EQ(said.find(fault.line), said.rfind(fault.line));
}

INSTANTIATE_TEST_SUITE_P(
    Template, TemplateFault,
    ::testing::Values(Fault{"exit", kNote, kEvents, "template: it ended with exit code 3"},
                      Fault{"join", kNote, kEvents, "template: it ended with exit code 4"},
                      Fault{"sleep", "yes", "sleeps", "template: it is not ready"},
                      Fault{"thread", kReady, kEvents, "it has 2 threads, 1 wanted"},
                      Fault{"nonsense", kNote, kEvents, "it said something that is no answer"},
                      Fault{"version", kNote, kEvents,
                            "it speaks version 9 of the protocol, 1 to 2 wanted"},
                      Fault{"silent", kReady, kEvents, "it did not fork within 2 s"}),
    [](const ::testing::TestParamInfo<Fault>& row) { return std::string(row.param.name); });

TEST_F(Template, ThatIsNoProgramIsRefusedBeforeARankRuns) {
  EXPECT_EQ(job_.Run({"-n", "1", "--template", "./none", "--", "true"}), 85);
  EXPECT_EQ(job_.Read("err"), "outlast: --template: command './none': no such file\n");
}

// --- Python ---

class PythonTemplate : public Template {
 protected:
  void SetUp() override {
    if (std::system("command -v python3 >/dev/null") != 0) GTEST_SKIP() << "no python3";
    job_.Write("slow.py", "open('imports', 'a').write('slow\\n')\n");
    // In its first attempt it dies once the template is ready.
    job_.Write("train.py", R"(
import os, random, signal, sys, time
import slow
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while '"event":"template_ready"' not in open("outlast-runs/latest/events.jsonl").read():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
main = sys.modules["__main__"]
group = "own" if os.getpgrp() == os.getpid() else "strange"
shown = open("/proc/self/environ").read().split("\0")
tag = [v.split(".")[1:] for v in shown if v.startswith("OUTLAST_SLOT_TAG=")]
print(__name__, main.__file__, sys.argv, slow.__name__, os.environ["RANK"], group, tag)
print(os.environ.get("PYTHONPATH"), [p for p in sys.path if "outlast" in p and p != os.getcwd()],
      "OUTLAST_TEMPLATE_FD" in os.environ, random.random() != random.random())
print(sys.orig_argv[1:])
print("for people", file=sys.stderr)
sys.exit(int(sys.argv[1]))
)");
  }
  static std::vector<std::string> Python(std::vector<std::string> command) {
    command.insert(command.begin(), {"-n", "1", "--max-restarts", "1", "--template",
                                     "python3 -m outlast_template slow", "--"});
    return command;
  }
};

TEST_F(PythonTemplate, RunsAnUnmodifiedScriptWithoutItsImportsAgain) {
  EXPECT_EQ(job_.Run(Python({"train.py", "0", "a b"})), 0) << job_.Read("err");
  EXPECT_EQ(job_.Read("imports"), "slow\nslow\n");  // the first rank and the template
  EXPECT_EQ(job_.Read("out"), "[0] __main__ " + job_.folder() +
                                  "/train.py ['train.py', '0', 'a b'] slow 0 own [['0', '2']]\n"
                                  "[0] None [] False True\n"
                                  "[0] ['-u', 'train.py', '0', 'a b']\n");
  EXPECT_THAT(job_.Read("err"), HasSubstr("[0] for people\n"));
  EXPECT_EQ(Events("worker_started").back().value("from", ""), "template");
}

TEST_F(PythonTemplate, RunsAModule) {
  EXPECT_EQ(job_.Run(Python({"python3", "-u", "-m", "train", "0"})), 0) << job_.Read("err");
  EXPECT_EQ(job_.Read("imports"), "slow\nslow\n");
  EXPECT_THAT(job_.Read("out"), HasSubstr("/train.py', '0'] slow 0 own"));
}

TEST_F(PythonTemplate, PassesTheExitCodeOn) {
  EXPECT_EQ(job_.Run(Python({"train.py", "7"})), 83);
  EXPECT_EQ(Events("worker_ended").back().value("code", 0), 7);
}

TEST_F(PythonTemplate, LeavesWhatIsNoPythonToAFreshProcess) {
  EXPECT_EQ(job_.Run(Python({"sh", "-c", "exec python3 train.py 0"})), 0) << job_.Read("err");
  EXPECT_EQ(job_.Read("imports"), "slow\nslow\nslow\n");
  EXPECT_THAT(job_.Read("err"), HasSubstr("template: it refused to fork: the command runs "));
}

TEST_F(PythonTemplate, ThatCannotImportIsReplacedByAFreshProcess) {
  job_.Write("slow.py", "import os\nassert 'OUTLAST_RUN_ID' in os.environ, 'a rank'\n");
  std::vector<std::string> command = Python({"sh", "-c", "exit $TORCHELASTIC_RESTART_COUNT"});
  command.back() =
      "until grep -q 'lin[e].:.template:' outlast-runs/latest/events.jsonl; do sleep "
      "0.01; done; exit $((1 - TORCHELASTIC_RESTART_COUNT))";
  EXPECT_EQ(job_.Run(command), 0) << job_.Read("err");
  EXPECT_THAT(job_.Read("err"), HasSubstr("template: it ended with exit code 1"));
  EXPECT_THAT(job_.Read("outlast-runs/latest/logs/template.err"),
              HasSubstr("AssertionError: a rank"));
}

}  // namespace
}  // namespace outlast
