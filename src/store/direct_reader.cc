#include "store/direct_reader.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "base/error.h"

namespace outlast {

absl::StatusOr<std::unique_ptr<DirectReader>> DirectReader::Open(std::string path, IoMode mode,
                                                                 ReadCall call) {
  std::unique_ptr<DirectReader> reader(new DirectReader(std::move(path), call));
  reader->fd_.Reset(open(reader->path_.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!reader->fd_.is_open()) return FileError(errno, "open", reader->path_);
  if (mode == IoMode::kDirect) reader->SetDirect(true);
  return reader;
}

void DirectReader::SetDirect(bool direct) {
  const int flags = fcntl(fd_.get(), F_GETFL);
  const bool is_set = fcntl(fd_.get(), F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
  is_direct_.store(direct && is_set);
}

absl::Status DirectReader::Read(uint64_t begin, uint64_t bytes, std::byte* into) {
  const uint64_t padded = (bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
  for (uint64_t done = 0; done < bytes;) {
    // Asked before the read: a refusal counts for the mode that it was made in, and another thread
    // may be the one that leaves it.
    const bool was_direct = is_direct_.load();
    const ssize_t count =
        call_(fd_.get(), into + done, padded - done, static_cast<off_t>(begin + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EINVAL && was_direct) {
      // O_DIRECT is refused here, or only for what a short read left.
      SetDirect(false);
      continue;
    }
    if (count < 0) return FileError(errno, "read", path_);
    if (count == 0) {
      return Error(absl::StatusCode::kDataLoss, "{}: ends at byte {}, while it is read", path_,
                   begin + done);
    }
    done += static_cast<uint64_t>(count);
  }
  return absl::OkStatus();
}

}  // namespace outlast
