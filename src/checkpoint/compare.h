// How two checkpoints differ, whatever worlds wrote them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/reader.h"

namespace outlast {

// What two stretches of elements of one type differ in.
struct ValueDifference {
  uint64_t elements = 0;  // whose bytes differ; below a byte a type is counted by bytes
  // The largest |a - b|; for floating point types of at least a byte (of a complex one, of its
  // parts). Infinite or NaN where the values make it so; two NaNs are no distance apart.
  std::optional<double> max_abs;
};
// `a` and `b` have the same size, a multiple of the type's.
ValueDifference CompareValues(DType dtype, std::span<const std::byte> a,
                              std::span<const std::byte> b);

struct TensorDifference {
  enum class Kind : uint8_t { kMissing, kAdded, kType, kValues };
  std::string name;
  Kind kind = Kind::kValues;
  std::string a, b;  // "F32 [2, 3]"; empty where it is not
  ValueDifference values;
  uint64_t elements = 0;  // of the tensor
};
std::string_view NameOf(TensorDifference::Kind kind);  // "missing", "added", "type", "values"

struct Comparison {
  std::vector<TensorDifference> tensors;  // that differ, by name
  uint64_t equal_tensors = 0;
  std::vector<std::string> extras;  // "rank 0: 'cursor' differs"; only of equal worlds
  bool is_equal() const { return tensors.empty() && extras.empty(); }
};

// Compares names, types, shapes and every byte of all tensors (an alias like what it stands for),
// and the extras of each rank where both worlds have the same size. Each checkpoint is checked
// while it is read. kDataLoss: one is damaged, where. Reads each once; holds 128 MiB.
absl::StatusOr<Comparison> CompareCheckpoints(const CheckpointReader& a, const CheckpointReader& b,
                                              const OnBytes& on_bytes = {});

}  // namespace outlast
