#include "checkpoint/ckpt_tool.h"

#include <algorithm>
#include <ostream>
#include <utility>

#include "base/error.h"
#include "checkpoint/ckpt_remote.h"
#include "checkpoint/ckpt_verbs.h"

namespace outlast {
namespace {

bool IsUsable(const CheckpointInfo& info) {
  return info.state == CheckpointState::kCommitted && info.quarantined.empty();
}

}  // namespace

int CkptCall::Refuse(const absl::Status& status) const {
  err << "outlast ckpt: " << MessageOf(status) << "\n";
  return kCkptRefused;
}

int CkptCall::Fail(const absl::Status& status) const {
  const int refused = Refuse(status);
  // kUnimplemented: of a newer program, which is no damage.
  return absl::IsFailedPrecondition(status) || absl::IsUnimplemented(status) ? refused
                                                                             : kCkptDamaged;
}

void CkptCall::Print(const nlohmann::ordered_json& document) const {
  out << document.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << "\n";
}

absl::StatusOr<CkptPlace> OpenPlace(const std::string& path) {
  if (IsInStore(path)) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "{}: in a store, where ls, show, verify and copy work; for others copy it to a "
                 "folder first",
                 path);
  }
  std::string folder = path, name;
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  const size_t slash = folder.find_last_of('/');
  const std::string last = slash == std::string::npos ? folder : folder.substr(slash + 1);
  if (ParseCheckpointName(last).has_value()) {
    name = last;
    folder = slash == std::string::npos ? "." : slash == 0 ? "/" : folder.substr(0, slash);
  }
  CkptPlace place;
  OUTLAST_ASSIGN_OR_RETURN(place.root, Root::Open(folder, {.access = Access::kRead}));
  OUTLAST_ASSIGN_OR_RETURN(place.listing, place.root->List());
  place.checkpoint = name;
  const auto& all = place.listing.checkpoints;
  if (!name.empty() && std::ranges::find(all, name, &CheckpointInfo::name) == all.end())
    return Error(absl::StatusCode::kNotFound, "{}/{}: no such checkpoint", folder, name);
  return place;
}

absl::Status RefuseNewer(const Listing& listing, const std::string& root) {
  for (const CheckpointInfo& info : listing.checkpoints) {
    if (info.state != CheckpointState::kNewer) continue;
    return Error(absl::StatusCode::kFailedPrecondition, "{}/{}: {}", root, info.name, info.reason);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> NewestUsable(const CkptCall& call, const Listing& listing,
                                         const std::string& root) {
  OUTLAST_RETURN_IF_ERROR(RefuseNewer(listing, root));
  std::vector<std::string> skipped;
  for (const size_t i : ResolveChain(listing.checkpoints).members) {
    const CheckpointInfo& info = listing.checkpoints[i];
    if (IsUsable(info)) {
      for (const std::string& one : skipped)
        call.err << "outlast ckpt: passed over " << one << "\n";
      return info.name;
    }
    skipped.push_back(fmt::format("{}: {}", info.name,
                                  info.quarantined.empty() ? info.reason : info.quarantined));
  }
  return Error(absl::StatusCode::kDataLoss, "{}: no usable checkpoint{}{}", root,
               skipped.empty() ? "" : "; ", fmt::join(skipped, "; "));
}

absl::StatusOr<CkptPlace> OpenCheckpointPlace(const CkptCall& call, const std::string& path) {
  OUTLAST_ASSIGN_OR_RETURN(CkptPlace place, OpenPlace(path));
  if (!place.checkpoint.empty()) return place;
  OUTLAST_ASSIGN_OR_RETURN(place.checkpoint, NewestUsable(call, place.listing, place.root->path()));
  return place;
}

int RunCkptTool(std::span<const std::string> args, std::ostream& out, std::ostream& err,
                Terminal terminal, const Plugins* plugins) {
  const auto command = ParseCkptCommand(args);
  if (!command.ok()) {
    err << "outlast ckpt: " << MessageOf(command.status()) << "\n";
    return kCkptRefused;
  }
  if (!command->help.empty()) {
    out << command->help;
    return kCkptWhole;
  }
  const CkptCall call{*command, out, err, terminal == Terminal::kYes ? &err : nullptr, plugins};
  constexpr std::pair<std::string_view, int (*)(const CkptCall&)> kVerbs[] = {
      {"ls", RunLs},     {"show", RunShow},     {"verify", RunVerify}, {"diff", RunDiff},
      {"copy", RunCopy}, {"export", RunExport}, {"import", RunImport}, {"gc", RunGc},
      {"pin", RunPin},   {"unpin", RunUnpin}};
  const auto found = std::ranges::find(
      kVerbs, command->verb, &std::pair<std::string_view, int (*)(const CkptCall&)>::first);
  return found->second(call);
}

}  // namespace outlast
