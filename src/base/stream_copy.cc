#include "base/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace outlast {

#ifdef __SSE2__

void StreamCopy(std::byte* to, const std::byte* from, size_t bytes) {
  constexpr size_t kLine = 64;
  constexpr size_t kWorthIt = 1024;
  if (bytes < kWorthIt) {
    std::memcpy(to, from, bytes);
    return;
  }
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    __m128i words[4];
    for (size_t i = 0; i < 4; ++i)
      words[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at) + i);
    for (size_t i = 0; i < 4; ++i)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at) + i, words[i]);
  }
  _mm_sfence();  // such stores are not ordered by a later release
  std::memcpy(to + at, from + at, bytes - at);
}

#else

void StreamCopy(std::byte* to, const std::byte* from, size_t bytes) {
  std::memcpy(to, from, bytes);
}

#endif

}  // namespace outlast
