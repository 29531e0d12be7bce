// What the fuzz targets share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "outlast/base/crc32c.h"

namespace outlast::fuzz {

inline std::string_view TextOf(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

// A promise that the input has broken.
inline void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

// `body` is a file without its last member: no mutation would ever find the CRC that fits.
inline std::string WithSelfCrc(std::string_view body) {
  std::string text(body);
  text += ",\"self_crc32c\":\"";
  char tail[12];
  std::snprintf(tail, sizeof tail, "%08x\"}\n", Crc32c(text));
  return text + tail;
}

// What a parser takes, it must write so that it takes it again, as the same.
template <typename Parsed, typename Parse>
void RequireRoundTrip(const Parsed& parsed, Parse parse) {
  const auto text = ToText(parsed);
  Require(text.ok(), "what was read can be written");
  const auto again = parse(*text);
  Require(again.ok(), "what was written can be read");
  const auto text_again = ToText(*again);
  Require(text_again.ok() && *text_again == *text, "it is the same then");
}

}  // namespace outlast::fuzz
