// The other end of every worker's socket: joins, generations, keys, shared memory, stops. It lives
// in the agent, in a thread of the process (a world of one without agent), or in a test
// (LocalWorld), and is the same code in all three.
//
// It drives a JobMachine, and has what the machine decides done: messages by itself, processes by
// its WorkerHost, checkpoints and verdicts by its KeeperExtensions.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/channel.h"
#include "base/event_loop.h"
#include "outlast/base/id.h"
#include "outlast/blackbox/segment.h"
#include "outlast/elastic/job.h"
#include "run/job_machine.h"
#include "run/vault.h"
#include "run/wire.h"

namespace outlast {

class Keeper;

// How workers come and go. Calls come on the loop's thread and return at once; results come back by
// Keeper::OnWorkerEnded. The host gives a new worker its end of the socket and its black box.
class WorkerHost {
 public:
  struct SpawnRequest {
    SpawnWorker worker;
    // At its birth; a later generation may give it others.
    int rank;
    int world;
    UniqueFd socket;   // the worker's end
    int black_box_fd;  // borrowed
  };
  virtual ~WorkerHost() = default;
  virtual void Spawn(SpawnRequest request) = 0;
  virtual void Kill(const KillWorker& kill) = 0;
  virtual void Forward(const ForwardSignal& forward) = 0;
  // Writes native stacks of the slots to RUN_DIR/stacks within 10 s, in children with a deadline;
  // then calls done.
  virtual void CaptureStacks(const CaptureStacks& request, std::function<void()> done) = 0;
  virtual void OnFault(const RecordFault& record) = 0;
  virtual void OnCommit(const CommitGeneration& commit) = 0;
  // `slot`'s process was told to enter the present generation: it holds its death notice by now.
  virtual void OnEnter(int slot, uint64_t incarnation) = 0;
  virtual void OnFinish(const FinishJob& finish) = 0;
};

// A part of the keeper that another module owns (checkpoint's save service, the watch). All calls
// on the loop's thread.
class KeeperExtension {
 public:
  virtual ~KeeperExtension() = default;
  // True when the message was this extension's. It answers now or later by Keeper::Answer. Requests
  // of generations that were aborted do not come here: the keeper refuses them.
  virtual bool OnMessage(int slot, Message& message) = 0;
  // Generation `generation` and older are being unwound: pending requests of theirs were answered
  // kAborted already.
  virtual void OnAbort(uint64_t generation) = 0;
  // Every process that was in the aborted generation has left its body or ended. The next
  // generation may still wait for new processes.
  virtual void OnQuiet() = 0;
  // Every member is staged and quiet: nothing writes shared memory until the members hear of
  // `commit`.
  virtual void OnCommit(const CommitGeneration& commit) = 0;
  virtual void OnWorkerEnded(int slot) = 0;
  // It writes saves: then it owes a Dispatch(StopPersisted) after each agreed stop and each
  // OnPersistCommon.
  virtual bool is_saving() const = 0;
  // Persist the newest snapshot that all ranks have.
  virtual void OnPersistCommon(const std::string& reason) = 0;
  // Of a job of several nodes, at the agent of rank 0: all ranks are to save a step that none has
  // reached yet, and train on. True: a Dispatch(WantedSaveEnded) follows. False: it saves nothing.
  virtual bool OnWantSave(const WantSave& want) = 0;
};

struct KeeperOptions {
  JobOptions job;
  Id128 run_id;
  std::string run_dir;  // empty: none
  // A body may see a peer's death before we do. One that returned kAborted with nothing aborted for
  // so long is a fault. In a job of one node.
  absl::Duration uncaused_grace = absl::Seconds(1);
  Vault* vault = nullptr;  // borrowed; null: no keeper comes after this one
};

// Belongs to its loop's thread.
class Keeper {
 public:
  // The job is this node's alone, as options.job says.
  Keeper(EventLoop& loop, WorkerHost& host, const KeeperOptions& options);
  // options.job and options.run_id are the machine's to say.
  Keeper(EventLoop& loop, WorkerHost& host, KeeperOptions options,
         std::unique_ptr<JobMachine> machine);
  ~Keeper();

  // Borrowed until Detach. Attached while a generation stands, it hears of that one's commit at
  // once.
  void Attach(KeeperExtension* extension);
  void Detach(KeeperExtension* extension);
  // Makes the black boxes and dispatches StartEvent.
  absl::Status Start();
  // The same with what a former keeper of the slots kept, which the machine goes on with; takes its
  // own out of `kept`. Slots that hold no process any more have no "line.<slot>" there.
  absl::Status GoOn(Kept& kept);

  // Feeds the job machine and executes its actions.
  void Dispatch(const JobEvent& event);
  void OnWorkerEnded(int slot, uint64_t incarnation, const ProcessEnd& end);
  // Its death notice says so; OnWorkerEnded follows.
  void OnWorkerDying(int slot, uint64_t incarnation, const ProcessEnd& end);

  // Answers `request` of `slot`; dropped without a word when the worker is gone or the request was
  // answered (abort).
  void Answer(int slot, uint64_t request, const absl::Status& status, std::string_view payload = {},
              std::span<const int> fds = {});
  void Send(int slot, const Message& message, std::span<const int> fds = {});

  EventLoop& loop();
  const KeeperOptions& options() const;
  // Faults that the machine has recorded.
  int faults() const;
  // Places for workers here, 0 .. slots()-1.
  int slots() const;
  // As of the newest generation (JobMachine).
  int rank(int slot) const;
  int world() const;
  Id128 run_id() const;
  Peers* peers();
  std::string node() const;
  // The slot's black box, for the whole job: a slot's next process gets the same one.
  Segment& black_box(int slot);
  bool is_joined(int slot) const;
  bool is_finished(int slot) const;
  // Messages that were malformed, out of turn or of an older generation.
  uint64_t refused() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace outlast
