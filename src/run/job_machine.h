// What decides for the keeper: the Job of one node (OneNodeMachine), or a node's part in a job of
// several (NodeMachine, node_machine.h). Both speak the same events and actions of workers.
//
// A *slot* is a place for one process on this node, 0 .. slots()-1. On one node it is its rank too;
// in a job of several nodes the coordinator's map gives it a rank, another one perhaps in each
// generation, or none while the node is a spare.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "outlast/base/id.h"
#include "outlast/elastic/actions.h"
#include "outlast/elastic/events.h"
#include "outlast/elastic/job.h"
#include "run/peers.h"

namespace outlast {

// Belongs to the keeper's loop.
class JobMachine {
 public:
  // What happened to the machine itself, such as word of the coordinator: Step-like, and run by the
  // keeper as an event of its own, in order with all others.
  using Happening = std::function<std::vector<JobAction>(const JobView& view)>;
  using Tell = std::function<void(Happening happening)>;

  virtual ~JobMachine() = default;
  // Called once, before the first Step. `tell` may be called until the machine's destruction, on
  // the loop's thread.
  virtual void Listen(Tell tell) = 0;
  virtual std::vector<JobAction> Step(const JobEvent& event, const JobView& view) = 0;

  virtual int slots() const = 0;
  // That `slot` holds in the newest generation, or is being spawned for; -1: none.
  virtual int rank(int slot) const = 0;
  // Of the newest generation that was committed or is being prepared.
  virtual int world() const = 0;
  // All zero until it is known.
  virtual Id128 run_id() const = 0;
  // The other agents, and this one's name among them. Null and empty: there is no other.
  virtual Peers* peers() { return nullptr; }
  virtual std::string node() const { return {}; }
};

class OneNodeMachine final : public JobMachine {
 public:
  // Told what a successor must know, before any action of a step is done.
  using Remember = std::function<void(const JobMemo& memo)>;

  OneNodeMachine(JobOptions options, const Id128& run_id, Remember remember = nullptr)
      : OneNodeMachine(Job(std::move(options), BackOffSeed(run_id)), run_id, std::move(remember)) {}
  OneNodeMachine(Job job, const Id128& run_id, Remember remember)
      : job_(std::move(job)), run_id_(run_id), remember_(std::move(remember)) {}
  void Listen(Tell) override {}
  std::vector<JobAction> Step(const JobEvent& event, const JobView& view) override {
    std::vector<JobAction> actions = job_.Step(event, view);
    if (remember_ != nullptr) remember_(job_.Memo());
    return actions;
  }
  int slots() const override { return job_.options().world; }
  int rank(int slot) const override { return slot; }
  int world() const override { return job_.options().world; }
  Id128 run_id() const override { return run_id_; }

 private:
  Job job_;
  const Id128 run_id_;
  const Remember remember_;
};

}  // namespace outlast
