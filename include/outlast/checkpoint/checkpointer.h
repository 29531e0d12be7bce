// Asynchronous, atomic checkpoints of a trainer's state: in memory that outlives the process each
// step, on disk at a cadence.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "outlast/checkpoint/commit_hook.h"
#include "outlast/checkpoint/restore.h"
#include "outlast/checkpoint/state.h"

namespace outlast {

class Plugins;
class Run;

// How often.
class Every {
 public:
  // As often as it is worth its cost: memory each step while that costs under 1 % of one, disk at
  // OptimalInterval (checkpoint/interval.h) of the step time that a save was seen to add, or its
  // write time while that is not known; at least once in 30 minutes, and as tolerable_loss says.
  static Every Auto() { return Every(0); }
  // At each step that `steps` divides; at least 1.
  static Every Steps(int64_t steps) { return Every(steps); }

  bool is_auto() const { return steps_ == 0; }
  int64_t steps() const { return steps_; }

 private:
  explicit Every(int64_t steps) : steps_(steps) {}
  int64_t steps_;
};

// A second root, far from the machine that may be lost: a folder on another mount (file:///mnt/x)
// or an object store (s3://bucket/run, where the adapter is linked). It gets the same folders as
// the local one, by a background thread of the agent that neither training nor local saves wait
// for. A restore comes from there where the local root has no whole copy of the step: on a fresh
// machine, or after damage. An upload that fails is counted and told, and the next due checkpoint
// is tried; what a run has committed last is uploaded at its end in any case (60 s + bytes /
// (50 MB/s), then it is given up, and gone on with by the next run).
struct RemoteOptions {
  std::string uri;  // empty: no remote tier
  // The first checkpoint on disk at or after each multiple. Auto: by the same rule as the disk's,
  // from what an upload takes.
  Every every = Every::Auto();
  int keep_last = 3;              // as on disk; at least 1
  int64_t keep_every = 0;         // also each step that this divides; 0: none
  uint64_t bytes_per_second = 0;  // what uploads may read and send; 0: as fast as it goes
  // How long a job that was told to stop may still upload: whoever told it will not wait for long.
  absl::Duration stop_limit = absl::Seconds(10);
};

struct CheckpointerOptions {
  std::string uri;  // "file:///ckpt/my-run" or a path: the root
  // The disk. One save at a time: what becomes due while one is written is left out and counted
  // (memory still gets it), unless an agreed stop or Finish waits for it.
  Every every = Every::Auto();
  Every snapshot_every = Every::Auto();  // memory
  // With Every::Auto: rank time that an interruption may cost on average where memory does not help
  // (half the disk's interval on each rank); it bounds the interval.
  absl::Duration tolerable_loss = absl::InfiniteDuration();
  // What saves may write to disk, bytes a second, all ranks of a node together; 0: as fast as it
  // goes. A save that somebody waits for (Finish, a stop) is not held back.
  uint64_t disk_bytes_per_second = 0;
  int keep_last = 3;       // checkpoints on disk that retention spares; at least 1
  int64_t keep_every = 0;  // and each of a step that this divides; 0: none
  // What may be read of committed checkpoints, one after the other, while nothing is being saved,
  // to find what the disk has lost before it is needed: bytes a second. What is damaged goes into
  // quarantine, is told, and counts for nothing in keep_last; the newest that was read and found
  // whole is never deleted. 0: nothing is read, since only you know who else needs the disk.
  uint64_t scrub_bytes_per_second = 0;
  RemoteOptions remote;
  HookOptions hooks;  // what may veto a checkpoint on disk
  // What remote.uri may name besides a folder, where the process saves by itself; under `outlast
  // run` the agent's own count. Null: folders alone.
  std::shared_ptr<const Plugins> plugins;
  // Start from step 0 in a root that holds checkpoints, without restoring (also `outlast run
  // --fresh`).
  enum class Start : uint8_t { kResume, kFresh } start = Start::kResume;
  std::string job;  // the job's name; empty: `outlast run --job`, else the root's id
  // The state's memory stays the trainer's own between two generations, and nobody reads or changes
  // it there: when a rank is lost, the others bring theirs back while a new process starts, instead
  // of after it. Leave it off where the body of ForEachGeneration makes or frees that memory.
  bool restore_ahead = false;
  int buffers = 0;  // snapshots held per rank, 2 or 3; 0: 3 where they fit in half of the memory
  // A snapshot whose copier has not ended this long after BeforeUpdate joined in is given up. Keep
  // it below the watchdog's floor (WatchdogOptions), or a held-up copy is taken for a hang.
  absl::Duration stall_limit = absl::Seconds(8);
  // Room for a rank's extras in each snapshot, in bytes: keys and values, and 8 for each pair; at
  // most 16 MiB.
  int64_t extras_bytes = int64_t{64} << 10;
};

struct CheckpointStats {
  int64_t sealed = 0;        // snapshots
  int64_t skipped = 0;       // snapshots that found no free buffer
  int64_t changed = 0;       // snapshots whose regions were seen to change while they were copied
  int64_t durable_step = 0;  // the newest step known to be on disk
  int64_t failed_saves = 0;  // disk
  int64_t remote_step = 0;   // the newest step known to be in the remote root
  int64_t failed_uploads = 0;
  int64_t stall_ns = 0;            // in BeforeUpdate and SaveIfDue, in all
  std::string restored_from;       // "memory", "live", "replica" (a peer's memory), "peer"
                                   // (what another node's agent had of it), "disk", "remote" or
                                   // "" (step 0)
  int64_t restore_read_bytes = 0;  // that this rank read from files, on disk or in the remote root,
                                   // in the last restore
};

// One a rank. Calls come from the trainer's thread; stats() from any. Owns one copier thread.
//
// A snapshot holds every region as it was when SaveIfDue was called. Regions of kind kStable are
// copied under the next forward and backward pass; BeforeUpdate finishes the copy. Until
// BeforeUpdate was called once, and whenever a trainer skips it, all is copied in SaveIfDue:
// slower, never wrong. Samples of lazy copies are compared with their source before they count: a
// trainer that is seen to change a kStable region without BeforeUpdate loses that snapshot, is
// told, and has all copied in SaveIfDue from then on.
class Checkpointer {
 public:
  // Opens the root for this run. All ranks give the same options. kInvalidArgument: an option that
  // cannot be, named. kFailedPrecondition: another run owns the root and still beats; or the root
  // is another job's (the agent ends the job with 85). Blocks on the disk; at most some 15 s for
  // the owner's beat.
  static absl::StatusOr<std::unique_ptr<Checkpointer>> Open(Run& run, CheckpointerOptions options);
  ~Checkpointer();

  // Copies the newest step that all ranks have into `state`, and returns that step; 0 when there is
  // none: then `state` is left as it is, and a process that lives on from an earlier generation has
  // to make it anew. Memory first, then disk, then remote; a source whose bytes do not match their
  // checksums on any rank is given up by all ranks together. Regions are matched by name over all
  // ranks together, and each must have the saved dtype and shape, but for what `options` allow; no
  // byte changes before that was checked. The world may be another than the saved one, and each
  // rank may hold any box. kInvalidArgument: names, dtypes or shapes differ, with the lists of
  // missing, unexpected and mismatched ones. kDataLoss: checkpoints exist, and none restores, with
  // every candidate and its reason. kAborted: the generation ended.
  absl::StatusOr<int64_t> Restore(const StateView& state, const RestoreOptions& options = {});
  // What did not match in the last restore of Strictness::kMatching, over all ranks.
  const MatchReport& restored_report() const;
  // The extras of the restored step; empty at step 0. They are those that this rank saved; in a
  // world that has grown, a rank that the saved one lacked gets those of rank 0.
  const Extras& restored_extras() const;
  // Of every rank of the saved world, by rank, where its size was another than this one's: what was
  // one rank's alone (a data cursor, a loader's state) is then the trainer's to share out anew.
  // Empty where the world is the same, and at step 0.
  const std::vector<Extras>& saved_extras() const;

  // Call it right before the update changes `kStable` regions: waits until the running snapshot has
  // copied them. kAborted: the generation ended; nothing of this step may be kept.
  absl::Status BeforeUpdate();
  // The same for one region, and what shares memory with it, where updates go from region to
  // region: waits for that one alone, copies it first if nobody has yet, while the others are still
  // copied under the updates of those before them. Call it for each region that changes, each step;
  // the next SaveIfDue takes the others for unchanged. kInvalidArgument: no such region.
  absl::Status BeforeUpdate(std::string_view region);
  // The state is whole and of `step`: begins a snapshot if one is due. `state`'s memory must stay
  // readable until the next BeforeUpdate, SaveIfDue, Release or destruction. Never fails because of
  // a disk: failed saves are counted, and reported once on stderr. kAborted: the generation ended,
  // or an agreed stop's step was saved. kInvalidArgument: the table of regions changed.
  absl::Status SaveIfDue(int64_t step, const StateView& state);
  // Finishes the running copy now: the owner is about to free or change a region.
  absl::Status Release();
  // The same for one region, and what shares memory with it. kInvalidArgument: no such region.
  absl::Status Release(std::string_view region);
  // Saves `step` (not below the step that was restored or saved last) if it is not saved yet, and
  // waits until it is durable. kResourceExhausted, kUnavailable ...: it could not be made durable,
  // and why (the job will end with 88); kFailedPrecondition: a hook vetoed it. Deadline: 60 s +
  // bytes / (50 MB/s) + the hooks' own, then kDeadlineExceeded.
  absl::Status Finish(int64_t step, const StateView& state);

  CheckpointStats stats() const;

 private:
  class Impl;
  explicit Checkpointer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace outlast
