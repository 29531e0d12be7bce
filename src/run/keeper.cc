#include "run/keeper.h"

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/overloaded.h"
#include "outlast/base/clock.h"
#include "outlast/blackbox/progress.h"
#include "run/peer_keys.h"
#include "run/shared_memories.h"
#include "run/worker_line.h"

namespace outlast {
namespace {

constexpr int kMessagesAtOnce = 32;  // of one worker, before others have their turn
constexpr int kComplaints =
    10;  // lines on stderr about messages that were refused; later ones are only counted

// What a member of a generation is told of it (kGeneration). `slots`: of this node; it is the world
// of a job of one node, where a slot keeps its rank, also when others have finished.
std::string DescribeGeneration(const CommitGeneration& commit, int slot, int slots) {
  RankMap here{.runs = {{.count = slots}}, .world = slots};
  const control::Commit* job = commit.job.get();
  const RankMap& map = job != nullptr ? job->map : here;
  PayloadWriter payload;
  payload.Int(commit.generation)
      .Int(static_cast<uint32_t>(commit.RankOf(slot)))
      .Int(static_cast<uint32_t>(map.world))
      .Int(static_cast<uint32_t>(map.runs.size()));
  std::map<std::string_view, uint32_t> numbers;  // of nodes, in the order of their first ranks
  for (const RankRun& run : map.runs) {
    const auto number = numbers.try_emplace(run.node, static_cast<uint32_t>(numbers.size()));
    payload.Int(number.first->second)
        .Int(static_cast<uint32_t>(run.first_rank))
        .Int(static_cast<uint32_t>(run.count));
  }
  return std::string(payload.bytes());
}

absl::Status Malformed(const Message& message) {
  return Error(absl::StatusCode::kInvalidArgument,
               "message of kind {}: its fields do not fit {} bytes", static_cast<int>(message.kind),
               message.payload.size());
}

}  // namespace

class Keeper::Impl {
 public:
  Impl(EventLoop& loop, WorkerHost& host, KeeperOptions options,
       std::unique_ptr<JobMachine> machine)
      : loop_(loop),
        host_(host),
        options_(std::move(options)),
        machine_(std::move(machine)),
        slots_(static_cast<size_t>(std::max(0, machine_->slots()))),
        memories_(slots_.size(), options_.vault),
        keys_(loop, machine_->peers(), machine_->node(),
              {.answer =
                   [this](int slot, uint64_t request, const absl::Status& status,
                          std::string_view value) {
                     const PayloadWriter payload = PayloadWriter().Text(value);
                     Answer(slot, request, status, payload.bytes(), {});
                   },
               .on_refused =
                   [this](const std::string& node, const absl::Status& why) {
                     if (++refused_ > kComplaints) return;
                     PrintToStderr("outlast: node {}: {}\n", node, MessageOf(why));
                   }}) {
    for (Slot& slot : slots_) slot.line = std::make_unique<WorkerLine>(loop_);
    machine_->Listen([this](JobMachine::Happening happening) { Take(std::move(happening)); });
  }

  ~Impl() {
    for (Slot& slot : slots_) Disconnect(slot);
    for (const auto& [timer, id] : timers_) loop_.Cancel(id);
    for (const TimerId timer : graces_) loop_.Cancel(timer);
  }

  absl::Status Start();
  absl::Status GoOn(Kept& kept);
  void Attach(KeeperExtension* extension);
  void Detach(KeeperExtension* extension) { std::erase(extensions_, extension); }
  void Dispatch(const JobEvent& event);
  void OnWorkerEnded(int slot, uint64_t incarnation, const ProcessEnd& end);
  void OnWorkerDying(int slot, uint64_t incarnation, const ProcessEnd& end);
  void Answer(int slot, uint64_t request, const absl::Status& status, std::string_view payload,
              std::span<const int> fds);
  void Send(int slot, const Message& message, std::span<const int> fds);

  EventLoop& loop() { return loop_; }
  const KeeperOptions& options() const { return options_; }
  JobMachine& machine() { return *machine_; }
  int faults() const { return faults_; }
  uint64_t refused() const { return refused_; }
  bool has_slot(int slot) const { return slot >= 0 && slot < static_cast<int>(slots_.size()); }
  Segment& black_box(int slot) { return *At(slot).box; }
  bool is_joined(int slot) const {
    return has_slot(slot) && slots_[static_cast<size_t>(slot)].joined;
  }
  bool is_finished(int slot) const {
    return has_slot(slot) && slots_[static_cast<size_t>(slot)].finished;
  }

 private:
  using TimerId = EventLoop::TimerId;

  // A place in the job, and the process that holds it.
  struct Slot {
    std::optional<Segment> box;        // for the whole job
    std::unique_ptr<WorkerLine> line;  // to the incarnation
    uint64_t incarnation = 0;
    int born_rank = 0, born_world = 1;  // as the incarnation's environment says
    uint64_t entered = 0;  // the newest generation that this incarnation was told to enter
    bool alive = false, joined = false, staged = false, finished = false;
    // Of a former keeper: what it says before it has told where it stands was said to that one.
    bool is_adopted = false;
    std::map<uint64_t, uint64_t> pending;  // request -> its generation
    int captures = 0;                      // stacks are being written: signals wait
    std::vector<KillWorker> kills;
  };

  Slot& At(int slot) { return slots_[static_cast<size_t>(slot)]; }
  JobView View() const;
  // For people.
  std::string NameOf(int slot) const {
    const int rank = machine_->rank(slot);
    return rank >= 0 ? fmt::format("rank {}", rank) : fmt::format("slot {}", slot);
  }

  void Take(JobMachine::Happening happening);
  void Do(const JobAction& action);
  void Spawn(const SpawnWorker& spawn);
  void Abort(const AbortGeneration& abort);
  void Commit(const CommitGeneration& commit);
  void Kill(const KillWorker& kill);
  void Capture(const CaptureStacks& capture);
  void CaptureDone(const std::vector<int>& slots);
  void AskRanksToStop(const AskStop& stop);
  void SendStop(int slot);
  bool is_saving() const;
  void Persist(const PersistCommon& persist);
  void Save(const WantSave& want);
  void Arm(const ArmTimer& arm);
  void Disarm(uint64_t timer);

  absl::Status MakeBox(int slot);
  absl::Status TakeOver(int slot, Kept& kept);
  void AdoptWorkers();
  absl::Status OnAdopted(int slot, const Message& message);
  absl::Status HandleOld(int slot, const Message& message);
  absl::Status Finish(int slot);
  void Keep(const std::string& key, std::string_view bytes, int fd);

  void Receive(int slot);
  void ReadAll(int slot);
  bool ReceiveOne(int slot);
  void Handle(int slot, Message message);
  absl::Status HandleKnown(int slot, Message& message);
  absl::Status HandleEvent(int slot, const Message& message);
  absl::Status Join(int slot, const Message& message);
  absl::Status Stage(int slot, const Message& message);
  absl::Status StopAnswer(int slot, const Message& message);
  absl::Status CheckGeneration(const Message& message) const;
  absl::Status Put(int slot, const Message& message);
  absl::Status Get(int slot, const Message& message);
  absl::Status Share(int slot, const Message& message);
  void BlameUncaused(int slot, uint64_t incarnation, uint64_t generation,
                     const std::string& message);

  void TellIfQuiet();
  void Enter(int slot);
  void Refuse(int slot, const Message& message, const absl::Status& why);
  void Complain(int slot, const absl::Status& why);
  void Disconnect(Slot& slot);

  EventLoop& loop_;
  WorkerHost& host_;
  const KeeperOptions options_;
  const std::unique_ptr<JobMachine> machine_;
  std::vector<Slot> slots_;
  std::vector<KeeperExtension*> extensions_;
  std::deque<JobMachine::Happening> events_;
  bool dispatching_ = false;
  std::map<uint64_t, TimerId> timers_;  // the job's
  std::vector<TimerId> graces_;
  CommitGeneration commit_{};
  uint64_t aborted_ = 0;   // this generation and older ones are unwound
  uint64_t adoption_ = 0;  // nonce: two keepers after this one ask the same
  uint64_t quiet_ = 0;     // the newest aborted generation that all had left, as extensions know
  std::optional<AskStop> stop_;
  SharedMemories memories_;
  PeerKeys keys_;
  uint64_t refused_ = 0;
  int faults_ = 0;
  std::shared_ptr<bool> alive_ =
      std::make_shared<bool>(true);  // shared with callbacks that may outlive the keeper
};

// --- The job machine ---

absl::Status Keeper::Impl::Start() {
  for (int slot = 0; slot < static_cast<int>(slots_.size()); ++slot)
    OUTLAST_RETURN_IF_ERROR(MakeBox(slot));
  Dispatch(StartEvent{});
  return absl::OkStatus();
}

absl::Status Keeper::Impl::MakeBox(int number) {
  SegmentIdentity identity;
  identity.slot = identity.local_rank = static_cast<uint32_t>(number);
  // Of several nodes not known yet; the worker says both when it enters.
  identity.rank = static_cast<uint32_t>(std::max(0, machine_->rank(number)));
  identity.world = static_cast<uint32_t>(std::max(1, machine_->world()));
  OUTLAST_ASSIGN_OR_RETURN(At(number).box, Segment::Create(identity));
  Keep(fmt::format("box.{}", number), "", At(number).box->fd());
  return absl::OkStatus();
}

// --- A former keeper's workers ---

void Keeper::Impl::Keep(const std::string& key, std::string_view bytes, int fd) {
  if (options_.vault == nullptr) return;
  options_.vault->Keep(key, bytes, fd >= 0 ? std::span(&fd, 1) : std::span<const int>());
}

absl::Status Keeper::Impl::GoOn(Kept& kept) {
  memories_.GoOn(kept);
  for (int slot = 0; slot < static_cast<int>(slots_.size()); ++slot)
    OUTLAST_RETURN_IF_ERROR(TakeOver(slot, kept));
  Dispatch(StartEvent{});  // aborts the generation that they are in
  for (Slot& slot : slots_) {
    const SegmentHeader& header = slot.box->header();
    const bool has_entered =
        LoadWord(header.incarnation) == slot.incarnation && LoadWord(header.generation) != 0;
    if (slot.is_adopted && has_entered) slot.entered = aborted_;  // until it says
  }
  AdoptWorkers();
  return absl::OkStatus();
}

absl::Status Keeper::Impl::TakeOver(int number, Kept& kept) {
  Slot& slot = At(number);
  const auto box = kept.extract(fmt::format("box.{}", number));
  if (box.empty() || box.mapped().fds.empty()) {
    OUTLAST_RETURN_IF_ERROR(MakeBox(number));
  } else {
    OUTLAST_ASSIGN_OR_RETURN(slot.box, Segment::Open(std::move(box.mapped().fds.front())));
  }
  const auto finished = kept.extract(fmt::format("finished.{}", number));
  const uint64_t finished_as =
      finished.empty() ? 0 : PayloadReader(finished.mapped().bytes).Int<uint64_t>();
  const auto line = kept.extract(fmt::format("line.{}", number));
  if (line.empty() || line.mapped().fds.empty()) {
    slot.finished = finished_as != 0;  // its process is gone
    return absl::OkStatus();
  }
  PayloadReader reader(line.mapped().bytes);
  slot.incarnation = reader.Int<uint64_t>();
  slot.born_rank = reader.Int<int>();
  slot.born_world = reader.Int<int>();
  if (!reader.ok())
    return Error(absl::StatusCode::kInvalidArgument, "line of slot {}: {} bytes", number,
                 line.mapped().bytes.size());
  slot.finished = finished_as == slot.incarnation;
  slot.alive = slot.is_adopted = true;
  return slot.line->Resume(std::move(line.mapped().fds.front()),
                           [this, number] { Receive(number); });
}

void Keeper::Impl::AdoptWorkers() {
  static_assert(sizeof adoption_ <= sizeof Id128().bytes);
  __builtin_memcpy(&adoption_, Id128::Random().bytes.data(), sizeof adoption_);
  const std::string payload =
      PayloadWriter().Int(adoption_).Int(aborted_).Text("its agent was killed").bytes();
  for (int slot = 0; slot < static_cast<int>(slots_.size()); ++slot) {
    if (At(slot).is_adopted) Send(slot, {.kind = MessageKind::kAdopt, .payload = payload}, {});
  }
}

// Only now it is known what it hears and waits for.
absl::Status Keeper::Impl::OnAdopted(int number, const Message& message) {
  Slot& slot = At(number);
  PayloadReader reader(message.payload);
  const auto nonce = reader.Int<uint64_t>();
  const auto incarnation = reader.Int<uint64_t>();
  const bool joined = reader.Int<uint8_t>() != 0;
  const auto entered = reader.Int<uint64_t>();
  const bool staged = reader.Int<uint8_t>() != 0;
  const bool finished = reader.Int<uint8_t>() != 0;
  if (!reader.ok()) return Malformed(message);
  // An answer to a keeper before this one, which was killed as well.
  if (!slot.is_adopted || nonce != adoption_ || incarnation != slot.incarnation)
    return absl::OkStatus();
  slot.is_adopted = false;
  if (!joined) return absl::OkStatus();  // it asks to be let in next
  slot.joined = true;
  slot.entered = entered;
  Dispatch(WorkerJoined{number, incarnation});
  if (finished) return Finish(number);
  if (!staged) return absl::OkStatus();  // on its way out of its body
  slot.staged = true;
  Dispatch(WorkerStaged{number, incarnation, entered});
  TellIfQuiet();
  Enter(number);
  return absl::OkStatus();
}

void Keeper::Impl::Attach(KeeperExtension* extension) {
  extensions_.push_back(extension);
  if (commit_.generation > aborted_) extension->OnCommit(commit_);
}

JobView Keeper::Impl::View() const {
  JobView view{.now = Clock::Real().Uptime()};
  for (const Slot& slot : slots_) {
    view.newest_step =
        std::max(view.newest_step, static_cast<int64_t>(LoadWord(slot.box->header().step)));
  }
  return view;
}

// What an action causes at once, such as a spawn that fails, is another event: it waits until this
// one's actions are done.
void Keeper::Impl::Dispatch(const JobEvent& event) {
  Take([this, event](const JobView& view) { return machine_->Step(event, view); });
}

void Keeper::Impl::Take(JobMachine::Happening happening) {
  events_.push_back(std::move(happening));
  if (dispatching_) return;
  dispatching_ = true;
  while (!events_.empty()) {
    const JobMachine::Happening next = std::move(events_.front());
    events_.pop_front();
    for (const JobAction& action : next(View())) Do(action);
  }
  dispatching_ = false;
}

void Keeper::Impl::Do(const JobAction& action) {
  std::visit(
      Overloaded{
          [&](const SpawnWorker& spawn) { Spawn(spawn); },
          [&](const AbortGeneration& abort) { Abort(abort); },
          [&](const CommitGeneration& commit) { Commit(commit); },
          [&](const KillWorker& kill) { Kill(kill); },
          [&](const ForwardSignal& forward) { host_.Forward(forward); },
          [&](const CaptureStacks& capture) { Capture(capture); },
          [&](const AskStop& stop) { AskRanksToStop(stop); },
          [&](const GoStop& go) {
            for (int slot = 0; slot < static_cast<int>(slots_.size()); ++slot) {
              Send(slot,
                   {.kind = MessageKind::kGo, .payload = PayloadWriter().Int(go.step).bytes()}, {});
            }
          },
          [&](const PersistCommon& persist) { Persist(persist); },
          [&](const WantSave& want) { Save(want); },
          [&](const ArmTimer& arm) { Arm(arm); },
          [&](const DisarmTimer& disarm) { Disarm(disarm.timer); },
          [&](const RecordFault& record) {
            ++faults_;
            host_.OnFault(record);
          },
          [&](const FinishJob& finish) { host_.OnFinish(finish); },
      },
      action);
}

void Keeper::Impl::Spawn(const SpawnWorker& spawn) {
  Slot& slot = At(spawn.slot);
  Disconnect(slot);
  slot.incarnation = spawn.incarnation;
  slot.entered = 0;
  slot.alive = true;
  // Should this one be gone when another keeper takes over: it had not finished.
  if (slot.finished)
    Keep(fmt::format("finished.{}", spawn.slot), PayloadWriter().Int(uint64_t{0}).bytes(), -1);
  slot.joined = slot.staged = slot.finished = false;
  slot.born_rank = machine_->rank(spawn.slot);
  slot.born_world = machine_->world();
  auto socket = slot.line->Open([this, number = spawn.slot] { Receive(number); });
  if (!socket.ok()) {
    Complain(spawn.slot, socket.status());
    OnWorkerEnded(spawn.slot, spawn.incarnation, {.code = 1});
    return;
  }
  slot.is_adopted = false;
  Keep(fmt::format("line.{}", spawn.slot),
       PayloadWriter().Int(spawn.incarnation).Int(slot.born_rank).Int(slot.born_world).bytes(),
       slot.line->fd());
  host_.Spawn({spawn, slot.born_rank, slot.born_world, *std::move(socket), slot.box->fd()});
}

// The word in the black boxes first: a trainer that checks it unwinds even if its reader thread has
// not run yet.
void Keeper::Impl::Abort(const AbortGeneration& abort) {
  aborted_ = std::max(aborted_, abort.generation);
  commit_.generation = std::max(commit_.generation, aborted_);  // a former keeper had committed it
  for (Slot& slot : slots_) AgentWords(*slot.box).SetAbortGeneration(aborted_);
  const Message message{
      .kind = MessageKind::kAbort,
      .generation = abort.generation,
      .payload = PayloadWriter().Int(abort.generation).Text(abort.reason).bytes()};
  for (int i = 0; i < static_cast<int>(slots_.size()); ++i) {
    if (At(i).joined) Send(i, message, {});
  }
  const absl::Status ended = Error(absl::StatusCode::kAborted, "generation {} has ended: {}",
                                   abort.generation, abort.reason);
  keys_.Leave();
  for (int i = 0; i < static_cast<int>(slots_.size()); ++i) {
    const auto pending = At(i).pending;
    for (const auto& [request, generation] : pending) {
      if (generation != 0 && generation <= aborted_) Answer(i, request, ended, {}, {});
    }
  }
  for (KeeperExtension* extension : extensions_) extension->OnAbort(abort.generation);
}

void Keeper::Impl::Commit(const CommitGeneration& commit) {
  commit_ = commit;
  keys_.Enter(commit_);
  memories_.Enter();
  stop_.reset();
  for (Slot& slot : slots_) AgentWords(*slot.box).SetStopStep(0);
  for (KeeperExtension* extension : extensions_) extension->OnCommit(commit_);
  host_.OnCommit(commit_);
  for (int i = 0; i < static_cast<int>(slots_.size()); ++i) Enter(i);
}

// Tells a member that waits for a generation to enter the present one, once.
void Keeper::Impl::Enter(int number) {
  Slot& slot = At(number);
  const bool member =
      std::find(commit_.members.begin(), commit_.members.end(), number) != commit_.members.end();
  if (!slot.joined || !slot.staged || !member || commit_.RankOf(number) < 0) return;
  if (commit_.generation <= aborted_ || commit_.generation <= slot.entered) return;
  slot.entered = commit_.generation;
  slot.staged = false;
  Send(number,
       {.kind = MessageKind::kGeneration,
        .generation = commit_.generation,
        .payload = DescribeGeneration(commit_, number, static_cast<int>(slots_.size()))},
       {});
  host_.OnEnter(number, slot.incarnation);
}

void Keeper::Impl::TellIfQuiet() {
  const uint64_t generation = commit_.generation;
  if (generation == 0 || generation > aborted_ || generation <= quiet_) return;
  const auto is_inside = [&](const Slot& slot) {
    return slot.alive && slot.entered == generation && !slot.staged && !slot.finished;
  };
  if (std::any_of(slots_.begin(), slots_.end(), is_inside)) return;
  quiet_ = generation;
  for (KeeperExtension* extension : extensions_) extension->OnQuiet();
}

void Keeper::Impl::Kill(const KillWorker& kill) {
  Slot& slot = At(kill.slot);
  if (slot.captures > 0) {
    slot.kills.push_back(kill);  // evidence first
    return;
  }
  host_.Kill(kill);
}

void Keeper::Impl::Capture(const CaptureStacks& capture) {
  for (const int slot : capture.slots) ++At(slot).captures;
  host_.CaptureStacks(capture, [this, slots = capture.slots, alive = std::weak_ptr<bool>(alive_),
                                done = false]() mutable {
    if (done || alive.expired()) return;
    done = true;
    CaptureDone(slots);
  });
}

void Keeper::Impl::CaptureDone(const std::vector<int>& slots) {
  for (const int number : slots) {
    Slot& slot = At(number);
    if (--slot.captures > 0) continue;
    for (const KillWorker& kill : std::exchange(slot.kills, {})) host_.Kill(kill);
  }
}

void Keeper::Impl::AskRanksToStop(const AskStop& stop) {
  stop_ = stop;
  for (int i = 0; i < static_cast<int>(slots_.size()); ++i) {
    AgentWords(*At(i).box).SetStopStep(static_cast<uint64_t>(std::max<int64_t>(0, stop.step)));
    if (At(i).joined) SendStop(i);
  }
}

void Keeper::Impl::SendStop(int slot) {
  Send(slot,
       {.kind = MessageKind::kStop,
        .payload = PayloadWriter().Int(stop_->step).Text(stop_->reason).bytes()},
       {});
}

bool Keeper::Impl::is_saving() const {
  return std::any_of(extensions_.begin(), extensions_.end(),
                     [](const KeeperExtension* extension) { return extension->is_saving(); });
}

void Keeper::Impl::Persist(const PersistCommon& persist) {
  if (!is_saving()) return Dispatch(StopPersisted{.step = 0, .durable = false});
  for (KeeperExtension* extension : extensions_) extension->OnPersistCommon(persist.reason);
}

void Keeper::Impl::Save(const WantSave& want) {
  bool is_taken = false;
  for (KeeperExtension* extension : extensions_) is_taken = is_taken || extension->OnWantSave(want);
  if (!is_taken) Dispatch(WantedSaveEnded{.number = want.number, .durable = false});
}

void Keeper::Impl::Arm(const ArmTimer& arm) {
  Disarm(arm.timer);
  timers_[arm.timer] = loop_.RunAt(arm.at, [this, timer = arm.timer] {
    timers_.erase(timer);
    Dispatch(TimerFired{timer});
  });
}

void Keeper::Impl::Disarm(uint64_t timer) {
  if (const auto found = timers_.find(timer); found != timers_.end()) {
    loop_.Cancel(found->second);
    timers_.erase(found);
  }
}

void Keeper::Impl::OnWorkerEnded(int number, uint64_t incarnation, const ProcessEnd& end) {
  if (!has_slot(number)) return;
  Slot& slot = At(number);
  if (!slot.alive || slot.incarnation != incarnation) return;
  ReadAll(number);
  Disconnect(slot);
  slot.alive = slot.joined = slot.staged = false;
  for (KeeperExtension* extension : extensions_) extension->OnWorkerEnded(number);
  Dispatch(WorkerEnded{number, incarnation, end});
  TellIfQuiet();
}

void Keeper::Impl::OnWorkerDying(int number, uint64_t incarnation, const ProcessEnd& end) {
  if (!has_slot(number)) return;
  Slot& slot = At(number);
  if (!slot.alive || slot.incarnation != incarnation) return;
  ReadAll(number);
  Dispatch(WorkerDying{number, incarnation, end.signal, end.out_of_memory});
}

// What it said before it ended comes first.
void Keeper::Impl::ReadAll(int slot) {
  while (ReceiveOne(slot)) {
  }
}

// --- Messages ---

void Keeper::Impl::Receive(int slot) {
  for (int i = 0; i < kMessagesAtOnce && ReceiveOne(slot); ++i) {
  }
}

// False when there is nothing more to read. A peer that closed its end is no event: its process'
// end is.
bool Keeper::Impl::ReceiveOne(int number) {
  Slot& slot = At(number);
  auto message = slot.line->Receive();
  if (message.status().code() == absl::StatusCode::kResourceExhausted) return false;
  if (!message.ok()) {
    Complain(number, message.status());
    return true;
  }
  if (!message->has_value()) {
    Disconnect(slot);
    return false;
  }
  Handle(number, std::move(**message));
  return true;
}

void Keeper::Impl::Handle(int number, Message message) {
  Slot& slot = At(number);
  if (message.request != 0 && !slot.pending.emplace(message.request, message.generation).second) {
    Complain(number, Error(absl::StatusCode::kInvalidArgument, "request {} is open already",
                           message.request));
    return;
  }
  if (absl::Status handled = HandleKnown(number, message); !handled.ok())
    Refuse(number, message, handled);
}

absl::Status Keeper::Impl::HandleKnown(int slot, Message& message) {
  if (message.kind == MessageKind::kAdopted) return OnAdopted(slot, message);
  if (At(slot).is_adopted) return HandleOld(slot, message);
  if (message.kind == MessageKind::kJoined) return Join(slot, message);
  if (!At(slot).joined) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "message of kind {} from a worker that has not joined",
                 static_cast<int>(message.kind));
  }
  if (message.request != 0 && message.generation != 0)
    OUTLAST_RETURN_IF_ERROR(CheckGeneration(message));
  switch (message.kind) {
    case MessageKind::kPut:
      return Put(slot, message);
    case MessageKind::kGet:
      return Get(slot, message);
    case MessageKind::kSharedMemory:
      return Share(slot, message);
    case MessageKind::kStaged:
    case MessageKind::kFinished:
    case MessageKind::kStopAnswer:
    case MessageKind::kStopped:
      return HandleEvent(slot, message);
    default:
      break;
  }
  for (KeeperExtension* extension : extensions_) {
    if (extension->OnMessage(slot, message)) return absl::OkStatus();
  }
  return Error(absl::StatusCode::kUnimplemented, "message of kind {}: nobody here takes it",
               static_cast<int>(message.kind));
}

absl::Status Keeper::Impl::HandleEvent(int number, const Message& message) {
  Slot& slot = At(number);
  if (message.kind == MessageKind::kStaged) return Stage(number, message);
  if (message.kind == MessageKind::kStopAnswer) return StopAnswer(number, message);
  if (message.kind == MessageKind::kFinished) return Finish(number);
  PayloadReader reader(message.payload);
  const auto step = reader.Int<int64_t>();
  if (!reader.ok()) return Malformed(message);
  Dispatch(WorkerStopped{number, slot.incarnation, step});
  if (!is_saving())
    Dispatch(StopPersisted{.step = step, .durable = false});  // nobody here writes it
  return absl::OkStatus();
}

absl::Status Keeper::Impl::Finish(int number) {
  Slot& slot = At(number);
  slot.finished = true;
  Keep(fmt::format("finished.{}", number), PayloadWriter().Int(slot.incarnation).bytes(), -1);
  Dispatch(WorkerFinished{number, slot.incarnation});
  return absl::OkStatus();
}

// Said to a former keeper. That the work is done holds for ever, and it may have ended since; the
// rest is said again, or told by kAdopted.
absl::Status Keeper::Impl::HandleOld(int number, const Message& message) {
  At(number).pending.erase(message.request);
  return message.kind == MessageKind::kFinished ? Finish(number) : absl::OkStatus();
}

absl::Status Keeper::Impl::Join(int number, const Message& message) {
  Slot& slot = At(number);
  PayloadReader reader(message.payload);
  const auto version = reader.Int<uint32_t>();
  const auto incarnation = reader.Int<uint64_t>();
  reader.Int<int32_t>();  // the pid; we know it from the spawn
  if (!reader.ok()) return Malformed(message);
  if (version != kWireVersion) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "the worker speaks protocol version {}, the agent version {}: link the trainer "
                 "with the agent's Outlast",
                 version, kWireVersion);
  }
  if (incarnation != slot.incarnation || slot.joined) {
    return Error(absl::StatusCode::kFailedPrecondition, "{}: incarnation {} cannot join, {} {}",
                 NameOf(number), incarnation, slot.incarnation,
                 slot.joined ? "has joined already" : "is awaited");
  }
  slot.joined = true;
  Answer(number, message.request, absl::OkStatus(),
         PayloadWriter()
             .Int(machine_->run_id().bytes)
             .Text(options_.run_dir)
             .Int(static_cast<uint32_t>(slot.born_world))
             .Int(static_cast<uint32_t>(slot.born_rank))
             .bytes(),
         {});
  if (stop_.has_value()) SendStop(number);
  Dispatch(WorkerJoined{number, incarnation});
  return absl::OkStatus();
}

absl::Status Keeper::Impl::Stage(int number, const Message& message) {
  Slot& slot = At(number);
  PayloadReader reader(message.payload);
  const auto left = reader.Int<uint64_t>();
  const auto outcome = static_cast<StagedOutcome>(reader.Int<uint32_t>());
  const std::string text(reader.Text());
  if (!reader.ok()) return Malformed(message);
  if (left != slot.entered) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "{} says that it left generation {}: it was in {}", NameOf(number), left,
                 slot.entered);
  }
  slot.staged = true;
  // Of several nodes the machine has its own patience: word of a lost one takes longer.
  if (outcome == StagedOutcome::kUncaused && left > aborted_ && machine_->peers() == nullptr) {
    graces_.push_back(loop_.RunAfter(options_.uncaused_grace,
                                     [this, number, incarnation = slot.incarnation, left, text] {
                                       BlameUncaused(number, incarnation, left, text);
                                     }));
  }
  Dispatch(WorkerStaged{number, slot.incarnation, left});
  TellIfQuiet();
  Enter(number);
  return absl::OkStatus();
}

void Keeper::Impl::BlameUncaused(int number, uint64_t incarnation, uint64_t generation,
                                 const std::string& message) {
  const Slot& slot = At(number);
  if (generation <= aborted_ || generation != commit_.generation || !slot.alive ||
      slot.incarnation != incarnation)
    return;
  Dispatch(VerdictGiven{
      .culprit = number,
      .verdict_class = "uncaused_abort",
      .detail = fmt::format(
          "{}: its body returned kAborted in generation {}, which nobody had aborted: {}",
          NameOf(number), generation, message),
      .phase = 0,
      .stopped = false});
}

absl::Status Keeper::Impl::StopAnswer(int number, const Message& message) {
  PayloadReader reader(message.payload);
  const auto stop = reader.Int<int64_t>();
  const auto on_time = reader.Int<uint8_t>();
  const auto step = reader.Int<int64_t>();
  if (!reader.ok()) return Malformed(message);
  Dispatch(StopAnswered{number, At(number).incarnation, on_time != 0, step, stop});
  return absl::OkStatus();
}

absl::Status Keeper::Impl::CheckGeneration(const Message& message) const {
  if (message.generation <= aborted_ || message.generation < commit_.generation) {
    return Error(absl::StatusCode::kAborted, "generation {} has ended", message.generation);
  }
  if (message.generation == commit_.generation) return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition,
               "generation {} is not known here, {} is the newest", message.generation,
               commit_.generation);
}

absl::Status Keeper::Impl::Put(int number, const Message& message) {
  PayloadReader reader(message.payload);
  const std::string_view key = reader.Text();
  const std::string_view value = reader.Text();
  if (!reader.ok() || message.generation == 0) return Malformed(message);
  OUTLAST_RETURN_IF_ERROR(CheckGeneration(message));  // also of one who wants no answer
  keys_.Put(number, message.request, key, value);
  return absl::OkStatus();
}

absl::Status Keeper::Impl::Get(int number, const Message& message) {
  PayloadReader reader(message.payload);
  const std::string_view key = reader.Text();
  const auto timeout = absl::Nanoseconds(reader.Int<int64_t>());
  if (!reader.ok() || message.generation == 0 || message.request == 0) return Malformed(message);
  keys_.Get(number, message.request, key, timeout);
  return absl::OkStatus();
}

absl::Status Keeper::Impl::Share(int number, const Message& message) {
  PayloadReader reader(message.payload);
  const std::string_view name = reader.Text();
  const auto bytes = reader.Int<uint64_t>();
  const auto scope = static_cast<SharedScope>(reader.Int<uint8_t>());
  const bool of_generation =
      scope == SharedScope::kGeneration || scope == SharedScope::kGenerationDirty;
  if (!reader.ok() || scope > SharedScope::kSlot || message.request == 0 ||
      (of_generation && message.generation == 0))
    return Malformed(message);
  const absl::StatusOr<int> memory = memories_.Get(number, scope, name, bytes);
  if (!memory.ok()) {
    Answer(number, message.request, memory.status(), {}, {});
    return absl::OkStatus();
  }
  Answer(number, message.request, absl::OkStatus(), {}, std::span<const int>(&*memory, 1));
  return absl::OkStatus();
}

// --- Sending ---

void Keeper::Impl::Refuse(int slot, const Message& message, const absl::Status& why) {
  // What a survivor still asks of a generation that just ended is no misbehaviour.
  if (why.code() == absl::StatusCode::kAborted) {
    ++refused_;
  } else {
    Complain(slot, why);
  }
  Answer(slot, message.request, why, {}, {});
}

void Keeper::Impl::Complain(int slot, const absl::Status& why) {
  if (++refused_ > kComplaints) return;
  PrintToStderr("outlast: {}: {}\n", NameOf(slot), MessageOf(why));
}

void Keeper::Impl::Answer(int number, uint64_t request, const absl::Status& status,
                          std::string_view payload, std::span<const int> fds) {
  if (!has_slot(number) || At(number).pending.erase(request) == 0) return;
  const std::string_view text = status.ok() ? payload : MessageOf(status);
  Send(number,
       {.kind = MessageKind::kAnswer,
        .request = request,
        .status = status.code(),
        .payload = std::string(text)},
       fds);
}

void Keeper::Impl::Send(int number, const Message& message, std::span<const int> fds) {
  if (!has_slot(number)) return;
  Slot& slot = At(number);
  const absl::Status sent = slot.line->Send(message, fds);
  if (sent.ok()) return;
  Complain(number, sent);
  if (!slot.line->is_open()) Disconnect(slot);
}

void Keeper::Impl::Disconnect(Slot& slot) {
  slot.line->Close();
  slot.pending.clear();
  keys_.Forget(static_cast<int>(&slot - slots_.data()));
}

// --- The face ---

Keeper::Keeper(EventLoop& loop, WorkerHost& host, const KeeperOptions& options)
    : Keeper(loop, host, options, std::make_unique<OneNodeMachine>(options.job, options.run_id)) {}
Keeper::Keeper(EventLoop& loop, WorkerHost& host, KeeperOptions options,
               std::unique_ptr<JobMachine> machine)
    : impl_(std::make_unique<Impl>(loop, host, std::move(options), std::move(machine))) {}
Keeper::~Keeper() = default;
void Keeper::Attach(KeeperExtension* extension) { impl_->Attach(extension); }
void Keeper::Detach(KeeperExtension* extension) { impl_->Detach(extension); }
absl::Status Keeper::Start() { return impl_->Start(); }
absl::Status Keeper::GoOn(Kept& kept) { return impl_->GoOn(kept); }
void Keeper::Dispatch(const JobEvent& event) { impl_->Dispatch(event); }
void Keeper::OnWorkerEnded(int slot, uint64_t incarnation, const ProcessEnd& end) {
  impl_->OnWorkerEnded(slot, incarnation, end);
}
void Keeper::OnWorkerDying(int slot, uint64_t incarnation, const ProcessEnd& end) {
  impl_->OnWorkerDying(slot, incarnation, end);
}
void Keeper::Answer(int slot, uint64_t request, const absl::Status& status,
                    std::string_view payload, std::span<const int> fds) {
  impl_->Answer(slot, request, status, payload, fds);
}
void Keeper::Send(int slot, const Message& message, std::span<const int> fds) {
  impl_->Send(slot, message, fds);
}
EventLoop& Keeper::loop() { return impl_->loop(); }
const KeeperOptions& Keeper::options() const { return impl_->options(); }
int Keeper::faults() const { return impl_->faults(); }
int Keeper::slots() const { return impl_->machine().slots(); }
int Keeper::rank(int slot) const { return impl_->machine().rank(slot); }
int Keeper::world() const { return impl_->machine().world(); }
Id128 Keeper::run_id() const { return impl_->machine().run_id(); }
Peers* Keeper::peers() { return impl_->machine().peers(); }
std::string Keeper::node() const { return impl_->machine().node(); }
Segment& Keeper::black_box(int slot) { return impl_->black_box(slot); }
bool Keeper::is_joined(int slot) const { return impl_->is_joined(slot); }
bool Keeper::is_finished(int slot) const { return impl_->is_finished(slot); }
uint64_t Keeper::refused() const { return impl_->refused(); }

}  // namespace outlast
