#include "base/huge_pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "outlast/base/fd.h"
#include "outlast/base/memory.h"

namespace outlast {
namespace {

TEST(HugePages, ASharedMappingThatCanHoldOneIsAligned) {
  const UniqueFd fd(memfd_create("test", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(fd.get(), 3 * kHugePageBytes), 0);
  const Mapping mapping = Mapping::Shared(fd.get(), 2 * kHugePageBytes + 5).value();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(mapping.data()) % kHugePageBytes, 0u);
}

TEST(HugePages, CollapsedMemoryIsZeroAndSharedAsBefore) {
  const UniqueFd fd(memfd_create("test", MFD_CLOEXEC));
  const size_t bytes = 2 * kHugePageBytes + 12345;
  ASSERT_EQ(ftruncate(fd.get(), bytes), 0);
  const Mapping first = Mapping::Shared(fd.get(), bytes).value();
  CollapseIntoHugePages(first.data(), bytes);
  EXPECT_TRUE(std::ranges::all_of(first.bytes(), [](std::byte b) { return b == std::byte{0}; }));
  const Mapping second = Mapping::Shared(fd.get(), bytes).value();
  for (const size_t at : {size_t{0}, kHugePageBytes - 1, kHugePageBytes, bytes - 1}) {
    first.data()[at] = std::byte{7};
    EXPECT_EQ(second.data()[at], std::byte{7}) << at;
  }
}

TEST(HugePages, MemoryThatIsNotAlignedIsLeftAlone) {
  const Mapping mapping = Mapping::Anonymous(2 * kHugePageBytes).value();
  CollapseIntoHugePages(mapping.data() + 4096, kHugePageBytes);
  CollapseIntoHugePages(mapping.data(), 100);
  EXPECT_EQ(mapping.data()[4096], std::byte{0});
}

}  // namespace
}  // namespace outlast
