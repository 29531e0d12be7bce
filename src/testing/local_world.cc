#include "outlast/testing/local_world.h"

#include <pthread.h>

#include <future>
#include <list>
#include <thread>
#include <utility>

#include "base/error.h"
#include "outlast/base/fd.h"
#include "outlast/base/mutex.h"
#include "outlast/testing/time_factor.h"
#include "run/keeper_thread.h"
#include "run/run_state.h"

namespace outlast::testing {
namespace {

constexpr absl::Duration kUnwindTime = absl::Milliseconds(100);

// A thread that plays a process.
struct Rank {
  int slot = 0;
  uint64_t incarnation = 0;
  std::thread thread;
  Mutex mutex;
  std::shared_ptr<RunState> state ABSL_GUARDED_BY(mutex);  // while its Run lives
  bool killed ABSL_GUARDED_BY(mutex) = false;
  bool reported ABSL_GUARDED_BY(mutex) = false;
  ProcessEnd end ABSL_GUARDED_BY(mutex);
};

}  // namespace

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
  void Main(Rank& rank, WorkerEnvironment environment);
  absl::Status RunBody(Rank& rank, const WorkerEnvironment& environment);
  void End(Rank& rank, const ProcessEnd& end);
  void Report(Rank& rank);
  Rank* Present(int slot);
  void KillAll();
  absl::Status Start(KeeperOptions options);
  std::vector<Rank*> AllRanks();

  LocalWorldOptions options_;
  const Body* body_ = nullptr;
  std::unique_ptr<KeeperThread> thread_;
  Mutex mutex_;
  std::list<Rank> ranks_ ABSL_GUARDED_BY(mutex_);  // all that ever were, oldest first; grows only
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
  if (!in_time) thread_->RunOnLoop([this] { KillAll(); });
  for (Rank* rank : AllRanks()) rank->thread.join();
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
  if (options_.prepare) thread_->RunOnLoop([this] { options_.prepare(thread_->keeper()); });
  return thread_->Start();
}

std::vector<Rank*> LocalWorld::Impl::AllRanks() {
  MutexLock lock(mutex_);
  std::vector<Rank*> all;
  for (Rank& rank : ranks_) all.push_back(&rank);
  return all;
}

Rank* LocalWorld::Impl::Present(int slot) {
  MutexLock lock(mutex_);
  for (auto rank = ranks_.rbegin(); rank != ranks_.rend(); ++rank) {
    if (rank->slot == slot) return &*rank;
  }
  return nullptr;
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
  MutexLock lock(mutex_);
  Rank& rank = ranks_.emplace_back();
  rank.slot = request.worker.slot;
  rank.incarnation = request.worker.incarnation;
  rank.thread = std::thread([this, &rank, environment] { Main(rank, environment); });
}

void LocalWorld::Impl::Main(Rank& rank, WorkerEnvironment environment) {
  pthread_setname_np(pthread_self(), fmt::format("rank{}", rank.slot).c_str());
  const absl::Status left = RunBody(rank, environment);
  {
    MutexLock lock(rank.mutex);
    if (!rank.killed) rank.end = {.code = left.ok() ? 0 : 1};
  }
  Report(rank);
}

absl::Status LocalWorld::Impl::RunBody(Rank& rank, const WorkerEnvironment& environment) {
  OUTLAST_ASSIGN_OR_RETURN(const auto run, outlast::Run::Join({.environment = environment}));
  {
    MutexLock lock(rank.mutex);
    if (rank.killed) return absl::CancelledError("killed");
    rank.state = RunAccess::State(*run);
  }
  const absl::Status left = (*body_)(*run);
  std::shared_ptr<RunState> state;  // let go of outside the lock
  MutexLock lock(rank.mutex);
  state.swap(rank.state);
  return left;
}

void LocalWorld::Impl::End(Rank& rank, const ProcessEnd& end) {
  std::shared_ptr<RunState> state;
  {
    MutexLock lock(rank.mutex);
    if (rank.killed || rank.reported) return;
    rank.killed = true;
    rank.end = end;
    state = rank.state;
  }
  if (state != nullptr) state->Kill();
  thread_->loop().RunAfter(kUnwindTime * TimeFactor(), [this, &rank] { Report(rank); });
}

void LocalWorld::Impl::Report(Rank& rank) {
  MutexLock lock(rank.mutex);
  if (std::exchange(rank.reported, true)) return;
  thread_->loop().Post([this, slot = rank.slot, incarnation = rank.incarnation, end = rank.end] {
    thread_->keeper().OnWorkerEnded(slot, incarnation, end);
  });
}

void LocalWorld::Impl::Kill(const KillWorker& kill) {
  Rank* rank = Present(kill.slot);
  if (rank == nullptr || rank->incarnation != kill.incarnation) return;
  End(*rank, {.signal = kill.how == KillHow::kTerm ? SIGTERM : SIGKILL, .by_us = true});
}

void LocalWorld::Impl::Forward(const ForwardSignal& forward) {
  if (Rank* rank = Present(forward.slot); rank != nullptr)
    End(*rank, {.signal = forward.signal, .by_us = true});
}

void LocalWorld::Impl::KillRank(int rank, int signal) {
  thread_->loop().Post([this, rank, signal] {
    if (Rank* present = Present(rank); present != nullptr) End(*present, {.signal = signal});
  });
}

void LocalWorld::Impl::KillAll() {
  closing_ = true;
  for (Rank* rank : AllRanks()) End(*rank, {.signal = SIGKILL, .by_us = true});
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
