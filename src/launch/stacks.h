// Native stacks of workers, written to files for people. Each is taken by `eu-stack` in a child
// with a deadline, after what /proc says of the process and its threads; a stopped process and one
// that waits in the kernel give theirs too.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/event_loop.h"
#include "outlast/base/fd.h"

namespace outlast {

struct StackTarget {
  int rank;
  pid_t pid;
};

// Belongs to its loop's thread. Where eu-stack is missing or may not trace, the file says so in one
// line.
class StackTaker {
 public:
  explicit StackTaker(EventLoop& loop) : loop_(loop) {}
  // Kills the children that still run.
  ~StackTaker();

  // Writes <folder>/rank<r>.txt for each target; then calls `done`, after 10 s at the latest.
  void Take(const std::vector<StackTarget>& targets, const std::string& folder,
            std::function<void()> done);

 private:
  struct Child {
    uint64_t batch;
    pid_t pid;
    UniqueFd pidfd;
    UniqueFd file;
  };
  struct Batch {
    uint64_t id;
    EventLoop::TimerId deadline;
    std::function<void()> done;
  };

  void Start(uint64_t batch, const StackTarget& target, const std::string& folder);
  void Ended(pid_t pid);
  void Kill(uint64_t batch);
  void FinishIfDone(uint64_t batch);

  EventLoop& loop_;
  std::list<Child> children_;
  std::list<Batch> batches_;
  uint64_t next_batch_ = 1;
};

// What /proc says of a process: state, signals, and of each thread where in the kernel it is. Never
// waits for it.
std::string DescribeProcess(pid_t pid);

}  // namespace outlast
