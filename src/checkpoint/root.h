// The folder that holds a job's checkpoints: who may write there (claims), which checkpoints are
// its history (the chain of parents), how one comes to be (MANIFEST.json, linked once) and how one
// goes (DELETED first).
//
// What decides is pure and stands above the class; the class lists, asks and acts.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/manifest.h"
#include "checkpoint/owner.h"
#include "outlast/base/clock.h"
#include "outlast/base/id.h"
#include "outlast/base/mutex.h"

namespace outlast {

// --- Claims ---

inline constexpr absl::Duration kBeatInterval = absl::Seconds(5);
// Two beats: an owner whose beat stands still so long has lost its claim.
inline constexpr absl::Duration kSilence = absl::Seconds(10);

// What is known of a root's newest claim.
struct ClaimView {
  uint64_t number = 0;  // 0: there is none
  Claim claim;
  bool released = false;
  OwnerState owner = OwnerState::kUnknown;
  std::optional<uint64_t> first_beat;  // when the watch began
  std::optional<uint64_t> beat;        // now
  absl::Duration watched;              // time since the watch began
};

enum class ClaimVerdict : uint8_t { kTake, kWatch, kRefuse };
struct ClaimDecision {
  ClaimVerdict verdict;
  std::string reason;  // for people; for kRefuse it names owner and host
};
// May a run take the root? `take_over`: an operator says so.
enum class TakeOver : uint8_t { kNo, kYes };
ClaimDecision JudgeClaim(const ClaimView& newest, const Id128& run, TakeOver take_over);

// --- Checkpoints and their chain ---

enum class CheckpointState : uint8_t {
  kCommitted,   // a valid manifest of this job
  kIncomplete,  // no manifest
  kDeleted,     // DELETED lies there
  kDamaged,  // the manifest cannot be used, or a file that it names is missing or of another size
  kForeign,  // the manifest is another job's
  kNewer,    // of a higher version than this program reads: neither damaged nor to be passed over
};
std::string_view NameOf(CheckpointState state);

struct CheckpointInfo {
  std::string name;
  int64_t step = 0;
  CheckpointState state = CheckpointState::kIncomplete;
  std::string reason;                // why it is not kCommitted
  std::optional<Manifest> manifest;  // kCommitted and kForeign; kDamaged where only files are bad
  bool pinned = false;
  std::string quarantined;  // reason in QUARANTINE.json; empty: none
};

struct Stranger {
  std::string name, why;
};

struct ClaimFile {
  uint64_t number = 0;
  std::optional<Claim> claim;  // none: unreadable
  bool released = false;
};

struct Listing {
  std::vector<CheckpointInfo> checkpoints;  // by name
  std::vector<ClaimFile> claims;            // by number
  std::vector<Stranger> strangers;          // what Outlast did not make: left alone
  std::vector<std::string> notes;           // hints that could not be read, and the like
};

// Indices into the list given, newest first.
struct Chain {
  std::vector<size_t> members;    // history: what a restore tries, and what retention counts
  std::vector<size_t> abandoned;  // valid manifests off it
};
// The chain ends in the newest manifest (largest generation, then step) of the newest claim that
// has one, and goes from parent to parent; where a parent is gone or unreadable, to the newest of
// its `ancestors` that stands. File times and names play no part.
Chain ResolveChain(std::span<const CheckpointInfo> checkpoints);

struct RetentionOptions {
  int keep_last = 3;       // at least 1
  int64_t keep_every = 0;  // also each step that this divides; 0: none
  // Names whose bytes were read and found whole, where somebody looks: of the usable ones among
  // them the newest stays, as long as no newer one is known to be whole.
  std::vector<std::string> verified = {};
};
// Names to delete after a commit: members of the chain that are older than the newest `keep_last`
// usable ones (committed and not in quarantine), unless pinned or kept by step; folders without a
// manifest and half-deleted ones; none of `in_progress`, which are being written or copied
// elsewhere. Never an abandoned, damaged or foreign one.
std::vector<std::string> ChooseDeletions(std::span<const CheckpointInfo> checkpoints,
                                         const RetentionOptions& options,
                                         std::span<const std::string> in_progress);

// What `gc` may take from a root.
struct Garbage {
  std::string name, why;
};
// Abandoned checkpoints, as long as the chain has a usable one; and, unless a living run holds the
// root, folders that a save left without a manifest, or a deletion half-way. Never what is pinned,
// foreign, or has a manifest that cannot be read.
enum class RootOwner : uint8_t { kNone, kLiving };
std::vector<Garbage> ChooseGarbage(std::span<const CheckpointInfo> checkpoints, RootOwner owner);

enum class StartMode : uint8_t { kResume, kFresh };
// How a run begins in a root.
struct StartDecision {
  std::vector<std::string> candidates;  // to restore from, newest first; empty: step 0
  std::vector<std::string> skipped;     // "name: reason", one each
};
// kFailedPrecondition: checkpoints exist, none is usable, and kFresh was not asked for: never a
// silent step 0. kUnimplemented: a newer program wrote one, which may be what should be resumed.
absl::StatusOr<StartDecision> DecideStart(const Listing& listing, StartMode mode);

// --- Roll-forward ---

// A folder with everything but MANIFEST.
struct RollForwardView {
  std::string name;
  bool deleted = false;
  std::vector<absl::StatusOr<Receipt>>
      receipts;  // every receipt there; an error: it, or its shard, did not check
  std::optional<HooksRecord> hooks;
  std::vector<ClaimFile> claims;  // of the root
};
struct RollForwardDecision {
  bool commit = false;
  std::string reason;
};
// Commit if the receipts of all ranks check, are of one save (job, run, claim, generation, step,
// parent, plan, world), each hook that they name is `ok`, nothing says DELETED, and every claim
// newer than theirs is of the run `roller`.
RollForwardDecision JudgeRollForward(const RollForwardView& view, const Id128& roller);

// --- The root ---

// kJoin: to write beside the process that has the root's claim, which makes what is missing; so
// nothing is made here, and nothing needs to be there yet. Without a job_name as kWrite.
enum class Access : uint8_t { kRead, kWrite, kJoin };

// In a root: where a checkpoint from another tier is put together; it may be removed at any time.
inline constexpr std::string_view kFetchFolder = "fetch";

struct RootOptions {
  Access access = Access::kWrite;
  std::string job_name;         // --job; empty: adopt the root's id, or draw one
  std::optional<Id128> job;     // used where the root has none and no name is given
  Id128 run = Id128::Random();  // this invocation
  TakeOver take_over = TakeOver::kNo;
  OwnerIdentity owner = OwnerIdentity::Self();
  // How long a file that a manifest names is looked for; none: as its file system may be late.
  std::optional<absl::Duration> late_names = {};
  // Of a run with several agents: a larger claim of this very run is a later committer's, and stops
  // this one as a stranger's would.
  bool fences_own_run = false;
  // What a caller who is refused can do, for people.
  std::string when_held = "end that run, or say --take-over";
};

// One root on a local file system. Safe for concurrent use. All calls block on the disk; Claim may
// watch for kSilence.
class Root {
 public:
  // `uri` is a path or file:///path. For kWrite the folder and OUTLAST.json are created if missing;
  // no claim is taken yet. kNotFound: kRead, and no root there. kFailedPrecondition: foreign (the
  // root has another job id than `job_name` makes). kPermissionDenied, kResourceExhausted ...: the
  // system's.
  static absl::StatusOr<std::unique_ptr<Root>> Open(std::string_view uri, RootOptions options,
                                                    Clock& clock = Clock::Real());

  const std::string& path() const { return path_; }
  const Id128& job() const { return job_; }
  const std::string& job_name() const { return job_name_; }
  const Id128& run() const { return options_.run; }
  std::string PathOf(std::string_view checkpoint) const;

  // Takes the next claim; watches a foreign one's beat first if it must. kFailedPrecondition: its
  // owner still beats, named with its host (exit code 85).
  // Its number is larger than `above`, the largest of the other tiers.
  absl::Status TakeClaim(uint64_t above = 0);
  uint64_t claim() const;  // 0: none taken
  // What claims/<number> says, byte for byte: no other root has the same. kNotFound: it is not
  // there, or a network's file system does not show it yet.
  absl::StatusOr<std::string> ClaimText(uint64_t number) const;
  // What TakeClaim would decide: kTake or kRefuse, with the reason. Takes and changes nothing; may
  // watch for kSilence.
  absl::StatusOr<ClaimDecision> LookAtClaim() const;
  // Rewrites claims/<n>.beat: call it every kBeatInterval. Not synced: only a living host's counter
  // means anything.
  absl::Status Beat();
  // Says that the owner ended in order; the next one takes the root at once.
  absl::Status Release();
  // kAborted, naming the owner, once a larger claim of another run exists. kFailedPrecondition: no
  // claim is held, or the root is gone with it.
  absl::Status CheckClaim() const;

  // How closely committed checkpoints are looked at. kManifests: the manifest alone, as who only
  // follows the chain needs it. kFiles: manifest, the receipts' checksums, the
  // sizes of all files; a save need not read the tables of older ones again. kWhole: the receipts'
  // tensors too.
  enum class Look : uint8_t { kManifests, kFiles, kWhole };
  // Everything in the root. A failed listing is an error.
  absl::StatusOr<Listing> List(Look look = Look::kWhole) const;

  // Draws a name for a checkpoint of `step`, makes its folder, and syncs the root.
  // kFailedPrecondition: the root is gone, with the claim that is held.
  absl::StatusOr<std::string> NewCheckpoint(int64_t step);

  // Publishes the manifest: the checkpoint exists from here on. All receipts must be there already,
  // and durable. kAborted: a larger claim of another run exists, naming its owner; or another
  // manifest took the place. kFailedPrecondition: a generation smaller than one that this run
  // committed. OK also if this manifest is there already.
  absl::Status Commit(const Manifest& manifest);

  // Publishes the manifest of a checkpoint that was copied here, byte for byte, by the same rules.
  absl::Status CommitCopy(std::string_view checkpoint, const std::string& manifest);

  // Reads the receipts of a folder and makes its manifest: everything but `ancestors`, `hooks` and
  // `committed_by` comes from them. kDataLoss, kInvalidArgument: they are not whole or not of one
  // save, naming the rank.
  absl::StatusOr<Manifest> ComposeManifest(std::string_view checkpoint, uint32_t world) const;
  // The same from receipts that the caller wrote itself, by rank, with what WriteReceipt said of
  // each: their text is not read again.
  absl::StatusOr<Manifest> ComposeManifest(std::string_view checkpoint,
                                           std::vector<Receipt> receipts,
                                           std::vector<ReceiptEntry> entries) const;
  // Ancestors for a child of `parent`: those of the parent that still stand, here or (`elsewhere`,
  // the job's history, newest first) in another tier; the parent first.
  std::vector<std::string> AncestorsOf(const std::optional<std::string>& parent,
                                       const Listing& listing,
                                       std::span<const std::string> elsewhere = {}) const;

  // Commits each folder that a crash left with everything but MANIFEST, verifying its bytes;
  // returns the names committed. `in_progress` are left alone.
  absl::StatusOr<std::vector<std::string>> RollForward(std::span<const std::string> in_progress,
                                                       const CommittedBy& by);

  // Deletes one checkpoint or left-over folder: DELETED, fsync, MANIFEST, fsync, the rest, DELETED
  // last. kFailedPrecondition: it is pinned, and stands as it was.
  absl::Status Delete(std::string_view checkpoint);
  // ChooseDeletions, acted on. Returns the names deleted; the first error ends it. kAborted:
  // another run holds the root, and nothing was deleted.
  absl::StatusOr<std::vector<std::string>> Retain(const RetentionOptions& options,
                                                  std::span<const std::string> in_progress);

  // Makes or removes PINNED, durably: a pinned checkpoint is spared by retention and gc. Needs no
  // claim. kNotFound: not there, not committed, or its deletion has begun.
  absl::Status Pin(std::string_view checkpoint);
  absl::Status Unpin(std::string_view checkpoint);

  // Hints, replaced by rename.
  absl::Status WriteLatest(const Latest& latest);
  absl::Status Quarantine(std::string_view checkpoint, std::string_view reason);
  absl::Status ClearQuarantine(std::string_view checkpoint);

 private:
  Root(std::string path, RootOptions options, Clock& clock);

  absl::Status Identify();
  struct ClaimWatch {
    uint64_t number = 0;
    std::optional<uint64_t> first_beat;
    absl::Duration began;
  };
  absl::StatusOr<std::vector<ClaimFile>> ListClaims() const;
  absl::StatusOr<ClaimDecision> JudgeNewestClaim(ClaimWatch& watch) const;
  absl::StatusOr<std::optional<uint64_t>> ReadBeat(uint64_t number) const;
  absl::StatusOr<uint64_t> LargestClaim() const;
  // The claim that is held, if one is, lies where it was made.
  absl::Status CheckPresence() const;
  absl::Status LinkManifest(const std::string& folder, const Manifest& manifest,
                            const std::string& text);
  std::string ClaimPath(uint64_t number, std::string_view suffix = {}) const;

  const std::string path_;
  const RootOptions options_;
  Clock& clock_;
  Id128 job_;
  std::string job_name_;

  mutable Mutex mutex_;
  uint64_t claim_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t beat_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t newest_generation_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace outlast
