#include "outlast/blackbox/buffer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/huge_pages.h"
#include "blackbox/fork_guard.h"
#include "blackbox/words.h"
#include "outlast/base/crc32c.h"
#include "outlast/blackbox/segment.h"

namespace outlast {
namespace {

constexpr uint64_t kBufferMagic = MagicOf("OUTLBUFR");
constexpr size_t kControlOffset = offsetof(BufferHeader, control);
constexpr uint64_t kLargestPart = uint64_t{1} << 47;

uint64_t RoundUp(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

absl::Status Mismatch(absl::StatusCode code, std::string_view field, uint64_t found,
                      uint64_t wanted) {
  return Error(code, "buffer: {} is {:#x}, {:#x} wanted", field, found, wanted);
}

// The layout that a header states, when it adds up. The header may be hostile.
absl::StatusOr<BufferLayout> LayoutOf(const BufferHeader& header) {
  constexpr auto kBad = absl::StatusCode::kDataLoss;
  if (header.magic != kBufferMagic) return Mismatch(kBad, "magic", header.magic, kBufferMagic);
  if (header.version != kBufferVersion) {
    return Error(absl::StatusCode::kUnimplemented, "buffer: version {}, this program reads {}",
                 header.version, kBufferVersion);
  }
  BufferLayout layout = {.image_bytes = header.image_bytes,
                         .replicated_bytes = header.replicated_bytes};
  if (const absl::Status sizes = layout.Check(); !sizes.ok())
    return Error(kBad, "{}", MessageOf(sizes));
  const uint64_t extra_offset = layout.extra_offset();
  if (header.buffer_bytes < extra_offset)
    return Mismatch(kBad, "buffer bytes", header.buffer_bytes, extra_offset);
  layout.extra_capacity = static_cast<uint32_t>(
      std::min<uint64_t>(header.buffer_bytes - extra_offset, std::numeric_limits<uint32_t>::max()));
  const struct {
    std::string_view name;
    uint64_t found, wanted;
  } fields[] = {
      {"header bytes", header.header_bytes, kBufferHeaderBytes},
      {"buffer bytes", header.buffer_bytes, layout.buffer_bytes()},
      {"image offset", header.image_offset, layout.image_offset()},
      {"padded image bytes", header.padded_image_bytes, layout.padded_image_bytes()},
      {"CRC table offset", header.crc_table_offset, layout.crc_table_offset()},
      {"chunk bytes", header.chunk_bytes, kChunkBytes},
      {"chunk count", header.chunk_count, layout.chunk_count()},
      {"replicated offset", header.replicated_offset, layout.replicated_offset()},
      {"extra offset", header.extra_offset, extra_offset},
  };
  for (const auto& field : fields) {
    if (field.found != field.wanted) return Mismatch(kBad, field.name, field.found, field.wanted);
  }
  if (header.extra_bytes > layout.extra_capacity) {
    return Mismatch(kBad, "extra bytes", header.extra_bytes, layout.extra_capacity);
  }
  return layout;
}

void PutLayout(BufferHeader& header, const BufferLayout& layout) {
  header.magic = kBufferMagic;
  header.version = kBufferVersion;
  header.header_bytes = kBufferHeaderBytes;
  header.buffer_bytes = layout.buffer_bytes();
  header.image_offset = layout.image_offset();
  header.image_bytes = layout.image_bytes;
  header.padded_image_bytes = layout.padded_image_bytes();
  header.crc_table_offset = layout.crc_table_offset();
  header.chunk_bytes = kChunkBytes;
  header.chunk_count = layout.chunk_count();
  header.extra_offset = layout.extra_offset();
  header.replicated_offset = layout.replicated_offset();
  header.replicated_bytes = layout.replicated_bytes;
}

// All of the header but the control word.
void StoreHeader(BufferHeader& target, const BufferHeader& header) {
  auto* bytes = reinterpret_cast<std::byte*>(&target);
  const auto words = std::bit_cast<blackbox::WordsOf<BufferHeader>>(header);
  for (size_t i = 0; i < words.size(); ++i) {
    if (8 * i != kControlOffset) blackbox::StoreWordAt(bytes + 8 * i, words[i]);
  }
}

// Everything that Validate checks but the layout hash.
absl::StatusOr<BufferLayout> CheckSealed(const BufferHeader& header, const Id128& run_id,
                                         const Id128& boot_id) {
  const auto state = ControlWord::Unpack(header.control).state;
  OUTLAST_ASSIGN_OR_RETURN(const BufferLayout layout, LayoutOf(header));
  if (state != BufferState::kSealed) {
    return Error(absl::StatusCode::kFailedPrecondition, "buffer: state {}, {} (sealed) wanted",
                 static_cast<int>(state), static_cast<int>(BufferState::kSealed));
  }
  if (const uint32_t crc = HeaderCrc(header); crc != header.header_crc) {
    return Mismatch(absl::StatusCode::kDataLoss, "header crc", crc, header.header_crc);
  }
  if (header.run_id != run_id) {
    return Error(absl::StatusCode::kNotFound, "buffer: of run {}, {} wanted", header.run_id.hex(),
                 run_id.hex());
  }
  if (header.boot_id != boot_id) {
    return Error(absl::StatusCode::kNotFound, "buffer: of boot {}, {} wanted", header.boot_id.hex(),
                 boot_id.hex());
  }
  return layout;
}

absl::Status CheckLayoutHash(const BufferHeader& header, uint64_t layout_hash) {
  if (header.layout_hash == layout_hash) return absl::OkStatus();
  return Mismatch(absl::StatusCode::kNotFound, "layout hash", header.layout_hash, layout_hash);
}

bool CannotShrink(int fd) {
  const int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

}  // namespace

// ---- Layout ----

uint64_t BufferLayout::padded_image_bytes() const { return RoundUp(image_bytes, 4096); }
uint64_t BufferLayout::replicated_offset() const { return image_offset() + padded_image_bytes(); }
uint64_t BufferLayout::crc_table_offset() const {
  return replicated_offset() + RoundUp(replicated_bytes, 4096);
}

uint32_t BufferLayout::image_chunk_count() const {
  return static_cast<uint32_t>(RoundUp(image_bytes, kChunkBytes) / kChunkBytes);
}

uint32_t BufferLayout::chunk_count() const {
  return image_chunk_count() +
         static_cast<uint32_t>(RoundUp(replicated_bytes, kChunkBytes) / kChunkBytes);
}

uint64_t BufferLayout::extra_offset() const {
  return RoundUp(crc_table_offset() + uint64_t{chunk_count()} * sizeof(uint32_t), 64);
}

uint64_t BufferLayout::buffer_bytes() const {
  return RoundUp(extra_offset() + extra_capacity, 4096);
}

ChunkRange BufferLayout::chunk(uint32_t index) const {
  const uint32_t image_chunks = image_chunk_count();
  const bool in_image = index < image_chunks;
  const uint64_t start = uint64_t{in_image ? index : index - image_chunks} * kChunkBytes;
  const uint64_t part = in_image ? image_bytes : replicated_bytes;
  return {.offset = (in_image ? image_offset() : replicated_offset()) + start,
          .bytes = static_cast<uint32_t>(std::min<uint64_t>(kChunkBytes, part - start))};
}

absl::Status BufferLayout::Check() const {
  if (image_bytes == 0 && replicated_bytes == 0) {
    return Error(absl::StatusCode::kInvalidArgument, "buffer: neither image nor replicated bytes");
  }
  if (image_bytes > kLargestPart || replicated_bytes > kLargestPart) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "buffer: an image of {} and {} replicated bytes, at most {} each wanted",
                 image_bytes, replicated_bytes, kLargestPart);
  }
  return absl::OkStatus();
}

// ---- The control word ----

ControlWord ControlWord::Unpack(uint64_t word) {
  return {.state = static_cast<BufferState>(word & 0xff),
          .pins = static_cast<uint32_t>(word >> 8 & 0xffffff),
          .turn = static_cast<uint32_t>(word >> 32)};
}

uint64_t ControlWord::Pack() const {
  return uint64_t{static_cast<uint8_t>(state)} | uint64_t{pins & 0xffffff} << 8 |
         uint64_t{turn} << 32;
}

// Applies `change`, which says no or changes the word that it is given.
template <typename Change>
bool BufferControl::Swap(Change change) {
  uint64_t found = __atomic_load_n(word_, __ATOMIC_ACQUIRE);
  while (true) {
    ControlWord next = ControlWord::Unpack(found);
    if (!change(next)) return false;
    if (__atomic_compare_exchange_n(word_, &found, next.Pack(), false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE))
      return true;
  }
}

ControlWord BufferControl::Read() const { return ControlWord::Unpack(LoadWord(*word_)); }

bool BufferControl::TryBeginFill(Replace replace, uint32_t* turn) {
  return Swap([&](ControlWord& word) {
    const bool is_free =
        word.state == BufferState::kEmpty ||
        (replace == Replace::kSealedToo && word.state == BufferState::kSealed && word.pins == 0);
    word = {.state = BufferState::kFilling, .pins = 0, .turn = word.turn + 1};
    *turn = word.turn;
    return is_free;
  });
}

bool BufferControl::Seal(uint32_t turn) {
  return Swap([turn](ControlWord& word) {
    const bool may = word.state == BufferState::kFilling && word.turn == turn;
    word.state = BufferState::kSealed;
    return may;
  });
}

bool BufferControl::Abandon(uint32_t turn) {
  return Swap([turn](ControlWord& word) {
    const bool may = word.state == BufferState::kFilling && word.turn == turn;
    word.state = BufferState::kEmpty;
    return may;
  });
}

bool BufferControl::TryPin(BufferPin pin, uint32_t turn) {
  const auto bit = static_cast<uint32_t>(pin);
  return Swap([bit, turn](ControlWord& word) {
    const bool may =
        word.state == BufferState::kSealed && word.turn == turn && (word.pins & bit) == 0;
    word.pins |= bit;
    return may;
  });
}

bool BufferControl::Unpin(BufferPin pin, uint32_t turn) {
  const auto bit = static_cast<uint32_t>(pin);
  return Swap([bit, turn](ControlWord& word) {
    const bool may =
        word.state == BufferState::kSealed && word.turn == turn && (word.pins & bit) != 0;
    word.pins &= ~bit;
    return may;
  });
}

bool BufferControl::Discard(uint32_t turn) {
  return Swap([turn](ControlWord& word) {
    const bool may = word.state == BufferState::kSealed && word.turn == turn && word.pins == 0;
    word.state = BufferState::kEmpty;
    return may;
  });
}

void BufferControl::ClearPins() {
  Swap([](ControlWord& word) {
    word.pins = 0;
    return true;
  });
}

// ---- The header ----

uint32_t HeaderCrc(const BufferHeader& header) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(&header, 1));
  constexpr std::array<std::byte, 8> kNoControl{};
  Crc32cStream crc;
  crc.Update(bytes.first(kControlOffset));
  crc.Update(kNoControl);
  crc.Update(
      bytes.subspan(kControlOffset + 8, offsetof(BufferHeader, header_crc) - kControlOffset - 8));
  return crc.value();
}

absl::Status Validate(const BufferHeader& header, const Id128& run_id, const Id128& boot_id,
                      uint64_t layout_hash) {
  OUTLAST_RETURN_IF_ERROR(CheckSealed(header, run_id, boot_id).status());
  return CheckLayoutHash(header, layout_hash);
}

// ---- The buffer ----

namespace {

// Memory for snapshots: all of it there, sealed against shrinking and growing.
absl::StatusOr<std::pair<UniqueFd, Mapping>> MakeTouchedMemory(uint64_t bytes) {
  const auto no_memory = [bytes](std::string_view why) {
    return Error(absl::StatusCode::kResourceExhausted, "a snapshot buffer of {} bytes: {}", bytes,
                 why);
  };
  auto fd = MakeSealedMemory("outlast-buffer", bytes, Allocation::kOnTouch);
  if (!fd.ok()) return no_memory(MessageOf(fd.status()));
  auto mapping = Mapping::SharedTouched(fd->get(), bytes);
  if (!mapping.ok()) return no_memory(MessageOf(mapping.status()));
  // Where the kernel cannot touch all at once (before 5.14).
  if (fallocate(fd->get(), 0, 0, static_cast<off_t>(bytes)) != 0)
    return no_memory(fmt::format("error {}", errno));
  return std::pair(*std::move(fd), *std::move(mapping));
}

}  // namespace

Buffer::Buffer(UniqueFd fd, Mapping mapping, const BufferLayout& layout)
    : fd_(std::move(fd)), mapping_(std::move(mapping)), layout_(layout) {
  blackbox::GuardAgainstFork(mapping_.data(), mapping_.size());
}

Buffer::Buffer(Buffer&& other) noexcept = default;
Buffer& Buffer::operator=(Buffer&& other) noexcept =
    default;  // Mapping's swaps: the old one goes with `other`

Buffer::~Buffer() {
  if (mapping_.data() != nullptr) blackbox::ForgetGuarded(mapping_.data());
}

absl::StatusOr<Buffer> Buffer::Create(const BufferLayout& layout, const BufferIdentity& identity) {
  OUTLAST_RETURN_IF_ERROR(layout.Check());
  OUTLAST_ASSIGN_OR_RETURN(auto memory, MakeTouchedMemory(layout.buffer_bytes()));
  BufferHeader header{};
  PutLayout(header, layout);
  header.job_id = identity.job_id;
  header.run_id = identity.run_id;
  header.rank = identity.rank;
  header.world = identity.world;
  header.boot_id = BootId();
  header.header_crc = HeaderCrc(header);
  OUTLAST_ASSIGN_OR_RETURN(const BufferLayout whole, LayoutOf(header));
  StoreHeader(*reinterpret_cast<BufferHeader*>(memory.second.data()), header);
  return Buffer(std::move(memory.first), std::move(memory.second), whole);
}

absl::StatusOr<Buffer> Buffer::Open(UniqueFd fd) {
  struct stat file {};
  if (fstat(fd.get(), &file) != 0) return ErrnoStatus(errno, "open a snapshot buffer");
  if (!CannotShrink(fd.get())) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "buffer: descriptor {} is not sealed against shrinking", fd.get());
  }
  const auto size = static_cast<uint64_t>(file.st_size);
  if (size < kBufferHeaderBytes) {
    return Error(absl::StatusCode::kDataLoss, "buffer: {} bytes, a header alone has {}", size,
                 kBufferHeaderBytes);
  }
  OUTLAST_ASSIGN_OR_RETURN(Mapping mapping, Mapping::Shared(fd.get(), size));
  const auto header = blackbox::LoadRecord<BufferHeader>(mapping.data());
  OUTLAST_ASSIGN_OR_RETURN(const BufferLayout layout, LayoutOf(header));
  if (header.buffer_bytes != size)
    return Mismatch(absl::StatusCode::kDataLoss, "buffer bytes", header.buffer_bytes, size);
  return Buffer(std::move(fd), std::move(mapping), layout);
}

std::span<uint32_t> Buffer::chunk_crcs() const {
  return {reinterpret_cast<uint32_t*>(mapping_.data() + layout_.crc_table_offset()),
          layout_.chunk_count()};
}

std::span<std::byte> Buffer::chunk(uint32_t index) const {
  const ChunkRange range = layout_.chunk(index);
  return Part(range.offset, range.bytes);
}

absl::Status Buffer::Seal(uint32_t turn, const SealInfo& info) {
  if (info.extra_bytes > layout_.extra_capacity) {
    return Error(absl::StatusCode::kInvalidArgument, "buffer: {} bytes of extra state, room for {}",
                 info.extra_bytes, layout_.extra_capacity);
  }
  // The run and the boot are the agent's, as Create wrote them; no one changes them.
  auto sealed = blackbox::LoadRecord<BufferHeader>(&header());
  PutLayout(sealed, layout_);
  sealed.job_id = info.job_id;
  sealed.generation = info.generation;
  sealed.folder_nonce = info.folder_nonce;
  sealed.step = info.step;
  sealed.rank = info.rank;
  sealed.world = info.world;
  sealed.layout_hash = info.layout_hash;
  sealed.update_stamp = info.update_stamp;
  sealed.sealed_at_ns = info.sealed_at_ns;
  sealed.extra_bytes = info.extra_bytes;
  sealed.extra_crc = Crc32c(extra().first(info.extra_bytes));
  sealed.header_crc = HeaderCrc(sealed);
  const ControlWord word = control().Read();
  if (word.state != BufferState::kFilling || word.turn != turn) {
    return Error(absl::StatusCode::kAborted, "buffer: the fill of turn {} was abandoned", turn);
  }
  StoreHeader(header(), sealed);
  if (control().Seal(turn)) return absl::OkStatus();
  return Error(absl::StatusCode::kAborted, "buffer: the fill of turn {} was abandoned", turn);
}

absl::StatusOr<Buffer::Sealed> Buffer::ReadSealed(const Id128& run_id, const Id128& boot_id) const {
  const ControlWord before = control().Read();
  auto copy = blackbox::LoadRecord<BufferHeader>(&header());
  copy.control = before.Pack();
  OUTLAST_ASSIGN_OR_RETURN(const BufferLayout layout, CheckSealed(copy, run_id, boot_id));
  const ControlWord after = control().Read();
  if (after.state != before.state || after.turn != before.turn) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "buffer: refilled while its header was read");
  }
  if (layout != layout_) {
    return Mismatch(absl::StatusCode::kDataLoss, "image bytes", layout.image_bytes,
                    layout_.image_bytes);
  }
  return Sealed{.header = copy, .turn = before.turn};
}

absl::StatusOr<Buffer::Sealed> Buffer::ReadSealed(const Id128& run_id, const Id128& boot_id,
                                                  uint64_t layout_hash) const {
  OUTLAST_ASSIGN_OR_RETURN(Sealed sealed, ReadSealed(run_id, boot_id));
  OUTLAST_RETURN_IF_ERROR(CheckLayoutHash(sealed.header, layout_hash));
  return sealed;
}

absl::StatusOr<std::span<const std::byte>> Buffer::ReadExtra(const Sealed& sealed) const {
  if (sealed.header.extra_bytes > layout_.extra_capacity) {
    return Mismatch(absl::StatusCode::kDataLoss, "extra bytes", sealed.header.extra_bytes,
                    layout_.extra_capacity);
  }
  const std::span<const std::byte> bytes = extra().first(sealed.header.extra_bytes);
  if (const uint32_t crc = Crc32c(bytes); crc != sealed.header.extra_crc) {
    return Mismatch(absl::StatusCode::kDataLoss, "extra crc", crc, sealed.header.extra_crc);
  }
  return bytes;
}

}  // namespace outlast
