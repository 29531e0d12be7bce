#include "checkpoint/copy_plan.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/stream_copy.h"

namespace outlast {
namespace {

void AddPiece(CopyPiece piece, uint64_t part_offset, uint32_t first_chunk, CopyPlan& plan) {
  while (piece.bytes > 0) {
    const uint64_t in_part = piece.to - part_offset;
    const uint64_t chunk = in_part / kChunkBytes;
    CopyPiece now = piece;
    now.bytes = std::min(piece.bytes, (chunk + 1) * kChunkBytes - in_part);
    plan.chunks[first_chunk + chunk].push_back(now);
    piece.from += now.bytes;
    piece.to += now.bytes;
    piece.bytes -= now.bytes;
  }
}

// Reading costs less than reading and writing.
bool HoldsChunk(const Buffer& buffer, const CopyPlan& plan, uint32_t chunk,
                const StateView& state) {
  const uint32_t found = PassOverChunk(
      WholeOf(buffer), buffer.layout().chunk(chunk), plan.chunks[chunk],
      [&](Crc32cStream& crc, const CopyPiece& piece, uint64_t done, uint64_t bytes) {
        const std::byte* region = state.regions[piece.region].bytes.data();
        if (piece.packer == kNoPacker) return crc.Update({region + piece.from + done, bytes});
        std::array<std::byte, kCopyPieceBytes> packed;
        plan.packers[piece.packer].Gather(region, piece.from + done, {packed.data(), bytes});
        crc.Update({packed.data(), bytes});
      });
  return found == buffer.chunk_crcs()[chunk];
}

void CopyPieceBack(const CopyPlan& plan, const CopyPiece& piece, uint64_t done,
                   std::span<const std::byte> from, const StateView& state) {
  std::byte* region = state.regions[piece.region].bytes.data();
  if (piece.packer != kNoPacker) {
    plan.packers[piece.packer].Scatter(from, piece.from + done, region);
  } else {
    StreamCopy(region + piece.from + done, from.data(), from.size());
  }
}

// Returns the CRC of what was copied.
uint32_t CopyChunkBack(const Buffer& buffer, const CopyPlan& plan, uint32_t chunk,
                       const StateView& state) {
  const std::span<std::byte> whole = WholeOf(buffer);
  return PassOverChunk(
      whole, buffer.layout().chunk(chunk), plan.chunks[chunk],
      [&](Crc32cStream& crc, const CopyPiece& piece, uint64_t done, uint64_t bytes) {
        const auto from = whole.subspan(piece.to + done, bytes);
        crc.Update(from);
        CopyPieceBack(plan, piece, done, from, state);
      });
}

uint64_t BytesOf(const PlannedItem& item) { return item.box.end - item.box.begin; }

template <typename Visit>
void ForEachItem(const Assignment& assignment, Visit visit) {
  for (const PlannedItem& item : assignment.image) visit(item);
  for (const PlannedItem& item : assignment.replicated) visit(item);
}

}  // namespace

std::span<std::byte> WholeOf(const Buffer& buffer) {
  std::byte* start = buffer.image().data() - buffer.layout().image_offset();
  return {start, buffer.layout().buffer_bytes()};
}

absl::StatusOr<CopyPlan> MakeCopyPlan(const Assignment& assignment, const BufferLayout& layout,
                                      const StateView& state) {
  std::map<std::string_view, uint32_t> region_of_name;
  for (size_t i = 0; i < state.regions.size(); ++i)
    region_of_name[state.regions[i].name] = static_cast<uint32_t>(i);
  CopyPlan plan;
  plan.chunks.resize(layout.chunk_count());
  const auto add = [&](const PlannedItem& item, uint64_t part_offset, uint64_t data_offset,
                       uint32_t first_chunk) -> absl::Status {
    const auto region = region_of_name.find(item.box.name);
    if (region == region_of_name.end()) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "region '{}' was in the state when its buffers were made, and is missing now",
                   item.box.name);
    }
    const Region& source = state.regions[region->second];
    const Box box{item.box.offset, item.box.extent};
    if (item.box.begin == item.box.end) return absl::OkStatus();
    if (!IsPacked(source)) {
      const auto packer = static_cast<uint32_t>(plan.packers.size());
      plan.packers.emplace_back(item.box.dtype, item.held, source.strides, box);
      AddPiece(
          {region->second, packer, 0, data_offset + item.box.begin, item.box.end - item.box.begin},
          part_offset, first_chunk, plan);
      return absl::OkStatus();
    }
    BoxWalker walker(item.box.dtype, item.held, box);
    if (!walker.is_valid()) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "region '{}': a box of a sub-byte type is cut inside a byte", item.box.name);
    }
    for (; !walker.done(); walker.Next()) {
      const BoxStretch stretch = walker.stretch();
      AddPiece({region->second, kNoPacker, stretch.from, data_offset + item.box.begin + stretch.to,
                stretch.bytes},
               part_offset, first_chunk, plan);
    }
    return absl::OkStatus();
  };
  for (const PlannedItem& item : assignment.image) {
    OUTLAST_RETURN_IF_ERROR(
        add(item, layout.image_offset(), layout.image_offset() + assignment.header.size(), 0));
  }
  for (const PlannedItem& item : assignment.replicated) {
    OUTLAST_RETURN_IF_ERROR(add(item, layout.replicated_offset(), layout.replicated_offset(),
                                layout.image_chunk_count()));
  }
  for (auto& pieces : plan.chunks) {
    std::sort(pieces.begin(), pieces.end(),
              [](const CopyPiece& a, const CopyPiece& b) { return a.to < b.to; });
  }
  return plan;
}

absl::StatusOr<CopyPlan> MakeReplicaPlan(const Assignment& own, const Assignment& theirs,
                                         const BufferLayout& layout, const StateView& state) {
  struct Wanted {
    const Box* held = nullptr;
    uint64_t bytes = 0;  // still
  };
  std::map<std::string_view, Wanted> wanted;
  ForEachItem(own, [&](const PlannedItem& item) {
    Wanted& of_name = wanted[item.box.name];
    of_name.held = &item.held;
    of_name.bytes += BytesOf(item);
  });
  const auto is_foreign = [&](const PlannedItem& item) {
    const auto found = wanted.find(item.box.name);
    return found == wanted.end() || *found->second.held != item.held;
  };
  Assignment shared = theirs;
  std::erase_if(shared.image, is_foreign);
  std::erase_if(shared.replicated, is_foreign);
  ForEachItem(shared,
              [&](const PlannedItem& item) { wanted[item.box.name].bytes -= BytesOf(item); });
  for (const auto& [name, missing] : wanted) {
    if (missing.bytes != 0) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "rank {} holds no replica of rank {}'s part of '{}'", theirs.rank, own.rank,
                   name);
    }
  }
  return MakeCopyPlan(shared, layout, state);
}

std::vector<Assignment> SharesOfNode(std::span<const Assignment> ranks) {
  std::vector<Assignment> shares(ranks.begin(), ranks.end());
  std::vector<uint64_t> load;
  std::set<uint32_t> here;
  for (Assignment& share : shares) {
    here.insert(share.rank);
    load.push_back(share.data_bytes);
    share.replicated.clear();
  }
  struct Held {
    size_t by;
    const PlannedItem* item;
  };
  std::map<std::tuple<uint32_t, std::string_view, std::string>, std::vector<Held>> foreign;
  for (size_t i = 0; i < ranks.size(); ++i) {
    for (const PlannedItem& item : ranks[i].replicated) {
      if (!here.contains(item.writer) && BytesOf(item) > 0)
        foreign[{item.writer, item.box.name, item.box.offset.text()}].push_back({i, &item});
    }
  }
  // What has one writer, and lies together in its shard, is read by one rank where one holds it
  // all.
  std::map<std::pair<uint32_t, std::vector<size_t>>, std::vector<const std::vector<Held>*>> groups;
  for (const auto& [key, held] : foreign) {
    std::vector<size_t> by;
    for (const Held& one : held) by.push_back(one.by);
    groups[{std::get<0>(key), std::move(by)}].push_back(&held);
  }
  for (const auto& [key, items] : groups) {
    const size_t reader = *std::ranges::min_element(
        key.second, {}, [&](size_t rank) { return std::pair(load[rank], rank); });
    for (const std::vector<Held>* held : items) {
      const auto own = std::ranges::find(*held, reader, &Held::by);
      shares[reader].replicated.push_back(*own->item);
      load[reader] += BytesOf(*own->item);
    }
  }
  return shares;
}

absl::StatusOr<CopyPlan> MakeSharePlan(const Assignment& own, const Assignment& share,
                                       const BufferLayout& layout, const StateView& state) {
  Assignment wanted = share;
  if (own.rank != share.rank) {
    std::map<std::string_view, std::vector<const PlannedItem*>> mine;
    for (const PlannedItem& item : own.replicated) mine[item.box.name].push_back(&item);
    const auto is_foreign = [&](const PlannedItem& item) {
      const auto found = mine.find(item.box.name);
      return found == mine.end() ||
             std::ranges::none_of(found->second, [&](const PlannedItem* one) {
               return one->box.offset == item.box.offset && one->box.extent == item.box.extent;
             });
    };
    std::erase_if(wanted.image, is_foreign);
    std::erase_if(wanted.replicated, is_foreign);
  }
  return MakeCopyPlan(wanted, layout, state);
}

void CopyOut(const Buffer& buffer, const CopyPlan& plan, const StateView& state) {
  const std::span<std::byte> whole = WholeOf(buffer);
  for (const auto& pieces : plan.chunks) {
    for (const CopyPiece& piece : pieces)
      CopyPieceBack(plan, piece, 0, whole.subspan(piece.to, piece.bytes), state);
  }
}

absl::Status CopyIn(const Buffer& buffer, const CopyPlan& plan, std::span<const std::byte> header,
                    const StateView& state) {
  const std::span<const uint32_t> crcs = buffer.chunk_crcs();
  const std::span<std::byte> whole = WholeOf(buffer);
  for (uint32_t chunk = 0; chunk < plan.chunks.size(); ++chunk) {
    if (Crc32c(buffer.chunk(chunk)) == crcs[chunk]) continue;
    if (chunk == 0) std::ranges::copy(header, buffer.image().begin());
    for (const CopyPiece& piece : plan.chunks[chunk]) {
      const std::byte* region = state.regions[piece.region].bytes.data();
      const auto to = whole.subspan(piece.to, piece.bytes);
      if (piece.packer != kNoPacker) {
        plan.packers[piece.packer].Gather(region, piece.from, to);
      } else {
        std::memcpy(to.data(), region + piece.from, piece.bytes);
      }
    }
    if (const uint32_t found = Crc32c(buffer.chunk(chunk)); found != crcs[chunk]) {
      return Error(absl::StatusCode::kDataLoss,
                   "chunk {} of a snapshot, written anew: crc {:08x}, its table says {:08x}", chunk,
                   found, crcs[chunk]);
    }
  }
  return absl::OkStatus();
}

absl::Status CopyBack(const Buffer& buffer, const CopyPlan& plan, int64_t step,
                      const StateView& state, Belief belief) {
  const std::span<const uint32_t> crcs = buffer.chunk_crcs();
  for (uint32_t chunk = 0; chunk < plan.chunks.size(); ++chunk) {
    if (belief == Belief::kUntouched && HoldsChunk(buffer, plan, chunk, state)) continue;
    const uint32_t found = CopyChunkBack(buffer, plan, chunk, state);
    if (found != crcs[chunk]) {
      return Error(absl::StatusCode::kDataLoss,
                   "snapshot of step {} in memory, chunk {}: crc {:08x}, its table says {:08x}",
                   step, chunk, found, crcs[chunk]);
    }
  }
  return absl::OkStatus();
}

}  // namespace outlast
