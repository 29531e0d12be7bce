// SHA-256, for names, plans and content that outlives a process, and proofs by it.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace outlast {

using Sha256Digest = std::array<std::byte, 32>;

Sha256Digest Sha256(std::string_view bytes);

// HMAC-SHA256 (RFC 2104): who can make it for `message` has `key`, which may be of any length.
// Compare it by IsEqualSecret.
Sha256Digest HmacSha256(std::string_view key, std::string_view message);

// Whether the two are equal; takes as long wherever they differ, so that nobody finds a secret byte
// by byte. Their sizes are no secret.
bool IsEqualSecret(std::span<const std::byte> a, std::span<const std::byte> b);

// Lower-case hex of `bytes`.
std::string ToHex(std::span<const std::byte> bytes);

}  // namespace outlast
