#include "checkpoint/root_hold.h"

#include <pthread.h>

#include <utility>

#include "outlast/base/status.h"

namespace outlast {

absl::StatusOr<std::unique_ptr<RootHold>> RootHold::Take(std::string_view uri,
                                                         RootOptions options) {
  options.access = Access::kWrite;
  options.when_held = "end that run first";
  OUTLAST_ASSIGN_OR_RETURN(std::unique_ptr<Root> root, Root::Open(uri, std::move(options)));
  OUTLAST_RETURN_IF_ERROR(root->TakeClaim());
  std::unique_ptr<RootHold> hold(new RootHold(std::move(root)));
  OUTLAST_ASSIGN_OR_RETURN(hold->rolled_forward_,
                           hold->root_->RollForward({}, {"tool", hold->root_->claim(), 0}));
  return hold;
}

RootHold::RootHold(std::unique_ptr<Root> root) : root_(std::move(root)) {
  // A beat that fails costs the claim at worst, and every commit asks for that.
  beater_.emplace([held = root_.get()] { held->Beat().IgnoreError(); });
}

RootHold::~RootHold() {
  beater_.reset();
  root_->Release().IgnoreError();
}

Beater::Beater(std::function<void()> beat)
    : beat_(std::move(beat)), thread_([this] { BeatUntilStopped(); }) {
  pthread_setname_np(thread_.native_handle(), "outlast-beat");
}

Beater::~Beater() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    stop_.NotifyAll();
  }
  thread_.join();
}

void Beater::BeatUntilStopped() {
  MutexLock lock(mutex_);
  while (!stopping_) {
    stop_.WaitFor(mutex_, kBeatInterval);
    if (stopping_) return;
    mutex_.Unlock();
    beat_();
    mutex_.Lock();
  }
}

}  // namespace outlast
