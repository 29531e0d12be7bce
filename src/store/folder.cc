#include "store/folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "outlast/base/id.h"
#include "outlast/base/memory.h"

namespace outlast {
namespace {

std::string ParentOf(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

constexpr std::string_view kTempSuffix = ".tmp";

std::string TempName(const std::string& name) {
  return fmt::format("{}.{:08x}{}", name, static_cast<uint32_t>(RandomU64()), kTempSuffix);
}

EntryKind KindOf(mode_t mode) {
  if (S_ISREG(mode)) return EntryKind::kFile;
  if (S_ISDIR(mode)) return EntryKind::kFolder;
  return S_ISLNK(mode) ? EntryKind::kSymlink : EntryKind::kOther;
}

absl::Status NotRegular(const std::string& path) {
  return Error(absl::StatusCode::kInvalidArgument, "{}: not a regular file", path);
}

absl::Status CloseChecked(UniqueFd& fd, const std::string& path) {
  // Some file systems report a full disk or a lost write only here. EINTR leaves the descriptor
  // closed on Linux.
  if (close(fd.Release()) != 0 && errno != EINTR) return FileError(errno, "close", path);
  return absl::OkStatus();
}

absl::Status FillAndSync(UniqueFd fd, const std::string& path, std::string_view bytes) {
  std::string_view rest = bytes;
  while (!rest.empty()) {
    const ssize_t count = write(fd.get(), rest.data(), rest.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError(errno, "write", path, bytes.size());
    rest.remove_prefix(static_cast<size_t>(count));
  }
  if (fsync(fd.get()) != 0) return FileError(errno, "fsync", path, bytes.size());
  return CloseChecked(fd, path);
}

// The codes by which file systems say that they have no such operation.
bool IsRefusal(int error_number) {
  return error_number == EPERM || error_number == EOPNOTSUPP || error_number == ENOSYS ||
         error_number == EINVAL;
}

}  // namespace

absl::Status FileError(int error_number, std::string_view call, const std::string& path,
                       std::optional<uint64_t> wanted_bytes) {
  if (error_number == ELOOP) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "{} {}: a symlink, which is not followed (errno {})", call, path, error_number);
  }
  absl::Status status = ErrnoStatus(error_number, fmt::format("{} {}", call, path));
  if (error_number != ENOSPC && error_number != EDQUOT) return status;
  const auto free_bytes = FreeBytes(ParentOf(path));
  return Error(status.code(), "{}, wanted {} bytes, {} free", MessageOf(status),
               wanted_bytes.value_or(0), free_bytes.ok() ? std::to_string(*free_bytes) : "unknown");
}

absl::StatusOr<uint64_t> FreeBytes(const std::string& path) {
  struct statvfs facts;
  if (statvfs(path.c_str(), &facts) != 0) return FileError(errno, "statvfs", path);
  return uint64_t{facts.f_bavail} * facts.f_frsize;
}

absl::StatusOr<std::vector<FolderEntry>> ListFolder(const std::string& folder) {
  DIR* stream = opendir(folder.c_str());
  if (stream == nullptr) return FileError(errno, "list", folder);
  std::vector<FolderEntry> entries;
  int error_number = 0;
  while (true) {
    errno = 0;
    const dirent* entry = readdir(stream);
    if (entry == nullptr) {
      error_number = errno;
      break;
    }
    const std::string name = entry->d_name;
    if (name == "." || name == "..") continue;
    struct stat facts;
    if (fstatat(dirfd(stream), entry->d_name, &facts, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) continue;  // removed since it was read
      error_number = errno;
      break;
    }
    entries.push_back({name, KindOf(facts.st_mode)});
  }
  closedir(stream);
  if (error_number != 0) return FileError(error_number, "list", folder);
  std::sort(entries.begin(), entries.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  return entries;
}

absl::StatusOr<bool> Exists(const std::string& path) {
  struct stat facts;
  if (lstat(path.c_str(), &facts) == 0) return true;
  if (errno == ENOENT) return false;
  return FileError(errno, "stat", path);
}

absl::StatusOr<std::string> ReadSmall(const std::string& path, uint64_t cap) {
  // O_NONBLOCK: a FIFO of that name must not hold us.
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd.is_open()) return FileError(errno, "open", path);
  struct stat facts;
  if (fstat(fd.get(), &facts) != 0) return FileError(errno, "stat", path);
  if (!S_ISREG(facts.st_mode)) return NotRegular(path);
  const auto size = static_cast<uint64_t>(facts.st_size);
  if (size > cap) {
    return Error(absl::StatusCode::kResourceExhausted, "{}: {} bytes, at most {} wanted", path,
                 size, cap);
  }
  std::string content(size, '\0');
  size_t filled = 0;
  while (filled < size) {
    const ssize_t count = read(fd.get(), content.data() + filled, size - filled);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return FileError(errno, "read", path);
    if (count == 0) break;
    filled += static_cast<size_t>(count);
  }
  content.resize(filled);
  return content;
}

absl::StatusOr<uint64_t> FileBytes(const std::string& path) {
  struct stat facts;
  if (lstat(path.c_str(), &facts) != 0) return FileError(errno, "stat", path);
  if (!S_ISREG(facts.st_mode)) return NotRegular(path);
  return static_cast<uint64_t>(facts.st_size);
}

absl::Status MakeFolder(const std::string& path) {
  if (mkdir(path.c_str(), 0777) != 0) return FileError(errno, "mkdir", path);
  return absl::OkStatus();
}

absl::Status MakeFolders(const std::string& path) {
  struct stat facts;
  if (stat(path.c_str(), &facts) == 0) {
    if (S_ISDIR(facts.st_mode)) return absl::OkStatus();
    return Error(absl::StatusCode::kInvalidArgument, "{}: not a folder", path);
  }
  if (errno != ENOENT) return FileError(errno, "stat", path);
  const std::string parent = ParentOf(path);
  OUTLAST_RETURN_IF_ERROR(MakeFolders(parent));
  absl::Status made = MakeFolder(path);
  if (!made.ok() && !absl::IsAlreadyExists(made)) return made;
  return FsyncFolder(parent);
}

absl::Status FsyncFolder(const std::string& folder) {
  const UniqueFd fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.is_open()) return FileError(errno, "open", folder);
  if (fsync(fd.get()) != 0) return FileError(errno, "fsync", folder);
  return absl::OkStatus();
}

absl::Status WriteNew(const std::string& path, std::string_view bytes) {
  UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!fd.is_open()) return FileError(errno, "create", path, bytes.size());
  absl::Status status = FillAndSync(std::move(fd), path, bytes);
  if (!status.ok()) unlink(path.c_str());
  return status;
}

absl::Status PublishByLink(const std::string& temp, const std::string& final_path) {
  if (link(temp.c_str(), final_path.c_str()) == 0) return absl::OkStatus();
  if (!IsRefusal(errno)) return FileError(errno, "link", final_path);
  if (renameat2(AT_FDCWD, temp.c_str(), AT_FDCWD, final_path.c_str(), RENAME_NOREPLACE) == 0) {
    return absl::OkStatus();
  }
  if (!IsRefusal(errno)) return FileError(errno, "rename", final_path);
  OUTLAST_ASSIGN_OR_RETURN(const bool taken, Exists(final_path));
  if (taken) return FileError(EEXIST, "rename", final_path);
  if (rename(temp.c_str(), final_path.c_str()) != 0) return FileError(errno, "rename", final_path);
  return absl::OkStatus();
}

absl::Status CreateWhole(const std::string& folder, const std::string& name,
                         std::string_view bytes) {
  const std::string temp = folder + "/" + TempName(name);
  OUTLAST_RETURN_IF_ERROR(WriteNew(temp, bytes));
  absl::Status status = PublishByLink(temp, folder + "/" + name);
  if (status.ok()) status = FsyncFolder(folder);
  RemoveFile(temp).IgnoreError();  // all that matters is durable; whoever owns the folder sweeps it
  return status;
}

absl::Status ReplaceWhole(const std::string& folder, const std::string& name,
                          std::string_view bytes) {
  const std::string temp = folder + "/" + TempName(name);
  const std::string final_path = folder + "/" + name;
  OUTLAST_RETURN_IF_ERROR(WriteNew(temp, bytes));
  if (rename(temp.c_str(), final_path.c_str()) != 0) {
    absl::Status status = FileError(errno, "rename", final_path);
    unlink(temp.c_str());
    return status;
  }
  return FsyncFolder(folder);
}

absl::Status CreateWholeBesideSweepers(const std::string& folder, const std::string& name,
                                       std::string_view text) {
  constexpr int kTries = 8;  // the temp was swept away between its creation and its link
  absl::Status created = CreateWhole(folder, name, text);
  for (int i = 1; i < kTries && absl::IsNotFound(created); ++i)
    created = CreateWhole(folder, name, text);
  return created;
}

bool IsTempName(std::string_view name) {
  if (!name.ends_with(kTempSuffix)) return false;
  name.remove_suffix(kTempSuffix.size());
  return name.size() > 9 && name[name.size() - 9] == '.' &&
         name.substr(name.size() - 8).find_first_not_of("0123456789abcdef") ==
             std::string_view::npos;
}

absl::Status SweepTempNames(const std::string& folder) {
  OUTLAST_ASSIGN_OR_RETURN(const auto entries, ListFolder(folder));
  for (const FolderEntry& entry : entries) {
    if (entry.kind == EntryKind::kFile && IsTempName(entry.name))
      OUTLAST_RETURN_IF_ERROR(RemoveFile(folder + "/" + entry.name));
  }
  return absl::OkStatus();
}

absl::Status TouchDurably(const std::string& folder, std::string_view name) {
  const std::string path = fmt::format("{}/{}", folder, name);
  const UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!fd.is_open()) return FileError(errno, "create", path);
  return FsyncFolder(folder);
}

absl::Status RemoveFile(const std::string& path) {
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return FileError(errno, "unlink", path);
  return absl::OkStatus();
}

absl::Status RemoveTree(const std::string& folder, std::string_view last) {
  struct stat facts;
  if (lstat(folder.c_str(), &facts) != 0) return FileError(errno, "stat", folder);
  if (!S_ISDIR(facts.st_mode)) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "{}: not a folder, so it is not removed as one", folder);
  }
  OUTLAST_ASSIGN_OR_RETURN(const std::vector<FolderEntry> entries, ListFolder(folder));
  for (const FolderEntry& entry : entries) {
    const std::string path = folder + "/" + entry.name;
    if (!last.empty() && entry.name == last) continue;
    OUTLAST_RETURN_IF_ERROR(entry.kind == EntryKind::kFolder ? RemoveTree(path) : RemoveFile(path));
  }
  if (!last.empty()) {
    // The marker must not be the first to vanish in a power cut.
    OUTLAST_RETURN_IF_ERROR(FsyncFolder(folder));
    OUTLAST_RETURN_IF_ERROR(RemoveFile(folder + "/" + std::string(last)));
  }
  if (rmdir(folder.c_str()) != 0) return FileError(errno, "rmdir", folder);
  return absl::OkStatus();
}

struct DirectWriter::State {
  std::string path;
  UniqueFd fd;
  uint64_t file_bytes = 0;
  uint64_t written = 0;  // logical bytes
  IoMode mode = IoMode::kDirect;
  DirectWriteOptions options;
  std::optional<Mapping> block;  // for memory that O_DIRECT would refuse
  bool finished = false;

  ~State();

  absl::Status Allocate();
  void StartDirect();
  void StopDirect();
  // Writes at the end of what is written; `padded` bytes may follow `logical` ones up to a multiple
  // of 4096.
  absl::Status Write(const std::byte* data, uint64_t logical);
  absl::Status WriteBlock(const std::byte* data, uint64_t logical);
  absl::Status WriteThroughBlock(std::span<const std::byte> bytes);
  absl::Status StartWriteback(uint64_t offset, uint64_t bytes);
};

namespace {

uint64_t RoundUp(uint64_t bytes) {
  return (bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
}
uint64_t RoundDown(uint64_t bytes) { return bytes / kBlockAlignment * kBlockAlignment; }

bool IsAligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kBlockAlignment == 0;
}

}  // namespace

DirectWriter::State::~State() {
  if (!finished && fd.is_open()) unlink(path.c_str());
}

void DirectWriter::State::StartDirect() {
  // Set after the creation: an open with O_DIRECT that is refused has created the file already.
  const int flags = fcntl(fd.get(), F_GETFL);
  if (flags < 0 || fcntl(fd.get(), F_SETFL, flags | O_DIRECT) != 0) mode = IoMode::kBuffered;
}

void DirectWriter::State::StopDirect() {
  fcntl(fd.get(), F_SETFL, fcntl(fd.get(), F_GETFL) & ~O_DIRECT);
  mode = IoMode::kBuffered;
}

absl::Status DirectWriter::State::Allocate() {
  const uint64_t padded = RoundUp(file_bytes);
  if (padded == 0) return absl::OkStatus();
  int result = 0;
  do {
    result = fallocate(fd.get(), 0, 0, static_cast<off_t>(padded));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return absl::OkStatus();
  if (errno != EOPNOTSUPP && errno != ENOSYS) return FileError(errno, "allocate", path, padded);
  OUTLAST_ASSIGN_OR_RETURN(const uint64_t free_bytes, FreeBytes(path));
  if (free_bytes < padded) return FileError(ENOSPC, "allocate", path, padded);
  return absl::OkStatus();
}

absl::Status DirectWriter::State::StartWriteback(uint64_t offset, uint64_t bytes) {
  const auto sync = [&](uint64_t at, uint64_t length, unsigned flags) {
    if (sync_file_range(fd.get(), static_cast<off_t>(at), static_cast<off_t>(length), flags) == 0)
      return 0;
    return errno == ENOSYS || errno == EOPNOTSUPP || errno == ESPIPE ? 0 : errno;
  };
  int error_number = sync(offset, bytes, SYNC_FILE_RANGE_WRITE);
  const uint64_t before = std::min<uint64_t>(offset, options.block_bytes);
  if (error_number == 0 && before > 0) {
    // Waits for the block before this one, so that at most two are dirty, and gives its pages back.
    error_number =
        sync(offset - before, before,
             SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    posix_fadvise(fd.get(), static_cast<off_t>(offset - before), static_cast<off_t>(before),
                  POSIX_FADV_DONTNEED);
  }
  if (error_number != 0) return FileError(error_number, "sync", path, file_bytes);
  return absl::OkStatus();
}

absl::Status DirectWriter::State::Write(const std::byte* data, uint64_t logical) {
  uint64_t done = 0;
  while (done < logical) {
    const uint64_t wanted = (mode == IoMode::kDirect ? RoundUp(logical) : logical) - done;
    const ssize_t count = pwrite(fd.get(), data + done, wanted, static_cast<off_t>(written + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EINVAL && mode == IoMode::kDirect) {
      StopDirect();  // refused at the first write rather than when it was asked for
      continue;
    }
    if (count <= 0) return FileError(count < 0 ? errno : EIO, "write", path, file_bytes);
    uint64_t moved = static_cast<uint64_t>(count);
    if (mode == IoMode::kDirect && moved < wanted) {
      moved = RoundDown(moved);
      if (moved == 0) StopDirect();
    }
    done += moved;
  }
  return absl::OkStatus();
}

absl::Status DirectWriter::State::WriteBlock(const std::byte* data, uint64_t logical) {
  if (options.cancelled && options.cancelled()) {
    return Error(absl::StatusCode::kCancelled, "write {}: cancelled after {} of {} bytes", path,
                 written, file_bytes);
  }
  OUTLAST_RETURN_IF_ERROR(Write(data, logical));
  if (mode == IoMode::kBuffered) OUTLAST_RETURN_IF_ERROR(StartWriteback(written, logical));
  written += logical;
  if (options.on_progress) options.on_progress(written);
  return absl::OkStatus();
}

absl::Status DirectWriter::State::WriteThroughBlock(std::span<const std::byte> bytes) {
  const uint64_t padded = RoundUp(bytes.size());
  if (!block.has_value() || block->size() < padded) {
    OUTLAST_ASSIGN_OR_RETURN(block, Mapping::Anonymous(padded));
  }
  std::memcpy(block->data(), bytes.data(), bytes.size());
  std::memset(block->data() + bytes.size(), 0, padded - bytes.size());
  return WriteBlock(block->data(), bytes.size());
}

DirectWriter::DirectWriter(std::unique_ptr<State> state) : state_(std::move(state)) {}
DirectWriter::DirectWriter(DirectWriter&&) noexcept = default;
DirectWriter& DirectWriter::operator=(DirectWriter&&) noexcept = default;
DirectWriter::~DirectWriter() = default;

IoMode DirectWriter::mode() const { return state_->mode; }

absl::StatusOr<DirectWriter> DirectWriter::Create(std::string path, uint64_t file_bytes,
                                                  DirectWriteOptions options) {
  constexpr size_t kLargestBlock = size_t{1} << 30;
  if (options.block_bytes == 0 || options.block_bytes % kBlockAlignment != 0 ||
      options.block_bytes > kLargestBlock) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "write {}: blocks of {} bytes, a multiple of 4096 up to 1 GiB wanted", path,
                 options.block_bytes);
  }
  auto state = std::make_unique<State>();
  state->path = std::move(path);
  state->file_bytes = file_bytes;
  state->mode = options.mode;
  state->options = std::move(options);
  state->fd.Reset(
      open(state->path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!state->fd.is_open()) return FileError(errno, "create", state->path, file_bytes);
  OUTLAST_RETURN_IF_ERROR(state->Allocate());
  if (state->mode == IoMode::kDirect) state->StartDirect();
  return DirectWriter(std::move(state));
}

absl::Status DirectWriter::Append(std::span<const std::byte> bytes) {
  State& state = *state_;
  if (bytes.size() > state.file_bytes - state.written || state.written % kBlockAlignment != 0) {
    return Error(absl::StatusCode::kInvalidArgument, "write {}: {} more bytes after {} of {}",
                 state.path, bytes.size(), state.written, state.file_bytes);
  }
  while (!bytes.empty()) {
    uint64_t count = std::min<uint64_t>(bytes.size(), state.options.block_bytes);
    if (state.mode == IoMode::kDirect && IsAligned(bytes.data()) && count >= kBlockAlignment) {
      count = RoundDown(count);  // the last part of a block goes by itself
    }
    const auto part = bytes.first(count);
    const bool as_it_is =
        state.mode == IoMode::kBuffered || (IsAligned(part.data()) && count % kBlockAlignment == 0);
    OUTLAST_RETURN_IF_ERROR(as_it_is ? state.WriteBlock(part.data(), count)
                                     : state.WriteThroughBlock(part));
    bytes = bytes.subspan(count);
  }
  return absl::OkStatus();
}

absl::Status DirectWriter::Finish() {
  State& state = *state_;
  if (state.written != state.file_bytes) {
    return Error(absl::StatusCode::kInvalidArgument, "write {}: {} bytes came, {} were announced",
                 state.path, state.written, state.file_bytes);
  }
  const int fd = state.fd.get();
  if (ftruncate(fd, static_cast<off_t>(state.file_bytes)) != 0)
    return FileError(errno, "truncate", state.path);
  if (fdatasync(fd) != 0) return FileError(errno, "fdatasync", state.path, state.file_bytes);
  absl::Status closed = CloseChecked(state.fd, state.path);
  if (!closed.ok()) {
    unlink(state.path.c_str());
    return closed;
  }
  state.finished = true;
  return absl::OkStatus();
}

}  // namespace outlast
