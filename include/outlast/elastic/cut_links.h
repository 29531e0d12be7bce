// Whose link is cut, where agents that all reach the coordinator do not all reach each other: pure.
#pragma once

#include <string>
#include <vector>

namespace outlast {

// Of a generation whose agents are all heard of. Each follower has one connection, to the lead.
struct CutLinks {
  std::string lead;                     // the node that holds rank 0
  std::vector<std::string> followers;   // the other nodes that hold ranks
  std::vector<std::string> cut;         // those of them between whom and the lead there is none
  std::vector<std::string> blamed_yet;  // for a cut from this same lead, in earlier generations
};

// The nodes to go on without; empty: nothing is cut. One that most others cannot reach is to blame
// itself; else those are who cannot reach it. A single cut has two ends: its follower is, unless
// another one was blamed before it, so that the lead is what both have in common.
std::vector<std::string> JudgeCutLinks(const CutLinks& links);

}  // namespace outlast
