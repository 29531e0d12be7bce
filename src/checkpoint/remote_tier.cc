#include "checkpoint/remote_tier.h"

#include <linux/ioprio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "outlast/base/clock.h"

namespace outlast {
namespace {

constexpr absl::Duration kListTimeout = absl::Seconds(20);

void LowerIoPriority() {  // a wish
  syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, IOPRIO_PRIO_VALUE(IOPRIO_CLASS_IDLE, 0));
}

// It may answer later; anything else is for somebody to mend.
bool IsOutOfReach(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
         absl::IsResourceExhausted(status);
}

// Makes both roots one job's, and claims them by one number, larger than any in either.
absl::Status ClaimBoth(Root& root, RemoteRoot& remote) {
  OUTLAST_RETURN_IF_ERROR(remote.Adopt(root.job(), root.job_name()));
  OUTLAST_ASSIGN_OR_RETURN(const uint64_t largest, remote.AwaitTurn());
  if (root.claim() == 0 || root.claim() <= largest)
    OUTLAST_RETURN_IF_ERROR(root.TakeClaim(largest));
  return remote.TakeClaim(root.claim());
}

// There is something to read, and this run may not write there.
bool IsReadOnly(const absl::Status& claimed, const RemoteRoot& remote) {
  return absl::IsPermissionDenied(claimed) && remote.job().has_value();
}

absl::Status CheckLocalGoesOn(const Root& root, const absl::Status& remote_error) {
  OUTLAST_ASSIGN_OR_RETURN(const Listing listing, root.List());
  const auto decision = DecideStart(listing, StartMode::kResume);
  if (decision.ok() && !decision->candidates.empty()) return absl::OkStatus();
  return Error(
      absl::StatusCode::kUnavailable,
      "the remote root cannot be reached, and {} has nothing to go on from; --fresh begins "
      "at step 0 whatever the remote root holds: {}",
      root.path(), MessageOf(remote_error));
}

}  // namespace

absl::StatusOr<std::unique_ptr<RemoteRoot>> OpenRemote(const RemoteTierOptions& options) {
  Plugins embedded;
  const Plugins* plugins = options.plugins.get();
  if (plugins == nullptr) {
    OUTLAST_RETURN_IF_ERROR(RegisterStores(embedded));
    plugins = &embedded;
  }
  OUTLAST_ASSIGN_OR_RETURN(auto blob, plugins->Make<Blob>(options.remote.uri));
  return RemoteRoot::Open(std::move(blob), options.root);
}

absl::StatusOr<OpenedTiers> OpenTiers(const std::string& uri, const RemoteTierOptions& options,
                                      RootsNeed need) {
  OpenedTiers tiers;
  RootOptions root_options = options.root;
  const bool has_remote = !options.remote.uri.empty();
  if (has_remote) {
    auto remote = OpenRemote(options);
    if (!remote.ok() && !IsOutOfReach(remote.status())) return remote.status();
    tiers.remote_error = remote.status();
    if (remote.ok()) tiers.remote = *std::move(remote);
    // A fresh machine goes on with the job whose checkpoints lie there.
    if (tiers.remote != nullptr && tiers.remote->job().has_value())
      root_options.job = tiers.remote->job();
  }
  OUTLAST_ASSIGN_OR_RETURN(tiers.root, Root::Open(uri, root_options));
  if (tiers.remote != nullptr) {
    tiers.remote_error = ClaimBoth(*tiers.root, *tiers.remote);
    if (IsReadOnly(tiers.remote_error, *tiers.remote))
      tiers.read_only = std::exchange(tiers.remote_error, absl::OkStatus());
    if (!tiers.remote_error.ok()) {
      tiers.remote.reset();
      if (!IsOutOfReach(tiers.remote_error)) {
        tiers.root->Release().IgnoreError();
        return tiers.remote_error;
      }
    }
  }
  if (tiers.root->claim() == 0) OUTLAST_RETURN_IF_ERROR(tiers.root->TakeClaim());
  if (!tiers.remote_error.ok() && need == RootsNeed::kACheckpoint) {
    const absl::Status goes_on = CheckLocalGoesOn(*tiers.root, tiers.remote_error);
    if (!goes_on.ok()) {
      tiers.root->Release().IgnoreError();
      return goes_on;
    }
  }
  return tiers;
}

RemoteTier::RemoteTier(EventLoop& loop, Root& root, std::unique_ptr<RemoteRoot> remote,
                       RemoteTierOptions options, RemoteObserver observer)
    : loop_(loop),
      root_(root),
      options_(std::move(options)),
      observer_(std::move(observer)),
      limiter_(options_.remote.bytes_per_second),
      remote_(std::move(remote)),
      beats_(std::make_unique<SerialThread>("outlast-rbeat")),
      uploads_(
          std::make_unique<SerialThread>("outlast-upload", SerialThread::Priority::kBackground)) {
  uploads_->Post(LowerIoPriority);
}

RemoteTier::~RemoteTier() {
  *alive_ = false;
  give_up_at_ns_ = 1;
  limiter_.Lift();
  uploads_.reset();
  beats_.reset();
}

bool RemoteTier::is_cancelled() const {
  const int64_t at = give_up_at_ns_;
  return at != 0 && MonotonicNanos() >= at;
}

absl::StatusOr<std::shared_ptr<RemoteRoot>> RemoteTier::Remote() {
  {
    MutexLock lock(mutex_);
    if (remote_ != nullptr) return remote_;
  }
  OUTLAST_ASSIGN_OR_RETURN(std::shared_ptr<RemoteRoot> found, OpenRemote(options_));
  const absl::Status claimed = ClaimBoth(root_, *found);
  if (!claimed.ok() && !IsReadOnly(claimed, *found)) return claimed;
  MutexLock lock(mutex_);
  if (remote_ == nullptr) remote_ = std::move(found);
  return remote_;
}

// One that could only be read may have become writable.
absl::StatusOr<std::shared_ptr<RemoteRoot>> RemoteTier::Claimed() {
  OUTLAST_ASSIGN_OR_RETURN(auto remote, Remote());
  if (!remote->is_claimed()) OUTLAST_RETURN_IF_ERROR(ClaimBoth(root_, *remote));
  return remote;
}

void RemoteTier::KeepStanding(const TierView& view) {
  std::vector<std::string> standing;
  for (const size_t i : ResolveChain(view.listing.checkpoints).members) {
    const std::string& name = view.listing.checkpoints[i].name;
    if (std::ranges::find(view.remote, name) != view.remote.end()) standing.push_back(name);
  }
  MutexLock lock(mutex_);
  standing_ = std::move(standing);
}

std::vector<std::string> RemoteTier::InUse() const {
  MutexLock lock(mutex_);
  return in_use_;
}

std::vector<std::string> RemoteTier::Standing() const {
  MutexLock lock(mutex_);
  return standing_;
}

// --- Up

bool RemoteTier::IsDue(int64_t step) const {
  if (is_lost_) return false;
  const Every& every = options_.remote.every;
  if (!every.is_auto()) {
    // One that is under way counts for its period; if it fails, the next commit is due.
    const int64_t last = std::max(last_step_, uploading_ ? uploading_->step : 0);
    return step / every.steps() > last / every.steps();
  }
  if (last_began_ns_ == 0) return true;
  return absl::Nanoseconds(MonotonicNanos() - last_began_ns_) >= options_.auto_interval(last_time_);
}

void RemoteTier::OnCommitted(int64_t step, const std::string& checkpoint, uint64_t bytes) {
  newest_ = Job{step, checkpoint, bytes};
  if (IsDue(step)) Queue(*newest_);
}

void RemoteTier::OnRestored(int64_t step, const std::string& checkpoint) {
  const std::vector<std::string> standing = Standing();
  if (checkpoint.empty()) {  // from memory
    last_step_ = std::min(last_step_, step);
    return;
  }
  last_step_ = 0;
  for (const std::string& name : standing) {
    const auto parts = ParseCheckpointName(name);
    if (parts.has_value() && parts->step <= step) last_step_ = std::max(last_step_, parts->step);
  }
  if (std::ranges::find(standing, checkpoint) != standing.end()) {
    uploaded_ = checkpoint;
  } else {
    OnCommitted(step, checkpoint, 0);  // an upload that was cut off, or never begun
  }
}

void RemoteTier::Queue(Job job) {
  if (!uploading_) return Start(std::move(job));
  if (uploading_->checkpoint == job.checkpoint) return;
  MutexLock lock(mutex_);
  in_use_ = {uploading_->checkpoint, job.checkpoint};
  queued_ = std::move(job);
}

void RemoteTier::Start(Job job) {
  last_began_ns_ = MonotonicNanos();
  {
    MutexLock lock(mutex_);
    in_use_ = {job.checkpoint};
  }
  uploading_ = job;
  uploads_->Post([this, alive = alive_, job = std::move(job)] {
    auto result = Upload(job);
    {
      MutexLock lock(mutex_);
      ended_ = std::move(result);
      changed_.NotifyAll();
    }
    loop_.Post([this, alive] {
      if (*alive) Drain();
    });
  });
}

absl::StatusOr<UploadResult> RemoteTier::Upload(const Job& job) {
  OUTLAST_ASSIGN_OR_RETURN(const auto remote, Claimed());
  OUTLAST_ASSIGN_OR_RETURN(
      UploadResult result,
      remote->Upload(root_.PathOf(job.checkpoint), &limiter_, [this] { return is_cancelled(); }));
  const auto deleted = remote->Retain(
      {.keep_last = options_.remote.keep_last, .keep_every = options_.remote.keep_every});
  if (!deleted.ok()) result.retention_error = MessageOf(deleted.status());
  MutexLock lock(mutex_);
  standing_.insert(standing_.begin(), job.checkpoint);
  if (deleted.ok()) {
    std::erase_if(standing_, [&](const std::string& name) {
      return std::ranges::find(*deleted, name) != deleted->end();
    });
  }
  return result;
}

void RemoteTier::Drain() {
  std::optional<absl::StatusOr<UploadResult>> ended;
  {
    MutexLock lock(mutex_);
    ended.swap(ended_);
  }
  if (!ended.has_value() || !uploading_) return;
  const Job job = *std::exchange(uploading_, std::nullopt);
  {
    MutexLock lock(mutex_);
    in_use_.clear();
  }
  if (ended->ok()) {
    last_step_ = job.step;
    uploaded_ = job.checkpoint;
    last_time_ = (*ended)->time;
    observer_.on_uploaded(job.step, **ended);
  } else {
    is_lost_ = absl::IsAborted(ended->status());
    observer_.on_failed(job.step,
                        Annotate(ended->status(), fmt::format("upload of step {}", job.step)));
  }
  if (queued_) {
    Job next = *std::exchange(queued_, std::nullopt);
    if (!is_lost_ && !is_cancelled()) Start(std::move(next));
  }
}

void RemoteTier::Finish(std::optional<absl::Duration> limit) {
  if (!is_behind()) return;
  limiter_.Lift();
  const uint64_t bytes = newest_ ? newest_->bytes : 0;
  const absl::Duration usual = absl::Seconds(60) + absl::Seconds(static_cast<double>(bytes) / 50e6);
  give_up_at_ns_ =
      MonotonicNanos() + absl::ToInt64Nanoseconds(std::min(limit.value_or(usual), usual));
  if (queued_) queued_ = newest_;
  bool tried_newest = false;
  while (true) {
    while (uploading_) {
      tried_newest = newest_ && uploading_->checkpoint == newest_->checkpoint;
      {
        MutexLock lock(mutex_);
        while (!ended_.has_value()) changed_.Wait(mutex_);
      }
      Drain();
    }
    const bool is_there = !newest_ || newest_->checkpoint == uploaded_;
    if (tried_newest || is_lost_ || is_there || is_cancelled()) return;
    Start(*newest_);
  }
}

// --- Claims

void RemoteTier::Beat() {
  beats_->Post([this] {
    std::shared_ptr<RemoteRoot> remote;
    {
      MutexLock lock(mutex_);
      remote = remote_;
    }
    // One that fails to take a beat fails to take an upload too, and says so there.
    if (remote != nullptr) remote->Beat().IgnoreError();
  });
}

void RemoteTier::Release() {
  std::shared_ptr<RemoteRoot> remote;
  {
    MutexLock lock(mutex_);
    remote = remote_;
  }
  if (remote != nullptr) remote->Release().IgnoreError();
}

// --- Down

absl::StatusOr<TierView> RemoteTier::View(std::string* note) {
  OUTLAST_ASSIGN_OR_RETURN(const Listing local, root_.List());
  const auto list = [&]() -> absl::StatusOr<Listing> {
    OUTLAST_ASSIGN_OR_RETURN(const auto remote, Remote());
    return remote->List({.timeout = kListTimeout, .is_cancelled = {}});
  };
  const auto listed = list();
  if (!listed.ok()) {
    *note = fmt::format("the remote root is left out: {}", MessageOf(listed.status()));
    return MergeTiers(local, {});
  }
  TierView view = MergeTiers(local, *listed);
  KeepStanding(view);
  return view;
}

}  // namespace outlast
