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
                      Fault{"sleep", "yes", "sleeps", "template: it is not ready"},
                      Fault{"thread", kReady, kEvents, "it has 2 threads, 1 wanted"},
                      Fault{"nonsense", kNote, kEvents, "it said something that is no answer"},
                      Fault{"version", kNote, kEvents,
                            "it speaks version 9 of the protocol, 1 wanted"},
                      Fault{"silent", kReady, kEvents, "it did not fork within 2 s"}),
    [](const ::testing::TestParamInfo<Fault>& row) { return std::string(row.param.name); });

TEST_F(Template, ThatIsNoProgramIsRefusedBeforeARankRuns) {
  EXPECT_EQ(job_.Run({"-n", "1", "--template", "./none", "--", "true"}), 85);
  EXPECT_EQ(job_.Read("err"), "outlast: --template: command './none': no such file\n");
}

}  // namespace
}  // namespace outlast
