// The save service's part in a job of several nodes: what one node decides by itself when it holds
// all ranks, the agents decide together here (save_council.h, save_team.h).
//
//   a node's ranks have all sealed a step ──> the lead: have all nodes? ──> SaveLead, SaveMembers
//   a node's ranks hold other snapshots ────> the lead: which all hold ───> every node's seal table
//   a node's ranks all want to restore, vote, finish ──> the lead decides, every node does
//
// The folder of the root is one that all nodes see; the lead alone has its claim. Whoever becomes
// lead takes a new claim of the same run, finishes what a former lead had left whole, and goes on.
// Before a node's ranks restore it must see that claim in its own root; where it does not come, the
// nodes do not share the folder, and the job is refused.
//
// After the trainers' end, or at a stop that they did not follow, when the generation is unwound,
// the agents meet once more to save what memory holds (PersistLast). That save counts as of the
// next generation, which no trainer enters: so a writer of the unwound one stays fenced off. All
// nodes of the generation must take part, and the lead's claim must still be the newest: where
// others have gone on without these, nothing is committed.
//
// A rank keeps its snapshots as long as it stays where it is; when its place changes, its buffers
// are made anew, and filled from copies that other nodes have (save_service_copies.h) or by a
// restore from the disk; when the world does, by the disk alone. Departure from
// design/checkpoint.md, section 7: the boxes of the survivors' buffers are not resharded from
// memory then. Only lost and new nodes change a world, and they cost the steps since the last save.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/save_council.h"
#include "checkpoint/save_service.h"

namespace outlast {

// Belongs to the keeper's loop.
class SaveService::Nodes {
 public:
  explicit Nodes(SaveService& service);
  ~Nodes();

  void OnCommit(const CommitGeneration& commit);
  void OnAbort(uint64_t generation);

  // The root is open here, without a claim yet.
  void OnOpened();
  // Takes the root's claim if this agent is the lead and knows which root.
  void TakeLead();
  bool is_lead() const { return council_->is_lead(); }
  int rank(size_t slot) const { return slot < ranks_.size() ? ranks_[slot] : -1; }
  int world() const { return world_; }

  // A rank has told its whole table.
  void OnTable(size_t slot);
  // It holds its rank's buffers of the present plan.
  bool has_buffers(size_t slot) const;
  void OnBuffersMade(const absl::Status& status);

  void OnSealedHere(int64_t step, Save sealed);
  void OnSkippedHere(int64_t step);
  // Ranks here hold other steps than were told last.
  void TellHeld();
  // Rank 0 is here, and its snapshots should be so far apart; 0: as they are.
  void WishMemoryEvery(int64_t every);
  int64_t common_step() const { return common_; }
  // It was decided without what a rank here seals now.
  bool is_void(int64_t step) const { return void_.contains(step); }
  bool has_restored() const { return has_restored_; }

  void OnAllFinish(int64_t step);
  void RetryFinish(int64_t step);
  void OnPersistCommon(const std::string& reason);
  void PersistLast(std::function<void(absl::Status)> done);

  // The lead's saves.
  void Drop(int64_t step, const std::string& why);
  void StartSave(const Save& save);
  void TellOver(const Save& save, const absl::StatusOr<PersistResult>& result, bool is_final);
  void WantAutoSave() { Want(notice_); }
  // One that the coordinator waits for.
  void AwaitSave(const WantSave& want);
  void OnSaved(int64_t step, const absl::Status& outcome);

  void OnAllChoose();
  void TellChoice(const RestoreChoice& choice);
  void TellNoChoice(const absl::Status& status);
  void OnAllVoted();
  // A later restore of the same generation begins.
  void NextRound();
  // Memory, with what other nodes' agents have of it, holds a step that is no older than the newest
  // checkpoint (its name; empty: none), and is tried first.
  bool FetchesInstead(const std::string& newest);
  // A rank here restores what another node's agent had of it.
  bool is_from_peer(size_t slot) const;
  bool is_any_from_peer() const;
  ReplicaStore* copies();
  int64_t copied_step() const;

 private:
  class Copies;  // save_service_copies.h

  void Hear(const std::string& node, const CouncilMessage& message);
  void Take(const std::string& node, const TablesTold& told);
  void Take(const std::string& node, const SealedTold& told);
  void Take(const std::string& node, const SkippedTold& told);
  void Take(const std::string& node, const FinishAsked& asked);
  void Take(const std::string& node, const PersistAsked& asked);
  void Take(const std::string& node, const RestoreAsked& asked);
  void Take(const std::string& node, const RestoreVoted& voted);
  void Take(const std::string& node, const AllTables& all);
  void Take(const std::string& node, const StepDecided& decided);
  void Take(const std::string& node, const SaveOver& over);
  void Take(const std::string& node, const RestoreChosen& chosen);
  void Take(const std::string& node, const RestoreJudged& judged);
  void Take(const std::string& node, const StepWanted& wanted);
  void Take(const std::string& node, const RootClaimed& claimed);
  void Take(const std::string& node, const HeldTold& told);
  void Take(const std::string& node, const CommonTold& told);
  void Take(const std::string& node, const DoorTold& told);
  void Take(const std::string& node, const DoorsTold& told);
  void Take(const std::string& node, const CopyWanted& wanted);
  void Take(const std::string& node, const CopyTold& told);
  void Take(const std::string& node, const FetchWanted& wanted);
  void Take(const std::string& node, const FetchTold& told);

  void LeaveOldBuffers();
  void AskForLast();
  void BeginLast();
  void EndLast(const absl::Status& outcome);
  uint64_t SaveGeneration() const;
  void CleanUp();
  void GiveUpLead();
  void LookForClaim(uint64_t look, absl::Duration until);
  void OnClaimLookedFor(uint64_t look, absl::Duration until, bool is_seen);
  void RefuseRoot();
  bool AnyLacksBuffers() const;
  void TellTables();
  void MakeBuffers(const std::string& tables);
  void AssembleTables();
  void RefuseTables(const absl::Status& why);
  void Want(int64_t notice);
  void PushAwaitedSave();
  void EndAwaitedSave(int64_t step, const absl::Status& outcome);
  void SayCommon();
  void Decide(const std::vector<SealTally::Verdict>& verdicts);
  void Say(const StepDecided& decided);
  void ChooseIfAllAsked();
  void ChooseFromMemory();
  void CopyCommon(int64_t step);
  void JudgeIfAllVoted();
  void OnSaveDone(const Save& save, uint64_t generation, absl::StatusOr<PersistResult> result);
  void End(const Save& save, const absl::StatusOr<PersistResult>& result);
  void OnLeadOpened(absl::StatusOr<std::shared_ptr<Opened>> opened,
                    const std::vector<std::pair<std::string, Manifest>>& heads,
                    RootClaimed claimed);

  std::vector<SnapshotKey> HeldHere() const;
  std::optional<Save> Find(const SnapshotKey& key) const;
  void KeepOnly(const std::optional<SnapshotKey>& key);
  void WriteOtherRows();
  void Unpin(const Save& save);
  absl::StatusOr<std::vector<LocalRank>> Pin(const SaveOrder& order);
  void MakeMember();
  CommitLimits Limits() const;

  SaveService& of_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  std::unique_ptr<SaveCouncil> council_;

  // --- This node
  std::vector<int> ranks_;  // by slot; -1: none
  int world_ = 0;
  uint64_t aborted_ = 0;
  std::vector<int> made_for_;  // by slot: whose buffers it has; -1: none
  int made_world_ = 0;
  std::string known_;          // digest of the tables that they were made for
  std::string parts_;          // of all tables, being received
  std::string wanted_digest_;  // of those that buffers are being made for
  std::vector<int> making_ranks_;
  int making_world_ = 0;
  RootClaimed told_, seen_;    // the lead's claim: the newest told, and one that the root here has
  uint64_t look_ = 0;          // for a claim: the newest
  bool sees_root_ = false;     // this generation's lead has the same root
  bool asks_restore_ = false;  // all ranks do, but it is not known yet whether it has
  std::unique_ptr<SaveMember> member_;
  std::map<int64_t, Save> awaiting_;  // sealed by all ranks here, and pinned until it is decided
  struct WrittenHere {
    std::vector<LocalRank> pinned;
  };
  std::vector<std::vector<Buffer>> left_;  // of former places, as long as `written_` may read them
  std::map<std::string, WrittenHere> written_;   // for the member; by checkpoint
  std::set<int64_t> void_;                       // decided without a save
  int64_t common_ = kNoStep, passed_ = kNoStep;  // as all rows of other nodes' ranks say
  std::optional<HeldTold> held_told_;            // the newest
  bool has_restored_ = false;
  uint32_t round_ = 0;
  struct Last {  // the agents save what memory holds, after the trainers' end
    std::function<void(absl::Status)> done;
    absl::Duration until;
    bool has_begun = false;
  };
  std::optional<Last> last_;
  std::unique_ptr<Copies> copies_;  // null: no copies on other nodes

  // --- The lead
  bool has_claim_ = false, is_taking_ = false;
  RootClaimed claimed_;
  std::unique_ptr<SerialThread> disk_;
  std::unique_ptr<SaveLead> lead_;
  std::map<std::string, std::vector<uint32_t>> ranks_of_;  // by node
  std::set<std::string> active_;                           // nodes whose work is not done
  std::map<uint32_t, std::string> tables_;
  std::map<std::string, std::string> known_by_;  // by node
  SealTally tally_;
  HeldTally held_tally_;
  std::optional<CommonTold> common_told_;  // the newest
  MemoryPace pace_;
  int64_t wished_every_ = 1;
  std::map<int64_t, StepDecided> said_;  // newest decisions, for who asks again
  std::optional<SaveOver> last_over_;
  std::map<int64_t, std::set<std::string>> finish_asked_;
  std::map<std::string, std::vector<SnapshotKey>> persist_asked_;
  RestoreTry at_;
  std::map<std::string, std::vector<SnapshotKey>> asked_;
  std::map<std::string, RestoreVoted> votes_;
  std::optional<RestoreChosen> chosen_;
  std::optional<RestoreJudged> judged_;
  SnapshotKey base_;                          // that all have restored in this generation
  std::optional<MemoryPlan> plan_;            // with copies of other nodes, not chosen yet
  bool wants_choice_ = false;                 // all have asked, but the claim is not here yet
  static constexpr int64_t kFirstNotice = 2;  // steps
  int64_t wanted_step_ = kNoStep, notice_ = kFirstNotice;
  struct AwaitedSave {
    uint64_t number = 0;
    int64_t from = kNoStep;  // this step, or a later one; none yet: nobody has restored
  };
  std::optional<AwaitedSave> awaited_save_;
};

}  // namespace outlast
