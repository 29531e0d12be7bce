// What is taken of a root's JSON files, and what is refused; manifest_text.cc writes them.
#include "checkpoint/manifest.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/name_index.h"
#include "checkpoint/json.h"
#include "checkpoint/manifest_json.h"
#include "checkpoint/receipt_boxes.h"
#include "outlast/base/crc32c.h"
#include "store/folder.h"

namespace outlast {
namespace {

using nlohmann::json;

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
