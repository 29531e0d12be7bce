#include "outlast/elastic/cut_links.h"

#include <algorithm>
#include <optional>
#include <set>

namespace outlast {
namespace {

constexpr size_t kWatchedAhead = 2;

using Pairs = std::vector<NodePair>;

bool Contains(const Pairs& pairs, const NodePair& pair) {
  return std::find(pairs.begin(), pairs.end(), pair) != pairs.end();
}

// The other end; null: it is none of the pair.
const std::string* OtherEnd(const NodePair& pair, const std::string& node) {
  if (pair.first == node) return &pair.second;
  return pair.second == node ? &pair.first : nullptr;
}

std::set<std::string> PartnersOf(const std::string& node, const Pairs& pairs) {
  std::set<std::string> partners;
  for (const NodePair& pair : pairs) {
    if (const std::string* other = OtherEnd(pair, node)) partners.insert(*other);
  }
  return partners;
}

// Of an agent of this node that only its link to the lead is known of.
std::vector<CutOff> JudgeStar(const CutLinks& links) {
  const std::string& lead = links.nodes.front();
  const std::set<std::string> cut = PartnersOf(lead, links.cut);
  const std::set<std::string> before = PartnersOf(lead, links.cut_before);
  const bool most_are_cut = cut.size() > 1 && 2 * cut.size() > links.nodes.size() - 1;
  const bool others_were_blamed = std::any_of(
      before.begin(), before.end(), [&](const std::string& node) { return !cut.contains(node); });
  if (most_are_cut || others_were_blamed) return {{lead, *cut.begin()}};
  std::vector<CutOff> blamed;
  for (const std::string& node : links.nodes) {
    if (cut.contains(node)) blamed.push_back({node, lead, true});
  }
  return blamed;
}

// The nodes of the largest part, within which all reach each other, be it over others.
std::set<std::string> LargestPart(const CutLinks& links) {
  std::set<std::string> largest, seen;
  for (const std::string& first : links.nodes) {
    if (seen.contains(first)) continue;
    std::set<std::string> part;
    std::vector<std::string> next = {first};
    while (!next.empty()) {
      const std::string node = next.back();
      next.pop_back();
      if (!part.insert(node).second) continue;
      for (const NodePair& pair : links.watched) {
        const std::string* other = OtherEnd(pair, node);
        if (other != nullptr && !Contains(links.cut, pair)) next.push_back(*other);
      }
    }
    seen.insert(part.begin(), part.end());
    if (part.size() > largest.size()) largest = std::move(part);
  }
  return largest;
}

CutOff Blame(const std::string& node, const CutLinks& links, const Pairs& cut) {
  const std::set<std::string> now = PartnersOf(node, cut);
  std::set<std::string> all = PartnersOf(node, links.cut_before);
  all.insert(now.begin(), now.end());
  return {node, *now.begin(), all.size() == 1};
}

// Of those that still have a cut link; nullopt: nobody has.
std::optional<CutOff> MostCut(const CutLinks& links, const Pairs& cut) {
  size_t most = 0;
  std::string worst;
  for (const std::string& node : links.nodes) {  // the lead first
    std::set<std::string> partners = PartnersOf(node, cut);
    if (partners.empty()) continue;
    partners.merge(PartnersOf(node, links.cut_before));
    if (partners.size() < most) continue;
    most = partners.size();
    worst = node;
  }
  if (most == 0) return {};
  return Blame(worst, links, cut);
}

}  // namespace

LinkPlan PlanLinks(const RankMap& map) {
  if (map.runs.empty()) return {};
  std::set<std::string> seen = {map.runs.front().node};
  std::vector<std::string> followers;
  for (const RankRun& run : map.runs) {
    if (seen.insert(run.node).second) followers.push_back(run.node);
  }
  LinkPlan plan;
  const size_t count = followers.size();
  for (size_t i = 0; i < count; ++i) {
    for (size_t ahead = 1; ahead <= kWatchedAhead && ahead < count; ++ahead)
      plan[followers[i]].push_back(followers[(i + ahead) % count]);
  }
  return plan;
}

NodePair PairOf(const std::string& one, const std::string& other) {
  return std::minmax(one, other);
}

std::vector<CutOff> JudgeCutLinks(const CutLinks& links) {
  if (links.cut.empty()) return {};
  const std::string& lead = links.nodes.front();
  const bool knows_followers =
      std::any_of(links.watched.begin(), links.watched.end(),
                  [&](const NodePair& pair) { return OtherEnd(pair, lead) == nullptr; });
  if (!knows_followers) return JudgeStar(links);
  if (links.cut.size() >= links.watched.size()) return {};

  std::vector<CutOff> blamed;
  const std::set<std::string> kept = LargestPart(links);
  Pairs cut = links.cut;
  const auto leave_out = [&](CutOff off) {
    std::erase_if(cut, [&](const NodePair& pair) { return OtherEnd(pair, off.node) != nullptr; });
    blamed.push_back(std::move(off));
  };
  for (const std::string& node : links.nodes) {
    if (!kept.contains(node)) blamed.push_back(Blame(node, links, links.cut));
  }
  for (const CutOff& off : blamed)
    std::erase_if(cut, [&](const NodePair& pair) { return OtherEnd(pair, off.node) != nullptr; });
  while (const auto worst = MostCut(links, cut)) leave_out(*worst);
  return blamed;
}

}  // namespace outlast
