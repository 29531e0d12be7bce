#include "checkpoint/read_ahead.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <optional>
#include <thread>

#include "outlast/base/status.h"

namespace outlast {
namespace {

// Stretches of one block each.
std::vector<Stretch> Blocks(uint64_t count, uint64_t bytes = 4096) {
  std::vector<Stretch> blocks;
  for (uint64_t i = 0; i < count; ++i) blocks.push_back({i * bytes, (i + 1) * bytes});
  return blocks;
}

// Each byte is its place in the file divided by the block.
absl::Status FillWithPlace(const Stretch& stretch, std::byte* into) {
  for (uint64_t at = stretch.begin; at < stretch.end; ++at)
    into[at - stretch.begin] = static_cast<std::byte>(at / 4096);
  return absl::OkStatus();
}

TEST(ReadAhead, HandsOutEveryStretchInTurn) {
  const std::vector<Stretch> stretches = {{0, 8192}, {8192, 8193}, {40960, 45056}, {45056, 53248}};
  auto ahead = ReadAhead::Start(stretches, 3 * 8192, FillWithPlace).value();
  for (const Stretch& stretch : stretches) {
    const auto bytes = ahead->Next();
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    ASSERT_EQ(bytes->size(), stretch.end - stretch.begin);
    EXPECT_EQ(bytes->front(), static_cast<std::byte>(stretch.begin / 4096));
    EXPECT_EQ(bytes->back(), static_cast<std::byte>((stretch.end - 1) / 4096));
  }
  EXPECT_EQ(ahead->Next().status().code(), absl::StatusCode::kInternal);
}

TEST(ReadAhead, OfNothingHasNothing) {
  auto ahead = ReadAhead::Start({}, 1 << 20, FillWithPlace).value();
  EXPECT_EQ(ahead->Next().status().code(), absl::StatusCode::kInternal);
}

TEST(ReadAhead, ReadsBeforeItIsAsked) {
  std::latch three_were_read(3);
  auto ahead = ReadAhead::Start(Blocks(8), 3 * 4096, [&](const Stretch& stretch, std::byte* into) {
                 if (stretch.begin < 3 * 4096) three_were_read.count_down();
                 return FillWithPlace(stretch, into);
               }).value();
  three_were_read.wait();  // for ever, if it only read what is asked for
  EXPECT_EQ(ahead->Next()->front(), std::byte{0});
}

TEST(ReadAhead, ReadsInBorrowedMemoryAsMuchAtOnceAsThereIsRoomFor) {
  std::vector<std::byte> memory(size_t{5} * 4096);
  std::latch five_are_read(5);
  auto ahead = ReadAhead::StartIn(memory, Blocks(9), [&](const Stretch& stretch, std::byte* into) {
                 EXPECT_GE(into, memory.data());
                 EXPECT_LE(into + 4096, memory.data() + memory.size());
                 if (stretch.begin < 5 * 4096) five_are_read.arrive_and_wait();  // all at once
                 return FillWithPlace(stretch, into);
               }).value();
  for (int block = 0; block < 9; ++block)
    EXPECT_EQ(ahead->Next()->back(), static_cast<std::byte>(block));
}

TEST(ReadAhead, RefusesMemoryWithoutRoomForOneStretch) {
  std::vector<std::byte> memory(4095);
  EXPECT_EQ(ReadAhead::StartIn(memory, Blocks(2), FillWithPlace).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ReadAhead, ReadsASingleStretchWhenItIsAskedFor) {
  std::optional<std::thread::id> reader;
  auto ahead = ReadAhead::Start(Blocks(1), 1 << 20, [&](const Stretch& stretch, std::byte* into) {
                 reader = std::this_thread::get_id();
                 return FillWithPlace(stretch, into);
               }).value();
  EXPECT_EQ(reader, std::nullopt);
  ASSERT_TRUE(ahead->Next().ok());
  EXPECT_EQ(reader, std::this_thread::get_id());
}

TEST(ReadAhead, NeverOverwritesWhatIsInUseNorReadsPastItsMemory) {
  constexpr uint64_t kSlots = 3;
  std::atomic<uint64_t> asked_for{0};
  std::atomic<uint64_t> too_early{0};
  auto ahead =
      ReadAhead::Start(Blocks(200), kSlots * 4096, [&](const Stretch& stretch, std::byte* into) {
        // Before the first Next nothing is in use: one more may be on its way than later.
        if (stretch.begin / 4096 >= std::max<uint64_t>(asked_for, 1) - 1 + kSlots) ++too_early;
        return FillWithPlace(stretch, into);
      }).value();
  for (uint64_t i = 0; i < 200; ++i) {
    asked_for = i + 1;
    const std::span<const std::byte> bytes = ahead->Next().value();
    for (const std::byte byte : bytes) ASSERT_EQ(byte, static_cast<std::byte>(i));
  }
  EXPECT_EQ(too_early, 0u);
}

TEST(ReadAhead, HoldsTwoWhereItsMemoryIsTooSmall) {
  auto ahead = ReadAhead::Start(Blocks(5), 1, FillWithPlace).value();
  for (int i = 0; i < 5; ++i) EXPECT_EQ(ahead->Next()->front(), static_cast<std::byte>(i));
}

TEST(ReadAhead, AnErrorIsItsStretchesAlone) {
  auto ahead = ReadAhead::Start(Blocks(9), 4 * 4096, [](const Stretch& stretch, std::byte* into) {
                 if (stretch.begin == 3 * 4096) return absl::DataLossError("the fourth");
                 return FillWithPlace(stretch, into);
               }).value();
  for (int i = 0; i < 9; ++i) {
    const auto bytes = ahead->Next();
    if (i == 3) {
      EXPECT_EQ(MessageOf(bytes.status()), "the fourth");
    } else {
      EXPECT_EQ(bytes->front(), static_cast<std::byte>(i));
    }
  }
}

// As after a bad chunk: the caller leaves while the disk still works.
TEST(ReadAhead, EndsWhenTheRunningReadsHaveAndBeginsNoOther) {
  std::latch both_run(2), may_end(1);
  std::atomic<int> begun{0}, ended{0};
  auto ahead =
      ReadAhead::Start(Blocks(100), 8 * 4096, [&](const Stretch& stretch, std::byte* into) {
        if (stretch.begin == 0) return FillWithPlace(stretch, into);
        if (++begun <= 2) both_run.count_down();
        may_end.wait();
        ++ended;
        return FillWithPlace(stretch, into);
      }).value();
  ASSERT_TRUE(ahead->Next().ok());
  both_run.wait();

  std::thread leaver([&] { ahead.reset(); });
  may_end.count_down();
  leaver.join();

  EXPECT_EQ(begun, ended);
  EXPECT_LT(begun, 99);
}

}  // namespace
}  // namespace outlast
