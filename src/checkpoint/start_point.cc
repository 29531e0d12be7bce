#include "checkpoint/start_point.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <set>
#include <system_error>
#include <vector>

#include "base/error.h"
#include "base/flag_values.h"

namespace outlast {
namespace {

namespace fs = std::filesystem;

constexpr char kFlag[] = "--restore-from";
constexpr size_t kMostNamed = 12;  // steps in a message

bool IsUsable(const CheckpointInfo& info) {
  return info.state == CheckpointState::kCommitted && info.quarantined.empty();
}

std::string WhyNot(const CheckpointInfo& info) {
  return fmt::format("{}: {}", info.name,
                     info.quarantined.empty() ? info.reason : info.quarantined);
}

// "there are steps 10, 20, 30".
std::string StepsThere(const Listing& listing) {
  std::set<int64_t, std::greater<>> steps;
  for (const CheckpointInfo& info : listing.checkpoints) {
    if (IsUsable(info)) steps.insert(info.step);
  }
  if (steps.empty()) return "there is no usable checkpoint at all";
  std::string text = "there are steps ";
  size_t count = 0;
  for (const int64_t step : steps) {
    if (++count > kMostNamed) return text + fmt::format(" and {} older", steps.size() - kMostNamed);
    text += fmt::format("{}{}", count == 1 ? "" : ", ", step);
  }
  return text;
}

std::string PathIn(std::string_view text) {
  constexpr std::string_view kFile = "file://";
  return std::string(text.starts_with(kFile) ? text.substr(kFile.size()) : text);
}

// A checkpoint's folder within its root; empty: `folder` is a root.
std::string CheckpointIn(const fs::path& folder) {
  const std::string name = folder.filename().string();
  return ParseCheckpointName(name) ? name : "";
}

}  // namespace

std::string StartPoint::text() const {
  return is_latest() ? "latest" : step ? std::to_string(*step) : folder;
}

absl::StatusOr<StartPoint> ParseStartPoint(std::string_view text) {
  StartPoint point;
  if (text == "latest") return point;
  int64_t step = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), step);
  const bool is_number = end == text.data() + text.size() && !text.empty();
  if (is_number && error == std::errc() && step >= 0) {
    point.step = step;
    return point;
  }
  std::error_code ignored;
  const fs::path path = fs::absolute(PathIn(text), ignored).lexically_normal();
  if (text.empty() || is_number || !fs::is_directory(path, ignored)) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "{} '{}': latest, a step of the checkpoint root, or the folder of another root "
                 "wanted",
                 kFlag, OneLine(text));
  }
  point.folder = path.has_filename() ? path.string() : path.parent_path().string();
  return point;
}

absl::StatusOr<StartDecision> DecideStartAt(const Listing& listing, int64_t step) {
  StartDecision decision;
  const Chain chain = ResolveChain(listing.checkpoints);
  std::vector<size_t> order = chain.members;
  order.insert(order.end(), chain.abandoned.begin(), chain.abandoned.end());
  std::vector<std::string> unusable;
  for (const size_t i : order) {
    const CheckpointInfo& info = listing.checkpoints[i];
    if (info.step != step) continue;
    if (IsUsable(info)) {
      decision.candidates.push_back(info.name);
    } else {
      unusable.push_back(WhyNot(info));
    }
  }
  for (const CheckpointInfo& info : listing.checkpoints) {
    const bool has_history = info.manifest.has_value() && info.state != CheckpointState::kForeign;
    if (info.step == step && !has_history) unusable.push_back(WhyNot(info));
  }
  decision.skipped = unusable;
  if (decision.candidates.empty()) {
    if (unusable.empty()) {
      return Error(absl::StatusCode::kNotFound, "{} {}: no checkpoint of step {}, {}", kFlag, step,
                   step, StepsThere(listing));
    }
    return Error(absl::StatusCode::kDataLoss, "{} {}: not usable: {}; {}", kFlag, step,
                 fmt::join(unusable, "; "), StepsThere(listing));
  }
  for (const size_t i : chain.members) {
    const CheckpointInfo& info = listing.checkpoints[i];
    if (info.name == decision.candidates.front()) break;
    if (info.step > step) {
      decision.skipped.push_back(
          fmt::format("{}: of the former history, that goes on behind step {}", info.name, step));
    }
  }
  return decision;
}

std::string RootElsewhere(const std::string& folder) {
  return CheckpointIn(folder).empty() ? folder : fs::path(folder).parent_path().string();
}

absl::StatusOr<StartElsewhere> FindElsewhere(const std::string& folder) {
  StartElsewhere found;
  const std::string checkpoint = CheckpointIn(folder);
  found.root = RootElsewhere(folder);
  const auto root = Root::Open(found.root, {.access = Access::kRead});
  if (!root.ok()) return Annotate(root.status(), fmt::format("{} '{}'", kFlag, folder));
  OUTLAST_ASSIGN_OR_RETURN(const Listing listing, (*root)->List());
  if (checkpoint.empty()) {
    OUTLAST_ASSIGN_OR_RETURN(found.decision, DecideStart(listing, StartMode::kResume));
  } else {
    for (const CheckpointInfo& info : listing.checkpoints) {
      if (info.name != checkpoint) continue;
      if (IsUsable(info)) found.decision.candidates.push_back(info.name);
      if (!IsUsable(info)) found.decision.skipped.push_back(WhyNot(info));
    }
  }
  if (!found.decision.candidates.empty()) return found;
  const auto& skipped = found.decision.skipped;
  return Error(absl::StatusCode::kNotFound, "{} '{}': no usable checkpoint there{}{}", kFlag,
               folder, skipped.empty() ? "" : ": ", fmt::join(skipped, "; "));
}

absl::StatusOr<StartDecision> DecideStartFrom(const StartPoint& point, const Listing& listing,
                                              const std::string& path, std::string* elsewhere) {
  elsewhere->clear();
  if (point.step) return DecideStartAt(listing, *point.step);
  if (point.is_latest()) return DecideStart(listing, StartMode::kResume);
  OUTLAST_ASSIGN_OR_RETURN(StartElsewhere found, FindElsewhere(point.folder));
  std::error_code ignored;
  if (!fs::equivalent(found.root, path, ignored)) *elsewhere = found.root;
  return std::move(found.decision);
}

}  // namespace outlast
