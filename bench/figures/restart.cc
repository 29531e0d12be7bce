// From kill -9 of one of four ranks to the first new step of all.
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/sysinfo.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "figures/figures.h"
#include "figures/restart_page.h"
#include "outlast/base/clock.h"
#include "outlast/base/memory.h"

namespace outlast::bench {
namespace {

// A job refuses the 21st restart of an hour.
constexpr int kKillsAJob = 15;
constexpr absl::Duration kPatience = absl::Seconds(60);

struct Workload {
  size_t state_bytes;
  int64_t steps_a_save;
  int64_t step_ms;        // a pause in each step but a generation's first
  bool while_persisting;  // kill while a checkpoint is being written
  bool from_template = false;
};

struct Kill {
  double to_step_ms;
  double steps_lost;
};

template <typename Condition>
bool WaitFor(Condition condition, absl::Duration step = absl::Microseconds(500)) {
  const absl::Duration deadline = Clock::Real().Uptime() + kPatience;
  while (!condition()) {
    if (Clock::Real().Uptime() > deadline) return false;
    Clock::Real().SleepFor(step);
  }
  return true;
}

// One `outlast run` of the restart trainer, in a folder of its own.
class Job {
 public:
  Job(const Settings& settings, const Workload& workload, int number)
      : folder_(fmt::format("{}/job-{}", settings.folder, number)), workload_(workload) {
    std::filesystem::create_directories(folder_);
    const std::string page_path = folder_ + "/page";
    const UniqueFd file(open(page_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (ftruncate(file.get(), sizeof(RestartPage)) != 0) return;
    auto memory = Mapping::Shared(file.get(), sizeof(RestartPage));
    if (!memory.ok()) return;
    memory_ = std::move(*memory);
    page().driver = getpid();
    std::vector<std::string> command = {
        settings.tool,    "run",    "-n",        std::to_string(kRestartRanks),
        "--max-restarts", "100000", "--run-dir", folder_ + "/runs"};
    if (workload.from_template) command.insert(command.end(), {"--template", settings.trainer});
    command.insert(
        command.end(),
        {"--", settings.trainer, page_path, std::to_string(workload.state_bytes), checkpoints(),
         std::to_string(workload.steps_a_save), std::to_string(workload.step_ms)});
    Start(command);
  }
  ~Job() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);  // the guardian ends the workers
      waitpid(pid_, nullptr, 0);
      WaitFor([&] {
        return std::ranges::all_of(page().cells, [](const RestartCell& cell) {
          return cell.pid == 0 || kill(cell.pid, 0) != 0;
        });
      });
    }
    std::filesystem::remove_all(folder_);
  }
  Job(const Job&) = delete;

  std::string LastWords() const {
    const std::string all = Read("out");
    return all.substr(all.size() - std::min<size_t>(all.size(), 600));
  }

  // How often the run's events have `text`.
  int CountOfEvents(std::string_view text) const {
    const std::string all = Read("runs/latest/events.jsonl");
    int count = 0;
    for (size_t at = 0; (at = all.find(text, at)) != std::string::npos; at += text.size()) ++count;
    return count;
  }
  bool AwaitTemplate() const {
    return WaitFor([&] { return CountOfEvents(R"("event":"template_ready")") > 0; });
  }

  // Kills `rank` once the job has progressed since the last kill; none: it did not come back.
  std::optional<Kill> KillOne(int rank, absl::Duration pause) {
    const auto all = [&](auto condition) { return std::ranges::all_of(page().cells, condition); };
    const uint64_t before = generation_;
    // A committed save is the progress that refunds the restart budget.
    if (memory_.size() == 0 || !WaitFor([&] {
          return all([&](const RestartCell& cell) {
            return cell.generation > before && cell.durable > cell.restored &&
                   cell.step > cell.restored + 2;
          });
        }))
      return std::nullopt;
    generation_ = page().cells[0].generation;
    Clock::Real().SleepFor(pause);
    if (workload_.while_persisting && !WaitFor([&] { return IsPersisting(); })) return std::nullopt;
    RestartCell& victim = page().cells[rank];
    const int64_t killed_ns = MonotonicNanos();
    kill(victim.pid, SIGKILL);
    if (!WaitFor([&] {
          return all([&](const RestartCell& cell) { return cell.generation > generation_; });
        }))
      return std::nullopt;
    int64_t last_ns = 0, reached = 0;
    for (const RestartCell& cell : page().cells) {
      last_ns = std::max<int64_t>(last_ns, cell.first_step_ns);
      reached = std::max<int64_t>(reached, cell.step_before);
    }
    return Kill{static_cast<double>(last_ns - killed_ns) / 1e6,
                static_cast<double>(reached - victim.restored)};
  }

 private:
  std::string Read(const std::string& name) const {
    std::ifstream file(folder_ + "/" + name);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  RestartPage& page() const { return *reinterpret_cast<RestartPage*>(memory_.data()); }
  std::string checkpoints() const { return folder_ + "/checkpoints"; }

  void Start(const std::vector<std::string>& command) {
    std::vector<char*> argv;
    for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    const std::string output = folder_ + "/out";
    posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_WRONLY | O_CREAT, 0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    if (posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ) != 0) pid_ = 0;
    posix_spawn_file_actions_destroy(&actions);
  }

  bool IsPersisting() const {
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(checkpoints(), ignored)) {
      if (entry.path().filename().string().starts_with("step-") &&
          !std::filesystem::exists(entry.path() / "MANIFEST.json", ignored))
        return true;
    }
    return false;
  }

  const std::string folder_;
  const Workload workload_;
  Mapping memory_;
  pid_t pid_ = 0;
  uint64_t generation_ = 0;  // the newest that was seen at work
};

std::vector<Kill> Measure(const Settings& settings, const Workload& workload, int kills,
                          const std::string& name, Report& report) {
  std::vector<Kill> done;
  for (int number = 0; static_cast<int>(done.size()) < kills; ++number) {
    Job job(settings, workload, number);
    const int of_job = std::min(kKillsAJob, kills - static_cast<int>(done.size()));
    if (workload.from_template && !job.AwaitTemplate()) {
      report.Fail(name, fmt::format("no template:\n{}", job.LastWords()));
      return {};
    }
    for (int i = 0; i < of_job; ++i) {
      // Another rank and another moment of a step each time.
      const auto kill =
          job.KillOne((i + number) % kRestartRanks, absl::Microseconds(20'000 + i * 7'919));
      if (!kill) {
        report.Fail(name, fmt::format("the job did not come back:\n{}", job.LastWords()));
        return {};
      }
      done.push_back(*kill);
    }
    if (const int forked = job.CountOfEvents(R"("from":"template")");
        forked != (workload.from_template ? of_job : 0)) {
      report.Fail(name, fmt::format("{} of {} ranks were forked from a template", forked, of_job));
      return {};
    }
  }
  return done;
}

// A virtual machine's memory is slow when it is touched for the first time since its boot, 25 times
// as slow as later. That is the host's cost, once, so half of what is free is touched before
// anything is measured.
void WarmMemory() {
  struct sysinfo info {};
  if (sysinfo(&info) != 0) return;
  const uint64_t free_bytes = uint64_t{info.freeram} * info.mem_unit;
  (void)Mapping::Anonymous(std::min<uint64_t>(free_bytes / 2, uint64_t{16} << 30));
}

std::optional<Reference> StartOfAProcess(const Settings& settings) {
  std::vector<double> samples;
  for (int i = 0; i < 20; ++i) {
    if (const auto seconds = TimeCommand({settings.trainer})) samples.push_back(*seconds * 1e3);
  }
  if (samples.empty()) return std::nullopt;
  return Reference{"fork, exec and exit of the trainer", Quantile(samples, 0.5)};
}

void MeasureKillToStep(const Settings& settings, Report& report, const std::string& name,
                       const Workload& workload, int kills, double goal) {
  if (!report.Wants(name)) return;
  Figure figure{.name = name, .unit = "ms", .goal = goal};
  for (const Kill& kill : Measure(settings, workload, kills, name, report))
    figure.samples.push_back(kill.to_step_ms);
  if (figure.samples.empty()) return;
  figure.limit = StartOfAProcess(settings);
  report.Add(figure);
}

void MeasureStepsLost(const Settings& settings, Report& report, int kills) {
  Figure figure{.name = "restart.steps_lost", .unit = "steps", .goal = 1};
  if (!report.Wants(figure.name)) return;
  const Workload workload{size_t{64} << 20, 4, 50, true};
  for (const Kill& kill : Measure(settings, workload, kills, figure.name, report))
    figure.samples.push_back(kill.steps_lost);
  if (!figure.samples.empty()) report.Add(figure);
}

}  // namespace

void MeasureRestart(const Settings& settings, Report& report) {
  const bool smoke = settings.smoke;
  if (!smoke) WarmMemory();
  MeasureKillToStep(settings, report, "restart.kill_to_step_1mb", {size_t{1} << 20, 200, 0, false},
                    smoke ? 2 : 45, 10);
  MeasureKillToStep(settings, report, "restart.kill_to_step_64mb", {size_t{64} << 20, 32, 0, false},
                    smoke ? 1 : 30, 50);
  MeasureKillToStep(settings, report, "restart.kill_to_step_1mb_template",
                    {size_t{1} << 20, 200, 0, false, true}, smoke ? 2 : 45, 5);
  MeasureKillToStep(settings, report, "restart.kill_to_step_64mb_template",
                    {size_t{64} << 20, 32, 0, false, true}, smoke ? 1 : 30, 35);
  MeasureStepsLost(settings, report, smoke ? 1 : 15);
}

}  // namespace outlast::bench
