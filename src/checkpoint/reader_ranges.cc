#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "checkpoint/chunk_reader.h"
#include "checkpoint/read_ahead.h"
#include "checkpoint/reader.h"
#include "checkpoint/widen.h"
#include "store/late_names.h"

namespace outlast {
namespace {

Box BoxOf(const Region& region) { return {OffsetOf(region), region.extent}; }

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

}  // namespace outlast
