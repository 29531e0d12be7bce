#include "checkpoint/writer.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "outlast/base/crc32c.h"

namespace outlast {
namespace {

// A linear map over GF(2) of 32-bit values: row i is the image of bit i.
using Operator = std::array<uint32_t, 32>;

uint32_t Apply(const Operator& map, uint32_t value) {
  uint32_t sum = 0;
  for (size_t i = 0; value != 0; ++i, value >>= 1) {
    if (value & 1) sum ^= map[i];
  }
  return sum;
}

Operator Squared(const Operator& map) {
  Operator square;
  for (size_t i = 0; i < square.size(); ++i) square[i] = Apply(map, map[i]);
  return square;
}

// What appending one zero bit does to the register of CRC32C (reflected polynomial 0x82f63b78).
Operator OneZeroBit() {
  Operator map;
  map[0] = 0x82f63b78;
  for (size_t i = 1; i < map.size(); ++i) map[i] = 1u << (i - 1);
  return map;
}

// What appending `bytes` zero bytes does.
Operator ZeroBytes(uint64_t bytes) {
  Operator result;
  for (size_t i = 0; i < result.size(); ++i) result[i] = 1u << i;
  Operator power = Squared(Squared(Squared(OneZeroBit())));  // 8 bits
  for (; bytes != 0; bytes >>= 1, power = Squared(power)) {
    if ((bytes & 1) == 0) continue;
    for (uint32_t& row : result) row = Apply(power, row);
  }
  return result;
}

// The CRC of a whole file from those of its chunks: a second pass over the bytes would cost as much
// as the first.
uint32_t CombineChunks(std::span<const uint32_t> chunks, uint64_t bytes) {
  const Operator whole_chunk = ZeroBytes(kChunkBytes);
  uint32_t crc = 0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const uint64_t length = std::min<uint64_t>(kChunkBytes, bytes - i * kChunkBytes);
    crc = Apply(length == kChunkBytes ? whole_chunk : ZeroBytes(length), crc) ^ chunks[i];
  }
  return crc;
}

}  // namespace

uint32_t CombineCrcs(uint32_t first, uint32_t second, uint64_t second_bytes) {
  return Apply(ZeroBytes(second_bytes), first) ^ second;
}

std::vector<uint32_t> ChunkCrcs(std::span<const std::byte> bytes) {
  std::vector<uint32_t> crcs;
  crcs.reserve(bytes.size() / kChunkBytes + 1);
  for (size_t at = 0; at < bytes.size(); at += kChunkBytes) {
    crcs.push_back(Crc32c(bytes.subspan(at, std::min<size_t>(kChunkBytes, bytes.size() - at))));
  }
  return crcs;
}

std::vector<SavedBox> SavedBoxesOf(const Assignment& assignment) {
  std::vector<SavedBox> boxes;
  for (const PlannedItem& item : assignment.image) {
    const SafetensorsBox& box = item.box;
    boxes.push_back(
        {box.name, box.key, box.dtype, box.global, box.offset, box.extent, box.begin, box.end});
  }
  return boxes;
}

absl::StatusOr<ShardFile> WriteShard(const std::string& folder, uint32_t writer,
                                     std::span<const std::byte> image,
                                     std::span<const uint32_t> chunks,
                                     const ShardWriteOptions& options) {
  ShardFile file;
  file.name = ShardName(writer);
  file.bytes = image.size();
  const std::string path = folder + "/" + file.name;
  const size_t count = (image.size() + kChunkBytes - 1) / kChunkBytes;
  if (!chunks.empty() && chunks.size() != count) {
    return Error(absl::StatusCode::kInvalidArgument, "{}: {} chunk CRCs for {} bytes, {} wanted",
                 path, chunks.size(), image.size(), count);
  }
  const bool trust = !chunks.empty() && options.crcs == ShardWriteOptions::Crcs::kTrust;
  OUTLAST_ASSIGN_OR_RETURN(DirectWriter file_writer,
                           DirectWriter::Create(path, image.size(), options.io));
  const size_t block = std::max<size_t>(options.io.block_bytes / kChunkBytes, 1) * kChunkBytes;
  for (size_t at = 0; at < image.size(); at += block) {
    const auto part = image.subspan(at, std::min(block, image.size() - at));
    if (!trust) {
      for (const uint32_t crc : ChunkCrcs(part)) {
        const size_t i = file.chunks.size();
        if (!chunks.empty() && crc != chunks[i]) {
          return Error(absl::StatusCode::kDataLoss,
                       "{}: the buffer's chunk at {} has crc {:08x}, {:08x} was sealed", path,
                       i * kChunkBytes, crc, chunks[i]);
        }
        file.chunks.push_back(crc);
      }
    }
    OUTLAST_RETURN_IF_ERROR(file_writer.Append(part));
  }
  if (trust) file.chunks.assign(chunks.begin(), chunks.end());
  OUTLAST_RETURN_IF_ERROR(file_writer.Finish());
  file.crc32c = CombineChunks(file.chunks, file.bytes);
  return file;
}

absl::StatusOr<ReceiptEntry> WriteReceipt(const std::string& folder, const Receipt& receipt) {
  OUTLAST_ASSIGN_OR_RETURN(const std::string text, ToText(receipt));
  OUTLAST_RETURN_IF_ERROR(
      ParseReceipt(text).status());  // what no reader would take must not stand on disk
  ReceiptEntry entry{ReceiptName(receipt.rank), text.size(), Crc32c(text), receipt.data_bytes()};
  OUTLAST_RETURN_IF_ERROR(CreateWhole(folder, entry.name, text));
  return entry;
}

}  // namespace outlast
