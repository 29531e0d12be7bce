// Durable file operations on one local file system: what a crash leaves is either the old state or
// the new one. Every call that creates, writes, syncs, allocates, links, renames, truncates or
// removes is a plain libc function (open, mkdir, write, pwrite, fsync, fdatasync, sync_file_range,
// fallocate, ftruncate, link, rename, renameat2, unlink, rmdir), so that a test can count them and
// kill the process after any one.
//
// Errors name the call, the path and errno; ENOSPC and EDQUOT also the bytes wanted and the bytes
// free. First form: local disks. A name that appears late (NFS, Lustre) is not waited for here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "outlast/base/fd.h"

namespace outlast {

// O_DIRECT wants memory, offset and length in multiples of this; also the page size, and where a
// shard's data begins.
inline constexpr size_t kBlockAlignment = 4096;

// The status of a failed system call on `path`: "call path: text (errno n)[, wanted w bytes, f
// free]".
absl::Status FileError(int error_number, std::string_view call, const std::string& path,
                       std::optional<uint64_t> wanted_bytes = std::nullopt);

// Bytes that this process may still allocate on the file system that holds `path`.
absl::StatusOr<uint64_t> FreeBytes(const std::string& path);

enum class EntryKind : uint8_t { kFile, kFolder, kSymlink, kOther };
struct FolderEntry {
  std::string name;
  EntryKind kind;
};

// What lies in `folder`, by name, without "." and "..". An error is never an empty list.
absl::StatusOr<std::vector<FolderEntry>> ListFolder(const std::string& folder);

// True if a name lies there, a dangling symlink too. Errors other than "not there" are errors.
absl::StatusOr<bool> Exists(const std::string& path);

// The whole content of a regular file of at most `cap` bytes. Follows no symlink in the last
// component. kNotFound; kInvalidArgument: not a regular file; kResourceExhausted: larger than
// `cap`, before anything is allocated.
absl::StatusOr<std::string> ReadSmall(const std::string& path, uint64_t cap);

// Bytes of a regular file; symlinks are not followed. kNotFound; kInvalidArgument: not a regular
// file.
absl::StatusOr<uint64_t> FileBytes(const std::string& path);

// mkdir. kAlreadyExists when anything of that name is there.
absl::Status MakeFolder(const std::string& path);
// mkdir -p; each parent of a new folder is fsynced. What is there already must be folders.
absl::Status MakeFolders(const std::string& path);

absl::Status FsyncFolder(const std::string& folder);

// Creates `path` (O_EXCL), writes `bytes`, fsyncs and closes. The folder is not fsynced. On failure
// the file is removed.
absl::Status WriteNew(const std::string& path, std::string_view bytes);

// Gives the finished file `temp` the name `final_path` as well, by link(2); where the file system
// refuses links, by renameat2(RENAME_NOREPLACE), then by rename (only safe with one publisher).
// kAlreadyExists: the name is taken. `temp` may be left behind, under its name; the folder is not
// fsynced.
absl::Status PublishByLink(const std::string& temp, const std::string& final_path);

// Creates folder/name with `bytes`, whole or not at all: temp, fsync, link, fsync(folder), temp
// removed. kAlreadyExists: the name is taken, and stays as it was.
absl::Status CreateWhole(const std::string& folder, const std::string& name,
                         std::string_view bytes);

// The same beside others who may SweepTempNames of the folder meanwhile.
absl::Status CreateWholeBesideSweepers(const std::string& folder, const std::string& name,
                                       std::string_view bytes);

// Creates or replaces folder/name, whole or not at all: temp, fsync, rename, fsync(folder).
absl::Status ReplaceWhole(const std::string& folder, const std::string& name,
                          std::string_view bytes);

// Left by a crash in the middle of CreateWhole or ReplaceWhole: name.<8 hex>.tmp.
bool IsTempName(std::string_view name);
// Removes what crashes left so in `folder`.
absl::Status SweepTempNames(const std::string& folder);

// Creates folder/name, empty, if it is not there; durable when it returns.
absl::Status TouchDurably(const std::string& folder, std::string_view name);

// unlink; a name that is gone already is fine. A symlink is removed, not followed.
absl::Status RemoveFile(const std::string& path);

// Removes `folder` and all in it, symlinks as such; the file `last` (a marker) after all others.
// The folder itself must not be a symlink. The parent is not fsynced.
absl::Status RemoveTree(const std::string& folder, std::string_view last = {});

enum class IoMode : uint8_t { kDirect, kBuffered };

struct DirectWriteOptions {
  IoMode mode = IoMode::kDirect;  // kDirect falls back to kBuffered where O_DIRECT is refused
  size_t block_bytes = size_t{8} << 20;  // bytes a write, a multiple of 4096, at most 1 GiB
  std::function<void(uint64_t)>
      on_progress;                  // called with the bytes written so far, after each block
  std::function<bool()> cancelled;  // asked before each block; true: Append returns kCancelled
};

// Streams one new file of known size to disk, past the page cache. For one thread.
// A writer that is destroyed before Finish succeeded removes its file.
class DirectWriter {
 public:
  // Creates `path` (O_EXCL) and allocates it in full: a full disk is an error now, not at the last
  // block. kAlreadyExists; kResourceExhausted with bytes wanted and free; kInvalidArgument: a bad
  // block size.
  static absl::StatusOr<DirectWriter> Create(std::string path, uint64_t file_bytes,
                                             DirectWriteOptions options = {});

  DirectWriter(DirectWriter&&) noexcept;
  DirectWriter& operator=(DirectWriter&&) noexcept;
  ~DirectWriter();

  // Writes the next bytes; all calls but the last take a multiple of 4096 bytes. Memory that is not
  // page aligned goes through a block of the writer's own. kInvalidArgument: past `file_bytes`.
  // kCancelled.
  absl::Status Append(std::span<const std::byte> bytes);

  // Cuts the file to its exact length and makes the content durable (fdatasync); the folder's entry
  // is the caller's to sync. kInvalidArgument: fewer bytes were appended than announced.
  absl::Status Finish();

  // How it is written in fact.
  IoMode mode() const;

 private:
  struct State;
  explicit DirectWriter(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace outlast
