// The coordinator's journal: what must be on disk before anybody is told.
//
//   record   u32 length of the payload · u32 crc32c of all that follows · u64 index (0, 1, ...) ·
//            u64 incarnation of the coordinator · u64 generation · payload
//   payload  u8 kind (the place in JournalPayload) · its fields in the order of their declaration;
//            integers little-endian, durations in nanoseconds, text and lists with a u32 count
//
// A record is appended and synced before any message that follows from it is sent. A torn tail is
// what a crash leaves, and is cut when the journal is opened.
//
// So that a job of weeks has a journal of a bounded size, a *base* may stand for all records up to
// one, in that one's place: it has its index, the kind 255, and the state after it. Whoever reads
// begins with the newest base.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "outlast/elastic/coordinator_state.h"

namespace outlast {

// A longer payload is neither written nor read.
inline constexpr size_t kMaxJournalPayload = 4 << 20;
inline constexpr size_t kJournalHeaderBytes = 32;

// The bytes of `record`, which is to be the next one of `state`, before `state` applies it.
std::string EncodeJournalRecord(const CoordinatorState& state, const JournalPayload& record);

// A base in place of all records that `state` has, of which there is one at least.
std::string EncodeJournalBase(const CoordinatorState& state);

struct JournalContent {
  CoordinatorState state;
  size_t valid_bytes = 0;  // the rest is a torn tail: cut it
  // What is wrong with the tail, for people; empty when all of it is whole.
  std::string torn;
};

// Folds all whole records that follow those of `from`. kDataLoss: not a torn tail but damage, such
// as a bad record with whole ones after it, a bad base (it is written whole or not at all), an
// index that does not follow, or a record of an older incarnation after a newer one's; the message
// names the record and its offset.
absl::StatusOr<JournalContent> ReadJournal(std::string_view bytes, CoordinatorState from = {});

}  // namespace outlast
