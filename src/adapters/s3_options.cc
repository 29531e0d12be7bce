#include "adapters/s3_options.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>

#include "base/error.h"

namespace outlast {
namespace {

constexpr std::string_view kScheme = "s3://";

absl::Status BadUri(std::string_view uri, std::string_view why) {
  return Error(absl::StatusCode::kInvalidArgument,
               "'{}': {}; s3://BUCKET/PREFIX?endpoint=http://HOST:PORT&region=NAME wanted",
               uri.substr(0, 300), why);
}

bool IsBucketName(std::string_view name) {
  const auto fits = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '.';
  };
  return name.size() >= 3 && name.size() <= 63 && std::ranges::all_of(name, fits);
}

std::string First(const Environment& environment, std::initializer_list<const char*> names,
                  std::string otherwise) {
  for (const char* name : names)
    if (auto found = environment(name)) return *found;
  return otherwise;
}

std::string_view Trim(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

// "https://host:443" -> scheme and the header Host.
absl::Status SplitEndpoint(std::string_view endpoint, S3Place& place) {
  while (endpoint.ends_with('/')) endpoint.remove_suffix(1);
  const bool is_tls = endpoint.starts_with("https://");
  if (!is_tls && !endpoint.starts_with("http://")) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "S3 endpoint '{}': http://HOST:PORT or https://HOST:PORT wanted", endpoint);
  }
  std::string_view host = endpoint.substr(is_tls ? 8 : 7);
  if (host.empty() || host.find_first_of("/?#@ ") != std::string_view::npos) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "S3 endpoint '{}': a host and a port alone wanted",
                 host.find('@') == std::string_view::npos ? endpoint : "(with a user)");
  }
  place.origin = endpoint;
  const std::string_view usual = is_tls ? ":443" : ":80";
  if (host.ends_with(usual)) host.remove_suffix(usual.size());
  place.host = host;
  return absl::OkStatus();
}

struct UriOptions {
  std::string endpoint, region, addressing;
};

absl::Status ParseQuery(std::string_view uri, std::string_view query, UriOptions& options) {
  while (!query.empty()) {
    const std::string_view item = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(query.size(), item.size() + 1));
    const size_t equals = item.find('=');
    const std::string_view name = item.substr(0, equals);
    const std::string_view value =
        equals == std::string_view::npos ? std::string_view() : item.substr(equals + 1);
    std::string* target = name == "endpoint"     ? &options.endpoint
                          : name == "region"     ? &options.region
                          : name == "addressing" ? &options.addressing
                                                 : nullptr;
    if (target == nullptr)
      return BadUri(uri.substr(0, uri.find('?')), fmt::format("unknown option '{}'", name));
    *target = value;
  }
  return absl::OkStatus();
}

}  // namespace

Environment ProcessEnvironment() {
  return [](const char* name) -> std::optional<std::string> {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') return std::nullopt;
    return value;
  };
}

absl::StatusOr<S3Place> ParseS3Uri(std::string_view uri, const Environment& environment) {
  if (!uri.starts_with(kScheme)) return BadUri(uri, "another scheme");
  std::string_view rest = uri.substr(kScheme.size());
  UriOptions options;
  if (const size_t mark = rest.find('?'); mark != std::string_view::npos) {
    OUTLAST_RETURN_IF_ERROR(ParseQuery(uri, rest.substr(mark + 1), options));
    rest = rest.substr(0, mark);
  }
  S3Place place;
  place.bucket = rest.substr(0, rest.find('/'));
  if (!IsBucketName(place.bucket)) return BadUri(uri, "no bucket's name");
  std::string_view prefix = rest.substr(place.bucket.size());
  while (prefix.starts_with('/')) prefix.remove_prefix(1);
  while (prefix.ends_with('/')) prefix.remove_suffix(1);
  if (prefix.size() > 100 || prefix.find("//") != std::string_view::npos)
    return BadUri(uri, "a prefix of at most 100 bytes, without '//'");
  place.prefix = prefix.empty() ? "" : std::string(prefix) + "/";
  place.region = options.region.empty()
                     ? First(environment, {"AWS_REGION", "AWS_DEFAULT_REGION"}, "us-east-1")
                     : options.region;
  std::string endpoint = options.endpoint.empty()
                             ? First(environment, {"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"}, "")
                             : options.endpoint;
  const bool by_path =
      options.addressing.empty() ? !endpoint.empty() : options.addressing == "path";
  if (!options.addressing.empty() && !by_path && options.addressing != "host")
    return BadUri(uri, "addressing is path or host");
  if (endpoint.empty()) endpoint = fmt::format("https://s3.{}.amazonaws.com", place.region);
  OUTLAST_RETURN_IF_ERROR(SplitEndpoint(endpoint, place));
  if (by_path) {
    place.base_path = "/" + place.bucket;
  } else {
    const size_t host = place.origin.find("://") + 3;
    place.origin.insert(host, place.bucket + ".");
    place.host = place.bucket + "." + place.host;
  }
  return place;
}

absl::StatusOr<S3Credentials> FindS3Credentials(const Environment& environment) {
  S3Credentials found{First(environment, {"AWS_ACCESS_KEY_ID"}, ""),
                      First(environment, {"AWS_SECRET_ACCESS_KEY"}, ""),
                      First(environment, {"AWS_SESSION_TOKEN"}, "")};
  if (!found.access_key.empty() && !found.secret_key.empty()) return found;
  const std::string file = First(environment, {"AWS_SHARED_CREDENTIALS_FILE"},
                                 First(environment, {"HOME"}, "") + "/.aws/credentials");
  const std::string profile = First(environment, {"AWS_PROFILE"}, "default");
  found = {};
  std::ifstream text(file);
  bool is_ours = false;
  for (std::string line; std::getline(text, line);) {
    const std::string_view trimmed = Trim(line);
    if (trimmed.starts_with('[')) {
      is_ours = trimmed == "[" + profile + "]";
      continue;
    }
    const size_t equals = trimmed.find('=');
    if (!is_ours || equals == std::string_view::npos || trimmed.starts_with('#')) continue;
    const std::string_view name = Trim(trimmed.substr(0, equals));
    const std::string_view value = Trim(trimmed.substr(equals + 1));
    if (name == "aws_access_key_id") found.access_key = value;
    if (name == "aws_secret_access_key") found.secret_key = value;
    if (name == "aws_session_token") found.session_token = value;
  }
  if (!found.access_key.empty() && !found.secret_key.empty()) return found;
  return Error(
      absl::StatusCode::kFailedPrecondition,
      "no S3 credentials: neither AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, nor profile "
      "'{}' in {}",
      profile, file);
}

std::optional<std::string> XmlText(std::string_view xml, std::string_view name, size_t* from) {
  const std::string open = fmt::format("<{}>", name), close = fmt::format("</{}>", name);
  const size_t begin = xml.find(open, *from);
  if (begin == std::string_view::npos) return std::nullopt;
  const size_t end = xml.find(close, begin + open.size());
  if (end == std::string_view::npos) return std::nullopt;
  *from = end + close.size();
  std::string text;
  std::string_view raw = xml.substr(begin + open.size(), end - begin - open.size());
  constexpr std::pair<std::string_view, char> kEntities[] = {
      {"&amp;", '&'},   {"&lt;", '<'},  {"&gt;", '>'},  {"&quot;", '"'},
      {"&apos;", '\''}, {"&#34;", '"'}, {"&#39;", '\''}};
  while (!raw.empty()) {
    const auto entity = std::ranges::find_if(
        kEntities, [&](const auto& one) { return raw.starts_with(one.first); });
    const bool is_entity = entity != std::end(kEntities);
    text += is_entity ? entity->second : raw.front();
    raw.remove_prefix(is_entity ? entity->first.size() : 1);
  }
  return text;
}

std::string XmlEscape(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '&')
      escaped += "&amp;";
    else if (c == '<')
      escaped += "&lt;";
    else if (c == '>')
      escaped += "&gt;";
    else if (c == '"')
      escaped += "&quot;";
    else
      escaped += c;
  }
  return escaped;
}

}  // namespace outlast
