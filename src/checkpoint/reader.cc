#include "checkpoint/reader.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/channel.h"
#include "base/error.h"
#include "checkpoint/widen.h"
#include "store/late_names.h"

namespace outlast {
namespace {

std::string Names(const std::vector<std::string>& names) {
  constexpr size_t kShown = 20;
  const size_t shown = std::min(names.size(), kShown);
  std::string text = fmt::format(
      "{}", fmt::join(names.begin(), names.begin() + static_cast<int64_t>(shown), ", "));
  if (names.size() > shown) text += fmt::format(" and {} more", names.size() - shown);
  return text;
}

}  // namespace

std::vector<WantedTensor> WantedBy(const StateView& state) {
  std::vector<WantedTensor> wanted;
  wanted.reserve(state.regions.size());
  for (const Region& region : state.regions)
    wanted.push_back({region.name, region.dtype, region.global});
  return wanted;
}

absl::Status MatchReport::ToStatus(std::string_view checkpoint) const {
  if (is_clean()) return absl::OkStatus();
  std::string text;
  if (!missing.empty()) text += fmt::format("; missing in the checkpoint: {}", Names(missing));
  if (!unexpected.empty()) text += fmt::format("; unexpected in it: {}", Names(unexpected));
  if (!mismatched.empty()) text += fmt::format("; mismatched: {}", Names(mismatched));
  return Error(absl::StatusCode::kInvalidArgument, "{} does not match the state{}", checkpoint,
               text);
}

MatchReport MergeReports(std::span<const MatchReport> ranks) {
  std::set<std::string> missing, mismatched;
  std::map<std::string, size_t> unexpected;
  for (const MatchReport& report : ranks) {
    missing.insert(report.missing.begin(), report.missing.end());
    mismatched.insert(report.mismatched.begin(), report.mismatched.end());
    for (const std::string& name : report.unexpected) ++unexpected[name];
  }
  MatchReport merged{{missing.begin(), missing.end()}, {}, {mismatched.begin(), mismatched.end()}};
  for (const auto& [name, count] : unexpected) {
    if (count == ranks.size()) merged.unexpected.push_back(name);
  }
  return merged;
}

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::Open(
    const std::string& folder, std::optional<absl::Duration> wait) {
  std::unique_ptr<CheckpointReader> reader(new CheckpointReader);
  reader->folder_ = folder;
  reader->wait_ = WaitFor(folder, wait);
  OUTLAST_RETURN_IF_ERROR(reader->Load());
  return reader;
}

absl::Status CheckpointReader::Load() {
  LateNames late(wait_);
  OUTLAST_ASSIGN_OR_RETURN(manifest_, LoadManifest(folder_, late));
  for (const ReceiptEntry& entry : manifest_.receipts) {
    OUTLAST_ASSIGN_OR_RETURN(receipts_.emplace_back(),
                             LoadReceipt(folder_, manifest_, entry, late));
    OUTLAST_RETURN_IF_ERROR(CheckShardSize(folder_, receipts_.back(), late));
  }
  return Index();
}

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::Of(
    std::string place, std::string_view head, std::unique_ptr<ShardSource> source) {
  std::unique_ptr<CheckpointReader> reader(new CheckpointReader);
  PayloadReader texts(head);
  auto manifest = ParseManifest(texts.Text());
  if (!manifest.ok()) return Annotate(manifest.status(), place);
  reader->manifest_ = *std::move(manifest);
  for (const ReceiptEntry& entry : reader->manifest_.receipts) {
    OUTLAST_ASSIGN_OR_RETURN(reader->receipts_.emplace_back(),
                             CheckedReceipt(place, reader->manifest_, entry, texts.Text()));
  }
  reader->folder_ = std::move(place);
  reader->source_ = std::move(source);
  OUTLAST_RETURN_IF_ERROR(reader->Index());
  return reader;
}

absl::Status CheckpointReader::Index() {
  OUTLAST_RETURN_IF_ERROR(Annotate(IndexTensors(), folder_));
  if (tensors_.size() == manifest_.tensors) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument,
               "{}: its receipts hold {} tensors, the manifest says {}", folder_, tensors_.size(),
               manifest_.tensors);
}

absl::Status CheckpointReader::IndexTensors() {
  struct Ref {
    const SavedBox* box;
    uint32_t rank;
  };
  std::vector<Ref> refs;
  std::map<std::string_view, std::string_view> aliases;
  for (const Receipt& receipt : receipts_) {
    for (const SavedBox& box : receipt.tensors) refs.push_back({&box, receipt.rank});
    for (const auto& [name, of] : receipt.aliases) aliases.emplace(name, of);
  }
  const auto name_of = [](const Ref& ref) { return std::string_view(ref.box->name); };
  // As they are where one rank wrote tensors of one size of element.
  if (!std::ranges::is_sorted(refs, {}, name_of)) std::ranges::stable_sort(refs, {}, name_of);
  tensors_.reserve(refs.size());
  parts_.reserve(refs.size());
  for (const auto& [box, rank] : refs) {
    if (tensors_.empty() || tensors_.back().name != box->name)
      tensors_.push_back({box->name, box->dtype, box->global, {parts_.end(), parts_.end()}});
    SavedTensor& tensor = tensors_.back();
    if (tensor.dtype != box->dtype || tensor.global != box->global) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "tensor '{}': rank {} has {} {}, rank {} has {} {}", box->name,
                   tensor.parts[0].rank, NameOf(tensor.dtype), tensor.global.text(), rank,
                   NameOf(box->dtype), box->global.text());
    }
    parts_.push_back({rank, {box->offset, box->extent}, box->begin, box->end});
    tensor.parts = {tensor.parts.data(), tensor.parts.size() + 1};
  }
  names_ = NameIndex(tensors_.size() + aliases.size());
  for (const SavedTensor& tensor : tensors_) {
    names_.Add(tensor.name);
    if (tensor.parts.size() < 2) continue;
    std::vector<HeldBox> boxes;
    for (const SavedTensor::Part& part : tensor.parts) boxes.push_back({part.rank, part.box});
    OUTLAST_RETURN_IF_ERROR(CheckDisjoint(tensor.name, tensor.global, boxes));
  }
  aliases_.reserve(aliases.size());
  for (const auto& [name, of] : aliases) {
    const SavedTensor* tensor = Find(of);
    aliased_.push_back(tensor);
    if (tensor == nullptr || tensor->name != of ||
        !names_.Add(aliases_.emplace_back(name, of).first).is_new) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "alias '{}' of '{}', which is no tensor here", name, of);
    }
  }
  return absl::OkStatus();
}

const SavedTensor* CheckpointReader::Find(std::string_view name) const {
  const std::optional<uint32_t> number = names_.Find(name);
  if (!number) return nullptr;
  return *number < tensors_.size() ? &tensors_[*number] : aliased_[*number - tensors_.size()];
}

bool CheckpointReader::Fits(const SavedTensor& saved, DType dtype, const Shape& global,
                            Widening widening) {
  if (saved.global != global) return false;
  return saved.dtype == dtype ||
         (widening == Widening::kAllow && WidenerOf(saved.dtype, dtype) != nullptr);
}

MatchReport CheckpointReader::Match(const StateView& state, Widening widening) const {
  return Match(WantedBy(state), widening);
}

MatchReport CheckpointReader::Match(std::span<const WantedTensor> wanted, Widening widening) const {
  std::vector<const SavedTensor*> found;
  return Match(wanted, widening, found);
}

MatchReport CheckpointReader::Match(std::span<const WantedTensor> wanted, Widening widening,
                                    std::vector<const SavedTensor*>& found) const {
  MatchReport report;
  found.reserve(wanted.size());
  std::vector<bool> expected(tensors_.size());
  std::set<std::string_view> expected_aliases;
  for (const WantedTensor& tensor : wanted) {
    const SavedTensor* saved = found.emplace_back(Find(tensor.name));
    if (saved == nullptr) {
      report.missing.emplace_back(tensor.name);
      continue;
    }
    if (saved->name == tensor.name) {
      expected[static_cast<size_t>(saved - tensors_.data())] = true;
    } else {
      expected_aliases.insert(tensor.name);
    }
    if (!Fits(*saved, tensor.dtype, tensor.global, widening)) {
      report.mismatched.push_back(fmt::format("{}: {} {}, saved {} {}", tensor.name,
                                              NameOf(tensor.dtype), tensor.global.text(),
                                              NameOf(saved->dtype), saved->global.text()));
    }
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (!expected[i]) report.unexpected.push_back(tensors_[i].name);
  }
  for (const auto& [name, of] : aliases_) {
    if (!expected_aliases.contains(name)) report.unexpected.push_back(name);
  }
  for (auto* names : {&report.missing, &report.unexpected, &report.mismatched}) {
    std::ranges::sort(*names);
    names->erase(std::unique(names->begin(), names->end()), names->end());
  }
  return report;
}

absl::StatusOr<Extras> CheckpointReader::ExtrasOf(uint32_t rank) const {
  if (rank >= receipts_.size()) {
    return Error(absl::StatusCode::kNotFound, "{}: rank {} of a saved world of {}", folder_, rank,
                 receipts_.size());
  }
  return receipts_[rank].extra;
}

std::vector<Damage> CheckpointReader::VerifyRank(uint32_t rank, IoMode mode) const {
  return VerifyShard(folder_, receipts_[rank], mode);
}

std::vector<Damage> CheckpointReader::Verify(IoMode mode) const {
  std::vector<Damage> damages;
  for (uint32_t rank = 0; rank < receipts_.size(); ++rank)
    std::ranges::move(VerifyRank(rank, mode), std::back_inserter(damages));
  return damages;
}

std::vector<Damage> VerifyCheckpoint(const std::string& folder, IoMode mode,
                                     const OnBytes& on_bytes, std::optional<absl::Duration> wait) {
  std::vector<Damage> damages;
  LateNames late(WaitFor(folder, wait));
  const auto manifest = LoadManifest(folder, late);
  if (!manifest.ok())
    return {{std::string(kManifestFile), 0, std::string(MessageOf(manifest.status()))}};
  for (const ReceiptEntry& entry : manifest->receipts) {
    auto receipt = LoadReceipt(folder, *manifest, entry, late);
    if (!receipt.ok()) {
      damages.push_back({entry.name, 0, std::string(MessageOf(receipt.status()))});
      continue;
    }
    CheckShardSize(folder, *receipt, late).IgnoreError();  // waits for it; VerifyShard says more
    std::ranges::move(VerifyShard(folder, *receipt, mode, on_bytes), std::back_inserter(damages));
  }
  if (!damages.empty()) return damages;
  const auto whole = CheckpointReader::Open(folder);  // what only shows over all ranks
  if (!whole.ok())
    damages.push_back({std::string(kManifestFile), 0, std::string(MessageOf(whole.status()))});
  return damages;
}

}  // namespace outlast
