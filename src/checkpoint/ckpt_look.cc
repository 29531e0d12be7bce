#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <ostream>
#include <set>

#include "base/error.h"
#include "checkpoint/ckpt_remote.h"
#include "checkpoint/ckpt_verbs.h"
#include "checkpoint/compare.h"
#include "checkpoint/hugging_face.h"
#include "checkpoint/progress_bar.h"
#include "checkpoint/reader.h"

namespace outlast {
namespace {

using nlohmann::ordered_json;

// What `ls` calls a checkpoint: its place on the chain matters as much as its state.
std::string StateText(const CheckpointInfo& info, bool abandoned) {
  std::string text(NameOf(info.state));
  if (abandoned && info.state == CheckpointState::kCommitted) text = "abandoned";
  if (info.pinned) text += ",pinned";
  if (!info.quarantined.empty()) text += ",quarantined";
  return text;
}

std::string BytesOfInfo(const CheckpointInfo& info) {
  return info.manifest.has_value() ? std::to_string(info.manifest->bytes) : "-";
}

// Damage is the graver news of the two.
int CodeOf(bool damaged, bool newer) {
  return damaged ? kCkptDamaged : newer ? kCkptRefused : kCkptWhole;
}

int List(const CkptCall& call, const Listing& listing, const std::string& root,
         const std::string& job, const std::string& job_name) {
  const bool json = call.command.json();
  std::ostream& out = call.out;
  const Chain chain = ResolveChain(listing.checkpoints);
  std::set<size_t> abandoned(chain.abandoned.begin(), chain.abandoned.end());
  ordered_json document = {{"root", root},
                           {"job", job},
                           {"name", job_name},
                           {"checkpoints", ordered_json::array()},
                           {"strangers", ordered_json::array()},
                           {"notes", listing.notes}};
  bool damaged = false, newer = false;
  if (!json) out << fmt::format("root {}  job {} {}\n", root, job, job_name);
  for (size_t i = 0; i < listing.checkpoints.size(); ++i) {
    const CheckpointInfo& info = listing.checkpoints[i];
    damaged |= info.state == CheckpointState::kDamaged;
    newer |= info.state == CheckpointState::kNewer;
    const std::string reason = info.quarantined.empty() ? info.reason : info.quarantined;
    ordered_json entry = {{"name", info.name},
                          {"step", info.step},
                          {"state", NameOf(info.state)},
                          {"abandoned", abandoned.contains(i)},
                          {"pinned", info.pinned},
                          {"quarantined", !info.quarantined.empty()},
                          {"reason", reason}};
    if (info.manifest.has_value()) {
      entry["claim"] = info.manifest->claim;
      entry["generation"] = info.manifest->generation;
      entry["world"] = info.manifest->world;
      entry["bytes"] = info.manifest->bytes;
      entry["parent"] = info.manifest->parent.has_value() ? ordered_json(*info.manifest->parent)
                                                          : ordered_json(nullptr);
    }
    document["checkpoints"].push_back(std::move(entry));
    if (json) continue;
    out << fmt::format("{}  step {}  {}  {} bytes{}{}\n", info.name, info.step,
                       StateText(info, abandoned.contains(i)), BytesOfInfo(info),
                       reason.empty() ? "" : "  ", reason);
  }
  for (const Stranger& stranger : listing.strangers) {
    document["strangers"].push_back({{"name", stranger.name}, {"why", stranger.why}});
    if (!json) out << fmt::format("{}  left alone: {}\n", stranger.name, stranger.why);
  }
  if (json)
    call.Print(document);
  else
    for (const std::string& note : listing.notes) out << "note: " << note << "\n";
  return CodeOf(damaged, newer);
}

// Checked whole: the mark that made restores pass over it goes.
bool ClearMark(const CkptCall& call, Root& root, const CheckpointInfo& info) {
  if (info.quarantined.empty()) return false;
  const absl::Status cleared = root.ClearQuarantine(info.name);
  if (!cleared.ok()) {
    call.err << fmt::format("outlast ckpt: {} stays in quarantine: {}\n", info.name,
                            MessageOf(cleared));
  }
  return cleared.ok();
}

// What `verify` reads: a root in a folder or in a store.
struct ToVerify {
  std::string root;
  const Listing& listing;
  std::string checkpoint;  // empty: all
  std::function<absl::StatusOr<std::vector<Damage>>(const CheckpointInfo&, const OnBytes&)> read;
  std::function<bool(const CheckpointInfo&)> clear_mark;
};

uint64_t BytesToVerify(const ToVerify& place) {
  uint64_t bytes = 0;
  for (const CheckpointInfo& info : place.listing.checkpoints) {
    const bool wanted = place.checkpoint.empty() || info.name == place.checkpoint;
    if (wanted && info.manifest.has_value()) bytes += info.manifest->bytes;
  }
  return bytes;
}

// Every damage of one; nullopt: never committed, or on its way out, so nothing could be damaged.
absl::StatusOr<std::optional<std::vector<Damage>>> DamagesOf(const ToVerify& place,
                                                             const CheckpointInfo& info,
                                                             ProgressBar& bar) {
  using Damages = std::optional<std::vector<Damage>>;
  if (info.state == CheckpointState::kCommitted || info.state == CheckpointState::kDamaged) {
    OUTLAST_ASSIGN_OR_RETURN(auto damages,
                             place.read(info, [&](uint64_t bytes) { bar.Add(bytes); }));
    return Damages(std::move(damages));
  }
  if (place.checkpoint.empty() && info.state != CheckpointState::kForeign) return Damages();
  return Damages(
      std::vector<Damage>{{"", 0, fmt::format("{}: {}", NameOf(info.state), info.reason)}});
}

int Verify(const CkptCall& call, const ToVerify& place) {
  ordered_json document = {{"root", place.root}, {"checkpoints", ordered_json::array()}};
  std::string lines;
  bool damaged = false, newer = false;
  {
    ProgressBar bar(call.bar, "verify", BytesToVerify(place));
    for (const CheckpointInfo& info : place.listing.checkpoints) {
      if (!place.checkpoint.empty() && info.name != place.checkpoint) continue;
      if (info.state == CheckpointState::kNewer) {
        newer = true;
        document["checkpoints"].push_back(
            {{"name", info.name}, {"whole", nullptr}, {"not_checked", info.reason}});
        lines += fmt::format("{}: not checked: {}\n", info.name, info.reason);
        continue;
      }
      const auto found = DamagesOf(place, info, bar);
      if (!found.ok()) return call.Fail(Annotate(found.status(), "verify"));
      const auto& damages = *found;
      if (!damages.has_value()) continue;
      damaged |= !damages->empty();
      ordered_json entry = {
          {"name", info.name}, {"whole", damages->empty()}, {"damages", ordered_json::array()}};
      if (damages->empty()) {
        const bool cleared = place.clear_mark(info);
        entry["left_quarantine"] = cleared;
        lines += fmt::format("{}: whole, {} bytes{}\n", info.name, BytesOfInfo(info),
                             cleared ? "; taken out of quarantine" : "");
      }
      for (const Damage& damage : *damages) {
        entry["damages"].push_back(
            {{"file", damage.file}, {"offset", damage.offset}, {"message", damage.message}});
        lines += fmt::format("{}: damaged: {}\n", info.name, damage.message);
      }
      document["checkpoints"].push_back(std::move(entry));
    }
  }
  document["whole"] = !damaged && !newer;
  if (lines.empty()) lines = "no checkpoint is there\n";
  if (call.command.json())
    call.Print(document);
  else
    call.out << lines;
  return CodeOf(damaged, newer);
}

ordered_json Dimensions(const Shape& shape) {
  return std::vector<int64_t>(shape.dimensions().begin(), shape.dimensions().end());
}

std::vector<std::string> ExtraKeys(const CheckpointReader& reader) {
  std::set<std::string> keys;
  for (const Receipt& receipt : reader.receipts())
    for (const auto& [key, value] : receipt.extra) keys.insert(key);
  return {keys.begin(), keys.end()};
}

int ShowOne(const CkptCall& call, const CheckpointReader& reader) {
  const Manifest& manifest = reader.manifest();
  const std::string& folder = reader.folder();
  std::ostream& out = call.out;
  if (!call.command.json()) {
    out << fmt::format(
        "{}\n  step {}  generation {}  claim {}  world {}  {} tensors  {} bytes\n  parent {}\n  "
        "plan {}\n",
        folder, manifest.step, manifest.generation, manifest.claim, manifest.world,
        manifest.tensors, manifest.bytes, manifest.parent.value_or("none"), manifest.plan);
    for (const SavedTensor& tensor : reader.tensors()) {
      out << fmt::format("  {} {} {} in {} part{}\n", tensor.name, NameOf(tensor.dtype),
                         tensor.global.text(), tensor.parts.size(),
                         tensor.parts.size() == 1 ? "" : "s");
    }
    for (const auto& [name, of] : reader.aliases()) out << fmt::format("  {} is {}\n", name, of);
    for (const HookResult& hook : manifest.hooks)
      out << fmt::format("  hook {}: {}  {}\n", hook.name, hook.result, hook.note);
    const auto extras = ExtraKeys(reader);
    if (!extras.empty()) out << fmt::format("  extras: {}\n", fmt::join(extras, ", "));
    return kCkptWhole;
  }
  ordered_json document = {{"checkpoint", manifest.checkpoint},
                           {"step", manifest.step},
                           {"generation", manifest.generation},
                           {"claim", manifest.claim},
                           {"world", manifest.world},
                           {"bytes", manifest.bytes},
                           {"parent", manifest.parent.has_value() ? ordered_json(*manifest.parent)
                                                                  : ordered_json(nullptr)},
                           {"ancestors", manifest.ancestors},
                           {"plan", manifest.plan},
                           {"tensors", ordered_json::array()}};
  for (const SavedTensor& tensor : reader.tensors()) {
    document["tensors"].push_back({{"name", tensor.name},
                                   {"dtype", NameOf(tensor.dtype)},
                                   {"shape", Dimensions(tensor.global)},
                                   {"parts", tensor.parts.size()}});
  }
  document["hooks"] = ordered_json::array();
  for (const HookResult& hook : manifest.hooks) {
    document["hooks"].push_back(
        {{"name", hook.name}, {"result", hook.result}, {"note", hook.note}});
  }
  document["extras"] = ExtraKeys(reader);
  document["aliases"] = ordered_json::array();
  for (const auto& [name, of] : reader.aliases())
    document["aliases"].push_back({{"name", name}, {"of", of}});
  call.Print(document);
  return kCkptWhole;
}

// --- diff ---

// A number for JSON, which has neither infinities nor NaN.
ordered_json Number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : "inf";
}

std::string LineOf(const TensorDifference& difference) {
  using Kind = TensorDifference::Kind;
  if (difference.kind == Kind::kMissing)
    return fmt::format("- {} {}\n", difference.name, difference.a);
  if (difference.kind == Kind::kAdded)
    return fmt::format("+ {} {}\n", difference.name, difference.b);
  if (difference.kind == Kind::kType)
    return fmt::format("! {} {}, then {}\n", difference.name, difference.a, difference.b);
  const ValueDifference& values = difference.values;
  return fmt::format(
      "~ {} {}: {} of {} elements differ{}\n", difference.name, difference.a, values.elements,
      difference.elements,
      values.max_abs.has_value() ? fmt::format(", by at most {:g}", *values.max_abs) : "");
}

ordered_json JsonOf(const TensorDifference& difference) {
  const auto text = [](const std::string& type) {
    return type.empty() ? ordered_json(nullptr) : ordered_json(type);
  };
  ordered_json entry = {{"name", difference.name},
                        {"kind", NameOf(difference.kind)},
                        {"a", text(difference.a)},
                        {"b", text(difference.b)}};
  if (difference.kind != TensorDifference::Kind::kValues) return entry;
  entry["elements"] = difference.elements;
  entry["different_elements"] = difference.values.elements;
  entry["max_abs"] = difference.values.max_abs.has_value() ? Number(*difference.values.max_abs)
                                                           : ordered_json(nullptr);
  return entry;
}

int ShowDifferences(const CkptCall& call, const CheckpointReader& a, const CheckpointReader& b,
                    const Comparison& comparison) {
  const int code = comparison.is_equal() ? kCkptWhole : kCkptDamaged;
  if (call.command.json()) {
    ordered_json document = {{"a", a.folder()},
                             {"b", b.folder()},
                             {"equal", comparison.is_equal()},
                             {"equal_tensors", comparison.equal_tensors},
                             {"tensors", ordered_json::array()},
                             {"extras", comparison.extras}};
    for (const TensorDifference& difference : comparison.tensors)
      document["tensors"].push_back(JsonOf(difference));
    call.Print(document);
    return code;
  }
  for (const TensorDifference& difference : comparison.tensors) call.out << LineOf(difference);
  for (const std::string& extra : comparison.extras)
    call.out << fmt::format("~ extras of {}\n", extra);
  call.out << fmt::format("{}: {} tensor{} equal, {} not; steps {} and {}, worlds of {} and {}\n",
                          comparison.is_equal() ? "equal" : "different", comparison.equal_tensors,
                          comparison.equal_tensors == 1 ? "" : "s", comparison.tensors.size(),
                          a.manifest().step, b.manifest().step, a.manifest().world,
                          b.manifest().world);
  return code;
}

}  // namespace

namespace {

// A store that does not answer is nothing that was refused; a place that is none is.
int RefuseOrFail(const CkptCall& call, const absl::Status& status) {
  const bool refused = absl::IsNotFound(status) || absl::IsInvalidArgument(status);
  return refused ? call.Refuse(status) : call.Fail(status);
}

int ListStore(const CkptCall& call) {
  const auto place = OpenRemotePlace(call, call.command.places[0]);
  if (!place.ok()) return RefuseOrFail(call, place.status());
  if (!place->checkpoint.empty()) {
    return call.Refuse(Error(absl::StatusCode::kInvalidArgument,
                             "{}: a checkpoint; a root wanted (show is for one checkpoint)",
                             call.command.places[0]));
  }
  const auto& job = place->root->job();
  return List(call, place->listing, place->uri, job.has_value() ? job->hex() : "", "");
}

int VerifyInStore(const CkptCall& call) {
  const auto place = OpenRemotePlace(call, call.command.places[0]);
  if (!place.ok()) return RefuseOrFail(call, place.status());
  return Verify(call, {place->uri, place->listing, place->checkpoint,
                       [&](const CheckpointInfo& info, const OnBytes& on_bytes) {
                         return place->root->Verify(info.name, on_bytes);
                       },
                       [](const CheckpointInfo&) { return false; }});
}

int ShowInStore(const CkptCall& call) {
  const auto place = OpenRemoteCheckpoint(call, call.command.places[0]);
  if (!place.ok()) return RefuseOrFail(call, place.status());
  const auto reader = place->root->Read(place->checkpoint);
  if (!reader.ok()) return call.Fail(reader.status());
  return ShowOne(call, **reader);
}

}  // namespace

int RunLs(const CkptCall& call) {
  if (IsInStore(call.command.places[0])) return ListStore(call);
  const auto place = OpenPlace(call.command.places[0]);
  if (!place.ok()) return call.Refuse(place.status());
  if (!place->checkpoint.empty()) {
    return call.Refuse(Error(absl::StatusCode::kInvalidArgument,
                             "{}: a checkpoint; a root wanted (show is for one checkpoint)",
                             call.command.places[0]));
  }
  const Root& root = *place->root;
  return List(call, place->listing, root.path(), root.job().hex(), root.job_name());
}

int RunVerify(const CkptCall& call) {
  if (IsInStore(call.command.places[0])) return VerifyInStore(call);
  auto place = OpenPlace(call.command.places[0]);
  if (!place.ok()) return call.Refuse(place.status());
  Root& root = *place->root;
  return Verify(call, {root.path(), place->listing, place->checkpoint,
                       [&](const CheckpointInfo& info, const OnBytes& on_bytes) {
                         return VerifyCheckpoint(root.PathOf(info.name), IoMode::kDirect, on_bytes);
                       },
                       [&](const CheckpointInfo& info) { return ClearMark(call, root, info); }});
}

namespace {

// A place and its open checkpoint, or the exit code.
struct Opened {
  std::unique_ptr<CheckpointReader> reader;
  int code = kCkptWhole;
};

Opened OpenReader(const CkptCall& call, const std::string& path) {
  const auto place = OpenCheckpointPlace(call, path);
  if (!place.ok()) {
    return {nullptr, absl::IsDataLoss(place.status()) ? call.Fail(place.status())
                                                      : call.Refuse(place.status())};
  }
  auto reader = CheckpointReader::Open(place->folder());
  if (!reader.ok()) return {nullptr, call.Fail(reader.status())};
  return {*std::move(reader)};
}

}  // namespace

int RunShow(const CkptCall& call) {
  if (IsInStore(call.command.places[0])) return ShowInStore(call);
  const Opened opened = OpenReader(call, call.command.places[0]);
  return opened.reader == nullptr ? opened.code : ShowOne(call, *opened.reader);
}

int RunDiff(const CkptCall& call) {
  const Opened a = OpenReader(call, call.command.places[0]);
  if (a.reader == nullptr) return a.code;
  const Opened b = OpenReader(call, call.command.places[1]);
  if (b.reader == nullptr) return b.code;
  const auto comparison = [&] {
    ProgressBar bar(call.bar, "diff", a.reader->manifest().bytes);
    return CompareCheckpoints(*a.reader, *b.reader, [&](uint64_t bytes) { bar.Add(bytes); });
  }();
  if (!comparison.ok()) return call.Fail(comparison.status());
  return ShowDifferences(call, *a.reader, *b.reader, *comparison);
}

int RunExport(const CkptCall& call) {
  const std::string folder = call.command.value("--hf");
  if (folder.empty()) {
    return call.Refuse(Error(absl::StatusCode::kInvalidArgument,
                             "export: --hf DIR is missing: the folder that is to be written"));
  }
  ExportOptions options;
  if (call.command.has("--shard-bytes")) {
    const auto bytes = NumberOf(call.command, "--shard-bytes", 1);
    if (!bytes.ok()) return call.Refuse(bytes.status());
    options.shard_bytes = static_cast<uint64_t>(*bytes);
  }
  const Opened opened = OpenReader(call, call.command.places[0]);
  if (opened.reader == nullptr) return opened.code;
  const auto result = [&] {
    ProgressBar bar(call.bar, "export", opened.reader->manifest().bytes);
    options.on_bytes = [&](uint64_t bytes) { bar.Add(bytes); };
    return ExportHuggingFace(*opened.reader, folder, options);
  }();
  if (!result.ok()) return call.Fail(result.status());
  if (call.command.json()) {
    call.Print({{"checkpoint", opened.reader->manifest().checkpoint},
                {"folder", folder},
                {"files", result->files},
                {"tensors", result->tensors},
                {"aliases", result->aliases},
                {"bytes", result->bytes}});
  } else {
    call.out << fmt::format("{}: {} tensors, {}, in {} file{} of {}\n",
                            opened.reader->manifest().checkpoint, result->tensors,
                            BytesText(result->bytes), result->files.size(),
                            result->files.size() == 1 ? "" : "s", folder);
  }
  return kCkptWhole;
}

}  // namespace outlast
