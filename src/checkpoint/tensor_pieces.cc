#include "checkpoint/tensor_pieces.h"

#include <algorithm>
#include <set>

#include "base/error.h"

namespace outlast {
namespace {

uint64_t BytesOfBox(DType dtype, const Shape& extent) { return BytesOf(dtype, extent).value_or(0); }

// The first dimension that pieces are counted along: all after it together fit in `limit`.
int CutDimension(DType dtype, const Shape& global, uint64_t limit) {
  Shape extent = global;
  for (int d = 0; d < global.rank(); ++d) {
    extent.set(d, 1);
    if (BytesOfBox(dtype, extent) <= limit || d + 1 == global.rank()) return d;
  }
  return 0;
}

void CutTensor(const SavedTensor& tensor, uint64_t limit, std::vector<TensorPiece>& pieces) {
  const Shape& global = tensor.global;
  const uint64_t bytes = BytesOfBox(tensor.dtype, global);
  if (bytes == 0) return;
  Box box{Shape::Zeros(global.rank()), global};
  if (bytes <= limit || BitsOf(tensor.dtype) < 8 || global.rank() == 0) {
    pieces.push_back({&tensor, box, 0, bytes});
    return;
  }
  const int cut = CutDimension(tensor.dtype, global, limit);
  for (int d = 0; d <= cut; ++d) box.extent.set(d, 1);
  const uint64_t row = BytesOfBox(tensor.dtype, box.extent);
  const auto rows = static_cast<int64_t>(std::max<uint64_t>(1, limit / row));
  for (uint64_t begin = 0; begin < bytes;) {
    box.extent.set(cut, std::min(rows, global[cut] - box.offset[cut]));
    const uint64_t length = row * static_cast<uint64_t>(box.extent[cut]);
    pieces.push_back({&tensor, box, begin, length});
    begin += length;
    box.offset.set(cut, box.offset[cut] + box.extent[cut]);
    for (int d = cut; d > 0 && box.offset[d] == global[d]; --d) {
      box.offset.set(d, 0);
      box.offset.set(d - 1, box.offset[d - 1] + 1);
    }
  }
}

}  // namespace

std::vector<TensorPiece> CutTensors(std::span<const SavedTensor* const> tensors, uint64_t limit) {
  std::vector<TensorPiece> pieces;
  for (const SavedTensor* tensor : tensors) CutTensor(*tensor, limit, pieces);
  return pieces;
}

std::span<const TensorPiece> PieceRuns::Next() {
  size_t count = 0;
  uint64_t bytes = 0;
  while (count < pieces_.size()) {
    const TensorPiece& piece = pieces_[count];
    const bool again = count > 0 && pieces_[count - 1].tensor == piece.tensor;
    if (count > 0 && (again || bytes + piece.bytes > limit_)) break;
    bytes += piece.bytes;
    ++count;
  }
  const auto run = pieces_.first(count);
  pieces_ = pieces_.subspan(count);
  return run;
}

absl::StatusOr<std::span<const std::byte>> PieceMemory::Read(const CheckpointReader& reader,
                                                             std::span<const TensorPiece> run) {
  uint64_t bytes = 0;
  for (const TensorPiece& piece : run) bytes += piece.bytes;
  if (memory_.size() < bytes) {
    OUTLAST_ASSIGN_OR_RETURN(memory_, Mapping::Anonymous(bytes));
  }
  StateView state;
  uint64_t at = 0;
  for (const TensorPiece& piece : run) {
    Region region{piece.tensor->name, piece.tensor->dtype, piece.tensor->global,
                  piece.box.offset,   piece.box.extent,    {}};
    region.bytes = memory_.bytes().subspan(at, piece.bytes);
    state.regions.push_back(region);
    at += piece.bytes;
  }
  OUTLAST_ASSIGN_OR_RETURN(MatchReport report, reader.ReadState(state, Strictness::kMatching));
  report.unexpected.clear();
  OUTLAST_RETURN_IF_ERROR(report.ToStatus(reader.manifest().checkpoint));
  return memory_.bytes().first(bytes);
}

}  // namespace outlast
