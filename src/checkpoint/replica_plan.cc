#include "checkpoint/replica_plan.h"

#include <algorithm>
#include <utility>

namespace outlast {

// With the nodes grouped by domain in one ring, a shift by the size of the largest domain leads out
// of each one, and gives every node one other's copies, as long as no domain has more than half.
std::map<std::string, std::string> ChoosePartners(const std::vector<ReplicaDoor>& nodes) {
  std::map<std::string, std::string> partners;
  if (nodes.size() < 2) return partners;
  std::vector<std::string> domains;  // as they come
  std::map<std::string, std::vector<std::string>> members;
  for (const ReplicaDoor& door : nodes) {
    std::vector<std::string>& of = members[door.domain];
    if (of.empty()) domains.push_back(door.domain);
    of.push_back(door.node);
  }
  std::vector<std::pair<std::string, std::string>> ring;  // node, domain
  size_t largest = 0;
  for (const std::string& domain : domains) {
    for (const std::string& node : members[domain]) ring.emplace_back(node, domain);
    largest = std::max(largest, members[domain].size());
  }
  const size_t shift = domains.size() > 1 ? largest : 1;
  for (size_t i = 0; i < ring.size(); ++i) {
    size_t partner = (i + shift) % ring.size();
    // More than half are in this domain: those outside share its copies.
    for (size_t looks = 0;
         domains.size() > 1 && looks < ring.size() && ring[partner].second == ring[i].second;
         ++looks)
      partner = (partner + 1) % ring.size();
    partners[ring[i].first] = ring[partner].first;
  }
  return partners;
}

// --- Rounds

bool ReplicaRounds::Begin(const SnapshotKey& key, absl::Duration now) {
  if (stopped_ || running_ || nodes_.size() < 2) return false;
  if (whole_ && key <= *whole_) return false;
  if (now - began_ < every_) return false;
  running_ = key;
  began_ = now;
  done_.clear();
  failed_ = false;
  return true;
}

ReplicaRounds::Outcome ReplicaRounds::Told(const std::string& node, const SnapshotKey& key,
                                           bool ok) {
  if (running_ != key || !nodes_.contains(node)) return Outcome::kGoesOn;
  failed_ = failed_ || !ok;
  done_.insert(node);
  if (done_.size() < nodes_.size()) return Outcome::kGoesOn;
  running_.reset();
  if (failed_) return Outcome::kFailed;
  whole_ = key;
  return Outcome::kWhole;
}

// --- Restore

namespace {

bool HasCopy(const MemoryView& view, const std::string& node, const ReplicaName& name) {
  const auto found = view.copies.find(node);
  return found != view.copies.end() && !view.bad_copies.contains({node, name}) &&
         std::ranges::find(found->second, name) != found->second.end();
}

bool Holds(const MemoryView& view, const std::string& node, const SnapshotKey& key) {
  const auto found = view.held.find(node);
  return found != view.held.end() && !view.bad_buffers.contains({node, key}) &&
         std::ranges::find(found->second, key) != found->second.end();
}

std::optional<std::string> SourceOf(const MemoryView& view, const std::string& node,
                                    const ReplicaName& name) {
  if (HasCopy(view, node, name)) return node;
  for (const auto& [other, copies] : view.copies) {
    if (HasCopy(view, other, name)) return other;
  }
  return std::nullopt;
}

// What `node` must fetch to hold `key`; none: it cannot.
std::optional<std::vector<FetchPart>> FetchesOf(const MemoryView& view, const std::string& node,
                                                const SnapshotKey& key) {
  std::vector<FetchPart> parts;
  if (Holds(view, node, key)) return parts;
  const auto ranks = view.ranks.find(node);
  if (ranks == view.ranks.end()) return std::nullopt;
  for (const uint32_t rank : ranks->second) {
    const auto from = SourceOf(view, node, {rank, key});
    if (!from) return std::nullopt;
    parts.push_back({rank, *from});
  }
  return parts;
}

std::set<SnapshotKey> KeysOf(const MemoryView& view) {
  std::set<SnapshotKey> keys;
  for (const auto& [node, held] : view.held) keys.insert(held.begin(), held.end());
  for (const auto& [node, copies] : view.copies) {
    for (const ReplicaName& name : copies) keys.insert(name.snapshot);
  }
  return keys;
}

}  // namespace

std::optional<MemoryPlan> PlanFromMemory(const MemoryView& view) {
  if (view.held.empty()) return std::nullopt;
  const std::set<SnapshotKey> keys = KeysOf(view);
  for (auto key = keys.rbegin(); key != keys.rend(); ++key) {
    MemoryPlan plan{*key, {}};
    bool is_possible = true;
    for (const auto& [node, held] : view.held) {
      auto parts = FetchesOf(view, node, *key);
      is_possible = is_possible && parts.has_value();
      if (parts && !parts->empty()) plan.fetches[node] = *std::move(parts);
    }
    if (is_possible) return plan;
  }
  return std::nullopt;
}

std::optional<SnapshotKey> NewestWholeRound(const MemoryView& view) {
  const std::set<SnapshotKey> keys = KeysOf(view);
  for (auto key = keys.rbegin(); key != keys.rend(); ++key) {
    bool is_whole = true;
    for (const auto& [node, ranks] : view.ranks) {
      for (const uint32_t rank : ranks) {
        const auto places = std::ranges::count_if(view.copies, [&](const auto& copies) {
          return HasCopy(view, copies.first, {rank, *key});
        });
        is_whole = is_whole && places >= 2;
      }
    }
    if (is_whole) return *key;
  }
  return std::nullopt;
}

}  // namespace outlast
