#include "blackbox/fork_guard.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "outlast/base/mutex.h"

namespace outlast::blackbox {
namespace {

struct Range {
  void* data;
  size_t bytes;
};

// State of the process, since pthread_atfork's handlers have no argument. Never destroyed: a thread may fork at exit.
struct Guarded {
  Mutex mutex;
  std::vector<Range> ranges ABSL_GUARDED_BY(mutex);
};

Guarded& TheGuarded() {
  static Guarded* guarded = new Guarded;
  return *guarded;
}

// Held over the fork, so that the child finds the list whole.
void BeforeFork() ABSL_NO_THREAD_SAFETY_ANALYSIS { TheGuarded().mutex.Lock(); }
void AfterForkInParent() ABSL_NO_THREAD_SAFETY_ANALYSIS { TheGuarded().mutex.Unlock(); }

void DropLocked(Guarded& guarded) ABSL_EXCLUSIVE_LOCKS_REQUIRED(guarded.mutex) {
  for (const Range& range : guarded.ranges) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    if (mmap(range.data, range.bytes, PROT_READ | PROT_WRITE, kFlags, -1, 0) == MAP_FAILED) {
      munmap(range.data, range.bytes);  // better that the child crashes than that it writes
    }
  }
  guarded.ranges.clear();
}

void AfterForkInChild() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  DropLocked(TheGuarded());
  TheGuarded().mutex.Unlock();
}

}  // namespace

void GuardAgainstFork(void* data, size_t bytes) {
  [[maybe_unused]] static const int installed = pthread_atfork(BeforeFork, AfterForkInParent, AfterForkInChild);
  MutexLock lock(TheGuarded().mutex);
  TheGuarded().ranges.push_back({data, bytes});
}

void ForgetGuarded(void* data) {
  MutexLock lock(TheGuarded().mutex);
  std::erase_if(TheGuarded().ranges, [data](const Range& range) { return range.data == data; });
}

void DropGuarded() {
  MutexLock lock(TheGuarded().mutex);
  DropLocked(TheGuarded());
}

}  // namespace outlast::blackbox
