// The remote tier of a job: copies committed checkpoints to a remote root in the background, and
// knows what there is to restore where the local root has nothing whole.
//
//   a checkpoint is committed ── due ──> QUEUED (the newest one) ── the former upload ended ──>
//   UPLOADING ──> uploaded | failed, counted; the next commit is due then
//
// Nothing here holds up training or a local save: uploads run on a background thread of idle I/O
// priority, and what is being uploaded is spared by local retention until that has ended. A remote
// store that is out of reach when the job begins is looked for again at each due save, unless the
// local root has nothing to go on from. One that may only be read is restored from all the same;
// each upload to it fails, and says so.
//
// Of several nodes the lead uploads all shards, from the folder that all see; what is restored
// every node reads for itself (remote_reads.h).
//
// Not yet: several agents that each upload their own shards; a claim that is lost on the remote
// root alone ends its uploads, not the job.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "base/serial_thread.h"
#include "checkpoint/remote_root.h"
#include "checkpoint/root.h"
#include "outlast/base/mutex.h"
#include "outlast/base/plugins.h"
#include "outlast/checkpoint/checkpointer.h"

namespace outlast {

// Told on the loop's thread.
struct RemoteObserver {
  std::function<void(int64_t step, const UploadResult& result)> on_uploaded;
  std::function<void(int64_t step, const absl::Status& error)> on_failed;
};

struct RemoteTierOptions {
  RemoteOptions remote;
  std::shared_ptr<const Plugins> plugins;  // null: the embedded ones
  RootOptions root;                        // whose job and run it is
  // Every::Auto's interval, from what an upload takes.
  std::function<absl::Duration(absl::Duration upload_time)> auto_interval;
};

// What the roots must hold where the remote one is out of reach.
enum class RootsNeed : uint8_t {
  kACheckpoint = 0,
  kNothing = 1,  // the job starts afresh, or goes on from what memory holds
};

// Opens the local root and, where `remote.uri` says so, the remote one, and claims both, by the
// same number. What `remote_error` says is not OK: the remote root could not be reached, and the
// local one has what `need` says. One that may only be read comes unclaimed, and `read_only` says
// why. kPermissionDenied, naming the remote root: it may only be read, and is nobody's yet. Blocks;
// for a thread of its own.
struct OpenedTiers {
  std::unique_ptr<Root> root;
  std::unique_ptr<RemoteRoot> remote;
  absl::Status remote_error;
  absl::Status read_only;
};
absl::StatusOr<OpenedTiers> OpenTiers(const std::string& uri, const RemoteTierOptions& options,
                                      RootsNeed need);

// A remote root to read from; nothing is claimed. Blocks on the store.
absl::StatusOr<std::unique_ptr<RemoteRoot>> OpenRemote(const RemoteTierOptions& options);

// Calls come on the loop's thread, but for those that say otherwise.
class RemoteTier {
 public:
  // `root` and `loop` outlive it. `remote` may be null: it is looked for later.
  RemoteTier(EventLoop& loop, Root& root, std::unique_ptr<RemoteRoot> remote,
             RemoteTierOptions options, RemoteObserver observer);
  // Gives up what is being uploaded.
  ~RemoteTier();

  // A checkpoint was committed locally.
  void OnCommitted(int64_t step, const std::string& checkpoint, uint64_t bytes);
  // The job goes on from `step`: later steps will come again. `checkpoint` is empty for one from
  // memory; one that is not in the remote root, and due, is uploaded now.
  void OnRestored(int64_t step, const std::string& checkpoint);
  // Something that was committed is not there yet.
  bool is_behind() const {
    return uploading_.has_value() || (newest_.has_value() && newest_->checkpoint != uploaded_);
  }
  // Copies the newest one that was committed, due or not, unless it is there, and waits; gives up
  // after `limit`, or 60 s + bytes / (50 MB/s). Observers are told before it returns. Blocks.
  void Finish(std::optional<absl::Duration> limit = std::nullopt);
  void Beat();
  // Says that the owner ended in order. Blocks.
  void Release();

  // Any thread. Local checkpoints that must not be deleted now.
  std::vector<std::string> InUse() const;
  // Any thread. Names that stand in the remote root and are of the job's history, as far as is
  // known; newest first.
  std::vector<std::string> Standing() const;

  // What follows blocks, and is for a thread that may.
  // Both tiers as one. The remote one's error becomes `note`, and the local one is all there is.
  absl::StatusOr<TierView> View(std::string* note);
  // To read from: opened, and claimed where it may be.
  absl::StatusOr<std::shared_ptr<RemoteRoot>> Remote();

 private:
  struct Job {
    int64_t step = 0;
    std::string checkpoint;
    uint64_t bytes = 0;
  };

  bool IsDue(int64_t step) const;
  void Queue(Job job);
  void Start(Job job);
  absl::StatusOr<std::shared_ptr<RemoteRoot>> Claimed();
  absl::StatusOr<UploadResult> Upload(const Job& job);
  // What the upload thread has left for the loop's.
  void Drain();
  void KeepStanding(const TierView& view);
  bool is_cancelled() const;

  EventLoop& loop_;
  Root& root_;
  const RemoteTierOptions options_;
  const RemoteObserver observer_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);

  std::optional<Job> newest_;  // committed here
  std::optional<Job> queued_, uploading_;
  std::string uploaded_;   // the newest that is known to be there
  int64_t last_step_ = 0;  // of it, or of the state that the job goes on from
  bool is_lost_ = false;   // another run has taken the remote root
  int64_t last_began_ns_ = 0;
  absl::Duration last_time_ = absl::Seconds(10);
  RateLimiter limiter_;
  std::atomic<int64_t> give_up_at_ns_{0};  // 0: not yet

  mutable Mutex mutex_;
  std::shared_ptr<RemoteRoot> remote_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> in_use_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> standing_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::StatusOr<UploadResult>> ended_ ABSL_GUARDED_BY(mutex_);
  CondVar changed_;

  std::unique_ptr<SerialThread> beats_;
  std::unique_ptr<SerialThread> uploads_;
};

}  // namespace outlast
