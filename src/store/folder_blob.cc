#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "base/error.h"
#include "outlast/base/clock.h"
#include "outlast/base/id.h"
#include "outlast/base/memory.h"
#include "outlast/store/blob.h"
#include "store/folder.h"

namespace outlast {
namespace {

constexpr uint64_t kBlockBytes = uint64_t{8} << 20;
constexpr uint64_t kSmallBytes = uint64_t{1} << 20;  // up to here O_DIRECT is not worth its cost

// What a call has left.
class Watch {
 public:
  Watch(const BlobCall& call, std::string place)
      : call_(call), place_(std::move(place)), deadline_(Clock::Real().Uptime() + call.timeout) {}

  absl::Status Check() const {
    if (call_.is_cancelled && call_.is_cancelled())
      return Error(absl::StatusCode::kCancelled, "{}: cancelled", place_);
    if (Clock::Real().Uptime() >= deadline_) {
      return Error(absl::StatusCode::kDeadlineExceeded, "{}: not done after {}", place_,
                   absl::FormatDuration(call_.timeout));
    }
    return absl::OkStatus();
  }

 private:
  const BlobCall& call_;
  const std::string place_;
  const absl::Duration deadline_;
};

std::string ParentOf(const std::string& path) { return path.substr(0, path.rfind('/')); }

class FolderBlob final : public Blob {
 public:
  explicit FolderBlob(std::string path) : path_(std::move(path)), uri_("file://" + path_) {}

  absl::Status Put(const std::string& key, const BlobSource& source, PutMode mode,
                   const BlobCall& call) override {
    OUTLAST_RETURN_IF_ERROR(CheckBlobKey(key));
    const std::string path = PathOf(key);
    const Watch watch(call, path);
    OUTLAST_RETURN_IF_ERROR(watch.Check());
    const std::string parent = ParentOf(path);
    const std::string temp = fmt::format("{}/.outlast-put-{:016x}", parent, RandomU64());
    absl::Status status;
    for (int i = 0; i < kFolderTries; ++i) {
      // A Remove may take an empty folder away before our file is in it.
      OUTLAST_RETURN_IF_ERROR(MakeFolders(parent));
      status = Write(temp, source, watch);
      if (!absl::IsNotFound(status)) break;
    }
    OUTLAST_RETURN_IF_ERROR(status);
    SweepLeftovers(parent);
    if (mode == PutMode::kCreate) {
      status = PublishByLink(temp, path);
    } else if (rename(temp.c_str(), path.c_str()) != 0) {
      status = FileError(errno, "rename", path);
    }
    RemoveFile(temp).IgnoreError();
    return status.ok() ? FsyncFolder(parent) : status;
  }

  absl::Status Get(const std::string& key, uint64_t offset, std::span<std::byte> into,
                   const BlobCall& call) override {
    OUTLAST_RETURN_IF_ERROR(CheckBlobKey(key));
    const std::string path = PathOf(key);
    const Watch watch(call, path);
    OUTLAST_RETURN_IF_ERROR(watch.Check());
    OUTLAST_ASSIGN_OR_RETURN(const uint64_t bytes, FileBytes(path));
    if (offset > bytes || into.size() > bytes - offset) {
      return Error(absl::StatusCode::kInvalidArgument, "{}: {} bytes from {} wanted, it has {}",
                   path, into.size(), offset, bytes);
    }
    const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (!fd.is_open()) return FileError(errno, "open", path);
    posix_fadvise(fd.get(), static_cast<off_t>(offset), static_cast<off_t>(into.size()),
                  POSIX_FADV_SEQUENTIAL);
    while (!into.empty()) {
      OUTLAST_RETURN_IF_ERROR(watch.Check());
      const size_t wanted = std::min<size_t>(into.size(), kBlockBytes);
      const ssize_t count = pread(fd.get(), into.data(), wanted, static_cast<off_t>(offset));
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return FileError(errno, "read", path);
      if (count == 0)
        return Error(absl::StatusCode::kUnavailable, "{}: cut while it is read", path);
      offset += static_cast<uint64_t>(count);
      into = into.subspan(static_cast<size_t>(count));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<BlobInfo> Stat(const std::string& key, const BlobCall& call) override {
    OUTLAST_RETURN_IF_ERROR(CheckBlobKey(key));
    OUTLAST_RETURN_IF_ERROR(Watch(call, key).Check());
    OUTLAST_ASSIGN_OR_RETURN(const uint64_t bytes, FileBytes(PathOf(key)));
    return BlobInfo{key, bytes};
  }

  absl::StatusOr<BlobPage> List(const std::string& prefix, const std::string& after, int limit,
                                const BlobCall& call) override {
    const Watch watch(call, uri_);
    std::vector<BlobInfo> found;
    OUTLAST_RETURN_IF_ERROR(Walk("", prefix, after, watch, found));
    std::ranges::sort(found, {}, &BlobInfo::key);
    BlobPage page;
    page.has_more = std::ssize(found) > limit;
    if (page.has_more) found.resize(static_cast<size_t>(limit));
    page.objects = std::move(found);
    return page;
  }

  absl::Status Remove(const std::string& key, const BlobCall& call) override {
    OUTLAST_RETURN_IF_ERROR(CheckBlobKey(key));
    OUTLAST_RETURN_IF_ERROR(Watch(call, key).Check());
    std::string path = PathOf(key);
    OUTLAST_RETURN_IF_ERROR(RemoveFile(path));
    SweepLeftovers(ParentOf(path));
    const absl::Status synced = FsyncFolder(ParentOf(path));
    if (!synced.ok() && !absl::IsNotFound(synced)) return synced;
    // Folders are not objects: those that hold nothing go.
    for (path = ParentOf(path); path.size() > path_.size() && rmdir(path.c_str()) == 0;)
      path = ParentOf(path);
    return absl::OkStatus();
  }

  std::string_view uri() const override { return uri_; }

 private:
  static constexpr int kFolderTries = 10;
  static constexpr int64_t kLeftoverSeconds = 24 * 3600;

  std::string PathOf(const std::string& key) const { return path_ + "/" + key; }

  static absl::Status Write(const std::string& path, const BlobSource& source, const Watch& watch) {
    DirectWriteOptions options;
    options.mode = source.bytes <= kSmallBytes ? IoMode::kBuffered : IoMode::kDirect;
    OUTLAST_ASSIGN_OR_RETURN(DirectWriter writer,
                             DirectWriter::Create(path, source.bytes, options));
    OUTLAST_ASSIGN_OR_RETURN(
        Mapping block, Mapping::Anonymous(std::clamp<uint64_t>(source.bytes, 1, kBlockBytes)));
    for (uint64_t at = 0; at < source.bytes; at += kBlockBytes) {
      OUTLAST_RETURN_IF_ERROR(watch.Check());
      const std::span<std::byte> part(block.data(), std::min(kBlockBytes, source.bytes - at));
      OUTLAST_RETURN_IF_ERROR(source.read(at, part));
      OUTLAST_RETURN_IF_ERROR(writer.Append(part));
    }
    return writer.Finish();
  }

  // Removes what puts that were killed have left in `folder`. One that goes on writes all the time,
  // so that a day is far beyond what any two hosts' clocks differ.
  static void SweepLeftovers(const std::string& folder) {
    const auto entries = ListFolder(folder);
    if (!entries.ok()) return;
    const int64_t now = absl::ToUnixSeconds(Clock::Real().WallTime());
    for (const FolderEntry& entry : *entries) {
      const std::string path = folder + "/" + entry.name;
      struct stat facts;
      if (!entry.name.starts_with(".outlast-put-") || lstat(path.c_str(), &facts) != 0) continue;
      if (now - facts.st_mtime > kLeftoverSeconds) RemoveFile(path).IgnoreError();
    }
  }

  // Objects below `folder` ("" or "a/b/"), of the whole prefix and after `after`.
  absl::Status Walk(const std::string& folder, const std::string& prefix, const std::string& after,
                    const Watch& watch, std::vector<BlobInfo>& found) const {
    OUTLAST_RETURN_IF_ERROR(watch.Check());
    const auto entries = ListFolder(path_ + "/" + folder);
    // Gone since its parent was listed; the root itself must be there.
    if (!folder.empty() && absl::IsNotFound(entries.status())) return absl::OkStatus();
    if (!entries.ok()) return entries.status();
    for (const FolderEntry& entry : *entries) {
      const std::string key = folder + entry.name;
      if (entry.kind == EntryKind::kFolder) {
        const std::string below = key + "/";
        if (below.starts_with(prefix) || prefix.starts_with(below))
          OUTLAST_RETURN_IF_ERROR(Walk(below, prefix, after, watch, found));
      } else if (entry.kind == EntryKind::kFile && key.starts_with(prefix) && key > after &&
                 !entry.name.starts_with(".outlast-put-")) {
        const auto bytes = FileBytes(path_ + "/" + key);
        if (absl::IsNotFound(bytes.status())) continue;
        if (!bytes.ok()) return bytes.status();
        found.push_back({key, *bytes});
      }
    }
    return absl::OkStatus();
  }

  const std::string path_;
  const std::string uri_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Blob>> MakeFolderBlob(const std::string& path_or_file_uri) {
  constexpr std::string_view kFile = "file://";
  std::string path = path_or_file_uri;
  const bool is_uri = path.starts_with(kFile);
  if (is_uri) path.erase(0, kFile.size());
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  if (path.empty() || (is_uri && path[0] != '/')) {
    return Error(absl::StatusCode::kInvalidArgument, "'{}': a path or file:///path wanted",
                 path_or_file_uri);
  }
  OUTLAST_RETURN_IF_ERROR(MakeFolders(path));
  return std::unique_ptr<Blob>(std::make_unique<FolderBlob>(std::move(path)));
}

}  // namespace outlast
