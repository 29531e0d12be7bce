// Element types and shapes of tensors in checkpoints. Names and sizes are those of the safetensors
// format.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace outlast {

enum class DType : uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};
inline constexpr int kDTypeCount = 22;

// "F32", "BF16", "F8_E4M3", ...
std::string_view NameOf(DType dtype);
std::optional<DType> DTypeFromName(std::string_view name);
// Bits of one element: 4, 6, 8, 16, 32 or 64.
int BitsOf(DType dtype);

inline constexpr int kMaxDimensions = 16;

// Lengths (or offsets) of a tensor's dimensions, row-major; {} is a scalar. At most 16; the usual
// ones of up to four are kept inline, since large jobs hold millions.
class Shape {
 public:
  Shape() = default;
  // More than 16 dimensions make a shape that is_valid() and every user of shapes refuse.
  Shape(std::initializer_list<int64_t> dimensions)
      : Shape(std::span(dimensions.begin(), dimensions.size())) {}
  explicit Shape(std::span<const int64_t> dimensions);
  Shape(const Shape& other) : rank_(other.rank_), room_(other.room_) {
    if (is_long()) CopyLong(other);
  }
  Shape(Shape&& other) noexcept : rank_(other.rank_), room_(other.room_) { other.rank_ = 0; }
  Shape& operator=(const Shape& other) {
    if (this != &other) *this = Shape(other);
    return *this;
  }
  Shape& operator=(Shape&& other) noexcept {
    std::swap(rank_, other.rank_);
    std::swap(room_, other.room_);
    return *this;
  }
  ~Shape() {
    if (is_long()) delete[] room_.longer;
  }
  // `rank` zeros: the offset of a whole tensor.
  static Shape Zeros(int rank);

  int rank() const { return rank_; }
  bool is_valid() const { return rank_ <= kMaxDimensions; }
  std::span<const int64_t> dimensions() const { return {data(), size_t(is_valid() ? rank_ : 0)}; }
  int64_t operator[](int index) const { return data()[index]; }
  void set(int index, int64_t value) { (is_long() ? room_.longer : room_.inside)[index] = value; }

  // Product of the lengths; nullopt where one is negative or the product passes 2^63 - 1.
  std::optional<int64_t> elements() const;
  // "[50257, 768]"
  std::string text() const;

  friend bool operator==(const Shape& a, const Shape& b) {
    return a.rank_ == b.rank_ &&
           std::equal(a.dimensions().begin(), a.dimensions().end(), b.dimensions().begin());
  }

 private:
  static constexpr int kInside = 4;
  union Room {
    int64_t inside[kInside];
    int64_t* longer;  // kMaxDimensions of them
  };
  bool is_long() const { return rank_ > kInside && rank_ <= kMaxDimensions; }
  const int64_t* data() const { return is_long() ? room_.longer : room_.inside; }
  void CopyLong(const Shape& other);

  int rank_ = 0;
  Room room_{};
};

// Bytes of a packed tensor. kInvalidArgument: not a valid shape, an overflow, or a sub-byte type
// that fills no whole bytes.
absl::StatusOr<uint64_t> BytesOf(DType dtype, const Shape& shape);

}  // namespace outlast
