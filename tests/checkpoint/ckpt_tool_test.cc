#include "checkpoint/ckpt_tool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/checkpoint/disk_fixture.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;

struct Answer {
  int code;
  std::string out, err;
};

Answer Tool(std::vector<std::string> args) {
  std::ostringstream out, err;
  const int code = RunCkptTool(args, out, err);
  return {code, out.str(), err.str()};
}

class CkptToolTest : public ::testing::Test {
 protected:
  std::string SaveStep(int64_t step, std::optional<std::string> parent = std::nullopt) {
    std::vector<OwnedState> ranks(1);
    ranks[0].Add("wte", DType::kF32, {16, 4});
    return Save(*root_, step, ranks, {.parent = std::move(parent)}).value();
  }

  void Forge(const std::string& checkpoint, std::string_view from, std::string_view to) {
    const std::string path = folder_ / (checkpoint + "/MANIFEST.json");
    WriteFileText(path, Forged(ReadFileText(path), from, to));
  }

  TempFolder folder_;
  std::unique_ptr<Root> root_ = OpenRoot(folder_.path());
};

TEST_F(CkptToolTest, ListsWhatIsThere) {
  const std::string first = SaveStep(10);
  const std::string second = SaveStep(20, first);
  const std::string fresh = SaveStep(30);  // parent null: the others are abandoned
  WriteFileText(folder_ / "notes.txt", "x");

  const Answer answer = Tool({"ls", folder_.path()});
  EXPECT_EQ(answer.code, 0);
  EXPECT_THAT(answer.out, HasSubstr(first + "  step 10  abandoned  256 bytes"));
  EXPECT_THAT(answer.out, HasSubstr(fresh + "  step 30  committed  256 bytes"));
  EXPECT_THAT(answer.out, HasSubstr("notes.txt  left alone"));

  const auto json = nlohmann::json::parse(Tool({"ls", folder_.path(), "--json"}).out);
  EXPECT_EQ(json["checkpoints"].size(), 3u);
  EXPECT_EQ(json["checkpoints"][1]["parent"], first);
  EXPECT_EQ(json["checkpoints"][1]["abandoned"], true);
  EXPECT_EQ(json["strangers"][0]["name"], "notes.txt");
}

TEST_F(CkptToolTest, VerifySaysWholeOrNamesTheDamage) {
  const std::string first = SaveStep(10);
  EXPECT_EQ(Tool({"verify", folder_.path()}).code, 0);
  EXPECT_THAT(Tool({"verify", folder_ / first}).out, HasSubstr(first + ": whole, 256 bytes"));

  const std::string shard = root_->PathOf(first) + "/w00000.safetensors";
  std::string content = ReadFileText(shard);
  content.back() ^= 1;
  WriteFileText(shard, content);
  const Answer answer = Tool({"verify", folder_.path() + "/"});
  EXPECT_EQ(answer.code, 1);
  EXPECT_THAT(answer.out, HasSubstr("damaged: " + shard + ": the chunk at byte 0 has crc"));
  EXPECT_EQ(std::count(answer.out.begin(), answer.out.end(), '\n'), 1);
  const auto json = nlohmann::json::parse(Tool({"verify", folder_.path(), "--json"}).out);
  EXPECT_EQ(json["whole"], false);
  EXPECT_EQ(json["checkpoints"][0]["damages"][0]["file"], "w00000.safetensors");
}

TEST_F(CkptToolTest, VerifyComparesTheManifestsTensorsWithItsReceipts) {
  const std::string name = SaveStep(10);
  Forge(name, "\"tensors\":1", "\"tensors\":2");
  const Answer answer = Tool({"verify", folder_.path()});
  EXPECT_EQ(answer.code, 1);
  EXPECT_THAT(answer.out, HasSubstr("its receipts hold 1 tensors, the manifest says 2"));
  EXPECT_THAT(Tool({"ls", folder_.path()}).out, HasSubstr(name + "  step 10  damaged"));
}

// A newer program's checkpoint is not damaged, and perhaps the one that counts: nothing is said or
// shown as if it were not there.
TEST_F(CkptToolTest, RefusesAHigherVersionByName) {
  const std::string older = SaveStep(10);
  const std::string newer = SaveStep(20, older);
  Forge(newer, "\"version\":1", "\"version\":2");
  const std::string reason = "outlast.manifest: version 2, this program reads 1";

  Answer answer = Tool({"ls", folder_.path()});
  EXPECT_EQ(answer.code, 85);
  EXPECT_THAT(answer.out, HasSubstr(newer + "  step 20  newer  - bytes"));
  EXPECT_THAT(answer.out, HasSubstr(reason));
  answer = Tool({"verify", folder_.path()});
  EXPECT_EQ(answer.code, 85);
  EXPECT_THAT(answer.out, HasSubstr(older + ": whole"));
  EXPECT_THAT(answer.out, HasSubstr(newer + ": not checked: "));
  EXPECT_THAT(answer.out, HasSubstr(reason));
  EXPECT_EQ(nlohmann::json::parse(Tool({"verify", folder_.path(), "--json"}).out)["whole"], false);
  for (const std::string& what : {folder_.path(), folder_ / newer}) {
    answer = Tool({"show", what});
    EXPECT_EQ(answer.code, 85);
    EXPECT_EQ(answer.out, "");
    EXPECT_THAT(answer.err, HasSubstr(newer));
    EXPECT_THAT(answer.err, HasSubstr(reason));
  }
  EXPECT_EQ(Tool({"show", folder_ / older}).code, 0);
}

TEST_F(CkptToolTest, ShowsTheNewestOfTheChain) {
  const std::string first = SaveStep(10);
  const std::string second = SaveStep(20, first);
  const Answer answer = Tool({"show", folder_.path()});
  EXPECT_EQ(answer.code, 0);
  EXPECT_THAT(answer.out, HasSubstr("step 20"));
  EXPECT_THAT(answer.out, HasSubstr("wte F32 [16, 4] in 1 part"));
  EXPECT_EQ(nlohmann::json::parse(Tool({"show", "--json", folder_ / first}).out)["step"], 10);
}

TEST_F(CkptToolTest, RefusesWhatIsNoRootAndWrongCommandLinesInOneLine) {
  TempFolder empty;
  for (const std::vector<std::string>& args : {std::vector<std::string>{"ls", empty.path()},
                                               {"ls", "/none/such"},
                                               {"verify", empty / "step-000000000001-00000001"},
                                               {"verify", folder_ / "step-000000000001-00000001"},
                                               {"frob", "x"},
                                               {"ls"},
                                               {"ls", folder_.path(), "--what"},
                                               {}}) {
    const Answer answer = Tool(args);
    EXPECT_EQ(answer.code, 85);
    EXPECT_EQ(answer.out, "");
    EXPECT_EQ(std::count(answer.err.begin(), answer.err.end(), '\n'), 1) << answer.err;
  }
  EXPECT_THAT(Tool({"ls", empty.path()}).err, HasSubstr("not a checkpoint root"));
}

TEST_F(CkptToolTest, ChangesNothing) {
  SaveStep(10);
  ASSERT_EQ(unlink((folder_ / "OUTLAST.json").c_str()), 0);
  for (const std::string verb : {"ls", "verify", "show"})
    EXPECT_EQ(Tool({verb, folder_.path()}).code, 0);
  EXPECT_FALSE(Exists(folder_ / "OUTLAST.json").value());
}

}  // namespace
}  // namespace outlast
