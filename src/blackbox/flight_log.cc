#include "outlast/blackbox/flight_log.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "blackbox/claims.h"
#include "blackbox/ring.h"
#include "blackbox/words.h"

namespace outlast {
namespace {

// Takes a clear bit of `bits` below `count`; -1 when all are set.
int TakeBit(std::atomic<uint32_t>& bits, uint32_t count) {
  uint32_t found = bits.load(std::memory_order_relaxed);
  while (true) {
    const int bit = std::countr_one(found);
    if (bit >= static_cast<int>(count)) return -1;
    // Acquire: the records of the thread that gave the ring back are visible.
    if (bits.compare_exchange_weak(found, found | 1u << bit, std::memory_order_acquire)) return bit;
  }
}

}  // namespace

FlightLog FlightLog::ForThisThread(Segment& segment) {
  FlightLog log;
  const int ring = TakeBit(segment.claims_->rings, kFlightRings);
  if (ring < 0) {
    __atomic_fetch_add(&segment.header().flight_overflow, 1, __ATOMIC_RELAXED);
    return log;
  }
  const size_t bytes = kFlightRecordsPerRing * sizeof(FlightRecord);
  log.ring_ = reinterpret_cast<FlightRecord*>(segment.area(AreaKind::kFlightRings).data() + ring * bytes);
  log.header_ = &segment.header();
  log.claimed_ = &segment.claims_->rings;
  log.next_seq_ = blackbox::NextSeq(std::span<const FlightRecord>(log.ring_, kFlightRecordsPerRing));
  log.ring_number_ = static_cast<uint32_t>(ring);
  log.thread_ = static_cast<uint32_t>(gettid());
  return log;
}

FlightLog::FlightLog(FlightLog&& other) noexcept { *this = std::move(other); }

FlightLog& FlightLog::operator=(FlightLog&& other) noexcept {
  std::swap(ring_, other.ring_);
  std::swap(header_, other.header_);
  std::swap(claimed_, other.claimed_);
  std::swap(next_seq_, other.next_seq_);
  std::swap(ring_number_, other.ring_number_);
  std::swap(thread_, other.thread_);
  return *this;
}

FlightLog::~FlightLog() {
  if (claimed_ != nullptr) claimed_->fetch_and(~(1u << ring_number_), std::memory_order_release);
}

void FlightLog::Record(const FlightEvent& event) {
  if (ring_ == nullptr) return;
  FlightRecord record = {.seq = next_seq_,
                         .t_ns = event.t_ns,
                         .kind = static_cast<uint16_t>(event.kind),
                         .comm = event.comm,
                         .signature = event.signature,
                         .op_seq = event.op_seq,
                         .bytes = event.bytes,
                         .aux = event.aux,
                         .call_site = event.call_site,
                         .thread = thread_,
                         .generation = static_cast<uint32_t>(LoadWord(header_->generation)),
                         .crc = 0};
  record.crc = blackbox::RecordCrc(record);
  blackbox::StoreRecord(&ring_[(next_seq_ - 1) % kFlightRecordsPerRing], record);
  ++next_seq_;
}

uint32_t FlightRingCount(const SegmentView& view) {
  return static_cast<uint32_t>(std::min<uint64_t>(view.rows(AreaKind::kFlightRings), UINT32_MAX));
}

FlightRing ReadFlightRing(const SegmentView& view, uint32_t ring) {
  FlightRing result;
  if (ring >= FlightRingCount(view)) return result;
  const uint64_t size = view.sub_rows(AreaKind::kFlightRings, sizeof(FlightRecord));
  for (uint64_t i = 0; i < size; ++i) {
    const auto record = view.SubRow<FlightRecord>(AreaKind::kFlightRings, ring, i);
    if (record.seq != 0 && blackbox::IsWhole(record, i, size)) result.records.push_back(record);
  }
  if (result.records.empty()) return result;
  std::sort(result.records.begin(), result.records.end(),
            [](const FlightRecord& a, const FlightRecord& b) { return a.seq < b.seq; });
  const uint64_t oldest = result.records.front().seq;
  result.overwritten = oldest - 1;
  result.lost = result.records.back().seq - oldest + 1 - result.records.size();
  return result;
}

}  // namespace outlast
