// Readers on what a crash, a bad disk or an enemy left: an error that names what is wrong, or less
// data, never a crash.
#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "outlast/base/status.h"
#include "outlast/blackbox/segment.h"
#include "tests/blackbox/support.h"

namespace outlast {
namespace {

using ::outlast::testing::ReadEverything;

using Bytes = std::vector<std::byte>;

// A segment with something in every area.
Segment MakeFull() {
  Segment segment = Segment::Create({.generation = 1, .rank = 2, .world = 4}).value();
  ProgressWriter progress(segment);
  progress.OpenSection(progress.Intern("step"), Phase::kUser, 0, 1);
  progress.OpenSection(progress.Intern("forward"), Phase::kForward, 5, 2);
  const uint32_t members[] = {0, 1, 2, 3};
  CommCell comm =
      CommCell::Open(segment, {.id_hash = 9, .members = members, .name = "world"}).value();
  PairCell pair = PairCell::Open(segment, 9, 1).value();
  pair.EnterSend();
  FlightLog log = FlightLog::ForThisThread(segment);
  StepLogWriter steps(segment);
  for (uint64_t i = 1; i <= 60; ++i) {
    comm.Enter({.function = 1, .known = kKnowsFunction, .count = i}, i);
    log.Record({.kind = FlightKind::kEntered, .comm = comm.index(), .op_seq = i});
    steps.Append({.step = i});
  }
  return segment;
}

// The start of each area, under a table that says so: small enough to be damaged thousands of times
// a second.
Bytes MakeSmall() {
  const Segment segment = MakeFull();
  SegmentHeader header = segment.header();
  Bytes bytes(sizeof(header));
  const struct {
    uint32_t stride;
    uint64_t count;
  } shapes[] = {{64, 16}, {128, 4}, {2048, 4}, {48, 8}, {4096, 2}, {128, 64}, {1, 1024}, {1, 1024}};
  for (size_t i = 0; i < std::size(shapes); ++i) {
    AreaEntry& entry = header.area[i];
    const auto source = segment.bytes().subspan(entry.offset, shapes[i].stride * shapes[i].count);
    entry = {.kind = entry.kind,
             .stride = shapes[i].stride,
             .offset = bytes.size(),
             .count = shapes[i].count};
    bytes.insert(bytes.end(), source.begin(), source.end());
  }
  header.segment_bytes = bytes.size();
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

SegmentHeader& HeaderOf(Bytes& bytes) { return *reinterpret_cast<SegmentHeader*>(bytes.data()); }

absl::Status StatusOf(const Bytes& bytes) {
  const auto view = SegmentView::FromBytes(bytes);
  if (view.ok()) ReadEverything(*view);
  return view.status();
}

void ExpectError(const Bytes& bytes, absl::StatusCode code, const std::string& named) {
  const absl::Status status = StatusOf(bytes);
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_NE(std::string(MessageOf(status)).find(named), std::string::npos)
      << status << " should name " << named;
}

TEST(SegmentView, ReadsASmallerLayoutThanOurs) {
  const SegmentView view = SegmentView::FromBytes(MakeSmall()).value();

  EXPECT_EQ(ReadProgress(view, 10).sections.size(), 2u);
  EXPECT_EQ(ReadComms(view).size(), 1u);
  EXPECT_EQ(ReadOperations(view, 0).size(), 60u);
  EXPECT_EQ(ReadPairs(view).size(), 1u);
  EXPECT_EQ(ReadFlightRing(view, 0).records.size(), 60u);
  EXPECT_EQ(ReadStepLog(view, 1).records.size(), 60u);
}

TEST(SegmentView, ReadsASavedFileAsItReadsTheLiveSegment) {
  const Segment segment = MakeFull();
  const SegmentView live = SegmentView::Open(segment.fd()).value();
  UniqueFd file(open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  ASSERT_TRUE(WriteAll(file.get(), live.bytes()).ok());

  const SegmentView saved = SegmentView::Open(file.get()).value();

  EXPECT_EQ(ReadEverything(saved), ReadEverything(live));
  EXPECT_EQ(ReadProgress(saved, 10).sections[1].name, "forward");
}

TEST(SegmentView, OutlivesTheCutOfTheFileThatItReads) {
  const Bytes bytes = MakeSmall();
  UniqueFd file(open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  ASSERT_TRUE(WriteAll(file.get(), bytes).ok());
  const SegmentView view = SegmentView::Open(file.get()).value();

  ASSERT_EQ(ftruncate(file.get(), 0), 0);

  EXPECT_EQ(ReadStepLog(view, 1).records.size(), 60u);
}

TEST(SegmentView, NamesWhatIsWrong) {
  const Bytes good = MakeSmall();
  ASSERT_TRUE(StatusOf(good).ok());

  Bytes bad = good;
  HeaderOf(bad).magic = MagicOf("OUTLBUFR");
  ExpectError(bad, absl::StatusCode::kDataLoss, "magic");
  for (const uint16_t major : {0, 2, 65535}) {
    bad = good;
    HeaderOf(bad).major = major;
    ExpectError(bad, absl::StatusCode::kUnimplemented, "version " + std::to_string(major));
  }
  bad = good;
  bad.resize(bad.size() - 1);
  ExpectError(bad, absl::StatusCode::kDataLoss, "cut after");
  bad.resize(4095);
  ExpectError(bad, absl::StatusCode::kDataLoss, "4095 bytes");
  bad = good;
  HeaderOf(bad).header_bytes = 64;
  ExpectError(bad, absl::StatusCode::kDataLoss, "header of 64 bytes");
  bad = good;
  HeaderOf(bad).areas = 17;
  ExpectError(bad, absl::StatusCode::kDataLoss, "17 areas");
}

TEST(SegmentView, RefusesAHostileAreaTable) {
  const Bytes good = MakeSmall();
  const auto expect = [&](auto change, const std::string& named) {
    Bytes bad = good;
    change(HeaderOf(bad).area);
    ExpectError(bad, absl::StatusCode::kDataLoss, named);
  };
  constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();

  expect([](AreaEntry* area) { area[0].offset = 0; }, "'sections' has offset 0");
  expect([](AreaEntry* area) { area[0].offset = 4097; }, "'sections' has offset 4097");
  expect([](AreaEntry* area) { area[1].offset = kHuge & ~uint64_t{63}; }, "'comms' has more rows");
  expect([](AreaEntry* area) { area[2].count = kHuge; }, "'signatures' has more rows");
  expect([](AreaEntry* area) { area[2].count = kHuge / 2048 + 2; }, "'signatures' has more rows");
  expect([](AreaEntry* area) { area[3].stride = 0; }, "'pairs' has stride 0");
  expect([](AreaEntry* area) { area[3].stride = 47; }, "'pairs' has stride 47");
  expect([](AreaEntry* area) { area[4].stride = 3 * 64; }, "'flight rings' has stride 192");
  expect([](AreaEntry* area) { area[4].stride = 0x80000000u; }, "'flight rings' has more rows");
  expect([](AreaEntry* area) { area[6].stride = 2; }, "'strings' has stride 2");
  expect([](AreaEntry* area) { area[7].kind = 1; }, "two areas 'sections'");
}

TEST(SegmentView, SkipsAreasOfANewerMinorVersion) {
  Bytes bytes = MakeSmall();
  HeaderOf(bytes).minor = 7;
  HeaderOf(bytes).area[3] = {
      .kind = 77, .stride = 0, .offset = 1, .count = ~uint64_t{0}, .reserved = 1};

  const SegmentView view = SegmentView::FromBytes(bytes).value();

  EXPECT_TRUE(ReadPairs(view).empty());
  EXPECT_EQ(ReadComms(view).size(), 1u);
}

TEST(SegmentView, RefusesWhatIsNoSegment) {
  const UniqueFd folder(open("/tmp", O_RDONLY | O_CLOEXEC));
  EXPECT_FALSE(SegmentView::Open(folder.get()).ok());
  const UniqueFd zeros(open("/dev/zero", O_RDONLY | O_CLOEXEC));
  EXPECT_FALSE(SegmentView::Open(zeros.get()).ok());
  EXPECT_FALSE(SegmentView::Open(-1).ok());
  EXPECT_FALSE(SegmentView::FromBytes({}).ok());
  UniqueFd huge(open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  ASSERT_EQ(ftruncate(huge.get(), off_t{1} << 40), 0);
  EXPECT_FALSE(SegmentView::Open(huge.get()).ok());
}

TEST(SegmentView, NeverCrashesOnACutFile) {
  const Bytes good = MakeSmall();
  for (size_t size = 0; size < good.size(); size += size < 600 ? 1 : 509) {
    EXPECT_FALSE(StatusOf(Bytes(good.begin(), good.begin() + static_cast<long>(size))).ok())
        << size;
    Bytes admitted(good.begin(), good.begin() + static_cast<long>(size));
    if (size < sizeof(SegmentHeader)) continue;
    HeaderOf(admitted).segment_bytes = size;  // the cut is not owned up to
    EXPECT_FALSE(StatusOf(admitted).ok()) << size;
  }
}

TEST(SegmentView, NeverCrashesOnFlippedBits) {
  const Bytes good = MakeSmall();
  auto random = testing::SeededRandom();
  for (int i = 0; i < testing::Repeats(20'000); ++i) {
    Bytes bad = good;
    const int flips = 1 + static_cast<int>(random() % 8);
    for (int flip = 0; flip < flips; ++flip) {
      const size_t range =
          random() % 2 == 0 ? 0x400 : bad.size();  // half of them where the header has meaning
      bad[random() % range] ^= static_cast<std::byte>(1 << random() % 8);
    }
    StatusOf(bad).IgnoreError();
  }
}

TEST(SegmentView, NeverCrashesOnWordsOfAnEnemy) {
  const Bytes good = MakeSmall();
  auto random = testing::SeededRandom();
  const uint64_t words[] = {0,
                            1,
                            7,
                            8,
                            63,
                            64,
                            4096,
                            0xffff,
                            0xffffffff,
                            0x80000000,
                            uint64_t{1} << 63,
                            ~uint64_t{0},
                            good.size(),
                            good.size() - 1,
                            good.size() - 8,
                            ~uint64_t{0} - 4095};
  for (int i = 0; i < testing::Repeats(20'000); ++i) {
    Bytes bad = good;
    for (int change = 0; change < 3; ++change) {
      const bool in_table = random() % 2 == 0;
      const size_t at =
          in_table ? 0x200 + random() % 0x100 / 4 * 4 : random() % (bad.size() / 8) * 8;
      const uint64_t word = random() % 4 == 0 ? random() : words[random() % std::size(words)];
      std::memcpy(bad.data() + at, &word, in_table && random() % 2 == 0 ? 4 : 8);
    }
    StatusOf(bad).IgnoreError();
  }
}

TEST(SegmentView, BelievesNoRecordWithAFlippedBit) {
  Bytes bytes = MakeSmall();
  const AreaEntry rings = HeaderOf(bytes).area[4];
  const AreaEntry log = HeaderOf(bytes).area[5];
  bytes[rings.offset + 10 * 64 + 30] ^= std::byte{1};    // record 11
  bytes[log.offset + 20 * 128 + 100] ^= std::byte{128};  // record 21
  // A whole record in the place of another.
  std::copy_n(bytes.begin() + static_cast<long>(rings.offset), 64,
              bytes.begin() + static_cast<long>(rings.offset) + 64);

  const SegmentView view = SegmentView::FromBytes(bytes).value();

  const FlightRing ring = ReadFlightRing(view, 0);
  EXPECT_EQ(ring.records.size(), 58u);
  EXPECT_EQ(ring.lost, 2u);
  const StepLogRead steps = ReadStepLog(view, 1);
  EXPECT_EQ(steps.records.size(), 59u);
  EXPECT_EQ(steps.lost, 1u);
  EXPECT_EQ(steps.next_seq, 61u);
}

}  // namespace
}  // namespace outlast
