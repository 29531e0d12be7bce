#include "checkpoint/shard_stream.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "checkpoint/writer.h"
#include "outlast/base/status.h"

namespace outlast {
namespace {

constexpr size_t kStreamBlock = size_t{8} << 20;  // a multiple of chunks and of what O_DIRECT wants

}  // namespace

FileStream::FileStream(const std::string& path, uint64_t file_bytes, DirectWriter writer,
                       Mapping block)
    : writer_(std::move(writer)), block_(std::move(block)) {
  file_.name = path.substr(path.find_last_of('/') + 1);
  file_.bytes = file_bytes;
}

absl::StatusOr<FileStream> FileStream::Create(const std::string& path, uint64_t file_bytes) {
  OUTLAST_ASSIGN_OR_RETURN(DirectWriter writer, DirectWriter::Create(path, file_bytes));
  OUTLAST_ASSIGN_OR_RETURN(Mapping block, Mapping::Anonymous(kStreamBlock));
  return FileStream(path, file_bytes, std::move(writer), std::move(block));
}

absl::Status FileStream::Append(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const size_t count = std::min(bytes.size(), block_.size() - filled_);
    std::memcpy(block_.data() + filled_, bytes.data(), count);
    filled_ += count;
    bytes = bytes.subspan(count);
    if (filled_ == block_.size()) OUTLAST_RETURN_IF_ERROR(Flush());
  }
  return absl::OkStatus();
}

absl::Status FileStream::Flush() {
  const std::span<const std::byte> ready = block_.bytes().first(filled_);
  std::ranges::copy(ChunkCrcs(ready), std::back_inserter(file_.chunks));
  whole_.Update(ready);
  filled_ = 0;
  return writer_.Append(ready);
}

absl::StatusOr<ShardFile> FileStream::Finish() {
  if (filled_ > 0) OUTLAST_RETURN_IF_ERROR(Flush());
  OUTLAST_RETURN_IF_ERROR(writer_.Finish());
  file_.crc32c = whole_.value();
  return std::move(file_);
}

}  // namespace outlast
