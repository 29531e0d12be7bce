#include "run/signals.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <utility>

#include "base/error.h"

namespace outlast {
namespace {

constexpr std::array<int, 4> kStopSignals = {SIGTERM, SIGUSR1, SIGUSR2, SIGINT};
constexpr int kBitsPerSignal = 15;  // of the eventfd's counter, which adds up what is written

std::atomic<int> handler_fd{-1};
static_assert(std::atomic<int>::is_always_lock_free, "used in a signal handler");

void OnSignal(int signal) {
  const int saved = errno;
  for (size_t i = 0; i < kStopSignals.size(); ++i) {
    if (kStopSignals[i] != signal) continue;
    const uint64_t one = uint64_t{1} << (kBitsPerSignal * i);
    (void)!write(handler_fd.load(std::memory_order_relaxed), &one, sizeof one);
  }
  errno = saved;
}

bool HasDefaultAction(int signal) {
  struct sigaction present {};
  return sigaction(signal, nullptr, &present) == 0 && (present.sa_flags & SA_SIGINFO) == 0 &&
         present.sa_handler == SIG_DFL;
}

void SetHandler(int signal, void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;  // interrupted system calls are not the user's business
  sigaction(signal, &action, nullptr);
}

}  // namespace

absl::StatusOr<StopSignals> StopSignals::Install() {
  UniqueFd event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event.is_open()) return ErrnoStatus(errno, "create an eventfd");
  int none = -1;
  if (!handler_fd.compare_exchange_strong(none, event.get())) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "stop signals: another run of this process takes them already");
  }
  StopSignals signals(std::move(event));
  std::string left_alone;
  for (const int signal : kStopSignals) {
    if (HasDefaultAction(signal)) {
      SetHandler(signal, OnSignal);
      signals.installed_.push_back(signal);
    } else {
      left_alone += fmt::format("{}SIG{}", left_alone.empty() ? "" : ", ", sigabbrev_np(signal));
    }
  }
  if (!left_alone.empty()) {
    PrintToStderr(
        "outlast: {}: handled or ignored by the program, so they do not make the run save "
        "and stop\n",
        left_alone);
  }
  return signals;
}

StopSignals::StopSignals(StopSignals&& other) noexcept
    : event_(std::move(other.event_)), installed_(std::exchange(other.installed_, {})) {}

StopSignals::~StopSignals() {
  if (!event_.is_open()) return;
  for (const int signal : installed_) SetHandler(signal, SIG_DFL);
  handler_fd.store(-1);
}

std::vector<int> StopSignals::Take() {
  uint64_t counts = 0;
  if (read(event_.get(), &counts, sizeof counts) != sizeof counts) return {};
  std::vector<int> signals;
  for (size_t i = 0; i < kStopSignals.size(); ++i) {
    const uint64_t count = counts >> (kBitsPerSignal * i) & ((uint64_t{1} << kBitsPerSignal) - 1);
    signals.insert(signals.end(), std::min<uint64_t>(count, 2), kStopSignals[i]);
  }
  return signals;
}

void StopSignals::EndProcessBy(int signal) {
  SetHandler(signal, SIG_DFL);
  sigset_t only;
  sigemptyset(&only);
  sigaddset(&only, signal);
  pthread_sigmask(SIG_UNBLOCK, &only, nullptr);
  kill(getpid(), signal);
  _exit(128 + signal);  // where the default action does not end a process, such as for an init of a
                        // pid namespace
}

}  // namespace outlast
