// Cases of torture.txt that no other file has: real agents, real processes.
#include <dirent.h>

#include <algorithm>
#include <map>
#include <set>

#include "tests/fault/launched.h"

namespace outlast::testing {
namespace {

using ::testing::AnyOf;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::Lt;

std::string TortureTrainer() { return BuildFolder() / "outlast_torture_trainer"; }

absl::Duration Since(int64_t then_ns) { return absl::Nanoseconds(MonotonicNanos() - then_ns); }

TEST(Torture, APeerThatIgnoresTermIsKilledAtTheGrace) {
  Launched job;
  job.MakeFifo("ready");
  const int64_t started = MonotonicNanos();
  EXPECT_EQ(job.Run({"-n", "2", "--grace", "0.5", "--max-restarts", "0", "--", "sh", "-c",
                     "[ $RANK = 1 ] && { read line <ready; exit 3; }; trap '' TERM;"
                     "echo here >ready; while :; do sleep 0.01; done"}),
            3);
  EXPECT_GE(Since(started), absl::Milliseconds(500));
  EXPECT_LT(Since(started), absl::Seconds(5) * TimeFactor()) << "not some 30 s of our own";
  EXPECT_EQ(job.Report()["root"]["rank"], 1);
}

TEST(Torture, ARankThatLeavesWithZeroWhileAPeerHangsIsAFault) {
  Launched job;
  EXPECT_EQ(job.Run({"-n", "2", "--early-exit-grace", "0.3", "--", TortureTrainer(), "leave", "."}),
            0)
      << job.Read("err");
  const nlohmann::json report = job.Report();
  ASSERT_EQ(report["faults"].size(), 1u) << report;
  EXPECT_EQ(report["faults"][0]["rank"], 0);
  EXPECT_EQ(report["faults"][0]["class"], "early exit");
}

// Groups are set by parent and child: a kill that comes right after the fork finds both in them.
TEST(Torture, AFailureAtTheMomentOfTheSpawnLeavesNobody) {
  for (int round = 0; round < (kSanitized ? 5 : 20); ++round) {
    SCOPED_TRACE(round);
    Launched job;
    EXPECT_EQ(
        job.Run({"-n", "4", "--grace", "0", "--max-restarts", "0", "--", "sh", "-c",
                 "[ $RANK = 0 ] && exit 3; echo $$ >>pids; sleep 300 & echo $! >>pids; wait"}),
        3);
    EXPECT_EQ(CountAliveAfter(job.ReadPids("pids"), absl::ZeroDuration()), 0);
  }
}

// 0 s, then a half to one: the third attempt of a program that fails at once has to wait.
TEST(Torture, ARestartStormBacksOff) {
  Launched job;
  EXPECT_EQ(job.Run({"-n", "1", "--max-restarts", "2", "--", "sh", "-c",
                     "date +%s%N >>attempts; exit $((TORCHELASTIC_RESTART_COUNT + 1))"}),
            83);
  std::istringstream times(job.Read("attempts"));
  const std::vector<int64_t> at{std::istream_iterator<int64_t>(times), {}};
  ASSERT_EQ(at.size(), 3u);
  EXPECT_GT(absl::Nanoseconds(at[2] - at[1]), absl::Milliseconds(490));
}

TEST(Torture, FlappingRootsStop) {
  Launched job;
  EXPECT_EQ(job.Run({"-n", "2", "--max-restarts", "1", "--", "sh", "-c",
                     "[ $RANK = $((TORCHELASTIC_RESTART_COUNT % 2)) ] && exit 3; exec sleep 60"}),
            83);
  const nlohmann::json report = job.Report();
  EXPECT_EQ(report["budget"], "1 of 1");
  ASSERT_EQ(report["faults"].size(), 2u);
  EXPECT_EQ(report["faults"][0]["rank"], 0);
  EXPECT_EQ(report["faults"][1]["rank"], 1);
}

TEST(Torture, ASignalInAnyPhaseIsServedOrSaidNotToBe) {
  // Who has not joined cannot save: 81.
  const std::map<std::string, int> codes = {
      {"init", 81}, {"warmup", 80}, {"evaluation", 80}, {"save", 80}};
  const int signals[] = {SIGTERM, SIGUSR1, SIGUSR2};
  int number = 0;
  for (const auto& [phase, code] : codes) {
    const int signal = signals[number++ % 3];
    SCOPED_TRACE(phase + " and signal " + std::to_string(signal));
    Launched job;
    job.Start({"-n", "2", "--grace", "10", "--", TortureTrainer(), phase, "."});
    while (job.Read(phase) != "here\nhere\n" && is_alive(job.pid()))
      Clock::Real().SleepFor(absl::Milliseconds(2));
    const int64_t asked = MonotonicNanos();
    kill(job.pid(), signal);
    EXPECT_EQ(job.Wait().code, code) << job.Read("err");
    EXPECT_LT(Since(asked), absl::Seconds(9) * TimeFactor()) << "not by the kill at its end";
    EXPECT_EQ(job.Report()["faults"].size(), 0u);
    EXPECT_THAT(job.Read("err"), HasSubstr("exit code " + std::to_string(code) + ": "));
    const nlohmann::json stop = job.Report()["stop"];
    EXPECT_EQ(stop["saved_step"].is_null(), code == 81) << stop;
    EXPECT_EQ(stop["service_seconds"].is_null(), code == 81) << stop;
  }
}

// Case O09: the phase is longer than the platform waits. What memory holds is saved all the same.
TEST(Torture, AStopInAPhaseThatOutlastsItsGraceSavesWhatMemoryHolds) {
  Launched job;
  job.Start({"-n", "2", "--grace", "1.5", "--stop-within", "6", "--kill-after", "8", "--",
             TortureTrainer(), "long", "."});
  while (job.Read("long") != "here\nhere\n" && is_alive(job.pid()))
    Clock::Real().SleepFor(absl::Milliseconds(2));
  const int64_t asked = MonotonicNanos();
  kill(job.pid(), SIGTERM);
  EXPECT_EQ(job.Wait().code, 80) << job.Read("err");
  const absl::Duration took = Since(asked);
  EXPECT_LT(took, absl::Seconds(8) * TimeFactor()) << "before the platform's kill";
  const nlohmann::json stop = job.Report()["stop"];
  const int64_t saved = stop["saved_step"];
  EXPECT_THAT(saved, AnyOf(9, 10)) << "the copy of 10 may not be whole yet: " << stop;
  EXPECT_THAT(job.Read("err"), HasSubstr("; saved step " + std::to_string(saved) + " in "));
  EXPECT_GT(stop["service_seconds"], 0.5) << "the step was waited for: " << stop;
  EXPECT_LT(stop["service_seconds"], absl::ToDoubleSeconds(took)) << stop;
}

// --- A hundred restarts ---

// What a run holds of the machine.
struct Held {
  long agent_fds = 0, guardian_fds = 0, processes = 0, threads = 0, memory_files = 0,
       resident_kib = 0;
};

long CountFolder(const std::string& path) {
  std::error_code ignored;
  const auto entries = std::filesystem::directory_iterator(path, ignored);
  return std::distance(begin(entries), end(entries));
}

long StatusField(pid_t pid, const std::string& name) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(name + ":")) return std::atol(line.c_str() + name.size() + 1);
  return 0;
}

long MemoryFilesOf(pid_t pid) {
  long count = 0;
  std::error_code ignored;
  const std::string folder = "/proc/" + std::to_string(pid) + "/fd";
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const std::string target = std::filesystem::read_symlink(entry.path(), ignored).string();
    count += target.find("memfd:") != std::string::npos || target.starts_with("/dev/shm") ||
             target.ends_with("(deleted)");
  }
  return count;
}

long CountTree(pid_t root) {
  long count = 1;
  for (const pid_t child : ChildrenOf(root)) count += CountTree(child);
  return count;
}

class RestartedJob {
 public:
  RestartedJob() {
    job_.StartProgram(
        {BuildFolder() / "outlast_restarts_tool", "-n", "2", "--", TortureTrainer(), "steps", "."});
  }
  // By rank, once both have made steps in `generation`.
  std::map<int, pid_t> RanksOf(uint64_t generation) const {
    std::map<int, pid_t> ranks;
    while (ranks.size() < 2 && is_alive(job_.pid())) {
      Clock::Real().SleepFor(absl::Milliseconds(2));
      std::istringstream log(job_.Read("log"));
      uint64_t number;
      int rank;
      pid_t pid;
      while (log >> number >> rank >> pid)
        if (number == generation) ranks[rank] = pid;
    }
    return ranks;
  }
  // The least of some looks: a restart's own are open for a moment longer.
  Held Look() const {
    const pid_t agent = job_.pid();
    const std::vector<pid_t> guardians = ChildrenOf(agent);
    if (guardians.size() != 1) return {};
    Held least{1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 30};
    for (int look = 0; look < 20; ++look) {
      const auto fds = [](pid_t pid) {
        return CountFolder("/proc/" + std::to_string(pid) + "/fd");
      };
      least.agent_fds = std::min(least.agent_fds, fds(agent));
      least.guardian_fds = std::min(least.guardian_fds, fds(guardians[0]));
      least.processes = std::min(least.processes, CountTree(agent));
      least.threads = std::min(least.threads, StatusField(agent, "Threads"));
      least.memory_files = std::min(least.memory_files, MemoryFilesOf(agent));
      least.resident_kib = std::min(least.resident_kib, StatusField(agent, "VmRSS"));
      Clock::Real().SleepFor(absl::Milliseconds(5));
    }
    return least;
  }
  Launched& job() { return job_; }

 private:
  Launched job_;
};

TEST(Torture, AHundredRestartsLeaveNothingBehind) {
  const uint64_t restarts = kSanitized ? 15 : 100, warm = 10;
  RestartedJob run;
  Held early;
  std::vector<pid_t> dead;
  for (uint64_t generation = 1; generation <= restarts; ++generation) {
    const auto ranks = run.RanksOf(generation);
    ASSERT_EQ(ranks.size(), 2u) << run.job().Read("err");
    if (generation == warm) early = run.Look();
    dead.push_back(ranks.at(static_cast<int>(generation % 2)));
    kill(dead.back(), SIGKILL);
  }
  ASSERT_EQ(run.RanksOf(restarts + 1).size(), 2u) << run.job().Read("err");
  const Held late = run.Look();
  run.job().Write("until", "now\n");
  EXPECT_EQ(run.job().Wait().code, 0) << run.job().Read("err");

  EXPECT_EQ(run.job().Report()["restarts"], restarts);
  EXPECT_EQ(CountAliveAfter(dead, absl::ZeroDuration()), 0);
  EXPECT_EQ(late.agent_fds, early.agent_fds);
  EXPECT_EQ(late.guardian_fds, early.guardian_fds);
  EXPECT_EQ(late.processes, early.processes);
  EXPECT_EQ(late.threads, early.threads);
  EXPECT_EQ(late.memory_files, early.memory_files);
  if (!kSanitized) {
    EXPECT_LT(late.resident_kib - early.resident_kib, 1024) << early.resident_kib;
  }
  std::printf("resident: %ld KiB after %lu restarts, %ld KiB after %lu\n", early.resident_kib,
              static_cast<unsigned long>(warm), late.resident_kib,
              static_cast<unsigned long>(restarts));
}

}  // namespace
}  // namespace outlast::testing
