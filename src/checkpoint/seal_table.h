// Which snapshots the ranks of one machine hold, in memory that all of them share: a rank may
// overwrite a buffer only when it sees here that another step is common, or that this one never can
// be.
//
//   [header 64 B][one row of 128 B a rank]
//
// A row has one writer at a time: its rank, or the keeper while all ranks are quiet between two
// generations.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "outlast/base/memory.h"

namespace outlast {

inline constexpr int kMaxBuffers = 3;
inline constexpr int64_t kNoStep = -1;

// What one rank holds: by buffer, the step that is sealed there in this history, or kNoStep.
struct HeldSteps {
  std::array<int64_t, kMaxBuffers> step{kNoStep, kNoStep, kNoStep};
  int buffers = kMaxBuffers;
  // Of a rank on another machine, whose buffers are not told one by one: it is past all steps below
  // this one.
  int64_t passed = kNoStep;

  bool holds(int64_t wanted) const;
  int64_t newest() const;
};

// The newest step that all ranks hold; kNoStep when there is none.
int64_t CommonStep(std::span<const HeldSteps> ranks);

// The buffer of `rank` that the next snapshot may overwrite: a free one first, then the oldest that
// is older than the common step, or void (some rank holds a newer step without it). nullopt: none;
// the snapshot is skipped. `pinned[i]`: not now.
std::optional<int> PickBuffer(std::span<const HeldSteps> ranks, size_t rank,
                              const std::array<bool, kMaxBuffers>& pinned);

// The shared table. Safe for concurrent use as its row rule says.
class SealTable {
 public:
  static size_t BytesFor(int world);
  SealTable(Mapping mapping, int world) : mapping_(std::move(mapping)), world_(world) {}

  int world() const { return world_; }
  // A consistent copy of every row, and of one.
  std::vector<HeldSteps> Read() const;
  HeldSteps Read(int rank) const { return ReadRow(rank); }
  void Write(int rank, const HeldSteps& held);

  // A step that the keeper wants on disk (kNoStep: none): ranks that seal it say so. Written by the
  // keeper.
  int64_t wanted_step() const;
  void SetWantedStep(int64_t step);

  // Ranks of several machines: rows of ranks elsewhere come late, with the keepers' word, and so
  // does the cadence, which counts in due snapshots then. Written by the keeper.
  bool is_led() const;
  void SetLed();

  // How often all ranks take a snapshot: from step `from` on, each step that `every` divides.
  // Written by rank 0; of several machines by the keeper, where each due snapshot's number counts,
  // not its step, and `from` does not.
  struct Cadence {
    int64_t from = 0;
    int64_t every = 1;
  };
  Cadence cadence() const;
  void SetCadence(const Cadence& cadence);

 private:
  struct Header {
    int64_t wanted_step_plus_one;  // 0: none, so that zeroed memory means nothing
    uint64_t cadence;              // from << 16 | every; 0: each step
    uint64_t led;
    std::byte reserved[40];
  };
  struct Row {
    uint64_t sequence;  // odd while it is written
    uint64_t buffers;
    std::array<int64_t, kMaxBuffers> step_plus_one;
    int64_t passed_plus_one;
    std::byte reserved[80];
  };
  static_assert(sizeof(Header) == 64 && sizeof(Row) == 128);
  Header& header() const { return *reinterpret_cast<Header*>(mapping_.data()); }
  Row& row(int rank) const {
    return reinterpret_cast<Row*>(mapping_.data() + sizeof(Header))[rank];
  }
  HeldSteps ReadRow(int rank) const;

  Mapping mapping_;
  int world_;
};

}  // namespace outlast
