#include "blackbox/record_crc.h"

#include "outlast/base/crc32c.h"

namespace outlast::blackbox {
namespace {

#if defined(__x86_64__)
// False until static initialisation, which is slower and no less right.
const bool kHasInstruction = __builtin_cpu_supports("sse4.2");

__attribute__((target("sse4.2"))) uint32_t CrcByInstruction(std::span<const uint64_t> words) {
  uint64_t crc = 0xffffffff;
  for (const uint64_t word : words.first(words.size() - 1)) crc = __builtin_ia32_crc32di(crc, word);
  return ~__builtin_ia32_crc32si(static_cast<uint32_t>(crc), static_cast<uint32_t>(words.back()));
}
#endif

}  // namespace

uint32_t CrcOfWords(std::span<const uint64_t> words) {
#if defined(__x86_64__)
  if (kHasInstruction) return CrcByInstruction(words);
#endif
  const std::span<const std::byte> bytes = std::as_bytes(words);
  return Crc32c(bytes.first(bytes.size() - sizeof(uint32_t)));
}

}  // namespace outlast::blackbox
