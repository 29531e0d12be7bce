#include "outlast/base/plugins.h"

#include "base/error.h"

namespace outlast {

std::string_view SchemeOf(std::string_view uri) {
  const size_t end = uri.find("://");
  return end == std::string_view::npos ? std::string_view() : uri.substr(0, end);
}

namespace internal {

absl::Status SchemeTaken(std::string_view scheme) {
  return Error(absl::StatusCode::kAlreadyExists, "plug-in for '{}://': there is one already",
               scheme);
}

absl::Status NoSuchScheme(std::string_view uri, const std::vector<std::string>& known) {
  std::string names;
  for (const std::string& name : known)
    names += (names.empty() ? "" : ", ") + (name.empty() ? "a path" : name + "://");
  return Error(absl::StatusCode::kInvalidArgument,
               "'{}': no plug-in for its scheme '{}', {} wanted", uri, SchemeOf(uri),
               names.empty() ? "a registered one" : names);
}

}  // namespace internal
}  // namespace outlast
