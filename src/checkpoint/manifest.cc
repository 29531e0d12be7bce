#include "checkpoint/manifest.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/name_index.h"
#include "checkpoint/json.h"
#include "outlast/base/crc32c.h"
#include "store/folder.h"

namespace outlast {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

template <typename... Args>
absl::Status Refuse(fmt::format_string<Args...> format, Args&&... args) {
  return Error(absl::StatusCode::kInvalidArgument, format, std::forward<Args>(args)...);
}

constexpr int64_t kLargestInt = std::numeric_limits<int64_t>::max();
constexpr std::string_view kSelfCrcMember = ",\"self_crc32c\":\"";
constexpr size_t kUsualBoxBytes = 160;  // of a box in a receipt
constexpr size_t kMaxKeyBytes = kMaxNameBytes + 16;
constexpr size_t kSelfCrcTail = 8 + 3;  // digits, quote, brace, newline

std::string Hex32(uint32_t value) { return fmt::format("{:08x}", value); }

std::optional<uint32_t> FromHex32(std::string_view text) {
  if (text.size() != 8) return std::nullopt;
  uint32_t value = 0;
  for (const char c : text) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit && (c < 'a' || c > 'f')) return std::nullopt;
    value = value * 16 + static_cast<uint32_t>(digit ? c - '0' : c - 'a' + 10);
  }
  return value;
}

bool IsHex(std::string_view text, size_t digits) {
  return text.size() == digits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// --- Writing ---

absl::StatusOr<std::string> Dump(const ordered_json& object) {
  try {
    return object.dump();
  } catch (const ordered_json::exception&) {  // the only cause: a string that is not UTF-8
    return Refuse("a text for {} is not UTF-8", object.value("format", "a file"));
  }
}

absl::StatusOr<std::string> DumpLine(const ordered_json& object) {
  OUTLAST_ASSIGN_OR_RETURN(std::string text, Dump(object));
  return text + "\n";
}

ordered_json Begin(std::string_view format) { return {{"format", format}, {"version", 1}}; }

// `text` is an object's text; more members may be appended raw before.
std::string WithSelfCrc(std::string text) {
  text.pop_back();
  text += kSelfCrcMember;
  text += Hex32(Crc32c(text)) + "\"}\n";
  return text;
}

ordered_json MeshJson(const Mesh& mesh) {
  ordered_json object = ordered_json::object();
  for (const auto& [axis, size] : mesh) object[axis] = size;
  return object;
}

ordered_json Nullable(const std::optional<std::string>& text) {
  return text.has_value() ? ordered_json(*text) : ordered_json(nullptr);
}

ordered_json HooksJson(const std::vector<HookResult>& hooks) {
  ordered_json list = ordered_json::array();
  for (const HookResult& hook : hooks) {
    list.push_back({{"name", hook.name}, {"result", hook.result}, {"note", hook.note}});
  }
  return list;
}

ordered_json FileJson(const std::optional<ShardFile>& file) {
  if (!file.has_value()) return nullptr;
  std::string chunks;
  chunks.reserve(file->chunks.size() * 8);
  for (const uint32_t crc : file->chunks) chunks += Hex32(crc);
  return {{"name", file->name},
          {"bytes", file->bytes},
          {"crc32c", Hex32(file->crc32c)},
          {"chunk_bytes", file->chunk_bytes},
          {"chunks", chunks}};
}

template <typename Int>
void AppendNumber(Int value, std::string& text) {
  std::array<char, 20> digits;
  text.append(digits.data(), std::to_chars(digits.begin(), digits.end(), value).ptr);
}

void AppendNumbers(const Shape& shape, std::string& text) {
  for (const int64_t length : shape.dimensions()) {
    AppendNumber(length, text);
    text += ',';
  }
  if (shape.rank() > 0) text.pop_back();
}

// By hand: a state may have these by the ten thousand, and a format string takes several times as
// long.
void AppendBox(const SavedBox& box, std::string& text) {
  text += "{\"name\":";
  AppendQuoted(box.name, text);
  text += ",\"key\":";
  AppendQuoted(box.key, text);
  text += ",\"dtype\":\"";
  text += NameOf(box.dtype);
  text += "\",\"shape\":[";
  AppendNumbers(box.global, text);
  text += "],\"offsets\":[";
  AppendNumbers(box.offset, text);
  text += "],\"extent\":[";
  AppendNumbers(box.extent, text);
  text += "],\"begin\":";
  AppendNumber(box.begin, text);
  text += ",\"end\":";
  AppendNumber(box.end, text);
  text += '}';
}

bool IsBase64Object(const json& object) {
  return object.size() == 1 && object.contains("base64") && object["base64"].is_string();
}

// Can `value` stand in the receipt as it is? Not what would read back as something else.
bool StandsAsJson(std::string_view value) {
  if (value.empty() || value.front() != '{' || value.back() != '}') return false;
  if (HasHiddenBytes(value) || NestingOf(value) > kMaxNesting - 2) return false;
  const json object = json::parse(value, nullptr, false);
  return object.is_object() && !IsBase64Object(object);
}

absl::StatusOr<std::string> ExtraText(const Extras& extras) {
  std::string text = "{";
  size_t bytes = 0;
  for (const auto& [key, value] : extras) {
    bytes += key.size() + value.size();
    if (bytes > kMaxExtrasBytes) return Refuse("extra state: more than {} bytes", kMaxExtrasBytes);
    if (!IsUtf8(key)) return Refuse("extra state: a key is not UTF-8");
    if (text.size() > 1) text += ',';
    text += Quoted(key) + ":";
    text += StandsAsJson(value) ? value : fmt::format("{{\"base64\":\"{}\"}}", ToBase64(value));
  }
  return text + "}";
}

// --- Reading ---

// The members of one JSON object. The first thing that is wrong is kept, and all that follows is
// empty: so a parser reads straight through, and looks at status() once.
class Members {
 public:
  Members(const json& object, std::string place, absl::Status& status)
      : object_(object), place_(std::move(place)), status_(status) {
    if (!object.is_object()) Fail("", "not an object");
  }

  const json& Get(const char* name) {
    static const json kNull;
    if (!object_.is_object()) return kNull;
    const auto found = object_.find(name);
    if (found != object_.end()) return *found;
    Fail(name, "missing");
    return kNull;
  }

  std::string String(const char* name, size_t cap = kMaxNameBytes) {
    const json& value = Get(name);
    if (!value.is_string()) return Fail(name, "not a string"), std::string();
    const std::string& text = value.get_ref<const std::string&>();
    if (text.size() > cap) return Fail(name, "too long"), std::string();
    return text;
  }

  std::optional<std::string> NullableString(const char* name) {
    if (Get(name).is_null() && status_.ok()) return std::nullopt;
    return String(name);
  }

  uint64_t Unsigned(const char* name, uint64_t largest = std::numeric_limits<uint64_t>::max()) {
    return Number(Get(name), name, largest);
  }
  int64_t NotNegative(const char* name) {
    return static_cast<int64_t>(Unsigned(name, kLargestInt));
  }
  uint32_t Unsigned32(const char* name) {
    return static_cast<uint32_t>(Unsigned(name, std::numeric_limits<uint32_t>::max()));
  }

  Id128 Id(const char* name) {
    const auto id = Id128::FromHex(String(name));
    if (!id.ok()) Fail(name, "not 32 lower-case hex digits");
    return id.value_or(Id128{});
  }

  uint32_t Crc(const char* name) {
    const std::optional<uint32_t> crc = FromHex32(String(name));
    if (!crc.has_value()) Fail(name, "not 8 lower-case hex digits");
    return crc.value_or(0);
  }

  std::string Checkpoint(const char* name) { return CheckpointIn(String(name), name); }
  std::optional<std::string> NullableCheckpoint(const char* name) {
    std::optional<std::string> text = NullableString(name);
    if (text.has_value()) CheckpointIn(*text, name);
    return text;
  }
  std::string CheckpointIn(std::string text, const char* name) {
    if (!ParseCheckpointName(text).has_value()) Fail(name, "not a checkpoint's name");
    return text;
  }

  Shape Numbers(const char* name) {
    const json& list = Array(name);
    if (list.size() > kMaxDimensions) return Fail(name, "more than 16 dimensions"), Shape();
    std::vector<int64_t> values;
    for (const json& value : list)
      values.push_back(static_cast<int64_t>(Number(value, name, kLargestInt)));
    return Shape(values);
  }

  const json& Array(const char* name) {
    static const json kEmpty = json::array();
    const json& value = Get(name);
    if (value.is_array()) return value;
    Fail(name, "not a list");
    return kEmpty;
  }

  void Fail(std::string_view name, std::string_view why) {
    if (status_.ok()) status_ = Refuse("{}{}{}: {}", place_, name.empty() ? "" : ".", name, why);
  }

  const absl::Status& status() const { return status_; }

 private:
  uint64_t Number(const json& value, const char* name, uint64_t largest) {
    if (!value.is_number_unsigned()) return Fail(name, "not a whole number from 0"), 0;
    const auto number = value.get<uint64_t>();
    if (number > largest) return Fail(name, "too large"), 0;
    return number;
  }

  const json& object_;
  std::string place_;
  absl::Status& status_;
};

absl::StatusOr<json> Parse(std::string_view text, std::string_view format, uint64_t cap) {
  if (text.size() > cap) return Refuse("{}: {} bytes, at most {} wanted", format, text.size(), cap);
  if (HasHiddenBytes(text) || NestingOf(text) > kMaxNesting) {
    return Refuse("{}: a NUL, a byte order mark, or nesting deeper than {}", format, kMaxNesting);
  }
  json object = json::parse(text, nullptr, false);
  if (object.is_discarded()) return Refuse("{}: not JSON", format);
  absl::Status status;
  Members members(object, std::string(format), status);
  const std::string found = members.String("format");
  const uint64_t version = members.Unsigned("version");
  OUTLAST_RETURN_IF_ERROR(status);
  if (found != format) return Refuse("format '{}', '{}' wanted", found.substr(0, 64), format);
  if (version > 1) {
    return Error(absl::StatusCode::kUnimplemented, "{}: version {}, this program reads 1", format,
                 version);
  }
  if (version == 0) return Refuse("{}: version 0, 1 wanted", format);
  return object;
}

absl::Status CheckSelfCrc(std::string_view text, std::string_view format) {
  const auto lost = [&](std::string_view why) {
    return Error(absl::StatusCode::kDataLoss, "{}: {}", format, why);
  };
  if (text.size() < kSelfCrcMember.size() + kSelfCrcTail ||
      text.substr(text.size() - 3) != "\"}\n") {
    return lost(fmt::format("cut off: its {} bytes do not end in self_crc32c", text.size()));
  }
  const std::string_view covered = text.substr(0, text.size() - kSelfCrcTail);
  const std::optional<uint32_t> wanted = FromHex32(text.substr(covered.size(), 8));
  if (!covered.ends_with(kSelfCrcMember) || !wanted.has_value()) {
    return lost(fmt::format("its {} bytes do not end in self_crc32c", text.size()));
  }
  const uint32_t found = Crc32c(covered);
  if (found != *wanted)
    return lost(fmt::format("crc {}, self_crc32c says {}", Hex32(found), Hex32(*wanted)));
  return absl::OkStatus();
}

Mesh ReadMesh(Members& members) {
  const json& object = members.Get("mesh");
  if (!object.is_object()) return members.Fail("mesh", "not an object"), Mesh();
  Mesh mesh;
  for (const auto& [axis, size] : object.items()) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() > uint64_t{kLargestInt}) {
      return members.Fail("mesh", "a size that is no whole number"), Mesh();
    }
    mesh.emplace_back(axis, size.get<int64_t>());
  }
  return mesh;
}

std::vector<HookResult> ReadHooks(Members& members, absl::Status& status) {
  std::vector<HookResult> hooks;
  for (const json& entry : members.Array("hooks")) {
    Members hook(entry, "hooks", status);
    hooks.push_back(
        {hook.String("name"), hook.String("result"), hook.String("note", kMaxSmallBytes)});
    const std::string& result = hooks.back().result;
    if (result != "ok" && result != "veto" && result != "error")
      hook.Fail("result", "ok, veto or error wanted");
    if (!status.ok()) break;
  }
  return hooks;
}

std::optional<ShardFile> ReadFile(Members& receipt, uint32_t writer, absl::Status& status) {
  const json& value = receipt.Get("file");
  if (value.is_null()) return std::nullopt;
  Members members(value, "outlast.receipt.file", status);
  ShardFile file;
  file.name = members.String("name");
  file.bytes = members.Unsigned("bytes", uint64_t{1} << 62);
  file.crc32c = members.Crc("crc32c");
  file.chunk_bytes = members.Unsigned32("chunk_bytes");
  const std::string chunks = members.String("chunks", kMaxReceiptBytes);
  // The name follows from the writer's number, so it cannot name anything outside the folder.
  if (file.name != ShardName(writer)) members.Fail("name", "not the writer's shard");
  if (file.chunk_bytes == 0 || file.chunk_bytes % kBlockAlignment != 0 ||
      file.chunk_bytes > (64u << 20)) {
    members.Fail("chunk_bytes", "a multiple of 4096 up to 64 MiB wanted");
  }
  if (!status.ok()) return file;
  if (chunks.size() % 8 != 0 ||
      chunks.size() / 8 != (file.bytes + file.chunk_bytes - 1) / file.chunk_bytes) {
    members.Fail("chunks", "not 8 digits for each chunk of the file");
  }
  for (size_t at = 0; at + 8 <= chunks.size() && status.ok(); at += 8) {
    const std::optional<uint32_t> crc = FromHex32(std::string_view(chunks).substr(at, 8));
    if (!crc.has_value()) members.Fail("chunks", "not lower-case hex");
    file.chunks.push_back(crc.value_or(0));
  }
  return file;
}

// What is wrong with a box by itself: the member, and why; none: nothing.
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

SavedBox ReadBox(const json& entry, absl::Status& status) {
  Members members(entry, "outlast.receipt.tensors", status);
  SavedBox box;
  box.name = members.String("name");
  box.key = members.String("key", kMaxKeyBytes);
  const std::optional<DType> dtype = DTypeFromName(members.String("dtype"));
  if (!dtype.has_value()) members.Fail("dtype", "unknown");
  box.dtype = dtype.value_or(DType::kU8);
  box.global = members.Numbers("shape");
  box.offset = members.Numbers("offsets");
  box.extent = members.Numbers("extent");
  box.begin = members.Unsigned("begin", kLargestInt);
  box.end = members.Unsigned("end", kLargestInt);
  if (const auto wrong = WhyBoxIsWrong(box)) members.Fail(wrong->first, wrong->second);
  return box;
}

std::vector<SavedBox> ReadBoxes(Members& receipt, absl::Status& status) {
  std::vector<SavedBox> boxes;
  for (const json& entry : receipt.Array("tensors")) {
    boxes.push_back(ReadBox(entry, status));
    if (!status.ok()) break;
  }
  return boxes;
}

// What is wrong with the boxes together; none: nothing.
std::optional<const char*> WhyPlacesAreWrong(const std::vector<SavedBox>& boxes) {
  NameIndex keys(boxes.size());
  uint64_t position = 0;
  for (const SavedBox& box : boxes) {
    if (box.begin != position) return "a hole or an overlap";
    if (!keys.Add(box.key).is_new) return "a key is there twice";
    position = box.end;
  }
  return std::nullopt;
}

// What is wrong with a receipt's boxes and its file; none: nothing.
std::optional<std::pair<const char*, const char*>> WhyFileIsWrong(const Receipt& receipt) {
  if (!receipt.file.has_value() && !receipt.tensors.empty())
    return std::pair("tensors", "boxes without a file");
  if (receipt.file.has_value() && receipt.data_bytes() + 8 > receipt.file->bytes)
    return std::pair("file", "fewer bytes than its tensors have");
  return std::nullopt;
}

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

// A receipt whose boxes were read already, and its text without them.
struct Scanned {
  std::vector<SavedBox> boxes;
  std::string rest;
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

std::string WithoutList(std::string_view text, size_t begin, size_t end) {
  std::string rest(text.substr(0, begin));
  rest += ']';
  rest += text.substr(end);
  return rest;
}

// nullopt: not our own spelling.
std::optional<Scanned> ScanBoxes(std::string_view text) {
  const size_t list = FindTensors(text);
  if (list == std::string_view::npos) return std::nullopt;
  BoxScanner scanner(text.substr(list));
  std::optional<std::vector<SavedBox>> boxes = scanner.Scan();
  if (!boxes) return std::nullopt;
  return Scanned{*std::move(boxes), WithoutList(text, list, list + scanner.position())};
}

// The list is passed over by its brackets.
std::optional<Scanned> SkipBoxes(std::string_view text) {
  const size_t list = FindTensors(text);
  if (list == std::string_view::npos) return std::nullopt;
  return Scanned{{}, WithoutList(text, list, EndOfValue(text, list - 1))};
}

std::vector<std::pair<std::string, std::string>> ReadAliases(Members& receipt) {
  std::vector<std::pair<std::string, std::string>> aliases;
  for (const json& entry : receipt.Array("aliases")) {
    if (!entry.is_array() || entry.size() != 2 || !entry[0].is_string() || !entry[1].is_string()) {
      receipt.Fail("aliases", "pairs of names wanted");
      break;
    }
    aliases.emplace_back(entry[0].get<std::string>(), entry[1].get<std::string>());
  }
  return aliases;
}

// From the text, not from the parsed tree: the numbers in it come back as they were given.
Extras ReadExtras(std::string_view text, Members& receipt) {
  Extras extras;
  if (!receipt.Get("extra").is_object()) return receipt.Fail("extra", "not an object"), extras;
  size_t bytes = 0;
  for (const auto& [name, value] : RawMembers(text)) {
    if (name != "\"extra\"") continue;
    if (!extras.empty()) return receipt.Fail("extra", "there twice"), Extras();
    for (const auto& [raw_key, raw_value] : RawMembers(value)) {
      const json key = json::parse(raw_key, nullptr, false);
      const json parsed = json::parse(raw_value, nullptr, false);
      if (!key.is_string() || !parsed.is_object())
        return receipt.Fail("extra", "objects by key wanted"), Extras();
      std::optional<std::string> content = std::string(raw_value);
      if (IsBase64Object(parsed))
        content = FromBase64(parsed["base64"].get_ref<const std::string&>());
      if (!content.has_value()) return receipt.Fail("extra", "not base64"), Extras();
      const auto& key_text = key.get_ref<const std::string&>();
      bytes += key_text.size() + content->size();
      if (bytes > kMaxExtrasBytes) return receipt.Fail("extra", "more than 16 MiB"), Extras();
      if (!extras.emplace(key_text, std::move(*content)).second)
        return receipt.Fail("extra", "a key is there twice"), Extras();
    }
  }
  return extras;
}

void CheckStep(Members& members, std::string_view checkpoint, int64_t step) {
  const auto parts = ParseCheckpointName(checkpoint);
  if (parts.has_value() && parts->step != step)
    members.Fail("step", "not the step of the checkpoint's name");
}

std::vector<ReceiptEntry> ReadReceiptEntries(Members& manifest, absl::Status& status) {
  std::vector<ReceiptEntry> entries;
  for (const json& entry : manifest.Array("receipts")) {
    Members members(entry, "outlast.manifest.receipts", status);
    ReceiptEntry receipt;
    receipt.name = members.String("name");
    receipt.bytes = members.Unsigned("bytes", kMaxReceiptBytes);
    receipt.crc32c = members.Crc("crc32c");
    receipt.data_bytes = members.Unsigned("data_bytes", uint64_t{1} << 62);
    if (receipt.name != ReceiptName(static_cast<uint32_t>(entries.size()))) {
      members.Fail("name", fmt::format("'{}', '{}' wanted", receipt.name.substr(0, 200),
                                       ReceiptName(static_cast<uint32_t>(entries.size()))));
    }
    if (!status.ok()) break;
    entries.push_back(std::move(receipt));
  }
  return entries;
}

absl::Status CheckSum(const Manifest& manifest) {
  if (manifest.world == 0 || manifest.receipts.size() != manifest.world) {
    return Refuse("outlast.manifest: {} receipts for a world of {}", manifest.receipts.size(),
                  manifest.world);
  }
  uint64_t sum = 0;
  for (const ReceiptEntry& receipt : manifest.receipts) {
    if (__builtin_add_overflow(sum, receipt.data_bytes, &sum))
      return Refuse("outlast.manifest: data_bytes overflow");
  }
  if (sum == manifest.bytes) return absl::OkStatus();
  return Refuse("outlast.manifest: bytes {}, its receipts have {}", manifest.bytes, sum);
}

absl::StatusOr<std::string> Capped(std::string text, uint64_t cap, std::string_view what) {
  if (text.size() > cap) return Refuse("{}: {} bytes, at most {} wanted", what, text.size(), cap);
  return text;
}

}  // namespace

std::string CheckpointName(int64_t step, uint32_t nonce) {
  return fmt::format("step-{:012}-{:08x}", step, nonce);
}

std::optional<CheckpointNameParts> ParseCheckpointName(std::string_view name) {
  constexpr std::string_view kPrefix = "step-";
  if (name.size() < kPrefix.size() + 12 + 9 || name.size() > kPrefix.size() + 19 + 9)
    return std::nullopt;
  const std::string_view digits = name.substr(kPrefix.size(), name.size() - kPrefix.size() - 9);
  const std::optional<uint32_t> nonce = FromHex32(name.substr(name.size() - 8));
  CheckpointNameParts parts{0, nonce.value_or(0)};
  for (const char c : digits) {
    if (c < '0' || c > '9' || __builtin_mul_overflow(parts.step, 10, &parts.step) ||
        __builtin_add_overflow(parts.step, c - '0', &parts.step)) {
      return std::nullopt;
    }
  }
  if (parts.nonce == 0 || CheckpointName(parts.step, parts.nonce) != name) return std::nullopt;
  return parts;
}

std::string ShardName(uint32_t writer) { return fmt::format("w{:05}.safetensors", writer); }
std::string ReceiptName(uint32_t rank) { return fmt::format("w{:05}.receipt.json", rank); }

absl::StatusOr<std::string> ToText(const RootRecord& record) {
  ordered_json object = Begin("outlast.root");
  object["job"] = record.job.hex();
  object["name"] = record.name;
  return DumpLine(object);
}

absl::StatusOr<std::string> ToText(const Claim& claim) {
  ordered_json object = Begin("outlast.claim");
  object["job"] = claim.job.hex();
  object["run"] = claim.run.hex();
  object["host"] = claim.host;
  object["boot_id"] = claim.boot_id.hex();
  object["pid_namespace"] = claim.pid_namespace;
  object["pid"] = claim.pid;
  object["pid_start"] = claim.pid_start;
  return DumpLine(object);
}

absl::StatusOr<std::string> ToText(const Latest& latest) {
  ordered_json object = Begin("outlast.latest");
  object["checkpoint"] = latest.checkpoint;
  object["step"] = latest.step;
  return DumpLine(object);
}

absl::StatusOr<std::string> ToText(const std::vector<QuarantineEntry>& entries) {
  ordered_json object = Begin("outlast.quarantine");
  object["entries"] = ordered_json::array();
  for (const QuarantineEntry& entry : entries) {
    object["entries"].push_back({{"checkpoint", entry.checkpoint}, {"reason", entry.reason}});
  }
  return DumpLine(object);
}

absl::StatusOr<std::string> ToText(const HooksRecord& hooks) {
  ordered_json object = Begin("outlast.hooks");
  object["checkpoint"] = hooks.checkpoint;
  object["hooks"] = HooksJson(hooks.hooks);
  return DumpLine(object);
}

namespace {

struct ReceiptText {
  std::string text;
  size_t list_begin = 0, list_end = 0;  // of the tensors: after each bracket
};

absl::StatusOr<ReceiptText> Compose(const Receipt& receipt) {
  ReceiptText result;
  ordered_json object = Begin("outlast.receipt");
  object["job"] = receipt.job.hex();
  object["run"] = receipt.run.hex();
  object["claim"] = receipt.claim;
  object["checkpoint"] = receipt.checkpoint;
  object["parent"] = Nullable(receipt.parent);
  object["step"] = receipt.step;
  object["generation"] = receipt.generation;
  object["writer"] = receipt.writer;
  object["rank"] = receipt.rank;
  object["world"] = receipt.world;
  object["plan"] = receipt.plan;
  object["mesh"] = MeshJson(receipt.mesh);
  object["hooks"] = receipt.hooks;
  object["boot_id"] = receipt.boot_id.hex();
  object["file"] = FileJson(receipt.file);
  OUTLAST_ASSIGN_OR_RETURN(std::string text, Dump(object));
  OUTLAST_ASSIGN_OR_RETURN(const std::string extra, ExtraText(receipt.extra));
  text.pop_back();
  size_t bytes = 0;
  for (const SavedBox& box : receipt.tensors) bytes += kUsualBoxBytes + 2 * box.name.size();
  text.reserve(text.size() + extra.size() + bytes);
  text += ",\"tensors\":[";
  result.list_begin = text.size();
  for (const SavedBox& box : receipt.tensors) {
    if (!IsUtf8(box.name) || !IsUtf8(box.key))
      return Refuse("a text for outlast.receipt is not UTF-8");
    if (text.back() != '[') text += ',';
    AppendBox(box, text);
  }
  text += ']';
  result.list_end = text.size();
  text += ",\"aliases\":[";
  for (const auto& [name, of] : receipt.aliases) {
    if (!IsUtf8(name) || !IsUtf8(of)) return Refuse("a text for outlast.receipt is not UTF-8");
    text += fmt::format("{}[{},{}]", text.back() == '[' ? "" : ",", Quoted(name), Quoted(of));
  }
  text += "],\"extra\":" + extra + "}";
  OUTLAST_ASSIGN_OR_RETURN(result.text,
                           Capped(WithSelfCrc(std::move(text)), kMaxReceiptBytes, "a receipt"));
  return result;
}

}  // namespace

absl::StatusOr<std::string> ToText(const Receipt& receipt) {
  OUTLAST_ASSIGN_OR_RETURN(ReceiptText composed, Compose(receipt));
  return std::move(composed.text);
}

absl::StatusOr<std::string> ToText(const Manifest& manifest) {
  ordered_json object = Begin("outlast.manifest");
  object["job"] = manifest.job.hex();
  object["claim"] = manifest.claim;
  object["checkpoint"] = manifest.checkpoint;
  object["step"] = manifest.step;
  object["generation"] = manifest.generation;
  object["parent"] = Nullable(manifest.parent);
  object["ancestors"] = manifest.ancestors;
  object["world"] = manifest.world;
  object["mesh"] = MeshJson(manifest.mesh);
  object["plan"] = manifest.plan;
  object["tensors"] = manifest.tensors;
  object["bytes"] = manifest.bytes;
  object["receipts"] = ordered_json::array();
  for (const ReceiptEntry& receipt : manifest.receipts) {
    object["receipts"].push_back({{"name", receipt.name},
                                  {"bytes", receipt.bytes},
                                  {"crc32c", Hex32(receipt.crc32c)},
                                  {"data_bytes", receipt.data_bytes}});
  }
  object["hooks"] = HooksJson(manifest.hooks);
  object["committed_by"] = {{"agent", manifest.committed_by.agent},
                            {"claim", manifest.committed_by.claim},
                            {"generation", manifest.committed_by.generation}};
  OUTLAST_ASSIGN_OR_RETURN(std::string text, Dump(object));
  return Capped(WithSelfCrc(std::move(text)), kMaxManifestBytes, "a manifest");
}

absl::StatusOr<RootRecord> ParseRootRecord(std::string_view text) {
  OUTLAST_ASSIGN_OR_RETURN(const json object, Parse(text, "outlast.root", kMaxSmallBytes));
  absl::Status status;
  Members members(object, "outlast.root", status);
  RootRecord record{members.Id("job"), members.String("name")};
  OUTLAST_RETURN_IF_ERROR(status);
  return record;
}

absl::StatusOr<Claim> ParseClaim(std::string_view text) {
  OUTLAST_ASSIGN_OR_RETURN(const json object, Parse(text, "outlast.claim", kMaxSmallBytes));
  absl::Status status;
  Members members(object, "outlast.claim", status);
  Claim claim;
  claim.job = members.Id("job");
  claim.run = members.Id("run");
  claim.host = members.String("host");
  claim.boot_id = members.Id("boot_id");
  claim.pid_namespace = members.Unsigned("pid_namespace");
  claim.pid = members.NotNegative("pid");
  claim.pid_start = members.Unsigned("pid_start");
  OUTLAST_RETURN_IF_ERROR(status);
  return claim;
}

absl::StatusOr<Latest> ParseLatest(std::string_view text) {
  OUTLAST_ASSIGN_OR_RETURN(const json object, Parse(text, "outlast.latest", kMaxSmallBytes));
  absl::Status status;
  Members members(object, "outlast.latest", status);
  Latest latest{members.Checkpoint("checkpoint"), members.NotNegative("step")};
  OUTLAST_RETURN_IF_ERROR(status);
  return latest;
}

absl::StatusOr<std::vector<QuarantineEntry>> ParseQuarantine(std::string_view text) {
  OUTLAST_ASSIGN_OR_RETURN(const json object, Parse(text, "outlast.quarantine", kMaxSmallBytes));
  absl::Status status;
  Members members(object, "outlast.quarantine", status);
  std::vector<QuarantineEntry> entries;
  for (const json& entry : members.Array("entries")) {
    Members fields(entry, "outlast.quarantine.entries", status);
    entries.push_back({fields.Checkpoint("checkpoint"), fields.String("reason", kMaxSmallBytes)});
  }
  OUTLAST_RETURN_IF_ERROR(status);
  return entries;
}

absl::StatusOr<HooksRecord> ParseHooks(std::string_view text) {
  OUTLAST_ASSIGN_OR_RETURN(const json object, Parse(text, "outlast.hooks", kMaxSmallBytes));
  absl::Status status;
  Members members(object, "outlast.hooks", status);
  HooksRecord record{members.Checkpoint("checkpoint"), ReadHooks(members, status)};
  OUTLAST_RETURN_IF_ERROR(status);
  return record;
}

namespace {

absl::Status CheckReceiptText(std::string_view text) {
  OUTLAST_RETURN_IF_ERROR(CheckSelfCrc(text, "outlast.receipt"));
  if (text.size() <= kMaxReceiptBytes) return absl::OkStatus();
  return Refuse("outlast.receipt: {} bytes, at most {} wanted", text.size(), kMaxReceiptBytes);
}

// `scanned`: what was read of `text` already.
absl::StatusOr<Receipt> ReadReceipt(std::string_view text, std::optional<Scanned> scanned) {
  if (scanned) text = scanned->rest;
  OUTLAST_ASSIGN_OR_RETURN(const json object, Parse(text, "outlast.receipt", kMaxReceiptBytes));
  absl::Status status;
  Members members(object, "outlast.receipt", status);
  Receipt receipt;
  receipt.job = members.Id("job");
  receipt.run = members.Id("run");
  receipt.claim = members.Unsigned("claim");
  receipt.checkpoint = members.Checkpoint("checkpoint");
  receipt.parent = members.NullableCheckpoint("parent");
  receipt.step = members.NotNegative("step");
  receipt.generation = members.Unsigned("generation");
  receipt.writer = members.Unsigned32("writer");
  receipt.rank = members.Unsigned32("rank");
  receipt.world = members.Unsigned32("world");
  receipt.plan = members.String("plan");
  receipt.mesh = ReadMesh(members);
  for (const json& hook : members.Array("hooks")) {
    if (hook.is_string())
      receipt.hooks.push_back(hook.get<std::string>());
    else
      members.Fail("hooks", "names wanted");
  }
  receipt.boot_id = members.Id("boot_id");
  receipt.file = ReadFile(members, receipt.writer, status);
  receipt.tensors = scanned ? std::move(scanned->boxes) : ReadBoxes(members, status);
  if (scanned && !members.Array("tensors").empty()) members.Fail("tensors", "there twice");
  if (const auto why = WhyPlacesAreWrong(receipt.tensors); status.ok() && why)
    members.Fail("tensors", *why);
  receipt.aliases = ReadAliases(members);
  receipt.extra = ReadExtras(text, members);
  CheckStep(members, receipt.checkpoint, receipt.step);
  if (!IsHex(receipt.plan, 64)) members.Fail("plan", "64 lower-case hex digits wanted");
  if (receipt.rank >= receipt.world || receipt.writer != receipt.rank)
    members.Fail("rank", "not a rank of its world");
  if (const auto wrong = WhyFileIsWrong(receipt)) members.Fail(wrong->first, wrong->second);
  OUTLAST_RETURN_IF_ERROR(status);
  return receipt;
}

}  // namespace

absl::StatusOr<Receipt> ParseReceipt(std::string_view text) {
  OUTLAST_RETURN_IF_ERROR(CheckReceiptText(text));
  return ReadReceipt(text, ScanBoxes(text));
}

absl::StatusOr<Receipt> ParseReceiptWithoutTensors(std::string_view text) {
  OUTLAST_RETURN_IF_ERROR(CheckReceiptText(text));
  OUTLAST_ASSIGN_OR_RETURN(Receipt receipt, ReadReceipt(text, SkipBoxes(text)));
  receipt.tensors.clear();
  return receipt;
}

namespace {

// Whether `tensors` are such as ParseReceipt takes, with the error that it would give.
absl::Status CheckTensors(const Receipt& receipt) {
  const auto refuse = [](std::string_view place, std::string_view name, std::string_view why) {
    return Refuse("outlast.receipt.{}{}: {}", place, name, why);
  };
  for (const SavedBox& box : receipt.tensors) {
    if (box.name.size() > kMaxNameBytes) return refuse("tensors.", "name", "too long");
    if (box.key.size() > kMaxKeyBytes) return refuse("tensors.", "key", "too long");
    if (const auto wrong = WhyBoxIsWrong(box))
      return refuse("tensors.", wrong->first, wrong->second);
  }
  if (const auto why = WhyPlacesAreWrong(receipt.tensors)) return refuse("", "tensors", *why);
  if (const auto wrong = WhyFileIsWrong(receipt)) return refuse("", wrong->first, wrong->second);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> ToCheckedText(const Receipt& receipt) {
  OUTLAST_RETURN_IF_ERROR(CheckTensors(receipt));
  OUTLAST_ASSIGN_OR_RETURN(ReceiptText composed, Compose(receipt));
  Scanned without{{}, WithoutList(composed.text, composed.list_begin, composed.list_end)};
  OUTLAST_RETURN_IF_ERROR(ReadReceipt(composed.text, std::move(without)).status());
  return std::move(composed.text);
}

absl::StatusOr<Manifest> ParseManifest(std::string_view text) {
  OUTLAST_RETURN_IF_ERROR(CheckSelfCrc(text, "outlast.manifest"));
  OUTLAST_ASSIGN_OR_RETURN(const json object, Parse(text, "outlast.manifest", kMaxManifestBytes));
  absl::Status status;
  Members members(object, "outlast.manifest", status);
  Manifest manifest;
  manifest.job = members.Id("job");
  manifest.claim = members.Unsigned("claim");
  manifest.checkpoint = members.Checkpoint("checkpoint");
  manifest.step = members.NotNegative("step");
  manifest.generation = members.Unsigned("generation");
  manifest.parent = members.NullableCheckpoint("parent");
  for (const json& name : members.Array("ancestors")) {
    manifest.ancestors.push_back(
        members.CheckpointIn(name.is_string() ? name.get<std::string>() : "", "ancestors"));
  }
  manifest.world = members.Unsigned32("world");
  manifest.mesh = ReadMesh(members);
  manifest.plan = members.String("plan");
  manifest.tensors = members.Unsigned("tensors");
  manifest.bytes = members.Unsigned("bytes");
  manifest.receipts = ReadReceiptEntries(members, status);
  manifest.hooks = ReadHooks(members, status);
  Members by(members.Get("committed_by"), "outlast.manifest.committed_by", status);
  manifest.committed_by = {by.String("agent"), by.Unsigned("claim"), by.Unsigned("generation")};
  CheckStep(members, manifest.checkpoint, manifest.step);
  if (!IsHex(manifest.plan, 64)) members.Fail("plan", "64 lower-case hex digits wanted");
  OUTLAST_RETURN_IF_ERROR(status);
  OUTLAST_RETURN_IF_ERROR(CheckSum(manifest));
  return manifest;
}

}  // namespace outlast
