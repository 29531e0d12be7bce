#include "outlast/base/crc32c.h"

#include <isa-l/crc.h>

#include <algorithm>

namespace outlast {

void Crc32cStream::Update(std::span<const std::byte> bytes) {
  // ISA-L takes an int length, neither seeds nor inverts, and does not write through its non-const
  // pointer.
  constexpr size_t kLongest = size_t{1} << 30;
  while (!bytes.empty()) {
    const size_t count = std::min(bytes.size(), kLongest);
    auto* data = const_cast<unsigned char*>(reinterpret_cast<const unsigned char*>(bytes.data()));
    register_ = crc32_iscsi(data, static_cast<int>(count), register_);
    bytes = bytes.subspan(count);
  }
}

uint32_t Crc32c(std::span<const std::byte> bytes) {
  Crc32cStream stream;
  stream.Update(bytes);
  return stream.value();
}

uint32_t Crc32c(std::string_view text) { return Crc32c(std::as_bytes(std::span(text))); }

}  // namespace outlast
