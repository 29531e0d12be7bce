// The files of a committed checkpoint, each read and checked by itself; what they say together is
// reader.h's.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/manifest.h"
#include "store/folder.h"
#include "store/late_names.h"

namespace outlast {

// Told of bytes as they are dealt with: the difference, not the sum.
using OnBytes = std::function<void(uint64_t)>;

// One damage found by Verify.
struct Damage {
  std::string file;     // relative to the folder
  uint64_t offset = 0;  // where it begins, for a chunk
  std::string message;  // with what was found and wanted
};

// Manifest and receipts in one, as their bytes: all that a reader needs besides shards.
std::string EncodeHead(std::string_view manifest, std::span<const std::string> receipts);
// A receipt whose bytes are those that a manifest names. kDataLoss: they are not; kInvalidArgument.
absl::StatusOr<Receipt> ParseReceiptOf(const ReceiptEntry& entry, std::string_view text,
                                       const std::string& place);

// The same, and of the manifest's save and rank. kInvalidArgument: of another.
absl::StatusOr<Receipt> CheckedReceipt(const std::string& folder, const Manifest& manifest,
                                       const ReceiptEntry& entry, std::string_view text);

// How long names of `folder` that must be there are waited for: as asked, else as long as its file
// system may be late.
absl::Duration WaitFor(const std::string& folder, std::optional<absl::Duration> asked);

// The manifest of a checkpoint's folder; errors as by CheckpointReader::Open.
absl::StatusOr<Manifest> LoadManifest(const std::string& folder, LateNames& late);
// A receipt that is what the manifest says. kDataLoss: gone or torn.
absl::StatusOr<Receipt> LoadReceipt(const std::string& folder, const Manifest& manifest,
                                    const ReceiptEntry& entry, LateNames& late);
// Is the receipt's shard there, with its size? kDataLoss: no.
absl::Status CheckShardSize(const std::string& folder, const Receipt& receipt, LateNames& late);
// To a restore, a file that is gone is damage like any other: kNotFound as kDataLoss.
absl::Status LostFile(const absl::Status& status);

// Are all files that the manifest names there, with the sizes that they should have, and the
// receipts whole? What the receipts say of tensors is not looked at: a listing asks this of every
// checkpoint. Errors and `wait` as by CheckpointReader::Open.
absl::Status CheckFiles(const std::string& folder, const Manifest& manifest,
                        std::optional<absl::Duration> wait = std::nullopt);

// Reads a rank's shard and checks its size, every chunk, and its own header against the receipt.
std::vector<Damage> VerifyShard(const std::string& folder, const Receipt& receipt,
                                IoMode mode = IoMode::kDirect, const OnBytes& on_bytes = {});

// Reads a rank's shard from its first byte to its last, and hands on each block after its chunks
// were checked. Ends with the first error, also of `take`.
absl::Status StreamShard(const std::string& folder, const ShardFile& file,
                         const std::function<absl::Status(std::span<const std::byte>)>& take);

}  // namespace outlast
