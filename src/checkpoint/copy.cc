#include "checkpoint/copy.h"

#include <algorithm>

#include "base/error.h"
#include "checkpoint/shard_stream.h"
#include "store/folder.h"

namespace outlast {
namespace {

// What is copied and checked as a whole: the manifest and what it names.
struct SourceTexts {
  std::string manifest;
  std::vector<std::string> receipts;  // by rank
  std::optional<std::string> hooks;
};

absl::StatusOr<SourceTexts> ReadTexts(const CheckpointReader& source) {
  SourceTexts texts;
  const std::string folder = source.folder() + "/";
  OUTLAST_ASSIGN_OR_RETURN(texts.manifest,
                           ReadSmall(folder + std::string(kManifestFile), kMaxManifestBytes));
  for (const ReceiptEntry& entry : source.manifest().receipts) {
    OUTLAST_ASSIGN_OR_RETURN(texts.receipts.emplace_back(),
                             ReadSmall(folder + entry.name, kMaxReceiptBytes));
  }
  auto hooks = ReadSmall(folder + std::string(kHooksFile), kMaxSmallBytes);
  if (hooks.ok()) {
    texts.hooks = *std::move(hooks);
  } else if (!absl::IsNotFound(hooks.status())) {
    return hooks.status();
  }
  return texts;
}

absl::Status CopyShard(const CheckpointReader& source, const ShardFile& file,
                       const std::string& target, const OnBytes& on_bytes) {
  OUTLAST_ASSIGN_OR_RETURN(FileStream stream,
                           FileStream::Create(target + "/" + file.name, file.bytes));
  OUTLAST_RETURN_IF_ERROR(
      StreamShard(source.folder(), file, [&](std::span<const std::byte> block) -> absl::Status {
        if (on_bytes) on_bytes(block.size());
        return stream.Append(block);
      }));
  return stream.Finish().status();
}

absl::Status CheckWritten(const std::string& folder, const Receipt& receipt,
                          const OnBytes& on_bytes) {
  const std::vector<Damage> damages = VerifyShard(folder, receipt, IoMode::kDirect, on_bytes);
  if (damages.empty()) return absl::OkStatus();
  return Error(absl::StatusCode::kDataLoss, "the copy does not read back: {}", damages[0].message);
}

absl::Status Write(const CheckpointReader& source, const SourceTexts& texts, Root& target,
                   const std::string& name, const OnBytes& on_bytes, CopyResult& result) {
  const std::string folder = target.PathOf(name);
  for (size_t rank = 0; rank < texts.receipts.size(); ++rank) {
    const Receipt& receipt = source.receipts()[rank];
    if (receipt.file.has_value()) {
      OUTLAST_RETURN_IF_ERROR(CopyShard(source, *receipt.file, folder, on_bytes));
      OUTLAST_RETURN_IF_ERROR(CheckWritten(folder, receipt, on_bytes));
      result.bytes += receipt.file->bytes;
    }
    OUTLAST_RETURN_IF_ERROR(
        CreateWhole(folder, source.manifest().receipts[rank].name, texts.receipts[rank]));
  }
  if (texts.hooks.has_value())
    OUTLAST_RETURN_IF_ERROR(CreateWhole(folder, std::string(kHooksFile), *texts.hooks));
  return target.CommitCopy(name, texts.manifest);
}

// Whether the name stands there already with the same manifest. What a broken copy left of it is
// taken away: it never was a checkpoint.
absl::StatusOr<bool> IsThere(Root& target, const std::string& name, const SourceTexts& texts) {
  const std::string folder = target.PathOf(name);
  OUTLAST_ASSIGN_OR_RETURN(const bool exists, Exists(folder));
  if (!exists) return false;
  OUTLAST_ASSIGN_OR_RETURN(const bool deleted, Exists(fmt::format("{}/{}", folder, kDeletedFile)));
  const auto found = ReadSmall(fmt::format("{}/{}", folder, kManifestFile), kMaxManifestBytes);
  if (deleted || absl::IsNotFound(found.status())) {
    OUTLAST_RETURN_IF_ERROR(target.Delete(name));
    return false;
  }
  if (!found.ok()) return found.status();
  if (*found == texts.manifest) return true;
  // A copy that a crash stopped just before its manifest may have got one by a roll-forward.
  const auto there = ParseManifest(*found);
  const auto same = [](const ReceiptEntry& a, const ReceiptEntry& b) {
    return a.name == b.name && a.bytes == b.bytes && a.crc32c == b.crc32c;
  };
  OUTLAST_ASSIGN_OR_RETURN(const Manifest wanted, ParseManifest(texts.manifest));
  if (there.ok() && there->job == wanted.job && there->checkpoint == wanted.checkpoint &&
      std::ranges::equal(there->receipts, wanted.receipts, same))
    return true;
  return Error(absl::StatusCode::kFailedPrecondition,
               "{}: another checkpoint of that name stands there; it is left alone", folder);
}

absl::Status CheckThere(const std::string& folder, const OnBytes& on_bytes) {
  const std::vector<Damage> damages = VerifyCheckpoint(folder, IoMode::kDirect, on_bytes);
  if (damages.empty()) return absl::OkStatus();
  return Error(absl::StatusCode::kDataLoss, "{}: is there already, and damaged: {}", folder,
               damages[0].message);
}

}  // namespace

absl::StatusOr<CopyResult> CopyCheckpoint(const CheckpointReader& source, Root& target,
                                          const OnBytes& on_bytes) {
  const Manifest& manifest = source.manifest();
  const std::string& name = manifest.checkpoint;
  if (manifest.job != target.job()) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "{}: foreign: of job {}, root {} is of job {}", source.folder(),
                 manifest.job.hex(), target.path(), target.job().hex());
  }
  OUTLAST_ASSIGN_OR_RETURN(const SourceTexts texts, ReadTexts(source));
  OUTLAST_ASSIGN_OR_RETURN(const bool is_there, IsThere(target, name, texts));
  CopyResult result;
  result.was_there = is_there;
  if (is_there) {
    OUTLAST_RETURN_IF_ERROR(CheckThere(target.PathOf(name), on_bytes));
    return result;
  }
  OUTLAST_RETURN_IF_ERROR(MakeFolder(target.PathOf(name)));
  absl::Status status = FsyncFolder(target.path());
  if (status.ok()) status = Write(source, texts, target, name, on_bytes, result);
  if (!status.ok()) {
    target.Delete(name).IgnoreError();  // without a manifest it is invisible anyway
    return Annotate(status, fmt::format("copy of {} to {}", name, target.path()));
  }
  return result;
}

}  // namespace outlast
