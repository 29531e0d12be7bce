#include "checkpoint/replica_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/channel.h"
#include "base/error.h"
#include "outlast/base/crc32c.h"

namespace outlast {
namespace {

constexpr uint8_t kVersion = 1;

void PutId(PayloadWriter& writer, const Id128& id) {
  for (const std::byte byte : id.bytes) writer.Int(byte);
}
Id128 TakeId(PayloadReader& reader) {
  Id128 id;
  for (std::byte& byte : id.bytes) byte = reader.Int<std::byte>();
  return id;
}

std::string TextOf(const ReplicaName& name) {
  return fmt::format("copy of rank {}, step {} of generation {}", name.rank, name.snapshot.step,
                     name.snapshot.generation);
}

}  // namespace

// --- Head

std::string Encode(const ReplicaHead& head) {
  PayloadWriter writer;
  writer.Int(kVersion);
  PutId(writer, head.run_id);
  writer.Int(head.name.rank).Int(head.name.snapshot.generation).Int(head.name.snapshot.step);
  writer.Int(head.world).Int(head.layout_hash).Int(head.update_stamp);
  writer.Int(head.image_bytes).Int(head.replicated_bytes);
  writer.Int(static_cast<uint8_t>(head.keep.has_value()));
  if (head.keep) writer.Int(head.keep->generation).Int(head.keep->step);
  writer.Text({reinterpret_cast<const char*>(head.crcs.data()), head.crcs.size() * 4});
  writer.Text(head.extra);
  return writer.bytes();
}

absl::StatusOr<ReplicaHead> DecodeReplicaHead(std::string_view bytes) {
  PayloadReader reader(bytes);
  const auto version = reader.Int<uint8_t>();
  if (reader.ok() && version != kVersion) {
    return Error(absl::StatusCode::kUnimplemented,
                 "a copy of another node's rank: version {}, this agent speaks {}", version,
                 kVersion);
  }
  ReplicaHead head;
  head.run_id = TakeId(reader);
  head.name.rank = reader.Int<uint32_t>();
  head.name.snapshot.generation = reader.Int<uint64_t>();
  head.name.snapshot.step = reader.Int<int64_t>();
  head.world = reader.Int<uint32_t>();
  head.layout_hash = reader.Int<uint64_t>();
  head.update_stamp = reader.Int<uint64_t>();
  head.image_bytes = reader.Int<uint64_t>();
  head.replicated_bytes = reader.Int<uint64_t>();
  if (reader.Int<uint8_t>() != 0) {
    SnapshotKey keep;
    keep.generation = reader.Int<uint64_t>();
    keep.step = reader.Int<int64_t>();
    head.keep = keep;
  }
  const std::string_view crcs = reader.Text(), extra = reader.Text();
  const bool is_sound = reader.ok() && reader.rest().empty() && head.name.rank < head.world &&
                        head.name.snapshot.step >= 0 && head.layout().Check().ok() &&
                        crcs.size() / 4 <= kMostReplicaChunks && extra.size() <= kMostReplicaExtra;
  if (!is_sound || crcs.size() != size_t{head.layout().chunk_count()} * 4) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "a copy of another node's rank: its head of {} bytes is cut or malformed",
                 bytes.size());
  }
  head.crcs.resize(crcs.size() / 4);
  std::memcpy(head.crcs.data(), crcs.data(), crcs.size());
  head.extra = std::string(extra);
  return head;
}

// --- Copy

std::span<std::byte> Replica::chunk(uint32_t index) const {
  const BufferLayout layout = head_.layout();
  const ChunkRange range = layout.chunk(index);
  return memory_.bytes().subspan(range.offset - layout.image_offset(), range.bytes);
}

absl::Status Replica::Put(uint32_t index, std::span<const std::byte> bytes) {
  if (is_whole() || index != next_ || bytes.size() != chunk(index).size()) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "{}: chunk {} of {} bytes, chunk {} of {} wanted", TextOf(head_.name), index,
                 bytes.size(), next_, chunk_count());
  }
  const uint32_t crc = Crc32c(bytes);
  if (crc != head_.crcs[index]) {
    return Error(absl::StatusCode::kDataLoss, "{}: chunk {} has crc {:08x}, {:08x} wanted",
                 TextOf(head_.name), index, crc, head_.crcs[index]);
  }
  std::memcpy(chunk(index).data(), bytes.data(), bytes.size());
  ++next_;
  return absl::OkStatus();
}

// --- Store

void ReplicaStore::Serve(const Id128& run_id, int world) {
  MutexLock lock(mutex_);
  if (run_id == run_id_ && world == world_) return;
  run_id_ = run_id;
  world_ = world;
  places_.clear();
}

uint64_t ReplicaStore::BytesLocked() const {
  uint64_t bytes = 0;
  for (const auto& [rank, places] : places_) {
    for (const Place& place : places) {
      if (place.whole) bytes += place.whole->memory_bytes();
      if (const auto filling = place.filling.lock()) bytes += filling->memory_bytes();
    }
  }
  return bytes;
}

// A free one, else the older of those that need not stay.
size_t ReplicaStore::PickPlace(const Places& places, const std::optional<SnapshotKey>& keep) {
  const auto cost = [&](const Place& place) {
    if (!place.whole) return place.filling.expired() ? 0 : 1;
    return keep == place.whole->head().name.snapshot ? 3 : 2;
  };
  const int first = cost(places[0]), second = cost(places[1]);
  if (first != second || first != 2) return first <= second ? 0 : 1;
  return places[0].whole->head().name.snapshot < places[1].whole->head().name.snapshot ? 0 : 1;
}

absl::StatusOr<std::shared_ptr<Replica>> ReplicaStore::Begin(ReplicaHead head, ReplicaUse use) {
  MutexLock lock(mutex_);
  if (head.run_id != run_id_ || static_cast<int>(head.world) != world_) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "{}: of run {} and world {}, run {} and world {} wanted", TextOf(head.name),
                 head.run_id.hex(), head.world, run_id_.hex(), world_);
  }
  Places& places = places_[head.name.rank];
  for (const Place& place : places) {
    if (use == ReplicaUse::kRestore || !place.whole) continue;
    const SnapshotKey& held = place.whole->head().name.snapshot;
    if (head.name.snapshot < held) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "{}: stale, step {} of generation {} is here", TextOf(head.name), held.step,
                   held.generation);
    }
  }
  Place& place = places[PickPlace(places, head.keep)];
  const size_t wanted = Replica::MemoryBytesOf(head.layout());
  uint64_t others = BytesLocked();
  if (place.whole) others -= place.whole->memory_bytes();
  if (const auto filling = place.filling.lock()) others -= filling->memory_bytes();
  if (others + wanted > most_bytes_) {
    ++refused_;
    return Error(absl::StatusCode::kResourceExhausted,
                 "{}: {} bytes beside {} of other copies, {} in all allowed (--peer-memory)",
                 TextOf(head.name), wanted, others, most_bytes_);
  }
  const std::shared_ptr<Replica> old = std::exchange(place.whole, nullptr);
  Mapping memory;
  if (old && old.use_count() == 1 && old->memory_bytes() == wanted)
    memory = std::move(old->memory_);
  if (memory.size() == 0) {
    // Pages come with the chunks: who fills it may not wait for all of them now.
    OUTLAST_ASSIGN_OR_RETURN(const UniqueFd fd,
                             MakeSealedMemory("outlast-copy", wanted, Allocation::kOnTouch));
    OUTLAST_ASSIGN_OR_RETURN(memory, Mapping::Shared(fd.get(), wanted));
  }
  auto replica = std::make_shared<Replica>(std::move(head), std::move(memory));
  place.filling = replica;
  return replica;
}

absl::Status ReplicaStore::Commit(const std::shared_ptr<Replica>& replica) {
  const ReplicaName& name = replica->head().name;
  MutexLock lock(mutex_);
  const auto found = places_.find(name.rank);
  if (found == places_.end() || !replica->is_whole())
    return Error(absl::StatusCode::kAborted, "{}: nobody wants it any more", TextOf(name));
  for (size_t i = 0; i < found->second.size(); ++i) {
    Place& place = found->second[i];
    if (place.filling.lock() != replica) continue;
    place.whole = replica;
    place.filling.reset();
    Place& other = found->second[1 - i];
    if (other.whole && other.whole->head().name == name) other.whole.reset();
    return absl::OkStatus();
  }
  return Error(absl::StatusCode::kAborted, "{}: nobody wants it any more", TextOf(name));
}

std::shared_ptr<const Replica> ReplicaStore::Find(const ReplicaName& name) const {
  MutexLock lock(mutex_);
  const auto found = places_.find(name.rank);
  if (found == places_.end()) return nullptr;
  for (const Place& place : found->second) {
    if (place.whole && place.whole->head().name == name) return place.whole;
  }
  return nullptr;
}

std::vector<ReplicaName> ReplicaStore::Names() const {
  MutexLock lock(mutex_);
  std::vector<ReplicaName> names;
  for (const auto& [rank, places] : places_) {
    for (const Place& place : places) {
      if (place.whole) names.push_back(place.whole->head().name);
    }
  }
  return names;
}

void ReplicaStore::DropNewerThan(int64_t step) {
  MutexLock lock(mutex_);
  for (auto& [rank, places] : places_) {
    for (Place& place : places) {
      place.filling.reset();  // what comes now is of a round that is over
      if (place.whole && place.whole->head().name.snapshot.step > step) place.whole.reset();
    }
  }
}

uint64_t ReplicaStore::bytes() const {
  MutexLock lock(mutex_);
  return BytesLocked();
}

uint64_t ReplicaStore::refused() const {
  MutexLock lock(mutex_);
  return refused_;
}

}  // namespace outlast
