#include "launch/run_dir.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "base/error.h"

namespace outlast {
namespace {

absl::Status MakeFolder(const std::string& path) {
  if (mkdir(path.c_str(), 0777) == 0) return absl::OkStatus();
  return ErrnoStatus(errno, fmt::format("make the folder {}", path));
}

absl::Status MakeParents(const std::string& path) {
  for (size_t slash = path.find('/', 1); slash != std::string::npos;
       slash = path.find('/', slash + 1)) {
    absl::Status made = MakeFolder(path.substr(0, slash));
    if (!made.ok() && !absl::IsAlreadyExists(made)) return made;
  }
  const absl::Status made = MakeFolder(path);
  return absl::IsAlreadyExists(made) ? absl::OkStatus() : made;
}

// A convenience for people: two invocations may race for it, and it may fail.
void LinkLatest(const std::string& parent, const std::string& name, const std::string& link) {
  const std::string temporary = parent + "/.latest-" + name;
  if (symlink(name.c_str(), temporary.c_str()) != 0) return;
  if (rename(temporary.c_str(), (parent + "/" + link).c_str()) != 0) unlink(temporary.c_str());
}

// A kill may have left half a line.
bool EndsWithALineEnd(const std::string& path) {
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char last = '\n';
  const off_t size = lseek(file.get(), 0, SEEK_END);
  return size <= 0 || (pread(file.get(), &last, 1, size - 1) == 1 && last == '\n');
}

absl::StatusOr<UniqueFd> OpenToAppend(const std::string& path) {
  UniqueFd file(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!file.is_open()) return ErrnoStatus(errno, fmt::format("open {}", path));
  return file;
}

}  // namespace

absl::StatusOr<RunDir> RunDir::Create(const std::string& parent, std::string_view job,
                                      absl::Time start, const Id128& run_id,
                                      std::string_view node) {
  OUTLAST_RETURN_IF_ERROR(MakeParents(parent));
  const std::string utc = absl::FormatTime("%Y%m%dT%H%M%SZ", start, absl::UTCTimeZone());
  std::string name = fmt::format("{}-{}-{}", job, utc, run_id.hex().substr(0, 4));
  if (!node.empty()) name += fmt::format("-{}", node);
  // Absolute: workers may change their working directory.
  std::string path = parent + "/" + name;
  OUTLAST_RETURN_IF_ERROR(MakeFolder(path));
  if (char* absolute = realpath(path.c_str(), nullptr); absolute != nullptr) {
    path = absolute;
    free(absolute);
  }
  for (const char* folder : {"logs", "stacks", "boxes"})
    OUTLAST_RETURN_IF_ERROR(MakeFolder(path + "/" + folder));
  OUTLAST_ASSIGN_OR_RETURN(UniqueFd events, OpenToAppend(path + "/events.jsonl"));
  LinkLatest(parent, name, "latest");
  if (!node.empty()) LinkLatest(parent, name, fmt::format("latest-{}", node));
  return RunDir(std::move(path), std::move(events));
}

absl::StatusOr<RunDir> RunDir::Open(const std::string& path) {
  OUTLAST_ASSIGN_OR_RETURN(UniqueFd events, OpenToAppend(path + "/events.jsonl"));
  RunDir run_dir(path, std::move(events));
  run_dir.is_cut_ = !EndsWithALineEnd(path + "/events.jsonl");
  return run_dir;
}

absl::StatusOr<RunDir::LogFiles> RunDir::OpenLogs(uint64_t generation, int rank) const {
  const std::string folder = fmt::format("{}/logs/g{}", path_, generation);
  const absl::Status made = MakeFolder(folder);
  if (!made.ok() && !absl::IsAlreadyExists(made)) return made;
  return OpenBoth(fmt::format("{}/rank{}", folder, rank));
}

absl::StatusOr<RunDir::LogFiles> RunDir::OpenTemplateLogs() const {
  return OpenBoth(path_ + "/logs/template");
}

absl::StatusOr<RunDir::LogFiles> RunDir::OpenBoth(const std::string& base) {
  LogFiles files;
  files.output_path = base + ".out";
  files.error_path = base + ".err";
  OUTLAST_ASSIGN_OR_RETURN(files.output, OpenToAppend(files.output_path));
  OUTLAST_ASSIGN_OR_RETURN(files.error, OpenToAppend(files.error_path));
  return files;
}

void RunDir::AppendEvent(std::string_view json_line) const {
  // What a full disk left of the last line must not spoil this one as well.
  const std::string line = (is_cut_ ? "\n" : "") + std::string(json_line) + "\n";
  const ssize_t count = write(events_.get(), line.data(), line.size());
  if (count > 0) is_cut_ = count < static_cast<ssize_t>(line.size());
}

absl::Status RunDir::WriteReport(std::string_view json) const {
  const std::string temporary = path_ + "/.report.json";
  {
    const UniqueFd file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (!file.is_open()) return ErrnoStatus(errno, fmt::format("open {}", temporary));
    OUTLAST_RETURN_IF_ERROR(
        Annotate(WriteAll(file.get(), std::as_bytes(std::span(json))), temporary));
  }
  if (rename(temporary.c_str(), (path_ + "/report.json").c_str()) != 0)
    return ErrnoStatus(errno, "rename report.json");
  return absl::OkStatus();
}

std::string LastLines(const std::string& path, int lines, size_t bytes) {
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info {};
  if (!file.is_open() || fstat(file.get(), &info) != 0) return {};
  const size_t wanted = std::min<size_t>(bytes, static_cast<size_t>(info.st_size));
  std::string text(wanted, '\0');
  const ssize_t count =
      pread(file.get(), text.data(), wanted, info.st_size - static_cast<off_t>(wanted));
  text.resize(static_cast<size_t>(std::max<ssize_t>(count, 0)));
  while (!text.empty() && text.back() == '\n') text.pop_back();
  size_t start = text.size();
  for (int left = lines; left > 0 && start != std::string::npos; --left) {
    start = start == 0 ? std::string::npos : text.rfind('\n', start - 1);
  }
  return start == std::string::npos ? text : text.substr(start + 1);
}

}  // namespace outlast
