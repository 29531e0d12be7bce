// Collectives for ranks of one machine, over shared memory: what a CPU trainer needs, and an abort
// ends every wait.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "outlast/run/generation.h"
#include "outlast/run/run.h"

namespace outlast {

struct CollectiveOptions {
  // How long to wait for the other ranks. Infinite: until they come, or the watchdog or an abort
  // ends it.
  absl::Duration timeout = absl::InfiniteDuration();
};

// All ranks of a generation. Every rank calls the same operations with the same sizes in the same
// order; one thread a rank, the trainer's. Lives inside the body of its generation.
//
// Errors of every operation. kAborted: the generation ended. kInvalidArgument: more than max_bytes,
// or a rank called another operation, which is named; all ranks get it. kDeadlineExceeded: the
// others did not come within the timeout. kFailedPrecondition: an earlier operation failed on some
// rank. After an error the group is of no use any more: make one in the next generation (or, before
// an abort, one with another name).
class ShmGroup {
 public:
  // kInvalidArgument: a peer gave another max_bytes. Takes (ranks + 1) * max_bytes of memory on the
  // machine; the next generation's group of this name reuses it.
  static absl::StatusOr<ShmGroup> Make(Generation& generation, Run& run, std::string_view name,
                                       size_t max_bytes);
  ShmGroup(ShmGroup&&) noexcept;
  ShmGroup& operator=(ShmGroup&&) = delete;
  ~ShmGroup();

  // Replaces `data` by its sum over all ranks, ((rank 0 + rank 1) + rank 2) + ...: the same bits on
  // every rank and in every run. On an error `data` is as it was.
  absl::Status AllReduceSum(std::span<float> data, const CollectiveOptions& options = {});
  // Returns once all ranks have called it.
  absl::Status Barrier(const CollectiveOptions& options = {});
  // Copies `data` of rank `root` to all ranks. On an error `data` is as it was, or the root's
  // already.
  absl::Status Broadcast(std::span<std::byte> data, int root,
                         const CollectiveOptions& options = {});

 private:
  class Impl;
  explicit ShmGroup(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace outlast
