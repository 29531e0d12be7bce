// Runs the tool as a user would, in a folder of its own.
#pragma once

#include <fcntl.h>
#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "launch/process.h"
#include "outlast/base/clock.h"
#include "outlast/base/fd.h"
#include "outlast/testing/time_factor.h"
#include "tests/support/paths.h"
#include "tests/support/temp_folder.h"

namespace outlast::testing {

#ifdef OUTLAST_SANITIZED
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

inline std::string ToolPath() { return BuildFolder() / "outlast"; }

// kPipeUnread: a pipe whose other end is open and never read.
enum class Output { kFile, kTerminal, kPipeToHead, kPipeUnread };

struct Ending {
  int code = -1;  // exit code, or 128 + signal
  long max_rss_kib = 0;
};

// A folder, and at most one run of the tool in it at a time.
class Launched {
 public:
  ~Launched() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      Wait();
    }
  }

  const std::string& folder() const { return folder_; }
  pid_t pid() const { return pid_; }
  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  std::string Read(const std::string& name) const {
    std::ifstream file(Path(name), std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }
  std::vector<pid_t> ReadPids(const std::string& name) const {
    std::istringstream text(Read(name));
    return {std::istream_iterator<pid_t>(text), {}};
  }
  // What is below the folder `name` and has this in its path.
  int Count(const std::string& name, const std::string& part) const {
    int count = 0;
    std::error_code unknown;  // what vanishes meanwhile is not counted
    for (std::filesystem::recursive_directory_iterator at(Path(name), unknown), last; at != last;
         at.increment(unknown))
      count += at->path().string().find(part) != std::string::npos ? 1 : 0;
    return count;
  }
  // From now on programs are started as that user, whose the folder is then. For root alone.
  void RunAs(uid_t user) {
    user_ = user;
    EXPECT_EQ(chown(folder_.c_str(), user, user), 0);
  }
  void MakeFifo(const std::string& name) const { ASSERT_EQ(mkfifo(Path(name).c_str(), 0600), 0); }
  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(Path(name), std::ios::binary) << text;
  }

  // `outlast run ARGUMENTS`, in the folder; its output goes to "out" and "err".
  void Start(std::vector<std::string> arguments, Output output = Output::kFile) {
    arguments.insert(arguments.begin(), {ToolPath(), "run"});
    StartProgram(arguments, output);
  }

  void StartProgram(const std::vector<std::string>& words, Output output = Output::kFile) {
    std::vector<char*> argv;
    for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    int pipe_ends[2] = {-1, -1};
    const bool to_pipe = output == Output::kPipeToHead || output == Output::kPipeUnread;
    if (to_pipe && pipe2(pipe_ends, O_CLOEXEC) != 0) FAIL() << "no pipe";
    int terminal = -1;
    pid_ = output == Output::kTerminal ? forkpty(&terminal, nullptr, nullptr, nullptr) : fork();
    if (pid_ == 0) {
      const bool is_user =
          user_ == 0 || (setgroups(0, nullptr) == 0 && setgid(user_) == 0 && setuid(user_) == 0);
      if (!is_user || chdir(folder_.c_str()) != 0) _exit(120);
      if (output != Output::kTerminal) {
        const int out = open("out", O_WRONLY | O_CREAT | O_APPEND, 0644);
        dup2(to_pipe ? pipe_ends[1] : out, 1);
        dup2(open("err", O_WRONLY | O_CREAT | O_APPEND, 0644), 2);
      }
      execv(argv[0], argv.data());
      _exit(121);
    }
    terminal_ = UniqueFd(terminal);
    if (!to_pipe) return;
    reader_ = UniqueFd(pipe_ends[0]);
    close(pipe_ends[1]);
    if (output == Output::kPipeUnread) return;
    char byte;  // reads a little, then goes away, as `head -1` does
    (void)!read(pipe_ends[0], &byte, 1);
    reader_.Reset();
  }

  // Writes to the terminal: "\x03" is Ctrl-C.
  void Type(std::string_view keys) { (void)!write(terminal_.get(), keys.data(), keys.size()); }

  Ending Wait() {
    std::string shown;
    char buffer[4096];
    ssize_t count;
    while (terminal_.is_open() && (count = read(terminal_.get(), buffer, sizeof buffer)) > 0)
      shown.append(buffer, static_cast<size_t>(count));
    if (terminal_.is_open()) Write("terminal", shown);
    int status = 0;
    rusage usage{};
    while (wait4(pid_, &status, 0, &usage) < 0 && errno == EINTR) {
    }
    pid_ = 0;
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), usage.ru_maxrss};
  }

  int Run(std::vector<std::string> arguments, Output output = Output::kFile) {
    Start(std::move(arguments), output);
    return Wait().code;
  }

  nlohmann::json Report() const {
    return nlohmann::json::parse(Read("outlast-runs/latest/report.json"), nullptr, false);
  }

  // Blocks until a worker has written a line to the fifo; the line.
  std::string AwaitFifo(const std::string& name) const {
    std::ifstream fifo(Path(name));
    std::string line;
    std::getline(fifo, line);
    return line;
  }

 private:
  const TempFolder temp_;
  const std::string folder_ = temp_.path();
  uid_t user_ = 0;
  pid_t pid_ = 0;
  UniqueFd terminal_;
  UniqueFd reader_;
};

inline bool is_alive(pid_t pid) {
  const auto info = ReadProcess(pid);
  return info.has_value() && !info->is_zombie();
}

// Waits until the processes have ended, by their pidfds; the number of those that had not within
// the limit.
inline int CountAliveAfter(const std::vector<pid_t>& pids, absl::Duration limit) {
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(limit * TimeFactor());
  int alive = 0;
  for (const pid_t pid : pids) {
    const auto pidfd = OpenPidFd(pid);
    if (!pidfd.ok() || !is_alive(pid)) continue;
    pollfd wait{pidfd->get(), POLLIN, 0};
    const int64_t left = std::max<int64_t>(0, (deadline - MonotonicNanos()) / 1'000'000);
    if (poll(&wait, 1, static_cast<int>(left)) == 0) ++alive;
  }
  return alive;
}

// A shell fragment: starts helpers that hide more and more (in the group; own session; forked
// twice; forked twice with own session and a cleared environment), and appends their pids to
// `file`.
inline std::string HidingHelpers(const std::string& file) {
  return "sleep 300 & echo $! >>" + file + "; setsid sleep 301 & echo $! >>" + file +
         "; (setsid sh -c 'sleep 302 & echo $! >>" + file +
         "'); (setsid env -i PATH=/usr/bin:/bin sh -c '(sleep 303 & echo $! >>" + file + ")'); ";
}

}  // namespace outlast::testing
