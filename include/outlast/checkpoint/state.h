// What a trainer hands to a checkpoint: named views of its own memory, and small extras.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "outlast/checkpoint/dtype.h"

namespace outlast {

// kStable: changes only between BeforeUpdate and SaveIfDue, so it may be copied later. kEager:
// copied in SaveIfDue.
enum class RegionKind : uint8_t { kStable, kEager };

// One tensor, or this rank's box of one. Borrowed: name and bytes live with the trainer.
//
// Regions that are the same view of the same memory (tied weights) are stored once, under the name
// that sorts first; the others are its aliases, and each is restored under its own name.
struct Region {
  std::string_view name;  // "wte.weight"; unique in the state; 1 byte to 16 KiB of UTF-8
  DType dtype = DType::kF32;
  Shape global, offset,
      extent;  // this rank's slice; global == extent: replicated. An empty offset: zeros
  std::span<std::byte> bytes;  // host memory, from the first element to the end of the last
  RegionKind kind = RegionKind::kStable;
  // Elements from one index to the next, by dimension, as in a view of a larger tensor or a
  // transposed one: such a region is packed as it is copied. Empty: packed row-major. None
  // negative; no two elements in one place; not for types of less than a byte.
  Shape strides;
};

// Small extras by key, such as the data cursor or random state: the text of a JSON object, kept as
// it stands, or any bytes. Together at most CheckpointerOptions::extras_bytes a rank, and never
// more than 16 MiB.
using Extras = std::map<std::string, std::string>;

inline constexpr size_t kMaxNameBytes = size_t{16} << 10;
inline constexpr size_t kMaxExtrasBytes = size_t{16} << 20;

// The state of one rank. The regions are borrowed, the extras are small copies.
struct StateView {
  std::vector<Region> regions;
  Extras extras;

  // kInvalidArgument, naming the region, unless names are unique and within bounds, boxes lie in
  // their tensors, each region's memory has the bytes of its extent, and no two regions share
  // memory otherwise than as the same view of it with the same kind (both are named). What
  // interleaves two strided views in too many pieces to look at is taken as disjoint.
  absl::Status Validate() const;
};

// The offset of `region`: an empty one means zeros.
Shape OffsetOf(const Region& region);

// Does the memory hold the elements of the extent row-major, without gaps?
bool IsPacked(const Region& region);

// Two names for the same elements: dtype, slice, address and strides.
bool IsSameView(const Region& a, const Region& b);

// Bytes from the first element to the end of the last one; what Region::bytes must have.
// kInvalidArgument: not a valid shape, a negative stride, two elements in one place, past 2^60
// bytes, or a sub-byte type that is strided or fills no whole bytes.
absl::StatusOr<uint64_t> MemoryBytesOf(DType dtype, const Shape& extent, const Shape& strides = {});

}  // namespace outlast
