#include "checkpoint/ckpt_remote.h"

#include <algorithm>
#include <ostream>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "checkpoint/progress_bar.h"
#include "checkpoint/root_hold.h"
#include "outlast/base/plugins.h"

namespace outlast {
namespace {

absl::StatusOr<std::unique_ptr<Blob>> OpenBlob(const CkptCall& call, const std::string& uri) {
  if (call.plugins == nullptr) {
    return Error(absl::StatusCode::kInvalidArgument, "{}: this program knows folders alone", uri);
  }
  return call.plugins->Make<Blob>(uri);
}

// A place's root, and the checkpoint if it names one.
std::pair<std::string, std::string> Split(std::string place) {
  while (place.ends_with('/') && !place.ends_with("://")) place.pop_back();
  const size_t slash = place.find_last_of('/');
  const std::string last = slash == std::string::npos ? "" : place.substr(slash + 1);
  if (!ParseCheckpointName(last).has_value()) return {place, ""};
  return {place.substr(0, slash), last};
}

// A root that the tool may write to, in a store.
struct RemoteHold {
  std::unique_ptr<RemoteRoot> root;
  std::unique_ptr<Beater> beater;
  ~RemoteHold() {
    beater.reset();
    if (root != nullptr) root->Release().IgnoreError();
  }
};

absl::StatusOr<std::unique_ptr<RemoteHold>> HoldRemote(const CkptCall& call, const std::string& uri,
                                                       const Id128& job, const std::string& name) {
  OUTLAST_ASSIGN_OR_RETURN(auto blob, OpenBlob(call, uri));
  auto hold = std::make_unique<RemoteHold>();
  OUTLAST_ASSIGN_OR_RETURN(auto root, RemoteRoot::Open(std::move(blob), {}));
  OUTLAST_RETURN_IF_ERROR(root->Adopt(job, name));
  OUTLAST_ASSIGN_OR_RETURN(const uint64_t largest, root->AwaitTurn());
  OUTLAST_RETURN_IF_ERROR(root->TakeClaim(largest + 1));
  hold->root = std::move(root);
  hold->beater =
      std::make_unique<Beater>([remote = hold->root.get()] { remote->Beat().IgnoreError(); });
  return hold;
}

struct Copied {
  std::string checkpoint;
  bool was_there = false;
  uint64_t bytes = 0;
};

absl::Status FirstOf(const std::string& place, const std::vector<Damage>& damages) {
  return Error(absl::StatusCode::kDataLoss, "{}: the copy does not read back: {}", place,
               damages[0].message);
}

// --- into a store

absl::StatusOr<Copied> CopyUp(const CkptCall& call, const CkptPlace& from,
                              const std::string& target) {
  const std::string folder = from.folder();
  OUTLAST_ASSIGN_OR_RETURN(const auto reader, CheckpointReader::Open(folder));
  if (!Split(target).second.empty())
    return Error(absl::StatusCode::kInvalidArgument, "{}: a checkpoint; a root wanted", target);
  const Manifest& manifest = reader->manifest();
  const std::string& name = from.root->job_name();
  const bool is_named = !name.empty() && Id128::FromName(name) == manifest.job;
  OUTLAST_ASSIGN_OR_RETURN(const auto hold,
                           HoldRemote(call, target, manifest.job, is_named ? name : std::string()));
  OUTLAST_ASSIGN_OR_RETURN(const UploadResult sent, hold->root->Upload(folder, nullptr, {}));
  ProgressBar bar(call.bar, "verify", manifest.bytes);
  OUTLAST_ASSIGN_OR_RETURN(
      const auto damages,
      hold->root->Verify(manifest.checkpoint, [&](uint64_t bytes) { bar.Add(bytes); }));
  if (!damages.empty()) return FirstOf(target, damages);
  return Copied{manifest.checkpoint, sent.bytes + sent.bytes_kept == 0 && manifest.bytes > 0,
                sent.bytes};
}

// --- out of one

// Whether the very checkpoint stands in the folder already.
absl::StatusOr<bool> StandsThere(const std::string& folder, const Manifest& wanted) {
  OUTLAST_ASSIGN_OR_RETURN(const bool deleted, Exists(fmt::format("{}/{}", folder, kDeletedFile)));
  const auto text = ReadSmall(fmt::format("{}/{}", folder, kManifestFile), kMaxManifestBytes);
  if (deleted || absl::IsNotFound(text.status())) return false;
  if (!text.ok()) return text.status();
  const auto found = ParseManifest(*text);
  const auto same = [](const ReceiptEntry& a, const ReceiptEntry& b) {
    return a.name == b.name && a.bytes == b.bytes && a.crc32c == b.crc32c;
  };
  if (found.ok() && found->job == wanted.job &&
      std::ranges::equal(found->receipts, wanted.receipts, same))
    return true;
  return Error(absl::StatusCode::kFailedPrecondition,
               "{}: another checkpoint of that name stands there; it is left alone", folder);
}

absl::StatusOr<Copied> CopyDown(const CkptCall& call, RemotePlace& from, const std::string& path) {
  OUTLAST_ASSIGN_OR_RETURN(const auto source, from.root->Read(from.checkpoint));
  const Manifest& manifest = source->manifest();
  OUTLAST_ASSIGN_OR_RETURN(const auto target, LookAtTarget(path));
  if (target.has_value() && target->root->job() != manifest.job) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "{}: foreign: of job {}, root {} is of job {}", source->folder(),
                 manifest.job.hex(), path, target->root->job().hex());
  }
  RootOptions options;
  options.job = manifest.job;
  OUTLAST_ASSIGN_OR_RETURN(const auto hold, RootHold::Take(path, std::move(options)));
  const std::string folder = hold->root().PathOf(from.checkpoint);
  OUTLAST_ASSIGN_OR_RETURN(const bool stands, StandsThere(folder, manifest));
  ProgressBar bar(call.bar, "copy", stands ? manifest.bytes : 2 * manifest.bytes);
  const OnBytes on_bytes = [&](uint64_t bytes) { bar.Add(bytes); };
  if (!stands)
    OUTLAST_RETURN_IF_ERROR(from.root->Fetch(from.checkpoint, hold->root(), {}, on_bytes));
  const std::vector<Damage> damages = VerifyCheckpoint(folder, IoMode::kDirect, on_bytes);
  if (damages.empty()) return Copied{from.checkpoint, stands, stands ? 0 : manifest.bytes};
  if (!stands) return FirstOf(folder, damages);
  return Error(absl::StatusCode::kDataLoss, "{}: is there already, and damaged: {}", folder,
               damages[0].message);
}

absl::StatusOr<Copied> CopyByKind(const CkptCall& call) {
  const std::string& from = call.command.places[0];
  const std::string& to = call.command.places[1];
  if (!IsInStore(from)) {
    OUTLAST_ASSIGN_OR_RETURN(const CkptPlace place, OpenCheckpointPlace(call, from));
    return CopyUp(call, place, to);
  }
  if (IsInStore(to)) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "{} to {}: from store to store; copy it to a folder first", from, to);
  }
  OUTLAST_ASSIGN_OR_RETURN(RemotePlace place, OpenRemoteCheckpoint(call, from));
  return CopyDown(call, place, to);
}

}  // namespace

bool IsInStore(const std::string& place) {
  return place.find("://") != std::string::npos && !place.starts_with("file://");
}

absl::StatusOr<RemotePlace> OpenRemotePlace(const CkptCall& call, const std::string& path) {
  RemotePlace place;
  std::tie(place.uri, place.checkpoint) = Split(path);
  OUTLAST_ASSIGN_OR_RETURN(auto blob, OpenBlob(call, place.uri));
  OUTLAST_ASSIGN_OR_RETURN(place.root, RemoteRoot::Open(std::move(blob), {}));
  auto listing = place.root->List();
  if (!listing.ok()) return Annotate(listing.status(), place.uri);
  place.listing = *std::move(listing);
  const auto& all = place.listing.checkpoints;
  if (!place.root->job().has_value() && all.empty()) {
    return Error(absl::StatusCode::kNotFound,
                 "{}: not a checkpoint root: neither {} nor a checkpoint in it", place.uri,
                 kRootFile);
  }
  if (!place.checkpoint.empty() &&
      std::ranges::find(all, place.checkpoint, &CheckpointInfo::name) == all.end())
    return Error(absl::StatusCode::kNotFound, "{}/{}: no such checkpoint", place.uri,
                 place.checkpoint);
  return place;
}

absl::StatusOr<RemotePlace> OpenRemoteCheckpoint(const CkptCall& call, const std::string& path) {
  OUTLAST_ASSIGN_OR_RETURN(RemotePlace place, OpenRemotePlace(call, path));
  if (!place.checkpoint.empty()) return place;
  OUTLAST_ASSIGN_OR_RETURN(place.checkpoint, NewestUsable(call, place.listing, place.uri));
  return place;
}

int RunCopyWithStore(const CkptCall& call) {
  const auto copied = CopyByKind(call);
  if (!copied.ok()) {
    const auto code = copied.status().code();
    const bool refused =
        code == absl::StatusCode::kNotFound || code == absl::StatusCode::kInvalidArgument;
    return refused ? call.Refuse(copied.status()) : call.Fail(copied.status());
  }
  const std::string& to = call.command.places[1];
  if (call.command.json()) {
    call.Print({{"checkpoint", copied->checkpoint},
                {"root", to},
                {"was_there", copied->was_there},
                {"bytes", copied->bytes}});
  } else {
    call.out << fmt::format("{}: {} {}\n", copied->checkpoint,
                            copied->was_there
                                ? std::string("is there already, and whole, in")
                                : fmt::format("copied and read back, {} bytes, to", copied->bytes),
                            to);
  }
  return kCkptWhole;
}

}  // namespace outlast
