// Whole tensors of a checkpoint, in order and a bounded piece at a time, however the ranks that
// wrote it had cut them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "checkpoint/plan.h"
#include "checkpoint/reader.h"
#include "outlast/base/memory.h"

namespace outlast {

// A box of a tensor that is contiguous in it: the bytes [begin, begin + bytes) of the packed
// tensor.
struct TensorPiece {
  const SavedTensor* tensor = nullptr;  // of the checkpoint that the list is of
  Box box;
  uint64_t begin = 0, bytes = 0;
};

// The tensors of `tensors` from first to last as pieces of at most `limit` bytes (a single element
// or, of a type below a byte, a whole tensor may be larger). Tensors without bytes have no piece.
std::vector<TensorPiece> CutTensors(std::span<const SavedTensor* const> tensors, uint64_t limit);

// How much is held in memory at a time.
inline constexpr uint64_t kPieceBytes = uint64_t{64} << 20;

// Hands out runs of pieces that together fit in the memory of one: what is small comes by the
// thousand, what is large piece by piece. No tensor comes twice in a run.
class PieceRuns {
 public:
  PieceRuns(std::span<const TensorPiece> pieces, uint64_t limit) : pieces_(pieces), limit_(limit) {}
  // Empty at the end.
  std::span<const TensorPiece> Next();

 private:
  std::span<const TensorPiece> pieces_;
  uint64_t limit_;
};

// Memory for a run; grows to the largest one.
class PieceMemory {
 public:
  // Reads the run's pieces, packed one after the other, from `reader`, which has all their tensors
  // with the same dtype and shape. kDataLoss as CheckpointReader::ReadState.
  absl::StatusOr<std::span<const std::byte>> Read(const CheckpointReader& reader,
                                                  std::span<const TensorPiece> run);

 private:
  Mapping memory_;
};

}  // namespace outlast
