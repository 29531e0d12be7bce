// What the agents of a job of several nodes tell each other about checkpoints, besides the writing
// of one (save_team.h): every node reports for all its ranks at once, and the *lead*, the agent of
// rank 0, decides for all.
//
//   node ── TablesTold ──────────────> lead ── AllTables ──> all    what the plan is made of
//   node ── SealedTold | SkippedTold ─> lead ── StepDecided ─> all   has every rank this step?
//   node ── FinishAsked | PersistAsked > lead ── SaveOver ───> all   a save has ended
//   node ── RestoreAsked ────────────> lead ── RestoreChosen > all   where all restore from
//   node ── RestoreVoted ────────────> lead ── RestoreJudged > all   and whether they all could
//                                      lead ── StepWanted ───> all   ranks are to seal this step
//   node ── HeldTold ───────────────> lead ── CommonTold ──> all    what memory holds
//                                      lead ── RootClaimed ──> all   a node that does not see this
//                                                                    claim has another root
//   node ── DoorTold ───────────────> lead ── DoorsTold ───> all    who keeps copies, and where
//                                      lead ── CopyWanted ──> all    copy this snapshot
//   node ── CopyTold ───────────────> lead                          done, or why not
//                                      lead ── FetchWanted ─> node   hold this before all restore
//   node ── FetchTold ──────────────> lead                          it does, or why not
//
// A message that was under way when a connection broke is lost. So a node says again, when it is up
// again, all that it has had no answer to; and the lead answers again what it has answered before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "checkpoint/replica_plan.h"
#include "checkpoint/save_team.h"
#include "checkpoint/save_wire.h"
#include "checkpoint/seal_table.h"
#include "run/peers.h"

namespace outlast {

// --- What is said

struct TablesTold {
  std::string known;                       // digest of all tables that its buffers were made for
  std::map<uint32_t, std::string> tables;  // of its ranks
};
struct SealedTold {
  SnapshotKey snapshot;
  bool last = false;  // of an agreed stop
};
struct SkippedTold {
  int64_t step = 0;
  std::string why;
};
struct FinishAsked {
  SnapshotKey snapshot;
};
struct PersistAsked {
  std::vector<SnapshotKey> held;  // by all ranks of the node
  std::string reason;
};
// A generation may restore more than once: `round` counts these, `attempt` the candidates of one.
struct RestoreTry {
  uint32_t round = 0, attempt = 0;
  bool operator==(const RestoreTry&) const = default;
};
struct RestoreAsked {
  RestoreTry at;
  std::vector<SnapshotKey> held;
  std::vector<ReplicaName> copies;  // of whichever ranks
};
struct RestoreVoted {
  RestoreTry at;
  bool ok = false, mismatch = false;
  std::vector<std::string> reasons;
};

struct AllTables {
  std::string digest;
  uint32_t part = 0, parts = 1;
  std::string bytes;  // of EncodeTables; empty: as it has them
  absl::Status refused;
};
struct StepDecided {
  int64_t step = 0;
  bool common = false;  // every rank has sealed it
  bool saved = false;   // its save comes, so it stays pinned
  std::string why;      // not
};
// Before the name of a chosen checkpoint that lies in the root which --restore-from names, as each
// node was told itself.
inline constexpr std::string_view kElsewhere = "elsewhere:";

struct SaveOver {
  int64_t step = 0;
  std::string checkpoint;
  uint64_t bytes = 0;
  absl::Duration write_time;
  absl::Status outcome;
  bool last = false;  // of a stop
  bool final = true;  // it is not tried again
};
struct RestoreChosen {
  RestoreTry at;
  absl::Status refused;
  RestoreSource source = RestoreSource::kNone;
  SnapshotKey snapshot;    // its step alone where it is of files
  std::string checkpoint;  // folder name
};
struct RestoreJudged {
  RestoreTry at;
  bool restored = false;
  std::string mismatch;  // not empty: no other source would fit better
};
struct StepWanted {
  int64_t step = 0;
};
struct RootClaimed {
  uint64_t number = 0;
  std::string text;  // of the claim's file
  bool operator==(const RootClaimed&) const = default;
};
// Of a node's ranks together, since its last restore; from the newest step on that it knows to be
// common.
struct HeldTold {
  uint32_t round = 0;
  std::vector<int64_t> steps;  // that all of them hold, ascending
  int64_t reached = kNoStep;   // all have sealed a snapshot of this step, or of a later one
  bool operator==(const HeldTold&) const = default;
};
struct CommonTold {
  uint32_t round = 0;
  int64_t common = kNoStep;  // the newest step that all ranks hold
  int64_t passed = kNoStep;  // of the steps between, no rank has one that could still become common
  int64_t every = 1;         // due snapshots: all but each of this number are left out
  bool operator==(const CommonTold&) const = default;
};

// Of the tier of peers (replica_plan.h). In the order of their ranks.
struct DoorTold {
  ReplicaDoor door;
};
struct DoorsTold {
  std::vector<ReplicaDoor> doors;
};
struct CopyWanted {
  SnapshotKey snapshot;
  std::optional<SnapshotKey> keep;  // the newest round that is whole
};
struct CopyTold {
  SnapshotKey snapshot;
  uint64_t bytes = 0;  // that went to the partner
  absl::Status outcome;
};
struct FetchWanted {
  uint64_t number = 0;  // counts them
  SnapshotKey snapshot;
  std::vector<FetchPart> parts;
};
struct FetchTold {
  uint64_t number = 0;
  std::optional<FetchPart> bad;  // that it failed at
  absl::Status outcome;
};

using CouncilMessage =
    std::variant<TablesTold, SealedTold, SkippedTold, FinishAsked, PersistAsked, RestoreAsked,
                 RestoreVoted, AllTables, StepDecided, SaveOver, RestoreChosen, RestoreJudged,
                 StepWanted, RootClaimed, HeldTold, CommonTold, DoorTold, DoorsTold, CopyWanted,
                 CopyTold, FetchWanted, FetchTold>;

std::string Encode(const CouncilMessage& message);
// kInvalidArgument: cut, malformed, or over a cap. kUnimplemented: another version, named.
absl::StatusOr<CouncilMessage> DecodeCouncilMessage(std::string_view bytes);

// Bytes of the tables of all ranks that agents exchange at most.
inline constexpr size_t kMaxTablesBytes = 12 << 20;

// --- What is decided

// The newest snapshot that all have; none: there is no such.
std::optional<SnapshotKey> NewestCommon(
    const std::map<std::string, std::vector<SnapshotKey>>& held_by_node);

// Which steps all nodes have sealed. Not safe for concurrent use. Copyable.
class SealTally {
 public:
  explicit SealTally(std::set<std::string> nodes = {}) : nodes_(std::move(nodes)) {}

  struct Verdict {
    int64_t step = 0;
    bool complete = false;
    SealedTold sealed;  // of a complete one
    std::string why;    // of another
  };
  // What follows, oldest first: the step is complete, and older ones that were not never will be.
  std::vector<Verdict> Sealed(const std::string& node, const SealedTold& told);
  std::vector<Verdict> Skipped(int64_t step, const std::string& why);
  // Nothing is to be said of `step` any more: it was decided. Of the newest that were.
  bool is_decided(int64_t step) const;

 private:
  struct Open {
    std::set<std::string> nodes;
    SealedTold sealed;
  };
  void Decide(int64_t step);

  std::set<std::string> nodes_;
  std::map<int64_t, Open> open_;
  std::set<int64_t> decided_;
  int64_t forgotten_ = -1;  // this step and older ones were decided
};

// What the ranks of a node hold together: rows of a seal table, as they are told from `from` on.
HeldTold HeldByNode(std::span<const HeldSteps> ranks, int64_t from);

// Which of memory's snapshots all nodes hold. Each hears of the others late, but what is said here
// never turns out false: a step that all hold is overwritten by nobody before a later one is known
// to be such, and one that somebody has passed without it never comes back.
class HeldTally {
 public:
  explicit HeldTally(const std::set<std::string>& nodes = {}, int64_t common = kNoStep);

  // False: it says nothing new of what the node has sealed.
  bool Told(const std::string& node, const HeldTold& told);
  // All hold it, as was found in another way.
  void Common(int64_t step) { common_ = std::max(common_, step); }
  int64_t common() const { return common_; }
  // Steps above common() and below this one can be overwritten.
  int64_t passed() const;

 private:
  std::map<std::string, HeldTold> nodes_;
  int64_t common_;
};

// Leaves out snapshots where steps are so short that word of one comes after the next are due:
// nodes that take what their buffers allow might never take the same ones. A factor of powers of
// two, so that the steps of a larger one are a smaller one's too.
class MemoryPace {
 public:
  int64_t every() const { return every_; }
  // The lead's ranks have sealed one; all hold a newer one.
  void OnSeal();
  void OnCommon();

 private:
  int64_t every_ = 1;
  int in_vain_ = 0;  // sealed since the newest common one
  int good_ = 0;     // newer common ones since the factor changed
  int patience_ = 64;
};

// --- How it is said

// Belongs to its loop's thread. What a node says to itself comes in a later turn of the loop.
class SaveCouncil {
 public:
  struct Ears {
    std::function<void(const std::string& node, const CouncilMessage& message)> on_message;
    std::function<void(const std::string& node, const SaveTeamMessage& message)> on_team;
    std::function<void(const std::string& node)> on_up;
    std::function<void(const std::string& node, const std::string& why)> on_lost;
  };
  // Borrows both.
  SaveCouncil(EventLoop& loop, Peers& peers, Ears ears);
  ~SaveCouncil();

  // The group that `peers` has entered. What was said in a former one is forgotten.
  void Enter(std::string self, std::string lead, std::set<std::string> nodes);
  void Leave();
  bool is_open() const { return !nodes_.empty(); }
  bool is_lead() const { return is_open() && self_ == lead_; }
  const std::string& self() const { return self_; }
  const std::string& lead() const { return lead_; }
  const std::set<std::string>& nodes() const { return nodes_; }

  // `topic`: the lead is told again when it is up again, until Answered(topic); what is said of a
  // topic replaces what was. Empty: once.
  void TellLead(const std::string& topic, const CouncilMessage& message);
  void Answered(const std::string& topic) { unanswered_.erase(topic); }
  void Tell(const std::string& node, const CouncilMessage& message);
  void TellAll(const CouncilMessage& message);
  void TellTeam(const std::string& node, const SaveTeamMessage& message);
  void TellTeamLead(const SaveTeamMessage& message) { TellTeam(lead_, message); }

  // Messages that could not be sent or read.
  uint64_t refused() const { return refused_; }

 private:
  void Send(const std::string& node, const std::string& bytes);
  void Hear(const std::string& node, std::string_view bytes);

  EventLoop& loop_;
  Peers& peers_;
  const Ears ears_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  std::string self_, lead_;
  std::set<std::string> nodes_;
  uint64_t entered_ = 0;                           // groups
  std::map<std::string, std::string> unanswered_;  // by topic
  uint64_t refused_ = 0;
};

}  // namespace outlast
