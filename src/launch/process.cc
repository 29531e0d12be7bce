#include "launch/process.h"

#include <dirent.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "base/error.h"
#include "outlast/base/clock.h"

namespace outlast {
namespace {

// Numbers among the names in a folder, such as pids in /proc.
std::vector<pid_t> NumbersIn(const std::string& folder) {
  std::vector<pid_t> numbers;
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir(folder.c_str()), closedir);
  if (directory == nullptr) return numbers;
  while (const dirent* entry = readdir(directory.get())) {
    const pid_t number = static_cast<pid_t>(std::strtol(entry->d_name, nullptr, 10));
    if (number > 0) numbers.push_back(number);
  }
  return numbers;
}

// For kernels without CONFIG_PROC_CHILDREN.
std::vector<pid_t> ChildrenByScan(pid_t parent) {
  std::vector<pid_t> children;
  for (const pid_t pid : NumbersIn("/proc")) {
    const std::optional<ProcessInfo> info = ReadProcess(pid);
    if (info.has_value() && info->parent == parent) children.push_back(pid);
  }
  return children;
}

void AppendNumbers(const std::string& text, std::vector<pid_t>& numbers) {
  const char* at = text.c_str();
  char* end = nullptr;
  for (long number = std::strtol(at, &end, 10); end != at; number = std::strtol(at, &end, 10)) {
    numbers.push_back(static_cast<pid_t>(number));
    at = end;
  }
}

}  // namespace

std::vector<pid_t> ChildrenOf(pid_t pid) {
  static const bool kernel_lists_children = access("/proc/thread-self/children", R_OK) == 0;
  if (!kernel_lists_children) return ChildrenByScan(pid);
  std::vector<pid_t> children;
  const std::string tasks = fmt::format("/proc/{}/task", pid);
  for (const pid_t task : NumbersIn(tasks)) {
    AppendNumbers(ReadProcFile(fmt::format("{}/{}/children", tasks, task), 1 << 20), children);
  }
  return children;
}

std::vector<ProcessInfo> DescendantsOf(pid_t root, const std::set<pid_t>& apart) {
  std::vector<ProcessInfo> found;
  std::vector<pid_t> level = {root};
  while (!level.empty()) {
    std::vector<pid_t> next;
    for (const pid_t parent : level) {
      for (const pid_t child : ChildrenOf(parent)) {
        if (apart.contains(child)) continue;
        const std::optional<ProcessInfo> info = ReadProcess(child);
        if (!info.has_value() || info->parent != parent)
          continue;  // ended, or moved up to its subreaper
        found.push_back(*info);
        next.push_back(child);
      }
    }
    level.swap(next);
  }
  return found;
}

absl::StatusOr<UniqueFd> OpenPidFd(pid_t pid) {
  UniqueFd fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));  // close-on-exec by itself
  if (!fd.is_open()) return ErrnoStatus(errno, fmt::format("open a pidfd of process {}", pid));
  return fd;
}

bool SendSignal(const ProcessInfo& process, int signal) {
  const absl::StatusOr<UniqueFd> fd = OpenPidFd(process.pid);
  if (!fd.ok()) return false;
  // What is read now belongs to the descriptor's process, or that one has ended and the signal goes
  // nowhere.
  const std::optional<ProcessInfo> now = ReadProcess(process.pid);
  if (!now.has_value() || now->start_ticks != process.start_ticks) return false;
  return syscall(SYS_pidfd_send_signal, fd->get(), signal, nullptr, 0) == 0;
}

bool CatchesSignal(pid_t pid, int signal) {
  const std::string status = ReadProcFile(fmt::format("/proc/{}/status", pid), 16 << 10);
  const size_t at = status.find("\nSigCgt:");
  if (at == std::string::npos) return false;
  const uint64_t caught = std::strtoull(status.c_str() + at + 8, nullptr, 16);
  return ((caught >> (signal - 1)) & 1) != 0;
}

std::string EnvironmentOf(pid_t pid, const std::string& name) {
  const std::string block =
      std::string(1, '\0') + ReadProcFile(fmt::format("/proc/{}/environ", pid), 1 << 20);
  const std::string key = std::string(1, '\0') + name + "=";
  const size_t at = block.find(key);
  return at == std::string::npos ? std::string() : std::string(block.c_str() + at + key.size());
}

sigset_t AgentSignals() {
  sigset_t wanted;
  sigemptyset(&wanted);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGQUIT}) {
    struct sigaction before {};
    sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaddset(&wanted, signal);
  }
  return wanted;
}

absl::Status EndDescendants(absl::Duration limit) {
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(limit);
  while (true) {
    // Parents first: who is dead forks no more. What they leave behind comes to us, so a few rounds
    // end all.
    for (const ProcessInfo& process : DescendantsOf(getpid())) {
      if (!process.is_zombie()) SendSignal(process, SIGKILL);
    }
    pid_t reaped;
    do {
      reaped = waitpid(-1, nullptr, WNOHANG);
    } while (reaped > 0);
    if (reaped < 0 && errno == ECHILD) return absl::OkStatus();
    if (MonotonicNanos() > deadline) break;
    Clock::Real().SleepFor(absl::Milliseconds(2));
  }
  const std::vector<ProcessInfo> left = DescendantsOf(getpid());
  if (left.empty()) return absl::OkStatus();
  return Error(absl::StatusCode::kDeadlineExceeded,
               "process {} (state {}) does not end after SIGKILL; {} in all", left[0].pid,
               left[0].state, left.size());
}

}  // namespace outlast
