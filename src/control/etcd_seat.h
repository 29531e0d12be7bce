// One of several coordinators of a job, of which etcd lets one lead at a time.
//
//   STANDING BY ── the leader's key is gone, and ours was made ──> LEADING
//   LEADING ── StepDown; the lease ran out, or may have; the key is somebody else's ──> STANDING BY
//   STANDING BY ── the run is over ──> END       any ── etcd is away for the grace ──> END (84)
//
// The leader's key is bound to a lease, which is kept alive each third of its time. Where etcd does
// not answer, the leader goes on while the lease cannot have run out; from then on another may
// lead, so it does not any more. When etcd answers again and the key is still ours, it leads again,
// like one that was started again on the journal. What protects the journal is not time but the
// transactions (etcd_keys.h).
//
// A seat takes part in one run of the job. One that finds an ended run when it looks first begins a
// new one, once it leads; one that was there before the end ends with the run.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "control/coordinator_journal.h"
#include "control/etcd.h"
#include "outlast/elastic/terms.h"

namespace outlast {

struct EtcdSeatOptions {
  std::string job;
  std::string name;                          // of this coordinator, for people
  Terms terms;                               // ElasticOptions.terms: others are refused
  absl::Duration lease = absl::Seconds(10);  // whole seconds, at least 2
  absl::Duration first_answer = absl::Seconds(30);
  absl::Duration grace = absl::Seconds(600);  // ElasticOptions.coordinator_grace
};

class EtcdSeat {
 public:
  // Called on the loop that was given to the constructor; none after destruction.
  struct Ears {
    std::function<void(const std::string& line)> on_line = [](const std::string&) {};
    // It leads, on this journal. on_lost follows, unless StepDown comes before.
    std::function<void(std::unique_ptr<CoordinatorJournal> journal)> on_elected;
    // The address that was announced can be found.
    std::function<void()> on_announced = [] {};
    // It does not lead any more: end the coordinator, then call StepDown.
    std::function<void(const std::string& why)> on_lost;
    // Last. The run is over, and how; or why this seat cannot go on.
    std::function<void(int exit_code, const std::string& reason)> on_end;
  };
  // Starts at once, on a thread of its own. `caller` must outlive it.
  EtcdSeat(EventLoop& caller, std::shared_ptr<control::EtcdClient> client, EtcdSeatOptions options,
           Ears ears);
  // Lets go of the lead, so that the next one need not wait for the lease. Waits for etcd, for at
  // most about four seconds.
  ~EtcdSeat();

  // Writes where the coordinator listens, for agents to find.
  void Announce(std::string address);
  // From now on nothing is appended; an Append that waits returns. It stands by then.
  void StepDown();
  // The run is over: what those who stand by are told.
  void EndRun(int exit_code, std::string reason);

 private:
  class Work;
  std::unique_ptr<Work> work_;
};

}  // namespace outlast
