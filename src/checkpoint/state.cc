#include "outlast/checkpoint/state.h"

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "base/name_index.h"
#include "checkpoint/json.h"
#include "checkpoint/overlap.h"
#include "checkpoint/safetensors.h"

namespace outlast {
namespace {

absl::Status Refuse(const Region& region, std::string_view why) {
  return Error(absl::StatusCode::kInvalidArgument, "region '{}': {}", region.name.substr(0, 200),
               why);
}

absl::Status CheckRegion(const Region& region) {
  if (region.name.empty() || region.name.size() > kMaxNameBytes || !IsUtf8(region.name)) {
    return Refuse(region, fmt::format("a name of {} bytes, 1 to {} of UTF-8 wanted",
                                      region.name.size(), kMaxNameBytes));
  }
  if (region.name == kMetadataKey)
    return Refuse(region, "the file format keeps this name for itself");
  const Shape offset = OffsetOf(region);
  if (!region.global.is_valid() || region.extent.rank() != region.global.rank() ||
      offset.rank() != region.global.rank()) {
    return Refuse(
        region,
        fmt::format("global {}, offset {}, extent {}: one number of dimensions up to {} wanted",
                    region.global.text(), offset.text(), region.extent.text(), kMaxDimensions));
  }
  for (int i = 0; i < region.global.rank(); ++i) {
    // Written so that no sum can overflow.
    if (offset[i] < 0 || region.extent[i] < 0 || region.extent[i] > region.global[i] ||
        offset[i] > region.global[i] - region.extent[i]) {
      return Refuse(region, fmt::format("offset {} and extent {} leave the tensor {}",
                                        offset.text(), region.extent.text(), region.global.text()));
    }
  }
  const auto bytes = MemoryBytesOf(region.dtype, region.extent, region.strides);
  if (!bytes.ok()) return Refuse(region, MessageOf(bytes.status()));
  const auto global_bytes = BytesOf(region.dtype, region.global);
  if (!global_bytes.ok()) return Refuse(region, MessageOf(global_bytes.status()));
  if (*bytes != region.bytes.size()) {
    return Refuse(region,
                  fmt::format("{} bytes of memory, {} wanted for {} {}{}", region.bytes.size(),
                              *bytes, NameOf(region.dtype), region.extent.text(),
                              IsPacked(region) ? "" : " with strides " + region.strides.text()));
  }
  return absl::OkStatus();
}

// Each stride passes all that lies inside it, so that no two elements meet.
absl::StatusOr<uint64_t> StridedSpan(const Shape& extent, const Shape& strides) {
  struct Axis {
    int64_t stride, count;
  };
  std::vector<Axis> axes;
  for (int i = 0; i < extent.rank(); ++i) {
    if (extent[i] > 1) axes.push_back({strides[i], extent[i]});
  }
  std::ranges::sort(axes, {}, &Axis::stride);
  int64_t span = 1;  // elements
  for (const Axis& axis : axes) {
    int64_t more = 0;
    if (axis.stride < span) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "extent {} with strides {}: two elements in one place", extent.text(),
                   strides.text());
    }
    if (__builtin_mul_overflow(axis.count - 1, axis.stride, &more) ||
        __builtin_add_overflow(span, more, &span)) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "extent {} with strides {}: more than 2^60 bytes", extent.text(),
                   strides.text());
    }
  }
  return static_cast<uint64_t>(span);
}

}  // namespace

Shape OffsetOf(const Region& region) {
  return region.offset.rank() == 0 ? Shape::Zeros(region.global.rank()) : region.offset;
}

bool IsPacked(const Region& region) {
  if (region.strides.rank() == 0) return true;
  int64_t packed = 1;
  for (int i = region.extent.rank() - 1; i >= 0; --i) {
    if (region.extent[i] > 1 && region.strides[i] != packed) return false;
    packed *= region.extent[i];
  }
  return true;
}

bool IsSameView(const Region& a, const Region& b) {
  if (a.bytes.data() != b.bytes.data() || a.dtype != b.dtype || a.global != b.global ||
      a.extent != b.extent || OffsetOf(a) != OffsetOf(b) || IsPacked(a) != IsPacked(b)) {
    return false;
  }
  if (IsPacked(a)) return true;
  for (int i = 0; i < a.extent.rank(); ++i) {
    if (a.extent[i] > 1 && a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

absl::StatusOr<uint64_t> MemoryBytesOf(DType dtype, const Shape& extent, const Shape& strides) {
  OUTLAST_ASSIGN_OR_RETURN(const uint64_t packed, BytesOf(dtype, extent));
  if (strides.rank() == 0 || packed == 0) return packed;
  const bool fits = strides.is_valid() && strides.rank() == extent.rank();
  if (!fits || std::ranges::any_of(strides.dimensions(), [](int64_t n) { return n < 0; })) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "extent {} with strides {}: one stride a dimension wanted, none negative",
                 extent.text(), strides.text());
  }
  Region view;
  view.extent = extent;
  view.strides = strides;
  if (IsPacked(view)) return packed;
  if (BitsOf(dtype) < 8) {
    return Error(absl::StatusCode::kInvalidArgument, "{} with strides {}: packed memory wanted",
                 NameOf(dtype), strides.text());
  }
  OUTLAST_ASSIGN_OR_RETURN(const uint64_t span, StridedSpan(extent, strides));
  if (span > uint64_t{1} << 57) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "extent {} with strides {}: more than 2^60 bytes", extent.text(), strides.text());
  }
  return span * static_cast<uint64_t>(BitsOf(dtype)) / 8;
}

absl::Status StateView::Validate() const {
  NameIndex names(regions.size());
  for (const Region& region : regions) {
    OUTLAST_RETURN_IF_ERROR(CheckRegion(region));
    if (!names.Add(region.name).is_new) return Refuse(region, "the name is there twice");
  }
  if (const auto pair = FindOverlap(*this)) {
    return Refuse(*pair->first,
                  fmt::format("shares memory with region '{}', and the two are not the same view "
                              "of it (dtype, slice, strides, kind)",
                              pair->second->name.substr(0, 200)));
  }
  size_t extra_bytes = 0;
  for (const auto& [key, value] : extras) {
    if (key.empty() || key.size() > kMaxNameBytes || !IsUtf8(key)) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "extra state: a key of {} bytes, 1 to {} of UTF-8 wanted", key.size(),
                   kMaxNameBytes);
    }
    extra_bytes += key.size() + value.size();
  }
  if (extra_bytes > kMaxExtrasBytes) {
    return Error(absl::StatusCode::kInvalidArgument, "extra state: {} bytes, at most {} wanted",
                 extra_bytes, kMaxExtrasBytes);
  }
  return absl::OkStatus();
}

}  // namespace outlast
