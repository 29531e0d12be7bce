// Links between agents that both reach the coordinator, and what becomes of cut ones.
#include <fmt/format.h>

#include <algorithm>

#include "outlast/elastic/coordinator.h"

namespace outlast {
namespace {

bool Contains(const std::vector<std::string>& nodes, const std::string& node) {
  return std::find(nodes.begin(), nodes.end(), node) != nodes.end();
}

}  // namespace

bool Coordinator::IsShunned(const std::string& node) const {
  const auto known = shunned_.find(node);
  return known != shunned_.end() && now_ < known->second.until;
}

// Of the newest generation.
const LinkPlan& Coordinator::Links() {
  if (links_generation_ != state_.generation()) {
    links_ = PlanLinks(state_.commit.map);
    links_generation_ = state_.generation();
  }
  return links_;
}

// Whoever is not here is looked for again by the next generation.
std::vector<control::NodeAddress> Coordinator::LinksToWatch(const Agent& agent) {
  std::vector<control::NodeAddress> links;
  const LinkPlan& plan = Links();
  const auto planned = plan.find(agent.node);
  if (!agent.watches_links || planned == plan.end()) return links;
  for (const std::string& node : planned->second) {
    const auto other = agents_.find(node);
    if (other != agents_.end() && !other->second.peer_address.empty())
      links.push_back({node, other->second.peer_address});
  }
  return links;
}

// Who is silent here too is waited for as ever, and says nothing about links; neither does a
// follower that has not entered the newest generation yet.
CutLinks Coordinator::LinksNow() {
  CutLinks links;
  const std::string& lead = state_.commit.map.runs.front().node;
  for (const RankRun& run : state_.commit.map.runs) {
    const auto known = agents_.find(run.node);
    const bool is_here = known != agents_.end() && known->second.holds_ranks &&
                         known->second.stream != 0 && !Contains(links.nodes, run.node);
    if (is_here) links.nodes.push_back(run.node);
  }
  if (links.nodes.empty() || links.nodes.front() != lead) return {};
  const auto look = [&](const Agent& one, const Agent& other, bool is_cut) {
    const NodePair pair = PairOf(one.node, other.node);
    if (std::find(links.watched.begin(), links.watched.end(), pair) == links.watched.end())
      links.watched.push_back(pair);
    if (is_cut && std::find(links.cut.begin(), links.cut.end(), pair) == links.cut.end())
      links.cut.push_back(pair);
  };
  const auto is_in_doubt = [this](const std::string& node) {
    return std::any_of(shunned_.begin(), shunned_.end(),
                       [&](const auto& shunned) { return shunned.second.from == node; });
  };
  for (const std::string& node : links.nodes) {
    const Agent& agent = agents_.at(node);
    if (node != lead) {
      const Agent& at_lead = agents_.at(lead);
      look(at_lead, agent, Contains(agent.unreached, lead) || Contains(at_lead.unreached, node));
    }
    const auto planned = Links().find(node);
    if (!agent.watches_links || planned == Links().end()) continue;
    for (const std::string& other : planned->second) {
      if (!Contains(links.nodes, other) || agents_.at(other).committed != state_.generation() ||
          agent.committed != state_.generation())
        continue;
      const bool is_unmet = Contains(agent.unmet, other);
      if (is_unmet && !is_in_doubt(node) && !is_in_doubt(other)) continue;
      look(agent, agents_.at(other), is_unmet || Contains(agent.unreached, other));
    }
  }
  for (const auto& [node, shunned] : shunned_) {
    if (!shunned.from.empty()) links.cut_before.push_back(PairOf(node, shunned.from));
  }
  return links;
}

void Coordinator::RemoveWhoIsCutOff() {
  if (state_.commit.map.runs.empty()) return;
  const CutLinks links = LinksNow();
  const std::vector<CutOff> blamed = JudgeCutLinks(links);
  if (blamed.empty() && !links.cut.empty() && !std::exchange(said_all_cut_, true)) {
    Emit(
        Announce{fmt::format("no agent reaches any other, though all {} reach the coordinator: "
                             "which node is at fault cannot be told by that",
                             links.nodes.size())});
  }
  for (const CutOff& off : blamed) {
    // Those who were blamed in its place were not at fault.
    std::erase_if(shunned_, [&](const auto& one) { return one.second.from == off.node; });
    shunned_[off.node] = {off.is_in_doubt ? off.from : std::string(), now_ + options_.exclude_for};
    const std::string reason = fmt::format(
        "it and node {} do not reach each other, though both reach the coordinator", off.from);
    Emit(Announce{fmt::format("node {}: {}", off.node, reason)});
    Remove(off.node, reason, FaultClass::kLinkCut);
  }
}

// Once: it is so on purpose, or was so before anybody looked.
void Coordinator::TellOfUnmet(const Agent& agent) {
  if (agent.unmet.empty() || said_unmet_) return;
  const std::string& other = agent.unmet.front();
  const auto known = agents_.find(other);
  const bool both_are_here = known != agents_.end() && known->second.stream != 0 &&
                             known->second.committed == state_.generation();
  if (!both_are_here) return;
  said_unmet_ = true;
  Emit(Announce{fmt::format(
      "the agents of nodes {} and {} have never reached each other, though both reach the "
      "coordinator: where the network keeps followers apart a cut between them is not seen",
      agent.node, other)});
}

}  // namespace outlast
