#include "checkpoint/json.h"

#include <openssl/evp.h>

#include <algorithm>
#include <cstdint>

#include "base/error.h"

namespace outlast {
namespace {

// The bytes of the UTF-8 character that begins at `text`, 0 if it is none (overlong forms and
// surrogates are none).
size_t CharacterBytes(std::string_view text) {
  const auto byte = [&](size_t i) {
    return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0};
  };
  const auto follows = [&](size_t i) { return (byte(i) & 0xc0) == 0x80; };
  const uint8_t first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return follows(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    if (!follows(1) || !follows(2)) return 0;
    if (first == 0xe0 && byte(1) < 0xa0) return 0;
    return first == 0xed && byte(1) > 0x9f ? 0 : 3;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    if (!follows(1) || !follows(2) || !follows(3)) return 0;
    if (first == 0xf0 && byte(1) < 0x90) return 0;
    return first == 0xf4 && byte(1) > 0x8f ? 0 : 4;
  }
  return 0;
}

// The index after the string that begins at `from` (a quote).
size_t AfterString(std::string_view json, size_t from) {
  size_t at = from + 1;
  while (at < json.size() && json[at] != '"') at += json[at] == '\\' ? 2 : 1;
  return std::min(at + 1, json.size());
}

bool IsSpace(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

size_t SkipSpaces(std::string_view json, size_t at) {
  while (at < json.size() && IsSpace(json[at])) ++at;
  return at;
}

// The index after the value that begins at `at`.
size_t AfterValue(std::string_view json, size_t at) {
  int depth = 0;
  while (at < json.size()) {
    const char c = json[at];
    if (c == '"') {
      at = AfterString(json, at);
    } else if (depth == 0 && (c == ',' || c == '}' || c == ']' || IsSpace(c))) {
      return at;
    } else {
      depth += c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0;
      ++at;
    }
    if (depth == 0 && (c == '"' || c == '}' || c == ']')) return at;
  }
  return at;
}

}  // namespace

bool IsUtf8(std::string_view text) {
  text.remove_prefix(static_cast<size_t>(
      std::ranges::find_if(text, [](char c) { return static_cast<uint8_t>(c) >= 0x80; }) -
      text.begin()));  // most names are nothing else
  while (!text.empty()) {
    const size_t bytes = CharacterBytes(text);
    if (bytes == 0) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

void AppendQuoted(std::string_view text, std::string& json) {
  const auto is_plain = [](char c) {
    return c != '"' && c != '\\' && static_cast<uint8_t>(c) >= 0x20;
  };
  json += '"';
  if (std::ranges::all_of(text, is_plain)) {
    json += text;
  } else {
    for (const char c : text) {
      if (static_cast<uint8_t>(c) < 0x20) {
        json += fmt::format("\\u{:04x}", static_cast<uint8_t>(c));
        continue;
      }
      if (!is_plain(c)) json += '\\';
      json += c;
    }
  }
  json += '"';
}

std::string Quoted(std::string_view text) {
  std::string quoted;
  AppendQuoted(text, quoted);
  return quoted;
}

int NestingOf(std::string_view json) {
  int depth = 0;
  int deepest = 0;
  for (size_t at = 0; at < json.size();) {
    const char c = json[at];
    if (c == '"') {
      at = AfterString(json, at);
      continue;
    }
    if (c == '{' || c == '[') deepest = std::max(deepest, ++depth);
    if (c == '}' || c == ']') --depth;
    ++at;
  }
  return deepest;
}

size_t EndOfValue(std::string_view json, size_t at) { return AfterValue(json, at); }

int OpenAt(std::string_view json) {
  int depth = 0;
  for (size_t at = 0; at < json.size();) {
    const char c = json[at];
    if (c == '"') {
      at = AfterString(json, at);
      continue;
    }
    depth += c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0;
    ++at;
  }
  return depth;
}

bool HasHiddenBytes(std::string_view json) {
  return json.substr(0, 3) == "\xef\xbb\xbf" || json.find('\0') != std::string_view::npos;
}

std::vector<std::pair<std::string_view, std::string_view>> RawMembers(std::string_view object) {
  std::vector<std::pair<std::string_view, std::string_view>> members;
  size_t at = SkipSpaces(object, 0) + 1;
  while (true) {
    at = SkipSpaces(object, at);
    if (at >= object.size() || object[at] != '"') return members;
    const size_t key_end = AfterString(object, at);
    const std::string_view key = object.substr(at, key_end - at);
    const size_t value = SkipSpaces(object, SkipSpaces(object, key_end) + 1);
    const size_t value_end = AfterValue(object, value);
    if (value >= object.size()) return members;
    members.emplace_back(key, object.substr(value, value_end - value));
    at = SkipSpaces(object, value_end) + 1;
  }
}

std::string ToBase64(std::string_view bytes) {
  std::string text((bytes.size() + 2) / 3 * 4 + 1, '\0');  // one more for the NUL that it writes
  const int length = EVP_EncodeBlock(reinterpret_cast<unsigned char*>(text.data()),
                                     reinterpret_cast<const unsigned char*>(bytes.data()),
                                     static_cast<int>(bytes.size()));
  text.resize(static_cast<size_t>(length));
  return text;
}

std::optional<std::string> FromBase64(std::string_view text) {
  if (text.size() % 4 != 0 || text.size() > (size_t{1} << 30)) return std::nullopt;
  if (text.empty()) return std::string();
  std::string bytes(text.size() / 4 * 3, '\0');
  const int length = EVP_DecodeBlock(reinterpret_cast<unsigned char*>(bytes.data()),
                                     reinterpret_cast<const unsigned char*>(text.data()),
                                     static_cast<int>(text.size()));
  if (length < 0) return std::nullopt;
  bytes.resize(static_cast<size_t>(length) -
               static_cast<size_t>(std::count(text.end() - 2, text.end(), '=')));
  if (ToBase64(bytes) != text)
    return std::nullopt;  // it passes spaces over, and bits that no encoder sets
  return bytes;
}

}  // namespace outlast
