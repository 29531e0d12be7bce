// A rank's state with its snapshot buffers, and what its figures are measured against.
#pragma once

#include <sched.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "checkpoint/persist.h"
#include "checkpoint/root.h"
#include "checkpoint/seal_table.h"
#include "checkpoint/snapshotter.h"
#include "outlast/base/memory.h"

namespace outlast::bench {

inline constexpr size_t kMiB = size_t{1} << 20;

// Equal tensors of F32 in memory of their own, filled with bytes that no file system or device can
// shorten.
class State {
 public:
  static absl::StatusOr<State> Make(size_t bytes, size_t tensors);

  StateView View() const;
  std::span<std::byte> bytes() const { return memory_.bytes(); }

 private:
  std::vector<std::string> names_;
  Mapping memory_;
};

// A world of one rank: its state, two snapshot buffers and what fills them. What a job does once,
// the plan and the buffers, is done when it is made.
class Rank {
 public:
  static absl::StatusOr<std::unique_ptr<Rank>> Make(size_t bytes, size_t tensors = 1);

  const StateView& view() const { return view_; }
  std::span<const std::byte> bytes() const { return state_.bytes(); }
  const Id128& run() const { return run_; }

  // Copies and seals the state as a snapshot of the next step, and returns the time in seconds.
  absl::StatusOr<double> Seal();
  // Copies the last snapshot back into the state, each chunk verified. Seconds.
  absl::StatusOr<double> RestoreFromBuffer();
  // Makes it a checkpoint.
  absl::StatusOr<PersistResult> Save(Root& root);
  // Reads a checkpoint back into the state. Seconds.
  absl::StatusOr<double> RestoreFromDisk(const std::string& folder);

 private:
  struct Found {
    int buffer = 0;
    uint32_t turn = 0;
  };
  absl::Status MakeBuffers();
  absl::StatusOr<Found> FindLast() const;

  const Id128 run_ = Id128::Random();
  State state_;
  StateView view_;
  Assignment assignment_;
  std::unique_ptr<SealTable> table_;
  std::vector<Buffer> buffers_;  // as the agent has them
  int64_t step_ = 0;
  std::optional<std::string> parent_;
  std::unique_ptr<Snapshotter> snapshotter_;
};

// A root of a run that holds it.
absl::StatusOr<std::unique_ptr<Root>> OpenRoot(const std::string& folder, const Id128& run);

// This thread and those that it starts share one processor, so that both sides of a comparison have
// the same.
class OneProcessor {
 public:
  OneProcessor();
  ~OneProcessor();

 private:
  cpu_set_t before_;
};

// Of this process.
double ProcessorSeconds();

// GB/s of fio with O_DIRECT and blocks of 8 MiB, one at a time: of writing a new file, its fsync
// included, and of reading `file`. None: fio failed, or is not there.
std::optional<double> FioWrite(const std::string& folder, size_t bytes);
std::optional<double> FioRead(const std::string& folder, const std::string& file);

// What is read next comes from the disk.
void ForgetPages(const std::string& folder);

}  // namespace outlast::bench
