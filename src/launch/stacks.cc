#include "launch/stacks.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <memory>

#include "base/error.h"
#include "launch/process.h"

namespace outlast {
namespace {

constexpr absl::Duration kLimit = absl::Seconds(10);
constexpr int kMaxThreads = 256;

void Print(int fd, std::string_view text) {
  WriteAll(fd, std::as_bytes(std::span(text))).IgnoreError();
}

// Only async-signal-safe calls: the agent has other threads.
[[noreturn]] void BecomeStackPrinter(const char* pid, int output, pid_t agent) {
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != agent) _exit(127);
  dup2(output, 1);
  dup2(output, 2);
  const char* const arguments[] = {"eu-stack", "-p", pid, nullptr};
  execvp("eu-stack", const_cast<char* const*>(arguments));
  _exit(errno == ENOENT ? 127 : 126);
}

}  // namespace

std::string DescribeProcess(pid_t pid) {
  const std::string folder = fmt::format("/proc/{}", pid);
  std::string text = ReadProcFile(folder + "/status", 16 << 10);
  const std::unique_ptr<DIR, int (*)(DIR*)> tasks(opendir((folder + "/task").c_str()), closedir);
  int threads = 0;
  while (tasks != nullptr && threads < kMaxThreads) {
    const dirent* entry = readdir(tasks.get());
    if (entry == nullptr) break;
    if (entry->d_name[0] == '.') continue;
    ++threads;
    const std::string task = folder + "/task/" + entry->d_name;
    text += fmt::format("thread {}\n  stat {}\n  wchan {}\n  syscall {}\n", entry->d_name,
                        ReadProcFile(task + "/stat", 4096), ReadProcFile(task + "/wchan", 256),
                        ReadProcFile(task + "/syscall", 1024));
  }
  return text;
}

StackTaker::~StackTaker() {
  for (const Child& child : children_) {
    loop_.Unwatch(child.pidfd.get());
    kill(child.pid, SIGKILL);
    waitpid(child.pid, nullptr, 0);
  }
  for (const Batch& batch : batches_) loop_.Cancel(batch.deadline);
}

void StackTaker::Take(const std::vector<StackTarget>& targets, const std::string& folder,
                      std::function<void()> done) {
  const uint64_t id = next_batch_++;
  mkdir(folder.c_str(), 0777);
  batches_.push_back({id, loop_.RunAfter(kLimit, [this, id] { Kill(id); }), std::move(done)});
  for (const StackTarget& target : targets) Start(id, target, folder);
  loop_.Post([this, id] { FinishIfDone(id); });  // later also when there was nothing to do
}

void StackTaker::Start(uint64_t batch, const StackTarget& target, const std::string& folder) {
  UniqueFd file(open(fmt::format("{}/rank{}.txt", folder, target.rank).c_str(),
                     O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!file.is_open()) return;
  Print(file.get(), DescribeProcess(target.pid) + "\n");
  const std::string pid_text = std::to_string(target.pid);
  const pid_t agent = getpid();
  const pid_t pid = fork();
  if (pid == 0) BecomeStackPrinter(pid_text.c_str(), file.get(), agent);
  if (pid < 0) return Print(file.get(), "no native stacks: fork failed\n");
  absl::StatusOr<UniqueFd> pidfd = OpenPidFd(pid);
  if (!pidfd.ok() || !loop_.Watch(pidfd->get(), [this, pid] { Ended(pid); }).ok()) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    return Print(file.get(), "no native stacks: too many open files\n");
  }
  children_.push_back({batch, pid, std::move(*pidfd), std::move(file)});
}

void StackTaker::Ended(pid_t pid) {
  const auto child = std::find_if(children_.begin(), children_.end(),
                                  [pid](const Child& one) { return one.pid == pid; });
  if (child == children_.end()) return;
  int status = 0;
  waitpid(pid, &status, 0);
  loop_.Unwatch(child->pidfd.get());
  if (WIFSIGNALED(status)) {
    Print(child->file.get(), "native stacks are cut short: eu-stack took longer than 10 s\n");
  } else if (WEXITSTATUS(status) == 127) {
    Print(child->file.get(),
          "no native stacks: eu-stack was not found in PATH (Debian: elfutils)\n");
  } else if (WEXITSTATUS(status) != 0) {
    Print(child->file.get(),
          "native stacks may be missing: eu-stack failed; may we trace the process "
          "(kernel.yama.ptrace_scope)?\n");
  }
  const uint64_t batch = child->batch;
  children_.erase(child);
  FinishIfDone(batch);
}

void StackTaker::Kill(uint64_t batch) {
  for (const Child& child : children_) {
    if (child.batch == batch) kill(child.pid, SIGKILL);
  }
}

void StackTaker::FinishIfDone(uint64_t id) {
  for (const Child& child : children_) {
    if (child.batch == id) return;
  }
  const auto batch = std::find_if(batches_.begin(), batches_.end(),
                                  [id](const Batch& one) { return one.id == id; });
  if (batch == batches_.end()) return;
  loop_.Cancel(batch->deadline);
  const std::function<void()> done = std::move(batch->done);
  batches_.erase(batch);
  done();
}

}  // namespace outlast
