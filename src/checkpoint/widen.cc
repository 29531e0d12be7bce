#include "checkpoint/widen.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace outlast {
namespace {

// What stands for a type without a C++ type: its bits, and how to make a float of them.
struct Bf16 {
  uint16_t bits;
  operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};

// A small float: sign, kExponent bits, kMantissa bits. kIeee: the largest exponent is infinity and
// NaN; else only all ones is NaN (F8_E4M3).
template <typename Bits, int kExponent, int kMantissa, bool kIeee>
struct SmallFloat {
  Bits bits;
  operator float() const {
    constexpr int kBias = (1 << (kExponent - 1)) - 1;
    constexpr int kTop = (1 << kExponent) - 1;
    const int exponent = (bits >> kMantissa) & kTop;
    const int mantissa = bits & ((1 << kMantissa) - 1);
    float value = 0;
    if (kIeee && exponent == kTop) {
      // The payload moves up, as hardware does it.
      const uint32_t payload = 0x7f800000u | static_cast<uint32_t>(mantissa) << (23 - kMantissa);
      value = std::bit_cast<float>(payload);
    } else if (!kIeee && exponent == kTop && mantissa == (1 << kMantissa) - 1) {
      value = std::numeric_limits<float>::quiet_NaN();
    } else if (exponent == 0) {
      value = std::ldexp(static_cast<float>(mantissa), 1 - kBias - kMantissa);
    } else {
      value =
          std::ldexp(static_cast<float>(mantissa | 1 << kMantissa), exponent - kBias - kMantissa);
    }
    return std::copysign(value, bits >> (kExponent + kMantissa) != 0 ? -1.0f : 1.0f);
  }
};
using F16 = SmallFloat<uint16_t, 5, 10, true>;
using E5M2 = SmallFloat<uint8_t, 5, 2, true>;
using E4M3 = SmallFloat<uint8_t, 4, 3, false>;

template <typename T>
auto Number(T value) {
  if constexpr (std::is_class_v<T>) {
    return static_cast<float>(value);
  } else {
    return value;
  }
}

template <typename From, typename To>
void Convert(const std::byte* from, std::byte* to, size_t elements) {
  for (size_t i = 0; i < elements; ++i) {
    From value;
    std::memcpy(&value, from + i * sizeof(From), sizeof value);
    const auto wide = static_cast<To>(Number(value));  // NOLINT(bugprone-signed-char-misuse): I8
    std::memcpy(to + i * sizeof(To), &wide, sizeof wide);
  }
}

struct Pair {
  DType from, to;
  WidenFunction widen;
};

constexpr Pair kPairs[] = {
    {DType::kF8E5M2, DType::kF32, Convert<E5M2, float>},
    {DType::kF8E5M2, DType::kF64, Convert<E5M2, double>},
    {DType::kF8E4M3, DType::kF32, Convert<E4M3, float>},
    {DType::kF8E4M3, DType::kF64, Convert<E4M3, double>},
    {DType::kBF16, DType::kF32, Convert<Bf16, float>},
    {DType::kBF16, DType::kF64, Convert<Bf16, double>},
    {DType::kF16, DType::kF32, Convert<F16, float>},
    {DType::kF16, DType::kF64, Convert<F16, double>},
    {DType::kF32, DType::kF64, Convert<float, double>},
    {DType::kI8, DType::kI16, Convert<int8_t, int16_t>},
    {DType::kU8, DType::kU16, Convert<uint8_t, uint16_t>},
    {DType::kU8, DType::kI16, Convert<uint8_t, int16_t>},
    {DType::kI8, DType::kI32, Convert<int8_t, int32_t>},
    {DType::kU8, DType::kU32, Convert<uint8_t, uint32_t>},
    {DType::kU8, DType::kI32, Convert<uint8_t, int32_t>},
    {DType::kI8, DType::kI64, Convert<int8_t, int64_t>},
    {DType::kU8, DType::kU64, Convert<uint8_t, uint64_t>},
    {DType::kU8, DType::kI64, Convert<uint8_t, int64_t>},
    {DType::kI16, DType::kI32, Convert<int16_t, int32_t>},
    {DType::kU16, DType::kU32, Convert<uint16_t, uint32_t>},
    {DType::kU16, DType::kI32, Convert<uint16_t, int32_t>},
    {DType::kI16, DType::kI64, Convert<int16_t, int64_t>},
    {DType::kU16, DType::kU64, Convert<uint16_t, uint64_t>},
    {DType::kU16, DType::kI64, Convert<uint16_t, int64_t>},
    {DType::kI32, DType::kI64, Convert<int32_t, int64_t>},
    {DType::kU32, DType::kU64, Convert<uint32_t, uint64_t>},
    {DType::kU32, DType::kI64, Convert<uint32_t, int64_t>},
};

}  // namespace

WidenFunction WidenerOf(DType from, DType to) {
  for (const Pair& pair : kPairs) {
    if (pair.from == from && pair.to == to) return pair.widen;
  }
  return nullptr;
}

}  // namespace outlast
