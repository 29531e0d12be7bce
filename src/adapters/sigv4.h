// AWS Signature Version 4, pure. Source: AWS General Reference, "Create a signed AWS API request";
// for S3 "Authenticating Requests: Using the Authorization Header".
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace outlast {

using Pairs = std::vector<std::pair<std::string, std::string>>;

struct S3Credentials {
  std::string access_key, secret_key, session_token;  // the last may be empty
};

struct SignedRequest {
  std::string method;
  std::string path = "/";    // encoded once
  Pairs query;               // not encoded, in any order
  Pairs headers;             // all are signed; with "host" and "x-amz-date"
  std::string payload_hash;  // hex of the body's SHA-256
};

// Everything but A-Z a-z 0-9 - . _ ~ as %XX; '/' too unless kKeep.
enum class Slashes : uint8_t { kKeep, kEncode };
std::string UriEncode(std::string_view text, Slashes slashes);
// "a=b&c=d", encoded and in the order that signing wants.
std::string CanonicalQuery(const Pairs& query);

// The value of the header Authorization. `date` is x-amz-date's: "20150830T123600Z".
std::string Authorization(const SignedRequest& request, const S3Credentials& credentials,
                          std::string_view date, std::string_view region, std::string_view service);

}  // namespace outlast
