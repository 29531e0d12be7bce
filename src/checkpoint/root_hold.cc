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

RootHold::RootHold(std::unique_ptr<Root> root)
    : root_(std::move(root)), beat_([this] { BeatUntilStopped(); }) {
  pthread_setname_np(beat_.native_handle(), "outlast-beat");
}

RootHold::~RootHold() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    stop_.NotifyAll();
  }
  beat_.join();
  root_->Release().IgnoreError();
}

void RootHold::BeatUntilStopped() {
  MutexLock lock(mutex_);
  while (!stopping_) {
    stop_.WaitFor(mutex_, kBeatInterval);
    if (stopping_) return;
    // A beat that fails costs the claim at worst, and every commit asks for that.
    mutex_.Unlock();
    root_->Beat().IgnoreError();
    mutex_.Lock();
  }
}

}  // namespace outlast
