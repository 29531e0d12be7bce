// A trainer that hangs where it is told to: short steps in which nothing is computed but a sum that
// can be checked.
//   hang_trainer --folder F --steps N --floor S --first S [--observe] [--do
//   WHAT:RANK:STEP[:LIMIT:TAKES]]...
//
// WHAT happens once in a run, whatever is restored: a file F/WHAT.RANK.STEP marks it, made just
// before.
//   data, backward      stopped (SIGSTOP) in that phase
//   reduce              stopped inside the all-reduce, before the last peer has come
//   read                a read that blocks in the data phase; an abort's callback ends it
//   stuck               the same, and nothing ends it
//   slow                the data phase takes TAKES seconds
//   idle                the same in a section in which nothing is pending: no fault by itself
//   swap                two all-reduces of this step in the other order than all other ranks
//   section             a section "evaluate" with a limit of LIMIT that takes TAKES seconds
//   save                the same, a checkpoint's
//   die                 killed inside a section "export" with a limit of LIMIT seconds
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "outlast/outlast.h"

namespace {

using outlast::Phase;

struct Deed {
  std::string what;
  int rank = 0;
  int64_t step = 0;
  double limit = 0, takes = 0;
};

struct Options {
  std::string folder;
  int64_t steps = 0;
  double floor = 1, first = 3;
  bool observe = false;
  std::vector<Deed> deeds;
};

Deed ParseDeed(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ':') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  parts.resize(5, "0");
  return {parts[0], std::atoi(parts[1].c_str()), std::atoll(parts[2].c_str()),
          std::atof(parts[3].c_str()), std::atof(parts[4].c_str())};
}

std::optional<Options> Parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (flag == "--observe") {
      options.observe = true;
      continue;
    }
    if (i + 1 == argc) return std::nullopt;
    const std::string value = argv[++i];
    if (flag == "--folder") {
      options.folder = value;
    } else if (flag == "--steps") {
      options.steps = std::atoll(value.c_str());
    } else if (flag == "--floor") {
      options.floor = std::atof(value.c_str());
    } else if (flag == "--first") {
      options.first = std::atof(value.c_str());
    } else if (flag == "--do") {
      options.deeds.push_back(ParseDeed(value));
    } else {
      return std::nullopt;
    }
  }
  return options;
}

void SleepFor(double seconds) { outlast::Clock::Real().SleepFor(absl::Seconds(seconds)); }

class Mischief {
 public:
  Mischief(const Options& options, int rank) : options_(options), rank_(rank) {}
  ~Mischief() {
    if (stopper_.joinable()) stopper_.join();
  }

  // The deed of this name that is due now, marked as done.
  const Deed* Take(std::string_view what, int64_t step) { return TakeOf(what, rank_, step, ""); }
  // Whether any rank does it in this step.
  bool Concerns(std::string_view what, int64_t step) const {
    return std::any_of(options_.deeds.begin(), options_.deeds.end(),
                       [&](const Deed& deed) { return deed.what == what && deed.step == step; });
  }
  // Whether a peer is about to be stopped inside this step's all-reduce, and waits for this rank.
  bool HasToBeLate(int64_t step) {
    for (const Deed& deed : options_.deeds) {
      if (deed.what == "reduce" && (deed.rank + 1) % 4 == rank_ &&
          TakeOf("reduce", deed.rank, step, ".late") != nullptr)
        return true;
    }
    return false;
  }
  void StopSoon() {
    in_reduce_ = false;
    if (stopper_.joinable()) stopper_.join();
    stopper_ = std::thread([this] {
      pthread_setname_np(pthread_self(), "stopper");
      in_reduce_.wait(false);
      SleepFor(0.06);
      kill(getpid(), SIGSTOP);
    });
  }
  void EntersReduce() {
    in_reduce_ = true;
    in_reduce_.notify_all();
  }

 private:
  const Deed* TakeOf(std::string_view what, int rank, int64_t step, const char* suffix) {
    for (const Deed& deed : options_.deeds) {
      if (deed.what != what || deed.rank != rank || deed.step != step) continue;
      const std::string mark = options_.folder + "/" + deed.what + "." + std::to_string(rank) +
                               "." + std::to_string(step) + suffix;
      const int file = open(mark.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
      if (file < 0) return nullptr;
      close(file);
      return &deed;
    }
    return nullptr;
  }

  const Options& options_;
  const int rank_;
  std::atomic<bool> in_reduce_ = false;
  std::thread stopper_;
};

// Blocks until the write end is used or closed.
class BlockedRead {
 public:
  BlockedRead() { (void)!pipe2(ends_.data(), O_CLOEXEC); }
  ~BlockedRead() {
    close(ends_[0]);
    close(ends_[1]);
  }
  void Read() const {
    char byte;
    (void)!read(ends_[0], &byte, 1);
  }
  void Release() const { (void)!write(ends_[1], "x", 1); }

 private:
  std::array<int, 2> ends_{};
};

absl::Status Data(const outlast::Generation& generation, Mischief& mischief,
                  const BlockedRead& loader, int64_t step) {
  SleepFor(0.002);
  if (mischief.Take("data", step) != nullptr) kill(getpid(), SIGSTOP);
  if (mischief.Take("read", step) != nullptr) loader.Read();
  if (mischief.Take("stuck", step) != nullptr) BlockedRead().Read();
  if (const Deed* slow = mischief.Take("slow", step)) SleepFor(slow->takes);
  return generation.Check();
}

void Idle(outlast::Run& run, const BlockedRead& until) {
  const auto section = run.Section("idle", {.phase = Phase::kIdle});
  until.Read();
}

void Sections(outlast::Run& run, Mischief& mischief, int64_t step) {
  if (const Deed* deed = mischief.Take("section", step)) {
    const auto section =
        run.Section("evaluate", {.phase = Phase::kEval, .limit = absl::Seconds(deed->limit)});
    SleepFor(deed->takes);
  }
  if (const Deed* deed = mischief.Take("save", step)) {
    const auto section = run.Section(
        "save", {.phase = Phase::kCheckpointWrite, .limit = absl::Seconds(deed->limit)});
    SleepFor(deed->takes);
  }
  if (const Deed* deed = mischief.Take("die", step)) {
    const auto section = run.Section("export", {.limit = absl::Seconds(deed->limit)});
    kill(getpid(), SIGKILL);
  }
}

absl::Status Train(const Options& options) {
  OUTLAST_ASSIGN_OR_RETURN(const auto run, outlast::Run::Join());
  OUTLAST_ASSIGN_OR_RETURN(
      const auto checkpoints,
      outlast::Checkpointer::Open(*run, {.uri = options.folder + "/checkpoints",
                                         .every = outlast::Every::Steps(10),
                                         .snapshot_every = outlast::Every::Steps(1)}));
  const absl::Duration first = absl::Seconds(options.first);
  OUTLAST_ASSIGN_OR_RETURN(
      const auto watchdog,
      outlast::Watchdog::Start(
          *run, {.mode = options.observe ? outlast::WatchMode::kObserve : outlast::WatchMode::kAct,
                 .poll = absl::Milliseconds(100),
                 .floor = absl::Seconds(options.floor),
                 .first_limits = {.step = first, .outside = first},
                 .looks_apart = absl::Milliseconds(100)}));
  OUTLAST_ASSIGN_OR_RETURN(const auto meter, outlast::Meter::Start(*run));
  Mischief mischief(options, run->rank());
  std::vector<float> state(256), sum(256);

  const absl::Status trained = run->ForEachGeneration([&](outlast::Generation& generation)
                                                          -> absl::Status {
    const auto loader = std::make_shared<BlockedRead>();
    generation.OnAbort([loader] { loader->Release(); });
    OUTLAST_ASSIGN_OR_RETURN(
        auto group, outlast::Group::Make(generation, *run, "sum", sum.size() * sizeof(float)));
    std::optional<outlast::Group> other;
    std::vector<float> ones(4, 1);
    if (std::any_of(options.deeds.begin(), options.deeds.end(),
                    [](const Deed& deed) { return deed.what == "swap"; })) {
      OUTLAST_ASSIGN_OR_RETURN(auto made, outlast::Group::Make(generation, *run, "other", 64));
      other.emplace(std::move(made));
    }
    outlast::StateView view;
    const outlast::Shape shape({static_cast<int64_t>(state.size())});
    view.regions.push_back(
        {"sum", outlast::DType::kF32, shape, {}, shape, std::as_writable_bytes(std::span(state))});
    OUTLAST_ASSIGN_OR_RETURN(int64_t step, checkpoints->Restore(view));
    if (step == 0) state.assign(state.size(), 0);
    for (; step < options.steps; ++step) {
      auto scope = meter->Step(step);
      OUTLAST_RETURN_IF_ERROR(generation.Check());
      scope.Enter(Phase::kData);
      OUTLAST_RETURN_IF_ERROR(Data(generation, mischief, *loader, step));
      Sections(*run, mischief, step);
      if (mischief.Take("idle", step) != nullptr) Idle(*run, *loader);
      scope.Enter(Phase::kForward);
      SleepFor(0.003);
      scope.Enter(Phase::kBackward);
      SleepFor(0.005);
      if (mischief.Take("backward", step) != nullptr) kill(getpid(), SIGSTOP);
      if (mischief.HasToBeLate(step)) SleepFor(0.3);
      for (float& value : sum) value = static_cast<float>((generation.rank() + 1) * (step % 7));
      scope.Enter(Phase::kCommWait);
      if (mischief.Take("reduce", step) != nullptr) mischief.StopSoon();
      mischief.EntersReduce();
      const bool has_two = mischief.Concerns("swap", step);
      const bool swaps = has_two && mischief.Take("swap", step) != nullptr;
      if (has_two && !swaps) OUTLAST_RETURN_IF_ERROR(other->AllReduceSum(ones));
      OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(sum));
      if (swaps) OUTLAST_RETURN_IF_ERROR(other->AllReduceSum(ones));
      scope.Enter(Phase::kCheckpointSnapshot);
      OUTLAST_RETURN_IF_ERROR(checkpoints->BeforeUpdate());
      scope.Enter(Phase::kOptimizer);
      for (size_t i = 0; i < state.size(); ++i) state[i] += sum[i];
      scope.Enter(Phase::kCheckpointSnapshot);
      OUTLAST_RETURN_IF_ERROR(checkpoints->SaveIfDue(step + 1, view));
    }
    return checkpoints->Finish(options.steps, view);
  });
  if (trained.ok() && run->rank() == 0)
    std::ofstream(options.folder + "/result") << state.front() << ' ' << state.back();
  return trained;
}

}  // namespace

int main(int argc, char** argv) {
  const std::optional<Options> options = Parse(argc, argv);
  if (!options || options->folder.empty()) return 2;
  const absl::Status status = Train(*options);
  if (!status.ok()) std::fprintf(stderr, "hang_trainer: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
