// How often a checkpoint is worth its cost. Pure functions of measured times.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/time/time.h"

namespace outlast {

struct IntervalModel {
  absl::Duration mean_between_interruptions;  // M
  absl::Duration cost;                        // C: step time that one save adds
  absl::Duration restart;                     // R: from an interruption to the first new step
  absl::Duration write;                       // from a save's call until it is durable; 0: C is all
};

// sqrt(2 C M), the first-order optimum. Source: Young 1974, CACM 17(9).
absl::Duration YoungInterval(const IntervalModel& model);

// Young's with Daly's higher-order terms, for C < 2 M; M otherwise. Source: Daly 2006, "A higher
// order estimate of the optimum checkpoint interval", FGCS 22(3).
absl::Duration DalyInterval(const IntervalModel& model);

// Useful work per wall time, 0 to 1, with a save after each `interval` of work and interruptions at
// exponential times: t / (M e^((R+w)/M) (e^((t+C)/M) - 1)). Source: Daly 2006, where a
// save that is still being written when it is needed (w) adds to what is done again.
double ExpectedGoodput(const IntervalModel& model, absl::Duration interval);

// The interval of work that maximises ExpectedGoodput, found numerically; at least the time of a
// write, since one save ends before the next begins.
absl::Duration OptimalInterval(const IntervalModel& model);

// M, as the job's own history corrects what is known of fleets: (8,000 h / ranks + the time run) /
// (1 + interruptions). Prior: one each 7.9 h at 1,024 ranks (arXiv 2410.21680, quoted second-hand).
absl::Duration MeanBetweenInterruptions(int world, absl::Duration run_time, int64_t interruptions);

// The interval at which an interruption loses `loss` of rank time on average: half an interval on
// each of `world` ranks. 15 minutes of 1,000 ranks: 125 h.
absl::Duration IntervalOfLoss(absl::Duration loss, int world);

// What a save adds to the steps, from how many end while one is written and while none is.
class SaveCostMeter {
 public:
  // `now` is steady, `step` the newest that any rank has begun.
  void SaveBegan(absl::Duration now, int64_t step);
  void SaveEnded(absl::Duration now, int64_t step);
  // A rollback: steps count anew.
  void Forget();

  // Of the last save whose windows held at least 20 steps each, and not under 1 % of its write
  // time: less cannot be told from noise. None: no such save yet.
  std::optional<absl::Duration> cost() const { return cost_; }
  absl::Duration write() const { return write_; }  // of the last save; 0: none yet

 private:
  struct Mark {
    absl::Duration at;
    int64_t step = 0;
  };
  std::optional<Mark> began_, ended_;
  std::optional<double> idle_rate_;  // steps a second while no save was written
  std::optional<absl::Duration> cost_;
  absl::Duration write_;
};

// The interval in force. Changes only when the optimum has moved by more than a fifth, so that
// noise does not move the saves.
class IntervalTuner {
 public:
  struct Bounds {
    absl::Duration shortest, longest;
  };
  explicit IntervalTuner(Bounds bounds) : bounds_(bounds) {}
  absl::Duration Tune(const IntervalModel& model);

 private:
  const Bounds bounds_;
  std::optional<absl::Duration> interval_;
};

}  // namespace outlast
