#include "checkpoint/ckpt_tool.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>

#include "base/error.h"
#include "checkpoint/reader.h"
#include "checkpoint/root.h"
#include "store/folder.h"

namespace outlast {
namespace {

using nlohmann::ordered_json;

constexpr int kWhole = 0;
constexpr int kDamaged = 1;
constexpr int kRefused = 85;
constexpr std::string_view kUsage = "usage: outlast ckpt ls|verify|show DIR [--json]";

struct Command {
  std::string verb;
  std::string folder;  // the root
  std::string only;    // one checkpoint of it; empty: all
  bool json = false;
};

absl::StatusOr<Command> ParseCommand(std::span<const std::string> args) {
  Command command;
  std::vector<std::string> words;
  for (const std::string& arg : args) {
    if (arg == "--json") {
      command.json = true;
    } else if (arg.starts_with("-")) {
      return Error(absl::StatusCode::kInvalidArgument, "unknown option '{}'; {}", arg, kUsage);
    } else {
      words.push_back(arg);
    }
  }
  if (words.size() != 2 || (words[0] != "ls" && words[0] != "verify" && words[0] != "show")) {
    return Error(absl::StatusCode::kInvalidArgument, "{} wanted, found '{}'", kUsage,
                 fmt::join(args, " "));
  }
  command.verb = words[0];
  command.folder = words[1];
  while (command.folder.size() > 1 && command.folder.back() == '/') command.folder.pop_back();
  const size_t slash = command.folder.find_last_of('/');
  const std::string last =
      slash == std::string::npos ? command.folder : command.folder.substr(slash + 1);
  if (command.verb != "ls" && ParseCheckpointName(last).has_value()) {
    command.only = last;
    command.folder = slash == std::string::npos ? "."
                     : slash == 0               ? "/"
                                                : command.folder.substr(0, slash);
  }
  return command;
}

// What `ls` calls a checkpoint: its place on the chain matters as much as its state.
std::string StateText(const CheckpointInfo& info, bool abandoned) {
  std::string text(NameOf(info.state));
  if (abandoned && info.state == CheckpointState::kCommitted) text = "abandoned";
  if (info.pinned) text += ",pinned";
  if (!info.quarantined.empty()) text += ",quarantined";
  return text;
}

std::string BytesText(const CheckpointInfo& info) {
  return info.manifest.has_value() ? std::to_string(info.manifest->bytes) : "-";
}

// Damage is the graver news of the two.
int CodeOf(bool damaged, bool newer) { return damaged ? kDamaged : newer ? kRefused : kWhole; }

int List(const Listing& listing, const Root& root, bool json, std::ostream& out) {
  const Chain chain = ResolveChain(listing.checkpoints);
  std::set<size_t> abandoned(chain.abandoned.begin(), chain.abandoned.end());
  ordered_json document = {{"root", root.path()},
                           {"job", root.job().hex()},
                           {"name", root.job_name()},
                           {"checkpoints", ordered_json::array()},
                           {"strangers", ordered_json::array()},
                           {"notes", listing.notes}};
  bool damaged = false, newer = false;
  if (!json)
    out << fmt::format("root {}  job {} {}\n", root.path(), root.job().hex(), root.job_name());
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
                       StateText(info, abandoned.contains(i)), BytesText(info),
                       reason.empty() ? "" : "  ", reason);
  }
  for (const Stranger& stranger : listing.strangers) {
    document["strangers"].push_back({{"name", stranger.name}, {"why", stranger.why}});
    if (!json) out << fmt::format("{}  left alone: {}\n", stranger.name, stranger.why);
  }
  if (json)
    out << document.dump(2, ' ', false, ordered_json::error_handler_t::replace) << "\n";
  else
    for (const std::string& note : listing.notes) out << "note: " << note << "\n";
  return CodeOf(damaged, newer);
}

int Verify(const Listing& listing, const Root& root, const Command& command, std::ostream& out) {
  ordered_json document = {{"root", root.path()}, {"checkpoints", ordered_json::array()}};
  bool damaged = false, newer = false;
  for (const CheckpointInfo& info : listing.checkpoints) {
    if (!command.only.empty() && info.name != command.only) continue;
    if (info.state == CheckpointState::kNewer) {
      newer = true;
      document["checkpoints"].push_back(
          {{"name", info.name}, {"whole", nullptr}, {"not_checked", info.reason}});
      if (!command.json) out << fmt::format("{}: not checked: {}\n", info.name, info.reason);
      continue;
    }
    std::vector<Damage> damages;
    if (info.state == CheckpointState::kCommitted || info.state == CheckpointState::kDamaged) {
      damages = VerifyCheckpoint(root.PathOf(info.name));
    } else if (!command.only.empty() || info.state == CheckpointState::kForeign) {
      damages.push_back({"", 0, fmt::format("{}: {}", NameOf(info.state), info.reason)});
    } else {
      continue;  // never committed, or on its way out: nothing that could be damaged
    }
    ordered_json entry = {
        {"name", info.name}, {"whole", damages.empty()}, {"damages", ordered_json::array()}};
    damaged |= !damages.empty();
    if (!command.json && damages.empty())
      out << fmt::format("{}: whole, {} bytes\n", info.name, BytesText(info));
    for (const Damage& damage : damages) {
      entry["damages"].push_back(
          {{"file", damage.file}, {"offset", damage.offset}, {"message", damage.message}});
      if (!command.json) out << fmt::format("{}: damaged: {}\n", info.name, damage.message);
    }
    document["checkpoints"].push_back(std::move(entry));
  }
  document["whole"] = !damaged && !newer;
  if (command.json)
    out << document.dump(2, ' ', false, ordered_json::error_handler_t::replace) << "\n";
  return CodeOf(damaged, newer);
}

ordered_json Dimensions(const Shape& shape) {
  return std::vector<int64_t>(shape.dimensions().begin(), shape.dimensions().end());
}

int ShowOne(const std::string& folder, const CheckpointReader& reader, bool json,
            std::ostream& out) {
  const Manifest& manifest = reader.manifest();
  if (!json) {
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
    return kWhole;
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
  out << document.dump(2, ' ', false, ordered_json::error_handler_t::replace) << "\n";
  return kWhole;
}

int Show(const Listing& listing, const Root& root, const Command& command, std::ostream& out,
         std::ostream& err) {
  std::string name = command.only;
  // Which is the newest of the chain, nobody can say who cannot read them all.
  const auto newer =
      std::ranges::find(listing.checkpoints, CheckpointState::kNewer, &CheckpointInfo::state);
  if (name.empty() && newer != listing.checkpoints.end()) {
    err << fmt::format("outlast ckpt: {}/{}: {}\n", root.path(), newer->name, newer->reason);
    return kRefused;
  }
  if (name.empty()) {
    const Chain chain = ResolveChain(listing.checkpoints);
    if (chain.members.empty()) {
      err << fmt::format("outlast ckpt: {}: no committed checkpoint\n", root.path());
      return kDamaged;
    }
    name = listing.checkpoints[chain.members.front()].name;
  }
  const auto reader = CheckpointReader::Open(root.PathOf(name));
  if (reader.ok()) return ShowOne(root.PathOf(name), **reader, command.json, out);
  err << "outlast ckpt: " << MessageOf(reader.status()) << "\n";
  return absl::IsUnimplemented(reader.status()) ? kRefused : kDamaged;
}

}  // namespace

int RunCkptTool(std::span<const std::string> args, std::ostream& out, std::ostream& err) {
  const auto refuse = [&](const absl::Status& status) {
    err << "outlast ckpt: " << MessageOf(status) << "\n";
    return kRefused;
  };
  const auto command = ParseCommand(args);
  if (!command.ok()) return refuse(command.status());
  const auto root = Root::Open(command->folder, {.access = Access::kRead});
  if (!root.ok()) return refuse(root.status());
  const auto listing = (*root)->List();
  if (!listing.ok()) return refuse(listing.status());
  if (!command->only.empty() &&
      std::ranges::find(listing->checkpoints, command->only, &CheckpointInfo::name) ==
          listing->checkpoints.end()) {
    return refuse(Error(absl::StatusCode::kNotFound, "{}/{}: no such checkpoint", command->folder,
                        command->only));
  }
  if (command->verb == "ls") return List(*listing, **root, command->json, out);
  if (command->verb == "verify") return Verify(*listing, **root, *command, out);
  return Show(*listing, **root, *command, out, err);
}

}  // namespace outlast
