// How long a piece of work may take before it is suspected: learned from healthy runs of the same
// work.
//
//   D = clamp(max(k * p99, p50 + 10 * MAD), floor, ceiling)      k = 5 until 32 samples, then 3
//
// over the last 64 samples. Below 8 samples nothing learned acts. A longer healthy sample raises D
// at once; D falls by half the gap once in 32 samples. The job uses the longest D of its ranks. (k
// = 5: the safety factor of NVIDIA's NVRx.)
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "outlast/blackbox/flight_log.h"
#include "outlast/blackbox/progress.h"
#include "outlast/watch/watchdog.h"

namespace outlast {

// One rank's samples of one kind of work.
class LearnedLimit {
 public:
  static constexpr int kMinSamples = 8;
  static constexpr int kWindow = 32;
  static constexpr int kKept = 64;

  void Add(absl::Duration sample, absl::Duration floor, absl::Duration ceiling);
  // nullopt: too few samples to act on.
  std::optional<absl::Duration> limit() const;
  int64_t samples() const { return count_; }

 private:
  absl::Duration Target(absl::Duration floor, absl::Duration ceiling) const;

  std::array<int64_t, kKept> nanos_{};
  int64_t count_ = 0;
  int64_t longest_ = 0;  // of what is kept
  absl::Duration limit_;
};

// A kind of work: a section (by name), inside a collective of a kind or not.
struct WorkKey {
  uint32_t section = 0;  // OpenSection::id; 0: any, see below
  Phase phase = Phase::kNone;
  uint8_t comm_kind = 0;  // CommKind; 0: no operation pending

  auto operator<=>(const WorkKey&) const = default;

  // A whole step, and one phase of it: learned exactly, from the step log.
  static WorkKey Step() { return {0, Phase::kNone, 0}; }
  static WorkKey PhaseOfStep(Phase phase) { return {0, phase, 0}; }
};

// The phases that a step is made of.
bool IsStepPhase(Phase phase);
// A section that is one phase of the step and nothing else: named as its phase. A step's time
// bounds it, so it needs no samples of its own.
bool IsPlainStepPhase(const OpenSection& section);

struct WorkLimit {
  absl::Duration limit;
  bool is_learned = false;
};

// All limits of one job. Pure: no clock, no I/O.
class DeadlineBook {
 public:
  DeadlineBook(const WatchdogOptions& options, int world) : options_(options), world_(world) {}

  void Observe(int rank, const WorkKey& key, absl::Duration took);
  // `may_learn`: the rank is past its warm-up steps. `section` is null outside any; `outer` is the
  // one around it, where there is one.
  WorkLimit For(const OpenSection* section, uint8_t comm_kind, bool may_learn,
                const OpenSection* outer = nullptr) const;
  // A new world, other sequence length or batch, a restart: everything is learned anew.
  void Reset(int world) {
    world_ = world;
    learned_.clear();
  }

 private:
  std::optional<absl::Duration> Learned(const WorkKey& key) const;
  absl::Duration Configured(Phase phase) const;

  WatchdogOptions options_;
  int world_;
  std::map<WorkKey, std::vector<LearnedLimit>> learned_;  // by rank
};

}  // namespace outlast
