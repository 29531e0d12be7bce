// The text of a root's JSON files: see manifest.h.
#include <charconv>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "checkpoint/json.h"
#include "checkpoint/manifest.h"
#include "checkpoint/manifest_json.h"
#include "outlast/base/crc32c.h"

namespace outlast {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

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

absl::StatusOr<std::string> Capped(std::string text, uint64_t cap, std::string_view what) {
  if (text.size() > cap) return Refuse("{}: {} bytes, at most {} wanted", what, text.size(), cap);
  return text;
}

}  // namespace

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

}  // namespace outlast
