#include "outlast/blackbox/segment.h"

#include <fcntl.h>
#include <linux/futex.h>

#include <algorithm>
#include <string>
#include <vector>

#include "outlast/base/clock.h"
#include "outlast/blackbox/buffer.h"
#include "outlast/testing/time_factor.h"
#include "tests/blackbox/support.h"

namespace outlast {
namespace {

using ::outlast::testing::Child;

SegmentIdentity ExampleIdentity() {
  Id128 job;
  for (size_t i = 0; i < job.bytes.size(); ++i) job.bytes[i] = static_cast<std::byte>(i + 1);
  return {.job_id = job, .generation = 3, .slot = 4, .rank = 5, .world = 6, .local_rank = 7};
}

std::vector<std::byte> CopyOf(std::span<const std::byte> bytes) {
  return {bytes.begin(), bytes.end()};
}

std::string HexAt(const Segment& segment, size_t offset, size_t bytes) {
  return ToHex(segment.bytes().subspan(offset, bytes));
}

TEST(Segment, HasItsHeaderByteForByte) {
  const Segment segment = Segment::Create(ExampleIdentity()).value();

  EXPECT_EQ(HexAt(segment, 0x000, 8), "4f544c4242583031");  // "OTLBBX01"
  EXPECT_EQ(HexAt(segment, 0x008, 8), "0100000000100000");  // 1.0, 4096
  EXPECT_EQ(HexAt(segment, 0x010, 8), "00948d0000000000");  // 4096 + the areas below
  EXPECT_EQ(HexAt(segment, 0x018, 8), "0800000000000000");
  EXPECT_EQ(HexAt(segment, 0x020, 16), "0102030405060708090a0b0c0d0e0f10");
  EXPECT_EQ(HexAt(segment, 0x030, 8), "0300000000000000");
  EXPECT_EQ(HexAt(segment, 0x038, 24),
            "04000000050000000600000007000000"
            "0000000000000000");
  EXPECT_EQ(HexAt(segment, 0x058, 16), ToHex(BootId().bytes));
}

TEST(Segment, HasItsAreaTableByteForByte) {
  const Segment segment = Segment::Create(ExampleIdentity()).value();

  struct Row {
    uint32_t kind, stride;
    uint64_t offset, count;
  };
  const Row rows[] = {{1, 64, 0x1000, 16},     {2, 128, 0x1400, 256},    {3, 2048, 0x9400, 256},
                      {4, 48, 0x89400, 4096},  {5, 262144, 0xb9400, 16}, {6, 128, 0x4b9400, 32768},
                      {7, 1, 0x8b9400, 65536}, {8, 1, 0x8c9400, 65536}};
  for (size_t i = 0; i < std::size(rows); ++i) {
    const AreaEntry& entry = segment.header().area[i];
    EXPECT_EQ(entry.kind, rows[i].kind);
    EXPECT_EQ(entry.stride, rows[i].stride) << entry.kind;
    EXPECT_EQ(entry.offset, rows[i].offset) << entry.kind;
    EXPECT_EQ(entry.count, rows[i].count) << entry.kind;
  }
  EXPECT_EQ(segment.header().segment_bytes, 0x8c9400u + 65536);
}

TEST(Segment, IsMadeInUnderAMillisecond) {
  std::vector<int64_t> took;
  for (int i = 0; i < 21; ++i) {
    const int64_t start = MonotonicNanos();
    const Segment segment = Segment::Create(ExampleIdentity()).value();
    took.push_back(MonotonicNanos() - start);
  }
  std::sort(took.begin(), took.end());
  EXPECT_LT(static_cast<double>(took[10]), 1e6 * testing::TimeFactor());
}

TEST(Segment, CannotBeShrunkOrGrown) {
  const Segment segment = Segment::Create(ExampleIdentity()).value();
  EXPECT_NE(ftruncate(segment.fd(), 4096), 0);
  EXPECT_NE(ftruncate(segment.fd(), 64 << 20), 0);
}

TEST(Segment, OpensFromADescriptorAndTakesTheWorkersIdentity) {
  const Segment agents = Segment::Create(ExampleIdentity()).value();
  Segment workers = Segment::Open(Duplicate(agents.fd()).value()).value();

  workers.Adopt({.pid = getpid(),
                 .pid_start_time = ProcessStartTime(getpid()),
                 .incarnation = 2,
                 .generation = 9,
                 .rank = 1,
                 .world = 4});
  workers.SetJobId(Id128::FromName("abc"));

  const ProgressSnapshot look = ReadProgress(SegmentView::Open(agents.fd()).value(), 0);
  EXPECT_EQ(look.pid, getpid());
  EXPECT_GT(look.pid_start_time, 0u);
  EXPECT_EQ(look.incarnation, 2u);
  EXPECT_EQ(look.generation, 9u);
  EXPECT_EQ(look.rank, 1u);
  EXPECT_EQ(look.world, 4u);
  EXPECT_EQ(look.slot, 4u);
  EXPECT_EQ(look.job_id, Id128::FromName("abc"));
}

TEST(Segment, RefusesADescriptorThatCouldBeShrunk) {
  UniqueFd fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(fd.get(), 1 << 20), 0);
  EXPECT_EQ(Segment::Open(std::move(fd)).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(Segment, ClearsWhatAnOlderProcessLeftOpen) {
  Segment segment = Segment::Create(ExampleIdentity()).value();
  segment.Adopt({.pid = 10, .pid_start_time = 1, .incarnation = 1});
  ProgressWriter first(segment);
  first.OpenSection(first.Intern("forward"), Phase::kForward, 0, 5);
  first.BeatNative();
  first.SetUnwinding(1);
  const uint32_t members[] = {0, 1};
  const CommCell comm = CommCell::Open(segment, {.id_hash = 1, .members = members}).value();

  segment.Adopt({.pid = 11, .pid_start_time = 2, .incarnation = 2});

  const SegmentView view = SegmentView::Open(segment.fd()).value();
  const ProgressSnapshot look = ReadProgress(view, 0);
  EXPECT_TRUE(look.sections.empty());
  EXPECT_EQ(look.depth, 0u);
  EXPECT_EQ(look.beat_native, 0u);
  EXPECT_EQ(look.unwinding, 0u);
  EXPECT_EQ(look.sections_opened, 1u);  // goes on, so that no opening is taken for another
  EXPECT_TRUE(ReadComms(view).empty());
}

TEST(Segment, InternsATextOnce) {
  Segment segment = Segment::Create(ExampleIdentity()).value();

  const uint16_t forward = segment.Intern("forward");
  const uint16_t backward = segment.Intern("backward");

  EXPECT_EQ(forward, 8);  // behind the word of bytes used
  EXPECT_EQ(backward, 24);
  EXPECT_EQ(segment.Intern("forward"), forward);
  // Bytes used, then FNV-1a 64 of "forward" folded to 32 bits, the length, the text.
  const size_t strings = 0x8b9400;
  EXPECT_EQ(HexAt(segment, strings, 24),
            "2800000000000000"
            "54db4a0d07000000"
            "666f727761726400");
  const SegmentView view = SegmentView::Open(segment.fd()).value();
  EXPECT_EQ(view.String(forward), "forward");
  EXPECT_EQ(view.String(backward), "backward");
  EXPECT_EQ(view.String(0), "");
  EXPECT_EQ(view.String(16), "");
  EXPECT_EQ(view.String(1 << 20), "");
}

TEST(Segment, AnswersZeroWhenTheStringsAreFull) {
  Segment segment = Segment::Create(ExampleIdentity()).value();
  std::vector<uint16_t> indexes;
  for (int i = 0; i < 400; ++i)
    indexes.push_back(segment.Intern(std::string(200, 'x') + std::to_string(i)));
  EXPECT_EQ(indexes.back(), 0);
  EXPECT_EQ(std::count(indexes.begin(), indexes.end(), 0),
            400 - 65528 / 216);  // 8 + 203 bytes, rounded up to 8
  EXPECT_EQ(SegmentView::Open(segment.fd()).value().String(indexes[7]),
            std::string(200, 'x') + "7");
}

TEST(Segment, KeepsRankListsAsRuns) {
  Segment segment = Segment::Create(ExampleIdentity()).value();
  const std::vector<uint32_t> even = {0, 2, 4, 6};
  const std::vector<uint32_t> odd_order = {7, 3, 3, 9, 8, 7, 100};
  std::vector<uint32_t> world(100'000);
  for (uint32_t i = 0; i < world.size(); ++i) world[i] = i;

  EXPECT_EQ(segment.InternMembers(even), 0x36b162e6974a2665u);  // FNV-1a 64 of the four as u32
  const uint64_t second = segment.InternMembers(odd_order);
  const uint64_t third = segment.InternMembers(world);

  const SegmentView view = SegmentView::Open(segment.fd()).value();
  EXPECT_EQ(view.Members(0x36b162e6974a2665u), even);
  EXPECT_EQ(view.Members(second), odd_order);
  EXPECT_EQ(view.Members(third), world);
  EXPECT_TRUE(view.Members(12345).empty());
}

TEST(Segment, IsLeftAloneByAForkedChildThatLogs) {
  Segment segment = Segment::Create(ExampleIdentity()).value();
  Buffer buffer = Buffer::Create({.image_bytes = 5000, .extra_capacity = 8}, {}).value();
  ProgressWriter progress(segment);
  FlightLog log = FlightLog::ForThisThread(segment);
  StepLogWriter steps(segment);
  const uint16_t name = progress.Intern("data");
  progress.OpenSection(name, Phase::kData, 0, 1);
  log.Record({.op_seq = 1});
  const std::vector<std::byte> before = CopyOf(segment.bytes());

  Child child([&] {
    progress.OpenSection(name, Phase::kData, 0, 2);
    progress.SetStep(99);
    log.Record({.op_seq = 2});
    {
      FlightLog own = FlightLog::ForThisThread(segment);
      own.Record({.op_seq = 3});
    }
    steps.Append({.step = 99});
    segment.Intern("a new name");
    segment.SetGeneration(99, 9, 9);
    uint32_t turn = 0;
    buffer.control().TryBeginFill(Replace::kOnlyEmpty, &turn);
    std::memset(buffer.image().data(), 1, buffer.image().size());
    const Segment another = std::move(segment);  // and unmapping works
  });

  EXPECT_EQ(child.Wait(), 0);
  EXPECT_EQ(CopyOf(segment.bytes()), before);
  EXPECT_EQ(buffer.control().Read(), ControlWord{});
  EXPECT_EQ(buffer.image()[0], std::byte{0});
  log.Record({.op_seq = 4});
  EXPECT_EQ(ReadFlightRing(SegmentView::Open(segment.fd()).value(), 0).records.size(), 2u);
}

TEST(Segment, IsReadableWhileItsWriterIsStopped) {
  const Segment segment = Segment::Create(ExampleIdentity()).value();
  Child writer([&] {
    Segment own = Segment::Open(Duplicate(segment.fd()).value()).value();
    ProgressWriter progress(own);
    const uint16_t name = progress.Intern("all_reduce");
    for (uint64_t step = 1;; ++step) {
      progress.SetStep(step);
      progress.OpenSection(name, Phase::kCommWait, 0, step);
      if (step == 1000) raise(SIGSTOP);
      progress.CloseSection();
    }
  });
  int status = 0;
  ASSERT_EQ(waitpid(writer.pid(), &status, WUNTRACED), writer.pid());
  ASSERT_TRUE(WIFSTOPPED(status));

  const ProgressSnapshot look = ReadProgress(SegmentView::Open(segment.fd()).value(), 1500);

  EXPECT_EQ(look.step, 1000u);
  ASSERT_EQ(look.sections.size(), 1u);
  EXPECT_EQ(look.sections[0].name, "all_reduce");
  EXPECT_EQ(look.sections[0].age_ns, 500u);
}

TEST(Segment, TellsOfTheDeathOfTheProcessThatHoldsItsNotice) {
  Segment segment = Segment::Create(ExampleIdentity()).value();
  Child holder([&] {
    Segment own = Segment::Open(Duplicate(segment.fd()).value()).value();
    own.Adopt({.pid = getpid(), .pid_start_time = 1});
    if (!own.HoldDeathNotice().ok()) _exit(1);
    if (own.HoldDeathNotice().code() != absl::StatusCode::kFailedPrecondition) _exit(2);
    pause();
  });
  const uint32_t* word = segment.death_notice_word();
  testing::SpinUntil([&] { return (LoadWord(*word) & FUTEX_TID_MASK) != 0; });
  EXPECT_EQ(LoadWord(*word) & FUTEX_TID_MASK, static_cast<uint32_t>(holder.pid()));

  holder.Kill();

  EXPECT_EQ(LoadWord(*word) & (FUTEX_OWNER_DIED | FUTEX_TID_MASK), FUTEX_OWNER_DIED);
}

TEST(ProcessStartTime, IsZeroForAProcessThatIsGone) {
  EXPECT_GT(ProcessStartTime(getpid()), 0u);
  Child child([] {});
  const pid_t pid = child.pid();
  child.Wait();
  EXPECT_EQ(ProcessStartTime(pid), 0u);
}

TEST(Fnv1a64, MatchesThePublishedVectors) {
  // http://www.isthe.com/chongo/tech/comp/fnv, test vectors of FNV-1a, 64 bits.
  EXPECT_EQ(Fnv1a64(""), 0xcbf29ce484222325u);
  EXPECT_EQ(Fnv1a64("a"), 0xaf63dc4c8601ec8cu);
}

}  // namespace
}  // namespace outlast
