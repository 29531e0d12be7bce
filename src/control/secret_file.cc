#include "control/secret_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "base/error.h"

namespace outlast {
namespace {

constexpr size_t kMostFileBytes = 4096;

// As ssh holds its keys: a file of our own must not be open to others. One that somebody else owns,
// such as a cluster's, is that one's to guard.
absl::Status CheckOwnAlone(const UniqueFd& fd, const std::string& path, const std::string& what) {
  struct stat file {};
  if (fstat(fd.get(), &file) != 0) return ErrnoStatus(errno, what);
  constexpr mode_t kOthers = S_IRWXG | S_IRWXO;
  if (!S_ISREG(file.st_mode) || file.st_uid != geteuid() || (file.st_mode & kOthers) == 0)
    return absl::OkStatus();
  return Error(absl::StatusCode::kPermissionDenied,
               "{}: mode {:04o} lets others read or write it, 0600 wanted (chmod 600 {})", what,
               file.st_mode & 07777u, path);
}

}  // namespace

absl::StatusOr<std::string> ReadSecret(const UniqueFd& fd, const std::string& what) {
  std::string content(kMostFileBytes, '\0');
  size_t used = 0;
  while (used < content.size()) {
    const ssize_t got = read(fd.get(), content.data() + used, content.size() - used);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, what);
    if (got == 0) break;
    used += static_cast<size_t>(got);
  }
  content.resize(used);
  return content;
}

absl::StatusOr<std::string> ReadSecretFile(const std::string& path, std::string_view what) {
  const std::string named = fmt::format("{} {}", what, path);
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.is_open()) return ErrnoStatus(errno, named);
  OUTLAST_RETURN_IF_ERROR(CheckOwnAlone(fd, path, named));
  return ReadSecret(fd, named);
}

}  // namespace outlast
