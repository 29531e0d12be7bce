// A named thread that runs what is posted to it, in order.
#pragma once

#include <deque>
#include <functional>
#include <thread>

#include "outlast/base/mutex.h"

namespace outlast {

// Safe for concurrent use. Destruction runs what was posted, then joins.
class SerialThread {
 public:
  explicit SerialThread(const char* name);
  ~SerialThread();

  void Post(std::function<void()> work);

 private:
  void Loop();

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace outlast
