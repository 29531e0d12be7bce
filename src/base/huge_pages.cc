#include "base/huge_pages.h"

#include <sys/mman.h>

#include <cstdint>

namespace outlast {
namespace {

#ifdef MADV_COLLAPSE
constexpr int kCollapse = MADV_COLLAPSE;
#else
constexpr int kCollapse = 25;  // the C library may be older than the kernel
#endif

constexpr size_t kSmallPageBytes = 4096;

}  // namespace

void CollapseIntoHugePages(std::byte* data, size_t bytes) {
  const size_t whole = bytes / kHugePageBytes * kHugePageBytes;
  if (whole == 0 || reinterpret_cast<uintptr_t>(data) % kHugePageBytes != 0) return;
  // The kernel collapses what has at least one page; the fewer, the less is copied. Not touched by
  // hand: where memory has run out, that would be a signal.
  for (size_t at = 0; at < whole; at += kHugePageBytes) {
    if (madvise(data + at, kSmallPageBytes, MADV_POPULATE_WRITE) != 0) return;
  }
  madvise(data, whole, kCollapse);
}

}  // namespace outlast
