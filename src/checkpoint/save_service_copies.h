// The tier of peers in a job of several nodes: every agent keeps copies of its own ranks' snapshots
// and of another node's, so that a node that is lost costs the steps since the last whole round of
// copies, not those since the last checkpoint.
//
//   lead: a step is common ── CopyWanted ──> all
//   node: pins its ranks' snapshots, copies them, unpins; brings the copies to its partner
//   node ── CopyTold ──> lead: from all, and well? the round is whole
//
//   all want to restore; the lead sees the newest snapshot that all hold or could fetch, and that
//   the disk has no newer one ── FetchWanted ──> who lacks it: fetches, writes it into its ranks'
//   buffers ── FetchTold ──> lead: now all hold it, and restore from memory
//
// What fails leaves the former source as it was: a round, the former whole one; a fetch, the next
// source of the same step, then an older one.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/serial_thread.h"
#include "checkpoint/replica_link.h"
#include "checkpoint/save_service_nodes.h"

namespace outlast {

// Belongs to the keeper's loop.
class SaveService::Nodes::Copies {
 public:
  // Null, with a note, where this agent cannot take part.
  static std::unique_ptr<Copies> Start(Nodes& nodes);
  ~Copies();

  // --- Every node
  void OnCommit(std::set<std::string> nodes);
  // Nothing reads or writes the ranks' buffers any more when it returns.
  void OnAbort();
  std::vector<ReplicaName> Names() const { return store_.Names(); }
  // All have restored this step; 0: started anew.
  void OnRestored(int64_t step);
  // Its rank restores what another node's agent had.
  bool is_from_peer(size_t slot) const { return from_peer_.contains(slot); }
  void Take(const DoorsTold& told);
  void Take(const CopyWanted& wanted);
  void Take(const FetchWanted& wanted);
  ReplicaStore& store() { return store_; }

  // --- The lead
  void Take(const std::string& node, const DoorTold& told);
  void Take(const std::string& node, const CopyTold& told);
  void Take(const std::string& node, const FetchTold& told);
  void OnUp(const std::string& node);
  // All ranks hold it, and it is the newest such.
  void OnCommon(const SnapshotKey& key);
  const std::optional<SnapshotKey>& whole() const { return rounds_.whole(); }
  // What all nodes told of a try to restore.
  void Look(std::map<std::string, std::vector<SnapshotKey>> held);
  void SetNames(const std::string& node, std::vector<ReplicaName> names) {
    view_.copies[node] = std::move(names);
  }
  std::optional<MemoryPlan> Plan() const { return PlanFromMemory(view_); }
  // Those nodes' buffers do not hold it well. False: that is known, so nothing new follows.
  bool Distrust(const std::set<std::string>& nodes, const SnapshotKey& key);
  // `then`: all hold the plan's snapshot; or not, and another plan may do.
  void Fetch(const MemoryPlan& plan, std::function<void(bool all_hold_it)> then);

 private:
  Copies(Nodes& nodes, uint64_t most_bytes);
  struct Round {
    SnapshotKey key;
    std::optional<CopyTold> told;
  };
  struct Target {
    FetchPart part;
    size_t slot = 0;
    const Buffer* buffer = nullptr;
    uint32_t turn = 0;
  };
  struct Fetching {  // this node's
    FetchWanted wanted;
    std::vector<std::string> sources;  // still to be asked
    std::optional<FetchTold> told;
  };
  struct Job {  // on the copier's thread
    std::atomic<bool> cancelled{false};
  };
  void StopWork();
  void TellDoor();
  void Copy(const CopyWanted& wanted);
  void OnCopied(const CopyWanted& wanted, const absl::Status& outcome);
  void Push(const CopyWanted& wanted);
  void EndRound(const SnapshotKey& key, uint64_t bytes, const absl::Status& outcome);
  void UnpinAll();
  void FetchNext();
  void FillBuffers();
  std::optional<Target> PickTarget(const FetchPart& part, const SnapshotKey& key);
  void EndFetch(std::optional<FetchPart> bad, const absl::Status& outcome);
  void NoteOnce(const std::string& what, const std::string& line);

  Nodes& nodes_;
  SaveService& of_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  ReplicaStore store_;
  std::unique_ptr<ReplicaLink> link_;
  std::unique_ptr<SerialThread> copier_;
  std::shared_ptr<Job> job_ = std::make_shared<Job>();
  bool is_copying_ = false;  // the copier may be at work

  // --- Of this generation
  std::vector<ReplicaDoor> doors_;
  std::string partner_;
  std::optional<Round> round_;
  absl::Duration round_began_;
  struct Pinned {
    const Buffer* buffer = nullptr;
    uint32_t turn = 0;
  };
  std::vector<Pinned> pinned_;
  std::optional<Fetching> fetching_;
  std::set<size_t> from_peer_;  // slots
  std::set<std::string> noted_;

  // --- The lead
  std::map<std::string, ReplicaDoor> doors_told_;
  ReplicaRounds rounds_;
  std::optional<CopyWanted> copy_wanted_;
  std::optional<SnapshotKey> newest_;  // that all hold
  MemoryView view_;
  std::set<std::pair<std::string, SnapshotKey>> distrusted_;  // ever, in this generation
  struct LeadFetch {
    MemoryPlan plan;
    uint64_t number = 0;
    std::set<std::string> waiting;
    std::function<void(bool)> then;
  };
  std::optional<LeadFetch> lead_fetch_;
  uint64_t fetches_ = 0;
};

}  // namespace outlast
