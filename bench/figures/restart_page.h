// The page that the restart trainer's ranks and the driver share.
#pragma once

#include <atomic>
#include <cstdint>

namespace outlast::bench {

inline constexpr int kRestartRanks = 4;

// What one slot's process writes; it stays when the process is killed.
struct alignas(128) RestartCell {
  std::atomic<int32_t> pid;
  std::atomic<int64_t> step;           // the newest that was completed
  std::atomic<int64_t> durable;        // the newest step on disk, as this rank knows it
  std::atomic<int64_t> step_before;    // the newest completed when this generation began
  std::atomic<int64_t> restored;       // where this generation began
  std::atomic<int64_t> first_step_ns;  // CLOCK_MONOTONIC, after the first step of `generation`
  std::atomic<uint64_t> generation;    // written after all others: its first step is done
};

struct RestartPage {
  std::atomic<int32_t> driver;  // its process: without it the trainers end
  RestartCell cells[kRestartRanks];
};

}  // namespace outlast::bench
