// The ledgers of a job's invocations on one clock.
#pragma once

#include <cstdint>
#include <span>
#include <tuple>
#include <variant>
#include <vector>

#include "outlast/meter/goodput.h"

namespace outlast {

// A list for each kind of record.
template <typename Variant>
struct ListsOf;
template <typename... T>
struct ListsOf<std::variant<T...>> {
  using Type = std::tuple<std::vector<T>...>;
};

// One `outlast run`, all times in ns on the job's time line.
struct Invocation {
  ListsOf<LedgerEntry>::Type lists;
  ClockDomainEntry domain;  // on its own clock
  int64_t begin = 0;
  int64_t end = 0;
  bool has_end = false;

  template <typename T>
  const std::vector<T>& All() const {
    return std::get<std::vector<T>>(lists);
  }
};

struct TimeLine {
  std::vector<Invocation> runs;
  std::vector<bool> gap_is_estimated;  // in front of run i
};

// Orders the invocations and moves each onto one clock that starts at 0: by their boot's clock
// where they share one, else by their wall clocks, which may have been set meanwhile. Empty ledgers
// are left out.
TimeLine PutOnOneClock(std::span<const RunEntries> runs);

// Times and counts come from a file: kept within 0 and 2^58, so that sums of a few cannot overflow.
int64_t ClampRecorded(int64_t value);

}  // namespace outlast
