#include "testing/local_cluster.h"

#include <pthread.h>

#include <future>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/event_loop.h"
#include "outlast/base/fd.h"
#include "outlast/base/mutex.h"
#include "outlast/testing/time_factor.h"
#include "run/keeper.h"
#include "run/node_machine.h"
#include "run/tcp_peers.h"
#include "testing/loop_coordinator.h"
#include "testing/rank_threads.h"

namespace outlast::testing {
namespace {

// One node's agent, and the processes there.
class Node final : public WorkerHost {
 public:
  Node(EventLoop& loop, LoopCoordinator& coordinator, const LocalClusterOptions& options,
       int number, std::function<void()> on_over)
      : loop_(loop),
        coordinator_(coordinator),
        options_(options),
        number_(number),
        on_over_(std::move(on_over)),
        threads_(loop, [this](int slot, uint64_t incarnation, const ProcessEnd& end) {
          if (keeper_ != nullptr) keeper_->OnWorkerEnded(slot, incarnation, end);
        }) {}

  absl::Status Start(const LocalCluster::Body& body);
  // The agent ends at once.
  void End();
  void KillRank(int slot, const ProcessEnd& end) { threads_.Kill(slot, end); }
  void KillAll() {
    closing_ = true;
    threads_.KillAll();
  }
  void Join() { threads_.Join(); }
  Keeper* keeper() { return keeper_.get(); }
  LocalNodeResult& result() { return result_; }

  void Spawn(SpawnRequest request) override;
  void Kill(const KillWorker& kill) override {
    const int signal = kill.how == KillHow::kTerm ? SIGTERM : SIGKILL;
    threads_.Kill(kill.slot, kill.incarnation, {.signal = signal, .by_us = true});
  }
  void Forward(const ForwardSignal& forward) override {
    threads_.Kill(forward.slot, {.signal = forward.signal, .by_us = true});
  }
  void CaptureStacks(const outlast::CaptureStacks&, std::function<void()> done) override { done(); }
  void OnFault(const RecordFault& record) override { result_.faults.push_back(record.fault); }
  void OnCommit(const CommitGeneration& commit) override { result_.generation = commit.generation; }
  void OnEnter(int, uint64_t) override {}
  void OnFinish(const FinishJob& finish) override {
    result_.exit_code = finish.exit_code;
    result_.reason = finish.reason;
    on_over_();
  }

 private:
  std::string host() const { return "127.0.0." + std::to_string(number_ + 1); }
  void Say(const std::string& line) { result_.lines.push_back(line); }

  EventLoop& loop_;
  LoopCoordinator& coordinator_;
  const LocalClusterOptions& options_;
  const int number_;
  const std::function<void()> on_over_;
  RankThreads::Body body_;
  RankThreads threads_;
  bool closing_ = false;
  LocalNodeResult result_;
  std::unique_ptr<CoordinatorLink> link_;
  std::unique_ptr<Peers> peers_;
  std::unique_ptr<Keeper> keeper_;
};

absl::Status Node::Start(const LocalCluster::Body& body) {
  body_ = [this, &body](outlast::Run& run) { return body(run, number_); };
  const std::string name = "n" + std::to_string(number_);
  const auto say = [this](const std::string& line) { Say(line); };
  OUTLAST_ASSIGN_OR_RETURN(peers_, MakeTcpPeers(loop_, {.job = options_.elastic.job,
                                                        .node = name,
                                                        .token = "secret",
                                                        .bind = host() + ":0",
                                                        .say = say}));
  link_ = coordinator_.MakeLink();
  NodeMachineOptions machine{
      .node = {.elastic = options_.elastic,
               .node = name,
               .incarnation = static_cast<uint64_t>(number_) + 100,
               .capacity = options_.slots,
               .slot_hint = number_},
      .bootstrap = [this](uint64_t generation) -> absl::StatusOr<std::string> {
        return host() + ":" + std::to_string(generation);
      },
      .say = say};
  keeper_ = std::make_unique<Keeper>(
      loop_, *this, KeeperOptions{.job = options_.elastic.budget, .run_dir = options_.run_dir},
      std::make_unique<NodeMachine>(std::move(machine), *link_, *peers_));
  if (options_.prepare) options_.prepare(*keeper_, number_);
  return keeper_->Start();
}

void Node::End() {
  if (keeper_ == nullptr) return;
  result_.refused = keeper_->refused();
  if (options_.finish) options_.finish(*keeper_, number_);
  keeper_.reset();
  link_.reset();
  peers_.reset();
}

void Node::Spawn(SpawnRequest request) {
  if (closing_) {
    loop_.Post([this, slot = request.worker.slot, incarnation = request.worker.incarnation] {
      if (keeper_ != nullptr) keeper_->OnWorkerEnded(slot, incarnation, {.code = 1});
    });
    return;
  }
  ++result_.spawns;
  WorkerEnvironment environment;
  environment.rank = request.rank;
  environment.world = request.world;
  environment.local_rank = request.worker.slot;
  environment.incarnation = request.worker.incarnation;
  environment.run_dir = options_.run_dir;
  environment.address = host();
  auto black_box = Duplicate(request.black_box_fd);
  environment.black_box_fd = black_box.ok() ? black_box->Release() : -1;
  environment.socket_fd = request.socket.Release();
  threads_.Spawn(request.worker.slot, environment, body_);
}

LocalClusterOptions Completed(LocalClusterOptions options) {
  ElasticOptions& elastic = options.elastic;
  if (elastic.job.empty()) elastic.job = "job";
  if (elastic.membership.max_world == 0)
    elastic.membership.max_world = options.nodes * options.slots;
  if (elastic.membership.min_world == 0)
    elastic.membership.min_world = elastic.membership.max_world;
  return options;
}

}  // namespace

class LocalCluster::Impl {
 public:
  explicit Impl(LocalClusterOptions options)
      : options_(Completed(std::move(options))),
        loop_(std::move(EventLoop::Make()).value()),
        coordinator_(*loop_, options_.elastic) {}
  ~Impl() { StopLoop(); }

  std::vector<LocalNodeResult> Run(const Body& body);
  void Post(std::function<void()> work) { loop_->Post(std::move(work)); }
  void OnLoop(const std::function<void()>& work);
  void KillNode(int node);
  LoopCoordinator& coordinator() { return coordinator_; }
  Node& node(int number) { return *nodes_[static_cast<size_t>(number)]; }

 private:
  void StartAll(const Body& body);
  void EndAll();
  void OneIsOver();
  void StopLoop();

  const LocalClusterOptions options_;
  std::unique_ptr<EventLoop> loop_;
  std::thread thread_;
  // The loop's thread.
  LoopCoordinator coordinator_;
  std::vector<std::unique_ptr<Node>> nodes_;
  int over_ = 0;
  std::promise<void> all_over_;
};

std::vector<LocalNodeResult> LocalCluster::Impl::Run(const Body& body) {
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "cluster");
    loop_->Run();
  });
  OnLoop([&] { StartAll(body); });
  const auto timeout = absl::ToChronoMilliseconds(options_.timeout * TimeFactor());
  const bool in_time = all_over_.get_future().wait_for(timeout) == std::future_status::ready;
  if (!in_time) {
    OnLoop([this] {
      for (const auto& node : nodes_) node->KillAll();
    });
  }
  for (const auto& node : nodes_) node->Join();
  OnLoop([this] { EndAll(); });
  StopLoop();
  std::vector<LocalNodeResult> results;
  for (const auto& node : nodes_) {
    results.push_back(std::move(node->result()));
    if (!in_time) results.back().reason += " (the cluster was not done in time)";
  }
  return results;
}

void LocalCluster::Impl::StartAll(const Body& body) {
  coordinator_.Start();
  for (int i = 0; i < options_.nodes; ++i) {
    nodes_.push_back(
        std::make_unique<Node>(*loop_, coordinator_, options_, i, [this] { OneIsOver(); }));
  }
  for (const auto& node : nodes_) {
    const absl::Status started = node->Start(body);
    if (started.ok()) continue;
    node->result().reason = MessageOf(started);
    OneIsOver();
  }
}

void LocalCluster::Impl::EndAll() {
  for (const auto& node : nodes_) node->End();
  coordinator_.Crash();
}

void LocalCluster::Impl::OneIsOver() {
  if (++over_ == options_.nodes) all_over_.set_value();
}

void LocalCluster::Impl::KillNode(int number) {
  Node& dies = node(number);
  if (dies.keeper() == nullptr) return;
  dies.End();
  dies.KillAll();
  if (dies.result().exit_code == -1) OneIsOver();
}

void LocalCluster::Impl::OnLoop(const std::function<void()>& work) {
  std::promise<void> done;
  loop_->Post([&] {
    work();
    done.set_value();
  });
  done.get_future().wait();
}

void LocalCluster::Impl::StopLoop() {
  loop_->Stop();
  if (thread_.joinable()) thread_.join();
}

// --- The face ---

LocalCluster::LocalCluster(LocalClusterOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}
LocalCluster::~LocalCluster() = default;
std::vector<LocalNodeResult> LocalCluster::Run(const Body& body) { return impl_->Run(body); }
void LocalCluster::KillRank(int node, int slot, int signal) {
  impl_->Post([impl = impl_.get(), node, slot, signal] {
    impl->node(node).KillRank(slot, {.signal = signal});
  });
}
void LocalCluster::KillNode(int node) {
  impl_->Post([impl = impl_.get(), node] { impl->KillNode(node); });
}
void LocalCluster::CrashCoordinator() {
  impl_->Post([impl = impl_.get()] { impl->coordinator().Crash(); });
}
void LocalCluster::RestartCoordinator() {
  impl_->Post([impl = impl_.get()] { impl->coordinator().Start(); });
}
void LocalCluster::AskStop(int node, int signal) {
  impl_->Post([impl = impl_.get(), node, signal] {
    Keeper* const keeper = impl->node(node).keeper();
    if (keeper != nullptr) keeper->Dispatch(StopAsked{signal});
  });
}
void LocalCluster::OnKeeper(int node, const std::function<void(Keeper*)>& work) {
  impl_->OnLoop([&] { work(impl_->node(node).keeper()); });
}
void LocalCluster::OnCoordinator(const std::function<void(const Coordinator*)>& work) {
  impl_->OnLoop([&] { work(impl_->coordinator().machine()); });
}

}  // namespace outlast::testing
