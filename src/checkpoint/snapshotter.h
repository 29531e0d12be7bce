// Copies a rank's state into a buffer under its forward and backward pass, and back out of one.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/copy_plan.h"
#include "checkpoint/plan.h"
#include "checkpoint/region_chunks.h"
#include "checkpoint/seal_table.h"
#include "outlast/base/id.h"
#include "outlast/base/mutex.h"
#include "outlast/blackbox/buffer.h"
#include "outlast/checkpoint/state.h"

namespace outlast {

// Extras as a buffer holds them: u32 count, then key and value as u32 length and bytes each.
// kDataLoss: cut.
absl::StatusOr<Extras> ParseExtras(std::span<const std::byte> bytes);

// Regions up to this size are copied in the save call itself, whatever their kind: scalars,
// counters, small statistics.
inline constexpr uint64_t kEagerBytes = 64 << 10;

// One a rank. One trainer thread calls; one copier thread of its own works for it.
class Snapshotter {
 public:
  struct Options {
    Id128 job_id, run_id;
    uint32_t rank = 0, world = 1;
    absl::Duration stall_limit = absl::Seconds(8);
    // True once the generation is being unwound: what is filling then is never sealed.
    std::function<bool(uint64_t generation)> is_aborted;
    // A snapshot that the disk wants was sealed and pinned. On the thread that finished it.
    std::function<void(int64_t step, uint64_t generation, int buffer, uint32_t turn, bool last)>
        on_wanted_sealed;
    // One that the disk wants is none for it: it has ended unsealed, or only memory gets it
    // (Request::may_be_left_out). Each that began ends in one of these two. On either thread.
    std::function<void(int64_t step, uint64_t generation)> on_wanted_skipped = [](int64_t,
                                                                                  uint64_t) {};
    // One for memory alone was. On the same thread.
    std::function<void(uint64_t generation)> on_memory_sealed = [](uint64_t) {};
    // Somebody wrote to a stable region while it was copied lazily: the snapshot has ended
    // unsealed. On the thread that copied its last chunk.
    std::function<void(int64_t step, uint64_t generation)> on_changed = [](int64_t, uint64_t) {};
    // How much of a lazy copy is compared with its source before it is sealed. kSample: four random
    // chunks of one snapshot in four (a MiB takes 50 us).
    enum class Recheck : uint8_t { kSample, kAll };
#ifdef NDEBUG
    Recheck recheck = Recheck::kSample;
#else
    Recheck recheck = Recheck::kAll;
#endif
  };
  // `table` and the buffers are the slot's own, made by the keeper.
  static absl::StatusOr<std::unique_ptr<Snapshotter>> Make(Options options, SealTable& table,
                                                           std::vector<Buffer> buffers,
                                                           Assignment assignment,
                                                           const StateView& state);
  ~Snapshotter();

  enum class Want : uint8_t { kMemory, kDisk, kDiskLast };
  enum class Mode : uint8_t { kLazy, kEager };
  struct Request {
    int64_t step = 0;
    uint64_t generation = 0;
    uint64_t update_stamp = 0;
    Want want = Want::kMemory;
    Mode mode = Mode::kLazy;
    // kDisk: only memory gets it while a former one is on its way to the disk.
    bool may_be_left_out = false;
  };
  // Begins a snapshot (kEager: and ends it). False: no buffer is free. The running one must have
  // been finished or given up.
  absl::StatusOr<bool> Begin(const Request& request, const StateView& state);
  // Returns when nothing of the trainer's memory is needed any more. True: the last one begun is
  // sealed; false: it was given up (abort, stall limit), or there was none.
  bool Finish();
  // The number of a region by its name, for the two below. nullopt: the state has none of it.
  std::optional<uint32_t> RegionOf(std::string_view name) const;
  // The region is about to change, and what shares memory with it. True: nothing of the trainer's
  // memory is needed there any more.
  bool Announce(uint32_t region);
  // Returns when that is so, or when the stall limit has passed (the snapshot is never sealed
  // then).
  void FinishRegion(uint32_t region);
  // Ends a running snapshot without sealing it.
  void GiveUp();
  bool is_running() const;

  // Makes `state` hold a sealed snapshot; no byte counts as restored before its CRC was checked.
  // kDataLoss: a chunk of the snapshot does not match, with its number and CRCs.
  absl::Status Restore(int buffer, uint32_t turn, const StateView& state, Belief belief);
  // Writes the chunks of a sealed snapshot that its table does not match anew, from a `state` that
  // holds it (a replica served it). kDataLoss: the state is another.
  absl::Status Mend(int buffer, uint32_t turn, const StateView& state);

  // A free buffer as room for something else than a snapshot; it is free again when this goes.
  class Borrowed {
   public:
    Borrowed(const Buffer& buffer, int index, uint32_t turn)
        : buffer_(&buffer), index_(index), turn_(turn) {}
    Borrowed(Borrowed&& other) noexcept
        : buffer_(std::exchange(other.buffer_, nullptr)),
          index_(other.index_),
          turn_(other.turn_) {}
    Borrowed& operator=(Borrowed&& other) noexcept {
      std::swap(buffer_, other.buffer_);
      std::swap(index_, other.index_);
      std::swap(turn_, other.turn_);
      return *this;
    }
    ~Borrowed() {
      if (buffer_ != nullptr) buffer_->control().Abandon(turn_);
    }
    const Buffer& buffer() const { return *buffer_; }
    int index() const { return index_; }

   private:
    const Buffer* buffer_;
    int index_;
    uint32_t turn_;
  };
  // nullopt: none is free. No snapshot may be running.
  std::optional<Borrowed> Borrow();

  // A buffer would be free if all other ranks were known to hold what this one does.
  bool awaits_others() const;

  // The extras of a sealed snapshot.
  absl::StatusOr<Extras> ReadExtras(int buffer) const;

  uint64_t layout_hash() const { return assignment_.layout_hash; }
  int64_t sealed() const { return sealed_.load(std::memory_order_relaxed); }

 private:
  enum class ChunkState : uint8_t { kFree, kTaken, kDone };
  Snapshotter(Options options, SealTable& table, std::vector<Buffer> buffers, Assignment assignment,
              CopyPlan plan, const StateView& state);
  struct Running {
    Request request;
    int buffer = 0;
    uint32_t turn = 0;
    uint32_t extra_bytes = 0;
    std::vector<std::span<const std::byte>> sources;  // by region
  };
  void CopierLoop();
  void CopyChunks();
  void CopyIfFree(uint32_t chunk);
  std::span<const uint32_t> ChunksOf(uint32_t region);
  uint32_t CopyChunk(const Running& running, uint32_t chunk);
  void Complete();
  bool IsSourceUnchanged();
  std::vector<uint32_t> DrawRechecked() const;
  bool HoldsSourceOf(uint32_t chunk) const;
  void TellSkippedIfWanted() const;
  // A snapshot that was sealed for the disk is not there yet.
  bool is_being_saved() const;
  std::optional<int> PickFree(uint32_t* turn);
  absl::StatusOr<uint32_t> PutExtras(const Extras& extras, Buffer& buffer);
  void SetHeld(int buffer, int64_t step);

  const Options options_;
  SealTable& table_;
  std::vector<Buffer> buffers_;
  const Assignment assignment_;
  const CopyPlan plan_;
  const std::map<std::string, uint32_t, std::less<>> region_of_name_;
  const std::vector<bool> eager_;          // by region
  HeldSteps held_;                         // the trainer's thread and Complete, never at once
  std::optional<RegionChunks> of_memory_;  // the trainer's thread
  // of_memory_ is of the running snapshot: looked at once for each, not by each region.
  bool memory_is_known_ = false;

  Running running_;  // stable while chunks are handed out
  std::vector<std::atomic<ChunkState>> chunks_;
  std::atomic<uint32_t> next_chunk_{0};
  std::atomic<uint32_t> chunks_done_{0};
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> is_void_{false};  // chunks were left out after an abort
  std::atomic<int64_t> sealed_{0};

  mutable Mutex mutex_;
  CondVar changed_;
  bool active_ ABSL_GUARDED_BY(mutex_) = false;  // a snapshot is being filled
  bool succeeded_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t serial_ ABSL_GUARDED_BY(mutex_) = 0;  // of the snapshot that the copier is to work on
  bool copier_busy_ ABSL_GUARDED_BY(mutex_) = false;
  // Chunks whose source may change before the seal, and whether the others are being compared.
  std::vector<bool> announced_ ABSL_GUARDED_BY(mutex_);
  bool rechecking_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread copier_;
};

}  // namespace outlast
