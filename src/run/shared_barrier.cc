#include "run/shared_barrier.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "base/error.h"
#include "outlast/base/clock.h"

namespace outlast {
namespace {

constexpr uint32_t kBroken = uint32_t{1} << 31;
constexpr uint32_t kCount = kBroken - 1;
constexpr int64_t kLongestSleepNs =
    50'000'000;  // an abort wakes sleepers; this is for one whose reader thread is stuck
constexpr int kSpins = 100;  // about a microsecond: peers on idle cores are seldom later
constexpr int kYields = 4;   // then let peers that share our core run

void SleepWhile(std::atomic<uint32_t>& word, uint32_t value, int64_t ns) {
  const timespec timeout{static_cast<time_t>(ns / 1'000'000'000),
                         static_cast<long>(ns % 1'000'000'000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &timeout, nullptr, 0);
}

void WakeAll(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

bool BarrierMember::IsReached(uint32_t phase) const { return (phase & kCount) == target_; }

absl::Status BarrierMember::Wait(int64_t deadline_ns, const std::function<absl::Status()>& check,
                                 const std::function<void()>& before_release) {
  target_ = (target_ + 1) & kCount;
  if (shared_->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < world_)
    return WaitForPhase(deadline_ns, check);
  if (before_release) before_release();
  shared_->arrived.store(0, std::memory_order_relaxed);
  uint32_t phase = shared_->phase.load(std::memory_order_relaxed);
  while (!shared_->phase.compare_exchange_weak(phase, (phase & kBroken) | target_)) {
  }
  if (shared_->sleepers.load() > 0) WakeAll(shared_->phase);
  return absl::OkStatus();
}

absl::Status BarrierMember::WaitForPhase(int64_t deadline_ns,
                                         const std::function<absl::Status()>& check) {
  for (int round = 0;; ++round) {
    const uint32_t phase = shared_->phase.load(std::memory_order_acquire);
    if (IsReached(phase))
      return absl::OkStatus();  // first: what all reached is good, whatever came after
    if ((phase & kBroken) != 0 || round >= kSpins + kYields) {
      OUTLAST_RETURN_IF_ERROR(check());
      OUTLAST_RETURN_IF_ERROR(CheckWhole());
    }
    if (round < kSpins) {
      Pause();
      continue;
    }
    if (round < kSpins + kYields) {
      sched_yield();
      continue;
    }
    const int64_t left = deadline_ns - MonotonicNanos();
    if (left <= 0) return GiveUp();
    // The sleeper is counted before the word is compared, and the last rank writes the word before
    // it counts.
    shared_->sleepers.fetch_add(1);
    SleepWhile(shared_->phase, phase, std::min(left, kLongestSleepNs));
    shared_->sleepers.fetch_sub(1);
  }
}

absl::Status BarrierMember::GiveUp() {
  uint32_t nobody = 0;
  shared_->gave_up.compare_exchange_strong(nobody, rank_ + 1);
  Break();
  return absl::DeadlineExceededError("");
}

void BarrierMember::Break() {
  shared_->phase.fetch_or(kBroken);
  WakeAll(shared_->phase);
}

absl::Status BarrierMember::CheckWhole() const {
  if ((shared_->phase.load(std::memory_order_acquire) & kBroken) == 0) return absl::OkStatus();
  const uint32_t gave_up = shared_->gave_up.load();
  if (gave_up == 0) return absl::AbortedError("a peer left");
  return Error(absl::StatusCode::kFailedPrecondition,
               "rank {} gave up waiting earlier: the group cannot be used any more", gave_up - 1);
}

}  // namespace outlast
