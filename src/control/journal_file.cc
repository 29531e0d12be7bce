#include "control/journal_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <span>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/flag_values.h"

namespace outlast {
namespace {

absl::StatusOr<std::string> ReadAll(int fd, const std::string& path) {
  std::string bytes;
  std::string block(1 << 16, '\0');
  while (true) {
    const ssize_t got = pread(fd, block.data(), block.size(), static_cast<off_t>(bytes.size()));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, path);
    if (got == 0) return bytes;
    bytes.append(block, 0, static_cast<size_t>(got));
  }
}

absl::Status SyncFolder(const std::string& folder) {
  const UniqueFd fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.is_open() || fsync(fd.get()) != 0) return ErrnoStatus(errno, folder);
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> OpenFile(const std::string& path, int flags) {
  UniqueFd fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | flags, 0600));
  if (!fd.is_open()) return ErrnoStatus(errno, path);
  return fd;
}

// What is cut from the journal is added to a file beside it. kDataLoss: nothing of it is whole, and
// it is more than one broken first record: no journal at all.
absl::Status KeepTail(const std::string& journal, const std::string& bytes, size_t valid_bytes) {
  constexpr size_t kLargestFirstRecord = 512;  // a run's id and its job's
  if (valid_bytes == bytes.size()) return absl::OkStatus();
  if (valid_bytes == 0 && bytes.size() > kLargestFirstRecord) {
    return Error(absl::StatusCode::kDataLoss, "{}: {} bytes without a whole record: no journal",
                 journal, bytes.size());
  }
  const std::string path = journal + ".cut";
  const UniqueFd file(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  if (!file.is_open()) return ErrnoStatus(errno, path);
  const auto tail = std::as_bytes(std::span(bytes)).subspan(valid_bytes);
  if (absl::Status kept = WriteAll(file.get(), tail); !kept.ok()) return Annotate(kept, path);
  return fsync(file.get()) == 0 ? absl::OkStatus() : ErrnoStatus(errno, path);
}

}  // namespace

absl::StatusOr<JournalFile> JournalFile::Open(const std::string& folder, const std::string& job) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return ErrnoStatus(error.value(), folder);
  JournalFile journal;
  OUTLAST_RETURN_IF_ERROR(journal.Lock(folder, job));
  journal.folder_ = folder;
  journal.path_ = folder + "/coordinator.journal";
  OUTLAST_ASSIGN_OR_RETURN(journal.file_, OpenFile(journal.path_, O_APPEND));
  OUTLAST_ASSIGN_OR_RETURN(const std::string bytes, ReadAll(journal.file_.get(), journal.path_));
  auto content = ReadJournal(bytes);
  if (!content.ok()) return Annotate(content.status(), journal.path_);
  journal.content_ = *std::move(content);
  OUTLAST_RETURN_IF_ERROR(KeepTail(journal.path_, bytes, journal.content_.valid_bytes));
  journal.size_ = journal.content_.valid_bytes;
  if (ftruncate(journal.file_.get(), static_cast<off_t>(journal.size_)) != 0 ||
      fsync(journal.file_.get()) != 0) {
    return ErrnoStatus(errno, journal.path_);
  }
  OUTLAST_RETURN_IF_ERROR(SyncFolder(folder));
  return journal;
}

absl::Status JournalFile::Lock(const std::string& folder, const std::string& job) {
  const std::string path = folder + "/coordinator.lock";
  OUTLAST_ASSIGN_OR_RETURN(lock_, OpenFile(path, 0));
  OUTLAST_ASSIGN_OR_RETURN(const std::string holder, ReadAll(lock_.get(), path));
  if (flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return ErrnoStatus(errno, path);
    std::string who = holder.substr(0, holder.find('\n', holder.find('\n') + 1));
    std::replace(who.begin(), who.end(), '\n', ' ');
    return Error(absl::StatusCode::kAlreadyExists, "{}: another coordinator has this journal ({})",
                 path, who);
  }
  const std::string_view first = std::string_view(holder).substr(0, holder.find('\n'));
  const std::string name = fmt::format("job {}", job);
  if (!first.empty() && first != name) {
    const bool names_a_job =
        first.starts_with("job ") && CheckJobId(std::string(first.substr(4))).ok();
    return Error(absl::StatusCode::kFailedPrecondition, "{}: of {}, this is job {}", path,
                 names_a_job ? first : "something else", job);
  }
  const std::string text = fmt::format("{}\nprocess {}\n", name, getpid());
  if (ftruncate(lock_.get(), 0) != 0 ||
      pwrite(lock_.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    return ErrnoStatus(errno, path);
  }
  return absl::OkStatus();
}

// A lock does not reach across every file system: what others did is seen in the file.
absl::Status JournalFile::CheckIsOurs() const {
  struct stat ours {
  }, named{};
  if (fstat(file_.get(), &ours) != 0 || stat(path_.c_str(), &named) != 0)
    return ErrnoStatus(errno, path_);
  if (ours.st_ino != named.st_ino || ours.st_dev != named.st_dev)
    return Error(absl::StatusCode::kAborted, "{}: it was replaced by another file", path_);
  return CheckSize(static_cast<uint64_t>(ours.st_size));
}

absl::Status JournalFile::Append(std::string_view bytes) {
  OUTLAST_RETURN_IF_ERROR(CheckIsOurs());
  if (absl::Status written = WriteAll(file_.get(), std::as_bytes(std::span(bytes))); !written.ok())
    return Annotate(written, path_);
  size_ += bytes.size();
  struct stat ours {};
  if (fdatasync(file_.get()) != 0 || fstat(file_.get(), &ours) != 0)
    return ErrnoStatus(errno, path_);
  // Whoever wrote since the look above stands before what was appended.
  return CheckSize(static_cast<uint64_t>(ours.st_size));
}

// Whichever of the two files has the name after a crash, it is whole.
absl::Status JournalFile::Compact(std::string_view base) {
  OUTLAST_RETURN_IF_ERROR(CheckIsOurs());
  const std::string fresh = path_ + ".new";
  OUTLAST_ASSIGN_OR_RETURN(UniqueFd file, OpenFile(fresh, O_APPEND | O_TRUNC));
  const auto undone = [&fresh](absl::Status why) {
    (void)unlink(fresh.c_str());
    return why;
  };
  if (absl::Status written = WriteAll(file.get(), std::as_bytes(std::span(base))); !written.ok())
    return undone(Annotate(written, fresh));
  if (fsync(file.get()) != 0) return undone(ErrnoStatus(errno, fresh));
  if (rename(fresh.c_str(), path_.c_str()) != 0) return undone(ErrnoStatus(errno, fresh));
  file_ = std::move(file);
  size_ = base.size();
  // Where it is not known which file a crash leaves, nothing may be appended to either.
  absl::Status synced = SyncFolder(folder_);
  if (synced.ok()) return synced;
  return MakeStatus(absl::StatusCode::kAborted, MessageOf(synced));
}

absl::Status JournalFile::CheckSize(uint64_t found) const {
  if (found == size_) return absl::OkStatus();
  return Error(absl::StatusCode::kAborted,
               "{}: {} bytes, this coordinator wrote {}: another one writes to it", path_, found,
               size_);
}

}  // namespace outlast
