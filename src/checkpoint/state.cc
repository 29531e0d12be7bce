#include "outlast/checkpoint/state.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "checkpoint/json.h"

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
  const auto bytes = BytesOf(region.dtype, region.extent);
  if (!bytes.ok()) return Refuse(region, MessageOf(bytes.status()));
  const auto global_bytes = BytesOf(region.dtype, region.global);
  if (!global_bytes.ok()) return Refuse(region, MessageOf(global_bytes.status()));
  if (*bytes != region.bytes.size()) {
    return Refuse(
        region, fmt::format("{} bytes of memory, {} wanted for {} {}", region.bytes.size(), *bytes,
                            NameOf(region.dtype), region.extent.text()));
  }
  return absl::OkStatus();
}

}  // namespace

Shape OffsetOf(const Region& region) {
  return region.offset.rank() == 0 ? Shape::Zeros(region.global.rank()) : region.offset;
}

absl::Status StateView::Validate() const {
  std::set<std::string_view> names;
  for (const Region& region : regions) {
    OUTLAST_RETURN_IF_ERROR(CheckRegion(region));
    if (!names.insert(region.name).second) return Refuse(region, "the name is there twice");
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
