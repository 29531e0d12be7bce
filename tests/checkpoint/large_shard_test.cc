// Files past 4 GiB.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "checkpoint/writer.h"
#include "outlast/base/crc32c.h"
#include "outlast/base/fd.h"
#include "tests/checkpoint/disk_fixture.h"

namespace outlast {
namespace {

#ifdef OUTLAST_SANITIZED
constexpr uint64_t kPast = uint64_t{200} << 20;  // as a check of the test
#else
constexpr uint64_t kPast = uint64_t{4} << 30;
#endif

// pytorch#717, #721; tensorizer#82: what was written past 2 GiB came back short, or as zeros. The
// image is one page of zeros, over and over, but for a mark on each side.
TEST(WriteShard, WritesPastFourGiB) {
  TempFolder folder;
  struct statfs system {};
  ASSERT_EQ(statfs(folder.path().c_str(), &system), 0);
  if (system.f_type == TMPFS_MAGIC || FreeBytes(folder.path()).value() < kPast + (1 << 30))
    GTEST_SKIP() << "no disk with " << kPast << " bytes free under " << folder.path();
  const uint64_t bytes = kPast + (3 << 20) + 777;
  const size_t mapped = bytes + 8192 - bytes % 4096;
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const std::span<std::byte> image(static_cast<std::byte*>(memory), bytes);
  const std::vector<uint64_t> marks = {0, kPast - 1, kPast, kPast + (1 << 20) + 5, bytes - 1};
  for (const uint64_t mark : marks) image[mark] = std::byte{0x5a};

  const ShardFile file = WriteShard(folder.path(), 0, image, {}).value();

  EXPECT_EQ(file.bytes, bytes);
  EXPECT_EQ(file.chunks.size(), kPast / kChunkBytes + 4);
  const std::string path = folder / ShardName(0);
  ASSERT_EQ(FileBytes(path).value(), bytes);
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::vector<std::byte> chunk(kChunkBytes);
  for (const uint64_t mark : marks) {
    const uint64_t index = mark / kChunkBytes;
    const ssize_t count =
        pread(fd.get(), chunk.data(), chunk.size(), static_cast<off_t>(index * kChunkBytes));
    ASSERT_GT(count, 0);
    EXPECT_EQ(chunk[mark % kChunkBytes], std::byte{0x5a}) << mark;
    EXPECT_EQ(Crc32c(std::span(chunk).first(static_cast<size_t>(count))), file.chunks[index]);
  }
  Crc32cStream whole;
  whole.Update(image);
  EXPECT_EQ(file.crc32c, whole.value());
  munmap(memory, mapped);
}

}  // namespace
}  // namespace outlast
