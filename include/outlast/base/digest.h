// SHA-256, for names, plans and content that outlives a process.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace outlast {

using Sha256Digest = std::array<std::byte, 32>;

Sha256Digest Sha256(std::string_view bytes);

// Lower-case hex of `bytes`.
std::string ToHex(std::span<const std::byte> bytes);

}  // namespace outlast
