// `outlast status` and `outlast top`: a run as it stands, from its agent where that answers, else
// from what it left in RUN_DIR.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "launch/job_status.h"

namespace outlast {

// The run in `folder`: a RUN_DIR, or a folder of them that has `latest`. Asks the agent on
// RUN_DIR/status.sock, at most for `patience`; else reads events.jsonl and report.json, and looks
// for the agent's process. Without goodput. kNotFound: there is no such folder, or no run in it.
// kDataLoss: nothing in it can be read.
absl::StatusOr<JobStatus> FindStatus(const std::string& folder, absl::Duration patience);

// What the ledger of the run tells: goodput and its parts, MFU where the agent gave none, and the
// last steps of ranks that nobody can ask any more. Does nothing where the ledger is larger than
// `most_bytes`, or cannot be read.
void AddLedger(JobStatus& status, size_t most_bytes = size_t{64} << 20);

// `outlast status [RUN_DIR] [--json]`; `arguments` is what follows "status". The exit code: 0, or
// 85 with one line on `err`.
int RunStatusTool(const std::vector<std::string>& arguments, std::ostream& out, std::ostream& err);

// `outlast top [RUN_DIR]`: on a terminal redraws it once a second until `q`, Ctrl-C, or the run's
// end; elsewhere writes it once, to `out`.
int RunTopTool(const std::vector<std::string>& arguments, std::ostream& out, std::ostream& err);

}  // namespace outlast
