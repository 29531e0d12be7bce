#include "checkpoint/reader.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "base/channel.h"
#include "base/error.h"
#include "checkpoint/read_ahead.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/widen.h"
#include "outlast/base/crc32c.h"
#include "outlast/base/memory.h"
#include "store/direct_reader.h"
#include "store/late_names.h"

namespace outlast {
namespace {

// A read, and what reads of one file hold together: enough for a drive's full speed.
constexpr uint64_t kReadBytes = uint64_t{4} << 20;
constexpr uint64_t kRingBytes = 4 * kReadBytes;

// `block` begins at byte `begin` of the shard, where a chunk does.
absl::Status CheckChunks(std::string_view place, const ShardFile& file, uint64_t begin,
                         std::span<const std::byte> block) {
  for (uint64_t at = 0; at < block.size(); at += file.chunk_bytes) {
    const uint32_t wanted = file.chunks[(begin + at) / file.chunk_bytes];
    const uint32_t found =
        Crc32c(block.subspan(at, std::min<uint64_t>(file.chunk_bytes, block.size() - at)));
    if (found == wanted) continue;
    return Error(absl::StatusCode::kDataLoss,
                 "{}: the chunk at byte {} has crc {:08x}, its receipt says {:08x}", place,
                 begin + at, found, wanted);
  }
  return absl::OkStatus();
}

uint64_t BlockBytes(const ShardFile& file) {
  return std::max<uint64_t>(1, kReadBytes / file.chunk_bytes) * file.chunk_bytes;
}

// Reads a shard in blocks of whole chunks, ahead of the one who uses them, and hands out none
// before its CRCs were checked. For one thread.
class ChunkReader {
 public:
  static absl::StatusOr<std::unique_ptr<ChunkReader>> Open(const std::string& folder,
                                                           const ShardFile& file, IoMode mode) {
    OUTLAST_ASSIGN_OR_RETURN(auto disk, DirectReader::Open(folder + "/" + file.name, mode));
    OUTLAST_ASSIGN_OR_RETURN(const uint64_t bytes, FileBytes(disk->path()));
    if (bytes != file.bytes) {
      return Error(absl::StatusCode::kDataLoss, "{}: {} bytes, its receipt says {}", disk->path(),
                   bytes, file.bytes);
    }
    return std::unique_ptr<ChunkReader>(new ChunkReader(std::move(disk), file));
  }

  uint64_t block_bytes() const { return BlockBytes(file_); }
  // The whole file.
  std::vector<Stretch> AllBlocks() const {
    std::vector<Stretch> blocks;
    for (uint64_t at = 0; at < file_.bytes; at += block_bytes())
      blocks.push_back({at, std::min(file_.bytes, at + block_bytes())});
    return blocks;
  }

  // What Next hands out: each from a chunk's start to a chunk's end, or the file's, and at most
  // block_bytes() long.
  absl::Status Start(std::vector<Stretch> blocks) {
    blocks_ = blocks;
    OUTLAST_ASSIGN_OR_RETURN(
        ahead_, ReadAhead::Start(
                    std::move(blocks), kRingBytes, [this](const Stretch& stretch, std::byte* into) {
                      return disk_->Read(stretch.begin, stretch.end - stretch.begin, into);
                    }));
    return absl::OkStatus();
  }
  // The bytes of the next block, until the next call. An error is this block's alone.
  absl::StatusOr<std::span<const std::byte>> Next() {
    const Stretch& stretch = blocks_[next_++];
    OUTLAST_ASSIGN_OR_RETURN(const std::span<const std::byte> block, ahead_->Next());
    OUTLAST_RETURN_IF_ERROR(Check(stretch.begin, block));
    return block;
  }
  // The errors of the chunks of one block, each read by itself.
  template <typename Report>
  void ReadEach(const Stretch& block, Report report) {
    const auto scratch = Mapping::Anonymous(file_.chunk_bytes);
    if (!scratch.ok()) return report(block.begin, scratch.status());
    for (uint64_t at = block.begin; at < block.end; at += file_.chunk_bytes) {
      const Stretch chunk{at, std::min(block.end, at + file_.chunk_bytes)};
      absl::Status status = disk_->Read(at, chunk.end - at, scratch->data());
      if (status.ok()) status = Check(at, scratch->bytes().first(chunk.end - chunk.begin));
      if (!status.ok()) report(at, status);
    }
  }

 private:
  ChunkReader(std::unique_ptr<DirectReader> disk, const ShardFile& file)
      : disk_(std::move(disk)), file_(file) {}

  absl::Status Check(uint64_t begin, std::span<const std::byte> block) const {
    return CheckChunks(disk_->path(), file_, begin, block);
  }

  const std::unique_ptr<DirectReader> disk_;
  const ShardFile& file_;
  std::vector<Stretch> blocks_;
  size_t next_ = 0;
  std::unique_ptr<ReadAhead> ahead_;  // last: its threads use all of the above
};

absl::Duration WaitFor(const std::string& folder, std::optional<absl::Duration> asked) {
  return asked.has_value() ? *asked : LateNames::WaitOf(folder);
}

absl::Status LostFile(const absl::Status& status) {
  // To a restore, a file that is gone is damage like any other.
  return absl::IsNotFound(status) ? MakeStatus(absl::StatusCode::kDataLoss, MessageOf(status))
                                  : status;
}

absl::Status CheckReceiptText(const ReceiptEntry& entry, std::string_view text,
                              const std::string& place) {
  const uint32_t crc = Crc32c(text);
  if (text.size() == entry.bytes && crc == entry.crc32c) return absl::OkStatus();
  return Error(absl::StatusCode::kDataLoss,
               "{}/{}: {} bytes with crc {:08x}, the manifest says {} with {:08x}", place,
               entry.name, text.size(), crc, entry.bytes, entry.crc32c);
}

// The text of a receipt that is what the manifest says.
absl::StatusOr<std::string> ReadReceipt(const std::string& folder, const ReceiptEntry& entry,
                                        LateNames& late) {
  const std::string path = folder + "/" + entry.name;
  auto text = late.Await(folder, [&] { return ReadSmall(path, kMaxReceiptBytes); });
  if (!text.ok()) return LostFile(text.status());
  OUTLAST_RETURN_IF_ERROR(CheckReceiptText(entry, *text, folder));
  return text;
}

absl::Status CheckSameSave(const std::string& folder, const Manifest& manifest,
                           const ReceiptEntry& entry, const Receipt& receipt) {
  const bool same_save = receipt.job == manifest.job && receipt.checkpoint == manifest.checkpoint &&
                         receipt.claim == manifest.claim &&
                         receipt.generation == manifest.generation &&
                         receipt.world == manifest.world && receipt.plan == manifest.plan;
  if (same_save && entry.name == ReceiptName(receipt.rank)) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument,
               "{}/{}: of another save or rank than the manifest", folder, entry.name);
}

absl::StatusOr<Receipt> CheckedReceipt(const std::string& folder, const Manifest& manifest,
                                       const ReceiptEntry& entry, std::string_view text) {
  OUTLAST_ASSIGN_OR_RETURN(Receipt receipt, ParseReceiptOf(entry, text, folder));
  OUTLAST_RETURN_IF_ERROR(CheckSameSave(folder, manifest, entry, receipt));
  if (receipt.data_bytes() != entry.data_bytes) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "{}/{}: {} bytes of data, the manifest says {}", folder, entry.name,
                 receipt.data_bytes(), entry.data_bytes);
  }
  return receipt;
}

absl::StatusOr<Receipt> LoadReceipt(const std::string& folder, const Manifest& manifest,
                                    const ReceiptEntry& entry, LateNames& late) {
  OUTLAST_ASSIGN_OR_RETURN(const std::string text, ReadReceipt(folder, entry, late));
  return CheckedReceipt(folder, manifest, entry, text);
}

absl::Status CheckShardSize(const std::string& folder, const Receipt& receipt, LateNames& late) {
  if (!receipt.file.has_value()) return absl::OkStatus();
  const std::string path = folder + "/" + receipt.file->name;
  const auto bytes = late.Await(folder, [&] { return FileBytes(path); });
  if (!bytes.ok()) return LostFile(bytes.status());
  if (*bytes == receipt.file->bytes) return absl::OkStatus();
  return Error(absl::StatusCode::kDataLoss, "{}: {} bytes, its receipt says {}", path, *bytes,
               receipt.file->bytes);
}

absl::StatusOr<Manifest> LoadManifest(const std::string& folder, LateNames& late) {
  OUTLAST_ASSIGN_OR_RETURN(const bool deleted, Exists(fmt::format("{}/{}", folder, kDeletedFile)));
  if (deleted) return Error(absl::StatusCode::kNotFound, "{}: its deletion has begun", folder);
  const std::string path = fmt::format("{}/{}", folder, kManifestFile);
  OUTLAST_ASSIGN_OR_RETURN(const std::string text,
                           late.Await(folder, [&] { return ReadSmall(path, kMaxManifestBytes); }));
  auto manifest = ParseManifest(text);
  if (!manifest.ok()) return Annotate(manifest.status(), path);
  return manifest;
}

// The shard's own header must say what the receipt says: other programs read the one, we the other.
std::string WhyHeaderDiffers(const SafetensorsFile& file, const Receipt& receipt) {
  if (file.data_begin + receipt.data_bytes() != receipt.file->bytes)
    return "its data section is not where the receipt has it";
  if (file.tensors.size() != receipt.tensors.size()) {
    return fmt::format("{} tensors, the receipt has {}", file.tensors.size(),
                       receipt.tensors.size());
  }
  std::map<std::string_view, const SafetensorsTensor*> by_key;
  for (const SafetensorsTensor& tensor : file.tensors) by_key.emplace(tensor.key, &tensor);
  for (const SavedBox& box : receipt.tensors) {
    const auto found = by_key.find(box.key);
    const bool same = found != by_key.end() && found->second->dtype == box.dtype &&
                      found->second->shape == box.extent && found->second->begin == box.begin &&
                      found->second->end == box.end;
    if (!same)
      return fmt::format("tensor '{}' is not what the receipt says", box.key.substr(0, 200));
  }
  return "";
}

std::vector<WantedTensor> WantedBy(const StateView& state) {
  std::vector<WantedTensor> wanted;
  wanted.reserve(state.regions.size());
  for (const Region& region : state.regions)
    wanted.push_back({region.name, region.dtype, region.global});
  return wanted;
}

Box BoxOf(const Region& region) { return {OffsetOf(region), region.extent}; }

std::string Names(const std::vector<std::string>& names) {
  constexpr size_t kShown = 20;
  const size_t shown = std::min(names.size(), kShown);
  std::string text = fmt::format(
      "{}", fmt::join(names.begin(), names.begin() + static_cast<int64_t>(shown), ", "));
  if (names.size() > shown) text += fmt::format(" and {} more", names.size() - shown);
  return text;
}

}  // namespace

// A stretch of a shard that goes into a region.
struct CheckpointReader::Demand {
  uint64_t base = 0;            // of the saved box in the file
  uint64_t begin = 0, end = 0;  // in the file
  BoxWalker runs;
  std::byte* target = nullptr;
  WidenFunction widen = nullptr;             // where the target's type is another
  uint64_t element = 1, target_element = 1;  // bytes, with `widen`

  // Copies what the file's bytes [from, from + block) hold of it.
  void Take(uint64_t from, std::span<const std::byte> block) {
    const uint64_t until = from + block.size();
    for (; !runs.done(); runs.Next()) {
      const BoxStretch run = runs.stretch();
      const uint64_t first = std::max(base + run.from, from);
      const uint64_t last = std::min(base + run.from + run.bytes, until);
      if (first < last) {
        const uint64_t to = run.to + (first - base - run.from);
        const std::byte* source = block.data() + (first - from);
        if (widen != nullptr) {
          widen(source, target + to / element * target_element, (last - first) / element);
        } else {
          std::memcpy(target + to, source, last - first);
        }
      }
      if (base + run.from + run.bytes > until) return;
    }
  }
};

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

absl::Status CheckFiles(const std::string& folder, const Manifest& manifest,
                        std::optional<absl::Duration> wait) {
  LateNames late(WaitFor(folder, wait));
  for (const ReceiptEntry& entry : manifest.receipts) {
    OUTLAST_ASSIGN_OR_RETURN(const std::string text, ReadReceipt(folder, entry, late));
    const auto receipt = ParseReceiptWithoutTensors(text);
    if (!receipt.ok()) return Annotate(receipt.status(), folder + "/" + entry.name);
    OUTLAST_RETURN_IF_ERROR(CheckSameSave(folder, manifest, entry, *receipt));
    OUTLAST_RETURN_IF_ERROR(CheckShardSize(folder, *receipt, late));
  }
  return absl::OkStatus();
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

std::string EncodeHead(std::string_view manifest, std::span<const std::string> receipts) {
  PayloadWriter writer;
  writer.Text(manifest);
  for (const std::string& receipt : receipts) writer.Text(receipt);
  return writer.bytes();
}

absl::StatusOr<Receipt> ParseReceiptOf(const ReceiptEntry& entry, std::string_view text,
                                       const std::string& place) {
  OUTLAST_RETURN_IF_ERROR(CheckReceiptText(entry, text, place));
  auto receipt = ParseReceipt(text);
  if (!receipt.ok()) return Annotate(receipt.status(), place + "/" + entry.name);
  return receipt;
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

absl::StatusOr<MatchReport> CheckpointReader::ReadState(const StateView& state,
                                                        Strictness strictness, IoMode mode,
                                                        Widening widening) const {
  OUTLAST_RETURN_IF_ERROR(state.Validate());
  std::vector<const SavedTensor*> found;  // by region
  MatchReport report = Match(WantedBy(state), widening, found);
  if (strictness == Strictness::kStrict)
    OUTLAST_RETURN_IF_ERROR(report.ToStatus(manifest_.checkpoint));
  OUTLAST_RETURN_IF_ERROR(ReadTargets(TargetsOf(state.regions, found, widening), mode));
  return report;
}

std::vector<CheckpointReader::Target> CheckpointReader::TargetsOf(
    std::span<const Region> regions, std::span<const SavedTensor* const> found, Widening widening) {
  std::vector<Target> targets;
  targets.reserve(regions.size());
  for (size_t i = 0; i < regions.size(); ++i) {
    const Region& region = regions[i];
    if (found[i] != nullptr && Fits(*found[i], region.dtype, region.global, widening))
      targets.push_back({&region, found[i]});
  }
  return targets;
}

absl::Status CheckpointReader::ReadRegions(std::span<const Region> regions, IoMode mode,
                                           Widening widening) const {
  std::vector<const SavedTensor*> found;
  found.reserve(regions.size());
  for (const Region& region : regions) {
    const StateView alone{{region}, {}};
    OUTLAST_RETURN_IF_ERROR(alone.Validate());
    found.push_back(Find(region.name));
  }
  return ReadTargets(TargetsOf(regions, found, widening), mode);
}

absl::Status CheckpointReader::ReadRegion(const Region& region, IoMode mode) const {
  StateView state{{region}, {}};
  OUTLAST_RETURN_IF_ERROR(state.Validate());
  MatchReport report = Match(state);
  report.unexpected.clear();
  OUTLAST_RETURN_IF_ERROR(report.ToStatus(manifest_.checkpoint));
  const Target target{&state.regions.front(), Find(region.name)};
  return ReadTargets({&target, 1}, mode);
}

// Adds what `common` of a part needs. Slices that lie so far apart that whole chunks lie between
// are demanded apart: those chunks are not read.
absl::Status CheckpointReader::AddDemands(const SavedTensor& saved, const SavedTensor::Part& part,
                                          const Region& region, const Box& common,
                                          std::vector<Demand>& demands) const {
  BoxWalker runs(saved.dtype, part.box, BoxOf(region), IsPacked(region) ? Shape() : region.strides,
                 &common);
  if (!runs.is_valid()) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "tensor '{}': a box of {} that ends inside a byte", saved.name,
                 NameOf(saved.dtype));
  }
  if (runs.done()) return absl::OkStatus();
  const Receipt& receipt = receipts_[part.rank];
  const uint64_t chunk = receipt.file->chunk_bytes;
  const uint64_t begin = runs.stretch().from, end = runs.end();
  int outer = 0;
  while (outer < common.extent.rank() && common.extent[outer] == 1) ++outer;
  if (outer < common.extent.rank() && end - begin > 2 * chunk) {
    Box slice = common;
    slice.extent.set(outer, 1);
    const BoxWalker first(saved.dtype, part.box, slice, {}, &slice);
    Box second = slice;
    second.offset.set(outer, slice.offset[outer] + 1);
    const BoxWalker next(saved.dtype, part.box, second, {}, &second);
    if (first.is_valid() && next.is_valid() && next.stretch().from >= first.end() + chunk) {
      for (int64_t i = 0; i < common.extent[outer]; ++i) {
        slice.offset.set(outer, common.offset[outer] + i);
        OUTLAST_RETURN_IF_ERROR(AddDemands(saved, part, region, slice, demands));
      }
      return absl::OkStatus();
    }
  }
  const uint64_t base = receipt.file->bytes - receipt.data_bytes() + part.begin;
  Demand demand{base, base + begin, base + end, std::move(runs), region.bytes.data()};
  if (region.dtype != saved.dtype) {
    demand.widen = WidenerOf(saved.dtype, region.dtype);
    demand.element = static_cast<uint64_t>(BitsOf(saved.dtype)) / 8;
    demand.target_element = static_cast<uint64_t>(BitsOf(region.dtype)) / 8;
    if (base % demand.element != 0 || chunk % demand.element != 0) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "tensor '{}': begins at byte {}, not a multiple of its element's {}", saved.name,
                   base, demand.element);
    }
  }
  demands.push_back(std::move(demand));
  return absl::OkStatus();
}

// The blocks of whole chunks that hold what is demanded, and no others: from the chunk of the first
// byte still wanted, on over chunks wanted without a gap, `block_bytes` at most.
std::vector<Stretch> CheckpointReader::BlocksOf(std::span<Demand* const> demands,
                                                uint64_t chunk_bytes, uint64_t block_bytes,
                                                uint64_t file_bytes) {
  const auto round_up = [&](uint64_t byte) {
    return (byte + chunk_bytes - 1) / chunk_bytes * chunk_bytes;
  };
  std::vector<Stretch> blocks;
  uint64_t position = 0, wanted = 0;  // all before `position` is in a block or not demanded
  for (size_t next = 0; next < demands.size() || position < wanted;) {
    if (position >= wanted) {
      position = std::max(position, demands[next]->begin / chunk_bytes * chunk_bytes);
      wanted = demands[next++]->end;
    }
    const uint64_t limit = std::min(file_bytes, position + block_bytes);
    while (next < demands.size() && demands[next]->begin < limit &&
           demands[next]->begin <= round_up(wanted)) {
      wanted = std::max(wanted, demands[next++]->end);
    }
    const uint64_t until = std::min(limit, round_up(wanted));
    if (until > position) blocks.push_back({position, until});
    position = until;
  }
  return blocks;
}

// What is wanted of one shard, served by its blocks in turn.
class CheckpointReader::FileDemands {
 public:
  FileDemands(uint32_t rank, const ShardFile& file, std::span<Demand> all)
      : rank_(rank), file_(&file) {
    demands_.reserve(all.size());
    for (Demand& demand : all) demands_.push_back(&demand);
    std::ranges::sort(demands_, {}, &Demand::begin);
  }

  uint32_t rank() const { return rank_; }
  const ShardFile& file() const { return *file_; }
  std::vector<Stretch> Blocks() const {
    return BlocksOf(demands_, file_->chunk_bytes, BlockBytes(*file_), file_->bytes);
  }
  void Take(const Stretch& stretch, std::span<const std::byte> block) {
    while (next_ < demands_.size() && demands_[next_]->begin < stretch.end) ++next_;
    for (size_t i = first_; i < next_; ++i) demands_[i]->Take(stretch.begin, block);
    while (first_ < next_ && demands_[first_]->runs.done()) ++first_;
  }

 private:
  uint32_t rank_;
  const ShardFile* file_;
  std::vector<Demand*> demands_;
  size_t first_ = 0;  // all before are done
  size_t next_ = 0;   // all from here on begin later
};

absl::Status CheckpointReader::ReadFile(FileDemands& demands, IoMode mode) const {
  const ShardFile& file = demands.file();
  LateNames late(wait_);
  late.Await(folder_, [&] { return FileBytes(folder_ + "/" + file.name); }).IgnoreError();
  const auto reader = ChunkReader::Open(folder_, file, mode);
  if (!reader.ok()) return LostFile(reader.status());
  const std::vector<Stretch> blocks = demands.Blocks();
  OUTLAST_RETURN_IF_ERROR((*reader)->Start(blocks));
  for (const Stretch& stretch : blocks) {
    OUTLAST_ASSIGN_OR_RETURN(const std::span<const std::byte> block, (*reader)->Next());
    bytes_read_.fetch_add(block.size(), std::memory_order_relaxed);
    demands.Take(stretch, block);
  }
  return absl::OkStatus();
}

// Blocks of all shards in one row: what is far away answers late, so that many are asked for at
// once, also where each shard has only a little.
absl::Status CheckpointReader::ReadFromSource(std::span<FileDemands> files) const {
  std::vector<Stretch> blocks;
  for (uint32_t i = 0; i < files.size(); ++i) {
    for (Stretch& block : files[i].Blocks()) {
      block.file = i;
      blocks.push_back(block);
    }
  }
  const auto fill = [&](const Stretch& stretch, std::byte* into) {
    return source_->Read(files[stretch.file].rank(), stretch.begin,
                         {into, stretch.end - stretch.begin});
  };
  OUTLAST_ASSIGN_OR_RETURN(const auto ahead, ReadAhead::StartIn(source_->memory(), blocks, fill));
  for (const Stretch& stretch : blocks) {
    OUTLAST_ASSIGN_OR_RETURN(const std::span<const std::byte> block, ahead->Next());
    FileDemands& file = files[stretch.file];
    OUTLAST_RETURN_IF_ERROR(
        CheckChunks(folder_ + "/" + file.file().name, file.file(), stretch.begin, block));
    bytes_read_.fetch_add(block.size(), std::memory_order_relaxed);
    file.Take(stretch, block);
  }
  return absl::OkStatus();
}

absl::Status CheckpointReader::ReadTargets(std::span<const Target> targets, IoMode mode) const {
  std::vector<size_t> parts(receipts_.size());
  for (const Target& target : targets) {
    for (const SavedTensor::Part& part : target.saved->parts) ++parts[part.rank];
  }
  std::vector<std::vector<Demand>> by_rank(receipts_.size());
  for (size_t rank = 0; rank < parts.size(); ++rank) by_rank[rank].reserve(parts[rank]);
  for (const Target& target : targets) {
    const Region& region = *target.region;
    const SavedTensor& saved = *target.saved;
    uint64_t covered = 0;
    for (const SavedTensor::Part& part : saved.parts) {
      const Box common = Intersect(part.box, BoxOf(region));
      const auto bytes = BytesOf(saved.dtype, common.extent);
      if (bytes.ok()) covered += *bytes;
      OUTLAST_RETURN_IF_ERROR(AddDemands(saved, part, region, common, by_rank[part.rank]));
    }
    OUTLAST_ASSIGN_OR_RETURN(const uint64_t wanted, BytesOf(saved.dtype, region.extent));
    if (covered != wanted) {
      return Error(absl::StatusCode::kDataLoss,
                   "{}: tensor '{}': the saved boxes hold {} of the {} bytes wanted", folder_,
                   saved.name, covered, wanted);
    }
  }
  std::vector<FileDemands> files;
  for (uint32_t rank = 0; rank < by_rank.size(); ++rank) {
    if (!by_rank[rank].empty()) files.emplace_back(rank, *receipts_[rank].file, by_rank[rank]);
  }
  if (source_ != nullptr) return ReadFromSource(files);
  for (FileDemands& file : files) OUTLAST_RETURN_IF_ERROR(ReadFile(file, mode));
  return absl::OkStatus();
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

absl::Status StreamShard(const std::string& folder, const ShardFile& file,
                         const std::function<absl::Status(std::span<const std::byte>)>& take) {
  const auto reader = ChunkReader::Open(folder, file, IoMode::kDirect);
  if (!reader.ok()) return LostFile(reader.status());
  const std::vector<Stretch> blocks = (*reader)->AllBlocks();
  OUTLAST_RETURN_IF_ERROR((*reader)->Start(blocks));
  for (size_t i = 0; i < blocks.size(); ++i) {
    OUTLAST_ASSIGN_OR_RETURN(const std::span<const std::byte> block, (*reader)->Next());
    OUTLAST_RETURN_IF_ERROR(take(block));
  }
  return absl::OkStatus();
}

std::vector<Damage> VerifyShard(const std::string& folder, const Receipt& receipt, IoMode mode,
                                const OnBytes& on_bytes) {
  std::vector<Damage> damages;
  if (!receipt.file.has_value()) return damages;
  const ShardFile& file = *receipt.file;
  const auto add = [&](uint64_t offset, std::string_view message) {
    damages.push_back({file.name, offset, std::string(message)});
  };
  const auto reader = ChunkReader::Open(folder, file, mode);
  if (!reader.ok()) return add(0, MessageOf(reader.status())), damages;
  const std::vector<Stretch> blocks = (*reader)->AllBlocks();
  const absl::Status started = (*reader)->Start(blocks);
  if (!started.ok()) return add(0, MessageOf(started)), damages;
  for (const Stretch& block : blocks) {
    if (on_bytes) on_bytes(block.end - block.begin);
    if ((*reader)->Next().ok()) continue;
    // Once more, so that each bad chunk of the block is named.
    (*reader)->ReadEach(block, [&](uint64_t offset, const absl::Status& status) {
      add(offset, MessageOf(status));
    });
  }
  const auto header = ReadSafetensors(folder + "/" + file.name);
  if (!header.ok()) return add(0, MessageOf(header.status())), damages;
  const std::string why = WhyHeaderDiffers(*header, receipt);
  if (!why.empty()) add(0, fmt::format("{}/{}: {}", folder, file.name, why));
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
