// Who keeps copies for whom, when, and what a restore makes of them: the decisions of the tier of
// peers, pure.
//
// A *copy* is one rank's whole snapshot in an agent's memory, out of the reach of its trainer. Of
// each round, whose step all ranks hold, an agent has copies of its own ranks (the trainers go on
// and overwrite their buffers) and of those of one other node, its partner's. A round is *whole*
// when every rank's copy is in both places; until then the former whole one stays.
//
// Departure from design/checkpoint.md, section 8: the replicated part of a buffer travels too,
// where another rank has the same bytes. So a lost node is brought back from one connection, and
// each chunk is checked against the lost rank's own table; it costs bandwidth in purely
// data-parallel jobs, which --peer-rate bounds.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/time/time.h"

namespace outlast {

// One instant of the job, as it was sealed. `generation` is the one that trained it.
struct SnapshotKey {
  uint64_t generation = 0;
  int64_t step = 0;
  auto operator<=>(const SnapshotKey&) const = default;
};

// --- Partners

// Where an agent takes copies. No address: it takes none, and gives none.
struct ReplicaDoor {
  std::string node;
  std::string address;  // HOST:PORT
  std::string domain;   // what fails together: a node, or what --failure-domain says
  bool operator==(const ReplicaDoor&) const = default;
};

// Which node keeps the copies of each. `nodes` in the order of their ranks. The next one in the
// ring where each is a domain of its own; else one of another domain, where there is any, and such
// that no node keeps more than one other's as long as no domain has more than half of them. Empty
// for a single node.
std::map<std::string, std::string> ChoosePartners(const std::vector<ReplicaDoor>& nodes);

// --- Rounds, at the lead

// Not safe for concurrent use.
class ReplicaRounds {
 public:
  // `whole`: the newest round that a former generation has left whole.
  explicit ReplicaRounds(std::set<std::string> nodes = {},
                         std::optional<SnapshotKey> whole = std::nullopt,
                         absl::Duration every = absl::ZeroDuration())
      : nodes_(std::move(nodes)), whole_(whole), every_(every) {}

  // All ranks hold `key` now. True: its round begins.
  bool Begin(const SnapshotKey& key, absl::Duration now);
  enum class Outcome : uint8_t { kGoesOn, kWhole, kFailed };
  // `node` has done its part, or failed. Of another round than the present one: nothing.
  Outcome Told(const std::string& node, const SnapshotKey& key, bool ok);
  // No more rounds (somebody has no room).
  void Stop() { stopped_ = true; }

  bool is_running() const { return running_.has_value(); }
  // Spared by what the next round overwrites.
  const std::optional<SnapshotKey>& whole() const { return whole_; }

 private:
  std::set<std::string> nodes_;
  std::optional<SnapshotKey> whole_, running_;
  absl::Duration every_;
  absl::Duration began_ = -absl::InfiniteDuration();
  std::set<std::string> done_;
  bool failed_ = false, stopped_ = false;
};

// --- Restore, at the lead

struct ReplicaName {
  uint32_t rank = 0;
  SnapshotKey snapshot;
  auto operator<=>(const ReplicaName&) const = default;
};

// A rank's snapshot is taken from the copy that `from` has (the rank's own node perhaps).
struct FetchPart {
  uint32_t rank = 0;
  std::string from;
  bool operator==(const FetchPart&) const = default;
};

struct MemoryPlan {
  SnapshotKey snapshot;
  // What nodes have to fetch before they hold it; empty: all do.
  std::map<std::string, std::vector<FetchPart>> fetches;
  bool operator==(const MemoryPlan&) const = default;
};

// What is known of memory when all want to restore. By node.
struct MemoryView {
  std::map<std::string, std::vector<SnapshotKey>> held;  // in the buffers of all its ranks
  std::map<std::string, std::vector<uint32_t>> ranks;
  std::map<std::string, std::vector<ReplicaName>> copies;
  // Copies and buffers that were tried in vain.
  std::set<std::pair<std::string, ReplicaName>> bad_copies;
  std::set<std::pair<std::string, SnapshotKey>> bad_buffers;
};

// The newest snapshot that all nodes hold or can fetch; none: there is no such. A node's own copy
// goes before another's.
std::optional<MemoryPlan> PlanFromMemory(const MemoryView& view);

// The newest snapshot of which every rank's copy lies in two places.
std::optional<SnapshotKey> NewestWholeRound(const MemoryView& view);

}  // namespace outlast
