#include "outlast/base/status.h"

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace outlast {
namespace {

absl::StatusCode CodeOf(int error_number) {
  switch (error_number) {
    case ENOENT:
      return absl::StatusCode::kNotFound;
    case EEXIST:
      return absl::StatusCode::kAlreadyExists;
    case ENOSPC:
    case EDQUOT:
    case ENOMEM:
    case EMFILE:
    case ENFILE:
      return absl::StatusCode::kResourceExhausted;
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::StatusCode::kPermissionDenied;
    case EINVAL:
    case ENOTDIR:
    case EISDIR:
    case ENAMETOOLONG:
      return absl::StatusCode::kInvalidArgument;
    default:
      return absl::StatusCode::kUnavailable;
  }
}

}  // namespace

absl::Status MakeStatus(absl::StatusCode code, std::string_view message) {
  return absl::Status(code, {message.data(), message.size()});
}

std::string_view MessageOf(const absl::Status& status) {
  const auto message = status.message();
  return {message.data(), message.size()};
}

absl::Status Annotate(const absl::Status& status, std::string_view place) {
  if (status.ok()) return status;
  return Error(status.code(), "{}: {}", place, MessageOf(status));
}

absl::Status ErrnoStatus(int error_number, std::string_view what) {
  char buffer[128];
  return Error(CodeOf(error_number), "{}: {} (errno {})", what,
               strerror_r(error_number, buffer, sizeof buffer), error_number);
}

}  // namespace outlast
