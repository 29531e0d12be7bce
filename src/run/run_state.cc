#include "run/run_state.h"

#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <limits>
#include <utility>

#include "base/error.h"
#include "outlast/base/clock.h"
#include "run/template_wire.h"

namespace outlast {
namespace {

constexpr absl::Duration kBeat = absl::Milliseconds(250);
// Longer than any sensible stop: the job's own deadline ends the process first.
constexpr absl::Duration kLongestWaitForGo = absl::Minutes(10);
constexpr uint64_t kEveryGeneration = std::numeric_limits<uint64_t>::max();

// The descriptors in the environment can be taken once: a second Run would read from what they are
// by then.
std::atomic<bool> environment_is_taken{false};

absl::StatusOr<WorkerEnvironment> TakeEnvironment(const RunOptions& options) {
  if (options.environment.has_value()) return *options.environment;
  // By hand it would be a world of one, and train beside the job into the job's root.
  if (getenv(kTemplateVariable) != nullptr) {
    return Error(
        absl::StatusCode::kFailedPrecondition,
        "join: this process is the job's template ({}): Template::ServeIfAsked before Run::Join "
        "wanted",
        kTemplateVariable);
  }
  OUTLAST_ASSIGN_OR_RETURN(WorkerEnvironment environment, WorkerEnvironment::FromProcess());
  if (environment.socket_fd >= 0 && environment_is_taken.exchange(true)) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "join: this process has joined its agent already; one Run a process");
  }
  return environment;
}

void NameThisThread(const char* name) { pthread_setname_np(pthread_self(), name); }

// Breaking a communicator is other people's code, and theirs may throw. Without this a survivor
// would die of a peer's death.
void CallUser(const std::function<void()>& callback) {
  try {
    callback();
  } catch (const std::exception& thrown) {
    PrintToStderr("outlast: an OnAbort callback threw: {}\n", thrown.what());
  } catch (...) {
    PrintToStderr("outlast: an OnAbort callback threw what is no std::exception\n");
  }
}

}  // namespace

// --- Joining ---

RunState::RunState(WorkerEnvironment environment, Segment box)
    : environment_(std::move(environment)),
      has_agent_(environment_.socket_fd >= 0),
      rank_(environment_.rank),
      world_(environment_.world),
      box_(std::move(box)),
      progress_(box_) {}

absl::StatusOr<std::shared_ptr<RunState>> RunState::Make(WorkerEnvironment environment) {
  std::unique_ptr<LocalKeeper> local_keeper;
  UniqueFd socket(environment.socket_fd);
  UniqueFd black_box(environment.black_box_fd);
  if (!socket.is_open() && environment.world == 1) {
    OUTLAST_ASSIGN_OR_RETURN(local_keeper, LocalKeeper::Start());
    socket = local_keeper->TakeSocket();
    black_box = local_keeper->TakeBlackBox();
  }
  SegmentIdentity identity;
  identity.slot = identity.rank = static_cast<uint32_t>(environment.rank);
  identity.world = static_cast<uint32_t>(environment.world);
  identity.local_rank = static_cast<uint32_t>(environment.local_rank);
  auto box = black_box.is_open() ? Segment::Open(std::move(black_box)) : Segment::Create(identity);
  if (!box.ok()) return Annotate(box.status(), "join: the black box");
  std::shared_ptr<RunState> state(new RunState(std::move(environment), std::move(*box)));
  state->local_keeper_ = std::move(local_keeper);
  if (socket.is_open()) {
    auto link = std::make_unique<SocketLink>(Channel(std::move(socket)));
    state->socket_link_ = link.get();
    state->link_ = std::move(link);
  } else {
    state->link_ = std::make_unique<NoLink>(
        Error(absl::StatusCode::kUnimplemented,
              "a world of {} ranks without an agent: start it with `outlast run`",
              state->environment_.world));
  }
  return state;
}

absl::StatusOr<std::shared_ptr<RunState>> RunState::Join(const RunOptions& options) {
  OUTLAST_ASSIGN_OR_RETURN(WorkerEnvironment environment, TakeEnvironment(options));
  OUTLAST_ASSIGN_OR_RETURN(auto state, Make(std::move(environment)));
  WorkerIdentity identity;
  identity.pid = getpid();
  identity.pid_start_time = ProcessStartTime(identity.pid);
  identity.incarnation = static_cast<uint32_t>(state->environment_.incarnation);
  identity.rank = static_cast<uint32_t>(state->rank());
  identity.world = static_cast<uint32_t>(state->world());
  state->box_.Adopt(identity);
  state->reader_ = std::thread([self = state.get()] { self->Read(); });
  if (state->has_keeper()) {
    OUTLAST_RETURN_IF_ERROR(Annotate(state->JoinKeeper(options.join_timeout), "join"));
  } else {
    state->run_id_ = Id128::Random();
    state->ExplainMissingAgent();
  }
  return state;
}

absl::Status RunState::JoinKeeper(absl::Duration timeout) {
  PayloadWriter payload;
  payload.Int(uint32_t{kWireVersion})
      .Int(environment_.incarnation)
      .Int(static_cast<int32_t>(getpid()));
  OUTLAST_ASSIGN_OR_RETURN(const Message answer,
                           link_->Call(MessageKind::kJoined, 0, payload.bytes(), timeout));
  PayloadReader reader(answer.payload);
  run_id_.bytes = reader.Int<decltype(run_id_.bytes)>();
  run_dir_ = reader.Text();
  const auto world = reader.Int<uint32_t>();
  const auto rank = reader.Int<uint32_t>();
  if (!reader.ok() || rank >= world) {
    return Error(absl::StatusCode::kInternal, "the agent's answer: rank {} of {} in {} bytes", rank,
                 world, answer.payload.size());
  }
  if (has_agent_ && (static_cast<int>(rank) != environment_.rank ||
                     static_cast<int>(world) != environment_.world)) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "RANK={} WORLD_SIZE={}: the agent says rank {} of {}", environment_.rank,
                 environment_.world, rank, world);
  }
  return absl::OkStatus();
}

void RunState::ExplainMissingAgent() const {
  if (environment_.local_rank != 0) return;
  PrintToStderr(
      "outlast: a world of {} without an agent: going on after a lost rank, Put, Get, "
      "shared memory, agreed stops and "
      "verdicts on hangs need `outlast run`\n",
      environment_.world);
}

RunState::~RunState() {
  {
    MutexLock lock(mutex_);
    quitting_ = true;
    changed_.NotifyAll();
  }
  if (socket_link_ != nullptr) shutdown(socket_link_->channel().fd(), SHUT_RDWR);
  if (reader_.joinable()) reader_.join();
  EndCallbacks();
}

uint16_t RunState::SectionName(std::string_view name) {
  const auto found = section_names_.find(name);
  if (found != section_names_.end()) return found->second;
  return section_names_.emplace(name, progress_.Intern(name)).first->second;
}

// --- The reader's thread ---

void RunState::Read() {
  NameThisThread("outlast-run");
  if (has_agent_)
    (void)box_.HoldDeathNotice();  // a convenience: without it the agent waits for the process' end
  bool connected = has_keeper();
  int64_t next_beat = MonotonicNanos();
  while (true) {
    {
      MutexLock lock(mutex_);
      if (quitting_) return;
    }
    AnswerAdoption();
    if (MonotonicNanos() >= next_beat) {
      progress_.BeatNative();
      next_beat = MonotonicNanos() + absl::ToInt64Nanoseconds(kBeat);
    }
    if (!connected) {
      WaitForBeat();
      continue;
    }
    pollfd readable{socket_link_->channel().fd(), POLLIN, 0};
    if (poll(&readable, 1, static_cast<int>(absl::ToInt64Milliseconds(kBeat))) > 0)
      connected = ReadOne();
  }
}

void RunState::WaitForBeat() {
  MutexLock lock(mutex_);
  if (!quitting_) changed_.WaitFor(mutex_, kBeat);
}

// False when the keeper is gone.
bool RunState::ReadOne() {
  auto packet = socket_link_->channel().TryReceive();
  if (packet.status().code() == absl::StatusCode::kResourceExhausted) return true;
  if (!packet.ok() || !packet->has_value()) {
    OnKeeperGone();
    return false;
  }
  auto message = Decode(std::move(**packet));
  if (message.ok()) {
    Handle(std::move(*message));
  } else {
    PrintToStderr("outlast: from the agent: {}\n", MessageOf(message.status()));
  }
  return true;
}

void RunState::Handle(Message message) {
  switch (message.kind) {
    case MessageKind::kGeneration:
      OnGeneration(message);
      break;
    case MessageKind::kAbort:
      OnAbort(message);
      break;
    case MessageKind::kAdopt:
      OnAdopt(message);
      break;
    case MessageKind::kStop:
      OnStop(message);
      break;
    case MessageKind::kGo:
      OnGo(message);
      break;
    default:
      if (TakeForStaged(message)) return;
      break;
  }
  // The first request is the one to join.
  is_joined_ = is_joined_ ||
               (message.kind == MessageKind::kAnswer && message.status == absl::StatusCode::kOk);
  socket_link_->Deliver(std::move(message));
}

bool RunState::TakeForStaged(Message& message) {
  MutexLock lock(mutex_);
  if (!staged_work_.contains(message.kind)) return false;
  if (!is_waiting_) return true;
  for_staged_.push_back(std::move(message));
  changed_.NotifyAll();
  return true;
}

void RunState::WhileStaged(MessageKind kind, std::function<void(const Message&)> work) {
  MutexLock lock(mutex_);
  if (work == nullptr) {
    staged_work_.erase(kind);
  } else {
    staged_work_[kind] = std::move(work);
  }
}

void RunState::OnGeneration(const Message& message) {
  PayloadReader reader(message.payload);
  Membership membership;
  membership.generation = reader.Int<uint64_t>();
  membership.rank = static_cast<int>(reader.Int<uint32_t>());
  membership.world = static_cast<int>(reader.Int<uint32_t>());
  const auto runs = reader.Int<uint32_t>();
  for (uint32_t i = 0; i < runs && reader.ok(); ++i) {
    const auto node = static_cast<int>(reader.Int<uint32_t>());
    const auto first_rank = reader.Int<uint32_t>();
    const auto count = reader.Int<uint32_t>();
    const auto known = static_cast<uint32_t>(membership.nodes.size());
    if (first_rank != known || count > static_cast<uint32_t>(membership.world) - known) return;
    membership.nodes.insert(membership.nodes.end(), count, node);
  }
  if (!reader.ok() || static_cast<int>(membership.nodes.size()) != membership.world) return;
  MutexLock lock(mutex_);
  if (membership.generation <= offered_.generation) return;
  offered_ = membership;
  completed_ = kNoStep;  // what it restores may lie before what it had
  changed_.NotifyAll();
}

void RunState::OnAbort(const Message& message) {
  PayloadReader reader(message.payload);
  const auto generation = reader.Int<uint64_t>();
  const std::string reason(reader.Text());
  if (!reader.ok()) return;
  std::vector<std::function<void()>> quick;
  {
    MutexLock lock(mutex_);
    quick = EndGeneration(generation, reason);
  }
  for (const auto& callback : quick) callback();
  socket_link_->Abort(generation, reason);
}

std::vector<std::function<void()>> RunState::EndGeneration(uint64_t generation,
                                                           const std::string& reason) {
  if (generation <= aborted_) return {};
  aborted_ = generation;
  abort_reason_ = reason;
  ended_.store(std::max(ended_.load(std::memory_order_relaxed), generation),
               std::memory_order_release);
  // What was agreed is void. The keeper asks again in the next generation, if it still wants to
  // stop.
  stop_step_.reset();
  unanswered_stop_.reset();
  go_ = false;
  changed_.NotifyAll();
  return generation >= entered_ ? StartCallbacks() : std::vector<std::function<void()>>();
}

void RunState::OnAdopt(const Message& message) {
  PayloadReader reader(message.payload);
  const auto nonce = reader.Int<uint64_t>();
  const auto generation = reader.Int<uint64_t>();
  const std::string reason(reader.Text());
  if (!reader.ok()) return;
  std::vector<std::function<void()>> quick;
  {
    MutexLock lock(mutex_);
    quick = EndGeneration(generation, reason);
    adoption_ = nonce;
  }
  for (const auto& callback : quick) callback();
  socket_link_->Abort(generation, reason);
  AnswerAdoption();
}

void RunState::AnswerAdoption() {
  {
    MutexLock lock(mutex_);
    if (!adoption_.has_value() || !TellWhereIStand()) return;
    adoption_.reset();
  }
  socket_link_->AskAgain();
}

// Under the lock: whatever changes one of these tells so after it has changed it, so the keeper
// hears of it by this message or behind it. It does not wait.
bool RunState::TellWhereIStand() {
  PayloadWriter payload;
  payload.Int(*adoption_)
      .Int(environment_.incarnation)
      .Int(static_cast<uint8_t>(is_joined_))
      .Int(entered_)
      .Int(static_cast<uint8_t>(is_waiting_))
      .Int(static_cast<uint8_t>(finished_));
  const absl::Status sent = socket_link_->channel().TrySend(
      Encode({.kind = MessageKind::kAdopted, .payload = payload.bytes()}));
  return sent.code() != absl::StatusCode::kResourceExhausted;
}

void RunState::OnStop(const Message& message) {
  const auto stop = PayloadReader(message.payload).Int<int64_t>();
  stop_requested_.store(true, std::memory_order_relaxed);
  bool on_time;
  int64_t completed;
  {
    MutexLock lock(mutex_);
    completed = completed_;
    on_time = completed < stop;
    stop_step_.reset();
    unanswered_stop_.reset();
    if (completed == kNoStep) {
      // What it restores may lie far beyond `stop`: its first step tells.
      unanswered_stop_ = stop;
    } else if (on_time) {
      stop_step_ = stop;
    }
    go_ = false;
    changed_.NotifyAll();
  }
  if (completed != kNoStep) AnswerStop(stop, on_time, completed);
}

void RunState::OnGo(const Message& message) {
  const auto step = PayloadReader(message.payload).Int<int64_t>();
  MutexLock lock(mutex_);
  if (stop_step_ != step) return;
  go_ = true;
  changed_.NotifyAll();
}

void RunState::OnKeeperGone() {
  const absl::Status gone = Error(absl::StatusCode::kUnavailable, "{} is gone",
                                  has_agent_ ? "the agent" : "the keeper of this process");
  {
    MutexLock lock(mutex_);
    if (!quitting_ && !killed_ && has_agent_) {
      PrintToStderr("outlast: rank {}: {}; this generation goes on, another one cannot form\n",
                    rank(), MessageOf(gone));
    }
    keeper_gone_ = gone;
    changed_.NotifyAll();
  }
  socket_link_->Close(gone);
}

// --- Generations ---

absl::StatusOr<Membership> RunState::WaitForMembership(StagedOutcome outcome,
                                                       std::string_view text) {
  uint64_t left;
  {
    MutexLock lock(mutex_);
    left = entered_;
  }
  PayloadWriter payload;
  payload.Int(left).Int(static_cast<uint32_t>(outcome)).Text(text.substr(0, 1024));
  {
    MutexLock lock(mutex_);
    is_waiting_ = true;
  }
  OUTLAST_RETURN_IF_ERROR(link_->Notify(MessageKind::kStaged, 0, payload.bytes()));
  OUTLAST_ASSIGN_OR_RETURN(Membership entered, WorkUntilOffered());
  rank_.store(entered.rank, std::memory_order_relaxed);
  world_.store(entered.world, std::memory_order_relaxed);
  box_.SetGeneration(entered.generation, static_cast<uint32_t>(entered.rank),
                     static_cast<uint32_t>(entered.world));
  running_.store(entered.generation, std::memory_order_release);
  return entered;
}

// An offer comes before work: what is left of that is done faster together.
absl::StatusOr<Membership> RunState::WorkUntilOffered() {
  while (true) {
    Message message;
    std::function<void(const Message&)> work;
    {
      MutexLock lock(mutex_);
      while (keeper_gone_.ok() && !killed_ && !is_offered() && for_staged_.empty())
        changed_.Wait(mutex_);
      if (!keeper_gone_.ok() || killed_ || is_offered()) {
        is_waiting_ = false;
        for_staged_.clear();
        if (killed_ || !keeper_gone_.ok())
          return Annotate(killed_ ? absl::CancelledError("killed") : keeper_gone_,
                          "wait for a generation");
        entered_ = offered_.generation;
        return offered_;
      }
      message = std::move(for_staged_.front());
      for_staged_.pop_front();
      if (const auto found = staged_work_.find(message.kind); found != staged_work_.end())
        work = found->second;
    }
    if (work != nullptr) work(message);
  }
}

bool RunState::is_offered() const {
  return offered_.generation > entered_ &&
         offered_.generation > ended_.load(std::memory_order_relaxed);
}

Membership RunState::OnlyMembership() {
  Membership only{.generation = 1, .rank = rank(), .world = world()};
  MutexLock lock(mutex_);
  entered_ = only.generation;
  box_.SetGeneration(only.generation, static_cast<uint32_t>(only.rank),
                     static_cast<uint32_t>(only.world));
  running_.store(only.generation, std::memory_order_release);
  return only;
}

void RunState::NotifyFinished() {
  {
    MutexLock lock(mutex_);
    finished_ = true;
  }
  (void)link_->Notify(MessageKind::kFinished, 0, {});
}

bool RunState::WasAborted(uint64_t generation) const {
  if (LoadWord(box_.header().abort_generation) >= generation) return true;
  MutexLock lock(mutex_);
  return aborted_ >= generation;
}

absl::Status RunState::WhyEnded(uint64_t generation) const {
  MutexLock lock(mutex_);
  if (killed_) return absl::CancelledError("this rank was killed");
  if (stopped_)
    return Error(absl::StatusCode::kAborted, "generation {}: an agreed stop was saved", generation);
  // The black box may tell before the message with the reason is read.
  return Error(absl::StatusCode::kAborted, "generation {} has ended: {}", generation,
               aborted_ >= generation ? abort_reason_ : "a peer came or went");
}

void RunState::AddAbortCallback(uint64_t generation, std::function<void()> callback) {
  MutexLock lock(mutex_);
  if (ended_.load(std::memory_order_relaxed) >= generation) {
    RunOnThread(std::move(callback));
  } else {
    callbacks_.push_back(std::move(callback));
  }
}

void RunState::AddQuickAbortCallback(uint64_t generation, std::function<void()> callback) {
  {
    MutexLock lock(mutex_);
    if (ended_.load(std::memory_order_relaxed) < generation)
      return quick_callbacks_.push_back(std::move(callback));
  }
  callback();
}

std::vector<std::function<void()>> RunState::StartCallbacks() {
  for (auto& callback : std::exchange(callbacks_, {})) RunOnThread(std::move(callback));
  return std::exchange(quick_callbacks_, {});
}

void RunState::RunOnThread(std::function<void()> callback) {
  callback_threads_.emplace_back([run = std::move(callback)] {
    NameThisThread("outlast-abort");
    CallUser(run);
  });
}

void RunState::EndCallbacks() {
  std::vector<std::thread> threads;
  {
    MutexLock lock(mutex_);
    callbacks_.clear();
    quick_callbacks_.clear();
    threads.swap(callback_threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

// --- Stopping ---

bool RunState::stopped() const {
  MutexLock lock(mutex_);
  return stopped_;
}

void RunState::AnswerStop(int64_t stop, bool on_time, int64_t step) {
  PayloadWriter payload;
  payload.Int(stop).Int(static_cast<uint8_t>(on_time)).Int(step);
  (void)link_->Notify(MessageKind::kStopAnswer, 0,
                      payload.bytes());  // a keeper that is gone needs none
}

// The promise "on time" and the step that breaks it are decided under one lock: after a promise of
// S this rank cannot complete S without waiting, and after completing S it cannot promise it.
absl::StatusOr<Run::StepVerdict> RunState::CompleteStep(int64_t step) {
  if (const uint64_t generation = running(); generation != 0)
    OUTLAST_RETURN_IF_ERROR(Check(generation));
  progress_.SetStep(static_cast<uint64_t>(std::max<int64_t>(0, step)));
  std::optional<int64_t> answered;
  bool on_time = false;
  {
    MutexLock lock(mutex_);
    completed_ = step;
    if (unanswered_stop_.has_value()) {
      answered = std::exchange(unanswered_stop_, std::nullopt);
      on_time = step < *answered;
      if (on_time) stop_step_ = answered;
    } else {
      if (!stop_step_.has_value() || step < *stop_step_) return Run::StepVerdict::kGoOn;
      if (step == *stop_step_) return WaitForGo(step);
      answered = std::exchange(stop_step_, std::nullopt);  // the trainer left steps out
    }
  }
  AnswerStop(*answered, on_time, step);
  return Run::StepVerdict::kGoOn;
}

absl::StatusOr<Run::StepVerdict> RunState::WaitForGo(int64_t step) {
  const uint64_t generation = running();
  const absl::Duration deadline = Clock::Real().Uptime() + kLongestWaitForGo;
  while (stop_step_ == step && !go_) {
    if (ended_.load(std::memory_order_relaxed) >= generation) break;
    if (!keeper_gone_.ok()) return Annotate(keeper_gone_, "wait for the word to stop");
    const absl::Duration left = deadline - Clock::Real().Uptime();
    if (left <= absl::ZeroDuration()) {
      return Error(absl::StatusCode::kDeadlineExceeded, "step {}: no word to stop came within {}",
                   step, absl::FormatDuration(kLongestWaitForGo));
    }
    changed_.WaitFor(mutex_, left);
  }
  if (ended_.load(std::memory_order_relaxed) >= generation) {
    return Error(absl::StatusCode::kAborted, "generation {} has ended: {}", generation,
                 abort_reason_);
  }
  return stop_step_ == step && go_ ? Run::StepVerdict::kSaveAndStop : Run::StepVerdict::kGoOn;
}

void RunState::MarkStopped(int64_t step) {
  {
    MutexLock lock(mutex_);
    stopped_ = true;
    ended_.store(std::max(ended_.load(std::memory_order_relaxed), entered_),
                 std::memory_order_release);
  }
  (void)link_->Notify(MessageKind::kStopped, 0, PayloadWriter().Int(step).bytes());
}

void RunState::Kill() {
  std::vector<std::function<void()>> quick;
  {
    MutexLock lock(mutex_);
    killed_ = true;
    ended_.store(kEveryGeneration, std::memory_order_release);
    quick = StartCallbacks();
    changed_.NotifyAll();
  }
  for (const auto& callback : quick) callback();
  if (socket_link_ != nullptr) {
    socket_link_->Close(absl::CancelledError("this rank was killed"));
    shutdown(socket_link_->channel().fd(), SHUT_RDWR);
  }
}

}  // namespace outlast
