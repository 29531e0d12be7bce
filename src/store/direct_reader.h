// Reads a file past the page cache.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "outlast/base/fd.h"
#include "store/folder.h"

namespace outlast {

// One open regular file. Safe for concurrent use.
class DirectReader {
 public:
  using ReadCall = ssize_t (*)(int fd, void* into, size_t bytes, off_t offset);

  // kDirect falls back to kBuffered where O_DIRECT is refused. Follows no symlink in the last
  // component. `call` is pread, or what a test puts in its place. kNotFound.
  static absl::StatusOr<std::unique_ptr<DirectReader>> Open(std::string path, IoMode mode,
                                                            ReadCall call = pread);

  // Puts the file's bytes from `begin` on, a multiple of kBlockAlignment, at `into`: aligned so,
  // and with room up to the next multiple. kDataLoss: the file ends before. Else the disk's error.
  absl::Status Read(uint64_t begin, uint64_t bytes, std::byte* into);

  const std::string& path() const { return path_; }
  // How it is read in fact.
  IoMode mode() const { return is_direct_.load() ? IoMode::kDirect : IoMode::kBuffered; }

 private:
  DirectReader(std::string path, ReadCall call) : path_(std::move(path)), call_(call) {}
  void SetDirect(bool direct);

  const std::string path_;
  const ReadCall call_;
  UniqueFd fd_;
  std::atomic<bool> is_direct_{false};
};

}  // namespace outlast
