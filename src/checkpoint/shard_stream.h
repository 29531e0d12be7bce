// A file that is written from its first byte to its last without ever being in memory whole.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/manifest.h"
#include "outlast/base/crc32c.h"
#include "outlast/base/memory.h"
#include "store/folder.h"

namespace outlast {

// Writes one new file in pieces of any size, past the page cache, and takes the CRC32C of each
// kChunkBytes of it in passing. For one thread. A stream that goes before Finish removes its file.
class FileStream {
 public:
  // kAlreadyExists; kResourceExhausted with bytes wanted and free.
  static absl::StatusOr<FileStream> Create(const std::string& path, uint64_t file_bytes);

  absl::Status Append(std::span<const std::byte> bytes);

  // Makes the content durable; the folder's entry is the caller's to sync. `name` of what comes
  // back is the path's last part.
  absl::StatusOr<ShardFile> Finish();

 private:
  FileStream(const std::string& path, uint64_t file_bytes, DirectWriter writer, Mapping block);
  absl::Status Flush();

  ShardFile file_;
  DirectWriter writer_;
  Mapping block_;
  size_t filled_ = 0;
  Crc32cStream whole_;
};

}  // namespace outlast
