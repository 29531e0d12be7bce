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
#include "outlast/checkpoint/dtype.h"

namespace outlast {

// kStable: changes only between BeforeUpdate and SaveIfDue, so it may be copied later. kEager:
// copied in SaveIfDue.
enum class RegionKind : uint8_t { kStable, kEager };

// One tensor, or this rank's box of one. Borrowed: name and bytes live with the trainer.
struct Region {
  std::string_view name;  // "wte.weight"; unique in the state; 1 byte to 16 KiB of UTF-8
  DType dtype = DType::kF32;
  Shape global, offset,
      extent;  // this rank's slice; global == extent: replicated. An empty offset: zeros
  std::span<std::byte> bytes;  // host memory, packed row-major: extent x dtype
  RegionKind kind = RegionKind::kStable;
};

// Small extras by key, such as the data cursor or random state: the text of a JSON object, kept as
// it stands, or any bytes. Together at most 16 MiB a rank.
using Extras = std::map<std::string, std::string>;

inline constexpr size_t kMaxNameBytes = size_t{16} << 10;
inline constexpr size_t kMaxExtrasBytes = size_t{16} << 20;

// The state of one rank. The regions are borrowed, the extras are small copies.
struct StateView {
  std::vector<Region> regions;
  Extras extras;

  // kInvalidArgument, naming the region, unless names are unique and within bounds, boxes lie in
  // their tensors, and each region's memory has the bytes of its extent.
  absl::Status Validate() const;
};

// The offset of `region`: an empty one means zeros.
Shape OffsetOf(const Region& region);

}  // namespace outlast
