#include "base/machine_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

namespace outlast {
namespace {

// Less than the machine has where a control group says so; more than this test needs in any case.
TEST(MachineMemoryBytes, IsAtMostWhatTheMachineHas) {
  const auto machine =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  EXPECT_LE(MachineMemoryBytes(), machine);
  EXPECT_GT(MachineMemoryBytes(), uint64_t{16} << 20);
}

}  // namespace
}  // namespace outlast
