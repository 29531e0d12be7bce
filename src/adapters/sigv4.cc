#include "adapters/sigv4.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "outlast/base/digest.h"

namespace outlast {
namespace {

std::string Hmac(std::string_view key, std::string_view text) {
  std::string code(32, '\0');
  unsigned bytes = 0;
  HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
       reinterpret_cast<const unsigned char*>(text.data()), text.size(),
       reinterpret_cast<unsigned char*>(code.data()), &bytes);
  return code;
}

std::string Hex(std::string_view bytes) { return ToHex(std::as_bytes(std::span(bytes))); }

std::string Lower(std::string_view text) {
  std::string lower(text);
  for (char& c : lower)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return lower;
}

// Without spaces at the ends, and with single ones inside.
std::string Trimmed(std::string_view text) {
  std::string trimmed;
  for (const char c : text) {
    if (c != ' ' || (!trimmed.empty() && trimmed.back() != ' ')) trimmed += c;
  }
  if (!trimmed.empty() && trimmed.back() == ' ') trimmed.pop_back();
  return trimmed;
}

}  // namespace

std::string UriEncode(std::string_view text, Slashes slashes) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  std::string encoded;
  for (const char c : text) {
    const bool plain = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
                       c == '-' || c == '.' || c == '_' || c == '~' ||
                       (c == '/' && slashes == Slashes::kKeep);
    if (plain) {
      encoded += c;
      continue;
    }
    const auto byte = static_cast<unsigned char>(c);
    encoded += {'%', kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return encoded;
}

std::string CanonicalQuery(const Pairs& query) {
  Pairs encoded;
  for (const auto& [name, value] : query)
    encoded.emplace_back(UriEncode(name, Slashes::kEncode), UriEncode(value, Slashes::kEncode));
  std::ranges::sort(encoded);
  std::string text;
  for (const auto& [name, value] : encoded) {
    if (!text.empty()) text += '&';
    text.append(name).append("=").append(value);
  }
  return text;
}

std::string Authorization(const SignedRequest& request, const S3Credentials& credentials,
                          std::string_view date, std::string_view region,
                          std::string_view service) {
  Pairs headers;
  for (const auto& [name, value] : request.headers)
    headers.emplace_back(Lower(name), Trimmed(value));
  std::ranges::stable_sort(headers, {}, &Pairs::value_type::first);
  std::string lines, names;
  for (size_t i = 0; i < headers.size(); ++i) {
    // Values of one name are joined by commas.
    if (i > 0 && headers[i].first == headers[i - 1].first) {
      lines.back() = ',';
      lines += headers[i].second + "\n";
      continue;
    }
    lines += headers[i].first + ":" + headers[i].second + "\n";
    names += (names.empty() ? "" : ";") + headers[i].first;
  }
  const std::string canonical =
      fmt::format("{}\n{}\n{}\n{}\n{}\n{}", request.method, request.path,
                  CanonicalQuery(request.query), lines, names, request.payload_hash);
  const std::string_view day = date.substr(0, 8);
  const std::string scope = fmt::format("{}/{}/{}/aws4_request", day, region, service);
  const std::string to_sign =
      fmt::format("AWS4-HMAC-SHA256\n{}\n{}\n{}", date, scope, ToHex(Sha256(canonical)));
  std::string key = "AWS4" + credentials.secret_key;
  for (const std::string_view part : {day, region, service, std::string_view("aws4_request")})
    key = Hmac(key, part);
  return fmt::format("AWS4-HMAC-SHA256 Credential={}/{}, SignedHeaders={}, Signature={}",
                     credentials.access_key, scope, names, Hex(Hmac(key, to_sign)));
}

}  // namespace outlast
