// Numbers as people read them.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <string>

namespace outlast {

// Three digits that count, no exponent and no needless zeros: 2271, 33.6, 0.05. What is not 0 and
// below 0.001 is "0.001" at the least.
inline std::string PlainNumber(double value) {
  if (std::abs(value) >= 99.95) return fmt::format("{:.0f}", value);
  if (value != 0 && std::abs(value) < 0.001) return value < 0 ? "-0.001" : "0.001";
  return fmt::format("{:.3g}", value);
}

}  // namespace outlast
