// Who writes what. Pure and deterministic: every rank computes the same plan from the same table,
// and only digests are compared.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "checkpoint/safetensors.h"
#include "outlast/base/digest.h"
#include "outlast/checkpoint/dtype.h"
#include "outlast/checkpoint/state.h"

namespace outlast {

// A box of a tensor, in elements.
struct Box {
  Shape offset, extent;
  friend bool operator==(const Box&, const Box&) = default;
};

// A box, and the ranks that hold it: `count` of them from `rank` on, each `step` after the former.
// So one axis of a mesh is one entry.
struct HeldBox {
  uint32_t rank = 0;
  Box box;
  uint32_t count = 1, step = 1;

  uint64_t last_rank() const { return rank + uint64_t{count - 1} * step; }
  bool is_held_by(uint32_t who) const {
    return who >= rank && (who - rank) % step == 0 && (who - rank) / step < count;
  }
};

// One tensor of the job. No boxes: every rank holds the whole tensor. Ranks that hold the same box
// are its replicas.
struct TensorRow {
  std::string name;
  DType dtype = DType::kF32;
  Shape global;
  std::vector<HeldBox> boxes;
};

// The job's tensor table.
struct TensorTable {
  uint32_t world = 1;
  std::vector<TensorRow> rows;
};

// What one rank holds. Regions over the same memory with the same dtype and shape are stored once:
// the later name is an alias.
struct RankTable {
  std::vector<TensorRow> rows;  // each with one box; its rank is the holder
  std::vector<std::pair<std::string, std::string>> aliases;  // name, of
};
// kInvalidArgument: the state is not valid.
absl::StatusOr<RankTable> TableOfRank(const StateView& state, uint32_t rank);

// Makes the ranks' aliases agree: one that another rank holds as a tensor of its own, or as an
// alias of another, becomes a tensor again where it was one.
void SettleAliases(std::vector<RankTable>& ranks);

// The job's table from those of its ranks, by rank, whose aliases agree. Tensors that all ranks
// hold whole become rows without boxes, and equal boxes of evenly spaced ranks one entry.
// kInvalidArgument: one name with two dtypes or shapes, naming both ranks.
absl::StatusOr<TensorTable> MergeTables(std::span<const RankTable> ranks);

// The table of a job whose ranks all hold `rank`'s tensors whole (data parallel): nothing needs to
// be exchanged. kFailedPrecondition: a region is a part of its tensor.
absl::StatusOr<TensorTable> ReplicatedTable(const RankTable& rank, uint32_t world);

// A box that some rank writes.
struct PlannedPiece {
  uint32_t row = 0;  // in the plan's table
  uint32_t writer = 0;
  Box box;   // the piece
  Box held;  // the box of the holders that it is cut from
  uint64_t bytes = 0;
};

// A box in a rank's buffer: in the image if the rank writes it, else in the replicated part.
struct PlannedItem {
  SafetensorsBox
      box;   // begin and end: from the start of the data section, or of the replicated part
  Box held;  // the rank's own region of that name; `box` lies in it
  uint32_t writer = 0;
};

// What one rank puts into its buffer.
struct Assignment {
  uint32_t rank = 0;
  std::vector<PlannedItem> image;       // in file order
  std::vector<PlannedItem> replicated;  // what other ranks write of this rank's tensors, packed
                                        // without gaps in table order
  std::string header;                   // the file's first bytes; the image is header + data
  uint64_t data_bytes = 0;              // 0 with an empty `image`: the rank writes no file
  uint64_t replicated_bytes = 0;
  uint64_t layout_hash = 0;  // of header and region table

  uint64_t image_bytes() const {
    return header.size() + data_bytes;
  }  // the exact length of the file
};

struct Plan {
  TensorTable table;                 // rows by bytes, largest first, then by name
  std::vector<PlannedPiece> pieces;  // in table order
  std::vector<uint64_t> load;        // bytes by writer
  Sha256Digest digest{};             // of table and assignment
};

// Sharded boxes stay with their rank. A replicated one goes to the least loaded of its replicas,
// or, if it is larger than an eighth of the mean load, is cut at whole slices of its first long
// enough dimension into at most one piece a replica, such that the pieces level the load. Ties go
// to the lower rank. kInvalidArgument: a box that leaves its tensor; two different boxes that
// overlap, naming tensor and ranks; boxes that leave a part of a tensor uncovered; a world of 0.
absl::StatusOr<Plan> MakePlan(TensorTable table);

// The part of `rank`. kInvalidArgument: no such rank, or its header is larger than 64 MiB.
absl::StatusOr<Assignment> AssignmentOf(const Plan& plan, uint32_t rank);

// Same names, shapes and owners? Names the first tensor that differs, for the message of a save
// that was aborted.
std::string FirstDifference(const Plan& mine, const Plan& other);

// kInvalidArgument, naming two owners, if any two of `boxes` share an element. Boxes without
// elements share none.
absl::Status CheckDisjoint(std::string_view tensor, const Shape& global,
                           std::span<const HeldBox> boxes);

// The common part of two boxes of one tensor; an extent of 0 in some dimension if there is none.
Box Intersect(const Box& a, const Box& b);

// A contiguous stretch that two boxes of one tensor have in common.
struct BoxStretch {
  uint64_t from = 0;  // bytes from the start of the first box, which is packed
  uint64_t to = 0;    // bytes from the start of the second box's memory
  uint64_t bytes = 0;
};

// Walks the common part of two boxes as the fewest contiguous runs, in the order of the first.
// `from` grows.
class BoxWalker {
 public:
  // The boxes are of one tensor and inside it. is_valid() is false where a sub-byte type puts a run
  // off a byte's edge.
  //   to_strides  of the second box's memory, in elements, where it is not packed; else empty
  //   within      only what lies in this box of the tensor; null: all
  BoxWalker(DType dtype, const Box& from, const Box& to, const Shape& to_strides = {},
            const Box* within = nullptr);

  bool is_valid() const { return valid_; }
  bool done() const { return done_; }
  BoxStretch stretch() const;
  void Next();
  // Where the last run ends in the first box, in bytes.
  uint64_t end() const;

 private:
  int dimensions_ = 0;  // that are stepped through; the rest is inside one run
  Shape count_, index_;
  Shape from_stride_, to_stride_;  // bits
  uint64_t from_bits_ = 0, to_bits_ = 0, run_bits_ = 0;
  bool valid_ = true;
  bool done_ = false;
};

// Copies the common part of two packed boxes. `from` and `to` are the boxes' whole memory.
// kInvalidArgument: a sub-byte type that is cut inside a byte.
absl::Status CopyBox(DType dtype, const Box& from_box, std::span<const std::byte> from,
                     const Box& to_box, std::span<std::byte> to);

}  // namespace outlast
