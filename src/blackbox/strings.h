// The interned strings and rank lists of a segment. Entries are reserved by a compare-and-swap of the area's first word,
// the bytes used, filled, and published by their own first word: writers need no lock, and a killed one leaves a gap.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace outlast::blackbox {

// FNV-1a 64 of `text` folded to 32 bits, never 0.
uint32_t IdOf(std::string_view text);

// The index of `text`, added when it is not there; 0 when there is no room.
uint16_t InternString(std::span<std::byte> area, std::string_view text);
// The text at `index`, checked against its id; empty when it leads nowhere. `area` may be hostile.
std::string StringAt(std::span<const std::byte> area, uint32_t index);

// Adds a rank list, where there is room, and returns its digest.
uint64_t InternMembers(std::span<std::byte> area, std::span<const uint32_t> ranks);
// The rank list with this digest; empty when it is not there. `area` may be hostile.
std::vector<uint32_t> MembersOf(std::span<const std::byte> area, uint64_t digest);

}  // namespace outlast::blackbox
