// Who holds which rank: a pure function from the last map and the agents that live now.
//
// A *rank map* gives each rank to a slot of a node, in runs. The rules of `Assign`, in this order:
//   1. A rank whose node lives stays where it is (its process, or the next one of the same node).
//   2. A rank whose node is gone goes to another member of the last generation with a free slot,
//      else to a spare: the same network segment first, then one that takes the whole group.
//   3. Else the world shrinks: whole model-parallel blocks (`unit` ranks) are kept and compacted in
//      order; what is left of broken ones is grouped to further blocks.
//   4. The global batch stays constant: only worlds that split it evenly are formed. When the
//      largest possible world doesn't, the next smaller one that does is taken, and when none does
//      the reason names those that would.
//   5. All other agents are spares.
//   6. When more than half of the last members are gone, the caller should doubt its own link
//      first: no shrinking until it says otherwise.
// The same input gives the same map, in whatever order the agents came.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace outlast {

// Ranks first_rank .. first_rank + count - 1 are held by slots first_slot ... of one node.
struct RankRun {
  std::string node;
  uint64_t incarnation = 0;  // of its agent
  std::string segment;       // of the network
  int first_rank = 0;
  int count = 0;
  int first_slot = 0;
  bool operator==(const RankRun&) const = default;
};

struct RankMap {
  std::vector<RankRun> runs;  // ascending by first_rank; ranks 0 .. world-1 without a gap
  int world = 0;
  // Micro-batches that each rank computes in a step; 0 where the global batch is not known.
  int micro_batches = 0;

  // The run of `rank`, or nullptr.
  const RankRun* Find(int rank) const;
  // The rank that `slot` of `node` holds, or -1.
  int RankOf(std::string_view node, int slot) const;
  bool Has(std::string_view node, uint64_t incarnation) const;
  bool operator==(const RankMap&) const = default;
};

struct LiveAgent {
  std::string node;
  uint64_t incarnation = 0;
  int capacity = 0;  // slots
  std::string segment;
  int slot_hint = -1;  // its place in the first world, if it has an opinion
};

struct MembershipOptions {
  int min_world = 1;
  int max_world = 1;
  int unit = 1;  // ranks of a model-parallel block
  // Micro-batches of a step in all; 0: not known, every multiple of `unit` fits.
  int global_micro_batches = 0;
};

struct AssignRequest {
  RankMap last;                 // without runs: the first world is formed
  std::vector<LiveAgent> live;  // those that may hold ranks, in any order
  std::vector<int> finished;    // ascending; done for ever: they stay with their last holder
  bool may_grow = false;        // towards max_world, by ranks appended at the end
  bool trusts_link = false;     // rule 6 is over
};

// The next map. kUnavailable: rule 6, ask again later. kFailedPrecondition: too few slots, or no
// world between min_world and what is possible fits; the message names numbers.
absl::StatusOr<RankMap> Assign(const AssignRequest& request, const MembershipOptions& options);

// `world` is between the limits, made of whole blocks, and splits the global batch evenly.
bool FitsWorld(int world, const MembershipOptions& options);
// kInvalidArgument: `max_world` itself does not fit; names the worlds that do.
absl::Status CheckLargestWorld(const MembershipOptions& options);

}  // namespace outlast
