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

constexpr std::string_view kTempSuffix = ".tmp";
constexpr std::string_view kBeatSuffix = ".beat";
constexpr std::string_view kReleasedSuffix = ".released";

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

// A positive decimal number without leading zeros.
std::optional<uint64_t> ParseNumber(std::string_view text) {
  if (text.empty() || text.size() > 19 || text[0] == '0') return std::nullopt;
  uint64_t value = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    value = value * 10 + static_cast<uint64_t>(c - '0');
  }
  return value;
}

// Left by a crash in the middle of CreateWhole or ReplaceWhole: name.<8 hex>.tmp.
bool IsTemp(std::string_view name) {
  if (!name.ends_with(kTempSuffix)) return false;
  name.remove_suffix(kTempSuffix.size());
  return name.size() > 9 && name[name.size() - 9] == '.' &&
         name.substr(name.size() - 8).find_first_not_of("0123456789abcdef") ==
             std::string_view::npos;
}

// The fields of /proc/<pid>/stat after the name; empty when the process is gone.
std::vector<std::string> ProcessFields(int64_t pid) {
  FILE* file = fopen(fmt::format("/proc/{}/stat", pid).c_str(), "re");
  if (file == nullptr) return {};
  char buffer[2048];
  const size_t bytes = fread(buffer, 1, sizeof buffer, file);
  fclose(file);
  const std::string_view text(buffer, bytes);
  const size_t name_end = text.rfind(')');  // the name may hold anything, brackets and spaces too
  std::vector<std::string> fields;
  if (name_end == std::string_view::npos) return fields;
  std::string field;
  for (const char c : text.substr(std::min(name_end + 2, text.size()))) {
    if (c != ' ' && c != '\n') {
      field += c;
    } else if (!field.empty()) {
      fields.push_back(std::exchange(field, {}));
    }
  }
  return fields;
}

constexpr size_t kStateField = 0;       // field 3 of stat
constexpr size_t kStartTimeField = 19;  // field 22

std::optional<uint64_t> StartTimeOf(int64_t pid) {
  const std::vector<std::string> fields = ProcessFields(pid);
  if (fields.size() <= kStartTimeField || fields[kStateField] == "Z" || fields[kStateField] == "X")
    return std::nullopt;
  return ParseNumber(fields[kStartTimeField]);
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

absl::Status TouchDurably(const std::string& folder, std::string_view name) {
  const std::string path = fmt::format("{}/{}", folder, name);
  const UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!fd.is_open()) return FileError(errno, "create", path);
  return FsyncFolder(folder);
}

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

// Removes what a crash of an earlier owner left in the middle of a small write.
absl::Status SweepTemps(const std::string& folder) {
  OUTLAST_ASSIGN_OR_RETURN(const auto entries, ListFolder(folder));
  for (const FolderEntry& entry : entries) {
    if (entry.kind == EntryKind::kFile && IsTemp(entry.name))
      OUTLAST_RETURN_IF_ERROR(RemoveFile(folder + "/" + entry.name));
  }
  return absl::OkStatus();
}

// Another newcomer may sweep our temp away between its creation and its link.
absl::Status CreateBesideSweepers(const std::string& folder, const std::string& name,
                                  std::string_view text) {
  constexpr int kTries = 8;
  absl::Status created = CreateWhole(folder, name, text);
  for (int i = 1; i < kTries && absl::IsNotFound(created); ++i)
    created = CreateWhole(folder, name, text);
  return created;
}

}  // namespace

OwnerIdentity OwnerIdentity::Self() {
  OwnerIdentity self;
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  self.host = host;
  self.boot_id = BootId();
  struct stat facts;
  if (stat("/proc/self/ns/pid", &facts) == 0) self.pid_namespace = facts.st_ino;
  self.pid = getpid();
  self.pid_start = StartTimeOf(self.pid).value_or(0);
  return self;
}

OwnerState StateOfOwner(const Claim& claim, const OwnerIdentity& self) {
  if (claim.boot_id.is_zero() || claim.boot_id != self.boot_id ||
      claim.pid_namespace != self.pid_namespace) {
    return OwnerState::kUnknown;
  }
  const std::optional<uint64_t> start = StartTimeOf(claim.pid);
  return start.has_value() && *start == claim.pid_start ? OwnerState::kAlive : OwnerState::kGone;
}

Root::Root(std::string path, RootOptions options, Clock& clock)
    : path_(std::move(path)), options_(std::move(options)), clock_(clock) {}

std::string Root::PathOf(std::string_view checkpoint) const {
  return fmt::format("{}/{}", path_, checkpoint);
}

std::string Root::ClaimPath(uint64_t number, std::string_view suffix) const {
  return fmt::format("{}/{}/{}{}", path_, kClaimsFolder, number, suffix);
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
    const absl::Status created = CreateBesideSweepers(path_, std::string(kRootFile), *text);
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

absl::StatusOr<std::vector<ClaimFile>> Root::ListClaims() const {
  std::vector<ClaimFile> claims;
  const std::string folder = fmt::format("{}/{}", path_, kClaimsFolder);
  const auto entries = ListFolder(folder);
  if (absl::IsNotFound(entries.status())) return claims;
  if (!entries.ok()) return entries.status();
  std::set<std::string> released;
  for (const FolderEntry& entry : *entries) {
    if (entry.name.ends_with(kReleasedSuffix))
      released.insert(entry.name.substr(0, entry.name.size() - kReleasedSuffix.size()));
    const std::optional<uint64_t> number = ParseNumber(entry.name);
    if (!number.has_value()) continue;
    ClaimFile file{*number, std::nullopt, false};
    const auto text = ReadSmall(ClaimPath(*number), kMaxSmallBytes);
    if (text.ok()) {
      auto claim = ParseClaim(*text);
      if (claim.ok()) file.claim = std::move(*claim);
    }
    claims.push_back(std::move(file));
  }
  for (ClaimFile& file : claims) file.released = released.contains(std::to_string(file.number));
  std::ranges::sort(claims, {}, &ClaimFile::number);
  return claims;
}

absl::StatusOr<std::optional<uint64_t>> Root::ReadBeat(uint64_t number) const {
  const auto text = ReadSmall(ClaimPath(number, kBeatSuffix), 64);
  if (absl::IsNotFound(text.status())) return std::optional<uint64_t>();
  if (!text.ok()) return text.status();
  return ParseNumber(std::string_view(*text).substr(0, text->find('\n')));
}

absl::StatusOr<uint64_t> Root::LargestClaim() const {
  OUTLAST_ASSIGN_OR_RETURN(const auto claims, ListClaims());
  uint64_t largest = claims.empty() ? 0 : claims.back().number;
  OUTLAST_ASSIGN_OR_RETURN(const auto entries, ListFolder(path_));
  for (const FolderEntry& entry : entries) {
    if (entry.kind != EntryKind::kFolder || !ParseCheckpointName(entry.name).has_value()) continue;
    const auto text =
        ReadSmall(fmt::format("{}/{}/{}", path_, entry.name, kManifestFile), kMaxManifestBytes);
    if (!text.ok()) continue;
    const auto manifest = ParseManifest(*text);
    // Its claim cannot be read, and what it continues is unknown: nothing may be built on this.
    if (absl::IsUnimplemented(manifest.status()))
      return Annotate(manifest.status(), fmt::format("{}/{}", path_, entry.name));
    if (manifest.ok()) largest = std::max(largest, manifest->claim);
  }
  return largest;
}

absl::StatusOr<ClaimDecision> Root::JudgeNewestClaim(ClaimWatch& watch) const {
  OUTLAST_ASSIGN_OR_RETURN(const auto claims, ListClaims());
  ClaimView view;
  if (!claims.empty()) {
    view.number = claims.back().number;
    view.released = claims.back().released;
    if (claims.back().claim.has_value()) {
      view.claim = *claims.back().claim;
      view.owner = StateOfOwner(view.claim, options_.owner);
    }
    OUTLAST_ASSIGN_OR_RETURN(view.beat, ReadBeat(view.number));
    if (watch.number != view.number) watch = {view.number, view.beat, clock_.Uptime()};
    view.first_beat = watch.first_beat;
    view.watched = clock_.Uptime() - watch.began;
  }
  return JudgeClaim(view, options_.run, options_.take_over);
}

absl::StatusOr<ClaimDecision> Root::LookAtClaim() const {
  ClaimWatch watch;
  while (true) {
    OUTLAST_ASSIGN_OR_RETURN(ClaimDecision decision, JudgeNewestClaim(watch));
    if (decision.verdict != ClaimVerdict::kWatch) return decision;
    clock_.SleepFor(kBeatInterval / 5);
  }
}

absl::Status Root::TakeClaim(uint64_t above) {
  const std::string folder = fmt::format("{}/{}", path_, kClaimsFolder);
  OUTLAST_RETURN_IF_ERROR(MakeFolders(folder));
  const Claim mine{job_,
                   options_.run,
                   options_.owner.host,
                   options_.owner.boot_id,
                   options_.owner.pid_namespace,
                   options_.owner.pid,
                   options_.owner.pid_start};
  OUTLAST_ASSIGN_OR_RETURN(const std::string text, ToText(mine));
  ClaimWatch watch;
  while (true) {
    OUTLAST_ASSIGN_OR_RETURN(const ClaimDecision decision, JudgeNewestClaim(watch));
    if (decision.verdict == ClaimVerdict::kRefuse) {
      return Error(absl::StatusCode::kFailedPrecondition, "root {}: {}; {}", path_, decision.reason,
                   options_.when_held);
    }
    if (decision.verdict == ClaimVerdict::kWatch) {
      clock_.SleepFor(kBeatInterval / 5);
      continue;
    }
    OUTLAST_ASSIGN_OR_RETURN(uint64_t largest, LargestClaim());
    largest = std::max(largest, above);
    const absl::Status made = CreateBesideSweepers(folder, std::to_string(largest + 1), text);
    if (absl::IsAlreadyExists(made))
      continue;  // another newcomer was first: it is judged in its turn
    OUTLAST_RETURN_IF_ERROR(made);
    OUTLAST_RETURN_IF_ERROR(FsyncFolder(path_));
    {
      MutexLock lock(mutex_);
      claim_ = largest + 1;
      beat_ = 0;
    }
    OUTLAST_RETURN_IF_ERROR(SweepTemps(path_));
    OUTLAST_RETURN_IF_ERROR(SweepTemps(folder));
    return Beat();
  }
}

absl::StatusOr<std::string> Root::ClaimText(uint64_t number) const {
  // Makes an NFS client ask its server anew, also about names that it knows to be missing.
  (void)ListFolder(path_);
  (void)ListFolder(fmt::format("{}/{}", path_, kClaimsFolder));
  return ReadSmall(ClaimPath(number), kMaxSmallBytes);
}

uint64_t Root::claim() const {
  MutexLock lock(mutex_);
  return claim_;
}

absl::Status Root::Beat() {
  uint64_t number = 0;
  std::string text;
  {
    MutexLock lock(mutex_);
    if (claim_ == 0)
      return Error(absl::StatusCode::kFailedPrecondition, "root {}: no claim is held", path_);
    number = claim_;
    text = std::to_string(++beat_) + "\n";
  }
  // Written over in place: the text only grows, and a reader that sees half of it sees a change,
  // which is what a beat says.
  const std::string path = ClaimPath(number, kBeatSuffix);
  const UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!fd.is_open()) return FileError(errno, "create", path);
  if (pwrite(fd.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    return FileError(errno, "write", path, text.size());
  }
  return absl::OkStatus();
}

absl::Status Root::Release() {
  const uint64_t number = claim();
  if (number == 0) return absl::OkStatus();
  return TouchDurably(fmt::format("{}/{}", path_, kClaimsFolder),
                      fmt::format("{}{}", number, kReleasedSuffix));
}

absl::Status Root::CheckClaim() const {
  const uint64_t mine = claim();
  if (mine == 0)
    return Error(absl::StatusCode::kFailedPrecondition, "root {}: no claim is held", path_);
  OUTLAST_ASSIGN_OR_RETURN(const auto claims, ListClaims());
  for (const ClaimFile& file : claims) {
    const bool is_ours = file.claim.has_value() && file.claim->run == options_.run;
    if (file.number <= mine || (is_ours && !options_.fences_own_run)) continue;
    const Claim owner = file.claim.value_or(Claim{});
    return Error(absl::StatusCode::kAborted,
                 "root {}: claim {} of run {} on host '{}' (pid {}) has taken it; ours is {}",
                 path_, file.number, owner.run.hex(), owner.host, owner.pid, mine);
  }
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
                                           entry.name == kQuarantineFile || IsTemp(entry.name));
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
  if (info == nullptr) return ancestors;
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

namespace {

std::vector<QuarantineEntry> ReadQuarantine(const std::string& root) {
  // Only a hint: one that cannot be read is begun anew.
  const auto text = ReadSmall(fmt::format("{}/{}", root, kQuarantineFile), kMaxSmallBytes);
  if (!text.ok()) return {};
  return ParseQuarantine(*text).value_or(std::vector<QuarantineEntry>{});
}

}  // namespace

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
