#include "outlast/watch/watchdog.h"

#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "outlast/base/clock.h"
#include "outlast/base/mutex.h"
#include "outlast/run/run.h"
#include "run/link.h"
#include "watch/evidence.h"
#include "watch/look_reader.h"
#include "watch/monitor_state.h"
#include "watch/options.h"

extern char** environ;

namespace outlast {
namespace {

constexpr absl::Duration kAnswerWithin = absl::Seconds(10);
constexpr absl::Duration kStacksWithin = absl::Seconds(10);

// Prints the native stacks of this process to stderr, by eu-stack in a child with a deadline.
void PrintOwnStacks() {
  const std::string pid = std::to_string(getpid());
  const std::array<const char*, 4> arguments = {"eu-stack", "-p", pid.c_str(), nullptr};
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, STDERR_FILENO, STDOUT_FILENO);
  pid_t child = 0;
  const int error = posix_spawnp(&child, "eu-stack", &files, nullptr,
                                 const_cast<char**>(arguments.data()), environ);
  posix_spawn_file_actions_destroy(&files);
  if (error != 0) {
    PrintToStderr(
        "outlast: no stacks: eu-stack did not start ({}); it is in the package elfutils\n",
        MessageOf(ErrnoStatus(error, "eu-stack")));
    return;
  }
  // Where only ancestors may trace (Yama), the child is named as an exception.
  prctl(PR_SET_PTRACER, static_cast<unsigned long>(child), 0, 0, 0);
  const absl::Duration deadline = Clock::Real().Uptime() + kStacksWithin;
  while (waitpid(child, nullptr, WNOHANG) == 0) {
    if (Clock::Real().Uptime() >= deadline) {
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
      break;
    }
    Clock::Real().SleepFor(absl::Milliseconds(10));
  }
  prctl(PR_SET_PTRACER, 0, 0, 0, 0);
}

}  // namespace

// --- Without an agent ---

// A thread that polls this process's own black box. It can name and print; there is nobody to act.
class Watchdog::Local {
 public:
  Local(Run& run, const WatchdogOptions& options, LookReader reader)
      : run_(run),
        options_(options),
        reader_(std::move(reader)),
        state_(options, run.world()),
        thread_([this] { Main(); }) {}
  ~Local() { Stop(); }

  void Stop() {
    {
      const MutexLock lock(mutex_);
      stopping_ = true;
    }
    wake_.NotifyAll();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void Main() {
    pthread_setname_np(pthread_self(), "outlast-watch");
    while (WaitForPoll()) PollNow();
  }

  // False: stop.
  bool WaitForPoll() {
    const MutexLock lock(mutex_);
    const absl::Duration due = Clock::Real().Uptime() + options_.poll;
    while (!stopping_) {
      const absl::Duration left = due - Clock::Real().Uptime();
      if (left <= absl::ZeroDuration()) return true;
      wake_.WaitFor(mutex_, left);
    }
    return false;
  }

  void PollNow() {
    const uint64_t generation = run_.is_aborted() ? 0 : run_.generation();
    if (generation == 0) return state_.Disarm();
    if (!state_.is_armed() || state_.generation() != generation) state_.Arm(generation);
    PollInput input;
    input.monotonic_ns = MonotonicNanos();
    input.boottime_ns = BoottimeNanos();
    input.looks.push_back(reader_.Look(run_.rank(), input.monotonic_ns));
    for (const StepRecord& step : reader_.NewSteps()) input.steps.push_back({run_.rank(), step});
    const PollResult result = state_.Poll(std::move(input));
    if (result.recovered) PrintToStderr("outlast: rank {} moves again\n", run_.rank());
    if (result.finding) Report(*result.finding);
  }

  void Report(const Verdict& verdict) {
    PrintToStderr("outlast: {}: {}\n", VerdictClassName(verdict.verdict_class), verdict.reason);
    for (const std::string& line : verdict.evidence) PrintToStderr("outlast:   {}\n", line);
    PrintOwnStacks();
    state_.Resume();  // our own tracer held everything up
  }

  Run& run_;
  const WatchdogOptions options_;
  LookReader reader_;
  MonitorState state_;
  Mutex mutex_;
  CondVar wake_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses the others
};

// --- Watchdog ---

Watchdog::Watchdog(std::unique_ptr<Local> local) : local_(std::move(local)) {}
Watchdog::~Watchdog() = default;

void Watchdog::Stop() {
  if (local_ != nullptr) local_->Stop();
}

absl::StatusOr<std::unique_ptr<Watchdog>> Watchdog::Start(Run& run,
                                                          const WatchdogOptions& options) {
  OUTLAST_RETURN_IF_ERROR(Validate(options));
  if (run.has_agent()) {
    const std::string payload = PayloadWriter().Text(EncodeWatchOptions(options)).bytes();
    const auto answer = run.link().Call(MessageKind::kWatch, 0, payload, kAnswerWithin);
    if (answer.ok()) return std::unique_ptr<Watchdog>(new Watchdog(nullptr));
    if (!absl::IsUnimplemented(answer.status())) return Annotate(answer.status(), "watchdog");
    PrintToStderr("outlast: the agent has no watch; hangs of other ranks are not found\n");
  } else {
    PrintToStderr(
        "outlast: without `outlast run` the watchdog judges this rank's sections alone and "
        "prints what it finds; it "
        "neither sees other ranks nor ends a hang\n");
  }
  OUTLAST_ASSIGN_OR_RETURN(LookReader reader,
                           LookReader::Open(run.black_box().fd(), static_cast<int>(run.rank())));
  return std::unique_ptr<Watchdog>(
      new Watchdog(std::make_unique<Local>(run, options, std::move(reader))));
}

}  // namespace outlast
