#include "outlast/blackbox/flight_log.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "outlast/blackbox/step_log.h"
#include "tests/blackbox/support.h"

namespace outlast {
namespace {

using ::outlast::testing::Child;
using ::outlast::testing::Gate;
using ::outlast::testing::SharedWords;

Segment MakeSegment() { return Segment::Create({.generation = 7, .world = 2}).value(); }
SegmentView ViewOf(const Segment& segment) { return SegmentView::Open(segment.fd()).value(); }

TEST(FlightLog, WritesItsRecordByteForByte) {
  Segment segment = MakeSegment();
  FlightLog log = FlightLog::ForThisThread(segment);
  log.Record({.kind = FlightKind::kEntered,
              .comm = 2,
              .signature = 0xdeadbeef,
              .t_ns = 0x1122334455667788,
              .op_seq = 9,
              .bytes = 4096,
              .aux = 5,
              .call_site = 0x18});

  FlightRecord record = ReadFlightRing(ViewOf(segment), 0).records.at(0);

  EXPECT_EQ(record.thread, static_cast<uint32_t>(gettid()));
  const std::string hex = testing::HexOf(record);
  EXPECT_EQ(hex.substr(0, 104),
            "0100000000000000"
            "8877665544332211"
            "0100"
            "0200"
            "efbeadde"
            "0900000000000000"
            "0010000000000000"
            "0500000000000000"
            "18000000");
  EXPECT_EQ(hex.substr(112, 8), "07000000");
}

TEST(FlightLog, ReadsARecordOfAnotherProgram) {
  // The record above for thread 0x0badcafe; the CRC was computed bit by bit from the polynomial
  // 0x82f63b78.
  Segment segment = MakeSegment();
  FlightRecord record = {.seq = 1,
                         .t_ns = 0x1122334455667788,
                         .kind = 1,
                         .comm = 2,
                         .signature = 0xdeadbeef,
                         .op_seq = 9,
                         .bytes = 4096,
                         .aux = 5,
                         .call_site = 0x18,
                         .thread = 0x0badcafe,
                         .generation = 7,
                         .crc = 0x218148ca};
  std::memcpy(segment.area(AreaKind::kFlightRings).data(), &record, sizeof(record));

  EXPECT_EQ(ReadFlightRing(ViewOf(segment), 0).records.size(), 1u);
}

TEST(FlightLog, KeepsTheLastLapWhenItWraps) {
  Segment segment = MakeSegment();
  FlightLog log = FlightLog::ForThisThread(segment);
  for (uint64_t i = 1; i <= 10'000; ++i) log.Record({.op_seq = i});

  const FlightRing ring = ReadFlightRing(ViewOf(segment), 0);

  ASSERT_EQ(ring.records.size(), 4096u);
  EXPECT_EQ(ring.records.front().op_seq, 10'000u - 4095);
  EXPECT_EQ(ring.records.back().op_seq, 10'000u);
  EXPECT_EQ(ring.overwritten, 10'000u - 4096);
  EXPECT_EQ(ring.lost, 0u);
}

TEST(FlightLog, GivesEachThreadARingAndCountsTheSeventeenth) {
  Segment segment = MakeSegment();
  std::vector<FlightLog> logs(17);
  for (size_t i = 0; i < logs.size(); ++i) {
    std::thread([&, i] {
      logs[i] = FlightLog::ForThisThread(segment);
      logs[i].Record({.op_seq = i});
    }).join();
  }

  const SegmentView view = ViewOf(segment);
  for (uint32_t ring = 0; ring < 16; ++ring) {
    EXPECT_EQ(ReadFlightRing(view, ring).records.at(0).op_seq, ring);
  }
  EXPECT_FALSE(logs[16].has_ring());
  EXPECT_EQ(ReadProgress(view, 0).flight_overflow, 1u);
  EXPECT_TRUE(ReadFlightRing(view, 16).records.empty());
}

TEST(FlightLog, GivesARingBackAndGoesOnAfterItsLastRecord) {
  Segment segment = MakeSegment();
  for (uint64_t i = 1; i <= 3; ++i) {
    FlightLog log = FlightLog::ForThisThread(segment);
    EXPECT_EQ(log.ring(), 0u);
    log.Record({.op_seq = i});
  }

  const FlightRing ring = ReadFlightRing(ViewOf(segment), 0);

  ASSERT_EQ(ring.records.size(), 3u);
  EXPECT_EQ(ring.records.back().seq, 3u);
}

TEST(FlightLog, GoesOnAfterEveryLengthOfAnOlderProcess) {
  for (const uint64_t length : {1, 2, 4095, 4096, 4097, 6000, 8191, 8192, 8193}) {
    Segment segment = MakeSegment();
    {
      FlightLog log = FlightLog::ForThisThread(segment);
      for (uint64_t i = 1; i <= length; ++i) log.Record({.op_seq = i});
    }
    FlightLog next = FlightLog::ForThisThread(segment);
    next.Record({.op_seq = length + 1});
    const FlightRing ring = ReadFlightRing(ViewOf(segment), 0);
    EXPECT_EQ(ring.records.back().seq, length + 1);
    EXPECT_EQ(ring.records.back().op_seq, length + 1);
    EXPECT_EQ(ring.lost, 0u) << length;
  }
}

TEST(FlightLog, IsReadWholeWhileThreadsWrite) {
  Segment segment = MakeSegment();
  const SegmentView view = ViewOf(segment);
  std::atomic<bool> stop = false;
  std::vector<std::thread> writers;
  for (int t = 0; t < 3; ++t) {
    writers.emplace_back([&] {
      FlightLog log = FlightLog::ForThisThread(segment);
      for (uint64_t i = 1; !stop.load(); ++i) log.Record({.op_seq = i, .bytes = i * 3, .aux = ~i});
    });
  }

  uint64_t seen = 0;
  for (int look = 0; look < testing::Repeats(400); ++look) {
    for (const FlightRecord& record :
         ReadFlightRing(view, static_cast<uint32_t>(look % 3)).records) {
      ASSERT_EQ(record.bytes, record.op_seq * 3);
      ASSERT_EQ(record.aux, ~record.op_seq);
      ++seen;
    }
  }
  stop = true;
  for (std::thread& writer : writers) writer.join();
  EXPECT_GT(seen, 0u);
}

TEST(FlightLog, ShowsTheOldRecordTheNewOneOrNoneAfterEveryStoreOfAWrite) {
  Segment segment = MakeSegment();
  FlightLog log = FlightLog::ForThisThread(segment);
  for (uint64_t i = 1; i <= 4096; ++i) log.Record({.t_ns = i, .op_seq = i, .bytes = i, .aux = i});
  const std::span<std::byte> place =
      segment.area(AreaKind::kFlightRings).first(sizeof(FlightRecord));
  const std::vector<std::byte> old_bytes(place.begin(), place.end());
  log.Record({.t_ns = 4097, .op_seq = 4097, .bytes = 4097, .aux = 4097});
  const std::vector<std::byte> new_bytes(place.begin(), place.end());

  for (size_t stores = 0; stores <= 8; ++stores) {  // the writer died after so many
    std::copy(old_bytes.begin(), old_bytes.end(), place.begin());
    std::copy_n(new_bytes.begin(), 8 * stores, place.begin());
    const FlightRing ring = ReadFlightRing(ViewOf(segment), 0);
    EXPECT_EQ(ring.records.size(), stores == 0 || stores == 8 ? 4096u : 4095u) << stores;
    EXPECT_EQ(ring.records.back().op_seq, stores == 8 ? 4097u : 4096u) << stores;
    EXPECT_EQ(ring.lost, 0u);
  }
}

// The whole life of a killed writer: it logs, steps and opens sections as fast as it can, and dies
// anywhere.
void WriteUntilKilled(int fd, SharedWords& finished, Gate& under_way) {
  Segment segment = Segment::Open(Duplicate(fd).value()).value();
  ProgressWriter progress(segment);
  const uint16_t name = progress.Intern("forward");
  FlightLog log = FlightLog::ForThisThread(segment);
  StepLogWriter steps(segment);
  const uint64_t first = LoadWord(finished[0]) + 1;
  for (uint64_t i = first;; ++i) {
    if (i == first + 1) under_way.Open();
    progress.OpenSection(name, Phase::kForward, 0, i);
    log.Record({.op_seq = i, .bytes = i * 3, .aux = ~i});
    StoreWord(finished[0], i);
    steps.Append({.step = i, .start_ns = i * 5, .end_ns = ~i});
    StoreWord(finished[1], i);
    progress.CloseSection();
  }
}

TEST(FlightLog, LosesAtMostOneRecordOfAKilledWriterAndAcceptsNoTornOne) {
  Segment segment = MakeSegment();
  const SegmentView view = ViewOf(segment);
  SharedWords finished;
  Gate under_way;
  auto random = testing::SeededRandom();
  uint64_t torn = 0;
  uint64_t next_step_seq = 1;
  for (int round = 0; round < testing::Repeats(2'000); ++round) {
    Child writer([&] { WriteUntilKilled(segment.fd(), finished, under_way); });
    under_way.Wait();
    for (uint64_t spin = random() % 20'000; spin > 0; --spin) LoadWord(finished[0]);
    writer.Kill();

    const FlightRing ring = ReadFlightRing(view, 0);
    ASSERT_FALSE(ring.records.empty());
    for (const FlightRecord& record : ring.records) {
      ASSERT_EQ(record.bytes, record.op_seq * 3);
      ASSERT_EQ(record.aux, ~record.op_seq);
    }
    ASSERT_EQ(ring.lost, 0u);  // the one at the head is not between others
    ASSERT_GE(ring.records.back().op_seq, finished[0]);
    ASSERT_LE(ring.records.back().op_seq, finished[0] + 1);
    torn += ring.records.back().seq > 4096 && ring.records.size() < 4096 ? 1 : 0;
    ASSERT_GE(ring.records.size(), std::min<uint64_t>(ring.records.back().seq, 4095));

    const StepLogRead steps = ReadStepLog(view, next_step_seq);
    next_step_seq = steps.next_seq;
    ASSERT_FALSE(steps.records.empty());
    for (const StepRecord& record : steps.records) {
      ASSERT_EQ(record.start_ns, record.step * 5);
      ASSERT_EQ(record.end_ns, ~record.step);
    }
    ASSERT_GE(steps.records.back().step, finished[1]);
    ASSERT_EQ(steps.records.back().seq + 1, steps.next_seq);
    ASSERT_LE(ReadProgress(view, 0).sections.size(), 1u);
  }
  std::printf("%llu kills left a torn record\n", static_cast<unsigned long long>(torn));
}

// ---- Communicators ----

const std::vector<uint32_t> kMembers = {4, 5, 6, 7};

TEST(Signature, IsFnv1aOverTheFieldsInOrder) {
  // FNV-1a 64 of 04 07 00 1f, ff ff ff ff, 00 04 00 00 00 00 00 00.
  EXPECT_EQ(
      Signature(
          {.function = 4, .datatype = 7, .reduction = 0, .known = 31, .root = -1, .count = 1024}),
      0x8d6d15f6d79e9e31u);
}

TEST(Signature, AgreesOverWhatBothKnow) {
  const OperationSignature linked = {
      .function = 4, .datatype = 7, .reduction = 2, .known = 31, .count = 10};
  OperationSignature plugged = linked;
  plugged.known = 31 & ~kKnowsReduction;
  plugged.reduction = 0;
  EXPECT_TRUE(Agree(linked, plugged));
  plugged.count = 11;
  EXPECT_FALSE(Agree(linked, plugged));
}

TEST(CommCell, ShowsItsCommunicator) {
  Segment segment = MakeSegment();
  CommCell cell = CommCell::Open(segment, {.id_hash = 0xabc,
                                           .my_rank = 2,
                                           .members = kMembers,
                                           .kind = CommKind::kData,
                                           .name = "a name of more than thirty-one bytes"})
                      .value();
  cell.SetState(CommState::kReady, 5);
  const OperationSignature operation = {
      .function = 4, .datatype = 7, .known = 31, .root = 3, .count = 100};
  EXPECT_EQ(cell.Enter(operation, 10), 1u);
  EXPECT_EQ(cell.Enter(operation, 20), 2u);

  const SegmentView view = ViewOf(segment);
  const CommSnapshot comm = ReadComms(view).at(0);
  EXPECT_EQ(comm.index, cell.index());
  EXPECT_EQ(comm.id_hash, 0xabcu);
  EXPECT_EQ(comm.size, 4u);
  EXPECT_EQ(comm.my_rank, 2u);
  EXPECT_EQ(comm.kind, CommKind::kData);
  EXPECT_EQ(comm.state, CommState::kReady);
  EXPECT_EQ(comm.name, "a name of more than thirty-one ");
  EXPECT_EQ(comm.api_seq, 2u);
  EXPECT_EQ(comm.launched_seq, kUnknownSeq);
  EXPECT_EQ(comm.done_seq, kUnknownSeq);
  EXPECT_EQ(comm.last_signature, Signature(operation));
  EXPECT_EQ(comm.changed_ns, 20u);
  EXPECT_EQ(view.Members(comm.members_digest), kMembers);
  const std::vector<KeptOperation> kept = ReadOperations(view, comm.index);
  ASSERT_EQ(kept.size(), 2u);
  EXPECT_EQ(kept[1].seq, 2u);
  EXPECT_EQ(kept[1].operation, operation);
}

TEST(CommCell, KeepsTheLastSixtyFourOperations) {
  Segment segment = MakeSegment();
  CommCell cell = CommCell::Open(segment, {.id_hash = 1, .members = kMembers}).value();
  for (uint64_t i = 1; i <= 1000; ++i) cell.Enter({.count = i}, i);

  const SegmentView view = ViewOf(segment);
  const std::vector<KeptOperation> kept = ReadOperations(view, cell.index());

  ASSERT_EQ(kept.size(), 64u);
  EXPECT_EQ(kept.front().seq, 937u);
  EXPECT_EQ(kept.back().operation.count, 1000u);
  EXPECT_EQ(ReadComms(view).at(0).oldest_kept_seq, 937u);
}

TEST(CommCell, TellsWhatRunsOnceThatIsKnown) {
  Segment segment = MakeSegment();
  CommCell cell = CommCell::Open(segment, {.id_hash = 1, .members = kMembers}).value();
  cell.SetProgressIsKnown();
  EXPECT_EQ(ReadComms(ViewOf(segment)).at(0).done_seq, 0u);

  cell.SetLaunched(3, 1);
  cell.SetStarted(2, 2);
  cell.SetDone(1, 3);
  cell.SetAsyncError(6, 4);
  cell.SetAsyncError(7, 5);

  const CommSnapshot comm = ReadComms(ViewOf(segment)).at(0);
  EXPECT_EQ(comm.launched_seq, 3u);
  EXPECT_EQ(comm.started_seq, 2u);
  EXPECT_EQ(comm.done_seq, 1u);
  EXPECT_EQ(comm.async_error, 6);  // the first stays
}

TEST(CommCell, LeavesItsHistoryUntilTheRowIsNeeded) {
  Segment segment = MakeSegment();
  for (uint64_t id = 1; id <= 256; ++id) {
    CommCell cell = CommCell::Open(segment, {.id_hash = id, .members = kMembers}).value();
    cell.Enter({.count = id}, id);
    if (id == 2) cell.SetState(CommState::kAborted, id);
  }
  EXPECT_EQ(ReadComms(ViewOf(segment)).size(), 256u);
  EXPECT_EQ(ReadComms(ViewOf(segment)).at(0).state, CommState::kClosed);
  EXPECT_EQ(ReadComms(ViewOf(segment)).at(1).state, CommState::kAborted);

  const CommCell cell = CommCell::Open(segment, {.id_hash = 1000, .members = kMembers}).value();

  EXPECT_EQ(cell.index(), 0u);  // the one left longest ago
  EXPECT_EQ(ReadComms(ViewOf(segment)).at(0).id_hash, 1000u);
  EXPECT_TRUE(ReadOperations(ViewOf(segment), 0).empty());
}

TEST(CommCell, RefusesTheTwoHundredAndFiftySeventhAtOneTime) {
  Segment segment = MakeSegment();
  std::vector<CommCell> cells;
  for (uint64_t id = 1; id <= 256; ++id) {
    cells.push_back(CommCell::Open(segment, {.id_hash = id, .members = kMembers}).value());
  }
  EXPECT_EQ(CommCell::Open(segment, {.id_hash = 300, .members = kMembers}).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(CommCell::Open(segment, {.id_hash = 0, .members = kMembers}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(PairCell, CountsBothDirections) {
  Segment segment = MakeSegment();
  PairCell pair = PairCell::Open(segment, 5, 3).value();
  pair.EnterSend();
  pair.EnterSend();
  pair.FinishSend();
  pair.EnterReceive();

  const std::vector<PairRow> pairs = ReadPairs(ViewOf(segment));

  ASSERT_EQ(pairs.size(), 1u);
  EXPECT_EQ(testing::HexOf(pairs[0]),
            "0500000000000000"
            "03000000"
            "00000000"
            "0200000000000000"
            "0100000000000000"
            "0100000000000000"
            "0000000000000000");
}

}  // namespace
}  // namespace outlast
