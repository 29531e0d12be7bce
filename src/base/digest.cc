#include "outlast/base/digest.h"

// The one-shot SHA256() of OpenSSL 3 reads configuration files and loads providers first: 0.8 ms in
// each new process, on the path of a restart. These functions do not; 3.0 calls them deprecated.
#define OPENSSL_SUPPRESS_DEPRECATED
// HMAC() of OpenSSL loads them too, so HMAC is composed here.
#include <openssl/crypto.h>
#include <openssl/sha.h>

namespace outlast {
namespace {

Sha256Digest Sha256OfTwo(std::string_view first, std::string_view second) {
  Sha256Digest digest;
  SHA256_CTX context;
  SHA256_Init(&context);
  SHA256_Update(&context, first.data(), first.size());
  SHA256_Update(&context, second.data(), second.size());
  SHA256_Final(reinterpret_cast<unsigned char*>(digest.data()), &context);
  return digest;
}

std::string_view AsText(const Sha256Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace

Sha256Digest Sha256(std::string_view bytes) { return Sha256OfTwo(bytes, {}); }

Sha256Digest HmacSha256(std::string_view key, std::string_view message) {
  constexpr size_t kBlockBytes = 64;
  constexpr char kInner = 0x36, kOuter = 0x5c;
  const Sha256Digest key_digest = Sha256(key);
  if (key.size() > kBlockBytes) key = AsText(key_digest);
  std::string inner(kBlockBytes, kInner), outer(kBlockBytes, kOuter);
  for (size_t i = 0; i < key.size(); ++i) {
    inner[i] = static_cast<char>(inner[i] ^ key[i]);
    outer[i] = static_cast<char>(outer[i] ^ key[i]);
  }
  return Sha256OfTwo(outer, AsText(Sha256OfTwo(inner, message)));
}

bool IsEqualSecret(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
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
