// Reads a committed checkpoint: into any layout of boxes, and no byte before its checksum was
// checked.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/name_index.h"
#include "checkpoint/checkpoint_files.h"
#include "checkpoint/manifest.h"
#include "checkpoint/plan.h"
#include "checkpoint/read_ahead.h"
#include "outlast/checkpoint/restore.h"
#include "outlast/checkpoint/state.h"
#include "store/folder.h"

namespace outlast {

// A tensor as the checkpoint holds it.
struct SavedTensor {
  std::string name;
  DType dtype = DType::kF32;
  Shape global;
  struct Part {
    uint32_t rank = 0;  // whose shard
    Box box;
    uint64_t begin = 0, end = 0;  // in that shard's data section
  };
  std::span<const Part> parts;  // disjoint; borrowed from the reader
};

// A tensor that some rank of a job expects.
struct WantedTensor {
  std::string_view name;
  DType dtype = DType::kF32;
  Shape global;
};
// By region.
std::vector<WantedTensor> WantedBy(const StateView& state);

// One report for all ranks: what any rank misses or mismatches, and what no rank expects.
MatchReport MergeReports(std::span<const MatchReport> ranks);

// Where the bytes of shards come from that lie in no folder which this process may read.
class ShardSource {
 public:
  virtual ~ShardSource() = default;

  // Puts the bytes from `offset` on of `rank`'s shard at `into`, which lies in memory(). Called on
  // several threads at once. kDataLoss: the shard is gone, or ends before.
  virtual absl::Status Read(uint32_t rank, uint64_t offset, std::span<std::byte> into) = 0;
  // All that may be read into at once: as much as there is, or a few blocks of it.
  virtual std::span<std::byte> memory() = 0;
};

// One opened checkpoint. Safe for concurrent use: every call reads with its own descriptor, scratch
// memory (16 MiB at most, for chunks of 1 MiB) and two threads that read ahead. But where a
// ShardSource has the bytes, one thread at a time reads.
class CheckpointReader {
 public:
  // Reads manifest and receipts of folder root/checkpoint, and checks all sizes and self CRCs. No
  // shard is read. kNotFound: no manifest, or DELETED lies there. kDataLoss: torn or cut files,
  // named. kInvalidArgument: content that no writer of ours makes, such as a name that leaves the
  // folder. kUnimplemented: written by a newer program, by its version.
  // A name that must be there and is not is looked for again, for `wait` in all, by default as long
  // as the folder's file system may be late.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> Open(
      const std::string& folder, std::optional<absl::Duration> wait = std::nullopt);

  // Of a checkpoint whose files are elsewhere: what its head (EncodeHead) says, checked as by Open,
  // and `place` for messages. No shard can be read without a source.
  static absl::StatusOr<std::unique_ptr<CheckpointReader>> Of(
      std::string place, std::string_view head, std::unique_ptr<ShardSource> source = nullptr);

  const std::string& folder() const { return folder_; }
  const Manifest& manifest() const { return manifest_; }
  const std::vector<Receipt>& receipts() const { return receipts_; }  // by rank
  std::span<const SavedTensor> tensors() const { return tensors_; }   // by name
  // Name and the name that it stands for; by name.
  std::span<const std::pair<std::string, std::string>> aliases() const { return aliases_; }
  // The saved tensor of a name or an alias; null: none.
  const SavedTensor* Find(std::string_view name) const;

  MatchReport Match(const StateView& state, Widening widening = Widening::kRefuse) const;
  // Against what all ranks of a job expect together. Names may repeat.
  MatchReport Match(std::span<const WantedTensor> wanted,
                    Widening widening = Widening::kRefuse) const;

  // Reads the regions of `state`, each in its own box: any world from any world. Nothing is touched
  // before names, dtypes and shapes matched, and only checked bytes are copied; after kDataLoss,
  // which names file, offset, and found and wanted CRC, a part of the state may hold this step's
  // bytes already, so that another source must be read over it. kInvalidArgument: the three lists
  // (kStrict). The report of what was left out comes back otherwise.
  absl::StatusOr<MatchReport> ReadState(const StateView& state,
                                        Strictness strictness = Strictness::kStrict,
                                        IoMode mode = IoMode::kDirect,
                                        Widening widening = Widening::kRefuse) const;

  // The same of regions that may be of one tensor; what the checkpoint lacks is left out.
  absl::Status ReadRegions(std::span<const Region> regions, IoMode mode = IoMode::kDirect,
                           Widening widening = Widening::kRefuse) const;

  // One region, by the same rules; it must be there.
  absl::Status ReadRegion(const Region& region, IoMode mode = IoMode::kDirect) const;

  // The extras that `rank` of the saved world put there. kNotFound: no such rank.
  absl::StatusOr<Extras> ExtrasOf(uint32_t rank) const;

  // Bytes of shards that the reads so far took from files: whole chunks of those that hold a wanted
  // byte, and no others.
  uint64_t bytes_read() const { return bytes_read_.load(std::memory_order_relaxed); }

  // Reads every byte and checks it, and each shard's own header against its receipt. Ranks are
  // independent: VerifyRank may run on many threads.
  std::vector<Damage> Verify(IoMode mode = IoMode::kDirect) const;
  std::vector<Damage> VerifyRank(uint32_t rank, IoMode mode = IoMode::kDirect) const;

 private:
  struct Demand;
  struct Target {
    const Region* region;
    const SavedTensor* saved;
  };
  CheckpointReader() = default;
  static bool Fits(const SavedTensor& saved, DType dtype, const Shape& global, Widening widening);
  MatchReport Match(std::span<const WantedTensor> wanted, Widening widening,
                    std::vector<const SavedTensor*>& found) const;
  absl::Status Load();
  absl::Status Index();
  absl::Status IndexTensors();
  absl::Status AddDemands(const SavedTensor& saved, const SavedTensor::Part& part,
                          const Region& region, const Box& common,
                          std::vector<Demand>& demands) const;
  static std::vector<Stretch> BlocksOf(std::span<Demand* const> demands, uint64_t chunk_bytes,
                                       uint64_t block_bytes, uint64_t file_bytes);
  class FileDemands;
  absl::Status ReadFile(FileDemands& demands, IoMode mode) const;
  absl::Status ReadFromSource(std::span<FileDemands> files) const;
  static std::vector<Target> TargetsOf(std::span<const Region> regions,
                                       std::span<const SavedTensor* const> found,
                                       Widening widening);
  absl::Status ReadTargets(std::span<const Target> targets, IoMode mode) const;

  mutable std::atomic<uint64_t> bytes_read_{0};
  std::string folder_;
  absl::Duration wait_;
  std::unique_ptr<ShardSource> source_;  // null: the folder
  Manifest manifest_;
  std::vector<Receipt> receipts_;
  std::vector<SavedTensor> tensors_;  // by name
  std::vector<SavedTensor::Part> parts_;
  std::vector<std::pair<std::string, std::string>> aliases_;  // by name
  NameIndex names_;                                           // of tensors_, then of aliases_
  std::vector<const SavedTensor*> aliased_;                   // by alias
};

// Every damage of a checkpoint folder, whatever it is, sizes and manifest included. Empty: whole.
// `wait` as by CheckpointReader::Open.
std::vector<Damage> VerifyCheckpoint(const std::string& folder, IoMode mode = IoMode::kDirect,
                                     const OnBytes& on_bytes = {},
                                     std::optional<absl::Duration> wait = std::nullopt);

}  // namespace outlast
