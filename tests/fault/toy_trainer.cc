// The toy trainer of the fault tests. Its state is a pure function of (seed, step), so whatever a
// restore brings is checked without a second copy:
//   toy_trainer --steps N --step-ms M --ckpt-dir D --ckpt-every K --keep R --state-mb S
//               [--sharded-mb M] [--finish-each 1] [--disk-rate BYTES_PER_SECOND] [--seed X]
//               [--remote URI --remote-every K --remote-keep R --remote-rate BYTES_PER_SECOND]
//               [--hook SCRIPT] [--snapshot-every K]
//               [--log FILE] [--watch-floor SECONDS --watch-poll SECONDS] [--busy 1]
//               [--stall data|backward|allreduce|read:RANK:STEP[:SECONDS]]
//
// With --sharded-mb the state is one of M MiB whatever the world, of which each rank holds a slice
// of another length, and the digests of a step's ranks have one sum whatever the world.
//
// FILE gets a line a step and rank, before the update: "generation step rank digest", and
// FILE.restores one a restore: "generation step rank source"; FILE.finished one when the last state
// is durable: "rank CLOCK_MONOTONIC-nanoseconds". A stall happens once, in generation
// 1; when the rank stands there, FILE.stall appears with its pid.
//
// With --busy a step's time is spent in what a signal handler must not meet: it allocates, prints,
// holds a mutex and looks names up, without a pause.
//
// With --finish-each each rank waits after each step until its save is complete, and looks for the
// checkpoint itself.
//
// Ends with 0, 1 (the library refused something), 2 (usage), 3 (the restored state is wrong), 4 (a
// wrong sum), 5 (a complete save is not visible), 80 (stopped, where no agent says so).
#include <fcntl.h>
#include <netdb.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "outlast/base/crc32c.h"
#include "outlast/outlast.h"

namespace {

constexpr int kWrongState = 3;
constexpr int kWrongSum = 4;
constexpr int kInvisible = 5;
constexpr int kStopped = 80;

struct Stall {
  std::string where;
  int rank = 0;
  int64_t step = 0;
  std::optional<double> seconds;
};

struct Options {
  int64_t steps = 20;
  double step_ms = 1;
  std::string checkpoints;
  int64_t every = 5;
  int64_t snapshot_every = 1;
  int keep = 3;
  double state_mb = 1;
  double sharded_mb = 0;
  bool finish_each = false;
  bool busy = false;
  uint64_t disk_rate = 0;
  uint32_t seed = 1;
  outlast::RemoteOptions remote;
  int64_t remote_every = 10;
  std::string hook;  // run by sh; empty: none
  std::string log;
  double watch_floor = 0;  // 0: no watchdog
  double watch_poll = 0.1;
  std::optional<Stall> stall;
};

std::optional<Stall> ParseStall(const std::string& text) {
  std::vector<std::string> words(1);
  for (const char c : text) {
    if (c == ':') {
      words.emplace_back();
    } else {
      words.back() += c;
    }
  }
  if (words.size() < 3) return std::nullopt;
  Stall stall{words[0], std::atoi(words[1].c_str()), std::atoll(words[2].c_str())};
  if (words.size() > 3) stall.seconds = std::atof(words[3].c_str());
  for (const char* known : {"data", "backward", "allreduce", "read"})
    if (stall.where == known) return stall;
  return std::nullopt;
}

std::optional<Options> Parse(int argc, char** argv) {
  std::map<std::string, std::string> given;
  for (int i = 1; i + 1 < argc; i += 2) given[argv[i]] = argv[i + 1];
  Options options;
  const auto number = [&](const char* name, auto& value) {
    if (const auto it = given.find(name); it != given.end())
      value = static_cast<std::remove_reference_t<decltype(value)>>(std::atof(it->second.c_str()));
    given.erase(name);
  };
  number("--steps", options.steps);
  number("--step-ms", options.step_ms);
  number("--ckpt-every", options.every);
  number("--snapshot-every", options.snapshot_every);
  number("--keep", options.keep);
  number("--state-mb", options.state_mb);
  number("--sharded-mb", options.sharded_mb);
  number("--finish-each", options.finish_each);
  number("--busy", options.busy);
  number("--disk-rate", options.disk_rate);
  number("--remote-every", options.remote_every);
  number("--remote-keep", options.remote.keep_last);
  number("--remote-rate", options.remote.bytes_per_second);
  number("--seed", options.seed);
  number("--watch-floor", options.watch_floor);
  number("--watch-poll", options.watch_poll);
  options.checkpoints = given["--ckpt-dir"];
  options.remote.uri = given["--remote"];
  options.remote.every = outlast::Every::Steps(options.remote_every);
  options.log = given["--log"];
  options.hook = given["--hook"];
  if (given.contains("--stall")) options.stall = ParseStall(given["--stall"]);
  const bool stall_is_bad = given.contains("--stall") && (!options.stall || options.log.empty());
  for (const char* known : {"--ckpt-dir", "--remote", "--hook", "--log", "--stall"})
    given.erase(known);
  if (argc % 2 == 0 || !given.empty() || options.checkpoints.empty() || stall_is_bad)
    return std::nullopt;
  return options;
}

void Sleep(double seconds) { absl::SleepFor(absl::Seconds(seconds)); }

void BeBusy(double seconds) {
  static std::mutex mutex;
  const int64_t until = outlast::MonotonicNanos() + static_cast<int64_t>(seconds * 1e9);
  for (size_t i = 0; outlast::MonotonicNanos() < until; ++i) {
    const std::lock_guard lock(mutex);
    const std::string text(100 + i % 5000, 'x');
    if (i % 50 == 0) std::printf("%.60s\n", text.c_str());
    if (i % 200 != 0) continue;
    addrinfo* found = nullptr;
    if (getaddrinfo("localhost", nullptr, nullptr, &found) == 0) freeaddrinfo(found);
  }
}

// One write(2) in append mode: lines of several ranks never mix.
void AppendLine(const std::string& path, const std::string& line) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0 || write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
    std::fprintf(stderr, "toy_trainer: %s: %s\n", path.c_str(), std::strerror(errno));
  if (fd >= 0) close(fd);
}

uint32_t Mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352d;
  x = (x ^ (x >> 15)) * 0x846ca68b;
  return x ^ (x >> 16);
}

// Words of one tensor at one step; `first` is the global index of values[0].
void Fill(std::span<uint32_t> values, uint32_t seed, int64_t step, uint32_t tensor, size_t first) {
  const uint32_t key = Mix(seed ^ Mix(static_cast<uint32_t>(step)) ^ Mix(tensor + 77));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = key ^ (static_cast<uint32_t>(first + i) * 0x9e3779b9U);
}

class State {
 public:
  State(const Options& options, int rank, int world)
      : seed_(options.seed),
        rank_(rank),
        world_(world),
        shared_(static_cast<size_t>(options.state_mb * (1 << 20)) / 2 / 4 + 1),
        is_sharded_(options.sharded_mb > 0),
        whole_(is_sharded_ ? static_cast<size_t>(options.sharded_mb * (1 << 20)) / 4
                           : shared_.size() * static_cast<size_t>(world)),
        first_(FirstOf(rank)),
        own_(FirstOf(rank + 1) - first_) {}

  void SetTo(int64_t step) {
    step_ = step;
    Fill(shared_, seed_, step, 0, 0);
    Fill(own_, seed_, step, 1, first_);
  }

  outlast::StateView view() {
    const auto whole = static_cast<int64_t>(shared_.size());
    const auto own = static_cast<int64_t>(own_.size());
    outlast::StateView view;
    view.regions = {{"shared", outlast::DType::kU32, {whole}, {}, {whole}, BytesOf(shared_)},
                    {"own",
                     outlast::DType::kU32,
                     {static_cast<int64_t>(whole_)},
                     {static_cast<int64_t>(first_)},
                     {own},
                     BytesOf(own_)},
                    {"step",
                     outlast::DType::kI64,
                     {},
                     {},
                     {},
                     std::as_writable_bytes(std::span(&step_, 1)),
                     outlast::RegionKind::kEager}};
    view.extras["cursor"] = "{\"step\":" + std::to_string(step_) + "}";
    return view;
  }

  uint32_t Digest() const {
    if (is_sharded_) return DigestOfSlice();
    const uint32_t shared = outlast::Crc32c(std::as_bytes(std::span(shared_)));
    return Mix(shared ^ Mix(outlast::Crc32c(std::as_bytes(std::span(own_)))) ^
               static_cast<uint32_t>(step_));
  }

  // Empty, or what differs from the state that belongs to `step`.
  std::string Difference(int64_t step, const outlast::Extras& extras) {
    State right = *this;
    right.SetTo(step);
    const auto cursor = extras.find("cursor");
    if (cursor == extras.end() || cursor->second != right.view().extras["cursor"])
      return "cursor: " + (cursor == extras.end() ? "missing" : cursor->second);
    if (step_ != step) return "step: " + std::to_string(step_);
    const auto differs = [](const char* name, const auto& found, const auto& wanted) {
      size_t i = 0;
      while (i < found.size() && found[i] == wanted[i]) ++i;
      return i == found.size() ? "" : std::string(name) + "[" + std::to_string(i) + "]";
    };
    return differs("shared", shared_, right.shared_) + differs("own", own_, right.own_);
  }

 private:
  // The first element of "own" that `rank` holds: equal slices, or ever longer ones.
  size_t FirstOf(int rank) const {
    const auto r = static_cast<size_t>(rank), world = static_cast<size_t>(world_);
    return is_sharded_ ? whole_ * r * (r + 1) / (world * (world + 1)) : whole_ / world * r;
  }

  // Adds up to the same over the ranks of any world.
  uint32_t DigestOfSlice() const {
    uint32_t sum = 0;
    for (size_t i = 0; i < own_.size(); ++i)
      sum += Mix(own_[i] ^ Mix(static_cast<uint32_t>(first_ + i)));
    if (rank_ == 0) sum += outlast::Crc32c(std::as_bytes(std::span(shared_)));
    return sum;
  }

  static std::span<std::byte> BytesOf(std::vector<uint32_t>& values) {
    return std::as_writable_bytes(std::span(values));
  }

  uint32_t seed_;
  int rank_;
  int world_;
  int64_t step_ = 0;
  std::vector<uint32_t> shared_;
  bool is_sharded_;
  size_t whole_;  // elements of "own" over all ranks
  size_t first_;  // of them that this rank holds
  std::vector<uint32_t> own_;
};

class Staller {
 public:
  explicit Staller(const Options& options) : log_(options.log), stall_(options.stall) {}
  ~Staller() {
    if (announcer_.joinable()) announcer_.join();
  }

  void Reach(const char* where, const outlast::Generation& generation, int64_t step) {
    if (!stall_ || stall_->where != where || stall_->step != step || generation.number() != 1)
      return;
    const bool is_victim = generation.rank() == stall_->rank;
    if (stall_->where == "allreduce") return ReachAllReduce(is_victim);
    if (!is_victim || !Announce()) return;
    if (stall_->where == "read") return ReadForEver();
    Sleep(stall_->seconds.value_or(3600));
  }

 private:
  // The victim waits inside the operation, as the others come later.
  void ReachAllReduce(bool is_victim) {
    if (is_victim) {
      announcer_ = std::thread([this] {
        pthread_setname_np(pthread_self(), "announcer");
        Sleep(0.05);
        Announce();
      });
      return;
    }
    while (access((log_ + ".stall").c_str(), F_OK) != 0) Sleep(0.005);
    Sleep(stall_->seconds.value_or(1));
  }

  // False: the stall was already used.
  bool Announce() const {
    const std::string made = log_ + ".stall." + std::to_string(getpid());
    AppendLine(made, std::to_string(getpid()) + "\n");
    const bool is_first = link(made.c_str(), (log_ + ".stall").c_str()) == 0;
    unlink(made.c_str());
    return is_first;
  }

  static void ReadForEver() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return;
    char byte;
    while (read(ends[0], &byte, 1) < 0 && errno == EINTR) {
    }
  }

  std::string log_;
  std::optional<Stall> stall_;
  std::thread announcer_;
};

// Sums a number that depends on step and rank, and knows the right sum.
absl::Status ReduceAndCheck(outlast::Group& group, int rank, int world, int64_t step) {
  std::vector<float> values(16, static_cast<float>(step % 1000 + rank));
  OUTLAST_RETURN_IF_ERROR(group.AllReduceSum(values));
  const float wanted = static_cast<float>((step % 1000) * world + world * (world - 1) / 2);
  if (values.front() == wanted && values.back() == wanted) return absl::OkStatus();
  std::fprintf(stderr, "toy_trainer: step %lld: sum %f, wanted %f\n", static_cast<long long>(step),
               static_cast<double>(values.front()), static_cast<double>(wanted));
  std::_Exit(kWrongSum);
}

absl::StatusOr<int64_t> RestoreAndCheck(const Options& options, outlast::Checkpointer& checkpoints,
                                        const outlast::Generation& generation, State& state) {
  OUTLAST_ASSIGN_OR_RETURN(const int64_t step, checkpoints.Restore(state.view()));
  const std::string wrong = step == 0 ? "" : state.Difference(step, checkpoints.restored_extras());
  if (!wrong.empty()) {
    std::fprintf(stderr, "toy_trainer: rank %d: the state restored for step %lld is wrong at %s\n",
                 generation.rank(), static_cast<long long>(step), wrong.c_str());
    std::_Exit(kWrongState);
  }
  if (step == 0) state.SetTo(0);
  const std::string source = checkpoints.stats().restored_from;
  if (!options.log.empty())
    AppendLine(options.log + ".restores", std::to_string(generation.number()) + " " +
                                              std::to_string(step) + " " +
                                              std::to_string(generation.rank()) + " " +
                                              (source.empty() ? "-" : source) + "\n");
  return step;
}

void LogStep(const Options& options, const outlast::Generation& generation, int64_t step,
             const State& state) {
  if (options.log.empty()) return;
  char line[96];
  std::snprintf(line, sizeof line, "%llu %lld %d %08x\n",
                static_cast<unsigned long long>(generation.number()), static_cast<long long>(step),
                generation.rank(), state.Digest());
  AppendLine(options.log, line);
}

// Whoever was told that the save of `step` is complete must find it in the root.
absl::Status FinishAndLook(const Options& options, outlast::Checkpointer& checkpoints, int rank,
                           int64_t step, const outlast::StateView& state) {
  OUTLAST_RETURN_IF_ERROR(checkpoints.Finish(step, state));
  char prefix[32];
  std::snprintf(prefix, sizeof prefix, "step-%012lld-", static_cast<long long>(step));
  for (const auto& entry : std::filesystem::directory_iterator(options.checkpoints)) {
    if (entry.path().filename().string().starts_with(prefix) &&
        std::filesystem::exists(entry.path() / "MANIFEST.json"))
      return absl::OkStatus();
  }
  std::fprintf(stderr, "toy_trainer: rank %d: step %lld is complete, and no checkpoint is there\n",
               rank, static_cast<long long>(step));
  std::_Exit(kInvisible);
}

outlast::HookOptions HooksOf(const Options& options) {
  outlast::HookOptions hooks;
  if (!options.hook.empty()) hooks.programs = {{"judge", {"sh", options.hook}}};
  return hooks;
}

// Whether it ended by an agreed stop that no agent tells of.
absl::StatusOr<bool> Train(const Options& options) {
  OUTLAST_ASSIGN_OR_RETURN(const auto run, outlast::Run::Join());
  OUTLAST_ASSIGN_OR_RETURN(
      const auto checkpoints,
      outlast::Checkpointer::Open(*run,
                                  {.uri = options.checkpoints,
                                   .every = outlast::Every::Steps(options.every),
                                   .snapshot_every = outlast::Every::Steps(options.snapshot_every),
                                   .disk_bytes_per_second = options.disk_rate,
                                   .keep_last = options.keep,
                                   .remote = options.remote,
                                   .hooks = HooksOf(options)}));
  std::unique_ptr<outlast::Watchdog> watchdog;
  if (options.watch_floor > 0) {
    OUTLAST_ASSIGN_OR_RETURN(
        watchdog,
        outlast::Watchdog::Start(*run, {.poll = absl::Seconds(options.watch_poll),
                                        .floor = absl::Seconds(options.watch_floor),
                                        .looks_apart = absl::Seconds(options.watch_poll)}));
  }
  OUTLAST_ASSIGN_OR_RETURN(const auto meter, outlast::Meter::Start(*run));
  Staller staller(options);

  const auto body = [&](outlast::Generation& generation) -> absl::Status {
    OUTLAST_ASSIGN_OR_RETURN(auto group, outlast::Group::Make(generation, *run, "gradients", 4096));
    State state(options, generation.rank(), generation.world());
    // Its memory goes with this body, however that is left.
    const absl::Cleanup release = [&] { checkpoints->Release().IgnoreError(); };
    OUTLAST_ASSIGN_OR_RETURN(int64_t step,
                             RestoreAndCheck(options, *checkpoints, generation, state));
    for (; step < options.steps; ++step) {
      auto scope = meter->Step(step);
      OUTLAST_RETURN_IF_ERROR(generation.Check());
      scope.Enter(outlast::Phase::kData);
      staller.Reach("data", generation, step);
      staller.Reach("read", generation, step);
      scope.Enter(outlast::Phase::kBackward);
      (options.busy ? BeBusy : Sleep)(options.step_ms / 1000);
      staller.Reach("backward", generation, step);
      scope.Enter(outlast::Phase::kCommWait);
      staller.Reach("allreduce", generation, step);
      OUTLAST_RETURN_IF_ERROR(ReduceAndCheck(group, generation.rank(), generation.world(), step));
      LogStep(options, generation, step, state);
      scope.Enter(outlast::Phase::kCheckpointSnapshot);
      OUTLAST_RETURN_IF_ERROR(checkpoints->BeforeUpdate());
      scope.Enter(outlast::Phase::kOptimizer);
      state.SetTo(step + 1);
      scope.Enter(outlast::Phase::kCheckpointSnapshot);
      OUTLAST_RETURN_IF_ERROR(checkpoints->SaveIfDue(step + 1, state.view()));
      if (options.finish_each) {
        OUTLAST_RETURN_IF_ERROR(
            FinishAndLook(options, *checkpoints, generation.rank(), step + 1, state.view()));
      }
    }
    OUTLAST_RETURN_IF_ERROR(checkpoints->Finish(options.steps, state.view()));
    if (!options.log.empty())
      AppendLine(options.log + ".finished", std::to_string(generation.rank()) + " " +
                                                std::to_string(outlast::MonotonicNanos()) + "\n");
    return absl::OkStatus();
  };
  OUTLAST_RETURN_IF_ERROR(run->ForEachGeneration(body));
  return run->stopped() && !run->has_agent();
}

}  // namespace

int main(int argc, char** argv) {
  const std::optional<Options> options = Parse(argc, argv);
  if (!options) {
    std::fprintf(stderr, "toy_trainer: bad arguments; the head of its source lists them\n");
    return 2;
  }
  const auto stopped = Train(*options);
  if (!stopped.ok()) {
    std::fprintf(stderr, "toy_trainer: %s\n", stopped.status().ToString().c_str());
    return 1;
  }
  return *stopped ? kStopped : 0;
}
