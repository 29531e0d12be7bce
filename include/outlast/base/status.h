// Errors are absl::Status values. The code says what the caller should do next:
//   kInvalidArgument mend the call · kNotFound, kAlreadyExists · kFailedPrecondition not before
//   something else changes · kUnavailable retry this call · kAborted start again from the last
//   commit, in a new generation · kDeadlineExceeded a limit passed · kDataLoss bytes do not match
//   their checksum · kResourceExhausted quota, budget or disk · kUnimplemented · kInternal a bug in
//   Outlast.
// A message names the object, what was found and what was wanted.
//
// Debian's Abseil has a string_view of its own, which neither converts to std::string_view nor the
// other way: this header is the one place that knows.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace outlast {

// A status with `code` and `message`.
absl::Status MakeStatus(absl::StatusCode code, std::string_view message);

// The message of `status`. The view lives as long as the status.
std::string_view MessageOf(const absl::Status& status);

// `status` with "place: " before its message; an OK status stays as it is. Each layer adds its own
// place once.
absl::Status Annotate(const absl::Status& status, std::string_view place);

// The error of a system call: "what: <text of error_number>", with the code that fits (ENOENT
// kNotFound, EEXIST kAlreadyExists, ENOSPC and EDQUOT kResourceExhausted, EACCES, EPERM and EROFS
// kPermissionDenied, else kUnavailable).
absl::Status ErrnoStatus(int error_number, std::string_view what);

}  // namespace outlast

#define OUTLAST_CONCAT_INNER(a, b) a##b
#define OUTLAST_CONCAT(a, b) OUTLAST_CONCAT_INNER(a, b)

// Returns from the calling function when `expression`, an absl::Status, is not OK.
#define OUTLAST_RETURN_IF_ERROR(expression)                                                      \
  do {                                                                                           \
    if (absl::Status outlast_status = (expression); !outlast_status.ok()) return outlast_status; \
  } while (false)

// Puts the value of an absl::StatusOr into `target`, which may be a declaration, or returns its
// error.
#define OUTLAST_ASSIGN_OR_RETURN(target, expression) \
  OUTLAST_ASSIGN_OR_RETURN_INNER(OUTLAST_CONCAT(outlast_statusor_, __LINE__), target, expression)
#define OUTLAST_ASSIGN_OR_RETURN_INNER(name, target, expression) \
  auto name = (expression);                                      \
  if (!name.ok()) return std::move(name).status();               \
  target = std::move(name).value()
