#include "run/local_keeper.h"

#include <utility>

#include "base/error.h"

namespace outlast {

absl::StatusOr<std::unique_ptr<LocalKeeper>> LocalKeeper::Start() {
  auto self = std::make_unique<LocalKeeper>();
  if (auto signals = StopSignals::Install(); signals.ok())
    self->signals_.emplace(std::move(*signals));
  KeeperOptions options;
  options.job.world = 1;
  options.run_id = Id128::Random();
  OUTLAST_ASSIGN_OR_RETURN(self->thread_, KeeperThread::Make(*self, std::move(options)));
  absl::Status watched;
  self->thread_->RunOnLoop([&] {
    if (!self->signals_.has_value()) return;
    watched = self->keeper().loop().Watch(self->signals_->fd(),
                                          [host = self.get()] { host->OnSignals(); });
  });
  OUTLAST_RETURN_IF_ERROR(watched);
  OUTLAST_RETURN_IF_ERROR(self->thread_->Start());
  if (!self->socket_.is_open())
    return Error(absl::StatusCode::kInternal, "the keeper of this process did not make a socket");
  return self;
}

void LocalKeeper::Adopt(const std::function<std::unique_ptr<KeeperExtension>(Keeper&)>& make) {
  thread_->RunOnLoop([&] {
    extensions_.push_back(make(keeper()));
    keeper().Attach(extensions_.back().get());
  });
}

LocalKeeper::~LocalKeeper() {
  if (thread_ == nullptr) return;
  thread_->RunOnLoop([this] {
    for (const auto& extension : extensions_) keeper().Detach(extension.get());
    extensions_.clear();
  });
  thread_->Stop();  // before what its callbacks read goes, the pointer to it included
}

// The first spawn is this process, which runs already. There is no second.
void LocalKeeper::Spawn(SpawnRequest request) {
  if (spawned_) return EndWorker(request.worker.slot, request.worker.incarnation, {.code = 1});
  spawned_ = true;
  socket_ = std::move(request.socket);
  if (auto copy = Duplicate(request.black_box_fd); copy.ok()) black_box_ = std::move(*copy);
}

void LocalKeeper::EndWorker(int slot, uint64_t incarnation, const ProcessEnd& end) {
  if (thread_ != nullptr)
    thread_->loop().Post(
        [this, slot, incarnation, end] { keeper().OnWorkerEnded(slot, incarnation, end); });
}

// A stop that was not served in time ends the process as the signal would have without us. Else
// there is nothing to gain from killing a program that nobody starts again: it is cut off, and
// hears so at its next generation.
void LocalKeeper::Kill(const KillWorker& kill) {
  if (trainer_left_.load()) return;
  if (stop_signal_ != 0) {
    PrintToStderr("outlast: signal {}: {}; the process ends without a save of its own\n",
                  stop_signal_, kill.reason);
    StopSignals::EndProcessBy(stop_signal_);
  }
  PrintToStderr("outlast: {}; without `outlast run` the process is not replaced\n", kill.reason);
  EndWorker(kill.slot, kill.incarnation, {.signal = SIGKILL, .by_us = true});
}

void LocalKeeper::CaptureStacks(const outlast::CaptureStacks&, std::function<void()> done) {
  done();
}

void LocalKeeper::OnFault(const RecordFault& record) {
  PrintToStderr("outlast: {}\n", record.fault.detail);
}

void LocalKeeper::OnFinish(const FinishJob& finish) {
  if (finish.exit_code != 0 && stop_signal_ == 0) PrintToStderr("outlast: {}\n", finish.reason);
}

void LocalKeeper::OnSignals() {
  for (const int signal : signals_->Take()) {
    if (signal == SIGINT && stop_signal_ == SIGINT)
      StopSignals::EndProcessBy(SIGINT);  // a person in a hurry
    if (stop_signal_ == 0) stop_signal_ = signal;
    keeper().Dispatch(StopAsked{signal});
  }
}

}  // namespace outlast
