// Root: who may write there.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "base/error.h"
#include "checkpoint/root.h"
#include "outlast/base/fd.h"
#include "store/folder.h"

namespace outlast {
namespace {

constexpr std::string_view kBeatSuffix = ".beat";
constexpr std::string_view kReleasedSuffix = ".released";

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

}  // namespace

std::string Root::ClaimPath(uint64_t number, std::string_view suffix) const {
  return fmt::format("{}/{}/{}{}", path_, kClaimsFolder, number, suffix);
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
    const absl::Status made = CreateWholeBesideSweepers(folder, std::to_string(largest + 1), text);
    if (absl::IsAlreadyExists(made))
      continue;  // another newcomer was first: it is judged in its turn
    OUTLAST_RETURN_IF_ERROR(made);
    OUTLAST_RETURN_IF_ERROR(FsyncFolder(path_));
    {
      MutexLock lock(mutex_);
      claim_ = largest + 1;
      beat_ = 0;
    }
    OUTLAST_RETURN_IF_ERROR(SweepTempNames(path_));
    OUTLAST_RETURN_IF_ERROR(SweepTempNames(folder));
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

// Not made anew: a folder that is empty all at once may be the mount point of a disk that is gone.
absl::Status Root::CheckPresence() const {
  const uint64_t mine = claim();
  if (mine == 0) return absl::OkStatus();
  OUTLAST_ASSIGN_OR_RETURN(const bool is_there, Exists(ClaimPath(mine)));
  if (is_there) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition,
               "root {} is gone: claim {}, by which this run holds it, is not there; somebody "
               "removed or emptied the folder, or its disk is not mounted any more; nothing is "
               "saved there until the job is started again",
               path_, mine);
}

absl::Status Root::CheckClaim() const {
  const uint64_t mine = claim();
  if (mine == 0)
    return Error(absl::StatusCode::kFailedPrecondition, "root {}: no claim is held", path_);
  OUTLAST_RETURN_IF_ERROR(CheckPresence());
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

}  // namespace outlast
