// Reads one shard in blocks of whole chunks, each checked against the receipt before it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/manifest.h"
#include "checkpoint/read_ahead.h"
#include "store/direct_reader.h"

namespace outlast {

// `block` begins at byte `begin` of the shard, where a chunk does. kDataLoss: a chunk's CRC, named.
absl::Status CheckChunks(std::string_view place, const ShardFile& file, uint64_t begin,
                         std::span<const std::byte> block);

// What is read at once, in whole chunks.
uint64_t BlockBytes(const ShardFile& file);

// Reads a shard in blocks of whole chunks, ahead of the one who uses them, and hands out none
// before its CRCs were checked. For one thread.
class ChunkReader {
 public:
  // `file` outlives it. kDataLoss: another size than the receipt's.
  static absl::StatusOr<std::unique_ptr<ChunkReader>> Open(const std::string& folder,
                                                           const ShardFile& file, IoMode mode);

  uint64_t block_bytes() const { return BlockBytes(file_); }
  // The whole file.
  std::vector<Stretch> AllBlocks() const;

  // What Next hands out: each from a chunk's start to a chunk's end, or the file's, and at most
  // block_bytes() long.
  absl::Status Start(std::vector<Stretch> blocks);
  // The bytes of the next block, until the next call. An error is this block's alone.
  absl::StatusOr<std::span<const std::byte>> Next();
  // The errors of the chunks of one block, each read by itself.
  void ReadEach(const Stretch& block,
                const std::function<void(uint64_t offset, const absl::Status&)>& report);

 private:
  ChunkReader(std::unique_ptr<DirectReader> disk, const ShardFile& file)
      : disk_(std::move(disk)), file_(file) {}

  absl::Status Check(uint64_t begin, std::span<const std::byte> block) const {
    return CheckChunks(disk_->path(), file_, begin, block);
  }

  const std::unique_ptr<DirectReader> disk_;
  const ShardFile& file_;
  std::vector<Stretch> blocks_;
  size_t next_ = 0;
  std::unique_ptr<ReadAhead> ahead_;  // last: its threads use all of the above
};

}  // namespace outlast
