#include "base/stream_copy.h"

#include <gtest/gtest.h>

#include <vector>

namespace outlast {
namespace {

TEST(StreamCopy, CopiesEveryLengthAndAlignmentAndNothingElse) {
  std::vector<std::byte> from(6000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 31 + i / 256);
  for (const size_t bytes : {0, 1, 63, 64, 1023, 1024, 1025, 1087, 1088, 4096, 5000}) {
    for (const size_t to_offset : {0, 1, 16, 63}) {
      for (const size_t from_offset : {0, 7, 64}) {
        std::vector<std::byte> to(6000, std::byte{0xee});
        StreamCopy(to.data() + to_offset, from.data() + from_offset, bytes);
        for (size_t i = 0; i < to.size(); ++i) {
          const bool inside = i >= to_offset && i < to_offset + bytes;
          ASSERT_EQ(to[i], inside ? from[i - to_offset + from_offset] : std::byte{0xee})
              << bytes << " bytes from " << from_offset << " to " << to_offset << ", at " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace outlast
