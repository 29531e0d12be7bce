// --restore-from: real jobs that begin at an older step, or at another root's.
#include <gmock/gmock.h>

#include <map>

#include "tests/fault/ckpt_job.h"

namespace outlast::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

std::map<std::string, nlohmann::json> ManifestsOf(const std::string& root) {
  std::map<std::string, nlohmann::json> manifests;
  for (const auto& entry : fs::directory_iterator(root)) {
    std::ifstream file(entry.path() / "MANIFEST.json");
    if (file) manifests[entry.path().filename()] = nlohmann::json::parse(file, nullptr, false);
  }
  return manifests;
}

// Everything below a folder: path, size, time of the last change.
std::map<std::string, std::pair<uintmax_t, fs::file_time_type>> Below(const std::string& folder) {
  std::map<std::string, std::pair<uintmax_t, fs::file_time_type>> all;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    all[entry.path()] = {entry.is_regular_file() ? entry.file_size() : 0,
                         fs::last_write_time(entry.path())};
  }
  return all;
}

class RestoreFrom : public ::testing::Test {
 protected:
  RestoreFrom() {
    job_.world = 2;
    job_.trainer["--keep"] = "9";
    job_.trainer["--finish-each"] = "1";  // each step is saved
  }
  int Train(int steps, const std::vector<std::string>& flags = {}) {
    job_.trainer["--steps"] = std::to_string(steps);
    job_.run_options = flags;
    return job_.Run();
  }
  std::string Said() { return job_.launched().Read("err"); }

  CkptJob job_;
};

TEST_F(RestoreFrom, AnOlderStepBeginsAHistoryOfItsOwnAndTheLaterOnesStay) {
  ASSERT_EQ(Train(4), 0) << Said();
  const auto before = ManifestsOf(job_.root());
  ASSERT_EQ(before.size(), 4u);

  ASSERT_EQ(Train(3, {"--restore-from", "2"}), 0) << Said();
  EXPECT_EQ(job_.RestoredStep(), 2);
  EXPECT_THAT(Said(), HasSubstr(": of the former history, that goes on behind step 2"));
  const auto after = ManifestsOf(job_.root());
  ASSERT_EQ(after.size(), 5u) << "the later steps of the former history stay";
  for (const auto& [name, manifest] : after) {
    if (before.contains(name)) continue;
    EXPECT_EQ(manifest["step"], 3);
    const auto parent = before.find(manifest["parent"].get<std::string>());
    ASSERT_NE(parent, before.end());
    EXPECT_EQ(parent->second["step"], 2);
  }

  ASSERT_EQ(Train(5), 0) << Said();
  EXPECT_EQ(job_.RestoredStep(), 3) << "of the new history, not 4 of the former one";
}

TEST_F(RestoreFrom, AStepThatIsNotThereIsRefusedAndThoseThatAreAreNamed) {
  ASSERT_EQ(Train(3), 0) << Said();
  const auto before = ManifestsOf(job_.root());
  EXPECT_EQ(Train(4, {"--restore-from", "7"}), 85) << Said();
  EXPECT_THAT(Said(), AllOf(HasSubstr("exit code 85: checkpoint root '" + job_.root() + "': "),
                            HasSubstr("--restore-from 7: no checkpoint of step 7, there are "
                                      "steps 3, 2, 1")));
  EXPECT_EQ(ManifestsOf(job_.root()), before);
  // Nobody holds the root: the next one need not wait.
  EXPECT_EQ(Train(4, {"--restore-from", "latest"}), 0) << Said();
  EXPECT_EQ(job_.RestoredStep(), 3);
}

TEST_F(RestoreFrom, AnotherRootIsOnlyReadAndTheOwnOneIsSavedTo) {
  const std::string other = job_.launched().Path("other");
  job_.trainer["--ckpt-dir"] = other;
  ASSERT_EQ(Train(2), 0) << Said();
  const auto before = Below(other);

  job_.trainer["--ckpt-dir"] = job_.launched().Path("own");
  ASSERT_EQ(Train(4, {"--restore-from", other}), 0) << Said();
  EXPECT_EQ(job_.RestoredStep(), 2);
  EXPECT_EQ(Below(other), before);
  const auto own = ManifestsOf(job_.root());
  ASSERT_EQ(own.size(), 2u);
  for (const auto& [name, manifest] : own) {
    if (manifest["step"] == 3) {
      EXPECT_TRUE(manifest["parent"].is_null()) << manifest;
    }
  }

  // One checkpoint of it, and by a trainer that has nothing left to do: it is saved here too.
  std::string first;
  for (const auto& [name, manifest] : ManifestsOf(other)) {
    if (manifest["step"] == 1) first.assign(other).append("/").append(name);
  }
  job_.trainer["--ckpt-dir"] = job_.launched().Path("third");
  ASSERT_EQ(Train(1, {"--restore-from", first}), 0) << Said();
  EXPECT_EQ(job_.RestoredStep(), 1);
  EXPECT_EQ(ManifestsOf(job_.root()).size(), 1u);
  EXPECT_EQ(Below(other), before);
}

}  // namespace
}  // namespace outlast::testing
