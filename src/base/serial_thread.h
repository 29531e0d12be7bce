// A named thread that runs what is posted to it, in order.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <thread>

#include "outlast/base/mutex.h"

namespace outlast {

// Safe for concurrent use. Destruction runs what was posted, then joins.
class SerialThread {
 public:
  // kBackground: a batch thread (sched(7)) of lower weight, which never takes a core from others
  // the moment it wakes; for work that training must not feel.
  enum class Priority : uint8_t { kNormal, kBackground };
  explicit SerialThread(const char* name, Priority priority = Priority::kNormal);
  ~SerialThread();

  void Post(std::function<void()> work);

 private:
  void Loop(Priority priority);

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace outlast
