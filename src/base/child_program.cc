#include "base/child_program.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "base/error.h"
#include "outlast/base/clock.h"
#include "outlast/base/fd.h"

namespace outlast {
namespace {

constexpr size_t kMaxLine = 1 << 10;
constexpr int kNotStarted = 127;

// All that the child needs, ready before it is made: it may not allocate.
struct Prepared {
  std::vector<char*> arguments, environment;
  std::vector<std::string> strings;
  const char* folder = nullptr;
  int output = -1;
  pid_t parent = 0;
  int death_signal = SIGKILL;
};

void Prepare(const ProgramCall& call, Prepared& prepared) {
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view variable(*entry);
    const auto replaced = [&](const auto& pair) {
      return variable.starts_with(pair.first) &&
             variable.substr(pair.first.size()).starts_with('=');
    };
    if (std::ranges::none_of(call.environment, replaced)) prepared.environment.push_back(*entry);
  }
  prepared.strings.reserve(call.environment.size());
  for (const auto& [name, value] : call.environment)
    prepared.environment.push_back(
        prepared.strings.emplace_back(fmt::format("{}={}", name, value)).data());
  for (const std::string& word : call.command)
    prepared.arguments.push_back(const_cast<char*>(word.c_str()));
  prepared.arguments.push_back(nullptr);
  prepared.environment.push_back(nullptr);
  if (!call.folder.empty()) prepared.folder = call.folder.c_str();
  prepared.parent = getpid();
  prepared.death_signal = call.death_signal;
}

// In the child, which shares our memory until it calls exec: only calls that change nothing in it.
[[noreturn]] void BecomeProgram(const Prepared& prepared) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, prepared.death_signal);
  if (getppid() != prepared.parent) _exit(kNotStarted);
  signal(SIGPIPE, SIG_DFL);
  const int null = open("/dev/null", O_RDONLY);
  dup2(null, STDIN_FILENO);
  dup2(prepared.output, STDOUT_FILENO);
  dup2(prepared.output, STDERR_FILENO);
  close_range(STDERR_FILENO + 1, ~0U, 0);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  int error = 0;
  if (prepared.folder != nullptr && chdir(prepared.folder) != 0) error = errno;
  if (error == 0) {
    execvpe(prepared.arguments[0], prepared.arguments.data(), prepared.environment.data());
    error = errno;
  }
  const char* why = strerrordesc_np(error);
  (void)!write(STDOUT_FILENO, why, std::strlen(why));
  _exit(kNotStarted);
}

// vfork: a trainer's page tables may be large. With all signals blocked no handler of ours runs in
// the child.
[[gnu::noinline]] pid_t StartChild(const Prepared& prepared) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  // posix_spawn cannot ask for a signal at our death. BecomeProgram makes system calls alone.
  const pid_t pid = vfork();              // NOLINT(clang-analyzer-security.insecureAPI.vfork)
  if (pid == 0) BecomeProgram(prepared);  // NOLINT(clang-analyzer-unix.Vfork)
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return pid;
}

// What JSON and terminals take: anything that is not printable ASCII or a whole UTF-8 character
// becomes '?'.
std::string Printable(std::string_view line) {
  std::string text;
  for (size_t i = 0; i < line.size();) {
    const auto lead = static_cast<unsigned char>(line[i]);
    const size_t length = lead < 0x80 ? 1 : lead >= 0xc2 && lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    bool whole = lead < 0x80 || (lead >= 0xc2 && lead < 0xf5 && i + length <= line.size());
    for (size_t k = 1; whole && k < length; ++k)
      whole = (static_cast<unsigned char>(line[i + k]) & 0xc0) == 0x80;
    // Overlong forms, surrogates and what lies past U+10FFFF.
    const auto second = whole && length > 2 ? static_cast<unsigned char>(line[i + 1]) : 0x90;
    if ((lead == 0xe0 && second < 0xa0) || (lead == 0xed && second > 0x9f) ||
        (lead == 0xf0 && second < 0x90) || (lead == 0xf4 && second > 0x8f))
      whole = false;
    const bool control = lead < 0x20 || lead == 0x7f;
    if (whole && !control) {
      text.append(line.substr(i, length));
      i += length;
    } else {
      text += lead == '\t' ? ' ' : '?';
      ++i;
    }
  }
  return text;
}

std::string LastLine(std::string_view output) {
  while (!output.empty()) {
    const size_t newline = output.find_last_of("\n\r");
    std::string_view line = newline == std::string_view::npos ? output : output.substr(newline + 1);
    output = newline == std::string_view::npos ? std::string_view() : output.substr(0, newline);
    if (line.find_first_not_of(" \t") == std::string_view::npos) continue;
    return Printable(line.substr(0, kMaxLine));
  }
  return "";
}

// The end of what a program writes.
struct Kept {
  size_t wanted;  // bytes
  std::string text;
};

// Reads what is there, of a program that prints for ever a part; false at the end of the output.
bool Drain(int fd, Kept& kept) {
  char buffer[4096];
  for (int reads = 0; reads < 64;) {
    const ssize_t count = read(fd, buffer, sizeof buffer);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return true;
    if (count == 0) return false;
    kept.text.append(buffer, static_cast<size_t>(count));
    if (kept.text.size() > 2 * kept.wanted) kept.text.erase(0, kept.text.size() - kept.wanted);
    ++reads;
  }
  return true;
}

// Follows the child's output until it has ended, or the deadline came (timed_out).
void FollowUntil(int64_t deadline_ns, const ProgramCall& call, int output, int child, pid_t pid,
                 Kept& kept, ProgramEnd& end) {
  pollfd watched[] = {{child, POLLIN, 0}, {output, POLLIN, 0}, {call.stop_fd, POLLIN, 0}};
  while (true) {
    int wait_ms = -1;
    if (deadline_ns != 0) {
      const int64_t left = deadline_ns - MonotonicNanos();
      if (left <= 0) {
        end.timed_out = true;
        return;
      }
      wait_ms = static_cast<int>(std::min<int64_t>(left / 1'000'000 + 1, 60'000));
    }
    if (poll(watched, 3, wait_ms) < 0) continue;  // EINTR
    if (watched[1].revents != 0 && !Drain(output, kept)) watched[1].fd = -1;
    if (watched[0].revents != 0) return;
    if (watched[2].revents == 0 || !call.stops()) continue;
    end.stopped = true;
    watched[2].fd = -1;
    kill(pid, SIGTERM);
    const int64_t last_ns = MonotonicNanos() + absl::ToInt64Nanoseconds(call.stop_grace);
    deadline_ns = deadline_ns == 0 ? last_ns : std::min(deadline_ns, last_ns);
  }
}

}  // namespace

absl::StatusOr<ProgramEnd> RunProgram(const ProgramCall& call) {
  if (call.command.empty())
    return Error(absl::StatusCode::kInvalidArgument, "run a program: no command");
  const int64_t deadline_ns =
      call.deadline == absl::InfiniteDuration()
          ? 0
          : MonotonicNanos() + std::max<int64_t>(1, absl::ToInt64Nanoseconds(call.deadline));
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return ErrnoStatus(errno, "make a pipe");
  const UniqueFd output(ends[0]);
  UniqueFd input(ends[1]);
  // Above the standard ones, which a host may have closed: the child makes those anew.
  input.Reset(fcntl(input.get(), F_DUPFD_CLOEXEC, 3));
  if (!input.is_open()) return ErrnoStatus(errno, "make a pipe");
  fcntl(input.get(), F_SETFL, 0);  // the program's end blocks, as programs expect
  Prepared prepared;
  Prepare(call, prepared);
  prepared.output = input.get();
  const pid_t pid = StartChild(prepared);
  if (pid < 0) return ErrnoStatus(errno, fmt::format("start '{}'", call.command[0]));
  input.Reset();
  const UniqueFd child(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  ProgramEnd end;
  Kept kept{call.keep_output, {}};
  const bool watched = child.is_open();
  const int error = errno;
  if (watched) FollowUntil(deadline_ns, call, output.get(), child.get(), pid, kept, end);
  // Before it is reaped: its group cannot be anybody else's yet.
  kill(-pid, SIGKILL);
  kill(pid, SIGKILL);  // the child itself, if it had no time for a group of its own
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (!watched) return ErrnoStatus(error, fmt::format("watch '{}'", call.command[0]));
  Drain(output.get(), kept);
  end.code = WIFEXITED(status) ? WEXITSTATUS(status) : 0;
  end.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  end.last_line = LastLine(kept.text);
  end.output = std::move(kept.text);
  return end;
}

}  // namespace outlast
