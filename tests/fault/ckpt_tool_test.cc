// `outlast ckpt copy`, `import` and `gc` are killed after each call that touches the root, and have
// each call fail; then the same command again does its work.
#include "tests/fault/ckpt_job.h"

namespace outlast::testing {
namespace {

namespace fs = std::filesystem;

// A root with a chain of three checkpoints, of which the first is pinned, and what one command
// works on. Each attempt begins with fresh copies.
class ToolStory {
 public:
  ToolStory() {
    const std::string writer = BuildFolder() / "outlast_checkpoint_writer";
    EXPECT_EQ(std::system((writer + " " + Path("pristine")).c_str()), 0);
    EXPECT_EQ(Tool({"export", Path("pristine"), "--hf", Path("hf")}), 0) << Said();
    EXPECT_EQ(Tool({"pin", First("pristine")}), 0) << Said();
  }

  std::string Path(const std::string& name) { return job_.launched().Path(name); }
  std::string Said() { return job_.launched().Read("out") + job_.launched().Read("err"); }

  int Tool(std::vector<std::string> words) {
    words.insert(words.begin(), {ToolPath(), "ckpt"});
    job_.launched().StartProgram(words);
    return job_.Wait();
  }
  std::string ToolOnATerminal(std::vector<std::string> words) {
    words.insert(words.begin(), {ToolPath(), "ckpt"});
    job_.launched().StartProgram(words, Output::kTerminal);
    EXPECT_EQ(job_.Wait(), 0);
    return job_.launched().Read("terminal");
  }
  std::vector<std::string> Checkpoints(const std::string& root) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(Path(root))) {
      const std::string name = entry.path().filename();
      if (name.starts_with("step-")) names.push_back(name);
    }
    std::ranges::sort(names);
    return names;
  }
  std::string First(const std::string& root) { return Path(root) + "/" + Checkpoints(root)[0]; }

  // What a command does to "root" at each of its calls. `begin` lays "root" out; `check` looks at
  // what the undisturbed command left.
  void KillAndFailEverywhere(const std::vector<std::string>& command,
                             const std::function<void()>& begin,
                             const std::function<void()>& check) {
    const int calls = Count(command, begin, check);
    ASSERT_GT(calls, 5);
    // Sanitizer builds take every third; calls fail at every second.
    for (int k = 1; k <= calls; k += kSanitized ? 3 : 1) {
      Begin(begin);
      ASSERT_EQ(job_.ToolUnderShim(command, Path("root"), {.kill_at = k}), 128 + SIGKILL);
      SCOPED_TRACE("killed after call " + std::to_string(k) + ", " + job_.CallName(k));
      LookAndRepeat(command, check);
      if (::testing::Test::HasFailure()) return;
      if (k % 2 == 0) continue;
      Begin(begin);
      const int code =
          job_.ToolUnderShim(command, Path("root"), {.fault = "any:EIO:" + std::to_string(k)});
      SCOPED_TRACE("EIO of call " + std::to_string(k) + ", " + job_.CallName(k));
      EXPECT_TRUE(code == 0 || code == 1 || code == 85) << code << Said();
      LookAndRepeat(command, check);
      if (::testing::Test::HasFailure()) return;
    }
  }

 private:
  void Begin(const std::function<void()>& begin) {
    fs::remove_all(Path("root"));
    begin();
  }

  int Count(const std::vector<std::string>& command, const std::function<void()>& begin,
            const std::function<void()>& check) {
    Begin(begin);
    EXPECT_EQ(job_.ToolUnderShim(command, Path("root"), {}), 0) << Said();
    check();
    const auto calls = static_cast<int>(job_.page().calls);
    std::printf("%s: %d calls\n", command[0].c_str(), calls);
    return calls;
  }

  // Nothing that is listed as committed is damaged, and the command can be said again.
  void LookAndRepeat(const std::vector<std::string>& command, const std::function<void()>& check) {
    const int code = Tool({"verify", Path("root")});
    EXPECT_TRUE(code == 0 || (code == 85 && Checkpoints("root").empty())) << Said();
    EXPECT_EQ(Tool(command), 0) << Said();
    check();
  }

  CkptJob job_;
};

TEST(CkptTool, CopyLeavesAWholeCheckpointOrNoneAtEveryCall) {
  ToolStory story;
  const std::string source = story.First("pristine");
  story.KillAndFailEverywhere(
      {"copy", source, story.Path("root")}, [&] { fs::create_directory(story.Path("root")); },
      [&] {
        EXPECT_EQ(story.Checkpoints("root"), std::vector<std::string>{fs::path(source).filename()});
        EXPECT_EQ(story.Tool({"diff", source, story.Path("root")}), 0) << story.Said();
      });
}

TEST(CkptTool, ImportLeavesAWholeCheckpointOrNoneAtEveryCall) {
  ToolStory story;
  story.KillAndFailEverywhere(
      {"import", story.Path("hf"), story.Path("root"), "--step", "7", "--fresh"},
      [&] { fs::create_directory(story.Path("root")); },
      [&] {
        EXPECT_EQ(story.Tool({"diff", story.First("pristine"), story.Path("root")}), 1)
            << "of another step";
        EXPECT_EQ(story.Tool({"gc", story.Path("root"), "--yes"}), 0) << story.Said();
        EXPECT_EQ(story.Checkpoints("root").size(), 1u);
      });
}

TEST(CkptTool, GcTakesNothingThatMustStayAtAnyCall) {
  ToolStory story;
  // The chain begins anew: of the three that were there, two are abandoned without a pin.
  const std::string pristine = story.Path("pristine");
  ASSERT_EQ(story.Tool({"import", story.Path("hf"), pristine, "--step", "7", "--fresh"}), 0)
      << story.Said();
  fs::create_directory(pristine + "/step-000000000009-0000abcd");  // unfinished
  const std::vector<std::string> before = story.Checkpoints("pristine");
  ASSERT_EQ(before.size(), 5u);
  story.KillAndFailEverywhere(
      {"gc", story.Path("root"), "--yes"},
      [&] { fs::copy(pristine, story.Path("root"), fs::copy_options::recursive); },
      [&] {
        EXPECT_EQ(story.Checkpoints("root"), (std::vector<std::string>{before[0], before[3]}));
      });
}

TEST(CkptTool, DrawsItsBarWhereStderrIsATerminal) {
  ToolStory story;
  const std::string pristine = story.Path("pristine");
  const std::string shown = story.ToolOnATerminal({"verify", pristine});
  EXPECT_EQ(shown.find("\rverify ["), 0u) << shown;
  EXPECT_NE(shown.find("\r\033[K"), std::string::npos) << shown;

  EXPECT_EQ(story.Tool({"verify", pristine}), 0);
  EXPECT_EQ(story.Said().find('\r'), std::string::npos) << story.Said();
}

}  // namespace
}  // namespace outlast::testing
