// Huge pages for shared memory.
#pragma once

#include <cstddef>

namespace outlast {

inline constexpr size_t kHugePageBytes = size_t{2} << 20;

// Fills the part of a fresh shared mapping that huge pages can hold with such pages, whatever
// shmem_enabled says (from Linux 6.1 on): ten times as fast as touching small ones, and all who map
// it later have one fault for 512. `data` must be aligned to kHugePageBytes. A wish: where it is
// not granted, nothing has changed but that a page of each huge one may be there.
void CollapseIntoHugePages(std::byte* data, size_t bytes);

}  // namespace outlast
