// What the agent tells others of its run while it runs: /status (job_status.h) and /metrics
// (metrics_text.h), on RUN_DIR/status.sock (a Unix socket for the run's own user, mode 0600) and,
// where it was asked for, on a TCP port.
//
// An answer is put together when somebody asks, on the loop's thread: looks at the black boxes,
// some 50 us a rank. Nothing is done while nobody asks.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "base/socket.h"
#include "launch/http_answerer.h"
#include "launch/job_status.h"
#include "launch/run_ledger.h"
#include "launch/run_record.h"
#include "run/keeper.h"
#include "watch/monitor.h"

namespace outlast {

inline constexpr char kStatusSocket[] = "status.sock";     // in RUN_DIR
inline constexpr char kMetricsFile[] = "metrics.address";  // HOST:PORT and a line end, in RUN_DIR

// A non-blocking listener on a Unix socket `name` in `folder`, for this user alone; the path may be
// longer than a socket address can hold.
absl::StatusOr<UniqueFd> ListenIn(const std::string& folder, const std::string& name);

// Belongs to the keeper's loop. Borrows all that it is given.
class StatusService {
 public:
  StatusService(EventLoop& loop, Keeper& keeper, Monitor& monitor, RunLedger& ledger,
                RunRecord& record);
  // Removes the socket.
  ~StatusService();

  // On RUN_DIR/status.sock.
  absl::Status ServeFolder();
  // Blocks on the name service when `at` is a name. The address that was chosen is in RUN_DIR and
  // the event log, and returned. kUnavailable: it is taken, or none of this machine.
  absl::StatusOr<HostPort> ServeTcp(const HostPort& at);

  JobStatus Snapshot();

 private:
  PageAnswer Answer(const PageRequest& request);
  void LookAt(RankStatus& rank);

  Keeper& keeper_;
  Monitor& monitor_;
  RunLedger& ledger_;
  RunRecord& record_;
  std::string socket_path_;  // to be removed; empty: none
  HttpAnswerer http_;
};

}  // namespace outlast
