// `outlast coordinator --etcd`: leads the job while etcd lets it, and stands by else.
#pragma once

#include <iosfwd>
#include <memory>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "control/coordinator_host.h"
#include "control/etcd_seat.h"

namespace outlast {

// Belongs to its loop's thread. Stops the loop when it is done; `code` is the exit code then: the
// job's; 84: it cannot lead any more, and the job may go on elsewhere; 85: refused; 86: told to
// leave, and the job goes on.
class EtcdCoordinator {
 public:
  // The rest outlives it. Prints "coordinator of job ID at HOST:PORT" on `out` each time it leads.
  EtcdCoordinator(EventLoop& loop, control::Transport& transport,
                  std::shared_ptr<control::EtcdClient> client, CoordinatorHostOptions host,
                  EtcdSeatOptions seat, std::ostream& out, std::ostream& err);
  ~EtcdCoordinator();

  // SIGINT and SIGHUP ask for the job's stop, where it leads. Any other signal, and each of one
  // that stands by, makes it leave: the next one leads. Once the job has ended it is not served any
  // longer.
  void Signal(int signal);
  int code() const { return code_; }

 private:
  void Lead(std::unique_ptr<CoordinatorJournal> journal);
  void StepDown(const std::string& why);
  void Finish(int code, const std::string& reason);
  void Say(const std::string& line);

  EventLoop& loop_;
  control::Transport& transport_;
  const CoordinatorHostOptions options_;
  std::ostream& out_;
  std::ostream& err_;
  int code_;
  int abdications_ = 0;  // shortly after each other
  absl::Duration led_since_;
  std::optional<FinishJob> finish_;  // the job has ended
  std::unique_ptr<CoordinatorHost> host_;
  std::unique_ptr<EtcdSeat> seat_;
};

}  // namespace outlast
