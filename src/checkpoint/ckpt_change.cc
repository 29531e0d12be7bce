#include <algorithm>
#include <filesystem>
#include <optional>
#include <ostream>

#include "base/error.h"
#include "checkpoint/ckpt_remote.h"
#include "checkpoint/ckpt_verbs.h"
#include "checkpoint/copy.h"
#include "checkpoint/hugging_face.h"
#include "checkpoint/progress_bar.h"
#include "checkpoint/root_hold.h"

namespace outlast {
namespace {

using nlohmann::ordered_json;

const CheckpointInfo* FindInfo(const Listing& listing, const std::string& name) {
  const auto found = std::ranges::find(listing.checkpoints, name, &CheckpointInfo::name);
  return found == listing.checkpoints.end() ? nullptr : &*found;
}

// Where a new checkpoint of the root stands, and LATEST if it is the newest.
std::string PlaceOnChain(Root& root, const std::string& name, int64_t step) {
  const auto listing = root.List();
  if (!listing.ok()) return "unknown";
  const Chain chain = ResolveChain(listing->checkpoints);
  for (size_t i = 0; i < chain.members.size(); ++i) {
    if (listing->checkpoints[chain.members[i]].name != name) continue;
    if (i > 0) return "on the chain";
    root.WriteLatest({name, step}).IgnoreError();  // a hint
    return "newest";
  }
  return "abandoned";
}

// --- import ---

// What the new checkpoint continues from, as it was said: a root with a history must be told.
absl::StatusOr<std::optional<std::string>> ParentOf(const CkptCommand& command,
                                                    const Listing& listing,
                                                    const std::string& root) {
  const std::string name = command.value("--parent");
  if (!name.empty()) {
    const CheckpointInfo* info = FindInfo(listing, name);
    if (info != nullptr && info->state == CheckpointState::kCommitted)
      return std::optional<std::string>(name);
    return Error(absl::StatusCode::kFailedPrecondition,
                 "--parent {}: {} in root {}; a committed checkpoint wanted", name,
                 info == nullptr ? "not there" : NameOf(info->state), root);
  }
  for (const CheckpointInfo& info : listing.checkpoints) {
    if (!info.manifest.has_value() || command.has("--fresh")) continue;
    return Error(absl::StatusCode::kFailedPrecondition,
                 "root {} holds checkpoints ({}): say --parent NAME to continue from one, or "
                 "--fresh to leave them behind",
                 root, info.name);
  }
  return std::optional<std::string>();
}

struct Imported {
  std::string name, place;
};

absl::StatusOr<Imported> Import(const CkptCall& call, const HuggingFaceFiles& files, int64_t step) {
  const std::string& path = call.command.places[1];
  OUTLAST_ASSIGN_OR_RETURN(const auto target, LookAtTarget(path));
  if (target.has_value())  // before a claim is taken for nothing
    OUTLAST_RETURN_IF_ERROR(ParentOf(call.command, target->listing, path).status());
  OUTLAST_ASSIGN_OR_RETURN(const auto hold,
                           RootHold::Take(path, {.job_name = call.command.value("--job")}));
  OUTLAST_ASSIGN_OR_RETURN(const Listing listing, hold->root().List());
  ImportRequest request;
  request.step = step;
  OUTLAST_ASSIGN_OR_RETURN(request.parent, ParentOf(call.command, listing, path));
  ProgressBar bar(call.bar, "import", files.bytes);
  request.on_bytes = [&](uint64_t bytes) { bar.Add(bytes); };
  Imported imported;
  OUTLAST_ASSIGN_OR_RETURN(imported.name, ImportHuggingFace(files, hold->root(), request));
  imported.place = PlaceOnChain(hold->root(), imported.name, step);
  return imported;
}

// --- copy ---

struct Copied {
  CopyResult result;
  std::string place;
};

absl::StatusOr<Copied> Copy(const CkptCall& call, const CkptPlace& from,
                            const CheckpointReader& source) {
  const std::string& path = call.command.places[1];
  const Manifest& manifest = source.manifest();
  OUTLAST_ASSIGN_OR_RETURN(const auto target, LookAtTarget(path));
  if (target.has_value() && target->root->job() != manifest.job) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "{}: foreign: of job {}, root {} is of job {}", source.folder(),
                 manifest.job.hex(), path, target->root->job().hex());
  }
  RootOptions options;
  options.job = manifest.job;
  const std::string& name = from.root->job_name();
  if (Id128::FromName(name) == manifest.job && !name.empty()) options.job_name = name;
  OUTLAST_ASSIGN_OR_RETURN(const auto hold, RootHold::Take(path, std::move(options)));
  uint64_t bytes = 0;
  for (const Receipt& receipt : source.receipts())
    bytes += receipt.file.has_value() ? receipt.file->bytes : 0;
  ProgressBar bar(call.bar, "copy", 2 * bytes);  // written, and read back
  Copied copied;
  OUTLAST_ASSIGN_OR_RETURN(copied.result,
                           CopyCheckpoint(source, hold->root(), [&](uint64_t n) { bar.Add(n); }));
  copied.place = PlaceOnChain(hold->root(), manifest.checkpoint, manifest.step);
  return copied;
}

// --- gc ---

bool IsLeftOver(const CheckpointInfo& info) {
  return !info.pinned &&
         (info.state == CheckpointState::kIncomplete || info.state == CheckpointState::kDeleted);
}

struct Sweep {
  std::vector<Garbage> garbage;       // that would go
  std::vector<Garbage> deleted;       // that went
  std::vector<std::string> finished;  // that lacked only their manifests
  std::string owner;                  // who holds the root, where left-overs are kept for it
  std::vector<std::string> kept;      // those
  absl::Status status;                // why the rest stayed
};

// Deletes in the order of the list, and asks for the claim (where one is held) before each.
void DeleteAll(Root& root, Sweep& sweep) {
  for (const Garbage& garbage : sweep.garbage) {
    if (root.claim() != 0) sweep.status = root.CheckClaim();
    if (!sweep.status.ok()) return;
    const absl::Status status = root.Delete(garbage.name);
    if (absl::IsFailedPrecondition(status)) continue;  // pinned since it was listed
    sweep.status = status;
    if (!status.ok()) return;
    sweep.deleted.push_back(garbage);
  }
}

absl::StatusOr<Sweep> SweepRoot(const CkptPlace& place, bool act) {
  Sweep sweep;
  Root& root = *place.root;
  const auto& all = place.listing.checkpoints;
  // Abandoned checkpoints are no living run's; left-overs may be what it writes now, so those need
  // the claim.
  RootOwner owner = RootOwner::kNone;
  if (std::ranges::any_of(all, IsLeftOver)) {
    OUTLAST_ASSIGN_OR_RETURN(const ClaimDecision decision, root.LookAtClaim());
    if (decision.verdict == ClaimVerdict::kRefuse) {
      owner = RootOwner::kLiving;
      sweep.owner = decision.reason;
      for (const CheckpointInfo& info : all)
        if (IsLeftOver(info)) sweep.kept.push_back(info.name);
    } else if (act) {
      OUTLAST_ASSIGN_OR_RETURN(const auto hold, RootHold::Take(root.path(), {}));
      sweep.finished = hold->rolled_forward();
      OUTLAST_ASSIGN_OR_RETURN(const Listing listing, hold->root().List());
      sweep.garbage = ChooseGarbage(listing.checkpoints, RootOwner::kNone);
      DeleteAll(hold->root(), sweep);
      return sweep;
    }
  }
  sweep.garbage = ChooseGarbage(all, owner);
  if (act) DeleteAll(root, sweep);
  return sweep;
}

void PrintSweep(const CkptCall& call, const CkptPlace& place, const Sweep& sweep, bool act) {
  const std::vector<Garbage>& list = act ? sweep.deleted : sweep.garbage;
  if (call.command.json()) {
    const char* key = act ? "deleted" : "would_delete";
    ordered_json document = {{"root", place.root->path()},
                             {"done", act},
                             {key, ordered_json::array()},
                             {"finished", sweep.finished},
                             {"kept_for_the_running_job", sweep.kept}};
    for (const Garbage& garbage : list)
      document[key].push_back({{"name", garbage.name}, {"why", garbage.why}});
    call.Print(document);
    return;
  }
  for (const std::string& name : sweep.finished)
    call.out << fmt::format("{}  finished: it lacked only its manifest\n", name);
  for (const Garbage& garbage : list) {
    call.out << fmt::format("{}  {}: {}\n", garbage.name, act ? "deleted" : "would be deleted",
                            garbage.why);
  }
  for (const std::string& name : sweep.kept)
    call.out << fmt::format("{}  kept, a running job may be writing it: {}\n", name, sweep.owner);
  if (sweep.garbage.empty() && sweep.kept.empty()) call.out << "nothing to delete\n";
  if (!act && !sweep.garbage.empty()) call.out << "say --yes to delete them\n";
}

// --- pin and unpin ---

int SetPins(const CkptCall& call, absl::Status (Root::*set)(std::string_view),
            std::string_view done) {
  ordered_json document = {{"checkpoints", ordered_json::array()}};
  std::string lines;
  int code = kCkptWhole;
  for (const std::string& path : call.command.places) {
    const auto place = OpenCheckpointPlace(call, path);
    if (!place.ok()) {
      code = call.Refuse(place.status());
      continue;
    }
    const absl::Status status = (place->root.get()->*set)(place->checkpoint);
    if (!status.ok()) {
      code = std::max(code, call.Fail(status));
      continue;
    }
    lines += fmt::format("{}: {}\n", place->checkpoint, done);
    document["checkpoints"].push_back({{"name", place->checkpoint}, {"state", done}});
  }
  if (call.command.json())
    call.Print(document);
  else
    call.out << lines;
  return code;
}

}  // namespace

absl::StatusOr<std::optional<CkptPlace>> LookAtTarget(const std::string& path) {
  auto place = OpenPlace(path);
  if (place.ok() && !place->checkpoint.empty()) {
    return Error(absl::StatusCode::kInvalidArgument, "{}: a checkpoint; a root wanted", path);
  }
  if (place.ok()) {
    OUTLAST_RETURN_IF_ERROR(RefuseNewer(place->listing, place->root->path()));
    return std::optional(*std::move(place));
  }
  if (!absl::IsNotFound(place.status())) return place.status();
  const auto entries = ListFolder(path);
  if (absl::IsNotFound(entries.status())) return std::optional<CkptPlace>();
  if (!entries.ok()) return entries.status();
  // A crash in the middle of OUTLAST.json's making leaves its temporary file.
  const auto other = std::ranges::find_if(*entries, [](const FolderEntry& entry) {
    return !(entry.name.starts_with(kRootFile) && entry.name.ends_with(".tmp"));
  });
  if (other == entries->end()) return std::optional<CkptPlace>();
  return Error(absl::StatusCode::kFailedPrecondition,
               "{}: no root, and holds '{}'; a root, an empty folder or a new one wanted", path,
               other->name);
}

int RunImport(const CkptCall& call) {
  if (!call.command.has("--step")) {
    return call.Refuse(Error(absl::StatusCode::kInvalidArgument,
                             "import: --step N is missing: the step that the tensors are of"));
  }
  if (call.command.has("--parent") && call.command.has("--fresh")) {
    return call.Refuse(Error(absl::StatusCode::kInvalidArgument,
                             "import: --parent and --fresh exclude each other"));
  }
  const auto step = NumberOf(call.command, "--step", 0);
  if (!step.ok()) return call.Refuse(step.status());
  const auto files = ReadHuggingFace(call.command.places[0]);
  if (!files.ok()) return call.Fail(files.status());
  const auto imported = Import(call, *files, *step);
  if (!imported.ok()) return call.Fail(imported.status());
  if (call.command.json()) {
    call.Print({{"checkpoint", imported->name},
                {"step", *step},
                {"tensors", files->tensors.size()},
                {"aliases", files->aliases.size()},
                {"bytes", files->bytes},
                {"place", imported->place}});
  } else {
    call.out << fmt::format("{}: step {}, {} tensors, {}; {}\n", imported->name, *step,
                            files->tensors.size(), BytesText(files->bytes), imported->place);
  }
  return kCkptWhole;
}

int RunCopy(const CkptCall& call) {
  if (IsInStore(call.command.places[0]) || IsInStore(call.command.places[1]))
    return RunCopyWithStore(call);
  const auto from = OpenCheckpointPlace(call, call.command.places[0]);
  if (!from.ok()) return call.Refuse(from.status());
  const auto source = CheckpointReader::Open(from->folder());
  if (!source.ok()) return call.Fail(source.status());
  const auto copied = Copy(call, *from, **source);
  if (!copied.ok()) return call.Fail(copied.status());
  if (call.command.json()) {
    call.Print({{"checkpoint", from->checkpoint},
                {"root", call.command.places[1]},
                {"was_there", copied->result.was_there},
                {"bytes", copied->result.bytes},
                {"place", copied->place}});
  } else {
    call.out << fmt::format(
        "{}: {} {}; {}\n", from->checkpoint,
        copied->result.was_there
            ? std::string("is there already, and whole, in")
            : fmt::format("copied and read back, {}, to", BytesText(copied->result.bytes)),
        call.command.places[1], copied->place);
  }
  return kCkptWhole;
}

int RunGc(const CkptCall& call) {
  const auto place = OpenPlace(call.command.places[0]);
  if (!place.ok()) return call.Refuse(place.status());
  if (!place->checkpoint.empty()) {
    return call.Refuse(Error(absl::StatusCode::kInvalidArgument, "{}: a checkpoint; a root wanted",
                             call.command.places[0]));
  }
  if (const absl::Status newer = RefuseNewer(place->listing, place->root->path()); !newer.ok())
    return call.Refuse(newer);
  const bool act = call.command.has("--yes");
  const auto sweep = SweepRoot(*place, act);
  if (!sweep.ok()) return call.Fail(sweep.status());
  PrintSweep(call, *place, *sweep, act);
  return sweep->status.ok() ? kCkptWhole : call.Fail(sweep->status);
}

int RunPin(const CkptCall& call) { return SetPins(call, &Root::Pin, "pinned"); }
int RunUnpin(const CkptCall& call) { return SetPins(call, &Root::Unpin, "not pinned"); }

}  // namespace outlast
