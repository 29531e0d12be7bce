#include "checkpoint/checkpoint_files.h"

#include <map>
#include <utility>

#include "base/channel.h"
#include "base/error.h"
#include "checkpoint/chunk_reader.h"
#include "checkpoint/safetensors.h"
#include "outlast/base/crc32c.h"

namespace outlast {
namespace {

absl::Status CheckReceiptText(const ReceiptEntry& entry, std::string_view text,
                              const std::string& place) {
  const uint32_t crc = Crc32c(text);
  if (text.size() == entry.bytes && crc == entry.crc32c) return absl::OkStatus();
  return Error(absl::StatusCode::kDataLoss,
               "{}/{}: {} bytes with crc {:08x}, the manifest says {} with {:08x}", place,
               entry.name, text.size(), crc, entry.bytes, entry.crc32c);
}

// The text of a receipt that is what the manifest says.
absl::StatusOr<std::string> ReadReceipt(const std::string& folder, const ReceiptEntry& entry,
                                        LateNames& late) {
  const std::string path = folder + "/" + entry.name;
  auto text = late.Await(folder, [&] { return ReadSmall(path, kMaxReceiptBytes); });
  if (!text.ok()) return LostFile(text.status());
  OUTLAST_RETURN_IF_ERROR(CheckReceiptText(entry, *text, folder));
  return text;
}

absl::Status CheckSameSave(const std::string& folder, const Manifest& manifest,
                           const ReceiptEntry& entry, const Receipt& receipt) {
  const bool same_save = receipt.job == manifest.job && receipt.checkpoint == manifest.checkpoint &&
                         receipt.claim == manifest.claim &&
                         receipt.generation == manifest.generation &&
                         receipt.world == manifest.world && receipt.plan == manifest.plan;
  if (same_save && entry.name == ReceiptName(receipt.rank)) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument,
               "{}/{}: of another save or rank than the manifest", folder, entry.name);
}

// The shard's own header must say what the receipt says: other programs read the one, we the other.
std::string WhyHeaderDiffers(const SafetensorsFile& file, const Receipt& receipt) {
  if (file.data_begin + receipt.data_bytes() != receipt.file->bytes)
    return "its data section is not where the receipt has it";
  if (file.tensors.size() != receipt.tensors.size()) {
    return fmt::format("{} tensors, the receipt has {}", file.tensors.size(),
                       receipt.tensors.size());
  }
  std::map<std::string_view, const SafetensorsTensor*> by_key;
  for (const SafetensorsTensor& tensor : file.tensors) by_key.emplace(tensor.key, &tensor);
  for (const SavedBox& box : receipt.tensors) {
    const auto found = by_key.find(box.key);
    const bool same = found != by_key.end() && found->second->dtype == box.dtype &&
                      found->second->shape == box.extent && found->second->begin == box.begin &&
                      found->second->end == box.end;
    if (!same)
      return fmt::format("tensor '{}' is not what the receipt says", box.key.substr(0, 200));
  }
  return "";
}

}  // namespace

absl::Duration WaitFor(const std::string& folder, std::optional<absl::Duration> asked) {
  return asked.has_value() ? *asked : LateNames::WaitOf(folder);
}

absl::Status LostFile(const absl::Status& status) {
  return absl::IsNotFound(status) ? MakeStatus(absl::StatusCode::kDataLoss, MessageOf(status))
                                  : status;
}

absl::StatusOr<Receipt> CheckedReceipt(const std::string& folder, const Manifest& manifest,
                                       const ReceiptEntry& entry, std::string_view text) {
  OUTLAST_ASSIGN_OR_RETURN(Receipt receipt, ParseReceiptOf(entry, text, folder));
  OUTLAST_RETURN_IF_ERROR(CheckSameSave(folder, manifest, entry, receipt));
  if (receipt.data_bytes() != entry.data_bytes) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "{}/{}: {} bytes of data, the manifest says {}", folder, entry.name,
                 receipt.data_bytes(), entry.data_bytes);
  }
  return receipt;
}

absl::StatusOr<Receipt> LoadReceipt(const std::string& folder, const Manifest& manifest,
                                    const ReceiptEntry& entry, LateNames& late) {
  OUTLAST_ASSIGN_OR_RETURN(const std::string text, ReadReceipt(folder, entry, late));
  return CheckedReceipt(folder, manifest, entry, text);
}

absl::Status CheckShardSize(const std::string& folder, const Receipt& receipt, LateNames& late) {
  if (!receipt.file.has_value()) return absl::OkStatus();
  const std::string path = folder + "/" + receipt.file->name;
  const auto bytes = late.Await(folder, [&] { return FileBytes(path); });
  if (!bytes.ok()) return LostFile(bytes.status());
  if (*bytes == receipt.file->bytes) return absl::OkStatus();
  return Error(absl::StatusCode::kDataLoss, "{}: {} bytes, its receipt says {}", path, *bytes,
               receipt.file->bytes);
}

absl::StatusOr<Manifest> LoadManifest(const std::string& folder, LateNames& late) {
  OUTLAST_ASSIGN_OR_RETURN(const bool deleted, Exists(fmt::format("{}/{}", folder, kDeletedFile)));
  if (deleted) return Error(absl::StatusCode::kNotFound, "{}: its deletion has begun", folder);
  const std::string path = fmt::format("{}/{}", folder, kManifestFile);
  OUTLAST_ASSIGN_OR_RETURN(const std::string text,
                           late.Await(folder, [&] { return ReadSmall(path, kMaxManifestBytes); }));
  auto manifest = ParseManifest(text);
  if (!manifest.ok()) return Annotate(manifest.status(), path);
  return manifest;
}

std::string EncodeHead(std::string_view manifest, std::span<const std::string> receipts) {
  PayloadWriter writer;
  writer.Text(manifest);
  for (const std::string& receipt : receipts) writer.Text(receipt);
  return writer.bytes();
}

absl::StatusOr<Receipt> ParseReceiptOf(const ReceiptEntry& entry, std::string_view text,
                                       const std::string& place) {
  OUTLAST_RETURN_IF_ERROR(CheckReceiptText(entry, text, place));
  auto receipt = ParseReceipt(text);
  if (!receipt.ok()) return Annotate(receipt.status(), place + "/" + entry.name);
  return receipt;
}

absl::Status CheckFiles(const std::string& folder, const Manifest& manifest,
                        std::optional<absl::Duration> wait) {
  LateNames late(WaitFor(folder, wait));
  for (const ReceiptEntry& entry : manifest.receipts) {
    OUTLAST_ASSIGN_OR_RETURN(const std::string text, ReadReceipt(folder, entry, late));
    const auto receipt = ParseReceiptWithoutTensors(text);
    if (!receipt.ok()) return Annotate(receipt.status(), folder + "/" + entry.name);
    OUTLAST_RETURN_IF_ERROR(CheckSameSave(folder, manifest, entry, *receipt));
    OUTLAST_RETURN_IF_ERROR(CheckShardSize(folder, *receipt, late));
  }
  return absl::OkStatus();
}

absl::Status StreamShard(const std::string& folder, const ShardFile& file,
                         const std::function<absl::Status(std::span<const std::byte>)>& take) {
  const auto reader = ChunkReader::Open(folder, file, IoMode::kDirect);
  if (!reader.ok()) return LostFile(reader.status());
  const std::vector<Stretch> blocks = (*reader)->AllBlocks();
  OUTLAST_RETURN_IF_ERROR((*reader)->Start(blocks));
  for (size_t i = 0; i < blocks.size(); ++i) {
    OUTLAST_ASSIGN_OR_RETURN(const std::span<const std::byte> block, (*reader)->Next());
    OUTLAST_RETURN_IF_ERROR(take(block));
  }
  return absl::OkStatus();
}

std::vector<Damage> VerifyShard(const std::string& folder, const Receipt& receipt, IoMode mode,
                                const OnBytes& on_bytes) {
  std::vector<Damage> damages;
  if (!receipt.file.has_value()) return damages;
  const ShardFile& file = *receipt.file;
  const auto add = [&](uint64_t offset, std::string_view message) {
    damages.push_back({file.name, offset, std::string(message)});
  };
  const auto reader = ChunkReader::Open(folder, file, mode);
  if (!reader.ok()) return add(0, MessageOf(reader.status())), damages;
  const std::vector<Stretch> blocks = (*reader)->AllBlocks();
  const absl::Status started = (*reader)->Start(blocks);
  if (!started.ok()) return add(0, MessageOf(started)), damages;
  for (const Stretch& block : blocks) {
    if (on_bytes) on_bytes(block.end - block.begin);
    if ((*reader)->Next().ok()) continue;
    // Once more, so that each bad chunk of the block is named.
    (*reader)->ReadEach(block, [&](uint64_t offset, const absl::Status& status) {
      add(offset, MessageOf(status));
    });
  }
  const auto header = ReadSafetensors(folder + "/" + file.name);
  if (!header.ok()) return add(0, MessageOf(header.status())), damages;
  const std::string why = WhyHeaderDiffers(*header, receipt);
  if (!why.empty()) add(0, fmt::format("{}/{}: {}", folder, file.name, why));
  return damages;
}

}  // namespace outlast
