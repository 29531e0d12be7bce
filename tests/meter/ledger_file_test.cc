#include "outlast/meter/ledger_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "outlast/base/crc32c.h"
#include "tests/meter/ledger_builder.h"
#include "tests/support/temp_folder.h"

namespace outlast {
namespace {

class LedgerFile : public ::testing::Test {
 protected:
  void WriteBytes(std::string_view bytes) const { std::ofstream(path_, std::ios::binary) << bytes; }

  const TempFolder temp_;
  const std::string folder_ = temp_.path();
  const std::string path_ = temp_ / "ledger.bin";
};

// One of each kind, with no field at its default.
std::vector<LedgerEntry> OneOfEach() {
  return {
      ClockDomainEntry{Id128::FromName("j"), Id128::FromName("r"), Id128::FromName("b"), 1, 2,
                       "job", "train --x"},
      SubmitEntry{3},
      UpEntry{4, 5, 6, 7, 8},
      DownEntry{9, 10, 11, 12, 13, DownCause::kFault, "signal 9 (SIGKILL)"},
      CommitEntry{14, 15, 16},
      StepEntry{17, 18, 19, 20, 21, 22, 23,   24,   25,   26,
                27, 28, 29, 30, 31, 32, 33.5, 34.5, 35.5, kStepWarmUp},
      SectionEntry{36, 37, 38, 39, Phase::kEval},
      DetectedEntry{40, 41, 42, 43, 44, 45, "hang", "rank 44 is stopped in backward"},
      RollbackEntry{46, 47, 48, 49, StateSource::kPeer},
      CheckpointEntry{50, 51, 52, 53, 54, "no space"},
      RestoreEntry{55, 56, 57, 58, 59, 60, StateSource::kDisk},
      CardsEntry{61, 62, 63},
      EndEntry{64, 83, "restarts used up"},
      MeterEntry{65, 66, 67, 68.5, "a token; causal", "unknown peak (why)"},
      JoinedEntry{69, Id128::FromName("run"), "n1"},
  };
}

TEST_F(LedgerFile, ReadsBackEveryKind) {
  LedgerWriter writer = LedgerWriter::Open(path_).value();
  ASSERT_TRUE(writer.Append(OneOfEach()).ok());
  const LedgerRead read = ReadLedger(path_).value();
  EXPECT_EQ(read.entries, OneOfEach());
  EXPECT_EQ(read.cut_bytes, 0u);
  EXPECT_EQ(read.skipped, 0u);
}

TEST_F(LedgerFile, HasTheDocumentedBytes) {
  std::vector<std::byte> bytes;
  AppendRecord(EndEntry{.time_ns = 0x0102030405060708, .exit_code = 82, .reason = "no"}, bytes);
  // u32 20 bytes, u32 CRC32C, u16 kind 13, u16 version 1, i64, i32, u16 2, "no".
  const unsigned char want[] = {20, 0, 0, 0, 0, 0, 0,  0, 13, 0, 1, 0, 8,   7,
                                6,  5, 4, 3, 2, 1, 82, 0, 0,  0, 2, 0, 'n', 'o'};
  ASSERT_EQ(bytes.size(), sizeof(want));
  std::memset(bytes.data() + 4, 0, 4);
  EXPECT_EQ(std::memcmp(bytes.data(), want, sizeof(want)), 0);
}

TEST_F(LedgerFile, CutAtAnyByteReadsToTheLastWholeRecord) {
  std::vector<std::byte> bytes;
  std::vector<size_t> ends;
  const std::vector<LedgerEntry> entries = OneOfEach();
  for (const LedgerEntry& entry : entries) {
    AppendRecord(entry, bytes);
    ends.push_back(bytes.size());
  }
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    const auto whole =
        static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), cut) - ends.begin());
    WriteBytes({reinterpret_cast<const char*>(bytes.data()), cut});
    const absl::StatusOr<LedgerRead> read = ReadLedger(path_);
    ASSERT_TRUE(read.ok()) << cut << ": " << read.status();
    ASSERT_EQ(read->entries.size(), whole) << cut;
    EXPECT_TRUE(std::equal(read->entries.begin(), read->entries.end(), entries.begin()));
    EXPECT_EQ(read->whole_bytes + read->cut_bytes, cut);

    if (cut % 7 != 0) continue;
    // A writer goes on behind the last whole record.
    ASSERT_TRUE(LedgerWriter::Open(path_).value().Append(OneOfEach()).ok());
    EXPECT_EQ(ReadLedger(path_)->entries.size(), whole + entries.size()) << cut;
  }
}

TEST_F(LedgerFile, StopsAtADamagedRecord) {
  std::vector<std::byte> bytes;
  AppendRecord(OneOfEach()[0], bytes);
  const size_t first = bytes.size();
  AppendRecord(SubmitEntry{3}, bytes);
  AppendRecord(SubmitEntry{4}, bytes);
  bytes[first + 12] ^= std::byte{1};
  const LedgerRead read = ParseLedger(bytes);
  EXPECT_EQ(read.entries.size(), 1u);
  EXPECT_EQ(read.cut_bytes, bytes.size() - first);
}

TEST_F(LedgerFile, SkipsKindsAndFieldsOfANewerVersion) {
  std::vector<std::byte> bytes;
  AppendRecord(OneOfEach()[0], bytes);
  const auto raw = [&](std::vector<unsigned char> payload) {
    const auto* data = reinterpret_cast<const std::byte*>(payload.data());
    const auto length = static_cast<uint32_t>(payload.size());
    const uint32_t crc = Crc32c({data, payload.size()});
    const auto put = [&](const void* from, size_t size) {
      bytes.insert(bytes.end(), static_cast<const std::byte*>(from),
                   static_cast<const std::byte*>(from) + size);
    };
    put(&length, 4);
    put(&crc, 4);
    put(payload.data(), payload.size());
  };
  raw({99, 0, 1, 0, 1, 2, 3});                        // a kind of the future
  raw({2, 0, 2, 0, 7, 0, 0, 0, 0, 0, 0, 0, 42, 42});  // submit, version 2, two more bytes
  raw({2, 0, 1, 0, 7});                               // submit without its time
  const LedgerRead read = ParseLedger(bytes);
  ASSERT_EQ(read.entries.size(), 2u);
  EXPECT_EQ(std::get<SubmitEntry>(read.entries[1]).time_ns, 7);
  EXPECT_EQ(read.skipped, 2u);
}

TEST_F(LedgerFile, RefusesWhatIsNoLedger) {
  EXPECT_EQ(ReadLedger(path_).status().code(), absl::StatusCode::kNotFound);
  WriteBytes("This is a text file, and a rather long one.");
  EXPECT_EQ(ReadLedger(path_).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(LedgerWriter::Open(path_).status().code(), absl::StatusCode::kDataLoss);
  WriteBytes(std::string(100, '\0'));
  EXPECT_EQ(ReadLedger(path_).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReadLedger(folder_).status().code(), absl::StatusCode::kDataLoss);
  std::vector<std::byte> bytes;
  AppendRecord(SubmitEntry{1}, bytes);  // whole, but with no clock to read it by
  WriteBytes({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  EXPECT_EQ(ReadLedger(path_).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(LedgerFile, IsWholeAfterADiskThatWasFull) {
  LedgerWriter writer = LedgerWriter::Open(path_).value();
  ASSERT_TRUE(writer.Append(OneOfEach()[0]).ok());
  const auto size = std::filesystem::file_size(path_);

  // A file size limit in the middle of the next records stands for the full disk.
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto old_handler = signal(SIGXFSZ, SIG_IGN);
  const rlimit tight{size + 30, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &tight), 0);
  EXPECT_FALSE(writer.Append(OneOfEach()).ok());
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, old_handler);

  EXPECT_EQ(std::filesystem::file_size(path_), size);
  ASSERT_TRUE(writer.Append(SubmitEntry{5}).ok());
  EXPECT_EQ(ReadLedger(path_)->entries.size(), 2u);
}

TEST_F(LedgerFile, NeverCrashesOnAnyBytes) {
  std::vector<std::byte> good;
  for (const LedgerEntry& entry : OneOfEach()) AppendRecord(entry, good);
  std::mt19937 random(5);
  for (int i = 0; i < 3000; ++i) {
    std::vector<std::byte> bytes = good;
    for (int flips = 0; flips < 3; ++flips)
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    bytes.resize(random() % (bytes.size() + 1));
    const RunEntries entries = ParseLedger(bytes).entries;
    BuildTimeline({&entries, 1});
  }
}

TEST_F(LedgerFile, TakesAStepFromTheBlackBoxOnItsOwnClock) {
  StepRecord record{};
  record.step = 7;
  record.start_ns = 1000;
  record.end_ns = 1600;
  record.forward_ns = 400;
  record.generation = 3;
  record.loss = 2.5F;
  record.flags = kStepEval;
  const StepEntry entry = ToStepEntry(record, 2, 1, 50);
  EXPECT_EQ(entry.start_ns, 1050);
  EXPECT_EQ(entry.end_ns, 1650);
  EXPECT_EQ(entry.forward_ns, 400);
  EXPECT_EQ(entry.slot, 2);
  EXPECT_EQ(entry.rank, 1);
  EXPECT_EQ(entry.step, 7);
  EXPECT_EQ(entry.generation, 3u);
  EXPECT_DOUBLE_EQ(entry.loss, 2.5);
  EXPECT_EQ(entry.flags, kStepEval);
}

}  // namespace
}  // namespace outlast
