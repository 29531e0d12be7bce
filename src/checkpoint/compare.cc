#include "checkpoint/compare.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <set>

#include "base/error.h"
#include "checkpoint/float_types.h"
#include "checkpoint/tensor_pieces.h"

namespace outlast {
namespace {

enum class Specials : uint8_t {
  kIeee,    // the largest exponent holds infinities and NaNs
  kFinite,  // no infinities; NaN is all ones
  kFnuz,    // no infinities, no -0: that pattern is the NaN
};

// The value of a small floating point number, sign first.
double Decode(uint32_t bits, int exponent_bits, int mantissa_bits, int bias, Specials specials) {
  const uint32_t mantissa_mask = (1u << mantissa_bits) - 1;
  const uint32_t exponent_mask = (1u << exponent_bits) - 1;
  const uint32_t mantissa = bits & mantissa_mask;
  const uint32_t exponent = (bits >> mantissa_bits) & exponent_mask;
  const bool negative = (bits >> (mantissa_bits + exponent_bits)) & 1;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const bool is_the_one_nan =
      (specials == Specials::kFinite && exponent == exponent_mask && mantissa == mantissa_mask) ||
      (specials == Specials::kFnuz && negative && exponent == 0 && mantissa == 0);
  double value = 0;
  if (is_the_one_nan) {
    value = nan;
  } else if (specials == Specials::kIeee && exponent == exponent_mask) {
    value = mantissa == 0 ? std::numeric_limits<double>::infinity() : nan;
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    value = std::ldexp(mantissa | (1u << mantissa_bits),
                       static_cast<int>(exponent) - bias - mantissa_bits);
  }
  return negative ? -value : value;
}

// OCP 8-bit floating point, revision 1.0; the FNUZ forms: arXiv 2206.02915. E8M0 is a bare
// exponent.
double DecodeByte(DType dtype, uint8_t bits) {
  switch (dtype) {
    case DType::kF8E5M2:
      return Decode(bits, 5, 2, 15, Specials::kIeee);
    case DType::kF8E4M3:
      return Decode(bits, 4, 3, 7, Specials::kFinite);
    case DType::kF8E5M2Fnuz:
      return Decode(bits, 5, 2, 16, Specials::kFnuz);
    case DType::kF8E4M3Fnuz:
      return Decode(bits, 4, 3, 8, Specials::kFnuz);
    default:
      return bits == 0xff ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, bits - 127);
  }
}

double Distance(double a, double b) {
  if (std::isnan(a) && std::isnan(b)) return 0;
  return std::abs(a - b);
}

// NaN beats all, once it is there.
double Larger(double a, double b) { return std::isnan(a) || a > b ? a : b; }

// Elements of `Bits`, whose values `value` gives; a null one: no distance is known.
template <typename Bits, typename Value>
ValueDifference Count(std::span<const std::byte> a, std::span<const std::byte> b, Value value) {
  constexpr bool kHasValue = !std::is_null_pointer_v<Value>;
  ValueDifference difference;
  if constexpr (kHasValue) difference.max_abs = 0;
  for (size_t at = 0; at + sizeof(Bits) <= a.size(); at += sizeof(Bits)) {
    Bits x, y;
    std::memcpy(&x, a.data() + at, sizeof x);
    std::memcpy(&y, b.data() + at, sizeof y);
    if (x == y) continue;
    ++difference.elements;
    if constexpr (kHasValue)
      difference.max_abs = Larger(*difference.max_abs, Distance(value(x), value(y)));
  }
  return difference;
}

template <typename Float, typename Bits>
double As(Bits bits) {
  static_assert(sizeof(Float) == sizeof(Bits));
  Float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

ValueDifference CountComplex(std::span<const std::byte> a, std::span<const std::byte> b) {
  ValueDifference difference = Count<uint32_t>(a, b, As<float, uint32_t>);
  difference.elements = Count<uint64_t>(a, b, nullptr).elements;
  return difference;
}

std::string TypeText(const SavedTensor& tensor) {
  return fmt::format("{} {}", NameOf(tensor.dtype), tensor.global.text());
}

// All names of a checkpoint, and for an alias what it stands for.
std::map<std::string, std::string> NamesOf(const CheckpointReader& reader) {
  std::map<std::string, std::string> names;
  for (const SavedTensor& tensor : reader.tensors()) names.emplace(tensor.name, "");
  for (const auto& [name, of] : reader.aliases()) names.emplace(name, of);
  return names;
}

struct Common {
  std::vector<SavedTensor> tensors;  // under the names that are compared; without parts
  uint64_t same_aliases = 0;         // of tensors that are compared under their own name
};

// Sorts all names into what differs already and what is to be read.
Common CompareNames(const CheckpointReader& a, const CheckpointReader& b, Comparison& result) {
  const auto names_a = NamesOf(a), names_b = NamesOf(b);
  std::set<std::string> names;
  for (const auto* list : {&names_a, &names_b})
    for (const auto& [name, of] : *list) names.insert(name);
  Common common;
  for (const std::string& name : names) {
    const SavedTensor *in_a = a.Find(name), *in_b = b.Find(name);
    TensorDifference difference;
    difference.name = name;
    if (in_a != nullptr) difference.a = TypeText(*in_a);
    if (in_b != nullptr) difference.b = TypeText(*in_b);
    if (in_a == nullptr || in_b == nullptr) {
      difference.kind =
          in_a == nullptr ? TensorDifference::Kind::kAdded : TensorDifference::Kind::kMissing;
      result.tensors.push_back(std::move(difference));
    } else if (difference.a != difference.b) {
      difference.kind = TensorDifference::Kind::kType;
      result.tensors.push_back(std::move(difference));
    } else if (const std::string& of = names_a.at(name); !of.empty() && of == names_b.at(name)) {
      ++common.same_aliases;
    } else {
      common.tensors.push_back({name, in_a->dtype, in_a->global, {}});
    }
  }
  return common;
}

absl::Status CompareBytes(const CheckpointReader& a, const CheckpointReader& b,
                          const Common& common, const OnBytes& on_bytes, Comparison& result) {
  std::vector<const SavedTensor*> tensors;
  for (const SavedTensor& tensor : common.tensors) tensors.push_back(&tensor);
  const std::vector<TensorPiece> pieces = CutTensors(tensors, kPieceBytes);
  std::map<std::string_view, TensorDifference> found;
  PieceRuns runs(pieces, kPieceBytes);
  PieceMemory memory_a, memory_b;
  for (auto run = runs.Next(); !run.empty(); run = runs.Next()) {
    OUTLAST_ASSIGN_OR_RETURN(const auto bytes_a, memory_a.Read(a, run));
    OUTLAST_ASSIGN_OR_RETURN(const auto bytes_b, memory_b.Read(b, run));
    if (on_bytes) on_bytes(bytes_a.size());
    uint64_t at = 0;
    for (const TensorPiece& piece : run) {
      const auto in_a = bytes_a.subspan(at, piece.bytes), in_b = bytes_b.subspan(at, piece.bytes);
      at += piece.bytes;
      if (std::memcmp(in_a.data(), in_b.data(), in_a.size()) == 0) continue;
      TensorDifference& difference = found[piece.tensor->name];
      const ValueDifference values = CompareValues(piece.tensor->dtype, in_a, in_b);
      difference.name = piece.tensor->name;
      difference.a = difference.b = TypeText(*piece.tensor);
      difference.elements = static_cast<uint64_t>(piece.tensor->global.elements().value_or(0));
      difference.values.elements += values.elements;
      if (values.max_abs.has_value())
        difference.values.max_abs = Larger(*values.max_abs, difference.values.max_abs.value_or(0));
    }
  }
  result.equal_tensors = common.same_aliases + common.tensors.size() - found.size();
  for (auto& [name, difference] : found) result.tensors.push_back(std::move(difference));
  return absl::OkStatus();
}

void CompareExtras(const CheckpointReader& a, const CheckpointReader& b, Comparison& result) {
  if (a.manifest().world != b.manifest().world) return;  // whose would be compared with whose?
  for (uint32_t rank = 0; rank < a.manifest().world; ++rank) {
    const Extras &in_a = a.receipts()[rank].extra, &in_b = b.receipts()[rank].extra;
    std::set<std::string> keys;
    for (const Extras* extras : {&in_a, &in_b})
      for (const auto& [key, value] : *extras) keys.insert(key);
    for (const std::string& key : keys) {
      const auto x = in_a.find(key), y = in_b.find(key);
      const bool both = x != in_a.end() && y != in_b.end();
      if (both && x->second == y->second) continue;
      result.extras.push_back(fmt::format(
          "rank {}: '{}' {}", rank, key,
          both ? "differs" : (x == in_a.end() ? "is only in the second" : "is only in the first")));
    }
  }
}

}  // namespace

ValueDifference CompareValues(DType dtype, std::span<const std::byte> a,
                              std::span<const std::byte> b) {
  switch (dtype) {
    case DType::kF64:
      return Count<uint64_t>(a, b, As<double, uint64_t>);
    case DType::kF32:
      return Count<uint32_t>(a, b, As<float, uint32_t>);
    case DType::kC64:
      return CountComplex(a, b);
    case DType::kF16:
      return Count<uint16_t>(
          a, b, [](uint16_t bits) { return Decode(bits, 5, 10, 15, Specials::kIeee); });
    case DType::kBF16:
      return Count<uint16_t>(
          a, b, [](uint16_t bits) { return As<float, uint32_t>(uint32_t{bits} << 16); });
    default:
      break;
  }
  if (IsFloat(dtype))
    return Count<uint8_t>(a, b, [dtype](uint8_t bits) { return DecodeByte(dtype, bits); });
  switch (BitsOf(dtype)) {
    case 64:
      return Count<uint64_t>(a, b, nullptr);
    case 32:
      return Count<uint32_t>(a, b, nullptr);
    case 16:
      return Count<uint16_t>(a, b, nullptr);
    default:
      return Count<uint8_t>(a, b, nullptr);
  }
}

std::string_view NameOf(TensorDifference::Kind kind) {
  constexpr std::string_view kNames[] = {"missing", "added", "type", "values"};
  return kNames[static_cast<size_t>(kind)];
}

absl::StatusOr<Comparison> CompareCheckpoints(const CheckpointReader& a, const CheckpointReader& b,
                                              const OnBytes& on_bytes) {
  Comparison result;
  const Common common = CompareNames(a, b, result);
  OUTLAST_RETURN_IF_ERROR(CompareBytes(a, b, common, on_bytes, result));
  std::ranges::sort(result.tensors, {}, &TensorDifference::name);
  CompareExtras(a, b, result);
  return result;
}

}  // namespace outlast
