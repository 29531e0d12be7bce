// Jobs of the toy trainer on one checkpoint root, with the kill shim where a test wants it.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/fault/kill_page.h"
#include "tests/fault/launched.h"

namespace outlast::testing {

// What the shim does to one run. Numbers as in kill_page.h.
struct ShimOrder {
  int from_save = 0;
  int kill_at = 0;
  std::string fault;
  int fault_rank = -1;  // whose calls fail alone; -1: all processes'
  uint32_t seed = 0;
  uint32_t clock_jumps_s = 0;
};

// A line of the trainer's restore log.
struct Restored {
  uint64_t generation = 0;
  int64_t step = 0;
  int rank = 0;
  std::string source;  // "disk", "memory", "live", "-"
  bool operator==(const Restored&) const = default;
};

class CkptJob {
 public:
  CkptJob() {
    EXPECT_EQ(setenv("ASAN_OPTIONS", "detect_leaks=0", 0), 0);
    trainer["--ckpt-dir"] = launched_.Path("ckpt");
  }

  Launched& launched() { return launched_; }
  // The root of the trainer's --ckpt-dir.
  std::string root() const { return trainer.at("--ckpt-dir"); }

  int world = 1;
  bool is_alone = false;  // without an agent, in a world of one
  std::map<std::string, std::string> trainer = {{"--steps", "20"},
                                                {"--step-ms", "0.2"},
                                                {"--ckpt-every", "10"},
                                                {"--keep", "1"},
                                                {"--state-mb", "0.25"}};
  std::vector<std::string> run_options;

  // Starts the job; with an order, under the shim.
  void Start(const std::optional<ShimOrder>& order = std::nullopt) {
    for (const char* log : {"log", "log.restores", "log.finished", "out", "err"})
      std::filesystem::remove(launched_.Path(log));
    const std::string suffix = order ? "_with_shim" : "";
    std::vector<std::string> words;
    if (!is_alone) {
      words = {BuildFolder() / (order ? "outlast_tool_with_shim" : "outlast"), "run", "-n",
               std::to_string(world)};
      words.insert(words.end(), run_options.begin(), run_options.end());
      words.emplace_back("--");
    }
    words.insert(words.end(), {BuildFolder() / ("outlast_toy_trainer" + suffix), "--log",
                               launched_.Path("log")});
    for (const auto& [name, value] : trainer) words.insert(words.end(), {name, value});
    if (order) Arm(*order, root());
    launched_.StartProgram(words);
    Disarm();
  }

  // `outlast ckpt WORDS...` under the shim, which counts calls on `counted`.
  int ToolUnderShim(const std::vector<std::string>& words, const std::string& counted,
                    const ShimOrder& order) {
    std::vector<std::string> all = {BuildFolder() / "outlast_tool_with_shim", "ckpt"};
    all.insert(all.end(), words.begin(), words.end());
    Arm(order, counted);
    launched_.StartProgram(all);
    Disarm();
    return Wait();
  }

  int Wait() { return launched_.Wait().code; }
  int Run(const std::optional<ShimOrder>& order = std::nullopt) {
    Start(order);
    return Wait();
  }

  // Of the latest run under the shim.
  const KillPage& page() const { return *page_; }
  std::vector<pid_t> Pids() const {
    std::vector<pid_t> pids;
    for (uint32_t i = 0; i < page_->pid_count && i < page_->pids.size(); ++i)
      pids.push_back(page_->pids[i]);
    return pids;
  }
  std::string CallName(int number) const {
    return page_->names[static_cast<size_t>(number - 1)].data();
  }

  std::vector<Restored> Restores() const {
    std::istringstream text(launched_.Read("log.restores"));
    std::vector<Restored> restores;
    for (Restored one; text >> one.generation >> one.step >> one.rank >> one.source;)
      restores.push_back(one);
    return restores;
  }
  // The one step that all ranks restored in generation 1; -1 when they differ or none did.
  int64_t RestoredStep() const {
    const auto all = Restores();
    std::vector<int64_t> steps;
    for (const Restored& one : all)
      if (one.generation == 1) steps.push_back(one.step);
    const bool agree =
        static_cast<int>(steps.size()) == world &&
        std::all_of(steps.begin(), steps.end(), [&](int64_t s) { return s == steps[0]; });
    return agree ? steps[0] : -1;
  }

  // `outlast ckpt VERB ROOT`: its exit code; what it said is in "tool.out" and "tool.err".
  int Tool(const std::string& verb) {
    const std::string command = "exec " + ToolPath() + " ckpt " + verb + " " + root() + " >" +
                                launched_.Path("tool.out") + " 2>" + launched_.Path("tool.err");
    const int status = std::system(command.c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

  // Folders of committed checkpoints by step, as `ckpt ls` lists them.
  std::map<int64_t, std::string> Committed() {
    EXPECT_EQ(Tool("ls"), 0) << launched_.Read("tool.err");
    std::map<int64_t, std::string> found;
    std::istringstream text(launched_.Read("tool.out"));
    for (std::string line; std::getline(text, line);) {
      std::istringstream words(line);
      std::string name, word, state;
      int64_t step = 0;
      if (words >> name >> word >> step >> state && word == "step" && state == "committed")
        found[step] = name;
    }
    return found;
  }
  std::vector<int64_t> CommittedSteps() {
    std::vector<int64_t> steps;
    for (const auto& [step, name] : Committed()) steps.push_back(step);
    return steps;
  }

  // All that the run printed, for a failing assertion.
  std::string Said() const { return launched_.Read("out") + launched_.Read("err"); }

 private:
  static void Disarm() {
    for (const char* name : {kShimPage, kShimRoot, kShimFromSave, kShimKillAt, kShimFault,
                             kShimFaultRank, kShimSeed, kShimClockJumps})
      unsetenv(name);
  }

  void Arm(const ShimOrder& order, const std::string& counted) {
    const std::string path = launched_.Path("page");
    std::filesystem::remove(path);
    launched_.Write("page", std::string(sizeof(KillPage), '\0'));
    const UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (page_ != nullptr) munmap(page_, sizeof(KillPage));
    void* page = mmap(nullptr, sizeof(KillPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    ASSERT_NE(page, MAP_FAILED);
    page_ = static_cast<KillPage*>(page);
    setenv(kShimPage, path.c_str(), 1);
    setenv(kShimRoot, counted.c_str(), 1);
    setenv(kShimFromSave, std::to_string(order.from_save).c_str(), 1);
    setenv(kShimKillAt, std::to_string(order.kill_at).c_str(), 1);
    setenv(kShimSeed, std::to_string(order.seed).c_str(), 1);
    setenv(kShimClockJumps, std::to_string(order.clock_jumps_s).c_str(), 1);
    if (!order.fault.empty()) setenv(kShimFault, order.fault.c_str(), 1);
    if (order.fault_rank >= 0) setenv(kShimFaultRank, std::to_string(order.fault_rank).c_str(), 1);
  }

  Launched launched_;
  KillPage* page_ = nullptr;
};

}  // namespace outlast::testing
