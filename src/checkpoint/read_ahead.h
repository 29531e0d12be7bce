// Reads a file ahead of the one who uses it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "outlast/base/memory.h"
#include "outlast/base/mutex.h"

namespace outlast {

// Bytes [begin, end) of a file; `file` is the caller's, where it reads several.
struct Stretch {
  uint64_t begin = 0, end = 0;
  uint32_t file = 0;
  bool operator==(const Stretch&) const = default;
};

// Reads stretches in turn, some of them before they are asked for: the disk works while its last
// bytes are checked and copied. For one thread; two of its own read, or more of a store far away.
class ReadAhead {
 public:
  // Puts a stretch at `into`, where there is room up to the next multiple of kBlockAlignment.
  // Called on several threads at once, in the order of the stretches.
  using Fill = std::function<absl::Status(const Stretch& stretch, std::byte* into)>;

  // Holds as many of the longest stretch as `memory_bytes` has room for, but at least two: one is
  // read while another is in use. A single stretch is read when it is asked for, without a thread.
  static absl::StatusOr<std::unique_ptr<ReadAhead>> Start(std::vector<Stretch> stretches,
                                                          uint64_t memory_bytes, Fill fill);
  // The same in memory that is there already, borrowed, with a reader for each stretch that it has
  // room for. kInvalidArgument: there is none for one.
  static absl::StatusOr<std::unique_ptr<ReadAhead>> StartIn(std::span<std::byte> memory,
                                                            std::vector<Stretch> stretches,
                                                            Fill fill);
  // Waits for the reads that are running, and begins no other.
  ~ReadAhead();
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // The bytes of the next stretch, until the next call. An error is this stretch's alone: those
  // behind it can still be asked for. At most one call for each stretch.
  absl::StatusOr<std::span<const std::byte>> Next();

 private:
  ReadAhead(std::vector<Stretch> stretches, Fill fill, Mapping own, std::span<std::byte> memory,
            size_t slots, size_t readers);
  void ReadLoop();
  std::optional<size_t> AwaitRoom();  // the stretch to read; none: no more
  absl::Status AwaitFilled(size_t index);
  std::byte* MemoryOf(size_t index) const {
    return memory_.data() + index % slots_ * (memory_.size() / slots_);
  }

  const std::vector<Stretch> stretches_;
  const Fill fill_;
  const Mapping own_;  // empty: `memory_` is borrowed
  const std::span<std::byte> memory_;
  const size_t slots_;  // stretch i is in slot i modulo their number
  size_t next_ = 0;     // stretch to hand out
  Mutex mutex_;
  CondVar changed_;
  std::vector<std::optional<absl::Status>> filled_ ABSL_GUARDED_BY(mutex_);  // by slot
  size_t begun_ ABSL_GUARDED_BY(mutex_) = 0;       // stretches, by a reader
  size_t given_back_ ABSL_GUARDED_BY(mutex_) = 0;  // stretches that nobody looks at any more
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> readers_;
};

}  // namespace outlast
