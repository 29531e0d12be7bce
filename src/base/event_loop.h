// One thread's epoll loop: descriptors, timers, and work posted from other threads. No polling: it
// sleeps until one of them is due.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "outlast/base/fd.h"
#include "outlast/base/mutex.h"

namespace outlast {

// All calls but Post and Stop belong to the thread that runs Run (or come before it). Callbacks may
// add and remove anything, themselves too; an event for a descriptor that was removed in the same
// batch is dropped.
class EventLoop {
 public:
  using TimerId = uint64_t;

  static absl::StatusOr<std::unique_ptr<EventLoop>> Make();
  ~EventLoop();

  // Calls `ready` whenever `fd`, which is borrowed, has something to read (a pidfd: the process
  // ended) or was hung up.
  absl::Status Watch(int fd, std::function<void()> ready);
  // While `wanted`, a watched `fd` is ready as well whenever it takes bytes: a socket whose peer
  // reads again, or whose connect is decided. Not at first.
  absl::Status WatchWrites(int fd, bool wanted);
  void Unwatch(int fd);

  // Calls `due` once at `deadline` on the Clock::Real().Uptime() scale, or never after Cancel.
  TimerId RunAt(absl::Duration deadline, std::function<void()> due);
  TimerId RunAfter(absl::Duration delay, std::function<void()> due);
  void Cancel(TimerId id);

  // Runs `work` on the loop's thread, in the order of the calls. Any thread.
  void Post(std::function<void()> work);

  // Runs until Stop. What was posted before Stop still runs. May be run again.
  void Run();
  // Any thread; may be called twice.
  void Stop();

 private:
  EventLoop(UniqueFd epoll, UniqueFd wake) : epoll_(std::move(epoll)), wake_(std::move(wake)) {}
  void RunPosted();
  void RunDueTimers();
  int TimeoutMillis() const;

  struct Watched {
    uint64_t serial;
    std::function<void()> ready;
  };

  UniqueFd epoll_;
  UniqueFd wake_;  // an eventfd
  uint64_t next_serial_ = 1;
  // Events carry the serial, not the descriptor: a number that was closed and reused gets no stale
  // event.
  std::unordered_map<int, Watched> watched_;
  std::unordered_map<uint64_t, int> fd_of_serial_;
  std::map<std::pair<absl::Duration, TimerId>, std::function<void()>> timers_;
  std::unordered_map<TimerId, absl::Duration> deadline_of_timer_;

  Mutex mutex_;
  std::vector<std::function<void()>> posted_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace outlast
