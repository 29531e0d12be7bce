// CRC32C of a record of few words. ISA-L's call costs half of a flight record's 30 ns, since it is
// made for long buffers; on short ones the instruction alone is twice as fast.
#pragma once

#include <cstdint>
#include <span>

namespace outlast::blackbox {

// The CRC32C of all bytes of `words` but the last four.
uint32_t CrcOfWords(std::span<const uint64_t> words);

}  // namespace outlast::blackbox
