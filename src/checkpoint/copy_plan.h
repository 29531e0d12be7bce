// Where each stretch of a state lies in a buffer, and the way back out of one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/packer.h"
#include "checkpoint/plan.h"
#include "outlast/base/crc32c.h"
#include "outlast/blackbox/buffer.h"
#include "outlast/checkpoint/state.h"

namespace outlast {

inline constexpr uint32_t kNoPacker = 0xffffffff;

// A stretch of a region and its place in the buffer; inside one chunk.
struct CopyPiece {
  uint32_t region = 0;
  uint32_t packer = kNoPacker;  // in the plan: the region is strided
  uint64_t from = 0;            // bytes from the region's start; in what the packer packs, if any
  uint64_t to = 0;              // bytes from the buffer's start
  uint64_t bytes = 0;
};

// What goes where, by chunk of the buffer. Pure; made once per layout.
struct CopyPlan {
  std::vector<std::vector<CopyPiece>> chunks;  // each by `to`
  std::vector<Packer> packers;
};
// Of `state` only names, boxes and strides count. kInvalidArgument: a region of the assignment that
// `state` lacks, or a sub-byte cut.
absl::StatusOr<CopyPlan> MakeCopyPlan(const Assignment& assignment, const BufferLayout& layout,
                                      const StateView& state);
// The way from another rank's buffer into the state of a rank whose own part is `own`: what of
// `theirs` that state lacks is left out. kFailedPrecondition: their buffer lacks a box of `own`, by
// name.
absl::StatusOr<CopyPlan> MakeReplicaPlan(const Assignment& own, const Assignment& theirs,
                                         const BufferLayout& layout, const StateView& state);

// What each rank of a node reads of a checkpoint for all of them, so that each byte that any of
// them wants is read by one: its own image, and of what ranks elsewhere write a fair part of what
// it holds, which stays in `replicated`. By rank, as given.
std::vector<Assignment> SharesOfNode(std::span<const Assignment> ranks);
// The way out of the buffer of a rank that has read `share`, into a state whose own part is `own`.
absl::StatusOr<CopyPlan> MakeSharePlan(const Assignment& own, const Assignment& share,
                                       const BufferLayout& layout, const StateView& state);

inline constexpr uint64_t kCopyPieceBytes = 16 << 10;  // checksummed, then copied from the cache

// Feeds a chunk of a buffer to the CRC in order; `pass(crc, piece, done, bytes)` does it for each
// stretch of a piece. Returns the CRC.
template <typename Pass>
uint32_t PassOverChunk(std::span<const std::byte> buffer, const ChunkRange& range,
                       std::span<const CopyPiece> pieces, Pass pass) {
  Crc32cStream crc;
  uint64_t at = range.offset;
  const uint64_t end = range.offset + range.bytes;
  for (const CopyPiece& piece : pieces) {
    crc.Update(buffer.subspan(at, piece.to - at));  // what lies between
    for (uint64_t done = 0; done < piece.bytes; done += kCopyPieceBytes) {
      pass(crc, piece, done, std::min(kCopyPieceBytes, piece.bytes - done));
    }
    at = piece.to + piece.bytes;
  }
  crc.Update(buffer.subspan(at, end - at));
  return crc.value();
}

std::span<std::byte> WholeOf(const Buffer& buffer);

// Copies what a buffer holds into `state`, unchecked: for bytes that were checked on their way into
// the buffer.
void CopyOut(const Buffer& buffer, const CopyPlan& plan, const StateView& state);

// Writes the chunks of a buffer that do not match its table anew, from `state` and the file's first
// bytes. kDataLoss: they do not match then either.
absl::Status CopyIn(const Buffer& buffer, const CopyPlan& plan, std::span<const std::byte> header,
                    const StateView& state);

// What the caller believes of the memory that it restores into.
enum class Belief : uint8_t {
  kNothing,   // every chunk is copied
  kUntouched  // holds this snapshot: a chunk whose CRC says so stays, others are copied
};
// Makes `state` hold what lies in a sealed buffer; no byte counts as restored before its CRC was
// checked. kDataLoss: a chunk does not match, with `step`, its number and CRCs.
absl::Status CopyBack(const Buffer& buffer, const CopyPlan& plan, int64_t step,
                      const StateView& state, Belief belief);

}  // namespace outlast
