#include "outlast/blackbox/step_log.h"

#include <atomic>
#include <string>
#include <thread>

#include "tests/blackbox/support.h"

namespace outlast {
namespace {

struct Fixture {
  Segment segment = Segment::Create({}).value();
  StepLogWriter writer{segment};
  SegmentView view = SegmentView::Open(segment.fd()).value();

  void Append(uint64_t from, uint64_t to) {
    for (uint64_t step = from; step <= to; ++step) writer.Append({.step = step});
  }
};

TEST(StepLog, WritesItsRecordByteForByte) {
  Fixture f;
  f.writer.Append({.seq = 99,
                   .step = 41,
                   .start_ns = 1000,
                   .end_ns = 2000,
                   .data_ns = 100,
                   .forward_ns = 300,
                   .backward_ns = 400,
                   .optimizer_ns = 150,
                   .checkpoint_stall_ns = 50,
                   .collective_wait_ns = 25,
                   .tokens_real = 8100,
                   .tokens_padded = 8192,
                   .tokens_loss = 8000,
                   .samples = 4,
                   .model_flops = 1.5e12,
                   .generation = 3,
                   .loss = 2.5f,
                   .gradient_norm = 0.75f,
                   .flags = kStepWarmUp | kStepAborted,
                   .zero = 0xffff,
                   .crc = 0xffffffff});

  // The CRC was computed bit by bit from the polynomial 0x82f63b78.
  EXPECT_EQ(testing::HexOf(ReadStepLog(f.view, 1).records.at(0)),
            "01000000000000002900000000000000e803000000000000d007000000000000"
            "64000000000000002c0100000000000090010000000000009600000000000000"
            "32000000000000001900000000000000a41f000000200000401f000004000000"
            "00008079efd375420300000000000000000020400000403f05000000"
            "4966c06d");
}

TEST(StepLog, IsDrainedBitByBit) {
  Fixture f;
  EXPECT_EQ(ReadStepLog(f.view, 1).next_seq, 1u);
  f.Append(1, 10);
  StepLogRead read = ReadStepLog(f.view, 1);
  EXPECT_EQ(read.records.size(), 10u);
  f.Append(11, 12);

  read = ReadStepLog(f.view, read.next_seq);

  ASSERT_EQ(read.records.size(), 2u);
  EXPECT_EQ(read.records[0].step, 11u);
  EXPECT_EQ(read.next_seq, 13u);
  EXPECT_EQ(read.lost, 0u);
}

TEST(StepLog, CountsWhatWasOverwrittenBeforeItWasRead) {
  Fixture f;
  f.Append(1, 3 * kStepRecords + 100);

  const StepLogRead read = ReadStepLog(f.view, 51);

  ASSERT_EQ(read.records.size(), kStepRecords);
  EXPECT_EQ(read.records.front().step, 2 * kStepRecords + 101);
  EXPECT_EQ(read.lost, 2 * kStepRecords + 50);
  EXPECT_EQ(read.next_seq, 3 * kStepRecords + 101);
}

TEST(StepLog, GoesOnAfterAnOlderProcess) {
  for (const uint64_t length : {uint64_t{1}, uint64_t{kStepRecords}, uint64_t{kStepRecords} + 1}) {
    Fixture f;
    f.Append(1, length);
    StepLogWriter next(f.segment);
    EXPECT_EQ(next.Append({.step = 7}), length + 1);
  }
}

TEST(StepLog, EndsBeforeARecordThatIsTornAtTheHead) {
  Fixture f;
  f.Append(1, kStepRecords + 5);
  f.segment.area(AreaKind::kStepLog)[5 * 128] ^=
      std::byte{1};  // record 6 of the older lap, half overwritten

  StepLogRead read = ReadStepLog(f.view, 1);
  EXPECT_EQ(read.records.back().seq, kStepRecords + 5);
  EXPECT_EQ(read.records.size(), kStepRecords - 1);

  StepLogWriter next(f.segment);
  EXPECT_EQ(next.Append({.step = 1}), kStepRecords + 6);
}

TEST(StepLog, IsReadWholeWhileItIsWritten) {
  Fixture f;
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    for (uint64_t i = 1; !stop.load(); ++i)
      f.writer.Append({.step = i, .start_ns = i * 5, .end_ns = ~i});
  });
  uint64_t next = 1;
  uint64_t seen = 0;
  for (int look = 0; look < testing::Repeats(2'000); ++look) {
    const StepLogRead read = ReadStepLog(f.view, next);
    for (const StepRecord& record : read.records) {
      ASSERT_EQ(record.seq, record.step);
      ASSERT_EQ(record.start_ns, record.step * 5);
      ASSERT_EQ(record.end_ns, ~record.step);
    }
    seen += read.records.size() + read.lost;
    next = read.next_seq;
    ASSERT_EQ(seen, next - 1);
  }
  stop = true;
  writer.join();
}

}  // namespace
}  // namespace outlast
