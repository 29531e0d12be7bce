#include "run/keeper_thread.h"

#include <pthread.h>

#include <future>
#include <utility>

#include "outlast/base/status.h"

namespace outlast {

absl::StatusOr<std::unique_ptr<KeeperThread>> KeeperThread::Make(WorkerHost& host,
                                                                 KeeperOptions options) {
  auto machine = std::make_unique<OneNodeMachine>(options.job, options.run_id);
  return Make(host, std::move(options), std::move(machine));
}

absl::StatusOr<std::unique_ptr<KeeperThread>> KeeperThread::Make(
    WorkerHost& host, KeeperOptions options, std::unique_ptr<JobMachine> machine) {
  std::unique_ptr<KeeperThread> self(new KeeperThread);
  OUTLAST_ASSIGN_OR_RETURN(self->loop_, EventLoop::Make());
  self->keeper_ =
      std::make_unique<Keeper>(*self->loop_, host, std::move(options), std::move(machine));
  self->thread_ = std::thread([loop = self->loop_.get()] {
    pthread_setname_np(pthread_self(), "outlast-keeper");
    loop->Run();
  });
  return self;
}

absl::Status KeeperThread::Start() {
  absl::Status started;
  RunOnLoop([&] { started = keeper_->Start(); });
  return started;
}

void KeeperThread::Stop() {
  if (loop_ != nullptr) loop_->Stop();
  if (thread_.joinable()) thread_.join();
}

void KeeperThread::RunOnLoop(const std::function<void()>& work) {
  std::promise<void> done;
  loop_->Post([&] {
    work();
    done.set_value();
  });
  done.get_future().wait();
}

}  // namespace outlast
