// A checkpoint copied as it stands into another root.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "checkpoint/reader.h"
#include "checkpoint/root.h"

namespace outlast {

struct CopyResult {
  bool was_there = false;  // the same checkpoint; it was verified
  uint64_t bytes = 0;      // of shards that were written
};

// Copies `source` under its own name into `target`, whose claim is held. Every chunk is checked
// while it is read, the copy is read back from the disk and checked again, and MANIFEST.json, the
// same bytes, comes last by link(2): the copy is a checkpoint from there on, or not at all. A pin
// is not copied. kFailedPrecondition: the root is another job's, or holds another checkpoint of
// that name. kDataLoss: the source or what was written is damaged, where. kAborted: another run
// took the root. After an error nothing of the copy is left. Reads twice and writes once.
absl::StatusOr<CopyResult> CopyCheckpoint(const CheckpointReader& source, Root& target,
                                          const OnBytes& on_bytes = {});

}  // namespace outlast
