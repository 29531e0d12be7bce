// Hears of a worker's death when the kernel begins to take the process apart, not when that is
// done: with much memory the rest takes milliseconds to seconds, and its peers need not wait for
// it.
//
// Each joined worker holds a robust mutex in its black box (Segment::HoldDeathNotice). The kernel
// marks it and wakes a futex waiter when the holder dies (robust_list, get_robust_list(2)). One
// thread waits for all of them by futex_waitv (Linux 5.16); on an older kernel nothing is told, and
// the process's end is what counts.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/event_loop.h"
#include "outlast/base/mutex.h"

namespace outlast {

// Safe for concurrent use.
class DeathWatch {
 public:
  struct Life {
    int slot = 0;
    uint64_t incarnation = 0;
    pid_t pid = 0;
    uint32_t* word = nullptr;  // of the death notice; outlives the watch
  };
  // `told` runs on the loop's thread: the process is dying of `signal`. A process that exits by
  // itself is not told, for its exit code is not known yet.
  using Told = std::function<void(int slot, uint64_t incarnation, int signal)>;

  // The loop outlives the watch.
  DeathWatch(EventLoop& loop, Told told);
  ~DeathWatch();

  // Takes the place of what was watched for the slot. A life that is watched already stays so.
  void Watch(const Life& life);

 private:
  struct Watched {
    Life life;
    bool is_over = false;  // told, or released by itself
  };
  void Loop();
  // The lives whose words are to be waited for, after those that ended were told.
  std::vector<Life> Look();
  void Tell(const Life& life);

  EventLoop& loop_;
  const std::shared_ptr<Told> told_;  // null once the watch has ended: posted work may outlive it
  uint32_t changes_ = 0;              // a futex word of our own: the list has changed

  Mutex mutex_;
  std::vector<Watched> watched_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace outlast
