#include "outlast/elastic/job_memo.h"

#include "base/error.h"
#include "elastic/codec.h"

namespace outlast {

template <typename Codec>
void Fields(Codec& codec, std::pair<uint64_t, int>& root) {
  codec(root.first, root.second);
}
template <typename Codec>
void Fields(Codec& codec, SeenFault& fault) {
  codec(fault.fault_class, fault.root, fault.step, fault.node, fault.as_crash);
}
template <typename Codec>
void Fields(Codec& codec, FaultHistory& history) {
  codec(history.crashes, history.others, history.restarts, history.resources, history.roots,
        history.seen_faults, history.restart_times);
}
template <typename Codec>
void Fields(Codec& codec, JobMemo::Slot& slot) {
  codec(slot.where, slot.joined, slot.plain, slot.finished, slot.incarnation, slot.born,
        slot.attempts);
}
template <typename Codec>
void Fields(Codec& codec, JobMemo& memo) {
  codec(memo.generation, memo.last_incarnation, memo.is_ending, memo.any_joined,
        memo.step_committed, memo.progress_base, memo.late_failure, memo.final_save_failed,
        memo.history, memo.slots);
}

std::string EncodeJobMemo(const JobMemo& memo) {
  FieldWriter writer;
  Fields(writer, const_cast<JobMemo&>(memo));  // writing leaves it as it is
  return writer.Take();
}

absl::StatusOr<JobMemo> DecodeJobMemo(std::string_view bytes) {
  FieldReader reader(bytes);
  JobMemo memo;
  Fields(reader, memo);
  bool is_known = true;
  for (const JobMemo::Slot& slot : memo.slots)
    is_known = is_known && slot.where <= JobMemo::Where::kAbandoned;
  if (reader.at_end() && is_known) return memo;
  return Error(absl::StatusCode::kInvalidArgument, "memo of a job: {} bytes that are none",
               bytes.size());
}

}  // namespace outlast
