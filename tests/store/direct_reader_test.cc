#include "store/direct_reader.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <vector>

#include "outlast/base/memory.h"
#include "outlast/base/status.h"
#include "tests/support/temp_folder.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// What the calls in place of pread do, in turn: an errno to fail with, or, negated, the bytes at
// most to give. After the last: what pread does.
std::vector<int> g_script;
std::vector<std::pair<off_t, bool>> g_calls;  // offset, and whether O_DIRECT was on

ssize_t Scripted(int fd, void* into, size_t bytes, off_t offset) {
  const bool is_direct = (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
  g_calls.emplace_back(offset, is_direct);
  if (is_direct && offset % 4096 != 0) {  // as ext4 does; others allow 512
    errno = EINVAL;
    return -1;
  }
  if (g_calls.size() > g_script.size()) return pread(fd, into, bytes, offset);
  const int what = g_script[g_calls.size() - 1];
  if (what <= 0) {
    const ssize_t count = pread(fd, into, bytes, offset);
    return std::min<ssize_t>(count, -what);
  }
  errno = what;
  return -1;
}

class DirectReaderTest : public ::testing::Test {
 protected:
  void Write(size_t bytes) {
    content_.resize(bytes);
    for (size_t i = 0; i < bytes; ++i) content_[i] = static_cast<char>(i * 31 + i / 4096);
    std::ofstream(path_, std::ios::binary) << content_;
  }
  std::unique_ptr<DirectReader> Open(IoMode mode, std::vector<int> script) {
    g_script = std::move(script);
    g_calls.clear();
    return DirectReader::Open(path_, mode, Scripted).value();
  }
  std::string_view Found(size_t bytes) const {
    return {reinterpret_cast<const char*>(memory_.data()), bytes};
  }

  const TempFolder folder_;
  const std::string path_ = folder_ / "file";
  std::string content_;
  Mapping memory_ = Mapping::Anonymous(64 << 10).value();
};

TEST_F(DirectReaderTest, ReadsAFileWhoseLengthIsNoMultipleOfTheAlignment) {
  Write(10'001);
  for (const IoMode mode : {IoMode::kDirect, IoMode::kBuffered}) {
    const auto reader = DirectReader::Open(path_, mode).value();
    ASSERT_TRUE(reader->Read(4096, 10'001 - 4096, memory_.data()).ok());
    EXPECT_EQ(Found(10'001 - 4096), content_.substr(4096));
  }
}

TEST_F(DirectReaderTest, GoesOnAfterShortReadsAndSignals) {
  Write(20'000);
  const auto reader = Open(IoMode::kBuffered, {-7, EINTR, -4096, -1});

  ASSERT_TRUE(reader->Read(0, 20'000, memory_.data()).ok());

  EXPECT_EQ(Found(20'000), content_);
  EXPECT_THAT(g_calls, ElementsAre(std::pair(0, false), std::pair(7, false), std::pair(7, false),
                                   std::pair(4103, false), std::pair(4104, false)));
}

TEST_F(DirectReaderTest, LeavesODirectWhereAShortReadEndsInsideABlock) {
  Write(20'000);
  const auto reader = Open(IoMode::kDirect, {-8192, -100});

  ASSERT_TRUE(reader->Read(0, 20'000, memory_.data()).ok());

  EXPECT_EQ(Found(20'000), content_);
  EXPECT_THAT(g_calls, ElementsAre(std::pair(0, true), std::pair(8192, true), std::pair(8292, true),
                                   std::pair(8292, false)));
  EXPECT_EQ(reader->mode(), IoMode::kBuffered);
}

TEST_F(DirectReaderTest, FallsBackWhereODirectIsRefusedAtTheFirstRead) {
  Write(5'000);
  const auto reader = Open(IoMode::kDirect, {EINVAL});

  ASSERT_TRUE(reader->Read(0, 5'000, memory_.data()).ok());

  EXPECT_EQ(Found(5'000), content_);
  EXPECT_EQ(reader->mode(), IoMode::kBuffered);
}

TEST_F(DirectReaderTest, NamesTheFileAndTheErrorOfAFailedRead) {
  Write(5'000);
  const absl::Status status = Open(IoMode::kDirect, {EIO})->Read(0, 5'000, memory_.data());
  EXPECT_THAT(std::string(MessageOf(status)), HasSubstr("read " + path_ + ": "));
  EXPECT_THAT(std::string(MessageOf(status)), HasSubstr("errno 5"));

  // An EINVAL that is not O_DIRECT's is no reason to try for ever.
  EXPECT_FALSE(Open(IoMode::kBuffered, {EINVAL})->Read(0, 5'000, memory_.data()).ok());
}

TEST_F(DirectReaderTest, SaysWhereAFileThatIsCutMeanwhileEnds) {
  for (const size_t length : {size_t{0}, size_t{4096}, size_t{6'000}}) {
    Write(length);
    for (const IoMode mode : {IoMode::kDirect, IoMode::kBuffered}) {
      const absl::Status status = Open(mode, {})->Read(0, 10'000, memory_.data());
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
      EXPECT_EQ(MessageOf(status),
                path_ + ": ends at byte " + std::to_string(length) + ", while it is read");
    }
  }
}

TEST_F(DirectReaderTest, FollowsNoSymlink) {
  Write(1);
  ASSERT_EQ(symlink(path_.c_str(), (path_ + ".link").c_str()), 0);
  EXPECT_FALSE(DirectReader::Open(path_ + ".link", IoMode::kDirect).ok());
  EXPECT_EQ(DirectReader::Open(path_ + ".none", IoMode::kDirect).status().code(),
            absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace outlast
