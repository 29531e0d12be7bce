// What a user gets where he has no right, or no room: one clear line, the documented exit code,
// nothing lost and nothing left running. Root may do everything; so where the tests run as root,
// the tool is started as nobody.
#include <sys/mount.h>

#include <map>
#include <optional>
#include <set>

#include "tests/fault/launched.h"

namespace outlast::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

class Refusal : public ::testing::Test {
 protected:
  static constexpr uid_t kNobody = 65534;

  void SetUp() override {
    EXPECT_EQ(setenv("ASAN_OPTIONS", "detect_leaks=0", 0), 0);
    // A build folder may be closed to others.
    for (const char* program : {"outlast", "outlast_toy_trainer"})
      fs::copy_file(BuildFolder() / program, job_.Path(program));
    user_ = geteuid() == 0 ? kNobody : geteuid();
    if (geteuid() == 0) job_.RunAs(kNobody);
  }
  void TearDown() override {
    for (const auto& [path, mode] : locked_) chmod(path.c_str(), mode);
    for (const std::string& path : mounted_) umount2(path.c_str(), MNT_DETACH);
    EXPECT_EQ(ProcessesInside(), 0) << "left running";
  }

  std::string MakeFolder(const std::string& name) {
    const std::string path = job_.Path(name);
    fs::create_directory(path);
    EXPECT_EQ(chown(path.c_str(), user_, static_cast<gid_t>(-1)), 0);
    return path;
  }
  void Lock(const std::string& path, mode_t mode) {
    locked_[path] = 0755;
    ASSERT_EQ(chmod(path.c_str(), mode), 0);
  }
  void Unlock(const std::string& path) { ASSERT_EQ(chmod(path.c_str(), 0755), 0); }

  // A file system of `kib` KiB on a new folder, full but for `left_kib`. False: no right to mount.
  bool MountFull(const std::string& name, int kib, int left_kib) {
    const std::string path = MakeFolder(name);
    const std::string options = "mode=777,size=" + std::to_string(kib) + "k";
    if (mount("outlast-test", path.c_str(), "tmpfs", 0, options.c_str()) != 0) return false;
    mounted_.push_back(path);
    std::ofstream(path + "/filler") << std::string(static_cast<size_t>(kib - left_kib) << 10, 'x');
    return true;
  }

  int Run(std::vector<std::string> words) {
    for (const char* file : {"out", "err"}) fs::remove(job_.Path(file));
    job_.StartProgram(words);
    return job_.Wait().code;
  }
  std::vector<std::string> TrainerWords(const std::string& root, int steps) const {
    return {job_.Path("outlast"),
            "run",
            "-n",
            "2",
            "--",
            job_.Path("outlast_toy_trainer"),
            "--ckpt-dir",
            root,
            "--log",
            job_.Path("log"),
            "--steps",
            std::to_string(steps),
            "--ckpt-every",
            "10",
            "--step-ms",
            "5",
            "--state-mb",
            "0.25"};
  }
  int Train(const std::string& root, int steps = 20) {
    for (const char* file : {"log", "log.restores"}) fs::remove(job_.Path(file));
    return Run(TrainerWords(root, steps));
  }
  int Tool(const std::string& verb, const std::string& root) {
    return Run({job_.Path("outlast"), "ckpt", verb, root});
  }
  std::string Said() const { return job_.Read("out") + job_.Read("err"); }
  // By both ranks.
  size_t StepsTrained() const {
    const std::string log = job_.Read("log");
    return static_cast<size_t>(std::count(log.begin(), log.end(), '\n'));
  }
  int64_t RestoredStep() const {
    std::istringstream text(job_.Read("log.restores"));
    int64_t generation = 0, step = -1;
    text >> generation >> step;
    return step;
  }

  void ExpectOneLineWith(const std::vector<std::string>& parts) const {
    const std::string said = job_.Read("err");
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
    for (const std::string& part : parts) EXPECT_THAT(said, HasSubstr(part));
  }
  // The job was refused: the last line says it all, and nobody trained.
  void ExpectRefusedWith(const std::vector<std::string>& parts) const {
    const std::string said = job_.Read("err");
    const size_t at = said.find("outlast: exit code 85: ");
    ASSERT_NE(at, std::string::npos) << said;
    const std::string line = said.substr(at);
    EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 1) << line;
    for (const std::string& part : parts) EXPECT_THAT(line, HasSubstr(part));
    EXPECT_EQ(StepsTrained(), 0u);
  }
  std::string MayNot(const std::string& what) const {
    return "; a folder that user " + std::to_string(user_) + " may " + what + " wanted";
  }

  // Names and sizes of all that lies in `root`.
  static std::map<std::string, uintmax_t> Content(const std::string& root) {
    std::map<std::string, uintmax_t> content;
    for (const auto& entry : fs::recursive_directory_iterator(root))
      content[entry.path()] = entry.is_regular_file() ? entry.file_size() : 0;
    return content;
  }

  Launched job_;
  uid_t user_ = 0;

 private:
  // Processes that stand in the test's folder, waited for a little.
  int ProcessesInside() const {
    std::vector<pid_t> inside;
    for (const auto& entry : fs::directory_iterator("/proc")) {
      const std::string name = entry.path().filename();
      std::error_code error;
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      if (fs::read_symlink(entry.path() / "cwd", error).string().starts_with(job_.folder()))
        inside.push_back(std::stoi(name));
    }
    return CountAliveAfter(inside, absl::Seconds(2));
  }

  std::map<std::string, mode_t> locked_;
  std::vector<std::string> mounted_;
};

TEST_F(Refusal, NamesARunDirThatCannotBeWritten) {
  const std::string locked = MakeFolder("locked");
  Lock(locked, 0555);
  EXPECT_EQ(Run({job_.Path("outlast"), "run", "-n", "2", "--run-dir", "locked", "--", "true"}), 85);
  ExpectOneLineWith({"--run-dir 'locked'", "Permission denied", "a writable folder wanted"});
  EXPECT_EQ(Run({"/bin/sh", "-c", "cd locked && exec ../outlast run -n 2 -- true"}), 85);
  ExpectOneLineWith(
      {"--run-dir './outlast-runs'", "Permission denied", "a writable folder wanted"});
  EXPECT_TRUE(fs::is_empty(locked));
}

TEST_F(Refusal, NamesACheckpointFolderThatCannotBeWritten) {
  const std::string locked = MakeFolder("locked");
  Lock(locked, 0555);
  EXPECT_EQ(Train(locked), 85) << Said();
  ExpectRefusedWith({"checkpoint root '" + locked + "'", "Permission denied", MayNot("write to")});
  EXPECT_EQ(Train(locked + "/new"), 85) << Said();
  ExpectRefusedWith({"mkdir " + locked + "/new", "Permission denied", MayNot("write to")});
  EXPECT_TRUE(fs::is_empty(locked));
}

TEST_F(Refusal, NamesCheckpointsThatHaveBecomeReadOnlyAndLosesNone) {
  const std::string root = job_.Path("ckpt");
  ASSERT_EQ(Train(root), 0) << Said();
  const auto before = Content(root);
  for (const std::string& part : {root, root + "/claims"}) {
    Lock(part, 0555);
    EXPECT_EQ(Train(root, 30), 85) << Said();
    ExpectRefusedWith({"checkpoint root '" + root + "'", part, "Permission denied"});
    EXPECT_EQ(Content(root), before);
    for (const char* verb : {"ls", "verify", "show"}) EXPECT_EQ(Tool(verb, root), 0) << Said();
    Unlock(part);
  }
  EXPECT_EQ(Train(root, 30), 0) << Said();
  EXPECT_EQ(RestoredStep(), 20);
}

TEST_F(Refusal, NamesCheckpointsThatCannotBeRead) {
  const std::string root = job_.Path("ckpt");
  ASSERT_EQ(Train(root), 0) << Said();
  Lock(root, 0000);
  for (const char* verb : {"ls", "verify", "show"}) {
    EXPECT_EQ(Tool(verb, root), 85) << Said();
    ExpectOneLineWith({"outlast ckpt: ", root, "Permission denied", MayNot("read")});
    EXPECT_EQ(job_.Read("out"), "");
  }
  EXPECT_EQ(Train(root, 30), 85) << Said();
  ExpectRefusedWith({root, "Permission denied"});
  Unlock(root);
  EXPECT_EQ(Train(root, 30), 0) << Said();
  EXPECT_EQ(RestoredStep(), 20);
}

// Case O14: the folder of the newest one.
TEST_F(Refusal, PassesOverOneCheckpointThatCannotBeReadAndLeavesItThere) {
  const std::string root = job_.Path("ckpt");
  ASSERT_EQ(Train(root), 0) << Said();
  std::string newest;
  for (const auto& entry : fs::directory_iterator(root))
    if (entry.path().filename().string().starts_with("step-000000000020-")) newest = entry.path();
  Lock(newest, 0000);
  EXPECT_EQ(Tool("ls", root), 1);
  EXPECT_THAT(job_.Read("out"), HasSubstr(newest + ": Permission denied"));
  EXPECT_EQ(Tool("verify", root), 1);
  EXPECT_THAT(job_.Read("out"), HasSubstr("Permission denied"));

  EXPECT_EQ(Train(root, 30), 0) << Said();
  EXPECT_EQ(RestoredStep(), 10);
  EXPECT_THAT(Said(), HasSubstr("checkpoint passed over: " + fs::path(newest).filename().string()));
  Unlock(newest);
  EXPECT_EQ(Tool("verify", newest), 0) << Said();
}

TEST_F(Refusal, InTheMiddleOfARunEndsWith88AndKeepsWhatWasSaved) {
  const std::string root = job_.Path("ckpt");
  fs::remove(job_.Path("log"));
  job_.StartProgram(TrainerWords(root, 200));
  const auto committed = [&] {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(root))
      if (fs::exists(entry.path() / "MANIFEST.json")) names.insert(entry.path().filename());
    return names;
  };
  while (!fs::exists(root) && is_alive(job_.pid())) absl::SleepFor(absl::Milliseconds(1));
  while (committed().empty() && is_alive(job_.pid())) absl::SleepFor(absl::Milliseconds(1));
  Lock(root, 0555);
  EXPECT_EQ(job_.Wait().code, 88) << Said();
  EXPECT_EQ(StepsTrained(), 400u) << "training goes on";
  EXPECT_THAT(Said(), HasSubstr("(errno 13)"));
  EXPECT_EQ(Tool("verify", root), 0) << Said();
  const auto kept = committed();
  EXPECT_FALSE(kept.empty());

  Unlock(root);
  EXPECT_EQ(Train(root, 210), 0) << Said();
  EXPECT_GE(RestoredStep(), 10);
}

// Case O10: pre-empted, and the disk takes nothing: not the code of a save.
TEST_F(Refusal, OfAStopsSaveEndsWith81AndTellsTheLastDurableStep) {
  const std::string root = job_.Path("ckpt");
  ASSERT_EQ(Train(root), 0) << Said();
  fs::remove(job_.Path("log"));
  std::vector<std::string> words = TrainerWords(root, 100000);
  words.insert(words.end(), {"--ckpt-every", "1000"});
  job_.StartProgram(words);
  while (StepsTrained() < 20 && is_alive(job_.pid())) absl::SleepFor(absl::Milliseconds(1));
  Lock(root, 0555);
  kill(job_.pid(), SIGTERM);
  EXPECT_EQ(job_.Wait().code, 81) << Said();
  EXPECT_THAT(Said(), HasSubstr("the request was not served in time, the last durable step is "));
  EXPECT_TRUE(job_.Report()["stop"]["saved_step"].is_null()) << job_.Report()["stop"];
  Unlock(root);
}

TEST_F(Refusal, NamesTheFullDiskOfACheckpointRoot) {
  if (!MountFull("ckpt", 1024, 0)) GTEST_SKIP() << "needs the right to mount a tmpfs";
  const std::string root = job_.Path("ckpt");
  EXPECT_EQ(Train(root), 85) << Said();
  ExpectRefusedWith({root, "No space left on device", "wanted", "0 free"});
  fs::remove(root + "/filler");
  EXPECT_EQ(Train(root), 0) << Said();
}

// The records of a run are not the run.
TEST_F(Refusal, NeverEndsARunForTheFullDiskOfItsRecords) {
  if (!MountFull("small", 256, 0)) GTEST_SKIP() << "needs the right to mount a tmpfs";
  std::vector<std::string> words = TrainerWords(job_.Path("ckpt"), 20);
  words.insert(words.begin() + 2, {"--run-dir", "small"});
  EXPECT_EQ(Run(words), 0) << Said();
  EXPECT_EQ(StepsTrained(), 40u);
  EXPECT_THAT(Said(), HasSubstr("the report was not written"));
  EXPECT_THAT(Said(), HasSubstr("No space left on device"));
  EXPECT_EQ(Tool("verify", job_.Path("ckpt")), 0) << Said();
}

}  // namespace
}  // namespace outlast::testing
