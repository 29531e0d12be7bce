#include "checkpoint/root.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/name_index.h"
#include "checkpoint/reader.h"
#include "outlast/base/crc32c.h"
#include "store/folder.h"

namespace outlast {
namespace {

// The root's path without a scheme and trailing slashes.
absl::StatusOr<std::string> PathOfUri(std::string_view uri) {
  constexpr std::string_view kFile = "file://";
  std::string_view path = uri;
  if (path.starts_with(kFile)) path.remove_prefix(kFile.size());
  const bool other_scheme = path.size() == uri.size() && path.find("://") != std::string_view::npos;
  if (path.empty() || other_scheme || (path.size() != uri.size() && path[0] != '/')) {
    return Error(absl::StatusCode::kInvalidArgument, "root '{}': a path or file:///path wanted",
                 uri);
  }
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  return std::string(path);
}

void MarkDamaged(CheckpointInfo& info, const absl::Status& status) {
  info.state = absl::IsUnimplemented(status) ? CheckpointState::kNewer : CheckpointState::kDamaged;
  info.reason = MessageOf(status);
}

CheckpointInfo Inspect(const std::string& root, const std::string& name, const Id128& job,
                       Root::Look look, std::optional<absl::Duration> wait) {
  CheckpointInfo info;
  info.name = name;
  info.step = ParseCheckpointName(name)->step;
  const std::string folder = root + "/" + name;
  const auto entries = ListFolder(folder);
  if (!entries.ok()) return MarkDamaged(info, entries.status()), info;
  const auto has = [&](std::string_view file) {
    return std::ranges::find(*entries, file, &FolderEntry::name) != entries->end();
  };
  info.pinned = has(kPinnedFile);
  if (has(kDeletedFile)) {
    info.state = CheckpointState::kDeleted;
    info.reason = "its deletion has begun";
    return info;
  }
  if (!has(kManifestFile)) {
    info.reason = "no MANIFEST.json";
    return info;
  }
  const auto text = ReadSmall(fmt::format("{}/{}", folder, kManifestFile), kMaxManifestBytes);
  if (!text.ok()) return MarkDamaged(info, text.status()), info;
  auto manifest = ParseManifest(*text);
  if (!manifest.ok()) return MarkDamaged(info, Annotate(manifest.status(), kManifestFile)), info;
  if (manifest->checkpoint != name) {
    return MarkDamaged(info, Error(absl::StatusCode::kInvalidArgument, "the manifest is of {}",
                                   manifest->checkpoint)),
           info;
  }
  info.manifest = std::move(*manifest);
  if (info.manifest->job != job) {
    info.state = CheckpointState::kForeign;
    info.reason =
        fmt::format("of job {}, the root is of job {}", info.manifest->job.hex(), job.hex());
    return info;
  }
  info.state = CheckpointState::kCommitted;
  if (look == Root::Look::kManifests) return info;
  const absl::Status files = look == Root::Look::kWhole
                                 ? CheckpointReader::Open(folder, wait).status()
                                 : CheckFiles(folder, *info.manifest, wait);
  if (!files.ok()) MarkDamaged(info, files);
  return info;
}

// The job of the newest manifest in a root that has lost its OUTLAST.json.
absl::StatusOr<std::optional<Id128>> JobOfManifests(const std::string& root) {
  OUTLAST_ASSIGN_OR_RETURN(const auto entries, ListFolder(root));
  std::optional<Manifest> newest;
  for (const FolderEntry& entry : entries) {
    if (entry.kind != EntryKind::kFolder || !ParseCheckpointName(entry.name).has_value()) continue;
    const auto text =
        ReadSmall(fmt::format("{}/{}/{}", root, entry.name, kManifestFile), kMaxManifestBytes);
    if (!text.ok()) continue;
    auto manifest = ParseManifest(*text);
    if (!manifest.ok() || manifest->checkpoint != entry.name) continue;
    const auto order = [](const Manifest& m) { return std::tuple(m.claim, m.generation, m.step); };
    if (!newest.has_value() || order(*manifest) > order(*newest)) newest = std::move(*manifest);
  }
  if (!newest.has_value()) return std::optional<Id128>();
  return std::optional<Id128>(newest->job);
}

// What errno leaves out of a refusal: what was wanted, and for whom.
absl::Status WithWanted(const absl::Status& status, std::string_view what) {
  if (!absl::IsPermissionDenied(status)) return status;
  return Error(status.code(), "{}; a folder that user {} may {} wanted", MessageOf(status),
               geteuid(), what);
}

absl::StatusOr<bool> HoldsCheckpointFolders(const std::string& root) {
  OUTLAST_ASSIGN_OR_RETURN(const auto entries, ListFolder(root));
  return std::ranges::any_of(entries, [](const FolderEntry& entry) {
    return entry.kind == EntryKind::kFolder && ParseCheckpointName(entry.name).has_value();
  });
}

}  // namespace

Root::Root(std::string path, RootOptions options, Clock& clock)
    : path_(std::move(path)), options_(std::move(options)), clock_(clock) {}

std::string Root::PathOf(std::string_view checkpoint) const {
  return fmt::format("{}/{}", path_, checkpoint);
}

absl::StatusOr<std::unique_ptr<Root>> Root::Open(std::string_view uri, RootOptions options,
                                                 Clock& clock) {
  OUTLAST_ASSIGN_OR_RETURN(std::string path, PathOfUri(uri));
  if (options.access == Access::kJoin && options.job_name.empty()) options.access = Access::kWrite;
  if (options.access != Access::kRead) {
    const bool joins = options.access == Access::kJoin;
    absl::Status made = joins ? absl::OkStatus() : MakeFolders(path);
    if (made.ok() && access(path.c_str(), W_OK | X_OK) != 0 && !(joins && errno == ENOENT))
      made = FileError(errno, "write to", path);
    OUTLAST_RETURN_IF_ERROR(WithWanted(made, "write to"));
  }
  std::unique_ptr<Root> root(new Root(std::move(path), std::move(options), clock));
  OUTLAST_RETURN_IF_ERROR(WithWanted(root->Identify(), "read"));
  return root;
}

absl::Status Root::Identify() {
  const std::string file = fmt::format("{}/{}", path_, kRootFile);
  const bool named = !options_.job_name.empty();
  auto text = ReadSmall(file, kMaxSmallBytes);
  if (absl::IsNotFound(text.status()) && options_.access == Access::kJoin) {
    job_ = Id128::FromName(options_.job_name);
    job_name_ = options_.job_name;
    return absl::OkStatus();
  }
  if (absl::IsNotFound(text.status())) {
    OUTLAST_ASSIGN_OR_RETURN(const std::optional<Id128> found, JobOfManifests(path_));
    RootRecord record{
        named ? Id128::FromName(options_.job_name) : options_.job.value_or(Id128::Random()),
        options_.job_name};
    if (found.has_value()) {
      if (!named || record.job != *found) record.name.clear();
      record.job = *found;
    }
    if (options_.access == Access::kRead) {
      OUTLAST_ASSIGN_OR_RETURN(const bool holds_some, HoldsCheckpointFolders(path_));
      if (!holds_some) {
        return Error(absl::StatusCode::kNotFound,
                     "{}: not a checkpoint root: neither {} nor a checkpoint in it", path_,
                     kRootFile);
      }
      job_ = record.job;
      return absl::OkStatus();
    }
    OUTLAST_ASSIGN_OR_RETURN(text, ToText(record));
    const absl::Status created = CreateWholeBesideSweepers(path_, std::string(kRootFile), *text);
    // Two first starts at once: one of them made it.
    if (absl::IsAlreadyExists(created))
      text = ReadSmall(file, kMaxSmallBytes);
    else
      OUTLAST_RETURN_IF_ERROR(created);
  }
  if (!text.ok()) return text.status();
  const auto record = ParseRootRecord(*text);
  if (!record.ok()) return Annotate(record.status(), file);
  // The id of a named job is made from its name: a record that says otherwise has lost a bit.
  if (!record->name.empty() && Id128::FromName(record->name) != record->job) {
    return Error(absl::StatusCode::kDataLoss, "{}: name '{}' makes job {}, the record says {}",
                 file, record->name, Id128::FromName(record->name).hex(), record->job.hex());
  }
  if (named && Id128::FromName(options_.job_name) != record->job) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "root {}: foreign: of job {}{}, --job '{}' is {}", path_, record->job.hex(),
                 record->name.empty() ? "" : fmt::format(" ('{}')", record->name),
                 options_.job_name, Id128::FromName(options_.job_name).hex());
  }
  job_ = record->job;
  job_name_ = record->name;
  return absl::OkStatus();
}

absl::StatusOr<Listing> Root::List(Look look) const {
  Listing listing;
  OUTLAST_ASSIGN_OR_RETURN(listing.claims, ListClaims());
  for (const ClaimFile& claim : listing.claims) {
    if (!claim.claim.has_value())
      listing.notes.push_back(
          fmt::format("{}/{}: cannot be read as a claim", kClaimsFolder, claim.number));
  }
  OUTLAST_ASSIGN_OR_RETURN(const auto entries, ListFolder(path_));
  for (const FolderEntry& entry : entries) {
    const bool ours =
        entry.kind == EntryKind::kFile && (entry.name == kRootFile || entry.name == kLatestFile ||
                                           entry.name == kQuarantineFile || IsTempName(entry.name));
    if (ours || (entry.kind == EntryKind::kFolder &&
                 (entry.name == kClaimsFolder || entry.name == kFetchFolder)))
      continue;
    if (!ParseCheckpointName(entry.name).has_value()) {
      listing.strangers.push_back({entry.name, "not a name that Outlast gives"});
    } else if (entry.kind != EntryKind::kFolder) {
      const bool link = entry.kind == EntryKind::kSymlink;
      listing.strangers.push_back({entry.name, link ? "a symlink, which is not followed"
                                                    : "a checkpoint's name, but not a folder"});
    } else {
      listing.checkpoints.push_back(Inspect(path_, entry.name, job_, look, options_.late_names));
    }
  }
  const auto quarantine = ReadSmall(fmt::format("{}/{}", path_, kQuarantineFile), kMaxSmallBytes);
  if (quarantine.ok()) {
    const auto marked = ParseQuarantine(*quarantine);
    if (!marked.ok())
      listing.notes.push_back(fmt::format("{}: {}", kQuarantineFile, MessageOf(marked.status())));
    for (const QuarantineEntry& mark : marked.value_or(std::vector<QuarantineEntry>{})) {
      const auto found =
          std::ranges::find(listing.checkpoints, mark.checkpoint, &CheckpointInfo::name);
      if (found != listing.checkpoints.end())
        found->quarantined = mark.reason.empty() ? "in quarantine" : mark.reason;
    }
  }
  const auto latest_text = ReadSmall(fmt::format("{}/{}", path_, kLatestFile), kMaxSmallBytes);
  if (latest_text.ok()) {
    const auto latest = ParseLatest(*latest_text);
    if (!latest.ok()) {
      listing.notes.push_back(fmt::format("{}: {}", kLatestFile, MessageOf(latest.status())));
    } else if (std::ranges::find(listing.checkpoints, latest->checkpoint, &CheckpointInfo::name) ==
               listing.checkpoints.end()) {
      listing.notes.push_back(
          fmt::format("{}: names {}, which is not there", kLatestFile, latest->checkpoint));
    }
  }
  return listing;
}

absl::StatusOr<std::string> Root::NewCheckpoint(int64_t step) {
  if (step < 0)
    return Error(absl::StatusCode::kInvalidArgument, "a checkpoint of step {}, at least 0 wanted",
                 step);
  OUTLAST_RETURN_IF_ERROR(CheckPresence());
  while (true) {
    const auto nonce = static_cast<uint32_t>(RandomU64());
    if (nonce == 0) continue;
    std::string name = CheckpointName(step, nonce);
    const absl::Status made = MakeFolder(PathOf(name));
    if (absl::IsAlreadyExists(made)) continue;
    OUTLAST_RETURN_IF_ERROR(made);
    const absl::Status synced = FsyncFolder(path_);
    if (synced.ok()) return name;
    rmdir(PathOf(name).c_str());
    return synced;
  }
}

absl::Status Root::LinkManifest(const std::string& folder, const Manifest& manifest,
                                const std::string& text) {
  const std::string temp =
      fmt::format("{}/MANIFEST.{:08x}.tmp", folder, static_cast<uint32_t>(RandomU64()));
  const std::string final_path = fmt::format("{}/{}", folder, kManifestFile);
  OUTLAST_RETURN_IF_ERROR(WriteNew(temp, text));
  absl::Status status = CheckClaim();
  if (status.ok()) status = PublishByLink(temp, final_path);
  if (absl::IsAlreadyExists(status)) {
    const auto found = ReadSmall(final_path, kMaxManifestBytes);
    const bool ours = found.ok() && *found == text;
    status = ours ? absl::OkStatus()
                  : Error(absl::StatusCode::kAborted,
                          "{}: another committer's manifest is there; ours is lost", final_path);
  }
  if (status.ok()) status = FsyncFolder(folder);
  if (status.ok()) status = FsyncFolder(path_);
  // A temp that stays harms nothing: what is committed must not be called a failure for it.
  RemoveFile(temp).IgnoreError();
  return Annotate(status, fmt::format("commit step {}", manifest.step));
}

absl::Status Root::Commit(const Manifest& manifest) {
  OUTLAST_ASSIGN_OR_RETURN(const std::string text, ToText(manifest));
  OUTLAST_RETURN_IF_ERROR(
      ParseManifest(text).status());  // what no reader would take must not become a commit
  const std::string folder = PathOf(manifest.checkpoint);
  OUTLAST_ASSIGN_OR_RETURN(const bool deleted, Exists(fmt::format("{}/{}", folder, kDeletedFile)));
  if (deleted)
    return Error(absl::StatusCode::kFailedPrecondition, "commit {}: DELETED lies there",
                 manifest.checkpoint);
  {
    MutexLock lock(mutex_);
    if (manifest.generation < newest_generation_) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "commit {}: generation {}, this run has reached {}", manifest.checkpoint,
                   manifest.generation, newest_generation_);
    }
    newest_generation_ = manifest.generation;
  }
  return LinkManifest(folder, manifest, text);
}

absl::Status Root::CommitCopy(std::string_view checkpoint, const std::string& text) {
  OUTLAST_ASSIGN_OR_RETURN(const Manifest manifest, ParseManifest(text));
  if (manifest.checkpoint != checkpoint || manifest.job != job_) {
    return Error(absl::StatusCode::kInvalidArgument, "commit {}: the manifest is of {}, job {}",
                 checkpoint, manifest.checkpoint, manifest.job.hex());
  }
  return LinkManifest(PathOf(checkpoint), manifest, text);
}

absl::StatusOr<Manifest> Root::ComposeManifest(std::string_view checkpoint, uint32_t world) const {
  std::vector<Receipt> receipts;
  std::vector<ReceiptEntry> entries;
  for (uint32_t rank = 0; rank < world; ++rank) {
    const std::string name = ReceiptName(rank);
    const std::string place = fmt::format("{}, rank {} of {}", checkpoint, rank, world);
    const auto text = ReadSmall(fmt::format("{}/{}", PathOf(checkpoint), name), kMaxReceiptBytes);
    if (!text.ok()) return Annotate(text.status(), place);
    auto receipt = ParseReceipt(*text);
    if (!receipt.ok()) return Annotate(receipt.status(), place);
    entries.push_back({name, text->size(), Crc32c(*text), receipt->data_bytes()});
    receipts.push_back(*std::move(receipt));
  }
  return ComposeManifest(checkpoint, std::move(receipts), std::move(entries));
}

absl::StatusOr<Manifest> Root::ComposeManifest(std::string_view checkpoint,
                                               std::vector<Receipt> receipts,
                                               std::vector<ReceiptEntry> entries) const {
  RollForwardView view;
  view.name = checkpoint;
  Manifest manifest;
  size_t boxes = 0;
  for (size_t rank = 0; rank < receipts.size(); ++rank) {
    Receipt& receipt = receipts[rank];
    if (receipt.file.has_value()) {
      const std::string place = fmt::format("{}, rank {} of {}", checkpoint, rank, receipts.size());
      const auto bytes = FileBytes(fmt::format("{}/{}", PathOf(checkpoint), receipt.file->name));
      if (!bytes.ok()) return Annotate(bytes.status(), place);
      if (*bytes != receipt.file->bytes) {
        return Error(absl::StatusCode::kDataLoss, "{}: {} has {} bytes, its receipt says {}", place,
                     receipt.file->name, *bytes, receipt.file->bytes);
      }
    }
    manifest.bytes += receipt.data_bytes();
    boxes += receipt.tensors.size();
    view.receipts.emplace_back(std::move(receipt));
  }
  manifest.receipts = std::move(entries);
  // The same questions as for a roll-forward, but for hooks and claims, which the committer answers
  // itself.
  for (auto& receipt : view.receipts) receipt->hooks.clear();
  const RollForwardDecision whole = JudgeRollForward(view, options_.run);
  if (!whole.commit)
    return Error(absl::StatusCode::kInvalidArgument, "{}: {}", checkpoint, whole.reason);
  const Receipt& first = *view.receipts.front();
  manifest.job = first.job;
  manifest.claim = first.claim;
  manifest.checkpoint = first.checkpoint;
  manifest.step = first.step;
  manifest.generation = first.generation;
  manifest.parent = first.parent;
  manifest.world = first.world;
  manifest.mesh = first.mesh;
  manifest.plan = first.plan;
  NameIndex names(boxes);
  for (const auto& receipt : view.receipts) {
    for (const SavedBox& box : receipt->tensors) names.Add(box.name);
  }
  manifest.tensors = names.size();
  return manifest;
}

std::vector<std::string> Root::AncestorsOf(const std::optional<std::string>& parent,
                                           const Listing& listing,
                                           std::span<const std::string> elsewhere) const {
  std::vector<std::string> ancestors;
  const auto stands = [&](const std::string& name) -> const CheckpointInfo* {
    const auto found = std::ranges::find(listing.checkpoints, name, &CheckpointInfo::name);
    if (found == listing.checkpoints.end() || !found->manifest.has_value() ||
        found->state == CheckpointState::kForeign)
      return nullptr;
    return &*found;
  };
  if (!parent.has_value()) return ancestors;
  const CheckpointInfo* info = stands(*parent);
  if (info == nullptr) {  // it was restored from the other tier, whose history goes on behind it
    ancestors.assign(std::ranges::find(elsewhere, *parent), elsewhere.end());
    return ancestors;
  }
  ancestors.push_back(*parent);
  for (const std::string& name : info->manifest->ancestors) {
    const bool is_known =
        stands(name) != nullptr || std::ranges::find(elsewhere, name) != elsewhere.end();
    if (is_known && name != *parent) ancestors.push_back(name);
  }
  return ancestors;
}

absl::StatusOr<std::vector<std::string>> Root::RollForward(std::span<const std::string> in_progress,
                                                           const CommittedBy& by) {
  OUTLAST_ASSIGN_OR_RETURN(const Listing listing, List());
  std::vector<std::string> committed;
  for (const CheckpointInfo& info : listing.checkpoints) {
    if (info.state != CheckpointState::kIncomplete) continue;
    if (std::ranges::find(in_progress, info.name) != in_progress.end()) continue;
    const std::string folder = PathOf(info.name);
    RollForwardView view{info.name, false, {}, std::nullopt, listing.claims};
    const auto entries = ListFolder(folder);
    if (absl::IsNotFound(entries.status())) continue;  // its former owner gave it up just now
    if (!entries.ok()) return entries.status();
    for (const FolderEntry& entry : *entries) {
      if (!entry.name.ends_with(".receipt.json")) continue;
      const auto text = ReadSmall(folder + "/" + entry.name, kMaxReceiptBytes);
      view.receipts.push_back(text.ok() ? ParseReceipt(*text)
                                        : absl::StatusOr<Receipt>(text.status()));
      if (view.receipts.back().ok() && entry.name != ReceiptName(view.receipts.back()->rank)) {
        view.receipts.back() = Error(absl::StatusCode::kInvalidArgument,
                                     "{}: the receipt of another rank", entry.name);
      }
    }
    const auto hooks = ReadSmall(fmt::format("{}/{}", folder, kHooksFile), kMaxSmallBytes);
    if (hooks.ok()) {
      auto record = ParseHooks(*hooks);
      if (record.ok()) view.hooks = std::move(*record);
    }
    if (!JudgeRollForward(view, options_.run).commit || view.receipts.front()->job != job_)
      continue;
    for (auto& receipt : view.receipts) {  // the dear part only for those that pass the cheap one
      const std::vector<Damage> damages = VerifyShard(folder, *receipt);
      if (!damages.empty())
        receipt = Error(absl::StatusCode::kDataLoss, "{}: {}", damages[0].file, damages[0].message);
    }
    if (!JudgeRollForward(view, options_.run).commit) continue;
    auto composed = ComposeManifest(info.name, view.receipts.front()->world);
    if (absl::IsNotFound(composed.status())) continue;
    if (!composed.ok()) return composed.status();
    Manifest manifest = *std::move(composed);
    manifest.ancestors = AncestorsOf(manifest.parent, listing);
    if (view.hooks.has_value()) manifest.hooks = view.hooks->hooks;
    manifest.committed_by = by;
    OUTLAST_ASSIGN_OR_RETURN(const std::string text, ToText(manifest));
    const absl::Status linked = LinkManifest(folder, manifest, text);
    if (absl::IsNotFound(linked)) continue;
    OUTLAST_RETURN_IF_ERROR(linked);
    committed.push_back(info.name);
  }
  return committed;
}

}  // namespace outlast
