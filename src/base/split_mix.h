// SplitMix64's finaliser (Steele, Lea and Flood 2014): numbers that differ in a bit give numbers
// that differ in half of them.
#pragma once

#include <cstdint>

namespace outlast {

// SplitMix64's step: 2^64 over the golden ratio, made odd.
inline constexpr uint64_t kGoldenGamma = 0x9e3779b97f4a7c15;

constexpr uint64_t Mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

}  // namespace outlast
