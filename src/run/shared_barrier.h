// A barrier of the ranks of one machine, in shared memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace outlast {

// Lies zeroed in shared memory. A rank that dies inside leaves it unusable, and its generation
// ends.
struct SharedBarrier {
  // Bits 0..30 count the barriers that all ranks reached; bit 31 says that it is broken. The futex
  // word.
  alignas(64) std::atomic<uint32_t> phase;
  alignas(64) std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> gave_up;  // 1 + the rank whose timeout broke it
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

// One rank's view. One thread waits; Break may come from any.
class BarrierMember {
 public:
  BarrierMember(SharedBarrier* shared, uint32_t rank, uint32_t world)
      : shared_(shared), rank_(rank), world_(world) {}

  // Returns when all ranks have come; the last one calls `before_release` before the others go on.
  // `check` is asked while waiting, 20 times a second and after each wake-up; its error ends the
  // wait. kDeadlineExceeded: not all came by `deadline` (MonotonicNanos), which breaks the barrier.
  // kFailedPrecondition: it is broken.
  absl::Status Wait(int64_t deadline_ns, const std::function<absl::Status()>& check,
                    const std::function<void()>& before_release);
  // Ends all waits, of all ranks, present and later ones.
  void Break();
  absl::Status CheckWhole() const;

 private:
  bool IsReached(uint32_t phase) const;
  absl::Status WaitForPhase(int64_t deadline_ns, const std::function<absl::Status()>& check);
  absl::Status GiveUp();

  SharedBarrier* shared_;
  uint32_t rank_;
  uint32_t world_;
  uint32_t target_ = 0;
};

}  // namespace outlast
