// A coordinator on an event loop, and the agents' links to it on the same loop: its messages keep
// their order and come later, never within a call. Its journal is in memory, and outlives a crash.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "base/event_loop.h"
#include "outlast/elastic/coordinator.h"
#include "run/coordinator_link.h"

namespace outlast::testing {

// Belongs to its loop's thread.
class LoopCoordinator {
 public:
  std::function<void(const FinishJob&)> on_finish = [](const FinishJob&) {};

  LoopCoordinator(EventLoop& loop, ElasticOptions options)
      : loop_(loop), options_(std::move(options)) {}
  ~LoopCoordinator() { Crash(); }

  // A new one, which goes on where the journal ends.
  void Start();
  // All streams break; what was under way is lost.
  void Crash();
  // Null: it is down.
  const Coordinator* machine() const { return machine_.has_value() ? &*machine_ : nullptr; }
  void AskStop(int signal);
  // This must outlive it.
  std::unique_ptr<CoordinatorLink> MakeLink();

 private:
  class Link;

  // `work`, later, if nobody has crashed meanwhile.
  void Later(std::function<void()> work);
  uint64_t Accept(Link& link);
  void Lose(uint64_t stream);
  void Step(const CoordinatorEvent& event);
  void Do(const CoordinatorAction& action);

  EventLoop& loop_;
  const ElasticOptions options_;
  const Id128 run_id_ = Id128::Random();
  std::string journal_;
  std::optional<Coordinator> machine_;
  std::shared_ptr<int> life_;  // of the present machine
  std::map<uint64_t, Link*> links_;
  uint64_t last_stream_ = 0;
  EventLoop::TimerId timer_ = 0;
};

}  // namespace outlast::testing
