// Ledgers by hand: seconds in, records out.
#pragma once

#include <cmath>
#include <string>
#include <utility>

#include "outlast/meter/goodput.h"
#include "outlast/meter/ledger_file.h"

namespace outlast {

inline int64_t Nanos(double seconds) { return std::llround(seconds * 1e9); }

// One invocation of a job with one rank a slot. The clock starts at `boot_s`, wall time at
// `wall_s`.
class LedgerBuilder {
 public:
  explicit LedgerBuilder(double boot_s = 0, double wall_s = 1e9, std::string_view boot = "boot") {
    Add(ClockDomainEntry{.job_id = Id128::FromName("job"),
                         .run_id = Id128::FromName("run"),
                         .boot_id = Id128::FromName(boot),
                         .boottime_ns = Nanos(boot_s),
                         .realtime_ns = Nanos(wall_s),
                         .job = "job",
                         .command = "train"});
    Add(SubmitEntry{.time_ns = Nanos(boot_s)});
  }

  LedgerBuilder& Add(LedgerEntry entry) {
    entries_.push_back(std::move(entry));
    return *this;
  }
  LedgerBuilder& Up(double at, uint64_t generation, int32_t slot = 0) {
    return Add(UpEntry{.time_ns = Nanos(at),
                       .generation = generation,
                       .slot = slot,
                       .rank = slot,
                       .pid = 100 + slot});
  }
  LedgerBuilder& Killed(double at, uint64_t generation, int32_t slot = 0) {
    return Add(DownEntry{.time_ns = Nanos(at),
                         .generation = generation,
                         .slot = slot,
                         .rank = slot,
                         .pid = 100 + slot,
                         .cause = DownCause::kFault,
                         .how = "signal 9 (SIGKILL)"});
  }
  LedgerBuilder& Detected(double at, double last_progress, uint64_t generation, int32_t slot,
                          int64_t step, std::string fault_class, std::string found) {
    return Add(DetectedEntry{.time_ns = Nanos(at),
                             .last_progress_ns = Nanos(last_progress),
                             .generation = generation,
                             .slot = slot,
                             .rank = slot,
                             .step = step,
                             .fault_class = std::move(fault_class),
                             .found = std::move(found)});
  }
  // Steps first .. first + count - 1, back to back from `at`: each waits `data` s, then works
  // `work` s.
  LedgerBuilder& Steps(double at, uint64_t generation, int64_t first, int64_t count, double work,
                       double data = 0, int32_t slot = 0) {
    for (int64_t i = 0; i < count; ++i) {
      Add(Step(at, generation, first + i, work, data, slot));
      at += work + data;
    }
    return *this;
  }
  static StepEntry Step(double at, uint64_t generation, int64_t step, double work, double data = 0,
                        int32_t slot = 0) {
    return {.start_ns = Nanos(at),
            .end_ns = Nanos(at + data + work),
            .generation = generation,
            .slot = slot,
            .rank = slot,
            .step = step,
            .data_ns = Nanos(data),
            .forward_ns = Nanos(work / 2),
            .backward_ns = Nanos(work) - Nanos(work / 2),
            .tokens_real = 1000,
            .samples = 1};
  }
  LedgerBuilder& End(double at, int32_t exit_code = 0) {
    return Add(EndEntry{.time_ns = Nanos(at), .exit_code = exit_code, .reason = "finished"});
  }

  const RunEntries& entries() const { return entries_; }
  Timeline Build() const { return BuildTimeline({&entries_, 1}); }

 private:
  RunEntries entries_;
};

}  // namespace outlast
