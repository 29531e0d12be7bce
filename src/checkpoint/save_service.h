// The keeper's part of checkpointing: opens the root, makes the buffers, decides what all ranks
// restore from, and has what they sealed written to disk.
//
//   COLLECTING (some ranks sealed the step) ── all did ──> WRITING ──> durable | failed
//        │                                       │            ^
//        │                                       └─> QUEUED ──┘ a former one is being written, and
//        │                                                      somebody waits for this (a stop,
//        │                                                      Finish); else dropped, counted
//        └── abort, a rank skipped it or has gone past it ──> dropped
//
// Departure from design/checkpoint.md, section 4: on one node the tables of all ranks meet here (a
// few KiB each), so that any layout works without a digest exchange; of several nodes they meet at
// the lead, which gives all of them back to those who have not got them yet.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/serial_thread.h"
#include "checkpoint/peer_tier_options.h"
#include "checkpoint/persist.h"
#include "checkpoint/remote_reads.h"
#include "checkpoint/remote_tier.h"
#include "checkpoint/root.h"
#include "checkpoint/save_wire.h"
#include "checkpoint/scrub.h"
#include "checkpoint/seal_table.h"
#include "checkpoint/start_point.h"
#include "outlast/blackbox/buffer.h"
#include "outlast/checkpoint/interval.h"
#include "run/keeper.h"

namespace outlast {

class ReplicaStore;

// Told on the keeper's loop thread.
struct SaveObserver {
  std::function<void(int64_t step, const PersistResult& result)> on_durable =
      [](int64_t, const PersistResult&) {};
  std::function<void(int64_t step, const absl::Status& error)> on_failed =
      [](int64_t, const absl::Status&) {};
  // All ranks have restored. `step` 0 with kNone: started anew.
  std::function<void(uint64_t generation, RestoreSource source, int64_t step)> on_restored =
      [](uint64_t, RestoreSource, int64_t) {};
  std::function<void(int64_t step, const UploadResult& result)> on_uploaded =
      [](int64_t, const UploadResult&) {};
  std::function<void(int64_t step, const absl::Status& error)> on_upload_failed =
      [](int64_t, const absl::Status&) {};
  // Of several nodes: this node's ranks' snapshots were brought to another one.
  std::function<void(int64_t step, const std::string& partner, uint64_t bytes, absl::Duration time)>
      on_copied = [](int64_t, const std::string&, uint64_t, absl::Duration) {};
  // One line for people: a candidate that was passed over, a root's notes.
  std::function<void(const std::string& line)> on_note = [](const std::string&) {};
};

struct SaveServiceOptions {
  std::string job_name;                    // --job; overrides the trainer's
  bool fresh = false;                      // --fresh
  StartPoint start;                        // --restore-from; of no use once this run has saved
  bool take_over = false;                  // --take-over
  std::string committer;                   // the host's name, for people
  std::shared_ptr<const Plugins> plugins;  // of remote roots; null: the embedded ones
  Hooks own_hooks;                         // of this process, besides those that the trainer names
  // Bounds of Every::Auto's interval on disk.
  absl::Duration shortest_auto = absl::Seconds(5);
  absl::Duration longest_auto = absl::Minutes(30);
  // A save that takes longer than this and its bytes at 50 MB/s (or at the rate that the trainer
  // wants) is given up: nobody waits for it any more, while its thread may still hang in the
  // kernel.
  absl::Duration save_floor = absl::Seconds(60);
  // Of several nodes: how long a node looks for the lead's claim in its root, which a network's
  // file system may show late, before the root is said to be another one.
  absl::Duration claim_patience = absl::Seconds(10);
  // Of several nodes: how long the agents wait for each other when they save after the trainers'
  // end.
  absl::Duration last_patience = absl::Seconds(10);
  PeerTierOptions peers;
  SaveObserver observer;
};

// Belongs to the keeper's loop thread; disk work happens on two threads of its own.
class SaveService final : public KeeperExtension {
 public:
  SaveService(Keeper& keeper, SaveServiceOptions options);
  // Waits for a save that is being written, and releases the root's claim.
  ~SaveService() override;

  // Goes on with what a former keeper's service kept: takes the root as the same run's, and the
  // buffers as they are. Before the keeper starts. Blocks on storage. kFailedPrecondition: another
  // run has taken the root meanwhile.
  absl::Status GoOn(Kept& kept);

  bool OnMessage(int slot, Message& message) override;
  void OnAbort(uint64_t generation) override;
  void OnQuiet() override;
  void OnCommit(const CommitGeneration& commit) override;
  void OnWorkerEnded(int slot) override;
  bool is_saving() const override { return opened_ != nullptr && !buffers_.empty(); }
  void OnPersistCommon(const std::string& reason) override;
  bool OnWantSave(const WantSave& want) override;

  // All workers have ended: writes the newest snapshot that all ranks have, if it is newer than
  // what is on disk, and calls `done`. Call it before destruction when a job ends otherwise than
  // finished. Of one node it blocks, and `done` comes before it returns. Of several nodes the
  // agents do it together, while the loop runs: each must call this, and `done` comes by then, or
  // with kUnavailable when another agent has not within `last_patience`, which names the nodes.
  void PersistLast(std::function<void(absl::Status)> done);

  int64_t durable_step() const { return durable_step_; }
  // Some state is in the root, and with it the final one that ranks asked for last.
  bool holds_last_state() const { return durable_step_ > 0 && durable_step_ >= final_step_; }
  int64_t dropped_saves() const { return dropped_; }
  // Of several nodes: the newest step that all ranks are known to hold in memory; kNoStep: none.
  int64_t common_step() const;
  // At the lead: the newest step of which every rank's snapshot lies on another node too; kNoStep:
  // none.
  int64_t copied_step() const;
  // The copies that this agent has; null: it makes none.
  ReplicaStore* copies();

 private:
  class Nodes;  // save_service_nodes.h

  struct Held {
    int buffer = 0;
    uint32_t turn = 0;
  };
  struct Save {
    int64_t step = 0;
    uint64_t generation = 0;
    bool last = false;                      // of an agreed stop
    std::vector<std::optional<Held>> held;  // by slot; of several nodes empty at the lead
  };
  struct Waiter {
    int slot = 0;
    uint64_t request = 0;
  };
  struct Common {
    uint64_t generation = 0;
    int64_t step = 0;
    std::vector<Held> held;  // by slot
  };
  struct Restoring {  // one generation's restore
    uint32_t attempt = 0;
    std::optional<RestoreChoice> choice;
    bool choosing = false;
    std::vector<Waiter> choosers;
    struct Gatherer {
      Waiter waiter;
      Share share;
      size_t buffer;
    };
    std::map<int, Gatherer> gatherers;
    std::map<int, Waiter> voters;
    std::shared_ptr<RemoteReads> reads;  // of a choice of the remote root
    bool opening_reads = false;
    bool failed = false, mismatch = false;
    bool done = false;   // all ranks hold it
    bool again = false;  // a later one in the same generation: chosen once all have asked
    std::vector<std::string> passed_over;
    std::set<std::string> bad_folders;
    std::set<std::string> bad_remote;
    std::map<int, std::set<int>> tried;  // damaged slot -> itself, and who served in vain
    std::map<int, int> server;           // damaged slot -> whose buffer serves it now
    bool memory_is_bad = false;
  };
  struct Opened {
    std::unique_ptr<Root> root;
    std::unique_ptr<RemoteRoot> remote;
    absl::Status remote_error;         // out of reach
    absl::Status remote_is_read_only;  // OK: it is not
    bool resume = true;
  };

  absl::Status PersistLastOfOneNode();
  struct MadeBuffers;
  struct BufferNeeds {
    std::string tables;      // of all ranks, by rank (EncodeTables)
    std::vector<int> ranks;  // by slot; -1: none
    std::vector<bool> has;   // by slot: its buffers stay
    Id128 job, run;
    int wanted = 0;
    int64_t extras_bytes = 0;
  };
  static absl::Status PlanBuffers(const BufferNeeds& needs, MadeBuffers* made);
  static absl::Status MakeBuffers(const BufferNeeds& needs, MadeBuffers* made);
  BufferNeeds NeedsOf(std::string tables, std::vector<int> ranks) const;
  void MakeBuffersLater(BufferNeeds needs);
  // For the keeper after this one (save_service_keep.cc).
  void KeepOpened();
  void KeepBuffers();
  void KeepLast();
  absl::Status TakeBuffers(Kept& kept);
  void GoOnUploading(bool is_in_reach);
  absl::Status LookForNewestOfThisRun();

  void OnOpenRoot(int slot, Message& message);
  absl::StatusOr<std::shared_ptr<Opened>> static OpenToWrite(const std::string& uri,
                                                             const RemoteTierOptions& options,
                                                             StartMode mode, RootsNeed need,
                                                             const std::string& committer,
                                                             const StartPoint& start);
  RootsNeed NeedOf(StartMode mode) const;
  StartMode WantedStart() const;
  // Of what an operator asked for, before a rank restores.
  absl::Status CheckStart() const;
  static absl::Status CheckStartPoint(const Root& root, const StartPoint& point);
  bool is_elsewhere(const RestoreChoice& choice) const;
  absl::Status Adopt(absl::StatusOr<std::shared_ptr<Opened>> opened);
  void BeginWriting();
  void OnOpened(absl::StatusOr<std::shared_ptr<Opened>> opened);
  void AnswerOpen(const Waiter& waiter);
  void OnBuffers(int slot, Message& message);
  void MakeBuffersIfAllAsked();
  void OnBuffersMade(const absl::Status& status, const std::vector<bool>& had);
  void AnswerBuffers(const Waiter& waiter);
  void OnSealed(int slot, const Message& message);
  void OnSkipped(int slot, const Message& message);
  void DropPassed(size_t slot, int64_t step);
  void OnHeld(int slot, const Message& message);
  void OnFinishAsked(int slot, const Message& message);
  void OnChoose(int slot, const Message& message);
  void OnGather(int slot, const Message& message);
  void EndGathering(Share all);
  void GiveUpShares();
  void OnReadRange(int slot, const Message& message);
  void OnVote(int slot, const Message& message);

  bool is_complete(const Save& save) const;
  void DropSave(Save& save, const char* why);
  using Collecting = std::map<int64_t, Save>;
  Collecting::iterator DropCollecting(Collecting::iterator partial, const char* why);
  void QueueSave(Save save);
  void StartSave(Save save);
  void OnSaveEnded(const Save& begun, const absl::StatusOr<PersistResult>& result);
  void ArmLimit(const Save& save);
  absl::Duration SaveLimit() const;
  void GiveUp(const Save& save, absl::Duration limit);
  PersistRequest RequestOf(const Save& save) const;
  void AnswerFinishers(int64_t step, const absl::Status& status);
  void SaveForFinishers(int64_t step);
  bool is_being_saved(int64_t step) const;
  bool is_pending(int64_t step) const;
  bool is_being_saved(size_t slot, size_t buffer) const;

  std::optional<Common> FindCommon() const;
  bool PinAll(const Common& common);
  void KeepTheCommonOnly();
  void ForgetMemory();
  void Choose();
  void ChooseFromDisk();
  struct Candidates {
    StartDecision decision;
    std::vector<std::string> local, remote;  // where they are usable
    std::string elsewhere;                   // the root that `local` lies in; empty: this one
    std::string note;                        // why the remote root was left out; empty: it was not
    StartMode mode = StartMode::kResume;
  };
  static std::string NewestUsable(const Candidates& candidates, const Restoring& restoring);
  void OnCandidates(uint64_t generation, uint32_t attempt,
                    const absl::StatusOr<Candidates>& candidates);
  void OpenReads();
  void ForgetReads();
  void EndRestoring();
  SerialThread& readers() { return fetch_ != nullptr ? *fetch_ : *io_; }
  RemoteTierOptions TierOptions() const;
  void MakeTier();
  void MakeFetchThread();
  void MakeScrubber();
  void Tell(int64_t step, SaveOutcome outcome, std::string_view error);
  void Decide(RestoreChoice choice);
  void AnswerChoosers();
  void CountVotes();
  // `place`: the checkpoint's name, or its folder.
  void PassOver(RestoreSource source, const std::string& place, const std::string& reason);
  void OnRestored(const RestoreChoice& choice);
  bool ServeFromReplicas();
  std::optional<int> ReplicaOf(int slot) const;
  int members() const;
  std::vector<uint32_t> Mates() const;
  void ArmAutoSave();
  int64_t NewestStep() const;
  void AskForAutoSave();
  void BeatLater();
  void Hurry();

  Keeper& keeper_;
  const SaveServiceOptions options_;
  const int slots_;
  // Posted work of the disk threads looks here before it touches the service.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);

  std::string open_text_;
  CheckpointerOptions checkpointer_;
  bool opening_ = false;
  absl::Status open_error_;
  std::vector<Waiter> openers_;
  std::shared_ptr<Opened> opened_;
  UniqueFd table_fd_;
  std::unique_ptr<SealTable> table_;

  std::vector<std::string> table_parts_;  // being received, by slot
  std::vector<std::string> tables_;       // by slot
  std::vector<Waiter> buffer_waiters_;
  bool making_ = false;
  std::vector<RankTable> rank_tables_;
  std::string plan_;
  std::vector<Assignment> assignments_;
  std::vector<std::vector<Buffer>> buffers_;  // by slot
  UniqueFd tables_fd_;
  uint64_t tables_bytes_ = 0;

  Hooks hooks_;
  std::unique_ptr<RateLimiter> limiter_ = std::make_unique<RateLimiter>(0);
  Collecting collecting_;
  std::set<int64_t> skipped_;  // by some rank: never complete
  std::optional<Save> queued_;
  std::optional<Save> writing_;
  int64_t durable_step_ = 0;
  int64_t final_step_ = 0;                  // that a Finish wanted, in this generation
  std::atomic<int64_t> committed_step_{0};  // by the persisting thread
  int64_t dropped_ = 0;
  std::optional<std::string> parent_;
  bool committed_here_ = false;
  bool began_at_zero_ = false;  // both tiers were looked at, and there was nothing
  bool is_stopped_ = false;     // an agreed stop was saved
  std::map<int64_t, std::vector<Waiter>> finishers_;
  std::set<int64_t> retried_;
  std::optional<EventLoop::TimerId> auto_timer_, beat_timer_, limit_timer_;
  absl::Status overdue_;  // of the save that is being written, once it is given up
  SaveCostMeter cost_;
  std::optional<IntervalTuner> interval_;
  absl::Duration auto_retry_;
  int64_t started_ns_;

  std::optional<Common> base_;  // what memory has, as of the newest commit
  std::vector<int> generation_members_;
  uint64_t generation_ = 0;
  Restoring restoring_;

  std::unique_ptr<Scrubber> scrubber_;     // none: not asked for
  std::unique_ptr<RemoteTier> tier_;       // none: no remote root
  std::unique_ptr<SerialThread> fetch_;    // with a remote root: lists it, reads small files
  std::unique_ptr<SerialThread> io_;       // the root: open, list, beat
  std::unique_ptr<SerialThread> persist_;  // saves
  std::unique_ptr<Nodes> nodes_;           // null: this node holds all ranks
};

}  // namespace outlast
