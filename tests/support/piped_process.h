// A child process whose lines can be waited for.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "outlast/base/clock.h"
#include "outlast/base/fd.h"

namespace outlast::testing {

class PipedProcess {
 public:
  explicit PipedProcess(const std::vector<std::string>& command) {
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) return;
    in_ = UniqueFd(in[1]);
    out_ = UniqueFd(out[0]);
    std::vector<char*> argv;
    for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      dup2(in[0], STDIN_FILENO);
      dup2(out[1], STDOUT_FILENO);
      dup2(out[1], STDERR_FILENO);
      execv(argv[0], argv.data());
      _exit(127);
    }
    close(in[0]);
    close(out[1]);
  }
  ~PipedProcess() { Kill(); }

  pid_t pid() const { return pid_; }
  void Signal(int signal) const { kill(pid_, signal); }
  void Go() const { (void)!write(in_.get(), "\n", 1); }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  // Exit code, or 128 + signal; -1: not in time.
  int Wait(absl::Duration within) {
    const absl::Duration deadline = Clock::Real().Uptime() + within;
    while (Clock::Real().Uptime() < deadline) {
      if (ReadLine(absl::Milliseconds(20)) == "") {
        int status = 0;
        if (waitpid(pid_, &status, WNOHANG) == pid_) {
          pid_ = -1;
          return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        }
        if (ended_) Clock::Real().SleepFor(absl::Milliseconds(1));
      }
    }
    return -1;
  }
  // The first line from here on that has `part`; empty: none in time, or it closed its output.
  std::string LineWith(const std::string& part, absl::Duration within) {
    const absl::Duration deadline = Clock::Real().Uptime() + within;
    while (true) {
      const absl::Duration left = deadline - Clock::Real().Uptime();
      if (left <= absl::ZeroDuration() || ended_) return {};
      const std::string line = ReadLine(left);
      if (line.find(part) != std::string::npos) return line;
    }
  }
  // All lines that were read.
  const std::string& seen() const { return seen_; }

 private:
  std::string ReadLine(absl::Duration within) {
    const absl::Duration deadline = Clock::Real().Uptime() + within;
    while (true) {
      const size_t end = rest_.find('\n');
      if (end != std::string::npos) {
        std::string line = rest_.substr(0, end);
        rest_.erase(0, end + 1);
        seen_ += line + "\n";
        return line;
      }
      const absl::Duration left = deadline - Clock::Real().Uptime();
      pollfd ready{.fd = out_.get(), .events = POLLIN, .revents = 0};
      if (left <= absl::ZeroDuration() || ended_ ||
          poll(&ready, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1) <= 0) {
        return {};
      }
      char block[4096];
      const ssize_t got = read(out_.get(), block, sizeof(block));
      if (got <= 0) {
        ended_ = true;
        return {};
      }
      rest_.append(block, static_cast<size_t>(got));
    }
  }

  pid_t pid_ = -1;
  UniqueFd in_, out_;
  std::string rest_, seen_;
  bool ended_ = false;
};

}  // namespace outlast::testing
