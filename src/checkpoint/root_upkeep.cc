// Root: what goes, what is spared, and the hints that lie beside the checkpoints.
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "checkpoint/root.h"
#include "store/folder.h"

namespace outlast {
namespace {

// The folder of a checkpoint that is to be pinned or released.
absl::StatusOr<std::string> FolderToPin(const std::string& root, std::string_view checkpoint) {
  if (!ParseCheckpointName(checkpoint).has_value())
    return Error(absl::StatusCode::kInvalidArgument, "'{}': not a checkpoint's name", checkpoint);
  std::string folder = fmt::format("{}/{}", root, checkpoint);
  struct stat facts;
  if (lstat(folder.c_str(), &facts) != 0) return FileError(errno, "stat", folder);
  if (!S_ISDIR(facts.st_mode))
    return Error(absl::StatusCode::kInvalidArgument, "{}: not a folder", folder);
  return folder;
}

std::vector<QuarantineEntry> ReadQuarantine(const std::string& root) {
  // Only a hint: one that cannot be read is begun anew.
  const auto text = ReadSmall(fmt::format("{}/{}", root, kQuarantineFile), kMaxSmallBytes);
  if (!text.ok()) return {};
  return ParseQuarantine(*text).value_or(std::vector<QuarantineEntry>{});
}

}  // namespace

absl::Status Root::Delete(std::string_view checkpoint) {
  if (!ParseCheckpointName(checkpoint).has_value()) {
    return Error(absl::StatusCode::kInvalidArgument, "delete '{}': not a checkpoint's name",
                 checkpoint);
  }
  const std::string folder = PathOf(checkpoint);
  struct stat facts;
  if (lstat(folder.c_str(), &facts) != 0) return FileError(errno, "stat", folder);
  if (!S_ISDIR(facts.st_mode))
    return Error(absl::StatusCode::kInvalidArgument, "delete {}: not a folder", folder);
  const std::string marker = fmt::format("{}/{}", folder, kDeletedFile);
  const auto check_pin = [&]() -> absl::Status {
    OUTLAST_ASSIGN_OR_RETURN(const bool pinned, Exists(fmt::format("{}/{}", folder, kPinnedFile)));
    if (!pinned) return absl::OkStatus();
    return Error(absl::StatusCode::kFailedPrecondition, "delete {}: it is pinned", checkpoint);
  };
  OUTLAST_RETURN_IF_ERROR(check_pin());
  OUTLAST_ASSIGN_OR_RETURN(const bool begun, Exists(marker));
  OUTLAST_RETURN_IF_ERROR(TouchDurably(folder, kDeletedFile));
  // Who pins looks for DELETED after PINNED stands, and we the other way round: one of both sees
  // the other, so no pin that was reported is lost.
  if (absl::Status pinned = check_pin(); !pinned.ok()) {
    if (!begun) {
      OUTLAST_RETURN_IF_ERROR(RemoveFile(marker));
      OUTLAST_RETURN_IF_ERROR(FsyncFolder(folder));
    }
    return pinned;
  }
  OUTLAST_RETURN_IF_ERROR(RemoveFile(fmt::format("{}/{}", folder, kManifestFile)));
  OUTLAST_RETURN_IF_ERROR(FsyncFolder(folder));
  OUTLAST_RETURN_IF_ERROR(RemoveTree(folder, kDeletedFile));
  return FsyncFolder(path_);
}

absl::StatusOr<std::vector<std::string>> Root::Retain(const RetentionOptions& options,
                                                      std::span<const std::string> in_progress) {
  OUTLAST_ASSIGN_OR_RETURN(const Listing listing, List(Look::kFiles));
  // After the listing: what it shows is then from before any newer claim, so that nothing of a
  // newer owner is deleted, be it still incomplete.
  if (claim() != 0) OUTLAST_RETURN_IF_ERROR(CheckClaim());
  std::vector<std::string> deleted;
  for (std::string& name : ChooseDeletions(listing.checkpoints, options, in_progress)) {
    const absl::Status status = Delete(name);
    if (absl::IsFailedPrecondition(status)) continue;  // pinned since it was listed
    OUTLAST_RETURN_IF_ERROR(status);
    deleted.push_back(std::move(name));
  }
  return deleted;
}

absl::Status Root::Pin(std::string_view checkpoint) {
  OUTLAST_ASSIGN_OR_RETURN(const std::string folder, FolderToPin(path_, checkpoint));
  const auto stands = [&]() -> absl::Status {
    OUTLAST_ASSIGN_OR_RETURN(const bool deleted,
                             Exists(fmt::format("{}/{}", folder, kDeletedFile)));
    OUTLAST_ASSIGN_OR_RETURN(const bool committed,
                             Exists(fmt::format("{}/{}", folder, kManifestFile)));
    if (committed && !deleted) return absl::OkStatus();
    return Error(absl::StatusCode::kNotFound, "pin {}: {}; a committed checkpoint wanted",
                 checkpoint, deleted ? "its deletion has begun" : "it has no MANIFEST.json");
  };
  OUTLAST_RETURN_IF_ERROR(stands());
  OUTLAST_RETURN_IF_ERROR(TouchDurably(folder, kPinnedFile));
  absl::Status still = stands();  // see Delete
  if (!still.ok()) RemoveFile(fmt::format("{}/{}", folder, kPinnedFile)).IgnoreError();
  return still;
}

absl::Status Root::Unpin(std::string_view checkpoint) {
  OUTLAST_ASSIGN_OR_RETURN(const std::string folder, FolderToPin(path_, checkpoint));
  OUTLAST_RETURN_IF_ERROR(RemoveFile(fmt::format("{}/{}", folder, kPinnedFile)));
  return FsyncFolder(folder);
}

absl::Status Root::WriteLatest(const Latest& latest) {
  OUTLAST_ASSIGN_OR_RETURN(const std::string text, ToText(latest));
  return ReplaceWhole(path_, std::string(kLatestFile), text);
}

absl::Status Root::Quarantine(std::string_view checkpoint, std::string_view reason) {
  std::vector<QuarantineEntry> entries = ReadQuarantine(path_);
  std::erase_if(entries, [&](const auto& entry) { return entry.checkpoint == checkpoint; });
  entries.push_back({std::string(checkpoint), std::string(reason)});
  OUTLAST_ASSIGN_OR_RETURN(const std::string text, ToText(entries));
  return ReplaceWhole(path_, std::string(kQuarantineFile), text);
}

absl::Status Root::ClearQuarantine(std::string_view checkpoint) {
  std::vector<QuarantineEntry> entries = ReadQuarantine(path_);
  if (std::erase_if(entries, [&](const auto& entry) { return entry.checkpoint == checkpoint; }) ==
      0)
    return absl::OkStatus();
  OUTLAST_ASSIGN_OR_RETURN(const std::string text, ToText(entries));
  return ReplaceWhole(path_, std::string(kQuarantineFile), text);
}

}  // namespace outlast
