// A file that holds a secret.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "outlast/base/fd.h"

namespace outlast {

// Its first 4096 bytes. Errors name `what` it is, with the path, and never its content: the file
// system's; kPermissionDenied: it is ours, and others may read or write it.
absl::StatusOr<std::string> ReadSecretFile(const std::string& path, std::string_view what);
// Of an open descriptor, to its end.
absl::StatusOr<std::string> ReadSecret(const UniqueFd& fd, const std::string& what);

}  // namespace outlast
