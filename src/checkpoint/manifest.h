// The small JSON files of a root: their members, their text, and what is refused.
//
//   <root>/OUTLAST.json                    RootRecord
//   <root>/claims/<n>                      Claim;  <n>.beat: a decimal number;  <n>.released: empty
//   <root>/LATEST.json  QUARANTINE.json    hints
//   <root>/step-<12 digits>-<8 hex>/       w00000.safetensors, w00000.receipt.json ..., hooks.json,
//   MANIFEST.json,
//                                          PINNED, DELETED (empty)
//
// Receipts and manifests end in ,"self_crc32c":"xxxxxxxx"} and a newline; that CRC32C covers all
// bytes before the eight digits. `crc32c` of a receipt in a manifest covers the whole receipt file,
// its newline included; chunks of a shard are cut from the start of the file (not of its data
// section), the last one may be short, and `file.crc32c` covers the whole file. Unknown members are
// ignored, a higher version is refused. A value of `extra` that is the text of a JSON object stands
// there as it was given, byte for byte; anything else is {"base64": text}.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "outlast/base/id.h"
#include "outlast/blackbox/buffer.h"
#include "outlast/checkpoint/dtype.h"
#include "outlast/checkpoint/state.h"

namespace outlast {

inline constexpr uint64_t kMaxManifestBytes = uint64_t{64} << 20;
inline constexpr uint64_t kMaxReceiptBytes = uint64_t{256} << 20;
inline constexpr uint64_t kMaxSmallBytes = uint64_t{1} << 20;  // all other files of a root
inline constexpr int kMaxNesting = 32;

inline constexpr std::string_view kRootFile = "OUTLAST.json";
inline constexpr std::string_view kClaimsFolder = "claims";
inline constexpr std::string_view kLatestFile = "LATEST.json";
inline constexpr std::string_view kQuarantineFile = "QUARANTINE.json";
inline constexpr std::string_view kManifestFile = "MANIFEST.json";
inline constexpr std::string_view kHooksFile = "hooks.json";
inline constexpr std::string_view kPinnedFile = "PINNED";
inline constexpr std::string_view kDeletedFile = "DELETED";

// "step-000000012000-7f3a91c2". Steps past 12 digits take as many as they need.
std::string CheckpointName(int64_t step, uint32_t nonce);
struct CheckpointNameParts {
  int64_t step = 0;
  uint32_t nonce = 0;
};
// nullopt unless `name` is exactly what CheckpointName makes (so it has no '/', and the nonce is
// not 0).
std::optional<CheckpointNameParts> ParseCheckpointName(std::string_view name);
std::string ShardName(uint32_t writer);  // "w00000.safetensors"
std::string ReceiptName(uint32_t rank);  // "w00000.receipt.json"

struct RootRecord {
  Id128 job;
  std::string name;  // empty: the job id was drawn
};

struct Claim {
  Id128 job, run;
  std::string host;
  Id128 boot_id;
  uint64_t pid_namespace = 0;
  int64_t pid = 0;
  uint64_t pid_start = 0;
};

struct Latest {
  std::string checkpoint;
  int64_t step = 0;
};

struct QuarantineEntry {
  std::string checkpoint, reason;
};

struct HookResult {
  std::string name;
  std::string result;  // "ok", "veto" or "error"
  std::string note;
};
struct HooksRecord {
  std::string checkpoint;
  std::vector<HookResult> hooks;
};

using Mesh = std::vector<std::pair<std::string, int64_t>>;  // axis, size

struct ShardFile {
  std::string name;
  uint64_t bytes = 0;
  uint32_t crc32c = 0;
  uint32_t chunk_bytes = kChunkBytes;
  std::vector<uint32_t> chunks;
};

struct SavedBox {
  std::string name, key;
  DType dtype = DType::kF32;
  Shape global, offset, extent;
  uint64_t begin = 0, end = 0;  // from the start of the data section
};

struct Receipt {
  Id128 job, run;
  uint64_t claim = 0;
  std::string checkpoint;
  std::optional<std::string> parent;
  int64_t step = 0;
  uint64_t generation = 0;
  uint32_t writer = 0, rank = 0, world = 1;
  std::string plan;  // 64 hex digits
  Mesh mesh;
  std::vector<std::string> hooks;
  Id128 boot_id;
  std::optional<ShardFile> file;  // none: the rank owns no bytes
  std::vector<SavedBox> tensors;
  std::vector<std::pair<std::string, std::string>> aliases;  // name, of
  Extras extra;

  // Bytes of the data section: what the boxes take.
  uint64_t data_bytes() const { return tensors.empty() ? 0 : tensors.back().end; }
};

struct ReceiptEntry {
  std::string name;
  uint64_t bytes = 0;
  uint32_t crc32c = 0;
  uint64_t data_bytes = 0;
};

struct CommittedBy {
  std::string agent;
  uint64_t claim = 0, generation = 0;
};

struct Manifest {
  Id128 job;
  uint64_t claim = 0;
  std::string checkpoint;
  int64_t step = 0;
  uint64_t generation = 0;
  std::optional<std::string> parent;
  std::vector<std::string> ancestors;  // of the chain, still standing, newest first
  uint32_t world = 1;
  Mesh mesh;
  std::string plan;
  uint64_t tensors = 0;                // names
  uint64_t bytes = 0;                  // sum of data_bytes
  std::vector<ReceiptEntry> receipts;  // one a rank, by rank
  std::vector<HookResult> hooks;
  CommittedBy committed_by;
};

// The files' text. kInvalidArgument: a name that is not UTF-8, or past a cap.
absl::StatusOr<std::string> ToText(const RootRecord& record);
absl::StatusOr<std::string> ToText(const Claim& claim);
absl::StatusOr<std::string> ToText(const Latest& latest);
absl::StatusOr<std::string> ToText(const std::vector<QuarantineEntry>& entries);
absl::StatusOr<std::string> ToText(const HooksRecord& hooks);
absl::StatusOr<std::string> ToText(const Receipt& receipt);
// The same for a receipt that ParseReceipt would take; its error for any other.
absl::StatusOr<std::string> ToCheckedText(const Receipt& receipt);
absl::StatusOr<std::string> ToText(const Manifest& manifest);

// And back. kDataLoss: the self CRC does not match, or the end is missing. kInvalidArgument: not
// JSON, a missing member or one of a wrong type, a name that leaves the folder, a box that is not
// in its tensor, past a cap. kUnimplemented: a higher version.
absl::StatusOr<RootRecord> ParseRootRecord(std::string_view text);
absl::StatusOr<Claim> ParseClaim(std::string_view text);
absl::StatusOr<Latest> ParseLatest(std::string_view text);
absl::StatusOr<std::vector<QuarantineEntry>> ParseQuarantine(std::string_view text);
absl::StatusOr<HooksRecord> ParseHooks(std::string_view text);
absl::StatusOr<Receipt> ParseReceipt(std::string_view text);
// The same without `tensors`: neither read nor looked at.
absl::StatusOr<Receipt> ParseReceiptWithoutTensors(std::string_view text);
absl::StatusOr<Manifest> ParseManifest(std::string_view text);

}  // namespace outlast
