// 16-byte identities: job id, run id, boot id.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace outlast {

struct Id128 {
  std::array<std::byte, 16> bytes{};

  // From the kernel's random source.
  static Id128 Random();
  // The first 16 bytes of SHA-256 of `name`.
  static Id128 FromName(std::string_view name);
  // 32 lower-case hex digits. kInvalidArgument: anything else.
  static absl::StatusOr<Id128> FromHex(std::string_view hex);

  std::string hex() const;
  bool is_zero() const { return *this == Id128{}; }
  auto operator<=>(const Id128&) const = default;
};

// This boot of the machine (/proc/sys/kernel/random/boot_id); zero where that cannot be read.
Id128 BootId();

// 64 bits from the kernel's random source.
uint64_t RandomU64();

}  // namespace outlast
