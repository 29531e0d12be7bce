// `outlast ckpt` on a root in a store. The store is a folder under a scheme of its own; S3 itself
// is tests/fault/remote_fault_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "checkpoint/ckpt_tool.h"
#include "outlast/base/plugins.h"
#include "outlast/store/blob.h"
#include "tests/checkpoint/disk_fixture.h"

namespace outlast {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Answer {
  int code;
  std::string out, err;
  nlohmann::json json() const { return nlohmann::json::parse(out, nullptr, false); }
};

class CkptInAStore : public ::testing::Test {
 protected:
  CkptInAStore() {
    ranks_.resize(2);
    for (OwnedState& rank : ranks_) rank.Add("wte", DType::kF32, {700, 512});
    name_ = Save(*root_, 10, ranks_).value();
    EXPECT_TRUE(root_->Release().ok());
    EXPECT_TRUE(plugins_.Of<Blob>()
                    .Add("far",
                         [this](const std::string& uri,
                                const Plugins&) -> absl::StatusOr<std::unique_ptr<Blob>> {
                           if (is_away_) return absl::UnavailableError(uri + ": no answer");
                           return MakeFolderBlob(folder_ / uri.substr(6));
                         })
                    .ok());
  }
  Answer Tool(std::vector<std::string> args) {
    std::ostringstream out, err;
    const int code = RunCkptTool(args, out, err, Terminal::kNo, &plugins_);
    return {code, out.str(), err.str()};
  }
  void CopyUp() {
    const Answer copied = Tool({"copy", root_->path(), "far://bucket/run"});
    ASSERT_EQ(copied.code, 0) << copied.err;
  }
  void FlipBitInTheStore() {
    const std::string path = folder_ / ("bucket/run/" + name_ + "/w00000.safetensors");
    std::string text = ReadFileText(path);
    text.at(500'000) ^= 1;
    WriteFileText(path, text);
  }

  TempFolder folder_;
  std::unique_ptr<Root> root_ = OpenRoot(folder_ / "root");
  std::vector<OwnedState> ranks_;
  std::string name_;
  Plugins plugins_;
  bool is_away_ = false;
};

TEST_F(CkptInAStore, CopiesThereAndBackByteForByte) {
  const Answer up = Tool({"copy", root_->path(), "far://bucket/run", "--json"});
  ASSERT_EQ(up.code, 0) << up.err;
  EXPECT_EQ(up.json()["checkpoint"], name_);
  EXPECT_EQ(up.json()["was_there"], false);
  EXPECT_GT(up.json()["bytes"], 1'400'000);

  const Answer down = Tool({"copy", "far://bucket/run/" + name_, folder_ / "back"});
  ASSERT_EQ(down.code, 0) << down.err;
  EXPECT_THAT(down.out, HasSubstr("copied and read back"));
  for (const std::string file : {"w00000.safetensors", "w00001.receipt.json", "MANIFEST.json"}) {
    EXPECT_EQ(ReadFileText(folder_ / ("back/" + name_ + "/" + file)),
              ReadFileText(root_->PathOf(name_) + "/" + file));
  }
  EXPECT_EQ(Tool({"verify", folder_ / "back"}).code, 0);

  EXPECT_THAT(Tool({"copy", root_->path(), "far://bucket/run"}).out, HasSubstr("is there already"));
  EXPECT_THAT(Tool({"copy", "far://bucket/run", folder_ / "back"}).out,
              HasSubstr("is there already"));
}

TEST_F(CkptInAStore, ListsAndShowsWhatIsThere) {
  CopyUp();
  const Answer listed = Tool({"ls", "far://bucket/run/", "--json"});
  ASSERT_EQ(listed.code, 0) << listed.err;
  EXPECT_EQ(listed.json()["root"], "far://bucket/run");
  EXPECT_EQ(listed.json()["job"], root_->job().hex());
  EXPECT_EQ(listed.json()["checkpoints"][0]["state"], "committed");
  EXPECT_THAT(Tool({"ls", "far://bucket/run"}).out, HasSubstr(name_ + "  step 10  committed"));
  const Answer shown = Tool({"show", "far://bucket/run", "--json"});
  ASSERT_EQ(shown.code, 0) << shown.err;
  EXPECT_EQ(shown.json()["tensors"][0]["name"], "wte");
  EXPECT_EQ(shown.json(), Tool({"show", root_->path(), "--json"}).json());
}

TEST_F(CkptInAStore, VerifiesEveryByte) {
  CopyUp();
  EXPECT_EQ(Tool({"verify", "far://bucket/run"}).code, 0);
  FlipBitInTheStore();
  const Answer verified = Tool({"verify", "far://bucket/run/" + name_, "--json"});
  EXPECT_EQ(verified.code, 1);
  EXPECT_EQ(verified.json()["whole"], false);
  const auto damage = verified.json()["checkpoints"][0]["damages"][0];
  EXPECT_EQ(damage["file"], "w00000.safetensors");
  EXPECT_EQ(damage["offset"], 0);
  EXPECT_EQ(Tool({"copy", "far://bucket/run", folder_ / "back"}).code, 1);
  EXPECT_FALSE(Exists(folder_ / ("back/" + name_)).value()) << "nothing of it is left";
}

TEST_F(CkptInAStore, SaysWhatIsWrong) {
  EXPECT_EQ(Tool({"ls", "far://bucket/empty"}).code, 85);
  EXPECT_THAT(Tool({"ls", "far://bucket/empty"}).err, HasSubstr("not a checkpoint root"));
  CopyUp();
  EXPECT_EQ(Tool({"show", "far://bucket/run/step-000000000099-00000001"}).code, 85);
  for (const std::string verb : {"gc", "pin"}) {
    const Answer refused = Tool({verb, "far://bucket/run"});
    EXPECT_EQ(refused.code, 85);
    EXPECT_THAT(refused.err, HasSubstr("copy it to a folder first"));
  }
  EXPECT_THAT(Tool({"ls", "nowhere://x/y"}).err, HasSubstr("nowhere"));
  EXPECT_THAT(Tool({"copy", "far://bucket/run", "far://bucket/other"}).err,
              HasSubstr("from store to store"));
  is_away_ = true;
  const Answer away = Tool({"verify", "far://bucket/run"});
  EXPECT_EQ(away.code, 1);
  EXPECT_THAT(away.err, AllOf(HasSubstr("far://bucket/run"), HasSubstr("no answer")));
}

TEST_F(CkptInAStore, RefusesTheRootOfAnotherJob) {
  CopyUp();
  TempFolder other;
  const auto root = OpenRoot(other.path());
  Save(*root, 3, ranks_).value();
  ASSERT_TRUE(root->Release().ok());
  const Answer refused = Tool({"copy", "far://bucket/run", other.path()});
  EXPECT_EQ(refused.code, 85);
  EXPECT_THAT(refused.err, HasSubstr("foreign"));
  EXPECT_EQ(Tool({"copy", other.path(), "far://bucket/run"}).code, 85);
}

}  // namespace
}  // namespace outlast
