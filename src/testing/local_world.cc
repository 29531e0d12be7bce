#include "outlast/testing/local_world.h"

#include <future>
#include <optional>
#include <utility>

#include "base/error.h"
#include "outlast/base/fd.h"
#include "outlast/testing/time_factor.h"
#include "run/keeper_thread.h"
#include "testing/rank_threads.h"

namespace outlast::testing {

class LocalWorld::Impl final : public WorkerHost {
 public:
  Impl(int ranks, LocalWorldOptions options) : options_(std::move(options)) {
    options_.job.world = ranks;
  }

  LocalWorldResult Run(const Body& body);
  void KillRank(int rank, int signal);
  KeeperThread& thread() { return *thread_; }

  // WorkerHost.
  void Spawn(SpawnRequest request) override;
  void Kill(const KillWorker& kill) override;
  void Forward(const ForwardSignal& forward) override;
  void CaptureStacks(const outlast::CaptureStacks&, std::function<void()> done) override { done(); }
  void OnFault(const RecordFault& record) override { result_.faults.push_back(record.fault); }
  void OnCommit(const CommitGeneration& commit) override { result_.generation = commit.generation; }
  void OnEnter(int, uint64_t) override {}
  void OnFinish(const FinishJob& finish) override;

 private:
  absl::Status Start(KeeperOptions options);

  LocalWorldOptions options_;
  const Body* body_ = nullptr;
  std::unique_ptr<KeeperThread> thread_;
  std::optional<RankThreads> ranks_;
  bool closing_ = false;     // the keeper's thread: nobody is started any more
  LocalWorldResult result_;  // the keeper's thread, until it is stopped
  std::promise<void> finished_;
};

LocalWorldResult LocalWorld::Impl::Run(const Body& body) {
  body_ = &body;
  KeeperOptions keeper_options;
  keeper_options.job = options_.job;
  keeper_options.run_id = Id128::Random();
  keeper_options.run_dir = options_.run_dir;
  if (const absl::Status started = Start(std::move(keeper_options)); !started.ok()) {
    result_.reason = MessageOf(started);
    return result_;
  }
  const auto timeout = absl::ToChronoMilliseconds(options_.timeout * TimeFactor());
  const bool in_time = finished_.get_future().wait_for(timeout) == std::future_status::ready;
  if (!in_time) {
    thread_->RunOnLoop([this] {
      closing_ = true;
      ranks_->KillAll();
    });
  }
  ranks_->Join();
  thread_->RunOnLoop([this] { result_.refused = thread_->keeper().refused(); });
  if (options_.finish) thread_->RunOnLoop([this] { options_.finish(thread_->keeper()); });
  thread_->Stop();
  if (!in_time) {
    result_.exit_code = -1;
    result_.reason = "the world was not done in time";
  }
  return result_;
}

absl::Status LocalWorld::Impl::Start(KeeperOptions options) {
  OUTLAST_ASSIGN_OR_RETURN(thread_, KeeperThread::Make(*this, std::move(options)));
  ranks_.emplace(thread_->loop(), [this](int slot, uint64_t incarnation, const ProcessEnd& end) {
    thread_->keeper().OnWorkerEnded(slot, incarnation, end);
  });
  if (options_.prepare) thread_->RunOnLoop([this] { options_.prepare(thread_->keeper()); });
  return thread_->Start();
}

void LocalWorld::Impl::Spawn(SpawnRequest request) {
  if (closing_) {
    thread_->loop().Post(
        [this, slot = request.worker.slot, incarnation = request.worker.incarnation] {
          thread_->keeper().OnWorkerEnded(slot, incarnation, {.code = 1});
        });
    return;
  }
  ++result_.spawns;
  WorkerEnvironment environment;
  environment.rank = environment.local_rank = request.worker.slot;
  environment.world = request.world;
  environment.incarnation = request.worker.incarnation;
  environment.run_dir = options_.run_dir;
  auto black_box = Duplicate(request.black_box_fd);
  environment.black_box_fd = black_box.ok() ? black_box->Release() : -1;
  environment.socket_fd = request.socket.Release();
  ranks_->Spawn(request.worker.slot, environment, *body_);
}

void LocalWorld::Impl::Kill(const KillWorker& kill) {
  const int signal = kill.how == KillHow::kTerm ? SIGTERM : SIGKILL;
  ranks_->Kill(kill.slot, kill.incarnation, {.signal = signal, .by_us = true});
}

void LocalWorld::Impl::Forward(const ForwardSignal& forward) {
  ranks_->Kill(forward.slot, {.signal = forward.signal, .by_us = true});
}

void LocalWorld::Impl::KillRank(int rank, int signal) {
  thread_->loop().Post([this, rank, signal] { ranks_->Kill(rank, {.signal = signal}); });
}

void LocalWorld::Impl::OnFinish(const FinishJob& finish) {
  result_.exit_code = finish.exit_code;
  result_.reason = finish.reason;
  finished_.set_value();
}

LocalWorld::LocalWorld(int ranks, LocalWorldOptions options)
    : impl_(std::make_unique<Impl>(ranks, std::move(options))) {}
LocalWorld::~LocalWorld() = default;
LocalWorldResult LocalWorld::Run(const Body& body) { return impl_->Run(body); }
void LocalWorld::KillRank(int rank, int signal) { impl_->KillRank(rank, signal); }
void LocalWorld::AskStop(int signal) {
  impl_->thread().loop().Post(
      [impl = impl_.get(), signal] { impl->thread().keeper().Dispatch(StopAsked{signal}); });
}
void LocalWorld::OnKeeper(const std::function<void(Keeper&)>& work) {
  impl_->thread().RunOnLoop([&] { work(impl_->thread().keeper()); });
}

}  // namespace outlast::testing
