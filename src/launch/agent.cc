#include "launch/agent.h"

#include <fcntl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/event_loop.h"
#include "base/prompt_thread.h"
#include "launch/console.h"
#include "launch/death_watch.h"
#include "launch/node_side.h"
#include "launch/oom_kills.h"
#include "launch/preflight.h"
#include "launch/process.h"
#include "launch/run_dir.h"
#include "launch/run_ledger.h"
#include "launch/run_record.h"
#include "launch/services.h"
#include "launch/stacks.h"
#include "launch/status_service.h"
#include "launch/worker_environment.h"
#include "outlast/base/clock.h"
#include "outlast/elastic/exit_code.h"
#include "run/keeper.h"

namespace outlast {
namespace {

constexpr int kLastLines = 20;
constexpr size_t kLastLinesBytes = 4 << 10;
constexpr int kExitControlLost = 84;
// The first ranks start fresh, and the template after them: it must not take processors away from
// their start. Once they have joined it starts at once.
constexpr absl::Duration kTemplateDelay = absl::Seconds(1);
constexpr absl::Duration kForgetOomKills = absl::Seconds(5);
constexpr absl::Duration kFinishLimit = absl::Seconds(10);

std::string JobNameOf(const LaunchOptions& options) {
  return options.job_id.empty() ? "run" : options.job_id;
}

std::string NameOf(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

// What a killed agent left.
struct Estate {
  JobMemo memo;
  Kept kept;
  std::map<int, OrderedWorker> workers;  // by slot
};

class Agent final : public WorkerHost, private Vault {
 public:
  // `estate`: null where the job begins.
  Agent(const LaunchOptions& options, const Id128& run_id, Guardian& guardian,
        std::vector<Binding> bindings, RunDir run_dir, std::string address,
        std::unique_ptr<Estate> estate)
      : options_(options),
        run_id_(run_id),
        guardian_(guardian),
        bindings_(std::move(bindings)),
        run_dir_(std::move(run_dir)),
        record_(estate == nullptr ? RunRecord(run_dir_, options, options.nodes ? Id128() : run_id)
                                  : RunRecord(run_dir_, options, run_id, RunRecord::Former())),
        ports_(std::move(address)),
        estate_(std::move(estate)) {}

  absl::Status SetUp();
  // SetUp went well.
  int Run();
  // It has ended before it joined: it was stopped, or its node is unfit.
  bool is_over() const { return end_.has_value(); }
  int EndBeforeJoining();

  void Spawn(SpawnRequest request) override;
  void Kill(const KillWorker& kill) override;
  void Forward(const ForwardSignal& forward) override;
  void CaptureStacks(const outlast::CaptureStacks& request, std::function<void()> done) override;
  void OnFault(const RecordFault& record) override;
  void OnCommit(const CommitGeneration& commit) override;
  void OnEnter(int slot, uint64_t incarnation) override;
  void OnFinish(const FinishJob& finish) override;

 private:
  struct PreparedLogs {
    uint64_t generation;
    RunDir::LogFiles files;
  };
  struct Worker {
    SpawnWorker spawn{};
    int rank = 0;
    pid_t pid = 0;
    bool signalled = false;  // by us: what happens to it from now on is an effect
    bool out_of_memory = false;
    std::string error_path;
    bool is_told = false;  // a former agent's, which has told that it started
  };

  void Keep(const std::string& key, std::string_view bytes, std::span<const int> fds) override;
  void KeepMemo(const JobMemo& memo);
  absl::Status LetOthersFindUs();
  void AdoptWorkers();
  int AdoptWorker(int slot);
  absl::Status StartKeeper();
  bool may_be_adopted() const { return options_.on_agent_death == OnAgentDeath::kAdopt; }

  void LookAtOwnNode();
  absl::Status ServeStatus();
  absl::Status WatchSignals();
  void OnSignal();
  void OnQuit();
  void OnGuardian();
  void On(WorkerStarted started);
  void On(const WorkerExited& exited);
  ProcessEnd EndOf(Worker& worker, ProcessEnd end);
  void ForgetOomKills();
  void On(const TreeGone& gone) { console_->Retire(gone.incarnation); }
  void On(const TreeStuck& stuck);
  void On(const TemplateNote& note);
  void On(const TemplateReady& ready) { record_.TemplateReady(ready.pid); }
  void StartTemplate();
  absl::Status TryStartTemplate();
  void OnDying(int slot, uint64_t incarnation, int signal);
  absl::StatusOr<RunDir::LogFiles> TakeLogs(const SpawnWorker& worker, int rank);
  void SpawnFailed(const SpawnWorker& worker, const absl::Status& why);
  absl::Status TrySpawn(SpawnRequest& request);
  absl::StatusOr<WorkerPlace> PlaceOf(const SpawnRequest& request);
  uint16_t MasterPortOf(const WorkerPlace& place) const;
  absl::StatusOr<std::unique_ptr<JobMachine>> MakeMachine();
  // -1: it is not held here.
  int SlotOf(int rank) const;
  // The slot's process, unless it is another by now.
  Worker* Find(int slot, uint64_t incarnation);
  std::string StacksFolder(int capture) const {
    return fmt::format("{}/stacks/{}", run_dir_.path(), capture);
  }
  void NoteRun();
  void Rescue();
  void LoseControl();
  void Finish(int exit_code, std::string reason);

  const LaunchOptions& options_;
  const Id128 run_id_;  // of several nodes: this agent's id; the keeper knows the run's
  Guardian& guardian_;
  const std::vector<Binding> bindings_;  // by slot
  const RunDir run_dir_;
  RunRecord record_;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<Console> console_;
  std::unique_ptr<StackTaker> stacks_;
  std::unique_ptr<RunLedger> ledger_;
  std::unique_ptr<NodeSide> nodes_;  // null: there is one
  std::unique_ptr<Keeper> keeper_;
  std::unique_ptr<JobServices> services_;
  std::unique_ptr<StatusService> status_;  // asks all of the above
  OomKills oom_kills_;
  std::unique_ptr<DeathWatch> deaths_;  // reads the keeper's black boxes
  UniqueFd signals_;
  MasterPorts ports_;
  std::map<int, Worker> workers_;                  // by slot
  std::shared_ptr<const control::Commit> commit_;  // the newest; null: none, or one node
  std::map<int, PreparedLogs> prepared_logs_;      // by slot, of who is to come
  bool is_template_started_ = false;
  std::set<std::string> template_notes_;  // that were said
  uint64_t generation_ = 0;               // the newest that was committed
  bool any_ran_ = false;
  std::unique_ptr<Estate> estate_;  // until it is taken over
  std::string memo_;                // as the guardian has it
  int stack_captures_ = 0;
  std::optional<std::pair<int, std::string>> end_;  // exit code and reason
  FinishJob finish_{0, ""};                         // as the job said it
};

// --- Life ---

absl::Status Agent::SetUp() {
  // A job with many ranks needs more than the usual soft limit. Workers keep the limit that we were
  // given: the guardian was forked before.
  RaiseDescriptorLimit();
  OUTLAST_RETURN_IF_ERROR(WatchSignals());  // before the first thread: all inherit the mask
  OUTLAST_ASSIGN_OR_RETURN(loop_, EventLoop::Make());
  OUTLAST_RETURN_IF_ERROR(loop_->Watch(signals_.get(), [this] { OnSignal(); }));
  OUTLAST_RETURN_IF_ERROR(loop_->Watch(guardian_.fd(), [this] { OnGuardian(); }));
  OUTLAST_ASSIGN_OR_RETURN(console_, Console::Start(STDOUT_FILENO, STDERR_FILENO));
  stacks_ = std::make_unique<StackTaker>(*loop_);
  if (estate_ != nullptr) {
    const auto lost_ns = PayloadReader(estate_->kept[kAgentLostKey].bytes).Int<int64_t>();
    OUTLAST_ASSIGN_OR_RETURN(
        ledger_, RunLedger::GoOn(*loop_, run_dir_.path(), estate_->memo.generation, lost_ns));
  } else {
    OUTLAST_ASSIGN_OR_RETURN(ledger_, RunLedger::Open(*loop_, run_dir_.path(), options_, run_id_));
    if (options_.preflight) LookAtOwnNode();
  }
  if (end_) return absl::OkStatus();
  if (may_be_adopted() && estate_ == nullptr) OUTLAST_RETURN_IF_ERROR(LetOthersFindUs());
  OUTLAST_ASSIGN_OR_RETURN(std::unique_ptr<JobMachine> machine, MakeMachine());
  keeper_ = std::make_unique<Keeper>(*loop_, *this,
                                     KeeperOptions{.job = options_.job,
                                                   .run_id = run_id_,
                                                   .run_dir = run_dir_.path(),
                                                   .vault = may_be_adopted() ? this : nullptr},
                                     std::move(machine));
  services_ =
      std::make_unique<JobServices>(*keeper_, *this, options_, *ledger_, record_, *console_);
  deaths_ = std::make_unique<DeathWatch>(
      *loop_,
      [this](int slot, uint64_t incarnation, int signal) { OnDying(slot, incarnation, signal); });
  status_ =
      std::make_unique<StatusService>(*loop_, *keeper_, services_->monitor(), *ledger_, record_);
  OUTLAST_RETURN_IF_ERROR(ServeStatus());
  ForgetOomKills();
  if (!options_.template_command.empty())
    loop_->RunAfter(kTemplateDelay, [this] { StartTemplate(); });
  return StartKeeper();
}

absl::Status Agent::StartKeeper() {
  if (estate_ == nullptr) return keeper_->Start();
  // The former agent's is warm, and who died meanwhile may be a fork of it at once.
  StartTemplate();
  const std::unique_ptr<Estate> estate = std::move(estate_);
  OUTLAST_RETURN_IF_ERROR(services_->GoOn(estate->kept));
  return keeper_->GoOn(estate->kept);
}

// --- For the next agent, and of a former one ---

void Agent::Keep(const std::string& key, std::string_view bytes, std::span<const int> fds) {
  if (const absl::Status kept = guardian_.Keep(key, bytes, fds);
      !kept.ok() && kept.code() != absl::StatusCode::kUnavailable)  // gone: told elsewhere
    console_->Say(
        fmt::format("outlast: {} is not kept for a next agent: {}", key, MessageOf(kept)));
}

void Agent::KeepMemo(const JobMemo& memo) {
  std::string text = EncodeJobMemo(memo);
  if (text == memo_) return;
  memo_ = std::move(text);
  Keep(kJobMemoKey, memo_, {});
}

absl::Status Agent::LetOthersFindUs() {
  const auto guardian = ReadProcess(guardian_.pid());
  OUTLAST_RETURN_IF_ERROR(
      WriteGuardianFile(options_, {.run_id = run_id_.hex(),
                                   .run_dir = run_dir_.path(),
                                   .pid = guardian_.pid(),
                                   .start_ticks = guardian ? guardian->start_ticks : 0,
                                   .boot_id = BootId().hex(),
                                   .socket = SocketOf(run_id_.hex()),
                                   .world = options_.job.world,
                                   .flags = options_.flags,
                                   .command = options_.command}));
  const int reaper = guardian_.reaper().get();
  if (reaper >= 0) Keep(kReaperKey, "", {&reaper, 1});
  std::error_code unknown;  // then it stays as it is
  const auto path = std::filesystem::absolute(GuardianFilePath(options_), unknown);
  Keep(kGuardianFileKey, unknown ? GuardianFilePath(options_) : path.string(), {});
  return absl::OkStatus();
}

// Who lives is followed as if this agent had started it. What the guardian has not even heard of
// was ordered in the moment of the kill, and never was.
void Agent::AdoptWorkers() {
  generation_ = estate_->memo.generation;
  while (access(StacksFolder(stack_captures_ + 1).c_str(), F_OK) == 0) ++stack_captures_;
  int living = 0;
  for (int slot = 0; slot < static_cast<int>(estate_->memo.slots.size()); ++slot)
    living += AdoptWorker(slot);
  any_ran_ = true;
  record_.Adopted(generation_, living);
  console_->Say(
      fmt::format("outlast: run {} is adopted: its agent was killed, {} of its workers live, "
                  "generation {} ends",
                  run_id_.hex().substr(0, 8), living, generation_));
}

int Agent::AdoptWorker(int slot) {
  using Where = JobMemo::Where;
  JobMemo::Slot& known = estate_->memo.slots[static_cast<size_t>(slot)];
  const bool has_process = known.where != Where::kNone && known.where != Where::kDone;
  const auto ordered = estate_->workers.find(slot);
  const bool was_ordered =
      ordered != estate_->workers.end() && ordered->second.incarnation == known.incarnation;
  if (has_process && !was_ordered) {
    known.where = Where::kNone;
    known.joined = false;
    --known.attempts;
  }
  if (!has_process || !was_ordered) {
    estate_->kept.erase(fmt::format("line.{}", slot));
    return 0;
  }
  Worker worker{.spawn = {slot, known.incarnation, known.born, known.attempts - 1},
                .rank = slot,
                .pid = ordered->second.pid,
                .signalled = known.where == Where::kTerminating,
                .error_path = {}};
  worker.is_told = record_.knows(slot, known.incarnation);
  const std::string base = fmt::format("{}/logs/g{}/rank{}", run_dir_.path(), known.born, slot);
  worker.error_path = base + ".err";
  const std::string prefix = fmt::format("[{}] ", slot);
  console_->Follow(known.incarnation, base + ".out", prefix, Console::Stream::kOutput,
                   Console::From::kNow);
  console_->Follow(known.incarnation, base + ".err", prefix, Console::Stream::kError,
                   Console::From::kNow);
  workers_[slot] = std::move(worker);
  return 1;
}

absl::StatusOr<std::unique_ptr<JobMachine>> Agent::MakeMachine() {
  OneNodeMachine::Remember remember;
  if (may_be_adopted()) remember = [this](const JobMemo& memo) { KeepMemo(memo); };
  if (estate_ != nullptr) {
    AdoptWorkers();
    return std::make_unique<OneNodeMachine>(Job(options_.job, estate_->memo, BackOffSeed(run_id_)),
                                            run_id_, std::move(remember));
  }
  if (!options_.nodes)
    return std::make_unique<OneNodeMachine>(options_.job, run_id_, std::move(remember));
  NodeSide::Ears ears;
  ears.say = [this](const std::string& line) { console_->Say("outlast: " + line); };
  ears.on_job_fault = [this](const RecordFault& record) {
    record_.JobFaulted(record);
    console_->Say(fmt::format("outlast: coordinator: {}{} ({}, {})",
                              record.fault.node.empty() ? "" : record.fault.node + ": ",
                              record.fault.detail, FaultClassName(record.fault.fault_class),
                              record.fault.victim ? "after a peer" : BudgetText(record)));
  };
  OUTLAST_ASSIGN_OR_RETURN(nodes_, NodeSide::Start(*loop_, options_, ports_.address(), run_id_,
                                                   run_dir_.path(), std::move(ears)));
  return nodes_->MakeMachine(ports_);
}

// Blocks for some seconds at most, unless a signal ends it.
void Agent::LookAtOwnNode() {
  int stop_signal = 0;
  const NodeLook look =
      LookAtNode(run_dir_.path(), options_.probes, signals_.get(), [this, &stop_signal] {
        signalfd_siginfo info{};
        while (read(signals_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
          // There are no stacks to be written yet.
          if (info.ssi_signo != SIGQUIT) stop_signal = static_cast<int>(info.ssi_signo);
        }
        return stop_signal != 0;
      });
  if (look.stopped) {
    console_->Say(fmt::format("outlast: {}: stopping", NameOf(stop_signal)));
    record_.StopAsked(stop_signal);
    const JobOutcome outcome = stop_signal == SIGINT   ? JobOutcome::kInterrupted
                               : stop_signal == SIGHUP ? JobOutcome::kHungUp
                                                       : JobOutcome::kPreemptedUnsaved;
    end_ = {ExitCodeOf(outcome),
            fmt::format("stopped ({}) before this node had joined", NameOf(stop_signal))};
    return;
  }
  for (const std::string& warning : look.warnings) {
    const std::string line = fmt::format("preflight passes with a warning: {}", warning);
    console_->Say("outlast: " + line);
    record_.Noted(line);
  }
  if (!look.unfit.empty())
    end_ = {ExitCodeOf(JobOutcome::kExcluded), fmt::format("preflight: {}", look.unfit)};
}

// Nothing runs yet.
int Agent::EndBeforeJoining() {
  const auto& [code, reason] = *end_;
  ledger_->Finished(code, reason);
  guardian_.Finish(kFinishLimit).IgnoreError();
  if (const absl::Status written = record_.Finished(code, reason); !written.ok())
    console_->Say(fmt::format("outlast: the report was not written: {}", MessageOf(written)));
  console_->Say(fmt::format("outlast: exit code {}: {}", code, reason));
  console_->Stop();
  return code;
}

// The socket in RUN_DIR is a convenience, and some file systems have none; the port was asked for.
absl::Status Agent::ServeStatus() {
  if (const absl::Status served = status_->ServeFolder(); !served.ok())
    record_.Noted(fmt::format("no status while the run goes on: {}", MessageOf(served)));
  if (!options_.metrics) return absl::OkStatus();
  OUTLAST_ASSIGN_OR_RETURN(const HostPort at, status_->ServeTcp(*options_.metrics));
  console_->Say(fmt::format("outlast: metrics at http://{}/metrics", at.text()));
  return absl::OkStatus();
}

int Agent::Run() {
  BecomePrompt();
  loop_->Run();
  status_.reset();
  // The others go on where it left them.
  const bool has_left = end_->first == ExitCodeOf(JobOutcome::kLeft);
  if (end_->first != 0 && end_->first != kExitRefused && !has_left) Rescue();
  deaths_.reset();
  services_.reset();  // waits for a save that is being written
  NoteRun();
  ledger_->Finished(end_->first, end_->second);
  if (!ledger_->error().ok())
    console_->Say(fmt::format("outlast: the ledger has gaps: {}", MessageOf(ledger_->error())));
  keeper_.reset();
  if (nodes_ != nullptr) nodes_->Leave();
  stacks_.reset();
  loop_->Unwatch(guardian_.fd());
  if (const absl::Status finished = guardian_.Finish(kFinishLimit); !finished.ok()) {
    console_->Say(fmt::format("outlast: {}", MessageOf(finished)));
  }
  if (nodes_ != nullptr) {
    ledger_.reset();
    nodes_->ServeOthers();
    nodes_.reset();
  }
  const std::string stop = record_.StopText(end_->first);
  if (!stop.empty()) end_->second += "; " + stop;
  if (const absl::Status written = record_.Finished(end_->first, end_->second); !written.ok()) {
    console_->Say(fmt::format("outlast: the report was not written: {}", MessageOf(written)));
  }
  if (end_->first != 0 || !stop.empty())
    console_->Say(fmt::format("outlast: exit code {}: {}", end_->first, end_->second));
  console_->Stop();
  return end_->first;
}

void Agent::Finish(int exit_code, std::string reason) {
  if (end_.has_value()) return;
  end_ = {exit_code, std::move(reason)};
  loop_->Stop();
}

void Agent::OnFinish(const FinishJob& finish) {
  if (!end_.has_value()) finish_ = finish;
  Finish(finish.exit_code, finish.reason);
}

// What memory holds goes to disk; if that is the last state, nothing is missing any more.
void Agent::Rescue() {
  std::optional<bool> is_last;
  bool waits = false;
  services_->PersistLast(finish_.last_step, [&](bool last) {
    is_last = last;
    if (waits) loop_->Stop();
  });
  waits = !is_last.has_value();
  if (waits) loop_->Run();  // the other nodes' agents save theirs with it
  if (!is_last.value_or(false) || !finish_.code_if_saved.has_value()) return;
  const std::string reason = fmt::format("{}; the agent has saved it since", end_->second);
  console_->Say(fmt::format("outlast: the last state is in the root after all ({})", reason));
  end_ = {*finish_.code_if_saved, reason};
}

void Agent::LoseControl() {
  loop_->Unwatch(guardian_.fd());
  if (end_.has_value()) return;
  const absl::Status ended = EndDescendants(kFinishLimit);
  guardian_.AwaitReaper(kFinishLimit);
  Finish(kExitControlLost,
         fmt::format("the guardian (process {}) was killed, and with it all workers{}",
                     guardian_.pid(),
                     ended.ok() ? std::string() : fmt::format("; {}", MessageOf(ended))));
}

// --- Signals ---

absl::Status Agent::WatchSignals() {
  const sigset_t wanted = AgentSignals();
  if (sigprocmask(SIG_BLOCK, &wanted, nullptr) != 0) return ErrnoStatus(errno, "block signals");
  signals_ = UniqueFd(signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signals_.is_open()) return ErrnoStatus(errno, "make a signalfd");
  return absl::OkStatus();
}

void Agent::OnSignal() {
  signalfd_siginfo info{};
  while (read(signals_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
    const int signal = static_cast<int>(info.ssi_signo);
    if (signal == SIGQUIT) {
      OnQuit();
      continue;
    }
    console_->Say(fmt::format("outlast: {}: stopping", NameOf(signal)));
    if (nodes_ != nullptr) nodes_->StopJob(signal);
    if (keeper_ == nullptr) continue;  // the others are served
    record_.StopAsked(signal);
    keeper_->Dispatch(StopAsked{signal});
  }
}

void Agent::OnQuit() {
  outlast::CaptureStacks all{{}, "SIGQUIT"};
  for (const auto& [slot, worker] : workers_) all.slots.push_back(slot);
  CaptureStacks(all, [] {});
}

void Agent::CaptureStacks(const outlast::CaptureStacks& request, std::function<void()> done) {
  std::vector<StackTarget> targets;
  for (const int slot : request.slots) {
    const auto worker = workers_.find(slot);
    if (worker != workers_.end() && worker->second.pid > 0)
      targets.push_back({worker->second.rank, worker->second.pid});
  }
  const std::string folder = StacksFolder(++stack_captures_);
  stacks_->Take(targets, folder, [this, folder, reason = request.reason, done = std::move(done)] {
    console_->Say(fmt::format("outlast: stacks ({}): {}", reason, folder));
    record_.StacksWritten(folder, reason);
    done();
  });
}

// --- Workers ---

Agent::Worker* Agent::Find(int slot, uint64_t incarnation) {
  const auto found = workers_.find(slot);
  return found != workers_.end() && found->second.spawn.incarnation == incarnation ? &found->second
                                                                                   : nullptr;
}

void Agent::Spawn(SpawnRequest request) {
  if (const absl::Status spawned = TrySpawn(request); !spawned.ok())
    SpawnFailed(request.worker, spawned);
}

absl::StatusOr<WorkerPlace> Agent::PlaceOf(const SpawnRequest& request) {
  const SpawnWorker& worker = request.worker;
  WorkerPlace place{.rank = request.rank, .world = request.world};
  place.local_world = 0;
  for (int slot = 0; slot < keeper_->slots(); ++slot) {
    const int rank = keeper_->rank(slot);
    place.local_world += rank >= 0 ? 1 : 0;
    place.local_rank += rank >= 0 && rank < request.rank ? 1 : 0;
  }
  place.incarnation = worker.incarnation;
  place.attempt = worker.attempt;
  place.max_restarts = options_.job.max_restarts;
  place.micro_batches = options_.job.micro_batches;
  place.ranks_per_replica = options_.job.ranks_per_replica;
  place.job = JobNameOf(options_);
  place.run_id = keeper_->run_id().hex();
  place.run_dir = run_dir_.path();
  if (!options_.nodes) {
    OUTLAST_ASSIGN_OR_RETURN(const int port, ports_.Of(worker.generation));
    place.master = HostPort{ports_.address(), static_cast<uint16_t>(port)};
    return place;
  }
  place.address = ports_.address();
  if (commit_ == nullptr) return place;
  std::vector<std::string> nodes;  // in the order of their ranks
  for (const RankRun& run : commit_->map.runs) {
    if (std::find(nodes.begin(), nodes.end(), run.node) == nodes.end()) nodes.push_back(run.node);
  }
  const auto own = std::find(nodes.begin(), nodes.end(), options_.nodes->node);
  if (own == nodes.end()) return place;
  place.group_rank = static_cast<int>(own - nodes.begin());
  place.group_world = static_cast<int>(nodes.size());
  if (commit_->generation != worker.generation) return place;
  if (auto master = HostPort::Parse(commit_->bootstrap); master.ok()) place.master = *master;
  return place;
}

absl::Status Agent::TrySpawn(SpawnRequest& request) {
  const SpawnWorker& worker = request.worker;
  OUTLAST_ASSIGN_OR_RETURN(const RunDir::LogFiles logs, TakeLogs(worker, request.rank));
  const UniqueFd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  OUTLAST_ASSIGN_OR_RETURN(const WorkerPlace place, PlaceOf(request));
  const bool gets_stdin = options_.stdin_to_rank_0 && request.rank == 0;
  OUTLAST_RETURN_IF_ERROR(guardian_.Spawn(
      {.slot = worker.slot,
       .incarnation = worker.incarnation,
       .environment = EnvironmentOf(place),
       .standard = {gets_stdin ? STDIN_FILENO : null.get(), logs.output.get(), logs.error.get()},
       .descriptors = {{"OUTLAST_SOCKET_FD", request.socket.get()},
                       {"OUTLAST_BLACKBOX_FD", request.black_box_fd}},
       .binding = bindings_[static_cast<size_t>(worker.slot)],
       .may_be_forked = is_template_started_,
       .master_port = MasterPortOf(place),
       .is_master = request.rank == 0}));
  const std::string prefix = options_.nodes
                                 ? fmt::format("[{} {}] ", options_.nodes->node, request.rank)
                                 : fmt::format("[{}] ", request.rank);
  console_->Follow(worker.incarnation, logs.output_path, prefix, Console::Stream::kOutput);
  console_->Follow(worker.incarnation, logs.error_path, prefix, Console::Stream::kError);
  workers_[worker.slot] = {.spawn = worker, .rank = request.rank, .error_path = logs.error_path};
  return absl::OkStatus();
}

// Of a rank that starts on its own, into a job whose others have joined, nobody waits there.
uint16_t Agent::MasterPortOf(const WorkerPlace& place) const {
  for (int slot = 0; slot < keeper_->slots(); ++slot) {
    if (keeper_->is_joined(slot)) return 0;
  }
  return place.master && place.group_rank == 0 ? place.master->port : uint16_t{0};
}

void Agent::StartTemplate() {
  if (options_.template_command.empty() || std::exchange(is_template_started_, true)) return;
  if (const absl::Status started = TryStartTemplate(); !started.ok())
    On(TemplateNote{std::string(MessageOf(started))});
}

absl::Status Agent::TryStartTemplate() {
  OUTLAST_ASSIGN_OR_RETURN(const RunDir::LogFiles logs, run_dir_.OpenTemplateLogs());
  const UniqueFd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  return guardian_.StartTemplate(
      {options_.template_program.program,
       options_.template_program.arguments,
       TemplateEnvironment(keeper_->slots(), options_.template_program.program,
                           options_.template_program.arguments),
       {null.get(), logs.output.get(), logs.error.get()}});
}

void Agent::On(const TemplateNote& note) {
  if (!template_notes_.insert(note.line).second) return;
  const std::string line = fmt::format(
      "template: {}: a fresh process instead (its output: logs/template.err)", note.line);
  record_.Noted(line);
  console_->Say("outlast: " + line);
}

absl::StatusOr<RunDir::LogFiles> Agent::TakeLogs(const SpawnWorker& worker, int rank) {
  const auto prepared = prepared_logs_.extract(worker.slot);
  if (!prepared.empty() && prepared.mapped().generation == worker.generation)
    return std::move(prepared.mapped().files);
  return run_dir_.OpenLogs(worker.generation, rank);
}

// The death's end takes the kernel a moment, in which we would only wait: what its successor needs
// is made ready. Of several nodes the coordinator says which rank the successor will have.
void Agent::OnDying(int slot, uint64_t incarnation, int signal) {
  const int faults = keeper_->faults();
  Worker* worker = Find(slot, incarnation);
  if (worker == nullptr) return;
  keeper_->OnWorkerDying(slot, incarnation, EndOf(*worker, {.signal = signal}));
  if (keeper_->faults() == faults || end_.has_value() || options_.nodes) return;
  // What fails here fails again, and is told, at the spawn.
  if (auto logs = run_dir_.OpenLogs(generation_ + 1, slot); logs.ok())
    prepared_logs_[slot] = {generation_ + 1, std::move(*logs)};
  (void)ports_.Of(generation_ + 1);
}

void Agent::SpawnFailed(const SpawnWorker& worker, const absl::Status& why) {
  const std::string what =
      fmt::format("rank {} could not be started: {}", keeper_->rank(worker.slot), MessageOf(why));
  console_->Say("outlast: " + what);
  if (!any_ran_) keeper_->Dispatch(RootRefused{what});
  keeper_->OnWorkerEnded(worker.slot, worker.incarnation, {.code = 127});
}

void Agent::Kill(const KillWorker& kill) {
  Worker* worker = Find(kill.slot, kill.incarnation);
  if (worker == nullptr) return;
  worker->signalled = true;  // before it is sent: whatever it causes comes later
  const absl::Status sent = kill.how == KillHow::kTerm
                                ? guardian_.Terminate(kill.slot, kill.incarnation)
                                : guardian_.Kill(kill.slot, kill.incarnation);
  if (!sent.ok()) console_->Say(fmt::format("outlast: rank {}: {}", worker->rank, MessageOf(sent)));
}

void Agent::Forward(const ForwardSignal& forward) {
  Worker* worker = Find(forward.slot, forward.incarnation);
  if (worker == nullptr) return;
  worker->signalled = true;
  guardian_.Forward(forward.slot, forward.incarnation, forward.signal).IgnoreError();
}

void Agent::OnGuardian() {
  auto report = guardian_.Receive();
  if (!report.ok() || !report->has_value()) return LoseControl();
  std::visit([this](auto& one) { On(std::move(one)); }, **report);
}

void Agent::On(WorkerStarted started) {
  Worker* worker = Find(started.slot, started.incarnation);
  if (worker == nullptr) return;
  worker->pid = started.pid;
  if (worker->is_told)
    return ledger_->Adopted(started.slot, worker->rank, keeper_->black_box(started.slot).fd());
  record_.Started(worker->spawn, worker->rank, started.pid, started.is_forked);
  ledger_->Started(worker->spawn, worker->rank, started.pid, keeper_->black_box(started.slot).fd());
}

// Asked twice of a death that is heard of before its end.
ProcessEnd Agent::EndOf(Worker& worker, ProcessEnd end) {
  end.by_us = worker.signalled;
  if (end.signal == SIGKILL && !end.by_us && !worker.out_of_memory)
    worker.out_of_memory = oom_kills_.Take();
  end.out_of_memory = end.signal == SIGKILL && worker.out_of_memory;
  return end;
}

void Agent::ForgetOomKills() {
  oom_kills_.ForgetOld();
  loop_->RunAfter(kForgetOomKills, [this] { ForgetOomKills(); });
}

void Agent::On(const WorkerExited& exited) {
  Worker* worker = Find(exited.slot, exited.incarnation);
  if (worker == nullptr) return;
  const ProcessEnd end = EndOf(*worker, {.code = exited.code, .signal = exited.signal});
  record_.Ended(exited.slot, worker->rank, exited.incarnation, end, exited.error);
  ledger_->Ended(exited.slot, std::exchange(worker->pid, 0), worker->spawn.generation, end);
  if (!exited.error.empty()) {
    return SpawnFailed(SpawnWorker(worker->spawn),
                       MakeStatus(absl::StatusCode::kUnavailable, exited.error));
  }
  any_ran_ = true;
  keeper_->OnWorkerEnded(exited.slot, exited.incarnation, end);
}

int Agent::SlotOf(int rank) const {
  for (int slot = 0; rank >= 0 && slot < keeper_->slots(); ++slot) {
    if (keeper_->rank(slot) == rank) return slot;
  }
  return -1;
}

void Agent::On(const TreeStuck& stuck) {
  console_->Say(
      fmt::format("outlast: rank {}: process {} does not end after SIGKILL (uninterruptible sleep)",
                  keeper_->rank(stuck.slot), stuck.pid));
}

// --- What the keeper tells ---

void Agent::OnFault(const RecordFault& given) {
  RecordFault record = given;
  FaultRecord& fault = record.fault;
  const int slot = SlotOf(fault.rank);
  // The watch sleeps between generations, and saw nothing of the former agent's.
  if (fault.found_by == kFoundByAdoption && slot >= 0) fault.detail += services_->WhereIs(slot);
  const auto worker = workers_.find(slot);
  record_.Faulted(record, worker == workers_.end()
                              ? ""
                              : LastLines(worker->second.error_path, kLastLines, kLastLinesBytes));
  services_->Faulted(fault);
  ledger_->Faulted(fault, slot, services_->LastProgressOf(fault));
  // Of several nodes the coordinator counts.
  const std::string weight = fault.victim     ? "after a peer"
                             : options_.nodes ? "reported"
                                              : BudgetText(record);
  console_->Say(fmt::format("outlast: {} ({}, {}) in generation {}, found by {}", fault.detail,
                            FaultClassName(fault.fault_class), weight, fault.generation,
                            fault.found_by));
}

void Agent::OnEnter(int slot, uint64_t incarnation) {
  StartTemplate();
  const Worker* worker = Find(slot, incarnation);
  if (worker == nullptr || worker->pid == 0) return;
  deaths_->Watch({slot, incarnation, worker->pid, keeper_->black_box(slot).death_notice_word()});
}

// Of several nodes: a coordinator tells the run's id.
void Agent::NoteRun() {
  record_.Joined(keeper_->run_id());
  if (options_.nodes) ledger_->Joined(keeper_->run_id(), options_.nodes->node);
}

void Agent::OnCommit(const CommitGeneration& commit) {
  generation_ = commit.generation;
  commit_ = commit.job;
  for (auto& [slot, worker] : workers_) {
    if (const int rank = commit.RankOf(slot); rank >= 0) worker.rank = rank;
  }
  NoteRun();
  record_.Committed(commit);
  ledger_->Committed(commit);
  if (services_ != nullptr) services_->Committed(commit);
  if (commit.job != nullptr) {
    const RankMap& map = commit.job->map;
    const std::string share =
        map.micro_batches > 0 ? fmt::format(", {} micro-batches each", map.micro_batches) : "";
    console_->Say(fmt::format("outlast: generation {} with {} ranks, {} of them here{}",
                              commit.generation, map.world, commit.members.size(), share));
  } else if (commit.generation > 1) {
    console_->Say(fmt::format("outlast: generation {} with {} ranks", commit.generation,
                              commit.members.size()));
  }
}

absl::StatusOr<std::vector<Binding>> BindWorkers(const LaunchOptions& options) {
  Topology topology;
  if (options.bind != BindTo::kNone) {
    OUTLAST_ASSIGN_OR_RETURN(topology, ReadTopology(AllowedCpus()));
  }
  return Bind(topology, options.job.world, options.bind);
}

}  // namespace

int RunAdoptingAgent(const LaunchOptions& options, FoundJob job) {
  signal(SIGPIPE, SIG_IGN);
  const auto refuse = [&](const absl::Status& why) {
    job.adoption.guardian->Abandon();
    PrintToStderr("outlast: run {} could not be adopted: {}\n", job.file.run_id.substr(0, 8),
                  MessageOf(why));
    return kExitRefused;
  };
  auto estate = std::make_unique<Estate>();
  auto memo = DecodeJobMemo(job.adoption.kept[kJobMemoKey].bytes);
  if (!memo.ok()) return refuse(memo.status());
  estate->memo = *std::move(memo);
  if (static_cast<int>(estate->memo.slots.size()) != options.job.world)
    return refuse(Error(absl::StatusCode::kInternal, "{} slots, {} wanted",
                        estate->memo.slots.size(), options.job.world));
  estate->kept = std::move(job.adoption.kept);
  estate->workers = std::move(job.adoption.workers);
  auto bindings = BindWorkers(options);
  if (!bindings.ok()) return refuse(bindings.status());
  const auto run_id = Id128::FromHex(job.file.run_id);
  if (!run_id.ok()) return refuse(run_id.status());
  auto run_dir = RunDir::Open(job.file.run_dir);
  if (!run_dir.ok()) return refuse(run_dir.status());
  PrintToStderr("outlast: RUN_DIR {}\n", run_dir->path());
  Agent agent(options, *run_id, *job.adoption.guardian, *std::move(bindings), *std::move(run_dir),
              "127.0.0.1", std::move(estate));
  if (const absl::Status started = agent.SetUp(); !started.ok()) return refuse(started);
  return agent.Run();
}

int RunAgent(const LaunchOptions& options, const Id128& run_id, Guardian& guardian) {
  signal(SIGPIPE,
         SIG_IGN);  // before the first line is said; the guardian and its workers were forked
  auto bindings = BindWorkers(options);
  if (!bindings.ok()) {
    PrintToStderr("outlast: {}\n", MessageOf(bindings.status()));
    return kExitRefused;
  }
  absl::StatusOr<std::string> address = "127.0.0.1";
  if (options.nodes) address = OwnAddress(*options.nodes);
  if (!address.ok()) {
    PrintToStderr("outlast: {}\n", MessageOf(address.status()));
    return kExitRefused;
  }
  auto run_dir = RunDir::Create(options.run_dir, JobNameOf(options), Clock::Real().WallTime(),
                                run_id, options.nodes ? options.nodes->node : "");
  if (!run_dir.ok()) {
    PrintToStderr("outlast: --run-dir '{}': {}; a writable folder wanted\n", options.run_dir,
                  MessageOf(run_dir.status()));
    return kExitRefused;
  }
  PrintToStderr("outlast: RUN_DIR {}\n", run_dir->path());
  for (size_t slot = 0; slot < bindings->size() && options.bind != BindTo::kNone; ++slot) {
    PrintToStderr("outlast: {} {}: CPUs {}, memory of NUMA node {} first\n",
                  options.nodes ? "slot" : "rank", slot, CpuList((*bindings)[slot].cpus),
                  (*bindings)[slot].numa);
  }
  Agent agent(options, run_id, guardian, *std::move(bindings), std::move(*run_dir),
              *std::move(address), nullptr);
  if (const absl::Status started = agent.SetUp(); !started.ok()) {
    PrintToStderr("outlast: the job could not be started: {}\n", MessageOf(started));
    return kExitRefused;
  }
  return agent.is_over() ? agent.EndBeforeJoining() : agent.Run();
}

}  // namespace outlast
