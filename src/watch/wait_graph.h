// Who waits for whom: rule 3 and 4 of the verdict, over the communicator tables of all ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "watch/verdict.h"

namespace outlast {

// What one stuck operation says: `waiting` joined it, `missing` did not. Numbers index the ranks
// that were given.
struct WaitGroup {
  CommFinding comm;
  CommKind kind = CommKind::kOther;
  std::vector<int> waiting;
  std::vector<int> missing;
  bool is_pair = false;     // a send or a receive: waiting[0] -> missing[0]
  bool is_complete = true;  // every member and its progress are known
  // Members live on other nodes, and may be all that is missing.
  bool is_elsewhere = false;
};

// Members of one operation that entered it with different signatures.
struct Divergence {
  CommFinding comm;
  std::string kind;  // type, size, datatype, root, reduction, order
  uint64_t first_seq = 0;
  std::vector<int> minority;  // of a tie: all sides
  std::vector<int> majority;  // empty for a tie
  std::vector<int> waiting;
  std::string detail;  // "all_reduce of 1024 against ..."
};

struct WaitGraph {
  std::vector<WaitGroup> groups;  // with someone missing, or elsewhere
  std::vector<WaitGroup> full;    // pending although all joined
  std::vector<Divergence> divergences;
};

// `ranks` ascending by rank; null for a rank without usable data in both looks. `elsewhere`: as in
// VerdictOptions.
WaitGraph BuildWaitGraph(std::span<const RankLooks> ranks, int world,
                         const std::vector<bool>& elsewhere = {});

}  // namespace outlast
