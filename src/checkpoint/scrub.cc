#include "checkpoint/scrub.h"

#include <linux/ioprio.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "checkpoint/reader.h"
#include "outlast/base/clock.h"

namespace outlast {
namespace {

constexpr absl::Duration kIdle = absl::Minutes(1);  // between two looks that find nothing to do

// Wishes. Not of the idle class: that may get no turn at all beside a busy trainer, and the end of
// a job waits for the read that is under way.
void BeUnnoticed() {
  syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, IOPRIO_PRIO_VALUE(IOPRIO_CLASS_BE, 7));
  const sched_param none{};
  pthread_setschedparam(pthread_self(), SCHED_BATCH, &none);
}

// It is whole as far as anybody knows, and somebody might restore it.
bool IsUsable(const CheckpointInfo& info) {
  return info.state == CheckpointState::kCommitted && info.quarantined.empty();
}

}  // namespace

ScrubChoice ChooseScrub(std::span<const CheckpointInfo> checkpoints, const Scrubbed& scrubbed,
                        absl::Duration now, absl::Duration period) {
  const Chain chain = ResolveChain(checkpoints);
  std::vector<size_t> order = chain.members;
  for (const size_t i : chain.abandoned)
    if (checkpoints[i].pinned) order.push_back(i);
  const CheckpointInfo* stalest = nullptr;
  absl::Duration read_at = absl::InfiniteDuration();
  for (const size_t i : order) {
    const CheckpointInfo& info = checkpoints[i];
    if (!IsUsable(info)) continue;
    const auto found = scrubbed.find(info.name);
    if (found == scrubbed.end()) return {info.name, "it was never read"};
    if (found->second >= read_at) continue;
    read_at = found->second;
    stalest = &info;
  }
  if (stalest == nullptr || now - read_at < period) return {};
  return {stalest->name, fmt::format("it was read {} ago", absl::FormatDuration(now - read_at))};
}

Scrubber::Scrubber(const Root& root, ScrubOptions options)
    : root_(root),
      options_(std::move(options)),
      limiter_(std::max<uint64_t>(1, options_.bytes_per_second)),
      thread_([this] { Run(); }) {
  pthread_setname_np(thread_.native_handle(), "outlast-scrub");
}

Scrubber::~Scrubber() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  limiter_.Lift();
  thread_.join();
}

void Scrubber::Pause() {
  MutexLock lock(mutex_);
  paused_ = true;
}

void Scrubber::Resume() {
  MutexLock lock(mutex_);
  paused_ = false;
  asked_ = true;
  changed_.NotifyAll();
}

std::vector<std::string> Scrubber::Verified() const {
  MutexLock lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, when] : scrubbed_) names.push_back(name);
  return names;
}

bool Scrubber::is_stopping() const {
  MutexLock lock(mutex_);
  return stopping_;
}

// Waits while it is paused; false: it ends.
bool Scrubber::AwaitTurn() {
  MutexLock lock(mutex_);
  while (paused_ && !stopping_) changed_.Wait(mutex_);
  asked_ = false;
  return !stopping_;
}

void Scrubber::Run() {
  BeUnnoticed();
  while (AwaitTurn()) {
    const ScrubChoice choice = Choose();
    if (!choice.checkpoint.empty()) {
      Look(choice.checkpoint);
      continue;
    }
    MutexLock lock(mutex_);
    if (!stopping_ && !asked_) changed_.WaitFor(mutex_, kIdle);
  }
}

ScrubChoice Scrubber::Choose() {
  // A root that cannot be listed now is listed later; a save and a restore say so themselves.
  const auto listing = root_.List(Root::Look::kFiles);
  if (!listing.ok()) return {};
  std::vector<CheckpointInfo> unknown;
  for (const CheckpointInfo& info : listing->checkpoints) {
    CheckpointInfo copy = info;
    if (damaged_.contains(info.name)) copy.quarantined = "found damaged";
    unknown.push_back(std::move(copy));
  }
  MutexLock lock(mutex_);
  // What is gone is forgotten.
  std::erase_if(scrubbed_, [&](const auto& one) {
    return std::ranges::find(unknown, one.first, &CheckpointInfo::name) == unknown.end();
  });
  return ChooseScrub(unknown, scrubbed_, Clock::Real().Uptime(), options_.period);
}

absl::Status Scrubber::Check(const std::string& folder) {
  OUTLAST_ASSIGN_OR_RETURN(const auto reader, CheckpointReader::Open(folder));
  for (const Receipt& receipt : reader->receipts()) {
    if (!receipt.file.has_value()) continue;
    OUTLAST_RETURN_IF_ERROR(
        StreamShard(folder, *receipt.file, [&](std::span<const std::byte> block) -> absl::Status {
          limiter_.Await(block.size());
          return AwaitTurn() ? absl::OkStatus() : absl::CancelledError("the scrubber ends");
        }));
  }
  return absl::OkStatus();
}

void Scrubber::Look(const std::string& checkpoint) {
  const std::string folder = root_.PathOf(checkpoint);
  absl::Status status = Check(folder);
  // Once more: it may have been deleted or replaced while it was read, or the disk may have
  // stumbled. What is wrong twice, and still stands, is wrong.
  if (!status.ok() && !is_stopping()) status = Check(folder);
  if (is_stopping()) return;
  if (status.ok()) {
    MutexLock lock(mutex_);
    scrubbed_[checkpoint] = Clock::Real().Uptime();
    return;
  }
  const auto deleted = Exists(fmt::format("{}/{}", folder, kDeletedFile));
  const auto stands = Exists(fmt::format("{}/{}", folder, kManifestFile));
  if (deleted.ok() && stands.ok() && (*deleted || !*stands)) return;
  {
    MutexLock lock(mutex_);
    scrubbed_.erase(checkpoint);
  }
  damaged_.insert(checkpoint);
  options_.on_damaged(checkpoint, std::string(MessageOf(status)));
}

}  // namespace outlast
