#include "checkpoint/receipt_boxes.h"

#include <array>
#include <charconv>

#include "checkpoint/json.h"
#include "checkpoint/manifest_json.h"

namespace outlast {
namespace {

// Reads boxes as AppendBox spells them, which is what our receipts hold by the ten thousand: a tree
// of nlohmann's takes a hundred times as long. It takes nothing else: any other spelling is for the
// tree.
class BoxScanner {
 public:
  // `text` begins after the list's bracket.
  explicit BoxScanner(std::string_view text) : text_(text) {}

  // The boxes up to and with the closing bracket; nullopt: another spelling, or a wrong box.
  std::optional<std::vector<SavedBox>> Scan() {
    std::vector<SavedBox> boxes;
    if (Take("]")) return boxes;
    boxes.reserve(text_.size() / kUsualBoxBytes);
    do {
      if (!ScanBox(boxes.emplace_back())) return std::nullopt;
    } while (Take(","));
    if (!Take("]")) return std::nullopt;
    return boxes;
  }
  size_t position() const { return at_; }

 private:
  bool Take(std::string_view wanted) {
    if (text_.substr(at_, wanted.size()) != wanted) return false;
    at_ += wanted.size();
    return true;
  }

  bool ScanBox(SavedBox& box) {
    std::string dtype;
    if (!Take("{\"name\":\"") || !ScanText(box.name, kMaxNameBytes) || !Take(",\"key\":\"") ||
        !ScanText(box.key, kMaxKeyBytes) || !Take(",\"dtype\":\"") || !ScanText(dtype, 32) ||
        !Take(",\"shape\":[") || !ScanNumbers(box.global) || !Take(",\"offsets\":[") ||
        !ScanNumbers(box.offset) || !Take(",\"extent\":[") || !ScanNumbers(box.extent) ||
        !Take(",\"begin\":") || !ScanNumber(box.begin) || !Take(",\"end\":") ||
        !ScanNumber(box.end) || !Take("}")) {
      return false;
    }
    const std::optional<DType> known = DTypeFromName(dtype);
    if (!known.has_value()) return false;
    box.dtype = *known;
    return !WhyBoxIsWrong(box);
  }

  // After the opening quote, to after the closing one. Escapes are for the tree.
  bool ScanText(std::string& value, size_t cap) {
    const size_t begin = at_;
    uint8_t all = 0;
    for (; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      const auto c = static_cast<uint8_t>(text_[at_]);
      if (c == '\\' || c < 0x20) return false;
      all |= c;
    }
    const std::string_view found = text_.substr(begin, at_ - begin);
    if (found.size() > cap || !Take("\"") || (all >= 0x80 && !IsUtf8(found))) return false;
    value = found;
    return true;
  }

  bool ScanNumber(uint64_t& value) {
    const char* begin = text_.data() + at_;
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
    const bool has_leading_zero = end > begin + 1 && *begin == '0';
    if (error != std::errc() || has_leading_zero || value > uint64_t{kLargestInt}) return false;
    at_ += static_cast<size_t>(end - begin);
    return true;
  }

  bool ScanNumbers(Shape& shape) {
    std::array<int64_t, kMaxDimensions> values;
    size_t count = 0;
    if (!Take("]")) {
      do {
        uint64_t value = 0;
        if (count == values.size() || !ScanNumber(value)) return false;
        values[count++] = static_cast<int64_t>(value);
      } while (Take(","));
      if (!Take("]")) return false;
    }
    shape = Shape(std::span<const int64_t>(values.data(), count));
    return true;
  }

  std::string_view text_;
  size_t at_ = 0;
};

// Where the list of tensors begins, after its bracket; npos: not in our own spelling.
size_t FindTensors(std::string_view text) {
  // A quote inside a string is escaped: so this is a member's name, and of the outermost object
  // if one brace alone is open before it.
  constexpr std::string_view kMember = ",\"tensors\":[";
  const size_t member = text.find(kMember);
  if (member == std::string_view::npos || OpenAt(text.substr(0, member)) != 1)
    return std::string_view::npos;
  return member + kMember.size();
}

}  // namespace

std::optional<std::pair<const char*, const char*>> WhyBoxIsWrong(const SavedBox& box) {
  if (box.name.empty() || box.key.empty()) return std::pair("name", "empty");
  if (box.offset.rank() != box.global.rank() || box.extent.rank() != box.global.rank())
    return std::pair("offsets", "another number of dimensions");
  for (int i = 0; i < box.global.rank(); ++i) {
    if (box.extent[i] > box.global[i] || box.offset[i] > box.global[i] - box.extent[i])
      return std::pair("extent", "the box leaves its tensor");
  }
  const auto bytes = BytesOf(box.dtype, box.extent);
  if (!bytes.ok() || !BytesOf(box.dtype, box.global).ok())
    return std::pair("shape", "too large, or no whole bytes");
  if (box.end < box.begin || box.end - box.begin != *bytes)
    return std::pair("end", "not the bytes of the box");
  return std::nullopt;
}

std::string WithoutList(std::string_view text, size_t begin, size_t end) {
  std::string rest(text.substr(0, begin));
  rest += ']';
  rest += text.substr(end);
  return rest;
}

std::optional<Scanned> ScanBoxes(std::string_view text) {
  const size_t list = FindTensors(text);
  if (list == std::string_view::npos) return std::nullopt;
  BoxScanner scanner(text.substr(list));
  std::optional<std::vector<SavedBox>> boxes = scanner.Scan();
  if (!boxes) return std::nullopt;
  return Scanned{*std::move(boxes), WithoutList(text, list, list + scanner.position())};
}

std::optional<Scanned> SkipBoxes(std::string_view text) {
  const size_t list = FindTensors(text);
  if (list == std::string_view::npos) return std::nullopt;
  return Scanned{{}, WithoutList(text, list, EndOfValue(text, list - 1))};
}

}  // namespace outlast
