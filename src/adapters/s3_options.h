// What an s3:// URI and the environment say.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "adapters/sigv4.h"

namespace outlast {

// A variable of the environment; nullopt: not set, or empty.
using Environment = std::function<std::optional<std::string>(const char* name)>;
Environment ProcessEnvironment();

struct S3Place {
  std::string bucket;
  std::string prefix;     // "" or "a/b/"
  std::string origin;     // "http://127.0.0.1:7480", where requests go
  std::string host;       // the header
  std::string base_path;  // "" or "/bucket"
  std::string region;
};

// kInvalidArgument: what is wrong with the URI, or with an endpoint of the environment.
absl::StatusOr<S3Place> ParseS3Uri(std::string_view uri, const Environment& environment);

// kFailedPrecondition: there are none, and where they were looked for. No message holds a secret.
absl::StatusOr<S3Credentials> FindS3Credentials(const Environment& environment);

// The text between <name> and </name>, entities decoded, of the first one from `from` on; `from`
// then stands behind it. nullopt: there is none. For the flat answers of S3, no attributes.
std::optional<std::string> XmlText(std::string_view xml, std::string_view name, size_t* from);
std::string XmlEscape(std::string_view text);

}  // namespace outlast
