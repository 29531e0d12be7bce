#include "checkpoint/ckpt_tool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "checkpoint/progress_bar.h"
#include "tests/checkpoint/disk_fixture.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

struct Answer {
  int code;
  std::string out, err;
  nlohmann::json json() const { return nlohmann::json::parse(out); }
};

Answer Tool(std::vector<std::string> args, Terminal terminal = Terminal::kNo) {
  std::ostringstream out, err;
  const int code = RunCkptTool(args, out, err, terminal);
  return {code, out.str(), err.str()};
}

void FlipLastByte(const std::string& path) {
  std::string content = ReadFileText(path);
  content.back() ^= 1;
  WriteFileText(path, content);
}

class CkptToolTest : public ::testing::Test {
 protected:
  std::string SaveStep(int64_t step, std::optional<std::string> parent = std::nullopt,
                       bool commit = true) {
    std::vector<OwnedState> ranks(1);
    ranks[0].Add("wte", DType::kF32, {16, 4});
    return Save(*root_, step, ranks, {.parent = std::move(parent), .commit = commit}).value();
  }
  void Forge(const std::string& checkpoint, std::string_view from, std::string_view to) {
    const std::string path = folder_ / (checkpoint + "/MANIFEST.json");
    WriteFileText(path, Forged(ReadFileText(path), from, to));
  }
  // The run ends in order: whoever comes next takes the root at once.
  void EndRun() { ASSERT_TRUE(root_->Release().ok()); }
  bool Stands(const std::string& name) { return Exists(root_->PathOf(name)).value(); }

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

  const auto json = Tool({"ls", folder_.path(), "--json"}).json();
  EXPECT_EQ(json["checkpoints"].size(), 3u);
  EXPECT_EQ(json["checkpoints"][1]["parent"], first);
  EXPECT_EQ(json["checkpoints"][1]["abandoned"], true);
  EXPECT_EQ(json["strangers"][0]["name"], "notes.txt");
  EXPECT_EQ(Tool({"ls", folder_ / first}).code, 85) << "a checkpoint is no root";
}

TEST_F(CkptToolTest, VerifySaysWhereThereIsNothing) {
  const Answer answer = Tool({"verify", folder_.path()});
  EXPECT_EQ(answer.code, 0);
  EXPECT_EQ(answer.out, "no checkpoint is there\n");
}

TEST_F(CkptToolTest, VerifySaysWholeOrNamesTheDamage) {
  const std::string first = SaveStep(10);
  EXPECT_EQ(Tool({"verify", folder_.path()}).code, 0);
  EXPECT_THAT(Tool({"verify", folder_ / first}).out, HasSubstr(first + ": whole, 256 bytes"));

  const std::string shard = root_->PathOf(first) + "/w00000.safetensors";
  FlipLastByte(shard);
  const Answer answer = Tool({"verify", folder_.path() + "/"});
  EXPECT_EQ(answer.code, 1);
  EXPECT_THAT(answer.out, HasSubstr("damaged: " + shard + ": the chunk at byte 0 has crc"));
  EXPECT_EQ(std::count(answer.out.begin(), answer.out.end(), '\n'), 1);
  const auto json = Tool({"verify", folder_.path(), "--json"}).json();
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
  EXPECT_EQ(Tool({"gc", folder_.path(), "--yes"}).code, 85) << "what is off the chain is unknown";
}

TEST_F(CkptToolTest, VerifyTakesWhatIsWholeOutOfQuarantine) {
  const std::string first = SaveStep(10);
  ASSERT_TRUE(root_->Quarantine(first, "a bad cable").ok());
  const std::string second = SaveStep(20, first);
  ASSERT_TRUE(root_->Quarantine(second, "a bad chunk").ok());
  FlipLastByte(root_->PathOf(second) + "/w00000.safetensors");

  const Answer answer = Tool({"verify", folder_.path()});

  EXPECT_EQ(answer.code, 1);
  EXPECT_THAT(answer.out, HasSubstr(first + ": whole, 256 bytes; taken out of quarantine"));
  const Listing listing = root_->List().value();
  EXPECT_EQ(listing.checkpoints[0].quarantined, "");
  EXPECT_EQ(listing.checkpoints[1].quarantined, "a bad chunk");
}

TEST_F(CkptToolTest, ShowsTheNewestOfTheChain) {
  const std::string first = SaveStep(10);
  const std::string second = SaveStep(20, first);
  const Answer answer = Tool({"show", folder_.path()});
  EXPECT_EQ(answer.code, 0);
  EXPECT_THAT(answer.out, HasSubstr("step 20"));
  EXPECT_THAT(answer.out, HasSubstr("wte F32 [16, 4] in 1 part"));
  EXPECT_EQ(Tool({"show", "--json", folder_ / first}).json()["step"], 10);

  ASSERT_EQ(truncate((root_->PathOf(second) + "/w00000.safetensors").c_str(), 4097), 0);
  const Answer fallen_back = Tool({"show", folder_.path()});
  EXPECT_EQ(fallen_back.code, 0);
  EXPECT_THAT(fallen_back.out, HasSubstr("step 10"));
  EXPECT_THAT(fallen_back.err, HasSubstr("passed over " + second));
  EXPECT_EQ(Tool({"show", folder_ / second}).code, 1);
}

TEST_F(CkptToolTest, DiffSaysEqualOrWhatDiffers) {
  const std::string first = SaveStep(10);
  const std::string second = SaveStep(20, first);
  EXPECT_EQ(Tool({"diff", folder_ / first, folder_.path()}).code, 0);
  EXPECT_THAT(Tool({"diff", folder_ / first, folder_ / second}).out,
              HasSubstr("equal: 1 tensor equal, 0 not; steps 10 and 20, worlds of 1 and 1"));

  std::vector<OwnedState> ranks(1);
  ranks[0].Add("wte", DType::kF32, {16, 4});
  ranks[0].Add("bias", DType::kF32, {4});
  const float one = 1.0f, three = 3.0f;
  std::memcpy(ranks[0].view().regions[0].bytes.data(), &one, 4);
  const std::string third = Save(*root_, 30, ranks).value();
  std::memcpy(ranks[0].view().regions[0].bytes.data(), &three, 4);
  const std::string fourth = Save(*root_, 40, ranks).value();

  const Answer answer = Tool({"diff", folder_ / third, folder_ / fourth});
  EXPECT_EQ(answer.code, 1);
  EXPECT_THAT(answer.out, HasSubstr("~ wte F32 [16, 4]: 1 of 64 elements differ, by at most 2\n"));
  const auto json = Tool({"diff", folder_ / second, folder_ / fourth, "--json"}).json();
  EXPECT_EQ(json["equal"], false);
  EXPECT_EQ(json["tensors"][0]["name"], "bias");
  EXPECT_EQ(json["tensors"][0]["kind"], "added");
  EXPECT_EQ(json["tensors"][0]["a"], nullptr);
  EXPECT_EQ(json["tensors"][1]["different_elements"], 1);
  EXPECT_EQ(Tool({"diff", folder_ / first, folder_ / "none"}).code, 85);
}

TEST_F(CkptToolTest, ExportsAndImports) {
  SaveStep(10);
  EndRun();
  const Answer out = Tool({"export", folder_.path(), "--hf", folder_ / "hf", "--json"});
  EXPECT_EQ(out.code, 0) << out.err;
  EXPECT_EQ(out.json()["files"][0], "model.safetensors");
  EXPECT_EQ(out.json()["bytes"], 256);
  const Answer again = Tool({"export", folder_.path(), "--hf", folder_ / "hf"});
  EXPECT_EQ(again.code, 85);
  EXPECT_THAT(again.err, HasSubstr("empty or new folder wanted"));

  const Answer in =
      Tool({"import", folder_ / "hf", folder_ / "new", "--step=7", "--job", "tune", "--json"});
  EXPECT_EQ(in.code, 0) << in.err;
  EXPECT_EQ(in.json()["place"], "newest");
  const std::string name = in.json()["checkpoint"];
  EXPECT_THAT(name, StartsWith("step-000000000007-"));
  EXPECT_EQ(Tool({"diff", folder_.path(), folder_ / "new"}).code, 0);
  const auto listed = Tool({"ls", folder_ / "new", "--json"}).json();
  EXPECT_EQ(listed["name"], "tune");
  EXPECT_EQ(listed["notes"].size(), 0u);
  EXPECT_EQ(ParseLatest(ReadFileText(folder_ / "new/LATEST.json"))->checkpoint, name);
}

TEST_F(CkptToolTest, ImportIntoARootWithAHistoryMustSayWhatItContinues) {
  const std::string old = SaveStep(10);
  EndRun();
  ASSERT_EQ(Tool({"export", folder_.path(), "--hf", folder_ / "hf"}).code, 0);
  const auto import = [&](std::vector<std::string> more) {
    std::vector<std::string> args = {"import", folder_ / "hf", folder_.path()};
    args.insert(args.end(), more.begin(), more.end());
    return Tool(args);
  };
  for (const std::vector<std::string>& more :
       {std::vector<std::string>{"--step", "20"},
        {"--step", "20", "--parent", "step-000000000099-00000001"},
        {"--step", "20", "--parent", old, "--fresh"},
        {"--step", "-1", "--fresh"},
        {"--fresh"},
        {"--step", "20", "--fresh", "--job", "another"}}) {
    const Answer answer = import(more);
    EXPECT_EQ(answer.code, 85) << answer.err;
    EXPECT_EQ(std::count(answer.err.begin(), answer.err.end(), '\n'), 1) << answer.err;
  }
  EXPECT_EQ(root_->List()->checkpoints.size(), 1u);
  EXPECT_EQ(root_->List()->claims.size(), 1u) << "refused before a claim was taken";

  EXPECT_EQ(import({"--step", "20", "--parent", old}).code, 0);
  EXPECT_EQ(ResolveChain(root_->List()->checkpoints).members.size(), 2u);
  EXPECT_EQ(import({"--step", "5", "--fresh"}).code, 0);
  EXPECT_EQ(ResolveChain(root_->List()->checkpoints).members.size(), 1u);
}

TEST_F(CkptToolTest, ImportOfDamagedFilesExitsOne) {
  ASSERT_TRUE(MakeFolder(folder_ / "in").ok());
  WriteFileText(folder_ / "in/model.safetensors", "short");
  const Answer answer = Tool({"import", folder_ / "in", folder_ / "new", "--step", "1"});
  EXPECT_EQ(answer.code, 1);
  const std::string name = "in/model.safetensors";
  EXPECT_THAT(answer.err, HasSubstr(name));
  EXPECT_EQ(answer.err.find(name), answer.err.rfind(name)) << answer.err;
  EXPECT_FALSE(Exists(folder_ / "new").value());
}

TEST_F(CkptToolTest, CopiesIntoANewRootOfTheSameJob) {
  const std::string first = SaveStep(10);
  const Answer answer = Tool({"copy", folder_ / first, folder_ / "archive"});
  EXPECT_EQ(answer.code, 0) << answer.err;
  EXPECT_THAT(answer.out, HasSubstr("copied and read back"));
  EXPECT_THAT(answer.out, HasSubstr("; newest"));
  const auto again = Tool({"copy", folder_.path(), folder_ / "archive", "--json"});
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(again.json()["was_there"], true);
  EXPECT_EQ(Tool({"verify", folder_ / "archive"}).code, 0);
  EXPECT_EQ(Root::Open(folder_ / "archive", {.access = Access::kRead}).value()->job(),
            root_->job());
}

TEST_F(CkptToolTest, CopyRefusesForeignRootsAndPlacesThatHoldOtherThings) {
  SaveStep(10);
  ASSERT_NE(OpenRoot(folder_ / "foreign"), nullptr);
  const Answer foreign = Tool({"copy", folder_.path(), folder_ / "foreign"});
  EXPECT_EQ(foreign.code, 85);
  EXPECT_THAT(foreign.err, HasSubstr("foreign: of job"));
  ASSERT_TRUE(MakeFolder(folder_ / "home").ok());
  WriteFileText(folder_ / "home/letter", "x");
  EXPECT_EQ(Tool({"copy", folder_.path(), folder_ / "home"}).code, 85);
  EXPECT_FALSE(Exists(folder_ / "home/OUTLAST.json").value());
}

TEST_F(CkptToolTest, GcShowsFirstAndDeletesWhenTold) {
  const std::string old = SaveStep(10);
  const std::string pinned = SaveStep(15, old);
  ASSERT_TRUE(root_->Pin(pinned).ok());
  const std::string fresh = SaveStep(20);
  const std::string half = SaveStep(30, fresh, false);
  ASSERT_EQ(unlink((root_->PathOf(half) + "/w00000.receipt.json").c_str()), 0);
  const std::string going = SaveStep(40, fresh, false);
  WriteFileText(root_->PathOf(going) + "/DELETED", "");
  ASSERT_TRUE(MakeFolder(folder_ / "mine").ok());
  EndRun();

  const Answer shown = Tool({"gc", folder_.path()});
  EXPECT_EQ(shown.code, 0) << shown.err;
  EXPECT_THAT(shown.out, HasSubstr(old + "  would be deleted: abandoned"));
  EXPECT_THAT(shown.out, HasSubstr(half + "  would be deleted: unfinished"));
  EXPECT_THAT(shown.out, HasSubstr(going + "  would be deleted: half deleted"));
  EXPECT_THAT(shown.out, HasSubstr("--yes"));
  EXPECT_EQ(root_->List()->checkpoints.size(), 5u);

  const Answer done = Tool({"gc", folder_.path(), "--yes", "--json"});
  EXPECT_EQ(done.code, 0) << done.err;
  EXPECT_EQ(done.json()["deleted"].size(), 3u);
  EXPECT_FALSE(Stands(old) || Stands(half) || Stands(going));
  EXPECT_TRUE(Stands(pinned) && Stands(fresh) && Exists(folder_ / "mine").value());
  EXPECT_THAT(Tool({"gc", folder_.path()}).out, HasSubstr("nothing to delete"));
}

TEST_F(CkptToolTest, GcFinishesWhatLacksOnlyItsManifest) {
  const std::string first = SaveStep(10);
  const std::string almost = SaveStep(20, first, false);
  EndRun();
  const Answer answer = Tool({"gc", folder_.path(), "--yes"});
  EXPECT_EQ(answer.code, 0) << answer.err;
  EXPECT_THAT(answer.out, HasSubstr(almost + "  finished"));
  EXPECT_EQ(ResolveChain(root_->List()->checkpoints).members.size(), 2u);
}

// The claim's owner beats: what lies there without a manifest may be what it is writing.
TEST_F(CkptToolTest, GcKeepsWhatARunningJobMayBeWritingAndOthersAreRefused) {
  const std::string old = SaveStep(10);
  const std::string fresh = SaveStep(20);
  const std::string writing = SaveStep(30, fresh, false);
  std::atomic<bool> ended{false};
  std::thread job([&] {
    while (!ended) {
      EXPECT_TRUE(root_->Beat().ok());
      usleep(20'000);
    }
  });

  const Answer gc = Tool({"gc", folder_.path(), "--yes"});
  const Answer import = [&] {
    EXPECT_EQ(Tool({"export", folder_.path(), "--hf", folder_ / "hf"}).code, 0);
    return Tool({"import", folder_ / "hf", folder_.path(), "--step", "5", "--fresh"});
  }();
  ended = true;
  job.join();

  EXPECT_EQ(gc.code, 0) << gc.err;
  EXPECT_THAT(gc.out, HasSubstr(old + "  deleted: abandoned"));
  EXPECT_THAT(gc.out, HasSubstr(writing + "  kept, a running job may be writing it: claim 1"));
  EXPECT_TRUE(Stands(writing) && Stands(fresh));
  EXPECT_FALSE(Stands(old));
  EXPECT_EQ(import.code, 85);
  EXPECT_THAT(import.err, HasSubstr("still beats; end that run first"));
  EXPECT_EQ(root_->List()->claims.size(), 1u);
}

TEST_F(CkptToolTest, PinsAndReleasesBesideARunningJob) {
  const std::string first = SaveStep(10);
  const std::string second = SaveStep(20, first);
  const std::string half = SaveStep(30, second, false);
  EXPECT_EQ(Tool({"pin", folder_ / first, folder_.path()}).out,
            first + ": pinned\n" + second + ": pinned\n");
  EXPECT_THAT(Tool({"ls", folder_.path()}).out, HasSubstr(first + "  step 10  committed,pinned"));
  EXPECT_EQ(Tool({"unpin", folder_ / first, "--json"}).json()["checkpoints"][0]["name"], first);
  EXPECT_FALSE(root_->List()->checkpoints[0].pinned);
  const Answer refused = Tool({"pin", folder_ / half});
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(refused.err, HasSubstr("a committed checkpoint wanted"));
}

TEST_F(CkptToolTest, RefusesWhatIsNoRootAndWrongCommandLinesInOneLine) {
  TempFolder empty;
  for (const std::vector<std::string>& args :
       {std::vector<std::string>{"ls", empty.path()},
        {"ls", "/none/such"},
        {"verify", empty / "step-000000000001-00000001"},
        {"verify", folder_ / "step-000000000001-00000001"},
        {"frob", "x"},
        {"ls"},
        {"ls", folder_.path(), "--what"},
        {"ls", folder_.path(), "--json=yes"},
        {"ls", folder_.path(), "--json", "--json"},
        {"show", folder_.path(), folder_.path()},
        {"diff", folder_.path()},
        {"export", folder_.path()},
        {"export", folder_.path(), "--hf"},
        {"export", folder_.path(), "--hf", empty / "x", "--shard-bytes", "5GB"},
        {"copy", "", "x"},
        {"gc", empty.path()},
        {"pin"},
        {"pin", empty.path()},
        {}}) {
    const Answer answer = Tool(args);
    EXPECT_EQ(answer.code, 85);
    EXPECT_EQ(answer.out, "");
    EXPECT_EQ(std::count(answer.err.begin(), answer.err.end(), '\n'), 1) << answer.err;
  }
  EXPECT_THAT(Tool({"ls", empty.path()}).err, HasSubstr("not a checkpoint root"));
  EXPECT_THAT(Tool({"diff", "x"}).err, HasSubstr("1 place given; outlast ckpt diff A B wanted"));
}

TEST_F(CkptToolTest, HelpsWithAnExampleEach) {
  for (const std::string verb :
       {"ls", "show", "verify", "diff", "export", "import", "copy", "gc", "pin", "unpin"}) {
    const Answer answer = Tool({verb, "--help"});
    EXPECT_EQ(answer.code, 0);
    EXPECT_THAT(answer.out, StartsWith("Usage: outlast ckpt " + verb));
    EXPECT_THAT(answer.out, HasSubstr("Example: outlast ckpt " + verb));
    EXPECT_THAT(Tool({"--help"}).out, HasSubstr("  " + verb));
  }
}

TEST_F(CkptToolTest, ChangesNothingWhereItOnlyLooks) {
  SaveStep(10);
  ASSERT_EQ(unlink((folder_ / "OUTLAST.json").c_str()), 0);
  for (const std::string verb : {"ls", "verify", "show", "gc"})
    EXPECT_EQ(Tool({verb, folder_.path()}).code, 0);
  EXPECT_FALSE(Exists(folder_ / "OUTLAST.json").value());
}

TEST_F(CkptToolTest, DrawsABarOnATerminalOnlyAndTakesItAway) {
  SaveStep(10);
  const Answer answer = Tool({"verify", folder_.path()}, Terminal::kYes);
  EXPECT_THAT(answer.err, StartsWith("\rverify ["));
  EXPECT_TRUE(answer.err.ends_with("\r\033[K"));
  EXPECT_THAT(answer.out, Not(HasSubstr("\r")));
  EXPECT_THAT(Tool({"verify", folder_.path()}).err, IsEmpty());
}

TEST(ProgressBar, ShowsShareAndBytes) {
  std::ostringstream out;
  {
    ProgressBar bar(&out, "copy", 4'000'000'000);
    bar.Add(1'000'000'000);
    bar.Add(1);  // within a tenth of a second: not drawn
  }
  EXPECT_EQ(out.str(), "\rcopy [######..................]  25 %  1.0 GB\033[K\r\033[K");
  EXPECT_EQ(BytesText(999), "999 bytes");
  EXPECT_EQ(BytesText(12'345), "12 kB");
}

}  // namespace
}  // namespace outlast
