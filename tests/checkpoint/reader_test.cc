#include "checkpoint/reader.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/safetensors.h"
#include "outlast/base/crc32c.h"
#include "tests/checkpoint/disk_fixture.h"
#include "tests/support/paths.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

template <typename... States>
std::vector<OwnedState> Ranks(States... states) {
  std::vector<OwnedState> ranks;
  (ranks.push_back(std::move(states)), ...);
  return ranks;
}

// A saved checkpoint in a folder of its own.
class ReaderTest : public ::testing::Test {
 protected:
  std::unique_ptr<CheckpointReader> SaveAndOpen(std::span<const OwnedState> ranks) {
    auto name = Save(*root_, ++step_, ranks);
    EXPECT_TRUE(name.ok()) << name.status();
    path_ = root_->PathOf(*name);
    auto reader = CheckpointReader::Open(path_);
    EXPECT_TRUE(reader.ok()) << reader.status();
    return *std::move(reader);
  }

  TempFolder folder_;
  std::unique_ptr<Root> root_ = OpenRoot(folder_.path());
  std::string path_;
  int64_t step_ = 0;
};

TEST_F(ReaderTest, KeepsEveryDTypeAndEveryShape) {
  OwnedState state;
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    state.Add("t." + std::string(NameOf(dtype)), dtype, {3, 8});
    if (BitsOf(dtype) >= 8) state.Add("scalar." + std::string(NameOf(dtype)), dtype, {});
    state.Add("empty." + std::string(NameOf(dtype)), dtype, {0, 5});
  }
  state.Add("sixteen", DType::kU8, {1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2});
  state.Add("wörter \"und\\mehr\" \xf0\x9f\x8e\x89", DType::kF32, {2});
  state.view().extras = {{"cursor", R"({"n":1.10})"}, {"random", std::string("\0\xff", 2)}};
  const std::vector<OwnedState> ranks = Ranks(std::move(state));
  const auto reader = SaveAndOpen(ranks);

  for (const IoMode mode : {IoMode::kDirect, IoMode::kBuffered}) {
    OwnedState target = ranks[0].Blank();
    const auto report = reader->ReadState(target.view(), Strictness::kStrict, mode);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(target.Digest(), ranks[0].Digest());
  }
  EXPECT_EQ(reader->ExtrasOf(0).value(), ranks[0].view().extras);
  EXPECT_EQ(reader->ExtrasOf(1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(reader->Verify(), IsEmpty());
}

TEST_F(ReaderTest, OpensAsPlainSafetensorsWithItsDataOnAPage) {
  OwnedState state;
  state.Add("w", DType::kF32, {5, 3});
  state.Add("b", DType::kU8, {7});
  const auto reader = SaveAndOpen(Ranks(std::move(state)));

  const SafetensorsFile file = ReadSafetensors(path_ + "/w00000.safetensors").value();
  EXPECT_EQ(file.data_begin, 4096u);
  ASSERT_EQ(file.tensors.size(), 2u);
  EXPECT_EQ(file.tensors[0].key, "w");
  EXPECT_EQ(file.tensors[1].begin, 60u);
  EXPECT_EQ(FileBytes(path_ + "/w00000.safetensors").value(), 4096u + 67u);
}

// The layouts of a 10x20 tensor over some ranks.
using Layout = std::vector<Box>;
std::vector<std::pair<std::string, Layout>> Layouts() {
  return {
      {"whole", {{{0, 0}, {10, 20}}}},
      {"rows", {{{0, 0}, {5, 20}}, {{5, 0}, {5, 20}}}},
      {"uneven", {{{0, 0}, {4, 20}}, {{4, 0}, {4, 20}}, {{8, 0}, {2, 20}}, {{10, 0}, {0, 20}}}},
      {"columns", {{{0, 0}, {10, 7}}, {{0, 7}, {10, 7}}, {{0, 14}, {10, 6}}}},
      {"blocks", {{{0, 0}, {5, 10}}, {{0, 10}, {5, 10}}, {{5, 0}, {5, 10}}, {{5, 10}, {5, 10}}}},
      {"replicated", {{{0, 0}, {10, 20}}, {{0, 0}, {10, 20}}, {{0, 0}, {10, 20}}}},
  };
}

std::vector<OwnedState> StatesOf(const Layout& layout) {
  std::vector<OwnedState> states(layout.size());
  for (size_t rank = 0; rank < layout.size(); ++rank) {
    states[rank].Add("w", DType::kBF16, {10, 20}, layout[rank]);
    states[rank].Add("replicated", DType::kF64, {3});
  }
  return states;
}

TEST_F(ReaderTest, EveryLayoutPairIsEqual) {
  for (const auto& [from_name, from] : Layouts()) {
    const auto reader = SaveAndOpen(StatesOf(from));
    for (const auto& [to_name, to] : Layouts()) {
      for (const OwnedState& wanted : StatesOf(to)) {
        OwnedState target = wanted.Blank();
        const auto report = reader->ReadState(target.view());
        ASSERT_TRUE(report.ok()) << from_name << " to " << to_name << ": " << report.status();
        EXPECT_EQ(target.Digest(), wanted.Digest()) << from_name << " to " << to_name;
      }
    }
  }
}

TEST_F(ReaderTest, WritesAReplicatedTensorOnce) {
  const auto reader = SaveAndOpen(StatesOf(Layouts().back().second));
  EXPECT_EQ(reader->manifest().bytes, 400u + 24u);
  EXPECT_EQ(reader->manifest().tensors, 2u);
  uint64_t bytes = 0;
  for (const SavedTensor::Part& part : reader->Find("w")->parts) bytes += part.end - part.begin;
  EXPECT_EQ(bytes, 400u);
}

TEST_F(ReaderTest, ReadsAcrossChunksAndBlocks) {
  // 21 MB in one file: three reads of 8 MiB, with tensors across the edges, and one wanted alone
  // from the middle.
  OwnedState state;
  state.Add("a", DType::kF32, {1'000'003});
  state.Add("b", DType::kU8, {999'999});
  state.Add("c", DType::kF32, {2048, 2000});
  const std::vector<OwnedState> ranks = Ranks(std::move(state));
  const auto reader = SaveAndOpen(ranks);
  OwnedState target = ranks[0].Blank();
  ASSERT_TRUE(reader->ReadState(target.view()).ok());
  EXPECT_EQ(target.Digest(), ranks[0].Digest());

  OwnedState columns, wanted;
  wanted.Add("c", DType::kF32, {2048, 2000}, Box{{100, 300}, {1500, 17}});
  columns.AddZeros("c", DType::kF32, {2048, 2000}, Box{{100, 300}, {1500, 17}});
  ASSERT_TRUE(reader->ReadRegion(columns.view().regions[0]).ok());
  EXPECT_EQ(columns.Digest(), wanted.Digest());
}

TEST_F(ReaderTest, ReadsManySmallTensorsWithGapsBetween) {
  OwnedState state;
  for (int i = 0; i < 300; ++i) state.Add("t" + std::to_string(i), DType::kF32, {30'000 + i});
  const std::vector<OwnedState> ranks = Ranks(std::move(state));
  const auto reader = SaveAndOpen(ranks);
  OwnedState some, wanted;
  for (const int i : {299, 7, 8, 9, 150, 151, 40}) {
    some.AddZeros("t" + std::to_string(i), DType::kF32, {30'000 + i});
    wanted.Add("t" + std::to_string(i), DType::kF32, {30'000 + i});
  }
  ASSERT_TRUE(reader->ReadState(some.view(), Strictness::kMatching).ok());
  EXPECT_EQ(some.Digest(), wanted.Digest());
}

TEST_F(ReaderTest, GivesAnAliasTheBytesOfItsTensor) {
  OwnedState state;
  state.Add("head", DType::kF32, {4});
  Region tied = state.view().regions[0];
  tied.name = "wte";
  state.view().regions.push_back(tied);
  const std::vector<OwnedState> ranks = Ranks(std::move(state));
  const auto reader = SaveAndOpen(ranks);
  EXPECT_EQ(reader->manifest().bytes, 16u);
  OwnedState target;
  target.AddZeros("head", DType::kF32, {4});
  target.AddZeros("wte", DType::kF32, {4});
  ASSERT_TRUE(reader->ReadState(target.view()).ok());
  EXPECT_TRUE(std::ranges::equal(target.view().regions[1].bytes, ranks[0].view().regions[0].bytes));
}

TEST_F(ReaderTest, ANodeWithoutBytesHasAReceiptAndNoFile) {
  OwnedState first, second;
  first.Add("w", DType::kF32, {4});
  second.view().extras = {{"cursor", "{}"}};
  const auto reader = SaveAndOpen(Ranks(std::move(first), std::move(second)));
  EXPECT_FALSE(reader->receipts()[1].file.has_value());
  EXPECT_FALSE(Exists(path_ + "/w00001.safetensors").value());
  EXPECT_EQ(reader->ExtrasOf(1)->at("cursor"), "{}");
}

// Case O19: what is on one side only is listed, and nothing changes before all matches.
TEST_F(ReaderTest, ListsMissingUnexpectedAndMismatchedNames) {
  OwnedState saved;
  saved.Add("a", DType::kF32, {2, 3});
  saved.Add("b", DType::kF32, {4});
  const auto reader = SaveAndOpen(Ranks(std::move(saved)));
  struct Row {
    std::vector<std::tuple<std::string, DType, Shape>> target;
    std::vector<std::string> missing, unexpected, mismatched;
  };
  const std::vector<Row> rows = {
      {{{"a", DType::kF32, {2, 3}}}, {}, {"b"}, {}},
      {{{"a", DType::kF32, {2, 3}}, {"b", DType::kF32, {4}}, {"d", DType::kF32, {1}}},
       {"d"},
       {},
       {}},
      {{{"a", DType::kF32, {3, 2}}, {"b", DType::kF32, {4}}},
       {},
       {},
       {"a: F32 [3, 2], saved F32 [2, 3]"}},
      {{{"a", DType::kBF16, {2, 3}}, {"b", DType::kF32, {4}}},
       {},
       {},
       {"a: BF16 [2, 3], saved F32 [2, 3]"}},
      {{}, {}, {"a", "b"}, {}},
  };
  for (const Row& row : rows) {
    OwnedState target;
    for (const auto& [name, dtype, shape] : row.target) target.AddZeros(name, dtype, shape);
    const std::string before = target.Digest();

    const absl::Status strict = reader->ReadState(target.view()).status();
    EXPECT_EQ(strict.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(target.Digest(), before);
    for (const auto* names : {&row.missing, &row.unexpected, &row.mismatched}) {
      for (const std::string& name : *names)
        EXPECT_THAT(std::string(MessageOf(strict)), HasSubstr(name));
    }

    const MatchReport report = reader->ReadState(target.view(), Strictness::kMatching).value();
    EXPECT_EQ(report.missing, row.missing);
    EXPECT_EQ(report.unexpected, row.unexpected);
    EXPECT_EQ(report.mismatched, row.mismatched);
    OwnedState wanted;
    for (const auto& [name, dtype, shape] : row.target) {
      const SavedTensor* tensor = reader->Find(name);
      if (tensor != nullptr && tensor->dtype == dtype && tensor->global == shape)
        wanted.Add(name, dtype, shape);
      else
        wanted.AddZeros(name, dtype, shape);
    }
    EXPECT_EQ(target.Digest(), wanted.Digest());
  }
}

// testdata/golden, as tests/python/checkpoint_writer.cc of the first version wrote it: a format
// that changes without a new version number fails here. Byte i of a tensor is (31 i + the sum of
// its name's bytes) mod 256.
TEST(Reader, OpensTheGoldenCheckpointsOfTheFirstVersion) {
  const std::string golden = testing::SourceFolder() / "tests/checkpoint/testdata/golden";
  const auto root = Root::Open(golden, {.access = Access::kRead}).value();
  const Listing listing = root->List().value();
  ASSERT_EQ(ResolveChain(listing.checkpoints).members.size(), 3u);
  EXPECT_THAT(listing.strangers, IsEmpty());
  for (const CheckpointInfo& info : listing.checkpoints) {
    EXPECT_THAT(VerifyCheckpoint(root->PathOf(info.name)), IsEmpty());
    const auto reader = CheckpointReader::Open(root->PathOf(info.name)).value();
    EXPECT_EQ(reader->manifest().world, info.step == 1 ? 3u : 1u);
    for (const SavedTensor& tensor : reader->tensors()) {
      OwnedState state;
      state.AddZeros(tensor.name, tensor.dtype, tensor.global);
      const Region& region = state.view().regions[0];
      ASSERT_TRUE(reader->ReadRegion(region).ok());
      unsigned expected = 0;
      for (const char c : tensor.name) expected += static_cast<unsigned char>(c);
      const unsigned mask = tensor.dtype == DType::kBool ? 1 : 255;
      for (const std::byte byte : region.bytes) {
        ASSERT_EQ(std::to_integer<unsigned>(byte), expected & mask) << tensor.name;
        expected += 31;
      }
    }
    if (info.step == 3) continue;
    EXPECT_NE(reader->Find("tied"), nullptr);
    EXPECT_EQ(reader->ExtrasOf(0)->at("cursor"), R"({"samples":0})");
  }
}

TEST(MatchReport, OfAllRanksExpectsWhatAnyRankExpects) {
  const std::vector<MatchReport> ranks = {{{"x"}, {"a", "b"}, {}}, {{}, {"b"}, {"m: "}}};
  const MatchReport merged = MergeReports(ranks);
  EXPECT_THAT(merged.missing, ElementsAre("x"));
  EXPECT_THAT(merged.unexpected, ElementsAre("b"));
  EXPECT_THAT(merged.mismatched, ElementsAre("m: "));
}

TEST_F(ReaderTest, NamesFileOffsetAndBothCrcsOfABadChunk) {
  OwnedState state;
  state.Add("a", DType::kU8, {3 << 20});
  const std::vector<OwnedState> ranks = Ranks(std::move(state));
  const auto reader = SaveAndOpen(ranks);
  std::string content = ReadFileText(path_ + "/w00000.safetensors");
  content[(2 << 20) + 77] ^= 1;
  content.back() ^= 1;
  WriteFileText(path_ + "/w00000.safetensors", content);

  OwnedState target = ranks[0].Blank();
  const absl::Status status = reader->ReadState(target.view()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(MessageOf(status)),
              HasSubstr("w00000.safetensors: the chunk at byte 2097152 has crc"));
  EXPECT_EQ(target.Digest(),
            ranks[0].Blank().Digest());  // one block, and it was bad: nothing was copied

  const std::vector<Damage> damages = VerifyCheckpoint(path_);
  ASSERT_EQ(damages.size(), 2u);
  EXPECT_EQ(damages[0].offset, uint64_t{2} << 20);
  EXPECT_EQ(damages[1].offset, uint64_t{3} << 20);
}

// 40 MB are ten reads: the disk is some of them ahead of the bad one.
TEST_F(ReaderTest, ABadChunkEndsARestoreThatReadsAheadOfIt) {
  OwnedState state;
  state.Add("a", DType::kU8, {40'000'000});
  const std::vector<OwnedState> ranks = Ranks(std::move(state));
  const auto reader = SaveAndOpen(ranks);
  const std::string path = path_ + "/w00000.safetensors";
  const std::string whole = ReadFileText(path);
  for (const size_t bad : {0, 5 << 20, 20 << 20, 38 << 20}) {
    std::string content = whole;
    content[bad + 99] ^= 4;
    content.back() ^= 1;  // the last chunk too: the first bad one is named
    WriteFileText(path, content);
    OwnedState target = ranks[0].Blank();

    const absl::Status status = reader->ReadState(target.view()).status();

    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(MessageOf(status)),
                HasSubstr(fmt::format("w00000.safetensors: the chunk at byte {} has crc ", bad)));
    const auto left = target.view().regions[0].bytes.subspan(std::max<size_t>(bad, 4096) - 4096);
    EXPECT_TRUE(std::ranges::all_of(left, [](std::byte byte) { return byte == std::byte{0}; }));
    const std::vector<Damage> damages = VerifyCheckpoint(path_);
    ASSERT_EQ(damages.size(), bad == 38 << 20 ? 1u : 2u);
    EXPECT_EQ(damages[0].offset, bad);
    EXPECT_EQ(damages.back().offset, uint64_t{38} << 20);
  }
  WriteFileText(path, whole);
  EXPECT_THAT(VerifyCheckpoint(path_), IsEmpty());
}

TEST_F(ReaderTest, AShardThatIsCutAfterTheCheckpointWasOpenedIsDamage) {
  OwnedState state;
  state.Add("a", DType::kU8, {9'000'000});
  const std::vector<OwnedState> ranks = Ranks(std::move(state));
  const auto reader = SaveAndOpen(ranks);
  for (const off_t bytes : {off_t{8 << 20}, off_t{0}}) {
    ASSERT_EQ(truncate((path_ + "/w00000.safetensors").c_str(), bytes), 0);
    OwnedState target = ranks[0].Blank();

    const absl::Status status = reader->ReadState(target.view()).status();

    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(
        std::string(MessageOf(status)),
        HasSubstr(fmt::format("w00000.safetensors: {} bytes, its receipt says 9004096", bytes)));
    EXPECT_EQ(target.Digest(), ranks[0].Blank().Digest());
  }
}

TEST_F(ReaderTest, ReadsNoChunkThatNobodyWants) {
  // Data begins at byte 4096, so that a tensor of 2 MiB lies in three chunks of 1 MiB.
  OwnedState state;
  for (int i = 0; i < 20; ++i) state.Add(fmt::format("t{:02}", i), DType::kU8, {2 << 20});
  const auto reader = SaveAndOpen(Ranks(std::move(state)));
  OwnedState some, wanted;
  for (const int i : {2, 3, 11, 19}) {
    some.AddZeros(fmt::format("t{:02}", i), DType::kU8, {2 << 20});
    wanted.Add(fmt::format("t{:02}", i), DType::kU8, {2 << 20});
  }

  ASSERT_TRUE(reader->ReadState(some.view(), Strictness::kMatching).ok());

  EXPECT_EQ(some.Digest(), wanted.Digest());
  // Chunks 4 to 8, 22 to 24, and 38 to the last, of 4096 bytes.
  EXPECT_EQ(reader->bytes_read(), ((5u + 3 + 2) << 20) + 4096);
}

TEST_F(ReaderTest, RefusesASymlinkInPlaceOfAShard) {
  OwnedState state;
  state.Add("a", DType::kU8, {10});
  SaveAndOpen(Ranks(std::move(state)));
  ASSERT_EQ(rename((path_ + "/w00000.safetensors").c_str(), (folder_ / "elsewhere").c_str()), 0);
  ASSERT_EQ(symlink((folder_ / "elsewhere").c_str(), (path_ + "/w00000.safetensors").c_str()), 0);
  EXPECT_FALSE(CheckpointReader::Open(path_).ok());
}

TEST_F(ReaderTest, RefusesAMissingChecksum) {
  OwnedState state;
  state.Add("a", DType::kU8, {10});
  SaveAndOpen(Ranks(std::move(state)));
  Receipt receipt = ParseReceipt(ReadFileText(path_ + "/w00000.receipt.json")).value();
  receipt.file->chunks.clear();
  EXPECT_FALSE(ParseReceipt(ToText(receipt).value()).ok());
}

TEST(WriteShard, RefusesABufferThatDoesNotMatchItsSeal) {
  TempFolder folder;
  const Mapping image = Mapping::Anonymous(3 << 20).value();
  std::vector<uint32_t> crcs = ChunkCrcs(image.bytes());
  ASSERT_TRUE(WriteShard(folder.path(), 0, image.bytes(), crcs).ok());
  image.data()[(1 << 20) + 5] = std::byte{1};

  const absl::Status status = WriteShard(folder.path(), 1, image.bytes(), crcs).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(MessageOf(status)), HasSubstr("chunk at 1048576"));
  EXPECT_FALSE(Exists(folder / "w00001.safetensors").value());
  EXPECT_EQ(WriteShard(folder.path(), 0, image.bytes(), {}).status().code(),
            absl::StatusCode::kAlreadyExists);
}

TEST(WriteShard, GivesTheCrcOfTheWholeFile) {
  TempFolder folder;
  Mapping image = Mapping::Anonymous((2 << 20) + 4096).value();
  for (size_t i = 0; i < image.size(); ++i)
    image.data()[i] = static_cast<std::byte>(i * 7 + i / 1000);
  const auto bytes = image.bytes().first((2 << 20) + 777);
  const ShardFile file = WriteShard(folder.path(), 0, bytes, {}).value();
  EXPECT_EQ(file.chunks.size(), 3u);
  EXPECT_EQ(file.crc32c, Crc32c(bytes));
}

TEST(WriteShard, ASampleChecksEachChunkInOneOfFourSaves) {
  TempFolder folder;
  const Mapping image = Mapping::Anonymous(9 << 20).value();
  const std::vector<uint32_t> crcs = ChunkCrcs(image.bytes());
  ShardWriteOptions options;
  options.crcs = ShardWriteOptions::Crcs::kSample;
  uint32_t writer = 0;
  for (size_t chunk = 0; chunk < 9; ++chunk) {
    image.data()[(chunk << 20) + 3] = std::byte{1};
    int refused = 0;
    for (options.sample = 0; options.sample < kSampleOneIn; ++options.sample) {
      const auto file = WriteShard(folder.path(), writer++, image.bytes(), crcs, options);
      refused += file.ok() ? 0 : 1;
      if (file.ok()) {
        EXPECT_EQ(file->chunks, crcs) << "what was sealed stands in the receipt";
      }
    }
    EXPECT_EQ(refused, 1) << "chunk " << chunk;
    image.data()[(chunk << 20) + 3] = std::byte{0};
  }
}

// Blocks are checked by a thread of their own, ahead of the disk.
TEST(WriteShard, ChecksEveryBlockBeforeItIsWritten) {
  TempFolder folder;
  const Mapping image = Mapping::Anonymous(7 << 20).value();
  for (size_t i = 0; i < image.size(); ++i)
    image.data()[i] = static_cast<std::byte>(i * 13 + i / 999);
  const std::vector<uint32_t> crcs = ChunkCrcs(image.bytes());
  ShardWriteOptions options;
  options.io.block_bytes = 1 << 20;
  uint64_t written = 0;
  options.io.on_progress = [&](uint64_t bytes) { written = bytes; };
  const ShardFile whole = WriteShard(folder.path(), 99, image.bytes(), crcs, options).value();
  EXPECT_EQ(whole.chunks, crcs);
  EXPECT_EQ(whole.crc32c, Crc32c(image.bytes()));
  for (uint32_t block = 0; block < 7; ++block) {
    written = 0;
    std::byte& damaged = image.data()[(block << 20) + 17 * block];
    damaged ^= std::byte{4};
    const absl::Status status =
        WriteShard(folder.path(), block, image.bytes(), crcs, options).status();
    damaged ^= std::byte{4};
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(MessageOf(status)),
                HasSubstr("chunk at " + std::to_string(block << 20)));
    EXPECT_EQ(written, uint64_t{block} << 20);
    EXPECT_FALSE(Exists(folder / ShardName(block)).value());
  }
}

TEST(WriteShard, EndsItsCheckerWhenItIsCancelled) {
  TempFolder folder;
  const Mapping image = Mapping::Anonymous(7 << 20).value();
  ShardWriteOptions options;
  options.io.block_bytes = 1 << 20;
  int asked = 0;
  options.io.cancelled = [&] { return ++asked == 3; };
  EXPECT_EQ(WriteShard(folder.path(), 0, image.bytes(), {}, options).status().code(),
            absl::StatusCode::kCancelled);
  EXPECT_FALSE(Exists(folder / ShardName(0)).value());
}

}  // namespace
}  // namespace outlast
