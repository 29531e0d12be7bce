#include "outlast/base/digest.h"

// The one-shot SHA256() of OpenSSL 3 reads configuration files and loads providers first: 0.8 ms in
// each new process, on the path of a restart. These functions do not; 3.0 calls them deprecated.
#define OPENSSL_SUPPRESS_DEPRECATED
#include <openssl/sha.h>

namespace outlast {

Sha256Digest Sha256(std::string_view bytes) {
  Sha256Digest digest;
  SHA256_CTX context;
  SHA256_Init(&context);
  SHA256_Update(&context, bytes.data(), bytes.size());
  SHA256_Final(reinterpret_cast<unsigned char*>(digest.data()), &context);
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
