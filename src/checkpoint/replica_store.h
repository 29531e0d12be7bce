// The copies of snapshots that an agent keeps in its memory (replica_plan.h): of each rank two
// places, so that one which is torn while it comes never costs the last whole one.
//
//   Begin ──> FILLING ── every chunk came, and matched its CRC32C: Commit ──> WHOLE
//                └── dropped (torn, damaged): the place is free again
//
// A copy carries run, generation and step. One of another run, of another world, or older than what
// the rank has here is refused.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/replica_plan.h"
#include "outlast/base/id.h"
#include "outlast/base/memory.h"
#include "outlast/base/mutex.h"
#include "outlast/blackbox/buffer.h"

namespace outlast {

// All of a copy but its chunks.
struct ReplicaHead {
  Id128 run_id;
  ReplicaName name;
  uint32_t world = 0;
  uint64_t layout_hash = 0;
  uint64_t update_stamp = 0;
  uint64_t image_bytes = 0, replicated_bytes = 0;
  std::vector<uint32_t> crcs;  // of the chunks, as the buffer has them
  std::string extra;
  // The round that must stay: it is not what this copy overwrites.
  std::optional<SnapshotKey> keep;

  BufferLayout layout() const {
    return {.image_bytes = image_bytes, .replicated_bytes = replicated_bytes};
  }
};

std::string Encode(const ReplicaHead& head);
// kInvalidArgument: cut, over a cap, or sizes that do not add up.
absl::StatusOr<ReplicaHead> DecodeReplicaHead(std::string_view bytes);

// Extra state and chunks that a copy has at most.
inline constexpr size_t kMostReplicaExtra = 16 << 20;
inline constexpr size_t kMostReplicaChunks = 1 << 22;  // 4 TiB

// What is copied. Immutable once it is committed.
class Replica {
 public:
  Replica(ReplicaHead head, Mapping memory) : head_(std::move(head)), memory_(std::move(memory)) {}
  const ReplicaHead& head() const { return head_; }
  uint32_t chunk_count() const { return static_cast<uint32_t>(head_.crcs.size()); }
  std::span<std::byte> chunk(uint32_t index) const;
  // Takes the next chunk. kInvalidArgument: it is not that one, or of another size. kDataLoss: it
  // does not match its CRC; names rank, step, chunk and both CRCs.
  absl::Status Put(uint32_t index, std::span<const std::byte> bytes);
  bool is_whole() const { return next_ == chunk_count(); }
  size_t memory_bytes() const { return memory_.size(); }

  static size_t MemoryBytesOf(const BufferLayout& layout) {
    return layout.crc_table_offset() - layout.image_offset();
  }

 private:
  friend class ReplicaStore;
  const ReplicaHead head_;
  Mapping memory_;
  uint32_t next_ = 0;
};

// Of a round, a copy is newer than what the rank has here; of a restore, it may be any.
enum class ReplicaUse : uint8_t { kRound, kRestore };

// Safe for concurrent use. Never blocks.
class ReplicaStore {
 public:
  // `most_bytes`: of all copies together.
  explicit ReplicaStore(uint64_t most_bytes) : most_bytes_(most_bytes) {}

  // From now on these are wanted. Copies of another run or world are dropped.
  void Serve(const Id128& run_id, int world);

  // A place for a copy. kFailedPrecondition: it is of another run or world, or stale: the message
  // has both. kResourceExhausted: no room; the message has found and wanted, and it is counted.
  absl::StatusOr<std::shared_ptr<Replica>> Begin(ReplicaHead head, ReplicaUse use);
  // All its chunks came. kAborted: the store serves another run or world by now.
  absl::Status Commit(const std::shared_ptr<Replica>& replica);

  // Null: there is no whole copy of that name.
  std::shared_ptr<const Replica> Find(const ReplicaName& name) const;
  std::vector<ReplicaName> Names() const;
  // Those of later steps are of a history that is given up.
  void DropNewerThan(int64_t step);

  uint64_t bytes() const;
  uint64_t most_bytes() const { return most_bytes_; }
  uint64_t refused() const;  // for want of room

 private:
  struct Place {
    std::shared_ptr<Replica> whole;  // null: none
    std::weak_ptr<Replica> filling;  // who fills it
  };
  using Places = std::array<Place, 2>;
  static size_t PickPlace(const Places& places, const std::optional<SnapshotKey>& keep);
  uint64_t BytesLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const uint64_t most_bytes_;
  mutable Mutex mutex_;
  Id128 run_id_ ABSL_GUARDED_BY(mutex_);
  int world_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint32_t, Places> places_ ABSL_GUARDED_BY(mutex_);  // by rank
  uint64_t refused_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace outlast
