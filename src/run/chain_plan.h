// Where the sum of a group of several nodes goes along: pure.
//
// Ranks that follow each other on one node are a *stage*; stages are in the order of ranks, so a
// sum that is handed from stage to stage is ((rank 0 + rank 1) + rank 2) + ... wherever ranks are.
// Where a node's ranks have gaps, it has several stages.
//
//   stage 0 ──sum──> stage 1 ──sum──> stage 2        an edge joins stage e and e + 1: the sum so
//   far
//           <─total─         <─total─                goes one way, the total comes back on it
//
// A *lane* is one such chain for a part of the bytes: lane l of a stage is held by the l-th rank of
// its node. There are as many lanes as the node with the fewest ranks can hold, at most kMaxLanes.
#pragma once

#include <vector>

namespace outlast {

inline constexpr int kMaxLanes = 4;

struct Stage {
  int node = 0;
  int first_rank = 0;
  int count = 0;
  bool operator==(const Stage&) const = default;
};

struct ChainPlan {
  std::vector<Stage> stages;     // of all nodes
  std::vector<int> own_stages;   // those on this rank's node
  std::vector<int> local_ranks;  // of this node, ascending
  int local_index = 0;           // of this rank in local_ranks
  int lanes = 1;
  std::vector<int> lane_of_stage;  // by stage: the rank that holds this rank's lane there

  bool is_one_node() const { return stages.size() == 1; }
  bool holds_a_lane() const { return local_index < lanes; }
  int StageOf(int rank) const;
};

// `node_of` by rank; not empty.
ChainPlan PlanChain(const std::vector<int>& node_of, int rank);

}  // namespace outlast
