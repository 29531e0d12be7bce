#include "outlast/base/digest.h"

#include <openssl/sha.h>

namespace outlast {

Sha256Digest Sha256(std::string_view bytes) {
  Sha256Digest digest;
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
         reinterpret_cast<unsigned char*>(digest.data()));
  return digest;
}

std::string ToHex(std::span<const std::byte> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  hex.reserve(bytes.size() * 2);
  for (const std::byte byte : bytes) {
    hex.push_back(kDigits[std::to_integer<int>(byte) >> 4]);
    hex.push_back(kDigits[std::to_integer<int>(byte) & 15]);
  }
  return hex;
}

}  // namespace outlast
