// Rings of records that start with a u64 seq, from 1, and end with a u32 CRC32C of all before it. Record n lies at
// (n - 1) % size.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "blackbox/words.h"
#include "outlast/base/crc32c.h"

namespace outlast::blackbox {

template <typename Record>
uint32_t RecordCrc(const Record& record) {
  return Crc32c(std::as_bytes(std::span(&record, 1)).first(sizeof(Record) - sizeof(uint32_t)));
}

// Whether `record`, found at `index`, is whole and in its place.
template <typename Record>
bool IsWhole(const Record& record, uint64_t index, uint64_t size) {
  return record.seq != 0 && (record.seq - 1) % size == index && record.crc == RecordCrc(record);
}

// The seq after the last whole record, for a writer that goes on where a dead one stopped. Slots up to the head belong to
// one lap, those after it to the lap before: so this looks at a few slots, and does not touch the pages of an empty ring.
// At most one slot is torn, the one at the head.
template <typename Record>
uint64_t NextSeq(std::span<const Record> ring) {
  const uint64_t size = ring.size();
  const auto seq_at = [&](uint64_t index) {
    const Record record = LoadRecord<Record>(&ring[index]);
    return IsWhole(record, index, size) ? record.seq : 0;
  };
  const uint64_t first = seq_at(0);
  if (first == 0) return LoadWordAt(&ring[0]) == 0 ? 1 : seq_at(size - 1) + 1;
  uint64_t good = 0;
  uint64_t bad = size;
  while (bad - good > 1) {
    const uint64_t middle = good + (bad - good) / 2;
    (seq_at(middle) == first + middle ? good : bad) = middle;
  }
  return first + good + 1;
}

}  // namespace outlast::blackbox
