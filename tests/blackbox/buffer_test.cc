#include "outlast/blackbox/buffer.h"

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "outlast/base/crc32c.h"
#include "tests/blackbox/support.h"

namespace outlast {
namespace {

using ::outlast::testing::Child;
using ::outlast::testing::Gate;
using ::outlast::testing::SharedWords;

Id128 Counting(int from) {
  Id128 id;
  for (size_t i = 0; i < id.bytes.size(); ++i)
    id.bytes[i] = static_cast<std::byte>(from + static_cast<int>(i));
  return id;
}

const Id128 kRun = Counting(0x40);
constexpr uint64_t kLayoutHash = 0xabcdef0123456789;

Buffer MakeBuffer(const BufferLayout& layout) {
  return Buffer::Create(layout, {.run_id = kRun}).value();
}

// Fills every part with bytes that follow from `step`, as a copier would.
void Fill(Buffer& buffer, uint64_t step) {
  for (uint32_t i = 0; i < buffer.layout().chunk_count(); ++i) {
    const std::span<std::byte> chunk = buffer.chunk(i);
    std::memset(chunk.data(), static_cast<int>((step + i) & 0xff), chunk.size());
    buffer.chunk_crcs()[i] = Crc32c(chunk);
  }
  std::memcpy(buffer.extra().data(), &step, sizeof(step));
}

absl::Status FillAndSeal(Buffer& buffer, uint32_t turn, uint64_t step) {
  Fill(buffer, step);
  return buffer.Seal(turn, {.generation = 3,
                            .step = static_cast<int64_t>(step),
                            .rank = 2,
                            .world = 4,
                            .layout_hash = kLayoutHash,
                            .update_stamp = step,
                            .extra_bytes = 8});
}

// Begins, fills and seals; the turn.
uint32_t SealStep(Buffer& buffer, uint64_t step) {
  uint32_t turn = 0;
  EXPECT_TRUE(buffer.control().TryBeginFill(Replace::kSealedToo, &turn));
  EXPECT_TRUE(FillAndSeal(buffer, turn, step).ok());
  return turn;
}

// Whether all that a sealed buffer holds is of the step that its header names.
bool HoldsItsStep(const Buffer& buffer, const Buffer::Sealed& sealed) {
  const auto step = static_cast<uint64_t>(sealed.header.step);
  for (uint32_t i = 0; i < buffer.layout().chunk_count(); ++i) {
    const std::span<const std::byte> chunk = buffer.chunk(i);
    if (Crc32c(chunk) != buffer.chunk_crcs()[i] ||
        chunk[0] != static_cast<std::byte>((step + i) & 0xff))
      return false;
  }
  const auto extra = buffer.ReadExtra(sealed);
  return extra.ok() && std::memcmp(extra->data(), &step, sizeof(step)) == 0;
}

TEST(BufferLayout, PutsPartsOnPagesAndCrcsBehindThem) {
  const BufferLayout layout = {
      .image_bytes = (1 << 20) + 10, .replicated_bytes = 100, .extra_capacity = 16};

  EXPECT_EQ(layout.image_offset(), 4096u);
  EXPECT_EQ(layout.padded_image_bytes(), (1u << 20) + 4096);
  EXPECT_EQ(layout.replicated_offset(), 4096u + (1 << 20) + 4096);
  EXPECT_EQ(layout.crc_table_offset(), 1060864u);
  EXPECT_EQ(layout.chunk_count(), 3u);
  EXPECT_EQ(layout.extra_offset(), 1060928u);  // 1060864 + 12, to 64
  EXPECT_EQ(layout.buffer_bytes(), 1064960u);
  EXPECT_EQ(layout.chunk(1).offset, 4096u + (1 << 20));
  EXPECT_EQ(layout.chunk(1).bytes, 10u);
  EXPECT_EQ(layout.chunk(2).offset,
            layout.replicated_offset());  // the replicated part starts a new chunk
  EXPECT_EQ(layout.chunk(2).bytes, 100u);
}

TEST(BufferLayout, RefusesNothingAndTooMuch) {
  EXPECT_EQ(BufferLayout{}.Check().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(BufferLayout{.image_bytes = ~uint64_t{0}}.Check().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(BufferLayout{.replicated_bytes = 1}.Check().ok());
}

TEST(Buffer, HasItsHeaderByteForByte) {
  Buffer buffer =
      MakeBuffer({.image_bytes = (1 << 20) + 10, .replicated_bytes = 100, .extra_capacity = 16});
  uint32_t turn = 0;
  ASSERT_TRUE(buffer.control().TryBeginFill(Replace::kOnlyEmpty, &turn));
  std::memcpy(buffer.extra().data(), "extra", 5);
  ASSERT_TRUE(buffer
                  .Seal(turn, {.job_id = Counting(1),
                               .generation = 3,
                               .folder_nonce = 0x7f3a91c2,
                               .step = 12000,
                               .rank = 2,
                               .world = 4,
                               .layout_hash = kLayoutHash,
                               .update_stamp = 77,
                               .sealed_at_ns = 123456789,
                               .extra_bytes = 5})
                  .ok());

  BufferHeader header = buffer.ReadSealed(kRun, BootId())->header;
  header.boot_id = Counting(0x20);

  // The CRC was computed from the table of checkpoint buffers by a program of its own.
  EXPECT_EQ(HeaderCrc(header), 0x247cf945u);
  const std::string hex = testing::HexOf(header);
  EXPECT_EQ(hex.substr(0, 32),
            "4f55544c42554652"
            "01000000"
            "00100000");
  EXPECT_EQ(hex.substr(2 * 128, 16), "0200000001000000");  // sealed, no pins, turn 1
}

TEST(ControlWord, IsStateThenPinsThenTurn) {
  const ControlWord word = {.state = BufferState::kSealed, .pins = 0x00abcd01, .turn = 0x11223344};
  EXPECT_EQ(word.Pack(), 0x11223344abcd0102u);
  EXPECT_EQ(ControlWord::Unpack(0x11223344abcd0102u), word);
}

TEST(BufferControl, GoesThroughItsStatesAndNoOthers) {
  uint64_t word = 0;
  BufferControl control(&word);
  uint32_t turn = 0;

  EXPECT_FALSE(control.Seal(0));
  EXPECT_FALSE(control.Abandon(0));
  EXPECT_FALSE(control.TryPin(BufferPin::kPersist, 0));
  EXPECT_TRUE(control.TryBeginFill(Replace::kOnlyEmpty, &turn));
  EXPECT_EQ(turn, 1u);
  EXPECT_FALSE(control.TryBeginFill(Replace::kSealedToo, &turn));
  EXPECT_FALSE(control.TryPin(BufferPin::kPersist, 1));
  EXPECT_FALSE(control.Seal(2));
  EXPECT_TRUE(control.Abandon(1));
  EXPECT_FALSE(control.Seal(1));  // the agent was first
  EXPECT_TRUE(control.TryBeginFill(Replace::kOnlyEmpty, &turn));
  EXPECT_TRUE(control.Seal(2));
  EXPECT_FALSE(control.Abandon(2));
  EXPECT_FALSE(control.TryBeginFill(Replace::kOnlyEmpty, &turn));
  EXPECT_TRUE(control.TryPin(BufferPin::kCommon, 2));
  EXPECT_FALSE(control.TryPin(BufferPin::kCommon, 2));
  EXPECT_TRUE(control.TryPin(BufferPin::kPersist, 2));
  EXPECT_FALSE(control.TryBeginFill(Replace::kSealedToo, &turn));
  EXPECT_TRUE(control.Unpin(BufferPin::kCommon, 2));
  EXPECT_FALSE(control.TryBeginFill(Replace::kSealedToo, &turn));
  EXPECT_FALSE(control.Discard(2));
  control.ClearPins();
  EXPECT_TRUE(control.TryBeginFill(Replace::kSealedToo, &turn));
  EXPECT_TRUE(control.Seal(3));
  EXPECT_FALSE(control.TryPin(BufferPin::kPersist, 2));  // of the snapshot that was there before
  EXPECT_TRUE(control.Discard(3));
  EXPECT_EQ(control.Read(), (ControlWord{.state = BufferState::kEmpty, .pins = 0, .turn = 3}));
}

TEST(Buffer, OpensInTheWorkerWithTheSameLayout) {
  const Buffer agents =
      MakeBuffer({.image_bytes = 5000, .replicated_bytes = 10, .extra_capacity = 100});
  Buffer workers = Buffer::Open(Duplicate(agents.fd()).value()).value();
  EXPECT_EQ(workers.layout(), agents.layout());
  EXPECT_GE(workers.extra().size(), 100u);

  SealStep(workers, 12);

  const auto sealed = agents.ReadSealed(kRun, BootId(), kLayoutHash);
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  EXPECT_EQ(sealed->header.step, 12);
  EXPECT_EQ(sealed->turn, 1u);
  EXPECT_TRUE(HoldsItsStep(agents, *sealed));
}

TEST(Buffer, RejectsFillingTornForeignBootAndWrongLayout) {
  Buffer buffer = MakeBuffer({.image_bytes = 5000, .extra_capacity = 8});
  const auto code = [&] { return buffer.ReadSealed(kRun, BootId(), kLayoutHash).status().code(); };
  EXPECT_EQ(code(), absl::StatusCode::kFailedPrecondition);  // empty
  uint32_t turn = 0;
  ASSERT_TRUE(buffer.control().TryBeginFill(Replace::kOnlyEmpty, &turn));
  EXPECT_EQ(code(), absl::StatusCode::kFailedPrecondition);  // filling
  ASSERT_TRUE(FillAndSeal(buffer, turn, 5).ok());
  ASSERT_EQ(code(), absl::StatusCode::kOk);

  EXPECT_EQ(buffer.ReadSealed(Counting(1), BootId(), kLayoutHash).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(buffer.ReadSealed(kRun, Counting(1), kLayoutHash).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(buffer.ReadSealed(kRun, BootId(), 1).status().code(), absl::StatusCode::kNotFound);

  const Mapping raw = Mapping::Shared(buffer.fd(), buffer.layout().buffer_bytes()).value();
  for (size_t at = 0; at < sizeof(BufferHeader); ++at) {  // torn anywhere
    if (at >= 128 && at < 136) continue;                  // the control word has no CRC
    raw.data()[at] ^= std::byte{4};
    EXPECT_NE(code(), absl::StatusCode::kOk) << at;
    raw.data()[at] ^= std::byte{4};
  }
  buffer.extra()[3] ^= std::byte{1};
  EXPECT_EQ(buffer.ReadExtra(*buffer.ReadSealed(kRun, BootId())).status().code(),
            absl::StatusCode::kDataLoss);
}

TEST(Buffer, NeverCrashesOnAHostileHeader) {
  Buffer buffer = MakeBuffer({.image_bytes = 5000, .replicated_bytes = 9000, .extra_capacity = 8});
  SealStep(buffer, 5);
  const Mapping raw = Mapping::Shared(buffer.fd(), buffer.layout().buffer_bytes()).value();
  auto& header = *reinterpret_cast<BufferHeader*>(raw.data());
  const BufferHeader good = header;
  auto random = testing::SeededRandom();
  const uint64_t words[] = {
      0, 1, 4095, 4096, 0xffffffff, uint64_t{1} << 47, uint64_t{1} << 63, ~uint64_t{0}};
  for (int i = 0; i < testing::Repeats(20'000); ++i) {
    header = good;
    for (int change = 0; change < 2; ++change) {
      const uint64_t word = random() % 4 == 0 ? random() : words[random() % std::size(words)];
      std::memcpy(raw.data() + random() % 68 * 4, &word, random() % 2 == 0 ? 4 : 8);
    }
    header.header_crc = HeaderCrc(header);  // an enemy knows how
    if (const auto sealed = buffer.ReadSealed(header.run_id, header.boot_id); sealed.ok()) {
      buffer.ReadExtra(*sealed).status().IgnoreError();
    }
    if (const auto opened = Buffer::Open(Duplicate(buffer.fd()).value()); opened.ok()) {
      ASSERT_EQ(opened->layout().buffer_bytes(), buffer.layout().buffer_bytes());
      Crc32c(opened->image());
      Crc32c(opened->replicated());
      Crc32c(std::as_bytes(opened->chunk_crcs()));
      Crc32c(opened->extra());
    }
  }
}

TEST(Buffer, CannotBeShrunkOrGrownByTheTrainer) {
  const Buffer agents = MakeBuffer({.image_bytes = 5000});
  Child trainer([&] {
    if (ftruncate(agents.fd(), 0) == 0 || ftruncate(agents.fd(), 1 << 20) == 0) _exit(1);
    if (fallocate(agents.fd(), 0, 0, 1 << 20) == 0) _exit(2);
    if (fcntl(agents.fd(), F_ADD_SEALS, F_SEAL_WRITE) == 0) _exit(3);
  });
  EXPECT_EQ(trainer.Wait(), 0);
  EXPECT_EQ(agents.image()[4999], std::byte{0});
}

TEST(Buffer, RefusesADescriptorThatCouldBeShrunk) {
  UniqueFd fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(fd.get(), 1 << 20), 0);
  EXPECT_EQ(Buffer::Open(std::move(fd)).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(Buffer, IsNotSealedAfterTheAgentAbandonedTheFill) {
  Buffer buffer = MakeBuffer({.image_bytes = 5000, .extra_capacity = 8});
  uint32_t turn = 0;
  ASSERT_TRUE(buffer.control().TryBeginFill(Replace::kOnlyEmpty, &turn));
  ASSERT_TRUE(buffer.control().Abandon(turn));

  EXPECT_EQ(FillAndSeal(buffer, turn, 5).code(), absl::StatusCode::kAborted);
  EXPECT_EQ(buffer.control().Read().state, BufferState::kEmpty);
}

TEST(Buffer, IsNeverRefilledWhilePinned) {
  Buffer buffer = MakeBuffer({.image_bytes = 20'000, .replicated_bytes = 100, .extra_capacity = 8});
  const auto wanted = static_cast<uint64_t>(testing::Repeats(4'000));
  std::atomic<uint64_t> pinned = 0;
  std::thread trainer([&] {
    for (uint64_t step = 1; pinned.load() < wanted;) {
      uint32_t turn = 0;
      if (!buffer.control().TryBeginFill(Replace::kSealedToo, &turn)) {
        std::this_thread::yield();
        continue;
      }
      ASSERT_TRUE(FillAndSeal(buffer, turn, step).ok());
      ++step;
      for (int i = 0; i < 50 && buffer.control().Read().pins == 0; ++i) std::this_thread::yield();
    }
  });
  const auto read = [&](BufferPin pin) {
    while (pinned.load() < wanted) {
      const auto sealed = buffer.ReadSealed(kRun, BootId(), kLayoutHash);
      if (!sealed.ok() || !buffer.control().TryPin(pin, sealed->turn)) {
        std::this_thread::yield();
        continue;
      }
      EXPECT_TRUE(HoldsItsStep(buffer, *sealed));
      EXPECT_TRUE(buffer.control().Unpin(pin, sealed->turn));
      ++pinned;
    }
  };
  std::thread persister([&] { read(BufferPin::kPersist); });
  read(BufferPin::kReplicate);
  trainer.join();
  persister.join();
}

// Fills two buffers in turn, as fast as it can; finished[0] is the last step that it sealed.
void TrainUntilKilled(const std::vector<Buffer>& agents, SharedWords& finished, Gate& under_way) {
  std::vector<Buffer> buffers;
  for (const Buffer& buffer : agents)
    buffers.push_back(Buffer::Open(Duplicate(buffer.fd()).value()).value());
  const uint64_t first = LoadWord(finished[0]) + 1;
  for (uint64_t step = first;; ++step) {
    if (step == first + 2) under_way.Open();
    Buffer& buffer = buffers[step % buffers.size()];
    uint32_t turn = 0;
    if (!buffer.control().TryBeginFill(Replace::kSealedToo, &turn)) _exit(1);
    if (!FillAndSeal(buffer, turn, step).ok()) _exit(2);
    StoreWord(finished[0], step);
  }
}

TEST(Buffer, StaysReadableAfterAKilledTrainer) {
  std::vector<Buffer> buffers;
  for (int i = 0; i < 2; ++i) {
    buffers.push_back(
        MakeBuffer({.image_bytes = 20'000, .replicated_bytes = 5'000, .extra_capacity = 8}));
  }
  SharedWords finished;
  auto random = testing::SeededRandom();
  Gate under_way;
  int killed_in_a_fill = 0;
  for (int round = 0; round < testing::Repeats(10'000); ++round) {
    Child trainer([&] { TrainUntilKilled(buffers, finished, under_way); });
    under_way.Wait();
    for (uint64_t spin = random() % 5'000; spin > 0; --spin) LoadWord(finished[0]);
    trainer.Kill();

    uint64_t newest = 0;
    for (Buffer& buffer : buffers) {
      if (const ControlWord word = buffer.control().Read(); word.state == BufferState::kFilling) {
        ASSERT_FALSE(buffer.ReadSealed(kRun, BootId()).ok());
        ASSERT_TRUE(buffer.control().Abandon(word.turn));
        ++killed_in_a_fill;
        continue;
      }
      const auto sealed = buffer.ReadSealed(kRun, BootId(), kLayoutHash);
      ASSERT_TRUE(sealed.ok()) << sealed.status();
      ASSERT_TRUE(HoldsItsStep(buffer, *sealed));
      newest = std::max(newest, static_cast<uint64_t>(sealed->header.step));
    }
    ASSERT_GE(newest, finished[0]);  // nothing that was sealed is lost
    ASSERT_LE(newest, finished[0] + 1);
    StoreWord(finished[0], newest);
  }
  EXPECT_GT(killed_in_a_fill, 0);
  std::printf("%d kills in a fill\n", killed_in_a_fill);
}

}  // namespace
}  // namespace outlast
