#include "outlast/blackbox/step_log.h"

#include "blackbox/ring.h"
#include "blackbox/words.h"

namespace outlast {

StepLogWriter::StepLogWriter(Segment& segment) {
  const std::span<std::byte> area = segment.area(AreaKind::kStepLog);
  ring_ = {reinterpret_cast<StepRecord*>(area.data()), area.size() / sizeof(StepRecord)};
  next_seq_ = blackbox::NextSeq(std::span<const StepRecord>(ring_));
}

uint64_t StepLogWriter::Append(StepRecord record) {
  record.seq = next_seq_;
  record.zero = 0;
  record.crc = blackbox::RecordCrc(record);
  blackbox::StoreRecord(&ring_[(next_seq_ - 1) % kStepRecords], record);
  return next_seq_++;
}

namespace {

// The step log of a view, by seq.
class StepRing {
 public:
  explicit StepRing(const SegmentView& view) : view_(view), size_(view.rows(AreaKind::kStepLog)) {}

  uint64_t size() const { return size_; }
  // What lies in the place of `seq`: a whole record, perhaps of another lap; else one with seq 0.
  StepRecord At(uint64_t seq) const {
    const uint64_t index = (seq - 1) % size_;
    const auto record = view_.Row<StepRecord>(AreaKind::kStepLog, index);
    return blackbox::IsWhole(record, index, size_) ? record : StepRecord{};
  }

 private:
  const SegmentView& view_;
  uint64_t size_;
};

}  // namespace

StepLogRead ReadStepLog(const SegmentView& view, uint64_t from_seq) {
  StepLogRead result;
  uint64_t seq = from_seq == 0 ? 1 : from_seq;
  const StepRing ring(view);
  // Two laps are the most that an honest log needs; a hostile one is bounded by them.
  for (uint64_t looks = 0; looks < 2 * ring.size(); ++looks) {
    const StepRecord record = ring.At(seq);
    if (record.seq == seq) {
      result.records.push_back(record);
      ++seq;
    } else if (record.seq > seq) {
      // Overwritten by a later lap: the oldest record that can still be there is in the next place.
      const uint64_t oldest = record.seq - ring.size() + 1;
      result.lost += oldest - seq;
      seq = oldest;
    } else if (ring.At(seq + 1).seq > seq) {
      ++result.lost;  // torn, with a later one behind it
      ++seq;
    } else {
      break;
    }
  }
  result.next_seq = seq;
  return result;
}

}  // namespace outlast
