#include "base/serial_thread.h"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <utility>

namespace outlast {

namespace {

constexpr int kBackgroundNice = 5;  // a third of the usual weight

void LowerPriority() {  // wishes
  const sched_param none{};
  pthread_setschedparam(pthread_self(), SCHED_BATCH, &none);
  const auto self = static_cast<id_t>(gettid());
  if (getpriority(PRIO_PROCESS, self) < kBackgroundNice)
    setpriority(PRIO_PROCESS, self, kBackgroundNice);
}

}  // namespace

SerialThread::SerialThread(const char* name, Priority priority)
    : thread_([this, priority] { Loop(priority); }) {
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

void SerialThread::Loop(Priority priority) {
  if (priority == Priority::kBackground) LowerPriority();
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
