#include "launch/death_watch.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/prompt_thread.h"
#include "launch/process.h"
#include "outlast/base/clock.h"

namespace outlast {
namespace {

constexpr size_t kMostAtOnce = 127;  // FUTEX_WAITV_MAX, less our own word
constexpr int kSignalMask = 0x7f;    // of a wait status, wait(2)
// A dying process's status appears within microseconds; what takes longer is told by its end.
constexpr int kLooksAtStatus = 10;
constexpr absl::Duration kBetweenLooks = absl::Microseconds(100);

using Word = std::atomic_ref<uint32_t>;

// The signal that the process is dying of; 0: none, or not known. Field 52 of stat, proc(5), is the
// status that it will exit with.
int FatalSignalOf(pid_t pid) {
  for (int look = 0; look < kLooksAtStatus; ++look) {
    const std::string text = ReadProcFile(fmt::format("/proc/{}/stat", pid), 4096);
    const size_t last = text.find_last_of(' ');
    if (last == std::string::npos) return 0;
    const int status = std::atoi(text.c_str() + last + 1);
    if (status != 0) return status & kSignalMask;
    Clock::Real().SleepFor(kBetweenLooks);
  }
  return 0;
}

enum class Notice : uint8_t { kHeld, kReleased, kDied };

// A held word is marked as waited for: only then the kernel wakes a waiter.
Notice ReadNotice(uint32_t* word, uint32_t* expected) {
  uint32_t value = Word(*word).load(std::memory_order_acquire);
  while (true) {
    if ((value & FUTEX_OWNER_DIED) != 0) return Notice::kDied;
    if ((value & FUTEX_TID_MASK) == 0) return Notice::kReleased;
    *expected = value | FUTEX_WAITERS;
    if (value == *expected || Word(*word).compare_exchange_weak(value, *expected))
      return Notice::kHeld;
  }
}

futex_waitv WaitFor(uint32_t* word, uint32_t value) {
  return {.val = value,
          .uaddr = reinterpret_cast<uintptr_t>(word),
          .flags = FUTEX_32,  // shared between processes
          .__reserved = 0};
}

}  // namespace

DeathWatch::DeathWatch(EventLoop& loop, Told told)
    : loop_(loop), told_(std::make_shared<Told>(std::move(told))), thread_([this] { Loop(); }) {
  pthread_setname_np(thread_.native_handle(), "outlast-deaths");
}

DeathWatch::~DeathWatch() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  Word(changes_).fetch_add(1);
  syscall(SYS_futex, &changes_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  thread_.join();
  *told_ = nullptr;
}

void DeathWatch::Watch(const Life& life) {
  {
    MutexLock lock(mutex_);
    const auto same = std::find_if(watched_.begin(), watched_.end(),
                                   [&](const Watched& one) { return one.life.slot == life.slot; });
    if (same == watched_.end()) {
      watched_.push_back({life});
    } else if (same->life.incarnation == life.incarnation) {
      return;
    } else {
      *same = {life};
    }
  }
  Word(changes_).fetch_add(1);
  syscall(SYS_futex, &changes_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void DeathWatch::Loop() {
  BecomePrompt();
  while (true) {
    const uint32_t changes = Word(changes_).load();
    {
      MutexLock lock(mutex_);
      if (stopping_) return;
    }
    const Sight sight = Look();
    for (const Life& life : sight.dead) Tell(life);
    if (!sight.dead.empty()) continue;  // that took its time: others may have died meanwhile
    std::vector<futex_waitv> waits = {WaitFor(&changes_, changes)};
    for (size_t i = 0; i < std::min(sight.held.size(), kMostAtOnce); ++i)
      waits.push_back(WaitFor(sight.held[i], sight.held_value[i]));
    const long woken = syscall(SYS_futex_waitv, waits.data(), waits.size(), 0, nullptr, 0);
    if (woken < 0 && errno != EAGAIN && errno != EINTR) return;
  }
}

DeathWatch::Sight DeathWatch::Look() {
  Sight sight;
  MutexLock lock(mutex_);
  for (Watched& one : watched_) {
    if (one.is_over) continue;
    uint32_t value = 0;
    const Notice notice = ReadNotice(one.life.word, &value);
    one.is_over = notice != Notice::kHeld;
    if (notice == Notice::kDied) sight.dead.push_back(one.life);
    if (notice != Notice::kHeld) continue;
    sight.held.push_back(one.life.word);
    sight.held_value.push_back(value);
  }
  return sight;
}

void DeathWatch::Tell(const Life& life) {
  const int signal = FatalSignalOf(life.pid);
  if (signal == 0) return;
  loop_.Post([told = told_, life, signal] {
    if (*told != nullptr) (*told)(life.slot, life.incarnation, signal);
  });
}

}  // namespace outlast
