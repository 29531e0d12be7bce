// A trainer's view of one membership of the job.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "outlast/base/memory.h"

namespace outlast {

class RunState;
struct Membership;

// Lives for one call of ForEachGeneration's body. Safe for concurrent use.
class Generation {
 public:
  Generation(std::shared_ptr<RunState> state, const Membership& membership);
  ~Generation();  // joins the callbacks that ran; one that blocks for ever is left to the agent,
                  // which replaces the process

  uint64_t number() const { return number_; }
  int rank() const { return rank_; }
  int world() const { return world_; }
  // Micro-batches that each rank computes in a step of this world, so that the global batch is the
  // same in every world: accumulate the gradients of so many. 0: the job has no --micro-batches, or
  // this world (formed without an agent) does not split them evenly.
  int micro_batches() const;
  // The node that holds `rank`, as a number from 0: ranks of one node share memory
  // (SharedMemory). -1: not known, for no agent formed this generation.
  int node_of(int rank) const { return nodes_.empty() ? -1 : nodes_[static_cast<size_t>(rank)]; }

  // OK while this generation stands. kAborted: a peer came or went, or a stop was agreed and its
  // step is saved; unwind to ForEachGeneration, which decides what is next. Two loads; call it once
  // a step or more.
  absl::Status Check() const;
  bool is_aborted() const { return !Check().ok(); }

  // Runs `callback` once, on a thread of its own, when the generation is aborted (at once if it is
  // already): break what blocks the trainer, such as communicators. It may block: a survivor that
  // is not back in ForEachGeneration within the grace (10 s) is replaced by a new process. What it
  // throws is caught, and told on standard error. What it captures must live as long as the body's
  // call.
  void OnAbort(std::function<void()> callback);

  // A small key-value store of this generation alone, such as for an ncclUniqueId: up to 64 KiB a
  // value, keys up to 256 bytes. Put: kAlreadyExists when the key holds another value. Get waits
  // until a peer has put the key. kDeadlineExceeded: nobody did within `timeout`, naming key and
  // generation. kAborted: the generation ended.
  absl::Status Put(std::string_view key, std::string_view value);
  absl::StatusOr<std::string> Get(std::string_view key, absl::Duration timeout);

  // Zeroed memory of `bytes` that all ranks of this machine share in this generation under `name`.
  // The first call makes it; kInvalidArgument: a peer asked for another size.
  absl::StatusOr<Mapping> SharedMemory(std::string_view name, size_t bytes);

 private:
  std::shared_ptr<RunState> state_;
  const uint64_t number_;
  const int rank_;
  const int world_;
  const std::vector<int> nodes_;  // by rank
};

}  // namespace outlast
