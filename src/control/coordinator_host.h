// A coordinator at work: its state machine with a journal on disk, timers and agents' streams.
//
// It runs on a thread of its own, since each record of the journal is on disk before what follows
// from it is sent: a disk that is slow under a checkpoint delays nobody's agent.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "control/coordinator_journal.h"
#include "control/token.h"
#include "control/transport.h"
#include "outlast/elastic/actions.h"
#include "outlast/elastic/elastic_options.h"

namespace outlast {

struct CoordinatorHostOptions {
  ElasticOptions elastic;
  std::string listen = "127.0.0.1:0";  // HOST:PORT; port 0: any
  std::string journal;                 // a folder; made if it is not there
  JobToken token;
  control::Certificates certificates;
  control::Liveness liveness;
  // Beyond loopback, somebody must prove something: a token, or certificates of agents.
  bool allow_strangers = false;
  // After so many records the journal is compacted.
  uint64_t compact_after = 1024;
  // After the job's end, late agents are told of it for so long.
  absl::Duration serve_late = absl::Seconds(30);
};

class CoordinatorHost {
 public:
  // Called on the loop that was given to Start; none after destruction.
  struct Ears {
    // One line for people: who was refused, and why.
    std::function<void(const std::string& line)> on_line = [](const std::string&) {};
    std::function<void(const RecordFault&)> on_fault = [](const RecordFault&) {};
    // The job's end. Agents are told, now and for `serve_late`; not where none ever came. 85: it
    // had ended before this start.
    std::function<void(const FinishJob&)> on_finish = [](const FinishJob&) {};
    // After on_finish: all agents that the job had at its end have been told, and are gone. One
    // that was away then, or that never came, may still ask.
    std::function<void()> on_all_told = [] {};
    // It serves nobody any more. OK: a while after the job's end; kAborted: another coordinator has
    // the job, or the journal could not be written.
    std::function<void(const absl::Status&)> on_over = [](const absl::Status&) {};
  };

  // Opens the journal, listens, goes on where the journal ends. `caller` and `transport`
  // (control/load_transport.h) must outlive it. Blocks on the disk, and on a name server where
  // `listen` has a name. kInvalidArgument: options. kFailedPrecondition: beyond loopback without a
  // token; another job's journal. kAlreadyExists: another coordinator has the journal.
  // kUnavailable: the address cannot be listened at; each that was tried is named.
  static absl::StatusOr<std::unique_ptr<CoordinatorHost>> Start(EventLoop& caller,
                                                                control::Transport& transport,
                                                                CoordinatorHostOptions options,
                                                                Ears ears);
  // The same on a journal that is open already; `options.journal` is not used.
  static absl::StatusOr<std::unique_ptr<CoordinatorHost>> Start(
      EventLoop& caller, control::Transport& transport, CoordinatorHostOptions options, Ears ears,
      std::unique_ptr<CoordinatorJournal> journal);
  // Ends all streams; what was sent leaves first, for at most about a second.
  ~CoordinatorHost();

  // HOST:PORT that agents reach it at, with the port that was bound and the first numeric address.
  const std::string& address() const;
  // An operator asks for the job's stop, as StopAsked of the coordinator.
  void AskStop(int signal);

 private:
  class Work;
  explicit CoordinatorHost(std::unique_ptr<Work> work);
  std::unique_ptr<Work> work_;
};

}  // namespace outlast
