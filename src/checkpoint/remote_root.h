// A root in a Blob: the same names and files as on disk (manifest.h), the same claims and the same
// chain, so that a copy of either is the other.
//
// An upload is shards and receipts first, then MANIFEST.json by one conditional create: the
// checkpoint is there from then on, or not at all. One that was cut off is gone on with: what has
// its right size is whole, since a Blob shows no halves, and names are never used twice.
//
// Departures from a root on disk: no LATEST.json and no QUARANTINE.json (hints that nobody needs:
// a listing tells, and a damaged remote copy is passed over by the run that found it); a listing
// checks the sizes of receipts; what is wrong with a shard shows when it is read.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/reader.h"
#include "checkpoint/root.h"
#include "outlast/base/clock.h"
#include "outlast/base/mutex.h"
#include "outlast/store/blob.h"
#include "store/rate_limit.h"

namespace outlast {

struct UploadResult {
  std::string checkpoint;
  uint64_t bytes = 0;       // of shards that were sent
  uint64_t bytes_kept = 0;  // of shards that were there already
  absl::Duration time;
  std::string retention_error;  // older ones could not be deleted, and why
};

// Safe for concurrent use. All calls block on the store.
class RemoteRoot {
 public:
  // Reads OUTLAST.json; writes nothing. kFailedPrecondition: another job's than `options.job_name`
  // makes.
  static absl::StatusOr<std::unique_ptr<RemoteRoot>> Open(std::unique_ptr<Blob> blob,
                                                          RootOptions options,
                                                          Clock& clock = Clock::Real());

  // The job that the root is of; none: nobody has written here yet.
  const std::optional<Id128>& job() const { return job_; }
  std::string_view uri() const { return blob_->uri(); }

  // Makes the root `job`'s, or finds it so. kFailedPrecondition: another job's.
  absl::Status Adopt(const Id128& job, const std::string& name);
  // Waits until the newest claim's owner is gone, as Root::TakeClaim does, and returns the largest
  // number of claims and manifests. kFailedPrecondition: the owner still beats.
  absl::StatusOr<uint64_t> AwaitTurn();
  // kFailedPrecondition: another run was first. kPermissionDenied: it may not be written.
  absl::Status TakeClaim(uint64_t number);
  bool is_claimed();
  absl::Status Beat();
  absl::Status Release();
  // kAborted, naming the owner, once a larger claim of another run exists.
  absl::Status CheckClaim();

  // A store that cannot be read now is an error, never a damaged checkpoint.
  absl::StatusOr<Listing> List(const BlobCall& call = {});

  // Copies the committed checkpoint in `folder` (its name is the folder's). Every chunk is checked
  // against its receipt on its way. kDataLoss: the local bytes are damaged. kAborted: a larger
  // claim exists, or another manifest is there.
  absl::StatusOr<UploadResult> Upload(const std::string& folder, RateLimiter* limiter,
                                      const std::function<bool()>& is_cancelled);
  // Copies a checkpoint into local `root`, checked as it comes; it appears there under its own name
  // once it is whole and durable, in the place of a damaged one of that name. kDataLoss, kNotFound.
  absl::Status Fetch(const std::string& checkpoint, Root& root,
                     const std::function<bool()>& is_cancelled, const OnBytes& on_bytes = {});

  // Manifest and receipts, without a byte of a shard: EncodeHead's text, unchecked. kNotFound: no
  // manifest. kDataLoss: a receipt is missing.
  absl::StatusOr<std::string> ReadHead(const std::string& checkpoint,
                                       const std::function<bool()>& is_cancelled = {});
  // The same, checked. kInvalidArgument: they are not whole.
  absl::StatusOr<std::unique_ptr<CheckpointReader>> Read(const std::string& checkpoint);
  // Bytes of a shard, unchecked. kDataLoss: it is gone, or ends before.
  absl::Status ReadRange(const std::string& checkpoint, const ShardFile& file, uint64_t offset,
                         std::span<std::byte> into, const std::function<bool()>& is_cancelled);
  // Reads every byte and checks it, 32 MiB at a time; empty: whole. A store that cannot be read now
  // is an error, no damage.
  absl::StatusOr<std::vector<Damage>> Verify(const std::string& checkpoint,
                                             const OnBytes& on_bytes = {});

  absl::Status Delete(const std::string& checkpoint);
  // ChooseDeletions, acted on; the names deleted.
  absl::StatusOr<std::vector<std::string>> Retain(const RetentionOptions& options);

 private:
  RemoteRoot(std::unique_ptr<Blob> blob, RootOptions options, Clock& clock)
      : blob_(std::move(blob)), options_(std::move(options)), clock_(clock) {}

  absl::Status ReadRecord();
  absl::StatusOr<std::vector<ClaimFile>> ListClaims(const BlobCall& call);
  absl::StatusOr<std::optional<uint64_t>> ReadBeat(uint64_t number);
  absl::StatusOr<CheckpointInfo> Inspect(const std::string& name,
                                         const std::vector<BlobInfo>& files, const BlobCall& call);
  absl::Status UploadShard(const std::string& folder, const std::string& checkpoint,
                           const ShardFile& file, RateLimiter* limiter, const BlobCall& call,
                           UploadResult& result);
  absl::Status FetchShard(const std::string& checkpoint, const std::string& folder,
                          const ShardFile& file, const std::function<bool()>& is_cancelled,
                          const OnBytes& on_bytes);
  absl::Status ReadShard(
      const std::string& checkpoint, const ShardFile& file,
      const std::function<bool()>& is_cancelled,
      const std::function<absl::Status(uint64_t offset, std::span<const std::byte>)>& take);

  const std::unique_ptr<Blob> blob_;
  const RootOptions options_;
  Clock& clock_;
  std::optional<Id128> job_;

  Mutex mutex_;
  uint64_t claim_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t beat_ ABSL_GUARDED_BY(mutex_) = 0;
};

// What two tiers have together, for one decision over both: each checkpoint once, with the local
// copy where that is usable.
struct TierView {
  Listing listing;
  std::vector<std::string> local;   // usable there, by name
  std::vector<std::string> remote;  // usable there, by name
};
TierView MergeTiers(const Listing& local, const Listing& remote);

}  // namespace outlast
