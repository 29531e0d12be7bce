#include "checkpoint/buffer_count.h"

#include "base/error.h"

namespace outlast {

absl::StatusOr<int> BufferCountFor(int wanted, const BufferRoom& room) {
  const int count = wanted != 0 ? wanted : 3 * room.buffers <= room.memory / 2 ? 3 : 2;
  const uint64_t needed = static_cast<uint64_t>(count) * room.buffers + room.state;
  if (room.memory == 0 || needed <= room.memory) return count;
  return Error(absl::StatusCode::kResourceExhausted,
               "{} snapshots of this node's ranks: {} bytes wanted, {} for each and {} for their "
               "state; the machine, or its control group, has {}{}",
               count, needed, room.buffers, room.state, room.memory,
               count == 3 ? " (CheckpointerOptions::buffers = 2 wants less)" : "");
}

}  // namespace outlast
