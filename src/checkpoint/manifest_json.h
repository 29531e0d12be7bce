// What the writer and the reader of a root's JSON files share.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "checkpoint/manifest.h"

namespace outlast {

inline constexpr int64_t kLargestInt = std::numeric_limits<int64_t>::max();
inline constexpr std::string_view kSelfCrcMember = ",\"self_crc32c\":\"";
inline constexpr size_t kUsualBoxBytes = 160;  // of a box in a receipt
inline constexpr size_t kMaxKeyBytes = kMaxNameBytes + 16;
inline constexpr size_t kSelfCrcTail = 8 + 3;  // digits, quote, brace, newline

template <typename... Args>
absl::Status Refuse(fmt::format_string<Args...> format, Args&&... args) {
  return Error(absl::StatusCode::kInvalidArgument, format, std::forward<Args>(args)...);
}

inline std::string Hex32(uint32_t value) { return fmt::format("{:08x}", value); }

inline std::optional<uint32_t> FromHex32(std::string_view text) {
  if (text.size() != 8) return std::nullopt;
  uint32_t value = 0;
  for (const char c : text) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit && (c < 'a' || c > 'f')) return std::nullopt;
    value = value * 16 + static_cast<uint32_t>(digit ? c - '0' : c - 'a' + 10);
  }
  return value;
}

inline bool IsHex(std::string_view text, size_t digits) {
  return text.size() == digits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

inline bool IsBase64Object(const nlohmann::json& object) {
  return object.size() == 1 && object.contains("base64") && object["base64"].is_string();
}

// A receipt's text, and where its list of tensors lies.
struct ReceiptText {
  std::string text;
  size_t list_begin = 0, list_end = 0;  // of the tensors: after each bracket
};
absl::StatusOr<ReceiptText> Compose(const Receipt& receipt);

}  // namespace outlast
