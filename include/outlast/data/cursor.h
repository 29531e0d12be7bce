// Where a run stands in its data: which samples a step takes, and what of the source is consumed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "outlast/data/order.h"

namespace outlast {

// What becomes of an epoch's last samples when they do not fill a batch.
enum class Remainder {
  kDrop,  // they are left out of this epoch; the next one has another order, so others are left out
  kPad,   // they make a last step whose free places are padding
};

struct CursorOptions {
  int64_t samples = 0;  // in the source, count
  int64_t batch = 0;    // samples a step takes over all ranks, count
  uint64_t seed = 0;
  Remainder remainder = Remainder::kDrop;
};

// Walks one source, epoch after epoch, each in the order that SampleOrder(samples, seed, epoch)
// gives. The samples of a step depend on the options and on what was consumed before, never on the
// number of ranks; ranks only share them out. All ranks hold the same cursor and advance it
// together. A value type; not for concurrent use.
//
//   given: samples 10, batch 6   kDrop: one step an epoch, 6 consumed   kPad: two steps, 6 and 4
//   consumed, 2 padding
class Cursor {
 public:
  static constexpr int64_t kPadding =
      -1;  // a place without a sample: computes nothing and counts as nothing

  static constexpr int64_t kLargestBatch = 1 << 24;

  // At the start of epoch 0. kInvalidArgument: samples below 0, or batch outside [1,
  // kLargestBatch].
  static absl::StatusOr<Cursor> Create(const CursorOptions& options);

  // A cursor that goes on where the one that wrote `text` (ToText) stood. The batch may be another
  // one: the position counts samples. kInvalidArgument: not a cursor's text, with what is wrong in
  // it. kFailedPrecondition: it belongs to another order or rule (samples, seed, remainder), with
  // both values.
  static absl::StatusOr<Cursor> FromText(const CursorOptions& options, std::string_view text);

  // One JSON object, for the checkpoint's extra state:
  //   {"format":"outlast.cursor","version":1,
  //    "sources":[{"samples":100,"seed":7,"remainder":"drop","epoch":1,"position":8,"consumed":104}]}
  // Version 1 has exactly one source. Members may come in any order, unknown ones are ignored, a
  // higher version is refused.
  std::string ToText() const;

  // 0 when the source does not fill one batch under kDrop, or is empty: there is nothing to train
  // on, and StepIds says so.
  int64_t steps_per_epoch() const;
  int64_t epoch() const { return epoch_; }        // of the next step, from 0
  int64_t position() const { return position_; }  // of the next step in its epoch, in samples
  int64_t consumed() const {
    return consumed_;
  }  // samples since the start, over all epochs; without padding

  // The samples of the next step, `batch` places, padding last. kFailedPrecondition:
  // steps_per_epoch() is 0.
  absl::StatusOr<std::vector<int64_t>> StepIds() const;

  // The places of `rank` among StepIds: block `rank` of `world` equal ones, filled up with padding
  // where `world` does not divide the batch. So each rank has the same count, ceil(batch / world).
  // kInvalidArgument: rank outside [0, world).
  absl::StatusOr<std::vector<int64_t>> RankIds(int rank, int world) const;

  // Counts the next step's samples as consumed and moves behind them. kFailedPrecondition:
  // steps_per_epoch() is 0.
  absl::Status Advance();

 private:
  explicit Cursor(const CursorOptions& options);
  absl::Status CheckNotEmpty() const;
  int64_t NextCount() const;  // samples that the next step takes
  void EnterNextEpochIfDone();

  CursorOptions options_;
  SampleOrder order_;  // of epoch_
  int64_t epoch_ = 0;
  int64_t position_ = 0;
  int64_t consumed_ = 0;
};

}  // namespace outlast
