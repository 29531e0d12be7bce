// What the steps of a rank, or of all ranks here, add up to: counters that never fall while the
// agent lives, whatever dies. An aborted step counts for nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "outlast/blackbox/step_log.h"

namespace outlast {

// The parts of a step's time, in the order of StepTotals::part_ns. `other` is what no phase was
// named for; the collective wait lies inside forward, backward and optimizer.
inline constexpr std::array<const char*, 6> kStepParts = {
    "data", "forward", "backward", "optimizer", "checkpoint_stall", "other"};

struct StepTotals {
  // Upper bounds of the histogram's buckets, in seconds; one more holds the rest.
  static constexpr std::array<double, 16> kBounds = {
      0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100};
  static constexpr size_t kWindow = 64;  // steps that the MFU is of

  uint64_t steps = 0;
  uint64_t tokens = 0;  // real ones
  uint64_t samples = 0;
  double model_flops = 0;
  int64_t time_ns = 0;
  std::array<int64_t, kStepParts.size()> part_ns{};
  int64_t collective_wait_ns = 0;
  std::array<uint64_t, kBounds.size() + 1> buckets{};  // not cumulative
  int64_t last_end_ns = 0;                             // CLOCK_MONOTONIC; 0: none

  void Add(const StepRecord& step);
  // Of the last steps, against a device that can do `peak_flops_per_second`: FLOPs done, and those
  // that it could have done in their time, saves left out.
  double window_flops() const { return window_flops_; }
  double window_seconds() const { return static_cast<double>(window_ns_) / 1e9; }

 private:
  struct Kept {
    double flops = 0;
    int64_t ns = 0;
  };
  std::array<Kept, kWindow> kept_{};
  double window_flops_ = 0;
  int64_t window_ns_ = 0;
};

// Of all ranks of an agent.
struct RunTotals {
  StepTotals job;       // of the lowest slot: its steps are the job's
  uint64_t tokens = 0;  // and these of all
  uint64_t samples = 0;
  double model_flops = 0;
  std::optional<double> mfu;  // of the last steps, 0..1; none: FLOPs or a peak are unknown
};

}  // namespace outlast
