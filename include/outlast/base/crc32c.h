// CRC32C (Castagnoli), the checksum of every record and chunk: Crc32c("123456789") is 0xe3069283.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace outlast {

// The checksum of `bytes`. 22-25 GB/s where the processor has SSE 4.2 and PCLMUL (ISA-L).
uint32_t Crc32c(std::span<const std::byte> bytes);
uint32_t Crc32c(std::string_view text);

// Checksum over pieces: feed them in order, then read value().
class Crc32cStream {
 public:
  void Update(std::span<const std::byte> bytes);
  uint32_t value() const { return ~register_; }

 private:
  uint32_t register_ = 0xffffffff;
};

}  // namespace outlast
