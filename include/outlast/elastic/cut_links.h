// Whose link is cut, where agents that all reach the coordinator do not all reach each other: pure.
//
// Each follower has one connection, to the lead. Of the links between followers each agent watches
// those to the next two in the order of ranks, the last ones' next being the first: what a chain, a
// ring or a pipeline of ranks goes along, and so many that a node which is cut off from several is
// told from its neighbours.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "outlast/elastic/membership.h"

namespace outlast {

// By follower: the followers that its agent is to watch the links to.
using LinkPlan = std::map<std::string, std::vector<std::string>>;
LinkPlan PlanLinks(const RankMap& map);

// Two nodes, in the order of their names.
using NodePair = std::pair<std::string, std::string>;
NodePair PairOf(const std::string& one, const std::string& other);

// Of a generation whose agents are all heard of.
struct CutLinks {
  std::vector<std::string> nodes;  // that hold ranks, in the order of ranks: the first one leads
  std::vector<NodePair> watched;   // of each of them it is known whether it stands
  std::vector<NodePair> cut;       // those of them that do not
  // For which the one end was left out in earlier generations, and it may have been the other's
  // fault.
  std::vector<NodePair> cut_before;
};

struct CutOff {
  std::string node;  // to go on without
  std::string from;  // the other end of one of its cut links
  // The other end may be at fault as well: only the next cut can tell.
  bool is_in_doubt = false;
  bool operator==(const CutOff&) const = default;
};

// The nodes to go on without, none of which has all its links; empty: nothing is cut, or all is,
// which tells nothing. Where the nodes are in parts that do not reach each other, the largest one
// goes on, of two equal ones that of the lead. Else the node with the most cut links is to blame,
// those before included, then the next one, until no link that is left is cut. Of two that have as
// many it is not the lead, and then the one with the higher rank.
//
// Where nothing is known of links between followers: a lead that most of them do not reach is to
// blame itself; else those are who do not reach it, unless another one was blamed before them.
std::vector<CutOff> JudgeCutLinks(const CutLinks& links);

}  // namespace outlast
