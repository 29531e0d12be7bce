// RUN_DIR: the folder of one agent in one invocation.
//
//   <parent>/<job>-<UTC start>-<4 digits of the run id>/   and <parent>/latest, a link to the
//   newest
//
// In a job of several nodes each agent has a folder of its own, and says nothing to the others of
// it: nodes may share the parent or not, and an agent needs its folder (the leading one for the
// coordinator's journal) before anybody has told it the run's id. So the four digits are of the
// agent's own id, and the node's name ends the folder's: .../<job>-<UTC start>-<4 digits>-<node>/,
// with <parent>/latest-<node> linking to it besides. What belongs together has one run_id in
// report.json.
//
//     report.json     the end: code, reason, root, victims, budgets, times
//     events.jsonl    one JSON object a line: what happened (event_log.h)
//     ledger.bin      where the time went (outlast/meter/ledger_file.h)
//     status.sock     where the agent answers while it lives (status_service.h)
//     metrics.address HOST:PORT of /metrics, with --metrics
//     logs/g<generation>/rank<r>.{out,err}
//                     what each process wrote; the generation that spawned it, and the rank
//     logs/template.{out,err}
//                     what the template wrote, with --template
//     coordinator/    where this agent leads the job: the coordinator's journal
//     stacks/<n>/rank<r>.txt
//                     native stacks, when asked for or when a rank hung
//     boxes/          black boxes, and the verdict that kept them
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "outlast/base/fd.h"
#include "outlast/base/id.h"

namespace outlast {

class RunDir {
 public:
  // Makes the folder and its subfolders. The error names the folder that could not be made or
  // written.
  // `node`: of several; else empty.
  static absl::StatusOr<RunDir> Create(const std::string& parent, std::string_view job,
                                       absl::Time start, const Id128& run_id,
                                       std::string_view node = {});

  // That of a run that goes on under another agent.
  static absl::StatusOr<RunDir> Open(const std::string& path);

  const std::string& path() const { return path_; }

  // The two files of a worker's output, opened to append. `path` without extension goes to `base`.
  struct LogFiles {
    std::string output_path, error_path;
    UniqueFd output, error;
  };
  absl::StatusOr<LogFiles> OpenLogs(uint64_t generation, int rank) const;
  absl::StatusOr<LogFiles> OpenTemplateLogs() const;

  // One line; what does not fit on the disk is lost, never waited for.
  void AppendEvent(std::string_view json_line) const;
  // Replaces the report as a whole.
  absl::Status WriteReport(std::string_view json) const;

 private:
  static absl::StatusOr<LogFiles> OpenBoth(const std::string& base);

  RunDir(std::string path, UniqueFd events) : path_(std::move(path)), events_(std::move(events)) {}

  std::string path_;
  UniqueFd events_;
  mutable bool is_cut_ = false;  // the last line of the events
};

// The last `lines` lines of a file, at most `bytes` of them; empty when it cannot be read.
std::string LastLines(const std::string& path, int lines, size_t bytes);

}  // namespace outlast
