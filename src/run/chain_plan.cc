#include "run/chain_plan.h"

#include <algorithm>
#include <cstddef>
#include <map>

namespace outlast {
namespace {

std::vector<Stage> StagesOf(const std::vector<int>& node_of) {
  std::vector<Stage> stages;
  for (size_t rank = 0; rank < node_of.size(); ++rank) {
    if (stages.empty() || stages.back().node != node_of[rank])
      stages.push_back({.node = node_of[rank], .first_rank = static_cast<int>(rank)});
    ++stages.back().count;
  }
  return stages;
}

}  // namespace

int ChainPlan::StageOf(int rank) const {
  int stage = 0;
  while (rank >=
         stages[static_cast<size_t>(stage)].first_rank + stages[static_cast<size_t>(stage)].count)
    ++stage;
  return stage;
}

ChainPlan PlanChain(const std::vector<int>& node_of, int rank) {
  ChainPlan plan;
  plan.stages = StagesOf(node_of);
  std::map<int, std::vector<int>> ranks_of;
  for (size_t peer = 0; peer < node_of.size(); ++peer)
    ranks_of[node_of[peer]].push_back(static_cast<int>(peer));
  const int node = node_of[static_cast<size_t>(rank)];
  plan.local_ranks = ranks_of[node];
  plan.local_index = static_cast<int>(
      std::find(plan.local_ranks.begin(), plan.local_ranks.end(), rank) - plan.local_ranks.begin());
  plan.lanes = kMaxLanes;
  for (const auto& [number, ranks] : ranks_of)
    plan.lanes = std::min(plan.lanes, static_cast<int>(ranks.size()));
  for (size_t stage = 0; stage < plan.stages.size(); ++stage) {
    const std::vector<int>& ranks = ranks_of[plan.stages[stage].node];
    if (plan.stages[stage].node == node) plan.own_stages.push_back(static_cast<int>(stage));
    if (plan.holds_a_lane())
      plan.lane_of_stage.push_back(ranks[static_cast<size_t>(plan.local_index)]);
  }
  return plan;
}

}  // namespace outlast
