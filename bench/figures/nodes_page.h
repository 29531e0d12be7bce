// The page that the nodes trainer's ranks and the driver share.
#pragma once

#include <atomic>
#include <cstdint>

namespace outlast::bench {

inline constexpr int kNodeRanks = 4;

// What one rank's process writes; it stays when the process is killed. Times: CLOCK_MONOTONIC, ns.
struct alignas(128) NodeCell {
  std::atomic<int32_t> pid;
  std::atomic<int64_t> steps;          // all that this process has completed
  std::atomic<int64_t> first_step_ns;  // after the first step of `generation`
  std::atomic<uint64_t> generation;    // written after all others
  // Of the stubborn ones: when the process of an attempt began, and when rank 1 gave up.
  std::atomic<int64_t> began_ns[2];
  std::atomic<int64_t> failed_ns;
};

struct NodesPage {
  NodeCell cells[kNodeRanks];
};

}  // namespace outlast::bench
