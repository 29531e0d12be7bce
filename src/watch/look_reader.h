// Takes looks: a rank's process in /proc, and its black box. Nothing here needs the rank's help.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "outlast/blackbox/segment.h"
#include "outlast/blackbox/step_log.h"
#include "watch/verdict.h"

namespace outlast {

// What `text`, the contents of /proc/PID/status, says: its State letter, unless TracerPid is not 0.
ProcessState ParseProcessStatus(std::string_view text);
// The state of `pid` as long as it is the process that started at `start_time` (/proc/PID/stat,
// field 22); a zombie, another process and none are dead. kUnknown: pid 0.
ProcessState ReadProcessState(int pid, uint64_t start_time);

// CLOCK_BOOTTIME: runs on while the machine is suspended.
int64_t BoottimeNanos();

// The reader of one slot's black box, for the whole job. Not safe for concurrent use.
class LookReader {
 public:
  // Maps the segment behind `fd`, which is borrowed for the call. Errors as SegmentView::Open.
  static absl::StatusOr<LookReader> Open(int fd, int slot);

  // A look at the slot as the rank `rank`; `now_ns` is CLOCK_MONOTONIC. About 30 us.
  RankLook Look(int rank, int64_t now_ns);
  // The steps that ended since the last call.
  std::vector<StepRecord> NewSteps();

 private:
  LookReader(SegmentView view, int slot);

  SegmentView view_;
  int slot_;
  uint64_t next_step_seq_ = 1;
  std::map<uint64_t, std::shared_ptr<const std::vector<uint32_t>>> members_;  // by digest
};

}  // namespace outlast
