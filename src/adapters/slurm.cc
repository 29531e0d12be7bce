#include "adapters/slurm.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "base/child_program.h"
#include "base/error.h"
#include "launch/options.h"
#include "outlast/base/fd.h"
#include "outlast/base/status.h"

namespace outlast {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr size_t kMostOutput = 4 << 20;

uint64_t NumberOf(std::string_view id) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(id.data(), id.data() + id.size(), number);
  return error == std::errc() && end == id.data() + id.size() ? number : 0;
}

// All that it said, on one line.
std::string Words(const std::string& output) {
  std::istringstream lines(output);
  std::string words;
  for (std::string line; std::getline(lines, line);)
    words += fmt::format("{}{}", words.empty() || line.empty() ? "" : "; ", line);
  std::replace_if(
      words.begin(), words.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; }, ' ');
  return words.empty() ? "no word of why" : words;
}

// Its output, if it ended with 0.
absl::StatusOr<std::string> Call(std::vector<std::string> command, const std::string& folder = "") {
  const std::string name = command[0];
  const char* path = std::getenv("PATH");
  const auto found = ResolveCommand({name}, path != nullptr ? path : "/usr/local/bin:/usr/bin:/bin",
                                    Interpreter::kNone);
  if (!found.ok()) {
    return Error(absl::StatusCode::kNotFound,
                 "{}: not found in PATH: a machine with Slurm's commands wanted", name);
  }
  command[0] = found->program;
  OUTLAST_ASSIGN_OR_RETURN(ProgramEnd end, RunProgram({.command = std::move(command),
                                                       .folder = folder,
                                                       .deadline = kPatience,
                                                       .keep_output = kMostOutput}));
  if (end.timed_out) {
    return Error(absl::StatusCode::kUnavailable, "{}: no answer within {}", name,
                 absl::FormatDuration(kPatience));
  }
  if (end.signal == 0 && end.code == 0) return std::move(end.output);
  // A refusal is sbatch's alone: what a controller that is down says of a job is nothing.
  const bool is_refusal = name == "sbatch" &&
                          end.output.find("Unable to contact") == std::string::npos &&
                          end.output.find("imed out") == std::string::npos;
  return Error(is_refusal ? absl::StatusCode::kInvalidArgument : absl::StatusCode::kUnavailable,
               "{}: {}", name, Words(end.output));
}

// The script in a file, for sbatch reads it before it answers.
class ScriptFile {
 public:
  static absl::StatusOr<ScriptFile> Make(const std::string& text) {
    const char* folder = std::getenv("TMPDIR");
    ScriptFile file;
    file.path_ = fmt::format("{}/outlast-submit-XXXXXX", folder != nullptr ? folder : "/tmp");
    const UniqueFd fd(mkostemp(file.path_.data(), O_CLOEXEC));
    if (!fd.is_open()) return ErrnoStatus(errno, fmt::format("make '{}'", file.path_));
    file.is_there_ = true;
    OUTLAST_RETURN_IF_ERROR(WriteAll(fd.get(), text));
    return file;
  }
  ScriptFile(ScriptFile&& other) noexcept
      : path_(std::move(other.path_)), is_there_(std::exchange(other.is_there_, false)) {}
  ~ScriptFile() {
    if (is_there_) unlink(path_.c_str());
  }
  const std::string& path() const { return path_; }

 private:
  ScriptFile() = default;
  static absl::Status WriteAll(int fd, std::string_view text) {
    while (!text.empty()) {
      const ssize_t count = write(fd, text.data(), text.size());
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return ErrnoStatus(errno, "write the batch script");
      text.remove_prefix(static_cast<size_t>(count));
    }
    return absl::OkStatus();
  }

  std::string path_;
  bool is_there_ = false;
};

// "4711", or "4711;cluster"; warnings may stand before it.
std::string ParseSubmitted(const std::string& output) {
  std::istringstream lines(output);
  std::string id;
  for (std::string line; std::getline(lines, line);) {
    const std::string first = line.substr(0, line.find(';'));
    if (NumberOf(first) > 0) id = first;
  }
  return id;
}

}  // namespace

std::vector<SlurmEntry> EntriesWithKey(std::string_view text, std::string_view key) {
  std::istringstream lines{std::string(text)};
  std::vector<SlurmEntry> entries;
  const std::string wanted = fmt::format("outlast-key={}", key);
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find('|'), second = line.find('|', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    if (line.substr(second + 1) != wanted) continue;
    SlurmEntry entry{line.substr(0, first), line.substr(first + 1, second - first - 1)};
    if (NumberOf(entry.id) > 0) entries.push_back(std::move(entry));
  }
  std::sort(entries.begin(), entries.end(), [](const SlurmEntry& a, const SlurmEntry& b) {
    return NumberOf(a.id) < NumberOf(b.id);
  });
  return entries;
}

absl::StatusOr<std::optional<SlurmEntry>> FindInSlurm(const std::string& job,
                                                      const std::string& key) {
  OUTLAST_ASSIGN_OR_RETURN(const std::string lines, Call({"squeue", "--me", "--noheader",
                                                          "--name=" + job, "--format=%i|%T|%k"}));
  const std::vector<SlurmEntry> entries = EntriesWithKey(lines, key);
  if (entries.empty()) return std::nullopt;
  return entries[0];
}

absl::Status CancelInSlurm(const std::string& id) { return Call({"scancel", id}).status(); }

absl::StatusOr<SlurmSubmission> SubmitToSlurm(const SlurmRequest& request) {
  OUTLAST_ASSIGN_OR_RETURN(const auto earlier, FindInSlurm(request.job, request.key));
  if (earlier && earlier->state == "COMPLETING") {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "job {} with the same key is just ending: try again when squeue shows it no more",
                 earlier->id);
  }
  if (earlier) return SlurmSubmission{*earlier, true};

  OUTLAST_ASSIGN_OR_RETURN(const ScriptFile script, ScriptFile::Make(request.script));
  // The options once more as arguments: variables such as SBATCH_PARTITION outrank the script's.
  std::vector<std::string> command = {"sbatch", "--parsable"};
  command.insert(command.end(), request.options.begin(), request.options.end());
  command.push_back(script.path());
  OUTLAST_ASSIGN_OR_RETURN(const std::string output, Call(command, request.folder));
  SlurmEntry mine{ParseSubmitted(output), "PENDING"};
  if (mine.id.empty()) {
    return Error(absl::StatusCode::kUnavailable, "sbatch: no job's number in its answer: {}",
                 Words(output));
  }
  // Looking and submitting are two calls, so that somebody may have done the same between them.
  const auto lowest = FindInSlurm(request.job, request.key);
  if (!lowest.ok() || !*lowest) return SlurmSubmission{mine, false};
  if (NumberOf((*lowest)->id) >= NumberOf(mine.id)) return SlurmSubmission{**lowest, false};
  OUTLAST_RETURN_IF_ERROR(CancelInSlurm(mine.id));
  return SlurmSubmission{**lowest, true};
}

}  // namespace outlast
