#include "checkpoint/hugging_face.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "checkpoint/compare.h"
#include "tests/checkpoint/disk_fixture.h"
#include "tests/support/paths.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

std::vector<std::string> NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  const std::vector<FolderEntry> entries = ListFolder(folder).value();
  for (const FolderEntry& entry : entries) names.push_back(entry.name);
  return names;
}

std::string SafetensorsText(std::string_view header, std::string_view data) {
  const uint64_t length = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file.append(header).append(data);
}

class HuggingFaceTest : public ::testing::Test {
 protected:
  // Two ranks, of which each has a part of one tensor, and a tied name.
  std::unique_ptr<CheckpointReader> Saved(int64_t step = 10) {
    std::vector<OwnedState> ranks(2);
    for (int i = 0; i < 2; ++i) {
      OwnedState& rank = ranks[static_cast<size_t>(i)];
      rank.Add("wte", DType::kBF16, {6, 8});
      rank.Add("scalar", DType::kI64, {});
      rank.Add("none", DType::kF32, {0, 4});
      rank.Add("rows", DType::kF32, {5, 3}, Box{{i * 2, 0}, {i == 0 ? 2 : 3, 3}});
      Region tied = rank.view().regions[0];
      tied.name = "lm_head";
      rank.view().regions.push_back(tied);
      rank.view().extras = {{"cursor", "{}"}};
    }
    const std::string name = Save(*root_, step, ranks).value();
    return CheckpointReader::Open(root_->PathOf(name)).value();
  }

  std::string Write(const std::string& name, std::string_view text) {
    EXPECT_TRUE(MakeFolders(folder_ / "in").ok());
    WriteFileText(folder_ / ("in/" + name), text);
    return folder_ / "in";
  }

  TempFolder folder_;
  std::unique_ptr<Root> root_ = OpenRoot(folder_ / "root");
};

TEST_F(HuggingFaceTest, ExportsWholeTensorsIntoOneFile) {
  const auto source = Saved();
  const std::string out = folder_ / "out";

  const ExportResult result = ExportHuggingFace(*source, out).value();

  EXPECT_THAT(NamesIn(out), ElementsAre("model.safetensors"));
  EXPECT_EQ(result.tensors, 4u);
  EXPECT_EQ(result.bytes, 96u + 8 + 60);
  const SafetensorsFile file = ReadSafetensors(out + "/model.safetensors").value();
  EXPECT_THAT(file.metadata, UnorderedElementsAre(Pair("format", "pt"), Pair("wte", "lm_head")))
      << "the later name of one memory is the alias: 'lm_head' sorts before 'wte'";
  std::vector<std::string> keys;
  for (const auto& tensor : file.tensors) keys.push_back(tensor.key + tensor.shape.text());
  EXPECT_THAT(keys, UnorderedElementsAre("lm_head[6, 8]", "scalar[]", "none[0, 4]", "rows[5, 3]"));
}

TEST_F(HuggingFaceTest, CutsFilesAtTheLimitAndWritesTheIndexLast) {
  const auto source = Saved();
  const std::string out = folder_ / "out";
  // By name: lm_head 96, none 0, rows 60, scalar 8 bytes.
  const ExportResult result = ExportHuggingFace(*source, out, {.shard_bytes = 70}).value();
  EXPECT_THAT(result.files,
              ElementsAre("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"));
  const auto index = nlohmann::json::parse(ReadFileText(out + "/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 164);
  EXPECT_EQ(index["weight_map"]["rows"], "model-00002-of-00002.safetensors");
  EXPECT_EQ(index["weight_map"].size(), 4u);
}

TEST_F(HuggingFaceTest, GoesThroughExportAndImportWithoutALostBit) {
  const auto source = Saved();
  for (const uint64_t limit : {kHuggingFaceShardBytes, uint64_t{70}}) {
    const std::string out = folder_ / ("out" + std::to_string(limit));
    ASSERT_TRUE(ExportHuggingFace(*source, out, {.shard_bytes = limit}).ok());
    const HuggingFaceFiles files = ReadHuggingFace(out).value();
    EXPECT_THAT(files.aliases, ElementsAre(Pair("wte", "lm_head")));
    const auto target = OpenRoot(folder_ / ("target" + std::to_string(limit)));
    const std::string name = ImportHuggingFace(files, *target, {.step = 3}).value();
    EXPECT_THAT(VerifyCheckpoint(target->PathOf(name)), IsEmpty());
    const auto imported = CheckpointReader::Open(target->PathOf(name)).value();
    EXPECT_EQ(imported->manifest().step, 3);
    EXPECT_EQ(imported->manifest().world, 1u);
    const Comparison comparison = CompareCheckpoints(*source, *imported).value();
    EXPECT_THAT(comparison.tensors, IsEmpty());
    EXPECT_EQ(comparison.equal_tensors, 5u);
  }
}

TEST_F(HuggingFaceTest, ExportsIntoAnEmptyFolderOnly) {
  const auto source = Saved();
  const absl::Status status = ExportHuggingFace(*source, Write("mine", "x")).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(MessageOf(status)), HasSubstr("'mine'"));
  EXPECT_THAT(NamesIn(folder_ / "in"), ElementsAre("mine"));
}

TEST_F(HuggingFaceTest, LeavesNothingOfADamagedSource) {
  const auto source = Saved();
  const std::string shard = source->folder() + "/w00001.safetensors";
  std::string content = ReadFileText(shard);
  content.back() ^= 1;
  WriteFileText(shard, content);
  EXPECT_EQ(ExportHuggingFace(*source, folder_ / "out").status().code(),
            absl::StatusCode::kDataLoss);
  EXPECT_THAT(NamesIn(folder_ / "out"), IsEmpty());
}

TEST_F(HuggingFaceTest, ImportsWhatSeveralFilesWithoutAnIndexHold) {
  Write("a.safetensors",
        SafetensorsText(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "ab"));
  const std::string in =
      Write("b.safetensors",
            SafetensorsText(R"({"y":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})", "cde"));
  const HuggingFaceFiles files = ReadHuggingFace(in).value();
  EXPECT_EQ(files.tensors.size(), 2u);
  EXPECT_EQ(files.bytes, 5u);
  EXPECT_EQ(ReadHuggingFace(in + "/a.safetensors")->tensors.size(), 1u) << "or one file";
}

TEST_F(HuggingFaceTest, FollowsTheLinksOfTheHubsCache) {
  const std::string in = Write("blob", SafetensorsText(R"({"x":{"dtype":"U8","shape":[2],)"
                                                       R"("data_offsets":[0,2]}})",
                                                       "ab"));
  ASSERT_EQ(symlink("blob", (in + "/model.safetensors").c_str()), 0);
  const auto target = OpenRoot(folder_ / "target");
  const HuggingFaceFiles files = ReadHuggingFace(in).value();
  EXPECT_TRUE(ImportHuggingFace(files, *target, {.step = 0}).ok());
}

// The rules of formats for sharded indices, one broken at a time.
TEST_F(HuggingFaceTest, RefusesIndicesThatDoNotFitTheirFiles) {
  const auto why = [&](std::string_view index) {
    Write("model.safetensors.index.json", index);
    const absl::Status status = ReadHuggingFace(folder_ / "in").status();
    EXPECT_FALSE(status.ok()) << index;
    return std::string(MessageOf(status));
  };
  Write("m.safetensors",
        SafetensorsText(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "ab"));
  EXPECT_THAT(why(R"({"weight_map":{"x":"../m.safetensors"}})"), HasSubstr("same folder"));
  EXPECT_THAT(why(R"({"weight_map":{"x":"/etc/m.safetensors"}})"), HasSubstr("same folder"));
  EXPECT_THAT(why(R"({"weight_map":{"x":"C:\\m.safetensors"}})"), HasSubstr("same folder"));
  EXPECT_THAT(why(R"({"weight_map":{"x":"m.bin"}})"), HasSubstr("same folder"));
  EXPECT_THAT(why(R"({"weight_map":{"x":"gone.safetensors"}})"), HasSubstr("gone.safetensors"));
  EXPECT_THAT(why(R"({"weight_map":{"x":7}})"), HasSubstr("no string"));
  EXPECT_THAT(why(R"({"weight_map":{"x":"m.safetensors","y":"m.safetensors"}})"),
              HasSubstr("'y' is not in m.safetensors"));
  EXPECT_THAT(why(R"({"weight_map":{"y":"m.safetensors"}})"), HasSubstr("not in the index"));
  EXPECT_THAT(why(R"({"weight_map":[]})"), HasSubstr("weight_map"));
  EXPECT_THAT(why("{"), HasSubstr("weight_map"));
  EXPECT_THAT(why(R"({"weight_map":{}})"), HasSubstr("neither"));
  WriteFileText(folder_ / "in/other.safetensors.index.json", "{}");
  EXPECT_THAT(why("{}"), HasSubstr("2 indices"));
}

TEST_F(HuggingFaceTest, RefusesATensorInTwoFilesAndPartsOfTensors) {
  const std::string one =
      SafetensorsText(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "ab");
  Write("a.safetensors", one);
  const std::string in = Write("b.safetensors", one);
  EXPECT_THAT(std::string(MessageOf(ReadHuggingFace(in).status())),
              HasSubstr("'x' is in a.safetensors and in b.safetensors"));

  const auto source = Saved();
  EXPECT_THAT(
      std::string(MessageOf(ReadHuggingFace(source->folder() + "/w00001.safetensors").status())),
      HasSubstr("w00001.safetensors: holds a part of tensor"));
  TempFolder empty;
  EXPECT_EQ(ReadHuggingFace(empty.path()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadHuggingFace(empty / "none").status().code(), absl::StatusCode::kNotFound);
}

// Case D25: every hostile file of the collection is refused, every legal one with tensors taken.
TEST_F(HuggingFaceTest, TakesAndRefusesTheSharedFixtures) {
  const std::string fixtures = testing::SharedFolder() / "cases/fixtures/st";
  if (!Exists(fixtures).value_or(false)) GTEST_SKIP() << "no fixtures at " << fixtures;
  int refused = 0;
  for (const std::string& name : NamesIn(fixtures)) {
    if (!name.ends_with(".safetensors")) continue;
    const bool without_tensors =
        name == "ok_empty.safetensors" || name == "ok_meta_only.safetensors";
    const auto files = ReadHuggingFace(fixtures + "/" + name);
    EXPECT_EQ(files.ok(), name.starts_with("ok_") && !without_tensors) << name << files.status();
    refused += files.ok() ? 0 : 1;
  }
  EXPECT_GE(refused, 17);
  EXPECT_EQ(ReadHuggingFace(fixtures + "/shard").ok(), true)
      << ReadHuggingFace(fixtures + "/shard").status();
}

TEST_F(HuggingFaceTest, ImportLeavesNothingOfAFileThatEndsTooEarly) {
  const std::string in =
      Write("m.safetensors",
            SafetensorsText(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "ab"));
  const HuggingFaceFiles files = ReadHuggingFace(in).value();
  const auto bytes = static_cast<off_t>(FileBytes(in + "/m.safetensors").value());
  ASSERT_EQ(truncate((in + "/m.safetensors").c_str(), bytes - 1), 0);
  const auto target = OpenRoot(folder_ / "target");
  EXPECT_EQ(ImportHuggingFace(files, *target, {.step = 1}).status().code(),
            absl::StatusCode::kDataLoss);
  EXPECT_THAT(target->List()->checkpoints, IsEmpty());
}

}  // namespace
}  // namespace outlast
