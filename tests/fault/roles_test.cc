// Commit.RestoresBitExactAfterAKillAtEverySystemCall of design/checkpoint.md, section 9, process by
// process: in a job of two nodes and a coordinator of its own just one process is killed, after
// each call that it makes. crash_test.cc kills whole jobs.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "tests/fault/kill_page.h"
#include "tests/fault/node_jobs.h"

namespace outlast::testing {
namespace {

constexpr int kSteps = 40;  // saved each 10; killed in the second save, so that training goes on
constexpr int kLead = 1, kFollower = 2, kCoordinator = 0;
constexpr char kSelf[] = "self";
constexpr int kLongestStory = 20;  // seconds: less than any limit of 30 s that one may run into

// Whose calls count, and who is killed.
struct Role {
  int caller = kLead;
  const char* victim = kSelf;  // or a rank
  bool is_rank() const { return victim != kSelf; }
};

// One job; node n1 has rank 0 and commits, node n2 has rank 1.
class Story : public NodesThatSave {
 public:
  explicit Story(Role role) : role_(role) {
    all_flags_["-n"] = "1";
    std::ofstream(Path("page")) << std::string(sizeof(KillPage), '\0');
    const UniqueFd fd(open(Path("page").c_str(), O_RDWR | O_CLOEXEC));
    void* page = mmap(nullptr, sizeof(KillPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    EXPECT_NE(page, MAP_FAILED);
    page_ = static_cast<KillPage*>(page);
  }
  ~Story() override { munmap(page_, sizeof(KillPage)); }
  void TestBody() override {}

  // The calls of a job that nobody kills, by name.
  std::vector<std::string> CountCalls() {
    StartAll(/*kill_at=*/0);
    for (const int k : {1, 2}) EndsWith(k, 0, 60);
    EXPECT_NE(lead_->LineWith("job job ends with 0", Within(20)), "") << Seen();
    std::vector<std::string> names;
    for (uint32_t i = 0; i < std::min<uint32_t>(page_->calls, 256); ++i)
      names.emplace_back(page_->names[i].data());
    return names;
  }

  void KillAfter(int k) {
    StartAll(k);
    if (role_.is_rank()) {
      for (const int node : {1, 2}) EndsWith(node, 0, 60);
      ASSERT_EQ(page_->killed, 1u) << "call " << k << " was not reached\n" << Seen();
      SCOPED_TRACE(Called(k));
      ExpectRestores(/*least=*/0);
      ExpectTheEnd();
      return;
    }
    if (role_.caller == kCoordinator &&
        !lead_->LineWith("job job ends with 0", Within(60)).empty() && page_->killed == 0) {
      for (const int node : {1, 2}) EndsWith(node, 0, 60);
      was_reached_ = false;
      return;
    }
    PipedProcess& victim = role_.caller == kCoordinator ? *lead_ : *agents_.at(role_.caller);
    ASSERT_EQ(victim.Wait(Within(60)), 128 + SIGKILL) << "call " << k << "\n" << Seen();
    ASSERT_EQ(page_->killed, 1u);
    SCOPED_TRACE(Called(k));
    const int committed = Committed();
    // Nobody else commits or deletes, so what is listed stays as it is meanwhile.
    if (committed > 0 && role_.caller == kLead) ExpectWhole();
    armed_ = false;
    if (role_.caller == kCoordinator) {
      LaunchCoordinator("2");
    } else {
      StartToys({role_.caller}, kSteps);
    }
    std::map<int, int> codes;
    for (const int node : {1, 2}) codes[node] = agents_.at(node)->Wait(Within(60));
    ExpectRestores(committed);
    if (codes[1] != 0 || codes[2] != 0) {
      // The job had ended for one of them; so all are started once more.
      fs::remove(Path("log.restores"));
      lead_->Kill();
      fs::remove_all(Path("journal"));  // that of a job that has ended serves no other
      ++second_starts_;
      LaunchCoordinator("2");
      StartToys({1, 2}, kSteps);
      for (const int node : {1, 2}) EndsWith(node, 0, 60);
      ExpectRestores(committed);
    }
    ExpectTheEnd();
  }
  int second_starts() const { return second_starts_; }
  bool was_reached() const { return was_reached_; }

 private:
  // None at the coordinator's: no agent leads.
  std::string Host(int k) const override { return "127.0.0." + std::to_string(k + 1); }
  std::vector<std::string> Place(int k) const override {
    if (!armed_) return {};
    std::vector<std::string> words = {"/usr/bin/env"};
    const auto set = [&](const char* name, const std::string& value) {
      words.push_back(std::string(name) + "=" + value);
    };
    set(kShimPage, Path("page"));
    set(kShimRoot, Path(role_.caller == kCoordinator ? "journal" : "root"));
    set(kShimCounts, k == role_.caller ? "1" : "0");
    set(kShimFromSave, role_.caller == kCoordinator ? "0" : "2");
    if (role_.caller != kCoordinator) set(kShimToSave, "3");
    set(kShimKillAt, std::to_string(kill_at_));
    set(kShimVictim, role_.victim);
    return words;
  }
  std::string Program(int) const override {
    return BuildFolder() / (armed_ ? "outlast_tool_with_shim" : "outlast");
  }

  void StartAll(int kill_at) {
    kill_at_ = kill_at;
    armed_ = true;
    LaunchCoordinator("2");
    (void)lead_->LineWith("coordinator of job job at ", Within(20));
    std::vector<std::string> command = Toy(kSteps);
    command.insert(command.end(), {"--step-ms", "5", "--state-mb", "0.25", "--keep", "1"});
    if (role_.is_rank()) command[0] += "_with_shim";
    for (const int k : {1, 2}) Start(k, "2", {}, command);
  }
  void StartToys(const std::vector<int>& nodes, int steps) {
    std::vector<std::string> command = Toy(steps);
    command.insert(command.end(), {"--step-ms", "5", "--state-mb", "0.25", "--keep", "1"});
    for (const int k : nodes) Start(k, "2", {}, command);
  }

  std::string Called(int k) const {
    return "killed after call " + std::to_string(k) + ", " +
           page_->names[static_cast<size_t>(k - 1)].data();
  }
  // The newest step that has a manifest; 0: none.
  int Committed() const {
    if (!fs::exists(Path("root"))) return 0;
    for (const int step : {40, 30, 20, 10}) {
      if (!Manifest(step).is_null()) return step;
    }
    return 0;
  }
  void ExpectWhole() {
    PipedProcess verify({BuildFolder() / "outlast", "ckpt", "verify", Path("root")});
    const int code = verify.Wait(Within(30));
    std::istringstream lines(verify.seen());
    int damaged = 0;
    for (std::string line; std::getline(lines, line);) {
      if (line.find("its deletion has begun") != std::string::npos) {
        ++damaged;  // no checkpoint any more
        continue;
      }
      EXPECT_EQ(line.find("damaged"), std::string::npos) << line;
    }
    EXPECT_TRUE(code == 0 || (code == 1 && damaged > 0)) << code << " " << verify.seen();
  }
  // After the kill all ranks took one step that was saved, none older than `least`. The trainer has
  // checked each byte: 3 is what it ends with otherwise.
  void ExpectRestores(int least) {
    std::istringstream lines(Read("log.restores"));
    std::map<uint64_t, std::set<int64_t>> steps;
    uint64_t generation = 0;
    int64_t step = 0;
    int rank = 0;
    for (std::string source; lines >> generation >> step >> rank >> source;) {
      if (generation > 1 || second_starts_ > 0) steps[generation].insert(step);
    }
    for (const auto& [number, taken] : steps) {
      last_restored_ = *taken.rbegin();
      EXPECT_EQ(taken.size(), 1u) << "generation " << number << ": " << Read("log.restores");
      EXPECT_GE(*taken.begin(), least) << Read("log.restores") << Seen();
    }
  }
  void ExpectTheEnd() {
    EXPECT_EQ(Committed(), kSteps) << Seen();
    ExpectWhole();
    // What a killed save has left goes with the next commit; there is none where the last step was
    // restored.
    if (last_restored_ == kSteps) return;
    for (const auto& entry : fs::directory_iterator(Path("root"))) {
      if (!entry.path().filename().string().starts_with("step-")) continue;
      EXPECT_TRUE(fs::exists(entry.path() / "MANIFEST.json")) << entry.path();
    }
  }

  const Role role_;
  bool armed_ = false;
  int kill_at_ = 0;
  int64_t last_restored_ = kSteps;  // after the kill
  int second_starts_ = 0;
  bool was_reached_ = true;
  KillPage* page_ = nullptr;
};

// Stories side by side, since nearly all of each is waiting. With `up_to`, the calls behind the
// first one of that name are left out.
void KillAfterEveryCall(Role role, const std::string& up_to = "") {
  const std::vector<std::string> names = Story(role).CountCalls();
  const auto last = std::find(names.begin(), names.end(), up_to);
  const auto calls = static_cast<int>(last - names.begin()) + (last == names.end() ? 0 : 1);
  std::printf("%d of %zu calls:", calls, names.size());
  for (const std::string& name : names) std::printf(" %s", name.c_str());
  std::printf("\n");
  ASSERT_GT(calls, 5);
  ASSERT_TRUE(up_to.empty() || last != names.end());

  constexpr int kStride = kSanitized ? 7 : 1;
  std::vector<std::pair<int, std::unique_ptr<Story>>> stories;
  for (int k = 1; k <= calls; k += kStride) stories.emplace_back(k, std::make_unique<Story>(role));
  std::atomic<size_t> next = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < (kSanitized ? 2 : 6); ++i) {
    threads.emplace_back([&] {
      for (size_t at; (at = next.fetch_add(1)) < stories.size();) {
        const absl::Duration began = Clock::Real().Uptime();
        stories[at].second->KillAfter(stories[at].first);
        EXPECT_LT(Clock::Real().Uptime() - began, Within(kLongestStory))
            << "killed after call " << stories[at].first;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  int second_starts = 0;
  for (const auto& [k, story] : stories) {
    second_starts += story->second_starts();
    // The journal takes records together that come together: then it makes fewer calls.
    EXPECT_TRUE(story->was_reached() || k > calls - 6) << "call " << k << " was not reached";
  }
  std::printf("%d of %zu were started a second time\n", second_starts, stories.size());
}

// The writers' own process does not touch the root; its agent does.
TEST(KilledRole, ARankAtEveryCallOfItsAgentInASave) {
  KillAfterEveryCall({.caller = kFollower, .victim = "1"});
}
TEST(KilledRole, AnAgentThatFollowsAtEveryCallOfASave) {
  KillAfterEveryCall({.caller = kFollower});
}
TEST(KilledRole, TheAgentThatCommitsAtEveryCallOfASave) { KillAfterEveryCall({.caller = kLead}); }
TEST(KilledRole, TheCoordinatorAtEveryCallOnItsJournal) {
  KillAfterEveryCall({.caller = kCoordinator});
}

}  // namespace
}  // namespace outlast::testing
