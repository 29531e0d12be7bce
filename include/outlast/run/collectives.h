// Collectives for CPU trainers: shared memory between the ranks of a node, TCP between nodes. An
// abort ends every wait.
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
//
// A rank of another node that is gone breaks its connection before the agents know. An operation
// then waits for the abort that follows: kAborted. kUnavailable, naming the rank: none came.
class Group {
 public:
  // kInvalidArgument: a peer gave another max_bytes. Takes (ranks of the node + 1) * max_bytes of
  // memory on each node; the next generation's group of this name reuses it. Where the ranks are on
  // several nodes (Generation::node_of) it connects them, which waits for all: kDeadlineExceeded
  // after 40 s and 10 ms a rank. Ranks listen on WorkerEnvironment::address, and take in only who
  // knows a secret of this generation; what they send is not encrypted.
  static absl::StatusOr<Group> Make(Generation& generation, Run& run, std::string_view name,
                                    size_t max_bytes);
  Group(Group&&) noexcept;
  Group& operator=(Group&&) = delete;
  ~Group();

  // Replaces `data` by its sum over all ranks, ((rank 0 + rank 1) + rank 2) + ...: the same bits on
  // every rank, in every run, and wherever the ranks are. On an error `data` is as it was.
  absl::Status AllReduceSum(std::span<float> data, const CollectiveOptions& options = {});
  // Returns once all ranks have called it.
  absl::Status Barrier(const CollectiveOptions& options = {});
  // Copies `data` of rank `root` to all ranks. On an error `data` is as it was, or the root's
  // already.
  absl::Status Broadcast(std::span<std::byte> data, int root,
                         const CollectiveOptions& options = {});

 private:
  friend class GroupAccess;  // internal: src/run/group_access.h
  class Impl;
  explicit Group(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace outlast
