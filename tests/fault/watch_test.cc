// Hangs of real processes, found by the agent alone: a trainer with four ranks whose steps take
// some 15 ms, under a floor of 1 s and polls of 0.1 s.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <random>
#include <thread>
#include <tuple>

#include "outlast/blackbox/progress.h"
#include "outlast/blackbox/segment.h"
#include "tests/fault/launched.h"

namespace outlast {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::kSanitized;
using testing::Launched;
using ::testing::SizeIs;
using testing::TimeFactor;

constexpr int kWorld = 4;
constexpr double kFloor = 1, kFirst = 4, kPoll = 0.1;
// A plain verdict takes the deadline, two polls, and on a busy machine its share of the cores.
constexpr double kFoundWithin = kFloor + 2 * kPoll + 0.5;

struct Deed {
  std::string what;
  int rank = 0;
  int64_t step = 0;
  double limit = 0, takes = 0;
};

std::string Text(const Deed& deed) {
  return fmt::format("{}:{}:{}:{}:{}", deed.what, deed.rank, deed.step, deed.limit, deed.takes);
}

double Seconds(std::filesystem::file_time_type time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

// What the agent wrote of one verdict, and what it had written by then.
struct Finding {
  json verdict;
  std::string folder;        // of the evidence
  std::string stacks;        // folder
  double written_at = 0;     // on the clock of files
  double stacks_at = 0;      // on the record's clock
  bool ended_early = false;  // a culprit's process ended before the stacks were written
};

class HangJob {
 public:
  void Start(const std::vector<Deed>& deeds, int64_t steps, bool observe = false,
             double first = kFirst) {
    std::vector<std::string> arguments = {"-n",
                                          "4",
                                          "--max-restarts",
                                          "100",
                                          "--",
                                          testing::BuildFolder() / "tests" / "outlast_hang_trainer",
                                          "--folder",
                                          job_.folder(),
                                          "--steps",
                                          std::to_string(steps),
                                          "--floor",
                                          std::to_string(kFloor * TimeFactor()),
                                          "--first",
                                          std::to_string(first * TimeFactor())};
    if (observe) arguments.push_back("--observe");
    for (const Deed& deed : deeds) {
      arguments.push_back("--do");
      arguments.push_back(Text(deed));
    }
    steps_ = steps;
    job_.Start(arguments);
  }
  void Run(const std::vector<Deed>& deeds, int64_t steps, bool observe = false,
           double first = kFirst) {
    Start(deeds, steps, observe, first);
    ExpectGoodEnd();
  }

  // Exit code 0, and the sum that all steps of all ranks give, each counted once.
  void ExpectGoodEnd() {
    EXPECT_EQ(job_.Wait().code, 0) << job_.Read("err");
    int64_t sum = 0;
    for (int64_t step = 0; step < steps_; ++step) sum += (1 + 2 + 3 + 4) * (step % 7);
    EXPECT_EQ(job_.Read("result"), fmt::format("{} {}", sum, sum));
  }

  Launched& job() { return job_; }
  std::string RunDir() const { return job_.Path("outlast-runs/latest"); }

  std::vector<json> Events(std::string_view name = {}) const {
    std::vector<json> events;
    std::istringstream lines(job_.Read("outlast-runs/latest/events.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      json event = json::parse(line, nullptr, false);
      if (event.is_object() && (name.empty() || event["event"] == name)) events.push_back(event);
    }
    return events;
  }
  // Waits until the record holds `count` events of this name, or the job's end.
  bool Await(std::string_view name, size_t count) const {
    while (Events(name).size() < count) {
      if (!Events("finish").empty()) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return true;
  }
  void AwaitStep(int64_t step) const {
    while (Events("saved").empty() || Events("saved").back()["step"] < step) {
      ASSERT_THAT(Events("finish"), IsEmpty());
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  std::vector<pid_t> Pids() const {
    std::map<int, pid_t> pids;
    for (const json& event : Events("worker_started")) pids[event["rank"]] = event["pid"];
    std::vector<pid_t> list;
    for (const auto& [rank, pid] : pids) list.push_back(pid);
    return list;
  }

  std::vector<Finding> Findings() const {
    std::vector<Finding> findings;
    for (const json& event : Events()) {
      const std::string name = event["event"];
      if (name == "verdict") {
        Finding finding;
        finding.folder = event["folder"];
        const std::string path = finding.folder + "/verdict.json";
        std::ifstream file(path);
        finding.verdict = json::parse(file, nullptr, false);
        finding.written_at = Seconds(std::filesystem::last_write_time(path));
        findings.push_back(std::move(finding));
      } else if (name == "stacks" && !findings.empty() && findings.back().stacks.empty()) {
        findings.back().stacks = event["folder"];
        findings.back().stacks_at = event["t"];
      } else if (name == "worker_ended" && !findings.empty() && findings.back().stacks.empty()) {
        findings.back().ended_early = true;
      }
    }
    return findings;
  }
  double DoneAt(const Deed& deed) const {
    const std::string mark = fmt::format("{}.{}.{}", deed.what, deed.rank, deed.step);
    return Seconds(std::filesystem::last_write_time(job_.Path(mark)));
  }

 private:
  Launched job_;
  int64_t steps_ = 0;
};

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

struct Expected {
  std::string verdict_class, section;
};
Expected ExpectedOf(const std::string& what) {
  if (what == "data") return {"stopped", "data"};
  if (what == "backward") return {"stopped", "backward"};
  if (what == "reduce") return {"stopped", "AllReduceSum"};
  return {"data_loader_stall", "data"};
}

// The box that was saved shows the culprit in the section, and the stacks of it and of one that
// waits are there, all before a signal went out.
void ExpectEvidence(const Deed& deed, const Finding& finding) {
  EXPECT_FALSE(finding.ended_early) << finding.folder;
  const UniqueFd box(
      open(fmt::format("{}/rank{}.box", finding.folder, deed.rank).c_str(), O_RDONLY | O_CLOEXEC));
  const auto view = SegmentView::Open(box.get());
  ASSERT_TRUE(view.ok()) << view.status();
  const ProgressSnapshot progress = ReadProgress(*view, 0);
  EXPECT_EQ(progress.step, static_cast<uint64_t>(deed.step));
  ASSERT_FALSE(progress.sections.empty());
  EXPECT_EQ(progress.sections.back().name, ExpectedOf(deed.what).section);

  const json& slots = finding.verdict["stacks"];
  ASSERT_GE(slots.size(), 2u);
  EXPECT_EQ(slots[0], deed.rank);
  for (size_t i = 0; i < 2; ++i) {
    const std::string text =
        ReadFile(fmt::format("{}/rank{}.txt", finding.stacks, slots[i].get<int>()));
    const bool is_stopped = i == 0 && deed.what != "read" && deed.what != "stuck";
    // A waiter looks up from its futex now and then: it may be running at that moment.
    EXPECT_THAT(text, HasSubstr(is_stopped ? "State:\tT" : "State:\t")) << finding.stacks;
    if (access("/usr/bin/eu-stack", X_OK) == 0) {
      EXPECT_THAT(text, HasSubstr("#0"));
      EXPECT_THAT(text, HasSubstr(i == 1 ? "AllReduce" : "Train")) << finding.stacks;
    }
  }
}

// One verdict for each deed, in order, each right in rank, class, section and step. Returns how
// long each took, from the stall to the verdict on disk.
std::vector<double> ExpectOneVerdictEach(const HangJob& job, const std::vector<Deed>& deeds) {
  const std::vector<Finding> findings = job.Findings();
  EXPECT_THAT(findings, SizeIs(deeds.size()));
  std::vector<double> took;
  for (size_t i = 0; i < std::min(findings.size(), deeds.size()); ++i) {
    const json& verdict = findings[i].verdict;
    SCOPED_TRACE(Text(deeds[i]) + " " + verdict.dump(2));
    EXPECT_EQ(verdict["class"], ExpectedOf(deeds[i].what).verdict_class);
    EXPECT_THAT(verdict["culprits"], SizeIs(1));
    const json& culprit = verdict["culprits"][0];
    EXPECT_EQ(culprit["rank"], deeds[i].rank);
    EXPECT_EQ(culprit["section"], ExpectedOf(deeds[i].what).section);
    EXPECT_EQ(culprit["step"], deeds[i].step);
    ExpectEvidence(deeds[i], findings[i]);
    took.push_back(findings[i].written_at - job.DoneAt(deeds[i]));
    EXPECT_LE(took.back(), kFoundWithin * TimeFactor());
  }
  return took;
}

// --- Each kind of hang ---

// Twenty of each kind in five jobs, ranks and order drawn by chance: within a job the stalls come
// one after the other, each found, acted upon, and trained past.
TEST(Watch, NamesTheRankThatTheOthersWaitForWhenSeveralDeadlinesExpire) {
  std::mt19937 random(20240607);
  std::vector<double> took;
  const int jobs = kSanitized ? 1 : 5;
  const int of_each = kSanitized ? 2 : 4;
  for (int round = 0; round < jobs; ++round) {
    std::vector<Deed> deeds;
    for (const char* what : {"data", "backward", "reduce", "read"}) {
      for (int i = 0; i < of_each; ++i) deeds.push_back({.what = what});
    }
    std::shuffle(deeds.begin(), deeds.end(), random);
    int64_t step = 35;
    for (Deed& deed : deeds) {
      deed.rank = static_cast<int>(random() % kWorld);
      deed.step = step;
      step += 25 + static_cast<int64_t>(random() % 10);
    }
    HangJob job;
    job.Run(deeds, step);
    const std::vector<double> times = ExpectOneVerdictEach(job, deeds);
    took.insert(took.end(), times.begin(), times.end());
    for (const json& event : job.Events("fault")) EXPECT_EQ(event["class"], "hang") << event;
    if (HasFailure()) break;
  }
  if (took.empty()) return;
  std::sort(took.begin(), took.end());
  RecordProperty("verdicts", static_cast<int>(took.size()));
  fmt::print("{} verdicts, after {:.2f} s (median), {:.2f} s (max)\n", took.size(),
             took[took.size() / 2], took.back());
}

// SIGKILL at once: neither the abort's grace (10 s) nor that of SIGTERM (2 s) is waited for.
TEST(Watch, AStoppedRankIsKilledAtOnceAndItsSlotRefilled) {
  HangJob job;
  const std::vector<Deed> deeds = {{.what = "backward", .rank = 2, .step = 50}};
  job.Run(deeds, 80);
  ExpectOneVerdictEach(job, deeds);
  const std::vector<json> started = job.Events("worker_started");
  ASSERT_THAT(started, SizeIs(kWorld + 1));
  EXPECT_EQ(started.back()["rank"], 2);
  const std::vector<json> ended = job.Events("worker_ended");
  ASSERT_FALSE(ended.empty());
  EXPECT_EQ(ended[0]["rank"], 2);
  EXPECT_EQ(ended[0]["signal"], SIGKILL);
  EXPECT_LE(ended[0]["t"].get<double>() - job.Findings()[0].stacks_at, 0.5 * TimeFactor());
  const std::vector<json> restored = job.Events("restored");
  ASSERT_THAT(restored, SizeIs(2));
  EXPECT_EQ(restored[1]["source"], "memory");
  EXPECT_EQ(restored[1]["step"], 50);  // the steps that were whole; none of them is lost
}

// Nothing ends this read: the abort's grace passes, then the process is replaced.
TEST(Watch, ABlockedReadIsReplacedThroughTheLadder) {
  HangJob job;
  const std::vector<Deed> deeds = {{.what = "stuck", .rank = 1, .step = 50}};
  job.Run(deeds, 80);
  ExpectOneVerdictEach(job, deeds);
  const std::vector<json> ended = job.Events("worker_ended");
  ASSERT_THAT(ended, SizeIs(kWorld + 1));
  EXPECT_EQ(ended[0]["rank"], 1);
  EXPECT_EQ(ended[0]["signal"], SIGTERM);
  EXPECT_EQ(ended[0]["by_us"], true);
  EXPECT_THAT(job.Events("fault"), SizeIs(1));
}

// --- What is no hang ---

// And nothing is learned from the pause: who hangs later is found as soon as ever.
TEST(Watch, AllRanksStoppedTogetherAreFrozenNotHung) {
  HangJob job;
  const std::vector<Deed> deeds = {{.what = "data", .rank = 1, .step = 300}};
  job.Start(deeds, 330);
  job.AwaitStep(50);
  const std::vector<pid_t> pids = job.Pids();
  ASSERT_THAT(pids, SizeIs(kWorld));
  for (const pid_t pid : pids) kill(pid, SIGSTOP);
  std::this_thread::sleep_for(std::chrono::duration<double>(3 * kFloor * TimeFactor()));
  for (const pid_t pid : pids) kill(pid, SIGCONT);
  job.AwaitStep(280);
  EXPECT_THAT(job.Events("verdict"), IsEmpty());
  EXPECT_THAT(job.Events("fault"), IsEmpty());
  EXPECT_THAT(job.Events("worker_started"), SizeIs(kWorld));
  job.ExpectGoodEnd();
  ExpectOneVerdictEach(job, deeds);
}

TEST(Watch, ObserveModeTellsOfAStopAndOfItsEndAndKillsNobody) {
  HangJob job;
  const std::vector<Deed> deeds = {{.what = "data", .rank = 3, .step = 50},
                                   {.what = "data", .rank = 0, .step = 100}};
  job.Start(deeds, 150, /*observe=*/true);
  for (size_t i = 0; i < deeds.size(); ++i) {  // and it is armed again
    ASSERT_TRUE(job.Await("stacks", i + 1));
    kill(job.Pids()[static_cast<size_t>(deeds[i].rank)], SIGCONT);
  }
  job.ExpectGoodEnd();
  ExpectOneVerdictEach(job, deeds);
  EXPECT_THAT(job.Events("fault"), IsEmpty());
  EXPECT_THAT(job.Events("worker_started"), SizeIs(kWorld));
  EXPECT_THAT(job.job().Read("err"), HasSubstr("moves again"));
}

// O25 (a, b) in small: what is declared is firm, both ways.
TEST(Watch, ADeclaredSectionIsQuietWithinItsLimit) {
  HangJob job;
  // Both take far longer than a step, and than the floor.
  job.Run({{.what = "section",
            .rank = 1,
            .step = 40,
            .limit = 4 * TimeFactor(),
            .takes = 3.2 * TimeFactor()},
           {.what = "save",
            .rank = 2,
            .step = 80,
            .limit = 4 * TimeFactor(),
            .takes = 3.2 * TimeFactor()}},
          110);
  EXPECT_THAT(job.Events("verdict"), IsEmpty());
  EXPECT_THAT(job.Events("fault"), IsEmpty());
}

TEST(Watch, ADeclaredSectionOverItsLimitIsNamed) {
  for (const auto& [what, section, found] :
       {std::tuple{"section", "evaluate", "section_over_limit"},
        {"save", "save", "checkpoint_stall"}}) {
    HangJob job;
    const Deed deed{
        .what = what, .rank = 1, .step = 40, .limit = 2 * TimeFactor(), .takes = 4 * TimeFactor()};
    job.Run({deed}, 80);
    const std::vector<Finding> findings = job.Findings();
    ASSERT_THAT(findings, SizeIs(1));
    const json& verdict = findings[0].verdict;
    EXPECT_EQ(verdict["class"], found);
    EXPECT_EQ(verdict["confidence"], "certain");
    ASSERT_THAT(verdict["culprits"], SizeIs(1));
    EXPECT_EQ(verdict["culprits"][0]["rank"], 1);
    EXPECT_EQ(verdict["culprits"][0]["section"], section);
    EXPECT_EQ(verdict["culprits"][0]["step"], 40);
    EXPECT_GE(findings[0].written_at - job.DoneAt(deed), deed.limit);
    EXPECT_LE(findings[0].written_at - job.DoneAt(deed),
              deed.limit + (2 * kPoll + 0.5) * TimeFactor());
  }
}

// O25 (d).
TEST(Watch, OneSlowStepIsQuiet) {
  HangJob job;
  job.Run({{.what = "slow", .rank = 2, .step = 50, .takes = 0.05},
           {.what = "slow", .rank = 0, .step = 70, .takes = 0.75 * kFloor * TimeFactor()}},
          100);
  EXPECT_THAT(job.Events("verdict"), IsEmpty());
}

// O24: what a dead process left open raises nothing.
TEST(Watch, AnOpenSectionOfADeadProcessRaisesNoAlarm) {
  HangJob job;
  job.Run({{.what = "die", .rank = 1, .step = 40, .limit = 1}}, 350);
  EXPECT_THAT(job.Events("verdict"), IsEmpty());
  const std::vector<json> commits = job.Events("commit");
  ASSERT_THAT(commits, SizeIs(2));
  const double healthy = job.Events("finish")[0]["t"].get<double>() - commits[1]["t"].get<double>();
  EXPECT_GE(healthy, 3.0);  // three times the section's limit
  EXPECT_THAT(job.Events("fault"), SizeIs(1));
}

// The machine is busy with other things: every rank is slow, and nobody hangs.
TEST(Watch, AHealthyJobOnABusyMachineIsLeftAlone) {
  std::atomic<bool> done = false;
  std::vector<std::thread> busy;
  for (int i = 0; i < kWorld; ++i) {
    busy.emplace_back([&done] {
      while (!done) {
      }
    });
  }
  HangJob job;
  job.Run({}, 300);
  done = true;
  for (std::thread& thread : busy) thread.join();
  EXPECT_THAT(job.Events("verdict"), IsEmpty());
  EXPECT_THAT(job.Events("fault"), IsEmpty());
}

// --- Asked for ---

TEST(Watch, QuitWritesTheStacksOfAllRanksAndTrainingGoesOn) {
  HangJob job;
  job.Start({}, 250);
  job.AwaitStep(30);
  kill(job.job().pid(), SIGQUIT);
  ASSERT_TRUE(job.Await("stacks", 1));
  job.ExpectGoodEnd();
  const std::string folder = job.Events("stacks")[0]["folder"];
  for (int rank = 0; rank < kWorld; ++rank) {
    const std::string text = ReadFile(fmt::format("{}/rank{}.txt", folder, rank));
    EXPECT_THAT(text, HasSubstr("State:"));
    if (access("/usr/bin/eu-stack", X_OK) == 0) {
      EXPECT_THAT(text, HasSubstr("Train"));
    }
  }
  EXPECT_THAT(job.Events("verdict"), IsEmpty());
  EXPECT_THAT(job.Events("worker_started"), SizeIs(kWorld));
}

}  // namespace
}  // namespace outlast
