#include "outlast/checkpoint/dtype.h"

#include <algorithm>
#include <array>

#include "base/error.h"

namespace outlast {
namespace {

struct Facts {
  std::string_view name;
  int bits;
};

constexpr std::array<Facts, kDTypeCount> kFacts = {{
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
}};

}  // namespace

std::string_view NameOf(DType dtype) { return kFacts[static_cast<size_t>(dtype)].name; }

int BitsOf(DType dtype) { return kFacts[static_cast<size_t>(dtype)].bits; }

std::optional<DType> DTypeFromName(std::string_view name) {
  const auto found = std::find_if(kFacts.begin(), kFacts.end(),
                                  [&](const Facts& facts) { return facts.name == name; });
  if (found == kFacts.end()) return std::nullopt;
  return static_cast<DType>(found - kFacts.begin());
}

Shape::Shape(std::span<const int64_t> dimensions)
    : rank_(static_cast<int>(std::min<size_t>(dimensions.size(), 1000))) {
  if (is_long()) room_.longer = new int64_t[kMaxDimensions]{};
  if (is_valid()) std::ranges::copy(dimensions, is_long() ? room_.longer : room_.inside);
}

void Shape::CopyLong(const Shape& other) {
  room_.longer = new int64_t[kMaxDimensions];
  std::copy_n(other.room_.longer, kMaxDimensions, room_.longer);
}

Shape Shape::Zeros(int rank) {
  Shape shape;
  shape.rank_ = rank;
  if (shape.is_long()) shape.room_.longer = new int64_t[kMaxDimensions]{};
  return shape;
}

std::optional<int64_t> Shape::elements() const {
  if (!is_valid()) return std::nullopt;
  int64_t product = 1;
  for (const int64_t length : dimensions()) {
    if (length < 0 || __builtin_mul_overflow(product, length, &product)) return std::nullopt;
  }
  return product;
}

std::string Shape::text() const {
  if (!is_valid()) return fmt::format("[{} dimensions]", rank_);
  return fmt::format("[{}]", fmt::join(dimensions(), ", "));
}

absl::StatusOr<uint64_t> BytesOf(DType dtype, const Shape& shape) {
  const std::optional<int64_t> elements = shape.elements();
  int64_t bits = 0;
  if (!elements.has_value() || __builtin_mul_overflow(*elements, BitsOf(dtype), &bits)) {
    return Error(
        absl::StatusCode::kInvalidArgument,
        "shape {} of {}: at most {} dimensions, none negative, and fewer than 2^60 bytes wanted",
        shape.text(), NameOf(dtype), kMaxDimensions);
  }
  if (bits % 8 != 0) {
    return Error(absl::StatusCode::kInvalidArgument, "shape {} of {}: {} bits, whole bytes wanted",
                 shape.text(), NameOf(dtype), bits);
  }
  return static_cast<uint64_t>(bits) / 8;
}

}  // namespace outlast
