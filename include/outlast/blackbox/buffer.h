// The memory of one snapshot. The agent creates and holds it; the worker fills it.
//
//   [header 4 KiB][image, padded to 4 KiB][replicated bytes, padded to 4 KiB][u32 CRC of each chunk][extra state]
//
//   EMPTY ── TryBeginFill, turn + 1 ──> FILLING ── Seal ──> SEALED ── TryBeginFill (no pins) ──> FILLING
//     ^───────────── Abandon ──────────────┘                  pins set and cleared by the agent
//
// The control word changes by compare-and-swap alone; worker and agent share no lock. The header, with its CRC, is
// written before the release store of SEALED. A worker can die anywhere: a buffer in FILLING is never read.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "outlast/base/fd.h"
#include "outlast/base/id.h"
#include "outlast/base/memory.h"

namespace outlast {

inline constexpr uint32_t kBufferVersion = 1;
inline constexpr uint32_t kBufferHeaderBytes = 4096;
inline constexpr uint32_t kChunkBytes = 1 << 20;

struct BufferHeader {
  uint64_t magic;  // "OUTLBUFR"
  uint32_t version, header_bytes;
  uint64_t buffer_bytes, image_offset;
  uint64_t image_bytes;  // exact length of the file
  uint64_t padded_image_bytes;
  uint64_t crc_table_offset;
  uint32_t chunk_bytes, chunk_count;  // both parts
  Id128 job_id;
  uint64_t generation;
  uint32_t folder_nonce;  // 0: none yet
  uint32_t zero;
  int64_t step;
  uint32_t rank, world;
  uint64_t layout_hash;
  uint64_t reserved_1;
  uint64_t control;  // 128: alone on its cache line
  std::byte reserved_2[56];
  uint64_t update_stamp;
  uint64_t sealed_at_ns;  // CLOCK_MONOTONIC
  Id128 boot_id;
  uint64_t extra_offset;
  uint32_t extra_bytes, extra_crc;
  uint64_t replicated_offset, replicated_bytes;
  Id128 run_id;
  std::byte reserved_3[4092 - 272];
  uint32_t header_crc;  // CRC32C of bytes 0..4091, the control word as 0
};
static_assert(sizeof(BufferHeader) == kBufferHeaderBytes);
static_assert(offsetof(BufferHeader, version) == 8 && offsetof(BufferHeader, header_bytes) == 12);
static_assert(offsetof(BufferHeader, buffer_bytes) == 16 && offsetof(BufferHeader, image_offset) == 24);
static_assert(offsetof(BufferHeader, image_bytes) == 32 && offsetof(BufferHeader, padded_image_bytes) == 40);
static_assert(offsetof(BufferHeader, crc_table_offset) == 48 && offsetof(BufferHeader, chunk_bytes) == 56);
static_assert(offsetof(BufferHeader, chunk_count) == 60 && offsetof(BufferHeader, job_id) == 64);
static_assert(offsetof(BufferHeader, generation) == 80 && offsetof(BufferHeader, folder_nonce) == 88);
static_assert(offsetof(BufferHeader, zero) == 92 && offsetof(BufferHeader, step) == 96);
static_assert(offsetof(BufferHeader, rank) == 104 && offsetof(BufferHeader, world) == 108);
static_assert(offsetof(BufferHeader, layout_hash) == 112 && offsetof(BufferHeader, control) == 128);
static_assert(offsetof(BufferHeader, update_stamp) == 192 && offsetof(BufferHeader, sealed_at_ns) == 200);
static_assert(offsetof(BufferHeader, boot_id) == 208 && offsetof(BufferHeader, extra_offset) == 224);
static_assert(offsetof(BufferHeader, extra_bytes) == 232 && offsetof(BufferHeader, extra_crc) == 236);
static_assert(offsetof(BufferHeader, replicated_offset) == 240 && offsetof(BufferHeader, replicated_bytes) == 248);
static_assert(offsetof(BufferHeader, run_id) == 256 && offsetof(BufferHeader, header_crc) == 4092);

// ---- Layout ----------------------------------------------------------------------------------------------------------

// A chunk of a buffer: where its logical bytes lie, from the buffer's start.
struct ChunkRange {
  uint64_t offset = 0;
  uint32_t bytes = 0;
};

// Where the parts lie. A chunk CRC covers logical bytes only, and the replicated part starts a new chunk.
struct BufferLayout {
  uint64_t image_bytes = 0;
  uint64_t replicated_bytes = 0;
  uint32_t extra_capacity = 0;  // at least; a Buffer's own layout has what is left of the last page too

  uint64_t image_offset() const { return kBufferHeaderBytes; }
  uint64_t padded_image_bytes() const;
  uint64_t replicated_offset() const;
  uint64_t crc_table_offset() const;
  uint32_t image_chunk_count() const;
  uint32_t chunk_count() const;
  uint64_t extra_offset() const;  // the first multiple of 64 after the table
  uint64_t buffer_bytes() const;  // a multiple of 4096
  // Chunk `index` < chunk_count(): the image's first, then the replicated ones.
  ChunkRange chunk(uint32_t index) const;
  // kInvalidArgument: nothing to hold, or sizes past 2^47 bytes or 2^32 - 1 chunks.
  absl::Status Check() const;

  bool operator==(const BufferLayout&) const = default;
};

// ---- The control word ------------------------------------------------------------------------------------------------

enum class BufferState : uint8_t { kEmpty = 0, kFilling = 1, kSealed = 2 };

// Why the agent needs a sealed buffer to stay as it is.
enum class BufferPin : uint32_t { kPersist = 1, kReplicate = 2, kRestore = 4, kCommon = 8 };

// The word, taken apart: bits 0..7 state, 8..31 pins, 32..63 turn.
struct ControlWord {
  BufferState state = BufferState::kEmpty;  // may hold a number that is no state: the word is shared
  uint32_t pins = 0;
  uint32_t turn = 0;  // counts fills: tells two snapshots in one buffer apart

  static ControlWord Unpack(uint64_t word);
  uint64_t Pack() const;
  bool operator==(const ControlWord&) const = default;
};

// What TryBeginFill may take.
enum class Replace {
  kOnlyEmpty,
  kSealedToo,  // the caller knows that the sealed snapshot is older than the common one, or void
};

// Changes of the control word by compare-and-swap. Each returns false, and changes nothing, when the word does not allow
// it. Safe for concurrent use by threads and processes.
class BufferControl {
 public:
  explicit BufferControl(uint64_t* word) : word_(word) {}

  ControlWord Read() const;
  // EMPTY, or with kSealedToo an unpinned SEALED, becomes FILLING with turn + 1, which is put into `turn`. Worker.
  bool TryBeginFill(Replace replace, uint32_t* turn);
  // FILLING of this turn becomes SEALED, with release order. Worker.
  bool Seal(uint32_t turn);
  // FILLING of this turn becomes EMPTY. Worker, or the agent when the worker died or took too long.
  bool Abandon(uint32_t turn);
  // Sets or clears a pin of the snapshot sealed in this turn; false also when it is as asked for already. Agent.
  bool TryPin(BufferPin pin, uint32_t turn);
  bool Unpin(BufferPin pin, uint32_t turn);
  // A sealed, unpinned snapshot of this turn that is void becomes EMPTY. Agent.
  bool Discard(uint32_t turn);
  // All pins of an older agent. Agent, before anything else.
  void ClearPins();

 private:
  template <typename Change>
  bool Swap(Change change);

  uint64_t* word_;
};

// ---- The buffer ------------------------------------------------------------------------------------------------------

struct BufferIdentity {
  Id128 job_id, run_id;
  uint32_t rank = 0, world = 1;
};

// What Seal puts into the header, beside layout, run and boot.
struct SealInfo {
  Id128 job_id;
  uint64_t generation = 0;
  uint32_t folder_nonce = 0;
  int64_t step = 0;
  uint32_t rank = 0, world = 1;
  uint64_t layout_hash = 0;
  uint64_t update_stamp = 0;
  uint64_t sealed_at_ns = 0;
  uint32_t extra_bytes = 0;  // at the start of extra(); their CRC is taken by Seal
};

// Checks a *copy* of a header: magic, version, sizes that add up, state sealed, header CRC, run, boot, layout hash, in
// this order. kFailedPrecondition: not sealed. kUnimplemented: another version. kDataLoss: torn or damaged.
// kNotFound: of another run, boot or layout. The message names the field, what was found and what was wanted.
absl::Status Validate(const BufferHeader& header, const Id128& run_id, const Id128& boot_id, uint64_t layout_hash);

// CRC32C over the header with its control word and CRC left out.
uint32_t HeaderCrc(const BufferHeader& header);

// Owns the descriptor and a read-write mapping. Move-only. Spans stay where they are when the Buffer moves. A forked
// child cannot write it (segment.h). Sizes come from the layout as checked at Create or Open, never from shared memory.
class Buffer {
 public:
  // The agent's side: pre-faulted (huge pages where the kernel gives them to a memfd), then sealed against shrinking and
  // growing, so that no trainer can make the agent fault. kResourceExhausted: no memory. Blocks: about 0.3 s a GiB.
  static absl::StatusOr<Buffer> Create(const BufferLayout& layout, const BufferIdentity& identity);
  // The worker's side, or an agent that takes over. kDataLoss: no buffer, or one whose sizes do not add up.
  // kFailedPrecondition: could be shrunk.
  static absl::StatusOr<Buffer> Open(UniqueFd fd);

  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  int fd() const { return fd_.get(); }
  const BufferLayout& layout() const { return layout_; }
  BufferControl control() const { return BufferControl(&header().control); }

  std::span<std::byte> image() const { return Part(layout_.image_offset(), layout_.image_bytes); }
  // The image with its padding, as O_DIRECT writes it.
  std::span<std::byte> padded_image() const { return Part(layout_.image_offset(), layout_.padded_image_bytes()); }
  std::span<std::byte> replicated() const { return Part(layout_.replicated_offset(), layout_.replicated_bytes); }
  std::span<uint32_t> chunk_crcs() const;
  std::span<std::byte> chunk(uint32_t index) const;
  std::span<std::byte> extra() const { return Part(layout_.extra_offset(), layout_.extra_capacity); }

  // The worker's last act on a snapshot: fills the header in and seals. kAborted: the fill was abandoned meanwhile.
  // kInvalidArgument: more extra bytes than there is room for.
  absl::Status Seal(uint32_t turn, const SealInfo& info);

  // A sealed snapshot's header, copied and checked with Validate, and its layout against this buffer's. Not pinned: pin
  // with the turn that it gives, then read.
  struct Sealed {
    BufferHeader header;
    uint32_t turn = 0;
  };
  absl::StatusOr<Sealed> ReadSealed(const Id128& run_id, const Id128& boot_id, uint64_t layout_hash) const;
  // The same without a wanted layout hash: for listing what is there.
  absl::StatusOr<Sealed> ReadSealed(const Id128& run_id, const Id128& boot_id) const;
  // The extra state of a sealed and pinned snapshot, against its CRC. kDataLoss: it does not match.
  absl::StatusOr<std::span<const std::byte>> ReadExtra(const Sealed& sealed) const;

 private:
  Buffer(UniqueFd fd, Mapping mapping, const BufferLayout& layout);
  BufferHeader& header() const { return *reinterpret_cast<BufferHeader*>(mapping_.data()); }
  std::span<std::byte> Part(uint64_t offset, uint64_t bytes) const { return mapping_.bytes().subspan(offset, bytes); }

  UniqueFd fd_;
  Mapping mapping_;
  BufferLayout layout_;
};

}  // namespace outlast
