#include "meter/invocations.h"

#include <algorithm>
#include <type_traits>
#include <utility>

namespace outlast {
namespace {

// Wall times come from a file: their differences may pass 2^63.
__extension__ using Int128 = __int128;

constexpr int64_t kLatest = int64_t{1} << 58;
constexpr int64_t kLatestStart = int64_t{1} << 61;

// Calls f on each time of an entry; an unknown one (last_progress_ns of 0) is left out.
template <typename F>
void ForEachTime(LedgerEntry& entry, F f) {
  std::visit(
      [&](auto& e) {
        if constexpr (requires { e.start_ns; }) {
          f(e.start_ns);
          f(e.end_ns);
        } else if constexpr (requires { e.boottime_ns; }) {
          f(e.boottime_ns);
        } else {
          f(e.time_ns);
          if constexpr (requires { e.last_progress_ns; }) {
            if (e.last_progress_ns != 0) f(e.last_progress_ns);
          }
        }
      },
      entry);
}

// One invocation on its own clock, with its times clamped.
struct OwnClock {
  RunEntries entries;
  ClockDomainEntry domain;
  int64_t begin = kLatest;
  int64_t end = 0;
};

OwnClock ReadClock(const RunEntries& entries) {
  OwnClock run;
  run.entries = entries;
  for (LedgerEntry& entry : run.entries) {
    ForEachTime(entry, [&run](int64_t& time) {
      time = ClampRecorded(time);
      run.begin = std::min(run.begin, time);
      run.end = std::max(run.end, time);
    });
    if (const auto* domain = std::get_if<ClockDomainEntry>(&entry)) run.domain = *domain;
  }
  return run;
}

Invocation Shift(OwnClock run, int64_t by) {
  Invocation out;
  out.domain = run.domain;
  out.begin = run.begin + by;
  out.end = run.end + by;
  for (LedgerEntry& entry : run.entries) {
    ForEachTime(entry, [by](int64_t& time) { time += by; });
    std::visit(
        [&out](auto& each) {
          std::get<std::vector<std::remove_cvref_t<decltype(each)>>>(out.lists).push_back(
              std::move(each));
        },
        entry);
  }
  out.has_end = !out.All<EndEntry>().empty();
  return out;
}

// Wall time of `at`, a time of the run's own clock.
Int128 WallTime(const OwnClock& run, int64_t at) {
  return static_cast<Int128>(run.domain.realtime_ns) + at - run.domain.boottime_ns;
}

struct Place {
  int64_t shift = 0;
  bool is_estimated = false;
};

// Where `run` goes behind `previous`, which was shifted by `previous_shift`.
Place PlaceBehind(const OwnClock& previous, int64_t previous_shift, const OwnClock& run) {
  const bool same_boot =
      !run.domain.boot_id.is_zero() && run.domain.boot_id == previous.domain.boot_id;
  // They may overlap a little: an agent is killed and the job started again before the last of its
  // workers is gone.
  if (same_boot && run.begin >= previous.begin) return {previous_shift, false};
  const Int128 gap = WallTime(run, run.begin) - WallTime(previous, previous.end);
  const int64_t begin =
      previous.end + previous_shift + static_cast<int64_t>(std::clamp<Int128>(gap, 0, kLatest));
  return {std::min(begin, kLatestStart) - run.begin, true};
}

}  // namespace

int64_t ClampRecorded(int64_t value) { return std::clamp<int64_t>(value, 0, kLatest); }

TimeLine PutOnOneClock(std::span<const RunEntries> runs) {
  std::vector<OwnClock> own;
  for (const RunEntries& entries : runs) {
    if (!entries.empty()) own.push_back(ReadClock(entries));
  }
  std::stable_sort(own.begin(), own.end(), [](const OwnClock& a, const OwnClock& b) {
    return std::tie(a.domain.realtime_ns, a.domain.run_id) <
           std::tie(b.domain.realtime_ns, b.domain.run_id);
  });
  TimeLine line;
  Place place;
  for (size_t i = 0; i < own.size(); ++i) {
    place = i == 0 ? Place{-own[0].begin, false} : PlaceBehind(own[i - 1], place.shift, own[i]);
    line.runs.push_back(Shift(own[i], place.shift));
    line.gap_is_estimated.push_back(place.is_estimated);
  }
  return line;
}

}  // namespace outlast
