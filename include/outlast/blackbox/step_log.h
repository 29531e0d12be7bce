// The rank's finished steps: a ring of 32,768 records of 128 B, which the agent drains.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "outlast/blackbox/segment.h"

namespace outlast {

enum StepFlag : uint16_t { kStepWarmUp = 1, kStepEval = 2, kStepAborted = 4, kStepCaptured = 8 };

struct StepRecord {
  uint64_t seq;  // from 1, set by Append; record n is at (n - 1) % records
  uint64_t step;
  uint64_t start_ns, end_ns;  // CLOCK_MONOTONIC
  uint64_t data_ns, forward_ns, backward_ns, optimizer_ns, checkpoint_stall_ns, collective_wait_ns;
  uint32_t tokens_real, tokens_padded, tokens_loss, samples;
  double model_flops;  // 0: unknown
  uint64_t generation;
  float loss, gradient_norm;  // NaN as measured
  uint16_t flags;             // StepFlags
  uint16_t zero;
  uint32_t crc;  // CRC32C of bytes 0..123, set by Append
};
static_assert(sizeof(StepRecord) == 128 && offsetof(StepRecord, step) == 8 && offsetof(StepRecord, start_ns) == 16);
static_assert(offsetof(StepRecord, end_ns) == 24 && offsetof(StepRecord, data_ns) == 32);
static_assert(offsetof(StepRecord, forward_ns) == 40 && offsetof(StepRecord, backward_ns) == 48);
static_assert(offsetof(StepRecord, optimizer_ns) == 56 && offsetof(StepRecord, checkpoint_stall_ns) == 64);
static_assert(offsetof(StepRecord, collective_wait_ns) == 72 && offsetof(StepRecord, tokens_real) == 80);
static_assert(offsetof(StepRecord, tokens_padded) == 84 && offsetof(StepRecord, tokens_loss) == 88);
static_assert(offsetof(StepRecord, samples) == 92 && offsetof(StepRecord, model_flops) == 96);
static_assert(offsetof(StepRecord, generation) == 104 && offsetof(StepRecord, loss) == 112);
static_assert(offsetof(StepRecord, gradient_norm) == 116 && offsetof(StepRecord, flags) == 120);
static_assert(offsetof(StepRecord, zero) == 122 && offsetof(StepRecord, crc) == 124);

// Appends steps; one writer a segment. Borrows the segment. Goes on after the last record of an older process.
class StepLogWriter {
 public:
  explicit StepLogWriter(Segment& segment);

  // Stores `record` with the next seq, which is returned, and its CRC. About 30 ns.
  uint64_t Append(StepRecord record);

 private:
  std::span<StepRecord> ring_;
  uint64_t next_seq_ = 1;
};

struct StepLogRead {
  std::vector<StepRecord> records;  // by seq
  uint64_t lost = 0;                // from from_seq on: overwritten before they were read, or torn
  uint64_t next_seq = 1;            // pass it as from_seq next time
};

// The records from `from_seq` on (1: all that are kept). Costs what is new, not the size of the ring.
StepLogRead ReadStepLog(const SegmentView& view, uint64_t from_seq);

}  // namespace outlast
