#include "base/serial_thread.h"

#include <pthread.h>

#include <utility>

namespace outlast {

SerialThread::SerialThread(const char* name) : thread_([this] { Loop(); }) {
  pthread_setname_np(thread_.native_handle(), name);
}

SerialThread::~SerialThread() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void SerialThread::Post(std::function<void()> work) {
  MutexLock lock(mutex_);
  queue_.push_back(std::move(work));
  changed_.NotifyAll();
}

void SerialThread::Loop() {
  while (true) {
    std::function<void()> work;
    {
      MutexLock lock(mutex_);
      while (queue_.empty() && !stopping_) changed_.Wait(mutex_);
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    work();
  }
}

}  // namespace outlast
