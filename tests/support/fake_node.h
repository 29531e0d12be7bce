// An agent over the real transport, its workers made up: they join, stage and enter at once.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/event_loop.h"
#include "control/agent_link.h"
#include "outlast/base/clock.h"
#include "outlast/elastic/node_agent.h"

namespace outlast::testing {

// Belongs to its loop's thread.
class FakeNode {
 public:
  std::function<void(uint64_t generation)> on_open = [](uint64_t) {};
  std::function<void(const FinishJob&)> on_over = [](const FinishJob&) {};
  std::function<void(const std::string& why)> on_down = [](const std::string&) {};

  FakeNode(EventLoop& loop, std::unique_ptr<CoordinatorLink> link, NodeOptions options)
      : loop_(loop), link_(std::move(link)), machine_(std::move(options)) {}

  void Start() {
    link_->Listen({.on_up = [this] { Give(StreamUp{}); },
                   .on_down =
                       [this](const std::string& why) {
                         on_down(why);
                         Give(StreamDown{});
                       },
                   .on_said =
                       [this](const control::CoordinatorMessage& message) {
                         Give(CoordinatorSaid{message});
                       }});
    Give(StartEvent{});
  }
  void Give(const NodeEvent& event) {
    const JobView view{.now = Clock::Real().Uptime(), .newest_step = newest_step_};
    for (const NodeAction& action : machine_.Step(event, view)) Do(action);
  }
  const NodeAgent& machine() const { return machine_; }

 private:
  void Later(NodeEvent event) {
    loop_.Post([this, alive = std::weak_ptr<int>(alive_), event = std::move(event)] {
      if (alive.lock() != nullptr) Give(event);
    });
  }
  void Do(const NodeAction& action) {
    if (std::holds_alternative<OpenStream>(action)) link_->Open();
    if (const auto* drop = std::get_if<DropStream>(&action)) link_->Drop(drop->reason);
    if (const auto* say = std::get_if<SayHello>(&action)) link_->Hello(say->hello);
    if (const auto* send = std::get_if<SendToCoordinator>(&action)) {
      control::AgentMessage message = send->message;
      if (auto* prepared = std::get_if<control::Prepared>(&message))
        prepared->bootstrap = machine_.options().node + ":1";
      link_->Send(message);
    }
    if (const auto* spawn = std::get_if<SpawnWorker>(&action)) {
      Later(WorkerJoined{spawn->slot, spawn->incarnation});
      Later(WorkerStaged{spawn->slot, spawn->incarnation, 0});
      if (processes_.size() <= static_cast<size_t>(spawn->slot))
        processes_.resize(static_cast<size_t>(spawn->slot) + 1);
      processes_[static_cast<size_t>(spawn->slot)] = spawn->incarnation;
    }
    if (const auto* abort = std::get_if<AbortGeneration>(&action)) {
      for (size_t slot = 0; slot < processes_.size(); ++slot) {
        if (processes_[slot] != 0)
          Later(WorkerStaged{static_cast<int>(slot), processes_[slot], abort->generation});
      }
    }
    if (const auto* kill = std::get_if<KillWorker>(&action)) {
      Later(WorkerEnded{kill->slot, kill->incarnation, {.signal = 15, .by_us = true}});
      processes_[static_cast<size_t>(kill->slot)] = 0;
    }
    if (const auto* open = std::get_if<OpenGeneration>(&action)) {
      on_open(open->commit.generation);
      if (!open->commit.resume.empty())
        Later(RanksRestored{open->commit.generation, open->commit.candidate, true, ""});
    }
    if (std::holds_alternative<PersistCommon>(action)) Later(StopPersisted{0, true});
    if (const auto* arm = std::get_if<ArmTimer>(&action)) {
      loop_.Cancel(timer_);
      timer_ = loop_.RunAt(arm->at, [this, alive = std::weak_ptr<int>(alive_)] {
        if (alive.lock() != nullptr) Give(TimerFired{1});
      });
    }
    if (std::holds_alternative<DisarmTimer>(action)) loop_.Cancel(timer_);
    if (const auto* finish = std::get_if<FinishJob>(&action)) {
      loop_.Cancel(timer_);
      on_over(*finish);
    }
  }

  EventLoop& loop_;
  std::unique_ptr<CoordinatorLink> link_;
  NodeAgent machine_;
  int64_t newest_step_ = 0;
  std::vector<uint64_t> processes_;
  EventLoop::TimerId timer_ = 0;
  const std::shared_ptr<int> alive_ = std::make_shared<int>();
};

}  // namespace outlast::testing
