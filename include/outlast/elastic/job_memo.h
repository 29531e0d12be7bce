// What the next agent of a job's living workers must know of it, should this agent be killed
// (outlast run --on-agent-death adopt).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "outlast/elastic/policy.h"

namespace outlast {

// Deadlines are left out: whoever goes on gives everybody new ones.
struct JobMemo {
  enum class Where : uint8_t {
    kNone = 0,         // no process; its slot is to be filled
    kStarting = 1,     // a process that is not staged, or a plain one
    kInside = 2,       // staged, or in a generation's body, or on its way out of one
    kLeaving = 3,      // its body returned OK
    kTerminating = 4,  // got SIGTERM
    kKilled = 5,       // got SIGKILL, or is dying by itself
    kDone = 6,
    kAbandoned = 7,
  };
  struct Slot {
    Where where = Where::kNone;
    bool joined = false, plain = true, finished = false;
    uint64_t incarnation = 0;
    uint64_t born = 0;
    int32_t attempts = 0;  // spawns so far
    bool operator==(const Slot&) const = default;
  };

  uint64_t generation = 0;
  uint64_t last_incarnation = 0;
  bool is_ending = false;  // it stops, or has failed: nobody is to go on with it
  bool any_joined = false;
  int64_t step_committed = 0;
  int64_t progress_base = 0;
  int32_t late_failure = 0;  // exit code of a worker that failed after its work was done; 0: none
  std::string final_save_failed;  // why; empty: it did not
  FaultHistory history;
  std::vector<Slot> slots;
  bool operator==(const JobMemo&) const = default;
};

// Of this very version of the program.
std::string EncodeJobMemo(const JobMemo& memo);
// kInvalidArgument: cut or malformed.
absl::StatusOr<JobMemo> DecodeJobMemo(std::string_view bytes);

}  // namespace outlast
