// What one rank carries between nodes in a collective: its lane of its node's stages
// (chain_plan.h).
//
// Each edge is one TCP connection. A collective sends a word each way and then bytes: down the
// chain what the stages so far have called and the sum so far, up the chain what all have called
// and the total. A byte of a sum crosses each edge twice, once each way, and all edges are busy at
// once: it is passed on in pieces while the next ones still come. That is what a ring moves (2
// (k-1)/k times the bytes out of each of k nodes) and the owner of a block would get from one rank
// a node; with several ranks a node an owner who adds in the order of ranks would get each rank's
// block by itself. The price is the way: 2 (k-1) hops before the first total is back at the first
// stage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "outlast/base/fd.h"

namespace outlast {

// The rank at the other end of an edge.
struct ChainLink {
  UniqueFd fd;  // not open: there is none
  int rank = -1;
};

struct ChainStage {
  int number = 0;  // among all
  ChainLink previous;
  ChainLink next;
};

// What was called: by all so far, or by two that differ. As it is on the wire; little endian.
struct ChainWord {
  uint32_t magic = 0x4857434f;  // "OCWH"
  uint32_t differs = 0;
  uint64_t call = 0;
  uint64_t signature = 0;
  uint64_t other_signature = 0;
  int32_t rank = -1;
  int32_t other_rank = -1;
  uint32_t function = 0;
  uint32_t other_function = 0;
  uint32_t reserved[4] = {};
};
static_assert(sizeof(ChainWord) == 64);

// One thread, but for Shutdown.
class NodeChain {
 public:
  struct Wait {
    int64_t deadline_ns = 0;              // MonotonicNanos
    std::function<absl::Status()> check;  // asked 20 times a second; its error ends the wait
  };
  // Adds the values of the stage's ranks to `bytes` of what the stages before it gave, `from` bytes
  // into the call's; of stage 0, sets them.
  using Add = std::function<void(int stage, size_t from, std::span<std::byte> bytes)>;

  explicit NodeChain(std::vector<ChainStage> stages);

  // Errors of both: kInvalidArgument: the ranks called different things; `mine` says which.
  // kDeadlineExceeded. kUnavailable: a connection was lost, naming the rank. Those of wait.check.
  // After an error it is of no use any more.

  // Fills `total` with the sum over all stages, once all called the same.
  absl::Status Reduce(ChainWord* mine, std::span<std::byte> total, const Add& add,
                      const Wait& wait);
  // Carries `bytes` from the stage `root` to all. All have called the same (Reduce of nothing).
  absl::Status Spread(std::span<std::byte> bytes, int root, const Wait& wait);

  // A connection was lost because nothing was heard of the other machine any more.
  bool is_unheard() const { return is_unheard_; }

  // Ends all waits, here and at the other ends. Any thread.
  void Shutdown();
  // Nothing more will be sent; what was sent still arrives.
  void Finish();

 private:
  struct Flow;
  void ShutdownAll(int how);
  absl::Status Carry(std::vector<Flow>& flows, const Wait& wait);
  absl::Status Differ(std::vector<Flow>& flows, const ChainWord& word, ChainWord* mine);

  const std::vector<ChainStage> stages_;
  bool is_unheard_ = false;
};

}  // namespace outlast
