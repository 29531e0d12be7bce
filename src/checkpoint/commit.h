// One save as a state machine: a pure function from (state, event, now) to (state, actions). The
// agent of rank 0, the *committer*, has one for each save; its own ranks' part is one of the parts.
//
//   ANNOUNCED ── folder made: ANNOUNCE to all ──> WRITING(n of N) ── all receipts ──> COLLECTED
//   COLLECTED ── hooks say ok ──> CHECKED ── link(2) ──> COMMITTED
//   any ── a writer failed, a deadline, a veto, the generation ended ──> ABORTED(reason)
//
// Once the link was asked for it cannot be called back: what the disk says then is what counts, an
// ABORTED by the link's deadline too becomes COMMITTED if the link comes after all. The folder of
// an aborted save is removed only while no manifest can stand in it.
//
// Departure from design/checkpoint.md, section 5: the committer drives the commit itself, over the
// agents' own connections (run/peers.h), and the coordinator hears the outcome alone: one hop less,
// and a new committer after a re-form finds on disk all that it needs to roll forward.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "checkpoint/manifest.h"
#include "outlast/base/mutex.h"

namespace outlast {

enum class CommitPhase : uint8_t {
  kAnnounced,
  kWriting,
  kCollected,
  kChecked,
  kCommitted,
  kAborted
};
std::string_view NameOf(CommitPhase phase);

// Which save of which membership. Nobody takes a message with another key for his own.
struct SaveKey {
  uint64_t generation = 0;  // of the agents that write it, not of the snapshot
  std::string checkpoint;   // folder name
  bool operator==(const SaveKey&) const = default;
};

// Design section 5. Writers are given `write` + `receipts`, and `collect` more until all have been
// heard.
struct CommitLimits {
  absl::Duration announce = absl::Seconds(10);  // the folder's making
  absl::Duration write = absl::Seconds(60);     // + bytes / (50 MB/s), by WithBytes
  absl::Duration stall = absl::Seconds(30);     // a writer's time without progress
  absl::Duration receipts = absl::Seconds(10);
  absl::Duration collect = absl::Seconds(30);
  absl::Duration hooks = absl::Seconds(60);  // of all hooks together
  absl::Duration link = absl::Seconds(30);

  static CommitLimits WithBytes(uint64_t largest_part, absl::Duration hooks);
  // kInvalidArgument, naming the rule, unless they nest: stall < write.
  absl::Status Check() const;
};

// What one agent writes.
struct CommitPart {
  std::string node;
  std::vector<uint32_t> ranks;
};

struct WrittenRank {
  uint32_t rank = 0;
  ReceiptEntry receipt;
};

// --- Events ---
//
// The answers to MakeSaveFolder, AskSaveHooks and LinkManifest carry no key: the driver gives them
// to the machine that asked, be another one under way by then.

// The folder stands, and is durable in its parent.
struct FolderMade {
  std::string checkpoint;
};
struct FolderRefused {
  absl::Status why;
};
// A receipt of that rank is durable. As progress it puts the node's stall off.
struct RankWritten {
  std::string node;
  SaveKey save;
  WrittenRank written;
};
struct PartProgressed {
  std::string node;
  SaveKey save;
};
struct PartFailed {
  std::string node;
  SaveKey save;
  int rank = -1;  // -1: all of the node
  absl::Status why;
};
// The node is gone, as far as its connection tells.
struct PartLost {
  std::string node;
  std::string why;
};
struct HooksAnswered {
  absl::Status verdict;
};
struct ManifestLinked {
  absl::Status status;
};
// `generation` and older ones are being unwound.
struct SaveGenerationEnded {
  uint64_t generation = 0;
  std::string reason;
};
struct TimePassed {};

using CommitEvent =
    std::variant<FolderMade, FolderRefused, RankWritten, PartProgressed, PartFailed, PartLost,
                 HooksAnswered, ManifestLinked, SaveGenerationEnded, TimePassed>;

// --- Actions, in this order ---

struct MakeSaveFolder {};
// To every node: write your part.
struct AnnounceSave {
  SaveKey save;
};
struct AskSaveHooks {};
struct LinkManifest {};  // of the receipts in Commit::written()
// To every node: the save is over, so unpin; an aborted one is not to be written any more.
struct TellOutcome {
  SaveKey save;
  absl::Status outcome;
};
struct RemoveSaveFolder {};  // after TellOutcome

using CommitAction = std::variant<MakeSaveFolder, AnnounceSave, AskSaveHooks, LinkManifest,
                                  TellOutcome, RemoveSaveFolder>;

// Not safe for concurrent use. Copyable. `now` never falls.
class Commit {
 public:
  Commit(uint64_t generation, int64_t step, std::vector<CommitPart> parts, CommitLimits limits);

  std::vector<CommitAction> Start(absl::Duration now);
  std::vector<CommitAction> Step(const CommitEvent& event, absl::Duration now);

  CommitPhase phase() const { return phase_; }
  bool is_over() const { return phase_ >= CommitPhase::kCommitted; }
  const SaveKey& save() const { return save_; }
  int64_t step() const { return step_; }
  // kAborted's reason; OK in every other phase.
  const absl::Status& reason() const { return reason_; }
  // By rank.
  const std::map<uint32_t, ReceiptEntry>& written() const { return written_; }
  size_t world() const { return node_of_.size(); }
  // When TimePassed is due; InfiniteDuration: never.
  absl::Duration deadline() const;
  // Messages of other saves, or out of turn.
  uint64_t ignored() const { return ignored_; }

 private:
  void On(const FolderMade& event);
  void On(const FolderRefused& event);
  void On(const RankWritten& event);
  void On(const PartProgressed& event);
  void On(const PartFailed& event);
  void On(const PartLost& event);
  void On(const HooksAnswered& event);
  void On(const ManifestLinked& event);
  void On(const SaveGenerationEnded& event);
  void On(const TimePassed& event);

  void Abort(const absl::Status& why);
  void Collected();
  bool Concerns(const std::string& node, const SaveKey& save);
  std::string MissingText(const std::string& only_node = "") const;
  bool IsMissing(const CommitPart& part) const;
  absl::Status Late(std::string_view what, absl::Duration limit) const;
  template <typename Action>
  void Emit(Action action) {
    actions_.emplace_back(std::move(action));
  }

  uint64_t generation_;
  int64_t step_;
  std::vector<CommitPart> parts_;
  CommitLimits limits_;
  std::map<uint32_t, size_t> node_of_;  // rank -> its part
  std::vector<absl::Duration> moved_;   // by part: when it was last heard
  std::map<uint32_t, ReceiptEntry> written_;
  SaveKey save_;
  CommitPhase phase_ = CommitPhase::kAnnounced;
  bool link_asked_ = false;
  bool manifest_may_stand_ = false;  // somebody else's, in our folder
  absl::Status reason_;
  absl::Duration due_ = absl::InfiniteDuration();  // of the phase
  absl::Duration now_;
  uint64_t ignored_ = 0;
  std::vector<CommitAction> actions_;
};

// An agent's part of saves: what it may still write. A receipt that was begun before an abort is
// waited for, up to `patience` (a disk that hangs holds up nobody's abort); after that none of that
// generation is begun. Safe for concurrent use.
class WriteFence {
 public:
  // A save may begin here. False: its generation was aborted here, or a newer one was seen, so a
  // former committer speaks.
  bool Begin(const SaveKey& save) ABSL_LOCKS_EXCLUDED(mutex_);
  // That save is over, or was aborted by its committer.
  void End(const SaveKey& save) ABSL_LOCKS_EXCLUDED(mutex_);
  // Nothing of `generation` and older ones is written any more. True: nothing of them is under way
  // either.
  bool Abort(uint64_t generation, absl::Duration patience) ABSL_LOCKS_EXCLUDED(mutex_);

  // While it lives a receipt of that save is written. Convertible to bool: it may.
  class Permit {
   public:
    Permit() = default;
    explicit Permit(WriteFence* fence) : fence_(fence) {}
    Permit(Permit&& other) noexcept : fence_(std::exchange(other.fence_, nullptr)) {}
    Permit& operator=(Permit&&) = delete;
    ~Permit();
    explicit operator bool() const { return fence_ != nullptr; }

   private:
    WriteFence* fence_ = nullptr;
  };
  Permit Enter(const SaveKey& save) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether Enter would let it in: asked before what is long.
  bool IsOpen(const SaveKey& save) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  bool IsCurrent(const SaveKey& save) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  CondVar changed_;
  uint64_t aborted_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t newest_ ABSL_GUARDED_BY(mutex_) = 0;
  SaveKey current_ ABSL_GUARDED_BY(mutex_);  // empty: none
  int inside_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace outlast
