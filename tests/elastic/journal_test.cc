#include "outlast/elastic/journal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "outlast/base/crc32c.h"
#include "outlast/base/status.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;

RankMap TwoNodes() {
  return {.runs = {{.node = "a", .incarnation = 7, .segment = "s", .first_rank = 0, .count = 2},
                   {.node = "b", .incarnation = 8, .segment = "s", .first_rank = 2, .count = 2}},
          .world = 4,
          .micro_batches = 3};
}

// One of each kind, as a job might write them.
std::vector<JournalPayload> Story() {
  const FaultRecord fault{.rank = 3,
                          .generation = 1,
                          .end = {.signal = 9},
                          .detail = "rank 3",
                          .root = 77,
                          .node = "b"};
  return {StartedRecord{Id128::FromName("run"), 1},
          TermsRecord{"a", {{"-n", "2"}, {"--fresh", "given"}}},
          FormingRecord{1, "first"},
          CommittedRecord{{.generation = 1,
                           .map = TwoNodes(),
                           .plain = {1},
                           .bootstrap = "a:1",
                           .lead_address = "a:2"}},
          FaultedRecord{.fault = fault,
                        .agent = 8,
                        .process = 4,
                        .charged = true,
                        .restarts = true,
                        .at = absl::Seconds(5)},
          FormingRecord{2, "rank 3"},
          ExcludedRecord{"b", "ecc", absl::Seconds(1805)},
          CommittedRecord{{.generation = 2, .map = TwoNodes(), .resume = {{1, 9}, {0, 5}}}},
          NextRecord{1},
          RefundedRecord{10, 11},
          FinishedRecord{{1, 3}},
          PlainDoneRecord{{1}},
          SaveFailedRecord{"", "disk full"},
          StopBegunRecord{15, "signal 15"},
          StopWentRecord{14},
          StopGaveUpRecord{true, "late"},
          StartedRecord{Id128::FromName("run"), 2},
          EndingRecord{83, "used up", true},
          EndedRecord{83, "used up"}};
}
std::string Write(const std::vector<JournalPayload>& story, std::vector<size_t>* ends = nullptr) {
  CoordinatorState state;
  std::string bytes;
  for (const JournalPayload& record : story) {
    bytes += EncodeJournalRecord(state, record);
    state.Apply(record);
    if (ends != nullptr) ends->push_back(bytes.size());
  }
  return bytes;
}

TEST(Journal, ARecordIsAHeaderOfThirtyTwoBytesAndItsFields) {
  CoordinatorState state;
  state.records = 5;
  state.incarnation = 6;
  const std::string bytes = EncodeJournalRecord(state, StopWentRecord{0x0102});
  const unsigned char wanted[] = {9, 0, 0, 0, 0, 0,    0,    0, 5, 0, 0, 0, 0, 0,
                                  0, 0, 6, 0, 0, 0,    0,    0, 0, 0, 0, 0, 0, 0,
                                  0, 0, 0, 0, 9, 0x02, 0x01, 0, 0, 0, 0, 0, 0};
  ASSERT_EQ(bytes.size(), sizeof(wanted));
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (i >= 4 && i < 8) continue;  // the checksum
    EXPECT_EQ(static_cast<unsigned char>(bytes[i]), wanted[i]) << i;
  }
}

TEST(Journal, EachKindIsReadAsItWasWritten) {
  const auto content = ReadJournal(Write(Story()));
  ASSERT_TRUE(content.ok()) << content.status();
  const CoordinatorState& state = content->state;
  EXPECT_EQ(content->torn, "");
  EXPECT_EQ(state.records, 19u);
  EXPECT_EQ(state.incarnation, 2u);
  EXPECT_EQ(state.run_id, Id128::FromName("run"));
  EXPECT_EQ(state.generation(), 2u);
  EXPECT_EQ(state.commit.map, TwoNodes());
  EXPECT_EQ(state.commit.resume[0], (control::ResumeCandidate{1, 9}));
  EXPECT_EQ(state.commit.candidate, 1);
  EXPECT_EQ(state.step_committed, 10);
  EXPECT_EQ(state.history.crashes, 0) << "refunded";
  EXPECT_EQ(state.history.restart_times.size(), 1u) << "progress refunds no hour";
  EXPECT_EQ(state.excluded[0].node, "b");
  EXPECT_TRUE(state.is_finished(3));
  EXPECT_THAT(state.plain_done, testing::ElementsAre(1));
  EXPECT_EQ(state.final_save_failed, "disk full");
  EXPECT_EQ(state.stop_went, 14);
  EXPECT_TRUE(state.stop_hurries);
  EXPECT_EQ(state.ended->exit_code, 83);
  EXPECT_EQ(state.terms.node, "a");
  EXPECT_EQ(state.terms.terms, (Terms{{"-n", "2"}, {"--fresh", "given"}}));
}

TEST(Journal, CutAtAnyByteItHoldsTheWholeRecordsBefore) {
  std::vector<size_t> ends;
  const std::string bytes = Write(Story(), &ends);
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    const auto content = ReadJournal(std::string_view(bytes).substr(0, cut));
    ASSERT_TRUE(content.ok()) << cut << content.status();
    size_t whole = 0;
    while (whole < ends.size() && ends[whole] <= cut) ++whole;
    ASSERT_EQ(content->state.records, whole) << cut;
    ASSERT_EQ(content->valid_bytes, whole == 0 ? 0 : ends[whole - 1]) << cut;
    ASSERT_EQ(content->torn.empty(), content->valid_bytes == cut) << cut;
  }
}

TEST(Journal, ATornTailIsCutAndDamageBeforeTheTailIsRefused) {
  std::vector<size_t> ends;
  const std::string bytes = Write(Story(), &ends);
  for (size_t at = 0; at < bytes.size(); ++at) {
    std::string damaged = bytes;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    const auto content = ReadJournal(damaged);
    if (at < ends[ends.size() - 2]) {
      ASSERT_EQ(content.status().code(), absl::StatusCode::kDataLoss) << at;
    } else {
      ASSERT_TRUE(content.ok()) << at;
      ASSERT_EQ(content->valid_bytes, ends[ends.size() - 2]) << at;
    }
  }
}

TEST(Journal, TwoWritersOfOneJournalAreFound) {
  CoordinatorState state;
  std::string bytes = EncodeJournalRecord(state, StartedRecord{Id128{}, 2});
  state.Apply(StartedRecord{Id128{}, 2});
  CoordinatorState other = state;
  other.incarnation = 1;
  const std::string old = bytes + EncodeJournalRecord(other, StopWentRecord{3});
  EXPECT_THAT(std::string(MessageOf(ReadJournal(old).status())),
              HasSubstr("record 1 at offset 57 of the journal: written by incarnation 1 after 2"));
  bytes += EncodeJournalRecord(state, StopWentRecord{3});
  bytes += EncodeJournalRecord(state, StopWentRecord{4});
  EXPECT_THAT(std::string(MessageOf(ReadJournal(bytes).status())), HasSubstr("its index is 1"));
}

TEST(Journal, CountsThatNoBytesAreBehindAndOddKindsAreRefused) {
  CoordinatorState state;
  std::string bytes = EncodeJournalRecord(state, FinishedRecord{{1}});
  // Its count says four thousand million ranks; the checksum is right.
  std::memset(bytes.data() + kJournalHeaderBytes + 1, 0xff, 4);
  const auto with_crc = [](std::string record) {
    const uint32_t crc = Crc32c(std::string_view(record).substr(8));
    std::memcpy(record.data() + 4, &crc, sizeof(crc));
    return record;
  };
  EXPECT_EQ(ReadJournal(with_crc(bytes)).status().code(), absl::StatusCode::kDataLoss);
  std::string odd = EncodeJournalRecord(state, StopWentRecord{1});
  odd[kJournalHeaderBytes] = 99;
  EXPECT_THAT(std::string(MessageOf(ReadJournal(with_crc(odd)).status())), HasSubstr("kind 99"));
}

TEST(CoordinatorState, BindsWhoGoesOnFromItToTheTermsOfItsAgentsWhileTheJobLasts) {
  const Terms alike = {{"-n", "2"}, {"--spares", "1"}};
  const Terms unlike = {{"-n", "4"}, {"--spares", "1"}};
  CoordinatorState state;
  state.Apply(TermsRecord{"a", {{"-n", "2"}, {"--fresh", "given"}}});
  EXPECT_EQ(WhyUnlike(state, unlike), "");  // nothing was done by them yet
  state.Apply(CommittedRecord{{.generation = 1, .map = TwoNodes()}});
  EXPECT_EQ(WhyUnlike(state, alike), "");
  EXPECT_EQ(WhyUnlike(state, unlike),
            "this coordinator is not started as the job's agents were: -n 4, 2 wanted");
  state.Apply(EndedRecord{0, "finished"});
  EXPECT_EQ(WhyUnlike(state, unlike), "");
}

// The state after the first `count` records of the story.
CoordinatorState After(size_t count) {
  CoordinatorState state;
  for (size_t i = 0; i < count; ++i) state.Apply(Story()[i]);
  return state;
}

TEST(Journal, ABaseStandsForAllRecordsUpToItsOwn) {
  const std::string all = EncodeJournalBase(After(Story().size()));
  for (size_t count = 1; count <= Story().size(); ++count) {
    CoordinatorState state = After(count);
    std::string bytes = EncodeJournalBase(state);
    for (size_t i = count; i < Story().size(); ++i) {
      bytes += EncodeJournalRecord(state, Story()[i]);
      state.Apply(Story()[i]);
    }
    const auto content = ReadJournal(bytes);
    ASSERT_TRUE(content.ok()) << content.status();
    EXPECT_EQ(content->valid_bytes, bytes.size());
    EXPECT_EQ(content->state.records, Story().size());
    EXPECT_EQ(EncodeJournalBase(content->state), all) << count;
  }
}

// As one finds it who reads while the records are taken away.
// Who is done for ever came later.
TEST(Journal, ABaseOfAnOlderProgramEndsEarlier) {
  CoordinatorState state = After(Story().size());
  state.plain_done.clear();
  std::string base = EncodeJournalBase(state);
  const std::string now = base;
  base.resize(base.size() - sizeof(uint32_t));  // the count
  const auto length = static_cast<uint32_t>(base.size() - kJournalHeaderBytes);
  std::memcpy(base.data(), &length, sizeof(length));
  const uint32_t crc = Crc32c(std::string_view(base).substr(8));
  std::memcpy(base.data() + 4, &crc, sizeof(crc));

  const auto content = ReadJournal(base);
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_EQ(EncodeJournalBase(content->state), now);
}

TEST(Journal, ABaseMayFollowRecordsThatItStandsForAndIsNeverOlder) {
  std::vector<size_t> ends;
  const std::string records = Write(Story(), &ends);
  const std::string some = records.substr(0, ends[4]);

  const auto content = ReadJournal(some + EncodeJournalBase(After(9)));
  ASSERT_TRUE(content.ok()) << content.status();
  EXPECT_EQ(content->state.records, 9u);
  EXPECT_EQ(content->state.generation(), 2u);
  EXPECT_THAT(std::string(MessageOf(ReadJournal(some + EncodeJournalBase(After(3))).status())),
              HasSubstr("its index is 2"));
}

TEST(Journal, ADamagedBaseIsNoTornTail) {
  const std::string base = EncodeJournalBase(After(Story().size()));
  for (size_t at = 0; at < base.size(); ++at) {
    std::string damaged = base;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x40);
    EXPECT_EQ(ReadJournal(damaged).status().code(), absl::StatusCode::kDataLoss) << at;
  }
  for (size_t keep = kJournalHeaderBytes; keep < base.size(); ++keep) {
    EXPECT_EQ(ReadJournal(std::string_view(base).substr(0, keep)).status().code(),
              absl::StatusCode::kDataLoss)
        << keep;
  }
}

}  // namespace
}  // namespace outlast
