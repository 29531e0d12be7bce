// What a killed agent leaves goes on under the next one (--on-agent-death adopt), or ends.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <utility>

#include "launch/adoption.h"
#include "meter/report.h"
#include "tests/fault/launched.h"

namespace outlast {
namespace {

using testing::CountAliveAfter;
using ::testing::ElementsAre;
using testing::Ending;
using ::testing::HasSubstr;
using testing::HidingHelpers;
using testing::is_alive;
using testing::kSanitized;
using testing::Launched;
using testing::TimeFactor;

constexpr absl::Duration kPatience = absl::Seconds(20);
// A save that falls due while the agent is already dying keeps a buffer that nobody frees.
constexpr int kOnlyAtTheEnd = 1000;

// A line of the trainer's log.
struct LoggedStep {
  uint64_t generation = 0;
  int64_t step = 0;
  int rank = 0;
  std::string digest;
};

class Adopt : public ::testing::Test {
 protected:
  // Whatever a failed test leaves must not wait for an agent that never comes.
  ~Adopt() override {
    const auto file = File();
    if (file.has_value() && IsAlive(*file)) kill(file->pid, SIGKILL);
  }

  std::optional<GuardianFile> File() const {
    auto file = ParseGuardianFile(job.Read("outlast-runs/guardian-run.json"));
    if (!file.ok()) return std::nullopt;
    return *std::move(file);
  }
  pid_t Guardian() const { return File().value_or(GuardianFile{}).pid; }

  void Start(const std::vector<std::string>& command, std::vector<std::string> flags = {}) {
    std::vector<std::string> words = {"-n",    std::to_string(world), "--on-agent-death",
                                      "adopt", "--adopt-within",      adopt_within};
    words.insert(words.end(), flags.begin(), flags.end());
    words.push_back("--");
    words.insert(words.end(), command.begin(), command.end());
    job.Start(words);
  }
  int Run(const std::vector<std::string>& command, std::vector<std::string> flags = {}) {
    Start(command, std::move(flags));
    return job.Wait().code;
  }

  // Saves to disk each `every` steps, and at the end.
  std::vector<std::string> Trainer(int steps, int every) const {
    return {testing::BuildFolder() / "outlast_toy_trainer",
            "--steps",
            std::to_string(steps),
            "--step-ms",
            "2",
            "--ckpt-dir",
            "ckpt",
            "--ckpt-every",
            std::to_string(every),
            "--state-mb",
            "0.25",
            "--log",
            "log"};
  }

  static size_t Index(const std::vector<std::string>& words, const std::string& word) {
    return static_cast<size_t>(std::ranges::find(words, word) - words.begin());
  }

  void KillAgent() {
    kill(job.pid(), SIGKILL);
    ASSERT_EQ(job.Wait().code, 137);
  }

  // Until `done`, by looking; false: it never was.
  template <typename Done>
  bool Await(Done done) {
    const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(kPatience * TimeFactor());
    while (!done()) {
      if (MonotonicNanos() > deadline) return false;
      Clock::Real().SleepFor(absl::Milliseconds(2));
    }
    return true;
  }
  // All ranks have logged that step, in that generation.
  bool AwaitStep(uint64_t generation, int64_t step) {
    return Await([&] {
      std::set<int> ranks;
      for (const LoggedStep& one : Steps()) {
        if (one.generation == generation && one.step >= step) ranks.insert(one.rank);
      }
      return static_cast<int>(ranks.size()) == world;
    });
  }

  std::vector<LoggedStep> Steps(const std::string& log = "log") const {
    std::istringstream text(job.Read(log));
    std::vector<LoggedStep> steps;
    for (LoggedStep one; text >> one.generation >> one.step >> one.rank >> one.digest;)
      steps.push_back(one);
    return steps;
  }

  std::vector<nlohmann::json> Events(const std::string& kind) const {
    std::istringstream text(job.Read("outlast-runs/latest/events.jsonl"));
    std::vector<nlohmann::json> events;
    for (std::string line; std::getline(text, line);) {
      auto event = nlohmann::json::parse(line, nullptr, false);
      if (event.is_object() && event["event"] == kind) events.push_back(std::move(event));
    }
    return events;
  }
  std::vector<pid_t> WorkersStarted() const {
    std::vector<pid_t> pids;
    for (const auto& event : Events("worker_started")) pids.push_back(event["pid"]);
    return pids;
  }

  // By generation: the step that it went on from, and where from.
  std::map<uint64_t, std::pair<int64_t, std::string>> Restores() const {
    std::map<uint64_t, std::pair<int64_t, std::string>> restores;
    for (const auto& event : Events("restored"))
      restores[event["generation"]] = {event["step"], event["source"]};
    return restores;
  }
  // The last step that all ranks had begun in `generation`.
  int64_t LastOf(uint64_t generation) const {
    std::map<int, int64_t> last;
    for (const LoggedStep& one : Steps()) {
      if (one.generation == generation) last[one.rank] = std::max(last[one.rank], one.step);
    }
    int64_t least = -1;
    for (const auto& [rank, step] : last) least = least < 0 ? step : std::min(least, step);
    return least;
  }

  // Each step's digests are those of a run that nobody disturbed.
  void ExpectRightSteps(int steps) {
    Launched undisturbed;
    std::vector<std::string> words = {"-n", std::to_string(world), "--"};
    for (const std::string& word : Trainer(steps, kOnlyAtTheEnd)) words.push_back(word);
    ASSERT_EQ(undisturbed.Run(words), 0) << undisturbed.Read("err");
    std::map<std::pair<int64_t, int>, std::string> right;
    std::istringstream text(undisturbed.Read("log"));
    for (LoggedStep one; text >> one.generation >> one.step >> one.rank >> one.digest;)
      right[{one.step, one.rank}] = one.digest;
    std::set<std::pair<int64_t, int>> seen;
    for (const LoggedStep& one : Steps()) {
      const std::pair<int64_t, int> key{one.step, one.rank};
      EXPECT_EQ(one.digest, right[key]) << "step " << one.step << " of rank " << one.rank;
      seen.insert(key);
    }
    EXPECT_EQ(seen.size(), static_cast<size_t>(steps * world));
  }

  Launched job;
  int world = 2;
  std::string adopt_within = std::to_string(absl::ToInt64Seconds(kPatience * TimeFactor()));
};

TEST_F(Adopt, JoinedTrainersKeepTheirProcessesAndTheirState) {
  constexpr int kSteps = 80;
  Start(Trainer(kSteps, kOnlyAtTheEnd));
  ASSERT_TRUE(AwaitStep(1, 25));
  const std::vector<pid_t> workers = WorkersStarted();
  ASSERT_EQ(workers.size(), 2u);
  KillAgent();

  EXPECT_EQ(Run(Trainer(kSteps, kOnlyAtTheEnd)), 0) << job.Read("err");

  EXPECT_EQ(WorkersStarted(), workers);
  const auto restores = Restores();
  ASSERT_TRUE(restores.contains(2)) << job.Read("outlast-runs/latest/events.jsonl");
  EXPECT_EQ(restores.at(2).second, "memory");
  // What was in flight is done again: a step, and one whose snapshot was still being taken.
  EXPECT_GE(restores.at(2).first, LastOf(1) - 1);
  ExpectRightSteps(kSteps);
  EXPECT_EQ(Events("agent_adopted").size(), 1u);
  EXPECT_EQ(job.Report()["exit_code"], 0);
  EXPECT_EQ(job.Report()["generations"], 2);
  EXPECT_EQ(job.Report()["restarts"], 0);
  EXPECT_FALSE(std::filesystem::exists(job.Path("outlast-runs/guardian-run.json")));
}

TEST_F(Adopt, TheReportShowsAnOutageWithoutLostWork) {
  constexpr int kSteps = 60;
  Start(Trainer(kSteps, kOnlyAtTheEnd));
  ASSERT_TRUE(AwaitStep(1, 25));
  const std::string run_dir = job.Path("outlast-runs/latest");
  KillAgent();
  const int64_t killed = MonotonicNanos();
  Clock::Real().SleepFor(absl::Milliseconds(400));  // the outage
  const int64_t outage = MonotonicNanos() - killed;
  ASSERT_EQ(Run(Trainer(kSteps, kOnlyAtTheEnd)), 0) << job.Read("err");

  const auto report = BuildReport({{run_dir}});

  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_EQ(report->timeline.interruptions.size(), 1u);
  const Interruption& it = report->timeline.interruptions[0];
  EXPECT_EQ(it.fault_class, "agent lost");
  EXPECT_EQ(it.step, -1);
  EXPECT_EQ(it.steps_lost, 0);
  EXPECT_GE(it.detected_ns - it.failed_ns, outage);
  EXPECT_GE(report->timeline.in(JobState::kRecovery), outage * 9 / 10);  // but a step in flight
  EXPECT_LT(report->timeline.in(JobState::kLostWork), outage / 2);
  EXPECT_EQ(report->timeline.in(JobState::kHangWait), 0);
}

TEST_F(Adopt, AgainWhenTheNextAgentIsKilledToo) {
  constexpr int kSteps = 90;
  Start(Trainer(kSteps, kOnlyAtTheEnd));
  ASSERT_TRUE(AwaitStep(1, 15));
  const std::vector<pid_t> workers = WorkersStarted();
  KillAgent();
  Start(Trainer(kSteps, kOnlyAtTheEnd));
  ASSERT_TRUE(AwaitStep(2, 40)) << job.Read("err");
  KillAgent();

  EXPECT_EQ(Run(Trainer(kSteps, kOnlyAtTheEnd)), 0) << job.Read("err");

  EXPECT_EQ(WorkersStarted(), workers);
  EXPECT_GE(Restores()[3].first, LastOf(2) - 1);
  ExpectRightSteps(kSteps);
  EXPECT_EQ(Events("agent_adopted").size(), 2u);
}

TEST_F(Adopt, AWorkerThatDiedMeanwhileIsReplacedAndTheOthersAreNot) {
  constexpr int kSteps = 60;
  Start(Trainer(kSteps, 10));
  ASSERT_TRUE(AwaitStep(1, 15));
  const std::vector<pid_t> workers = WorkersStarted();
  KillAgent();
  kill(workers[1], SIGKILL);
  EXPECT_EQ(CountAliveAfter({workers[1]}, kPatience), 0);

  EXPECT_EQ(Run(Trainer(kSteps, 10)), 0) << job.Read("err");

  const std::vector<pid_t> started = WorkersStarted();
  EXPECT_EQ(started.size(), 3u);
  EXPECT_EQ(std::count(started.begin(), started.end(), workers[0]), 1);
  EXPECT_EQ(Restores()[2].second, "memory");
  ExpectRightSteps(kSteps);
  EXPECT_EQ(Events("saved").back()["step"], kSteps);
}

// --- With what else a job may have ---

// The agent stands still as one does that is dying and gives its memory back: it frees no buffer.
TEST_F(Adopt, SavesThatFallDueWhileTheAgentDiesCostNoStepMore) {
  constexpr int kSteps = 90;
  Start(Trainer(kSteps, 5));
  ASSERT_TRUE(AwaitStep(1, 22));
  kill(job.pid(), SIGSTOP);
  ASSERT_TRUE(AwaitStep(1, 62));
  KillAgent();

  EXPECT_EQ(Run(Trainer(kSteps, 5)), 0) << job.Read("err");

  EXPECT_GE(Restores()[2].first, LastOf(1) - 2);
  EXPECT_EQ(Restores()[2].second, "memory");
  ExpectRightSteps(kSteps);
}

// Although no other checkpoint falls due before the end.
TEST_F(Adopt, AnUploadThatWasCutOffIsMadeByTheNextAgent) {
  std::vector<std::string> trainer = Trainer(90, 50);
  trainer[Index(trainer, "--state-mb") + 1] = "2";
  trainer[Index(trainer, "--step-ms") + 1] = "20";
  // A shard in some 4 s: the job ends before it would be there.
  for (const char* word : {"--remote", "mount", "--remote-every", "50", "--remote-rate", "300000"})
    trainer.emplace_back(word);
  Start(trainer);
  ASSERT_TRUE(Await([&] { return job.Count("mount", "/step-") > 0; })) << job.Read("err");
  KillAgent();
  EXPECT_EQ(job.Count("mount", "MANIFEST.json"), 0);

  EXPECT_EQ(Run(trainer), 0) << job.Read("err");

  EXPECT_EQ(Events("agent_adopted").size(), 1u) << job.Read("err");
  std::vector<int64_t> uploaded;
  for (const auto& event : Events("uploaded")) uploaded.push_back(event["step"]);
  EXPECT_THAT(uploaded, ElementsAre(50, 90));
  EXPECT_TRUE(Events("upload_failed").empty());
}

class AdoptTemplate : public Adopt {
 protected:
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "a template has one thread";
#endif
    job.Write("trigger", "");
  }
  // Rank 0 dies once "trigger" says "now".
  void StartJoined() {
    const std::string program = testing::BuildFolder() / "outlast_template_trainer";
    Start({program, "join", "trigger", "now"}, {"--template", program + " as-template"});
  }
  pid_t AwaitTemplate() {
    EXPECT_TRUE(Await([&] { return !job.Read("waits").empty(); })) << job.Read("err");
    EXPECT_TRUE(Await([&] { return !Events("template_ready").empty(); })) << job.Read("err");
    return Events("template_ready").empty() ? 0 : Events("template_ready")[0]["pid"].get<pid_t>();
  }
};

TEST_F(AdoptTemplate, StaysWarmAndForksTheRankThatDiedMeanwhile) {
  StartJoined();
  const pid_t warm = AwaitTemplate();
  const std::vector<pid_t> workers = WorkersStarted();
  KillAgent();
  job.Write("trigger", "now");
  EXPECT_EQ(CountAliveAfter({workers.at(0)}, kPatience), 0);
  EXPECT_TRUE(is_alive(warm));
  StartJoined();

  EXPECT_EQ(job.Wait().code, 0) << job.Read("err");
  ASSERT_EQ(Events("worker_started").size(), 3u);
  EXPECT_EQ(Events("worker_started")[2].value("from", ""), "template");
  EXPECT_EQ(job.ReadPids("setups").size(), 3u);  // two ranks and one template
  EXPECT_FALSE(is_alive(warm));
}

TEST_F(AdoptTemplate, IsMadeAnewWhenItDiedMeanwhile) {
  StartJoined();
  const pid_t warm = AwaitTemplate();
  KillAgent();
  kill(warm, SIGKILL);
  EXPECT_EQ(CountAliveAfter({warm}, kPatience), 0);
  ASSERT_TRUE(Await([&] { return job.ReadPids("setups").size() == 4; }));  // without an agent
  StartJoined();
  ASSERT_TRUE(Await([&] { return Events("template_ready").size() == 2; })) << job.Read("err");
  job.Write("trigger", "now");

  EXPECT_EQ(job.Wait().code, 0) << job.Read("err");
}

TEST_F(AdoptTemplate, EndsWithTheWorkersWhenNobodyComes) {
  adopt_within = "0.3";
  StartJoined();
  std::vector<pid_t> pids = {AwaitTemplate(), Guardian()};
  for (const pid_t worker : WorkersStarted()) pids.push_back(worker);
  KillAgent();

  EXPECT_EQ(CountAliveAfter(pids, absl::Seconds(3)), 0);
}

std::vector<std::string> Watched(std::vector<std::string> trainer) {
  for (const std::string& word : {std::string("--watch-floor"), std::to_string(0.5 * TimeFactor())})
    trainer.push_back(word);
  return trainer;
}

// For longer than the watch's limit nobody trains.
TEST_F(Adopt, TheTimeWithoutAnAgentIsNoHang) {
  constexpr int kSteps = 150;
  Start(Watched(Trainer(kSteps, kOnlyAtTheEnd)));
  ASSERT_TRUE(AwaitStep(1, 60));
  KillAgent();
  Clock::Real().SleepFor(absl::Milliseconds(700) * TimeFactor());

  EXPECT_EQ(Run(Watched(Trainer(kSteps, kOnlyAtTheEnd))), 0) << job.Read("err");

  EXPECT_TRUE(Events("verdict").empty()) << job.Read("err");
  EXPECT_TRUE(Events("fault").empty()) << job.Read("err");
  EXPECT_EQ(WorkersStarted().size(), 2u);
}

// It takes the 10 s that a rank has for coming back.
TEST_F(Adopt, ARankThatHungBeforeIsNamedAndReplaced) {
  constexpr int kSteps = 60;
  std::vector<std::string> trainer = Watched(Trainer(kSteps, kOnlyAtTheEnd));
  trainer.insert(trainer.end(), {"--stall", "data:1:20"});
  Start(trainer);
  ASSERT_TRUE(Await([&] { return !job.Read("log.stall").empty(); }));
  const std::vector<pid_t> workers = WorkersStarted();
  KillAgent();

  EXPECT_EQ(Run(trainer), 0) << job.Read("err");

  ASSERT_EQ(Events("fault").size(), 1u) << job.Read("err");
  const nlohmann::json fault = Events("fault")[0];
  EXPECT_EQ(fault["class"], "hang");
  EXPECT_EQ(fault["rank"], 1);
  EXPECT_EQ(fault["found_by"], "adoption");
  EXPECT_THAT(fault["detail"].get<std::string>(), HasSubstr("in data of step"));
  const std::vector<pid_t> started = WorkersStarted();
  EXPECT_EQ(started.size(), 3u);
  EXPECT_EQ(std::count(started.begin(), started.end(), workers[0]), 1);
}

TEST_F(Adopt, AStopRightAfterTheAdoptionSavesAndEnds) {
  constexpr int kSteps = 100'000;
  const std::pair<int, int> kCodes[] = {{SIGTERM, 80}, {SIGINT, 130}};
  for (const auto& [signal, code] : kCodes) {
    SCOPED_TRACE(signal);
    std::filesystem::remove_all(job.Path("ckpt"));
    std::filesystem::remove(job.Path("log"));
    Start(Trainer(kSteps, kOnlyAtTheEnd));
    ASSERT_TRUE(AwaitStep(1, 15));
    std::vector<pid_t> pids = WorkersStarted();
    pids.push_back(Guardian());
    KillAgent();
    Start(Trainer(kSteps, kOnlyAtTheEnd));
    ASSERT_TRUE(Await([&] { return Events("agent_adopted").size() == 1; }));
    kill(job.pid(), signal);

    EXPECT_EQ(job.Wait().code, code) << job.Read("err");
    EXPECT_EQ(CountAliveAfter(pids, absl::Seconds(1)), 0);
    ASSERT_FALSE(Events("saved").empty()) << job.Read("err");
    EXPECT_GE(Events("saved").back()["step"], LastOf(1) - 2);
  }
}

TEST_F(Adopt, ASignalToTheGuardianOfAnAgentIsTheAgentsAffair) {
  constexpr int kSteps = 60;
  Start(Trainer(kSteps, kOnlyAtTheEnd));
  ASSERT_TRUE(AwaitStep(1, 15));
  KillAgent();
  Start(Trainer(kSteps, kOnlyAtTheEnd));
  ASSERT_TRUE(Await([&] { return Events("agent_adopted").size() == 1; }));
  kill(Guardian(), SIGTERM);

  EXPECT_EQ(job.Wait().code, 0) << job.Read("err");
  EXPECT_EQ(WorkersStarted().size(), 2u);
}

TEST_F(Adopt, AfterAKillOfTheGuardianTooTheNextAgentBeginsAnewFromDisk) {
  constexpr int kSteps = 400;
  for (const bool at_once : {false, true}) {
    SCOPED_TRACE(at_once);
    std::filesystem::remove_all(job.Path("ckpt"));
    std::filesystem::remove(job.Path("log"));
    Start(Trainer(kSteps, 10));
    ASSERT_TRUE(AwaitStep(1, 25));
    ASSERT_TRUE(Await([&] { return !Events("saved").empty(); }));
    std::vector<pid_t> pids = WorkersStarted();
    const pid_t guardian = Guardian();
    pids.push_back(guardian);
    if (at_once) kill(guardian, SIGKILL);
    KillAgent();
    kill(guardian, SIGKILL);
    EXPECT_EQ(CountAliveAfter(pids, absl::Seconds(1)), 0);
    std::filesystem::remove(job.Path("log"));

    EXPECT_EQ(Run(Trainer(kSteps, 10)), 0) << job.Read("err");
    EXPECT_TRUE(Events("agent_adopted").empty());
    EXPECT_EQ(Restores()[1].second, "disk");
  }
}

TEST_F(Adopt, StatusSaysThatTheWorkersWait) {
  world = 1;
  job.MakeFifo("ready");
  Start({"sh", "-c", "echo ready >ready; sleep 300"});
  job.AwaitFifo("ready");
  const pid_t guardian = Guardian();
  KillAgent();
  const std::string command =
      "cd " + job.folder() + " && exec " + testing::ToolPath() + " status >shown";

  EXPECT_EQ(std::system(command.c_str()), 0);
  EXPECT_THAT(job.Read("shown"), HasSubstr("job run: waiting"));
  EXPECT_THAT(job.Read("shown"), HasSubstr("wait for the same command to adopt them"));
  EXPECT_TRUE(is_alive(guardian));
}

// --- Plain programs ---

// Rank 1 fails once it is let go; so the code tells whether its end was heard of.
std::string PlainScript() {
  return "echo $$ >>pids; ulimit -n >limit.$RANK; echo ready >ready.$RANK; cat go.$RANK "
         ">/dev/null; exit $((RANK * 7))";
}

class AdoptPlain : public Adopt {
 protected:
  AdoptPlain() {
    for (const char* fifo : {"ready.0", "ready.1", "go.0", "go.1"}) job.MakeFifo(fifo);
  }
  const std::vector<std::string> script = {"sh", "-c", PlainScript()};
  const std::vector<std::string> flags = {"--max-restarts", "0"};
  void AwaitReady() {
    job.AwaitFifo("ready.0");
    job.AwaitFifo("ready.1");
  }
  void LetGo() {
    job.Write("go.0", "now\n");
    job.Write("go.1", "now\n");
  }
};

TEST_F(AdoptPlain, ProgramsRunOnAndTheirCodesCount) {
  Start(script, flags);
  AwaitReady();
  KillAgent();
  Start(script, flags);
  ASSERT_TRUE(Await([&] { return Events("agent_adopted").size() == 1; }));
  LetGo();

  EXPECT_EQ(job.Wait().code, 7) << job.Read("err");
  EXPECT_EQ(job.ReadPids("pids").size(), 2u);
  rlimit given{};  // what the guardian needs for itself is not the workers'
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &given), 0);
  EXPECT_EQ(job.Read("limit.0"), std::to_string(given.rlim_cur) + "\n");
}

TEST_F(AdoptPlain, ProgramsThatEndedMeanwhileAreHeardOf) {
  Start(script, flags);
  AwaitReady();
  const std::vector<pid_t> pids = job.ReadPids("pids");
  KillAgent();
  LetGo();
  ASSERT_TRUE(Await([&] { return !is_alive(pids.at(0)) && !is_alive(pids.at(1)); }));

  EXPECT_EQ(Run(script, flags), 7) << job.Read("err");
  EXPECT_EQ(job.ReadPids("pids").size(), 2u);
}

TEST_F(Adopt, EndsEverythingWhenNoAgentComesInTime) {
  world = 1;
  adopt_within = "0.3";
  job.MakeFifo("ready");
  Start({"sh", "-c", "echo $$ >>pids; " + HidingHelpers("pids") + "echo ready >ready; wait"});
  job.AwaitFifo("ready");
  std::vector<pid_t> pids = job.ReadPids("pids");
  EXPECT_EQ(pids.size(), 5u);
  pids.push_back(Guardian());
  KillAgent();

  EXPECT_EQ(CountAliveAfter(pids, absl::Seconds(3)), 0);
  EXPECT_FALSE(std::filesystem::exists(job.Path("outlast-runs/guardian-run.json")));
}

TEST_F(Adopt, WaitingWorkersEndWhenTheGuardianIsTerminated) {
  world = 1;
  job.MakeFifo("ready");
  Start({"sh", "-c", "echo $$ >>pids; " + HidingHelpers("pids") + "echo ready >ready; wait"});
  job.AwaitFifo("ready");
  std::vector<pid_t> pids = job.ReadPids("pids");
  const pid_t guardian = Guardian();
  pids.push_back(guardian);
  KillAgent();
  kill(guardian, SIGTERM);

  EXPECT_EQ(CountAliveAfter(pids, absl::Seconds(3)), 0);
}

TEST_F(Adopt, AJobThatIsStoppingIsNotWaitedFor) {
  world = 1;
  job.MakeFifo("ready");
  job.MakeFifo("asked");
  Start({"sh", "-c",
         "trap 'echo asked >asked' TERM; echo $$ >>pids; echo ready >ready; "
         "while :; do sleep 300 & wait; done"},
        {"--grace", "60"});
  job.AwaitFifo("ready");
  std::vector<pid_t> pids = job.ReadPids("pids");
  pids.push_back(Guardian());
  kill(job.pid(), SIGTERM);
  EXPECT_EQ(job.AwaitFifo("asked"), "asked");
  KillAgent();

  EXPECT_EQ(CountAliveAfter(pids, absl::Seconds(2)), 0);
}

TEST_F(Adopt, EndsWithTheGuardianAsBefore) {
  world = 1;
  job.MakeFifo("ready");
  const std::vector<std::string> script = {
      "sh", "-c", "echo $$ >>pids; " + HidingHelpers("pids") + "echo ready >ready; wait"};
  Start(script);
  job.AwaitFifo("ready");
  const pid_t guardian = Guardian();
  KillAgent();
  Start(script);
  ASSERT_TRUE(Await([&] { return Events("agent_adopted").size() == 1; }));
  kill(guardian, SIGKILL);

  EXPECT_EQ(job.Wait().code, 84);
  EXPECT_THAT(job.Read("err"), HasSubstr("was killed"));
  EXPECT_EQ(CountAliveAfter(job.ReadPids("pids"), absl::Seconds(1)), 0);
}

TEST_F(Adopt, RefusesAnotherAgentWhileTheFirstLives) {
  job.MakeFifo("ready");
  world = 1;
  const std::vector<std::string> script = {"sh", "-c", "echo ready >ready; sleep 300"};
  Start(script);
  job.AwaitFifo("ready");
  const pid_t agent = job.pid();
  std::string command = "exec " + testing::ToolPath() + " run -n 1 --on-agent-death adopt" +
                        " --adopt-within " + adopt_within +
                        " -- sh -c 'echo ready >ready; sleep 300' 2>second";
  command = "cd " + job.folder() + " && " + command;
  const int status = std::system(command.c_str());

  EXPECT_EQ(WEXITSTATUS(status), 85);
  EXPECT_THAT(job.Read("second"),
              HasSubstr("its agent, process " + std::to_string(agent) + ", lives"));
  EXPECT_TRUE(is_alive(agent));
}

TEST_F(AdoptPlain, AnotherCommandLineIsRefusedAndNamed) {
  Start(script, flags);
  AwaitReady();
  KillAgent();

  EXPECT_EQ(Run({"sh", "-c", "true"}, flags), 85);
  EXPECT_THAT(job.Read("err"), HasSubstr("the command 'sh -c true', while it runs 'sh -c echo"));
  EXPECT_EQ(Run(script, {"--max-restarts", "1"}), 85);
  EXPECT_THAT(job.Read("err"), HasSubstr("--max-restarts 1', while it runs with '-n 2"));
  EXPECT_EQ(Run(script, {"--max-restarts", "0", "--fresh"}), 85);
  EXPECT_THAT(job.Read("err"), HasSubstr("--fresh begins anew, while its workers live"));
  world = 3;
  EXPECT_EQ(Run(script, flags), 85);
  EXPECT_THAT(job.Read("err"), HasSubstr("-n 3, while it runs with -n 2"));
  world = 2;

  Start(script, flags);
  LetGo();
  EXPECT_EQ(job.Wait().code, 7);
}

// The kill finds the agent between any two of its orders. Sleeps only choose the moment.
TEST_F(Adopt, WheneverTheAgentIsKilledTheNextOneGoesOnOrBeginsAnew) {
  constexpr int kSteps = 30;
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  constexpr int kRuns = kSanitized ? 2 : 6;
  for (int run = 0; run < kRuns; ++run) {
    SCOPED_TRACE(run);
    std::filesystem::remove_all(job.Path("ckpt"));
    std::filesystem::remove(job.Path("log"));
    for (int kills = 0; kills < 3; ++kills) {
      Start(Trainer(kSteps, 10));
      Clock::Real().SleepFor(absl::Microseconds(random() % 120'000));
      kill(job.pid(), SIGKILL);
      const int code = job.Wait().code;
      EXPECT_TRUE(code == 137 || code == 0) << code << job.Read("err");
    }
    ASSERT_EQ(Run(Trainer(kSteps, 10)), 0) << job.Read("err");
    std::set<std::pair<int64_t, int>> seen;
    for (const LoggedStep& one : Steps()) seen.insert({one.step, one.rank});
    EXPECT_EQ(seen.size(), static_cast<size_t>(kSteps * world));
    EXPECT_FALSE(std::filesystem::exists(job.Path("outlast-runs/guardian-run.json")))
        << job.Read("err") << job.Read("outlast-runs/guardian-run.json");
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace outlast
