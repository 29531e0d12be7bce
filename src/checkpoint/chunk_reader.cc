#include "checkpoint/chunk_reader.h"

#include <algorithm>

#include "base/error.h"
#include "outlast/base/crc32c.h"
#include "outlast/base/memory.h"
#include "store/folder.h"

namespace outlast {
namespace {

// A read, and what reads of one file hold together: enough for a drive's full speed.
constexpr uint64_t kReadBytes = uint64_t{4} << 20;
constexpr uint64_t kRingBytes = 4 * kReadBytes;

}  // namespace

absl::Status CheckChunks(std::string_view place, const ShardFile& file, uint64_t begin,
                         std::span<const std::byte> block) {
  for (uint64_t at = 0; at < block.size(); at += file.chunk_bytes) {
    const uint32_t wanted = file.chunks[(begin + at) / file.chunk_bytes];
    const uint32_t found =
        Crc32c(block.subspan(at, std::min<uint64_t>(file.chunk_bytes, block.size() - at)));
    if (found == wanted) continue;
    return Error(absl::StatusCode::kDataLoss,
                 "{}: the chunk at byte {} has crc {:08x}, its receipt says {:08x}", place,
                 begin + at, found, wanted);
  }
  return absl::OkStatus();
}

uint64_t BlockBytes(const ShardFile& file) {
  return std::max<uint64_t>(1, kReadBytes / file.chunk_bytes) * file.chunk_bytes;
}

absl::StatusOr<std::unique_ptr<ChunkReader>> ChunkReader::Open(const std::string& folder,
                                                               const ShardFile& file, IoMode mode) {
  OUTLAST_ASSIGN_OR_RETURN(auto disk, DirectReader::Open(folder + "/" + file.name, mode));
  OUTLAST_ASSIGN_OR_RETURN(const uint64_t bytes, FileBytes(disk->path()));
  if (bytes != file.bytes) {
    return Error(absl::StatusCode::kDataLoss, "{}: {} bytes, its receipt says {}", disk->path(),
                 bytes, file.bytes);
  }
  return std::unique_ptr<ChunkReader>(new ChunkReader(std::move(disk), file));
}

std::vector<Stretch> ChunkReader::AllBlocks() const {
  std::vector<Stretch> blocks;
  for (uint64_t at = 0; at < file_.bytes; at += block_bytes())
    blocks.push_back({at, std::min(file_.bytes, at + block_bytes())});
  return blocks;
}

absl::Status ChunkReader::Start(std::vector<Stretch> blocks) {
  blocks_ = blocks;
  OUTLAST_ASSIGN_OR_RETURN(
      ahead_, ReadAhead::Start(
                  std::move(blocks), kRingBytes, [this](const Stretch& stretch, std::byte* into) {
                    return disk_->Read(stretch.begin, stretch.end - stretch.begin, into);
                  }));
  return absl::OkStatus();
}

absl::StatusOr<std::span<const std::byte>> ChunkReader::Next() {
  const Stretch& stretch = blocks_[next_++];
  OUTLAST_ASSIGN_OR_RETURN(const std::span<const std::byte> block, ahead_->Next());
  OUTLAST_RETURN_IF_ERROR(Check(stretch.begin, block));
  return block;
}

void ChunkReader::ReadEach(
    const Stretch& block, const std::function<void(uint64_t offset, const absl::Status&)>& report) {
  const auto scratch = Mapping::Anonymous(file_.chunk_bytes);
  if (!scratch.ok()) return report(block.begin, scratch.status());
  for (uint64_t at = block.begin; at < block.end; at += file_.chunk_bytes) {
    const Stretch chunk{at, std::min(block.end, at + file_.chunk_bytes)};
    absl::Status status = disk_->Read(at, chunk.end - at, scratch->data());
    if (status.ok()) status = Check(at, scratch->bytes().first(chunk.end - chunk.begin));
    if (!status.ok()) report(at, status);
  }
}
}  // namespace outlast
