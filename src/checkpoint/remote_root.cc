#include "checkpoint/remote_root.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <map>
#include <set>
#include <utility>

#include "base/error.h"
#include "checkpoint/manifest.h"
#include "outlast/base/crc32c.h"
#include "outlast/base/fd.h"
#include "outlast/base/memory.h"
#include "store/folder.h"

namespace outlast {
namespace {

constexpr std::string_view kReleased = ".released";
constexpr std::string_view kBeat = ".beat";
constexpr uint64_t kWindowBytes = uint64_t{32} << 20;  // of a fetch; a multiple of any chunk's size
constexpr absl::Duration kBeatTimeout = absl::Seconds(4);
constexpr absl::Duration kOpenTimeout = absl::Seconds(15);

// A shard's time: 60 s + bytes / (5 MB/s), since a store may be far away; a connection that stands
// still is given up long before.
BlobCall CallFor(uint64_t bytes, const std::function<bool()>& is_cancelled) {
  return {absl::Seconds(60) + absl::Seconds(static_cast<double>(bytes) / 5e6), is_cancelled};
}

std::string ClaimKey(uint64_t number, std::string_view suffix = {}) {
  return fmt::format("{}/{}{}", kClaimsFolder, number, suffix);
}

std::optional<uint64_t> ParseNumber(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty() || text[0] == '0')
    return std::nullopt;
  return value;
}

bool IsUsable(const CheckpointInfo& info) {
  return info.state == CheckpointState::kCommitted && info.quarantined.empty();
}

// Checks each chunk that lies whole in [offset, offset + bytes).
absl::Status CheckChunks(const std::string& place, const ShardFile& file, uint64_t offset,
                         std::span<const std::byte> bytes) {
  const uint64_t chunk = file.chunk_bytes;
  for (uint64_t i = (offset + chunk - 1) / chunk; i < file.chunks.size(); ++i) {
    const uint64_t begin = i * chunk, end = std::min(begin + chunk, file.bytes);
    if (end > offset + bytes.size()) break;
    const uint32_t found = Crc32c(bytes.subspan(begin - offset, end - begin));
    if (found == file.chunks[i]) continue;
    return Error(absl::StatusCode::kDataLoss,
                 "{}: the chunk at byte {} has crc {:08x}, its receipt says {:08x}", place, begin,
                 found, file.chunks[i]);
  }
  return absl::OkStatus();
}

absl::Status ReadAt(int fd, const std::string& path, uint64_t offset, std::span<std::byte> into) {
  const uint64_t begin = offset, bytes = into.size();
  while (!into.empty()) {
    const ssize_t count = pread(fd, into.data(), into.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError(errno, "read", path);
    if (count == 0) return Error(absl::StatusCode::kDataLoss, "{}: ends at byte {}", path, offset);
    offset += static_cast<uint64_t>(count);
    into = into.subspan(static_cast<size_t>(count));
  }
  // The trainer's page cache is not ours to fill.
  posix_fadvise(fd, static_cast<off_t>(begin), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
  return absl::OkStatus();
}

absl::Status CannotWrite(const absl::Status& status, std::string_view uri) {
  if (!absl::IsPermissionDenied(status)) return status;
  return Annotate(status, fmt::format("remote root {}: it must be writable to be saved to", uri));
}

absl::Status TakenBy(std::string_view uri, const ClaimFile& file, uint64_t mine) {
  const Claim owner = file.claim.value_or(Claim{});
  return Error(absl::StatusCode::kAborted,
               "remote root {}: claim {} of run {} on host '{}' (pid {}) has taken it; ours is {}",
               uri, file.number, owner.run.hex(), owner.host, owner.pid, mine);
}

}  // namespace

absl::StatusOr<std::unique_ptr<RemoteRoot>> RemoteRoot::Open(std::unique_ptr<Blob> blob,
                                                             RootOptions options, Clock& clock) {
  std::unique_ptr<RemoteRoot> root(new RemoteRoot(std::move(blob), std::move(options), clock));
  OUTLAST_RETURN_IF_ERROR(Annotate(root->ReadRecord(), fmt::format("remote root {}", root->uri())));
  return root;
}

absl::Status RemoteRoot::ReadRecord() {
  const auto text = GetSmall(*blob_, std::string(kRootFile), kMaxSmallBytes,
                             {.timeout = kOpenTimeout, .is_cancelled = {}});
  if (absl::IsNotFound(text.status())) return absl::OkStatus();
  if (!text.ok()) return text.status();
  OUTLAST_ASSIGN_OR_RETURN(const RootRecord record, ParseRootRecord(*text));
  const bool named = !options_.job_name.empty();
  if (named && Id128::FromName(options_.job_name) != record.job) {
    return Error(absl::StatusCode::kFailedPrecondition, "foreign: of job {}, --job '{}' is {}",
                 record.job.hex(), options_.job_name, Id128::FromName(options_.job_name).hex());
  }
  job_ = record.job;
  return absl::OkStatus();
}

absl::Status RemoteRoot::Adopt(const Id128& job, const std::string& name) {
  if (!job_.has_value()) {
    OUTLAST_ASSIGN_OR_RETURN(const std::string text, ToText(RootRecord{job, name}));
    absl::Status made = PutSmall(*blob_, std::string(kRootFile), text, PutMode::kCreate);
    if (made.ok()) job_ = job;
    if (!made.ok() && !absl::IsAlreadyExists(made)) return CannotWrite(made, uri());
    if (absl::IsAlreadyExists(made)) OUTLAST_RETURN_IF_ERROR(ReadRecord());
  }
  if (job_ == job) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition,
               "remote root {}: foreign: of job {}, the local root is of job {}", uri(),
               job_.has_value() ? job_->hex() : "?", job.hex());
}

absl::StatusOr<std::vector<ClaimFile>> RemoteRoot::ListClaims(const BlobCall& call) {
  OUTLAST_ASSIGN_OR_RETURN(const auto objects,
                           ListAll(*blob_, fmt::format("{}/", kClaimsFolder), call));
  std::vector<ClaimFile> claims;
  std::set<std::string> released;
  for (const BlobInfo& object : objects) {
    const std::string name = object.key.substr(kClaimsFolder.size() + 1);
    if (name.ends_with(kReleased)) released.insert(name.substr(0, name.size() - kReleased.size()));
    if (const auto number = ParseNumber(name)) claims.push_back({*number, std::nullopt, false});
  }
  std::ranges::sort(claims, {}, &ClaimFile::number);
  for (ClaimFile& file : claims) file.released = released.contains(std::to_string(file.number));
  // Only the newest is ever asked about.
  if (!claims.empty()) {
    const auto text = GetSmall(*blob_, ClaimKey(claims.back().number), kMaxSmallBytes, call);
    if (!text.ok()) return text.status();
    auto claim = ParseClaim(*text);
    if (claim.ok()) claims.back().claim = std::move(*claim);
  }
  return claims;
}

absl::StatusOr<std::optional<uint64_t>> RemoteRoot::ReadBeat(uint64_t number) {
  const auto text = GetSmall(*blob_, ClaimKey(number, kBeat), 64);
  if (absl::IsNotFound(text.status())) return std::optional<uint64_t>();
  if (!text.ok()) return text.status();
  return ParseNumber(std::string_view(*text).substr(0, text->find('\n')));
}

absl::StatusOr<uint64_t> RemoteRoot::AwaitTurn() {
  uint64_t watched = 0;
  std::optional<uint64_t> first_beat;
  absl::Duration began;
  while (true) {
    OUTLAST_ASSIGN_OR_RETURN(const auto claims, ListClaims({}));
    ClaimView view;
    if (!claims.empty()) {
      view.number = claims.back().number;
      view.released = claims.back().released;
      view.claim = claims.back().claim.value_or(Claim{});
      view.owner = StateOfOwner(view.claim, options_.owner);
      OUTLAST_ASSIGN_OR_RETURN(view.beat, ReadBeat(view.number));
      if (std::exchange(watched, view.number) != view.number) {
        first_beat = view.beat;
        began = clock_.Uptime();
      }
      view.first_beat = first_beat;
      view.watched = clock_.Uptime() - began;
    }
    const ClaimDecision decision = JudgeClaim(view, options_.run, options_.take_over);
    if (decision.verdict == ClaimVerdict::kRefuse) {
      return Error(absl::StatusCode::kFailedPrecondition, "remote root {}: {}", uri(),
                   decision.reason);
    }
    if (decision.verdict == ClaimVerdict::kWatch) {
      clock_.SleepFor(kBeatInterval / 5);
      continue;
    }
    uint64_t largest = view.number;
    OUTLAST_ASSIGN_OR_RETURN(const Listing listing, List());
    for (const CheckpointInfo& info : listing.checkpoints) {
      if (info.state == CheckpointState::kNewer)
        return Error(absl::StatusCode::kUnimplemented, "{}/{}: {}", uri(), info.name, info.reason);
      if (info.manifest.has_value()) largest = std::max(largest, info.manifest->claim);
    }
    return largest;
  }
}

absl::Status RemoteRoot::TakeClaim(uint64_t number) {
  const OwnerIdentity& owner = options_.owner;
  OUTLAST_ASSIGN_OR_RETURN(
      const std::string text,
      ToText(Claim{job_.value_or(Id128{}), options_.run, owner.host, owner.boot_id,
                   owner.pid_namespace, owner.pid, owner.pid_start}));
  absl::Status made = PutSmall(*blob_, ClaimKey(number), text, PutMode::kCreate);
  if (absl::IsAlreadyExists(made)) {
    const auto found = GetSmall(*blob_, ClaimKey(number), kMaxSmallBytes);
    const bool is_ours = found.ok() && *found == text;
    made = is_ours
               ? absl::OkStatus()
               : Error(absl::StatusCode::kFailedPrecondition,
                       "remote root {}: another run took claim {} at this moment", uri(), number);
  }
  OUTLAST_RETURN_IF_ERROR(CannotWrite(made, uri()));
  {
    MutexLock lock(mutex_);
    claim_ = number;
    beat_ = 0;
  }
  return Beat();
}

bool RemoteRoot::is_claimed() {
  MutexLock lock(mutex_);
  return claim_ != 0;
}

absl::Status RemoteRoot::Beat() {
  uint64_t number = 0, beat = 0;
  {
    MutexLock lock(mutex_);
    number = claim_;
    beat = ++beat_;
  }
  if (number == 0) return absl::OkStatus();
  return PutSmall(*blob_, ClaimKey(number, kBeat), fmt::format("{}\n", beat), PutMode::kReplace,
                  {.timeout = kBeatTimeout, .is_cancelled = {}});
}

absl::Status RemoteRoot::Release() {
  uint64_t number = 0;
  {
    MutexLock lock(mutex_);
    number = claim_;
  }
  if (number == 0) return absl::OkStatus();
  return PutSmall(*blob_, ClaimKey(number, kReleased), "", PutMode::kReplace,
                  {.timeout = absl::Seconds(10), .is_cancelled = {}});
}

absl::Status RemoteRoot::CheckClaim() {
  uint64_t mine = 0;
  {
    MutexLock lock(mutex_);
    mine = claim_;
  }
  OUTLAST_ASSIGN_OR_RETURN(const auto claims, ListClaims({}));
  if (claims.empty() || claims.back().number <= mine) return absl::OkStatus();
  const ClaimFile& newest = claims.back();
  if (newest.claim.has_value() && newest.claim->run == options_.run) return absl::OkStatus();
  return TakenBy(uri(), newest, mine);
}

absl::StatusOr<CheckpointInfo> RemoteRoot::Inspect(const std::string& name,
                                                   const std::vector<BlobInfo>& files,
                                                   const BlobCall& call) {
  CheckpointInfo info;
  info.name = name;
  info.step = ParseCheckpointName(name)->step;
  const auto find = [&](std::string_view file) -> const BlobInfo* {
    const auto found = std::ranges::find(files, fmt::format("{}/{}", name, file), &BlobInfo::key);
    return found == files.end() ? nullptr : &*found;
  };
  const auto damaged = [&](const absl::Status& why) {
    info.state = absl::IsUnimplemented(why) ? CheckpointState::kNewer : CheckpointState::kDamaged;
    info.reason = MessageOf(why);
    return info;
  };
  info.pinned = find(kPinnedFile) != nullptr;
  if (find(kDeletedFile) != nullptr) {
    info.state = CheckpointState::kDeleted;
    info.reason = "its deletion has begun";
    return info;
  }
  if (find(kManifestFile) == nullptr) {
    info.reason = "no MANIFEST.json";
    return info;
  }
  const auto text =
      GetSmall(*blob_, fmt::format("{}/{}", name, kManifestFile), kMaxManifestBytes, call);
  if (absl::IsResourceExhausted(text.status())) return damaged(text.status());
  if (!text.ok() && !absl::IsNotFound(text.status())) return text.status();
  if (!text.ok()) {
    info.reason = "its MANIFEST.json went while it was read";
    return info;
  }
  auto manifest = ParseManifest(*text);
  if (!manifest.ok()) return damaged(Annotate(manifest.status(), kManifestFile));
  if (manifest->checkpoint != name) {
    return damaged(
        Error(absl::StatusCode::kInvalidArgument, "the manifest is of {}", manifest->checkpoint));
  }
  info.manifest = std::move(*manifest);
  if (job_.has_value() && info.manifest->job != *job_) {
    info.state = CheckpointState::kForeign;
    info.reason =
        fmt::format("of job {}, the root is of job {}", info.manifest->job.hex(), job_->hex());
    return info;
  }
  for (const ReceiptEntry& entry : info.manifest->receipts) {
    const BlobInfo* receipt = find(entry.name);
    if (receipt == nullptr || receipt->bytes != entry.bytes) {
      return damaged(Error(absl::StatusCode::kDataLoss, "{}: {} bytes, the manifest says {}",
                           entry.name, receipt == nullptr ? 0 : receipt->bytes, entry.bytes));
    }
  }
  info.state = CheckpointState::kCommitted;
  return info;
}

absl::StatusOr<Listing> RemoteRoot::List(const BlobCall& call) {
  Listing listing;
  OUTLAST_ASSIGN_OR_RETURN(const auto objects, ListAll(*blob_, "", call));
  std::map<std::string, std::vector<BlobInfo>> folders;
  for (const BlobInfo& object : objects) {
    const size_t slash = object.key.find('/');
    const std::string first = object.key.substr(0, slash);
    if (first == kClaimsFolder || object.key == kRootFile) continue;
    if (slash == std::string::npos || !ParseCheckpointName(first).has_value()) {
      listing.strangers.push_back({object.key, "not a name that Outlast gives"});
    } else {
      folders[first].push_back(object);
    }
  }
  for (const auto& [name, files] : folders) {
    OUTLAST_ASSIGN_OR_RETURN(CheckpointInfo info, Inspect(name, files, call));
    listing.checkpoints.push_back(std::move(info));
  }
  return listing;
}

// --- Up

absl::Status RemoteRoot::UploadShard(const std::string& folder, const std::string& checkpoint,
                                     const ShardFile& file, RateLimiter* limiter,
                                     const BlobCall& call, UploadResult& result) {
  const std::string key = checkpoint + "/" + file.name;
  const std::string path = folder + "/" + file.name;
  const auto there = blob_->Stat(key, call);
  if (there.ok() && there->bytes == file.bytes) {
    result.bytes_kept += file.bytes;
    return absl::OkStatus();
  }
  if (!there.ok() && !absl::IsNotFound(there.status())) return there.status();
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd.is_open()) return FileError(errno, "open", path);
  const BlobSource source{file.bytes,
                          [&](uint64_t offset, std::span<std::byte> into) -> absl::Status {
                            if (limiter != nullptr) limiter->Await(into.size());
                            OUTLAST_RETURN_IF_ERROR(ReadAt(fd.get(), path, offset, into));
                            return CheckChunks(path, file, offset, into);
                          }};
  OUTLAST_RETURN_IF_ERROR(blob_->Put(key, source, PutMode::kReplace, call));
  result.bytes += file.bytes;
  return absl::OkStatus();
}

absl::StatusOr<UploadResult> RemoteRoot::Upload(const std::string& folder, RateLimiter* limiter,
                                                const std::function<bool()>& is_cancelled) {
  const absl::Duration began = clock_.Uptime();
  const std::string name = folder.substr(folder.rfind('/') + 1);
  UploadResult result{name, 0, 0, {}};
  const BlobCall small{.timeout = absl::Minutes(2), .is_cancelled = is_cancelled};
  OUTLAST_ASSIGN_OR_RETURN(
      const std::string text,
      ReadSmall(fmt::format("{}/{}", folder, kManifestFile), kMaxManifestBytes));
  OUTLAST_ASSIGN_OR_RETURN(const Manifest manifest, ParseManifest(text));
  const std::string manifest_key = fmt::format("{}/{}", name, kManifestFile);
  const auto is_there = [&]() -> absl::StatusOr<bool> {
    const auto found = GetSmall(*blob_, manifest_key, kMaxManifestBytes, small);
    if (absl::IsNotFound(found.status())) return false;
    if (!found.ok()) return found.status();
    if (*found == text) return true;
    return Error(absl::StatusCode::kAborted, "{}/{}: another manifest is there", uri(),
                 manifest_key);
  };
  OUTLAST_RETURN_IF_ERROR(CheckClaim());
  OUTLAST_ASSIGN_OR_RETURN(const bool was_there, is_there());
  if (was_there) return result;
  for (const ReceiptEntry& entry : manifest.receipts) {
    OUTLAST_ASSIGN_OR_RETURN(const std::string content,
                             ReadSmall(folder + "/" + entry.name, kMaxReceiptBytes));
    OUTLAST_ASSIGN_OR_RETURN(const Receipt receipt, ParseReceiptOf(entry, content, folder));
    if (receipt.file.has_value()) {
      uint64_t bytes = receipt.file->bytes;
      BlobCall call = CallFor(bytes, is_cancelled);
      if (limiter != nullptr && limiter->bytes_per_second() > 0)
        call.timeout += absl::Seconds(2.0 * static_cast<double>(bytes) /
                                      static_cast<double>(limiter->bytes_per_second()));
      OUTLAST_RETURN_IF_ERROR(UploadShard(folder, name, *receipt.file, limiter, call, result));
    }
    OUTLAST_RETURN_IF_ERROR(
        PutSmall(*blob_, name + "/" + entry.name, content, PutMode::kReplace, small));
  }
  const auto hooks = ReadSmall(fmt::format("{}/{}", folder, kHooksFile), kMaxSmallBytes);
  if (hooks.ok())
    OUTLAST_RETURN_IF_ERROR(
        PutSmall(*blob_, fmt::format("{}/{}", name, kHooksFile), *hooks, PutMode::kReplace, small));
  OUTLAST_RETURN_IF_ERROR(CheckClaim());
  const absl::Status committed = PutSmall(*blob_, manifest_key, text, PutMode::kCreate, small);
  if (absl::IsAlreadyExists(committed)) {
    OUTLAST_RETURN_IF_ERROR(is_there().status());
  } else {
    OUTLAST_RETURN_IF_ERROR(committed);
  }
  result.time = clock_.Uptime() - began;
  return result;
}

// --- Down

absl::Status RemoteRoot::ReadShard(
    const std::string& checkpoint, const ShardFile& file, const std::function<bool()>& is_cancelled,
    const std::function<absl::Status(uint64_t offset, std::span<const std::byte>)>& take) {
  const std::string key = checkpoint + "/" + file.name;
  const uint64_t window =
      std::max<uint64_t>(1, kWindowBytes / file.chunk_bytes) * uint64_t{file.chunk_bytes};
  OUTLAST_ASSIGN_OR_RETURN(Mapping memory,
                           Mapping::Anonymous(std::clamp<uint64_t>(file.bytes, 1, window)));
  for (uint64_t at = 0; at < file.bytes; at += window) {
    const std::span<std::byte> part(memory.data(), std::min(window, file.bytes - at));
    OUTLAST_RETURN_IF_ERROR(blob_->Get(key, at, part, CallFor(part.size(), is_cancelled)));
    OUTLAST_RETURN_IF_ERROR(take(at, part));
  }
  return absl::OkStatus();
}

absl::Status RemoteRoot::FetchShard(const std::string& checkpoint, const std::string& folder,
                                    const ShardFile& file,
                                    const std::function<bool()>& is_cancelled,
                                    const OnBytes& on_bytes) {
  const std::string place = fmt::format("{}/{}/{}", uri(), checkpoint, file.name);
  OUTLAST_ASSIGN_OR_RETURN(DirectWriter writer,
                           DirectWriter::Create(folder + "/" + file.name, file.bytes));
  const auto take = [&](uint64_t offset, std::span<const std::byte> part) -> absl::Status {
    if (on_bytes) on_bytes(part.size());
    OUTLAST_RETURN_IF_ERROR(CheckChunks(place, file, offset, part));
    return writer.Append(part);
  };
  OUTLAST_RETURN_IF_ERROR(ReadShard(checkpoint, file, is_cancelled, take));
  return writer.Finish();
}

absl::StatusOr<std::string> RemoteRoot::ReadHead(const std::string& checkpoint,
                                                 const std::function<bool()>& is_cancelled) {
  const std::string place = fmt::format("{}/{}", uri(), checkpoint);
  const BlobCall small{.timeout = absl::Minutes(2), .is_cancelled = is_cancelled};
  OUTLAST_ASSIGN_OR_RETURN(
      const std::string text,
      GetSmall(*blob_, fmt::format("{}/{}", checkpoint, kManifestFile), kMaxManifestBytes, small));
  const auto manifest = ParseManifest(text);
  if (!manifest.ok()) return Annotate(manifest.status(), place);
  std::vector<std::string> receipts;
  for (const ReceiptEntry& entry : manifest->receipts) {
    auto content = GetSmall(*blob_, checkpoint + "/" + entry.name, kMaxReceiptBytes, small);
    if (absl::IsNotFound(content.status()))
      return Error(absl::StatusCode::kDataLoss, "{}/{}: missing", place, entry.name);
    if (!content.ok()) return content.status();
    receipts.push_back(*std::move(content));
  }
  return EncodeHead(text, receipts);
}

absl::StatusOr<std::unique_ptr<CheckpointReader>> RemoteRoot::Read(const std::string& checkpoint) {
  OUTLAST_ASSIGN_OR_RETURN(const std::string head, ReadHead(checkpoint));
  return CheckpointReader::Of(fmt::format("{}/{}", uri(), checkpoint), head);
}

absl::Status RemoteRoot::ReadRange(const std::string& checkpoint, const ShardFile& file,
                                   uint64_t offset, std::span<std::byte> into,
                                   const std::function<bool()>& is_cancelled) {
  absl::Status read =
      blob_->Get(checkpoint + "/" + file.name, offset, into, CallFor(into.size(), is_cancelled));
  if (!absl::IsNotFound(read) && !absl::IsInvalidArgument(read)) return read;
  // To a restore, a shard that is gone or cut is damage like any other.
  return Error(absl::StatusCode::kDataLoss, "{}/{}/{}: bytes {} to {}: {}", uri(), checkpoint,
               file.name, offset, offset + into.size(), MessageOf(read));
}

absl::StatusOr<std::vector<Damage>> RemoteRoot::Verify(const std::string& checkpoint,
                                                       const OnBytes& on_bytes) {
  const auto is_damage = [](const absl::Status& status) {
    return absl::IsDataLoss(status) || absl::IsNotFound(status) || absl::IsInvalidArgument(status);
  };
  std::vector<Damage> damages;
  const auto reader = Read(checkpoint);
  if (!reader.ok() && !is_damage(reader.status())) return reader.status();
  if (!reader.ok()) {
    damages.push_back({std::string(kManifestFile), 0, std::string(MessageOf(reader.status()))});
    return damages;
  }
  for (const Receipt& receipt : (*reader)->receipts()) {
    if (!receipt.file.has_value()) continue;
    const ShardFile& file = *receipt.file;
    const std::string place = fmt::format("{}/{}/{}", uri(), checkpoint, file.name);
    // Its length first: bytes past the last chunk are in no range that is asked for.
    const auto info = blob_->Stat(checkpoint + "/" + file.name, {});
    if (!info.ok() && !absl::IsNotFound(info.status())) return info.status();
    if (!info.ok() || info->bytes != file.bytes) {
      damages.push_back({file.name, 0,
                         info.ok() ? fmt::format("{}: {} bytes, its receipt says {}", place,
                                                 info->bytes, file.bytes)
                                   : fmt::format("{}: missing", place)});
      continue;
    }
    const absl::Status read =
        ReadShard(checkpoint, file, {}, [&](uint64_t offset, std::span<const std::byte> part) {
          if (on_bytes) on_bytes(part.size());
          // A chunk at a time, so that each bad one is named.
          for (uint64_t at = 0; at < part.size(); at += file.chunk_bytes) {
            const auto chunk =
                part.subspan(at, std::min<uint64_t>(file.chunk_bytes, part.size() - at));
            const absl::Status whole = CheckChunks(place, file, offset + at, chunk);
            if (!whole.ok())
              damages.push_back({file.name, offset + at, std::string(MessageOf(whole))});
          }
          return absl::OkStatus();
        });
    if (!read.ok() && !is_damage(read)) return read;
    if (!read.ok()) damages.push_back({file.name, 0, std::string(MessageOf(read))});
  }
  return damages;
}

absl::Status RemoteRoot::Fetch(const std::string& checkpoint, Root& root,
                               const std::function<bool()>& is_cancelled, const OnBytes& on_bytes) {
  if (!ParseCheckpointName(checkpoint).has_value()) {
    return Error(absl::StatusCode::kInvalidArgument, "fetch '{}': not a checkpoint's name",
                 checkpoint);
  }
  const BlobCall small{.timeout = absl::Minutes(2), .is_cancelled = is_cancelled};
  const std::string staging = fmt::format("{}/{}", root.path(), kFetchFolder);
  const std::string folder = staging + "/" + checkpoint;
  const std::string place = fmt::format("{}/{}", uri(), checkpoint);
  OUTLAST_ASSIGN_OR_RETURN(const bool left, Exists(staging));
  if (left) OUTLAST_RETURN_IF_ERROR(RemoveTree(staging));
  OUTLAST_RETURN_IF_ERROR(MakeFolders(folder));
  OUTLAST_ASSIGN_OR_RETURN(
      const std::string text,
      GetSmall(*blob_, fmt::format("{}/{}", checkpoint, kManifestFile), kMaxManifestBytes, small));
  OUTLAST_ASSIGN_OR_RETURN(const Manifest manifest, ParseManifest(text));
  if (manifest.checkpoint != checkpoint || manifest.job != root.job())
    return Error(absl::StatusCode::kInvalidArgument, "{}: of another checkpoint or job", place);
  for (const ReceiptEntry& entry : manifest.receipts) {
    OUTLAST_ASSIGN_OR_RETURN(
        const std::string content,
        GetSmall(*blob_, checkpoint + "/" + entry.name, kMaxReceiptBytes, small));
    OUTLAST_ASSIGN_OR_RETURN(const Receipt receipt, ParseReceiptOf(entry, content, place));
    OUTLAST_RETURN_IF_ERROR(WriteNew(folder + "/" + entry.name, content));
    if (receipt.file.has_value())
      OUTLAST_RETURN_IF_ERROR(
          FetchShard(checkpoint, folder, *receipt.file, is_cancelled, on_bytes));
  }
  const auto hooks =
      GetSmall(*blob_, fmt::format("{}/{}", checkpoint, kHooksFile), kMaxSmallBytes, small);
  if (hooks.ok())
    OUTLAST_RETURN_IF_ERROR(WriteNew(fmt::format("{}/{}", folder, kHooksFile), *hooks));
  OUTLAST_RETURN_IF_ERROR(WriteNew(fmt::format("{}/{}", folder, kManifestFile), text));
  OUTLAST_RETURN_IF_ERROR(FsyncFolder(folder));
  const std::string final_path = root.PathOf(checkpoint);
  OUTLAST_ASSIGN_OR_RETURN(const bool taken, Exists(final_path));
  if (taken) OUTLAST_RETURN_IF_ERROR(root.Delete(checkpoint));
  if (rename(folder.c_str(), final_path.c_str()) != 0)
    return FileError(errno, "rename", final_path);
  OUTLAST_RETURN_IF_ERROR(FsyncFolder(root.path()));
  OUTLAST_RETURN_IF_ERROR(RemoveTree(staging));
  return root.ClearQuarantine(checkpoint);
}

// --- Away

absl::Status RemoteRoot::Delete(const std::string& checkpoint) {
  const auto key = [&](std::string_view file) { return fmt::format("{}/{}", checkpoint, file); };
  OUTLAST_RETURN_IF_ERROR(PutSmall(*blob_, key(kDeletedFile), "", PutMode::kReplace));
  OUTLAST_RETURN_IF_ERROR(blob_->Remove(key(kManifestFile), {}));
  OUTLAST_ASSIGN_OR_RETURN(const auto objects, ListAll(*blob_, checkpoint + "/"));
  for (const BlobInfo& object : objects)
    if (object.key != key(kDeletedFile)) OUTLAST_RETURN_IF_ERROR(blob_->Remove(object.key, {}));
  return blob_->Remove(key(kDeletedFile), {});
}

absl::StatusOr<std::vector<std::string>> RemoteRoot::Retain(const RetentionOptions& options) {
  OUTLAST_ASSIGN_OR_RETURN(const Listing listing, List());
  std::vector<std::string> names = ChooseDeletions(listing.checkpoints, options, {});
  for (const std::string& name : names) OUTLAST_RETURN_IF_ERROR(Delete(name));
  return names;
}

TierView MergeTiers(const Listing& local, const Listing& remote) {
  TierView view{local, {}, {}};
  for (const CheckpointInfo& info : local.checkpoints)
    if (IsUsable(info)) view.local.push_back(info.name);
  for (const CheckpointInfo& info : remote.checkpoints) {
    if (IsUsable(info)) view.remote.push_back(info.name);
    const auto found =
        std::ranges::find(view.listing.checkpoints, info.name, &CheckpointInfo::name);
    if (found == view.listing.checkpoints.end()) {
      // What was never whole there and is not here at all tells nothing.
      if (info.state != CheckpointState::kIncomplete && info.state != CheckpointState::kDeleted)
        view.listing.checkpoints.push_back(info);
    } else if (!IsUsable(*found) && IsUsable(info)) {
      *found = info;
    }
  }
  std::ranges::sort(view.listing.checkpoints, {}, &CheckpointInfo::name);
  return view;
}

}  // namespace outlast
