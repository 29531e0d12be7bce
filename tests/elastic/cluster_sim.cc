#include "tests/elastic/cluster_sim.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstring>

#include "base/overloaded.h"

namespace outlast {
namespace {

const char* const kPhaseNames[] = {"forming", "running", "suspect",      "reforming", "draining",
                                   "ending",  "done",    "stepped down", "saving"};
const char* const kRoleNames[] = {"spare", "active", "preparing", "stopping"};
const char* const kAgentMessages[] = {"BEAT",     "FAULT",    "PREPARED", "COMMITTED",
                                      "RESTORED", "STOPPING", "LEAVE",    "SAVE REPORT",
                                      "BYE",      "MEASURED", "SAVED"};
const char* const kCoordinatorMessages[] = {"WELCOME", "REFUSED", "PREPARE", "COMMIT",
                                            "NEXT",    "STOP",    "GO",      "EXCLUDE",
                                            "COLLECT", "DONE",    "MEASURE", "SAVE"};
const char* const kCoordinatorEventNames[] = {"start",      "HELLO",           "stream lost", "",
                                              "stop asked", "journal refused", "timer"};
const char* const kNodeEventNames[] = {
    "start",    "stream up", "stream down", "",         "joined",        "staged",
    "finished", "stopped",   "dying",       "ended",    "verdict",       "signal",
    "answered", "persisted", "saved",       "restored", "save reported", "timer"};
constexpr size_t kSaving = std::size(kPhaseNames) - 1;

size_t IndexOf(const CoordinatorEvent& event) {
  const auto* said = std::get_if<AgentSaid>(&event);
  return said == nullptr ? event.index()
                         : std::size(kCoordinatorEventNames) + said->message.index();
}
size_t IndexOf(const NodeEvent& event) {
  const auto* said = std::get_if<CoordinatorSaid>(&event);
  return said == nullptr ? event.index() : std::size(kNodeEventNames) + said->message.index();
}
std::string TextOf(const ProcessEnd& end) {
  return fmt::format("{} {}{}", end.signal != 0 ? "signal" : "code",
                     end.signal != 0 ? end.signal : end.code, end.by_us ? " by us" : "");
}

}  // namespace

const char* ClusterCoverage::PhaseName(size_t phase) { return kPhaseNames[phase]; }
const char* ClusterCoverage::RoleName(size_t role) { return kRoleNames[role]; }
const char* ClusterCoverage::CoordinatorEventName(size_t event) {
  const size_t first = std::size(kCoordinatorEventNames);
  return event < first ? kCoordinatorEventNames[event] : kAgentMessages[event - first];
}
const char* ClusterCoverage::NodeEventName(size_t event) {
  const size_t first = std::size(kNodeEventNames);
  return event < first ? kNodeEventNames[event] : kCoordinatorMessages[event - first];
}

Cluster::Cluster(uint64_t seed, ClusterOptions options, ClusterCoverage& coverage)
    : options_(std::move(options)),
      coverage_(coverage),
      network_(seed, kCoordinatorHosts + static_cast<int>(options_.capacities.size()),
               options_.network),
      moody_one_in_(options_.moody_one_in),
      agents_(options_.capacities.size()) {
  // No two clocks agree.
  for (AgentHost& agent : agents_) agent.offset = network_.UpTo(absl::Hours(10'000));
  for (CoordinatorHost& at : coordinators_) at.offset = network_.UpTo(absl::Hours(10'000));
  Train();
}

void Cluster::Fail(const std::string& what) {
  if (!error_.empty()) return;
  error_ = fmt::format("{}; {}", what, Story());
}

template <typename... Args>
void Cluster::Trace(const char* format, Args... args) {
  if (!traces_) return;
  trace_.push_back(
      fmt::format("{:9.3f} ", absl::ToDoubleSeconds(network_.now() - absl::Seconds(1'000'000))) +
      fmt::format(fmt::runtime(format), args...));
}

std::string Cluster::Story() const {
  std::string text = "no coordinator";
  if (const Coordinator* machine = current()) {
    text = fmt::format("coordinator {} is {}, generation {} of {}", machine->state().incarnation,
                       kPhaseNames[static_cast<size_t>(machine->phase())],
                       machine->state().generation(), machine->state().target);
    if (machine->state().ended) text += ": " + machine->state().ended->reason;
  }
  for (int node = 0; node < nodes(); ++node) {
    const AgentHost& agent = Agent(node);
    text += fmt::format(", n{}", node);
    if (agent.exit_code) text += fmt::format(" over {}", *agent.exit_code);
    if (!agent.machine) continue;
    text += fmt::format(" g{}", agent.machine->generation());
    for (const Worker& worker : agent.workers) {
      text += worker.alive ? worker.in != 0 ? fmt::format(" r{}", worker.rank) : " w" : " -";
    }
  }
  return text;
}

bool Cluster::Run(absl::Duration time, const std::function<bool()>& done) {
  const absl::Duration end = network_.now() + time;
  while (error_.empty()) {
    if (done && done()) return true;
    if (!network_.RunOne(end)) break;
  }
  return error_.empty() && (!done || done());
}

// --- The coordinator ---

void Cluster::StartCoordinator() { Start(coordinator_host_, false); }

void Cluster::StartSuccessor() {
  const int next = 1 - coordinator_host_;
  if (coordinators_[static_cast<size_t>(next)].machine) return;
  coordinator_host_ = next;
  Start(next, false);
}

void Cluster::Start(int host, bool foreign) {
  CoordinatorHost& at = coordinators_[static_cast<size_t>(host)];
  if (at.machine) return;
  const auto content = ReadJournal(foreign ? std::string_view() : std::string_view(journal_));
  if (!content.ok()) return Fail("the journal: " + content.status().ToString());
  if (!foreign) {
    journal_.resize(content->valid_bytes);
    // The former coordinator may have compacted its journal.
    if (content->state.records % 2 == 1) journal_ = EncodeJournalBase(content->state);
    journal_owner_ = content->state.incarnation + 1;
  }
  at.host = host;
  at.is_foreign = foreign;
  at.shadow = content->state;
  if (!foreign && commits_.empty() && at.shadow.generation() > 0)
    commits_[at.shadow.generation()] = at.shadow.commit;
  at.streams.clear();
  ElasticOptions elastic = options_.elastic;
  // Of the same job, begun anew, it ends who comes to it; of another one it is passed by.
  if (foreign && network_.Below(2) == 0) elastic.job = "other";
  at.machine = std::make_unique<Coordinator>(std::move(elastic), content->state,
                                             Id128::FromName(foreign ? "stranger" : "run"));
  Trace("coordinator starts on host {} with {} records", host, content->state.records);
  Tell(host, StartEvent{});
}

void Cluster::CrashCoordinator() {
  CoordinatorHost& at = coordinators_[static_cast<size_t>(coordinator_host_)];
  if (!at.machine) return;
  Trace("coordinator crashes");
  at.machine.reset();
  ++at.timer;
  network_.Crash(at.host);
}

void Cluster::ResumeCoordinators() {
  for (const int host : {0, 1}) network_.Resume(host);
}

void Cluster::Tell(int host, const CoordinatorEvent& event) {
  CoordinatorHost& at = coordinators_[static_cast<size_t>(host)];
  if (!at.machine || !error_.empty()) return;
  ++events_;
  const bool saves = at.machine->awaits_save();
  const size_t state = saves ? kSaving : static_cast<size_t>(at.machine->phase());
  ++coverage_.coordinator[state][IndexOf(event)];
  const auto* beat = std::get_if<AgentSaid>(&event);
  const bool is_dull = std::holds_alternative<TimerFired>(event) ||
                       (beat != nullptr && std::holds_alternative<control::Beat>(beat->message));
  if (traces_ && !is_dull) {
    const auto* said = std::get_if<AgentSaid>(&event);
    Trace("coordinator {} in {}: {} {}", at.machine->state().incarnation,
          kPhaseNames[static_cast<size_t>(at.machine->phase())],
          ClusterCoverage::CoordinatorEventName(IndexOf(event)),
          said != nullptr ? fmt::format("on stream {}", said->stream) : std::string());
  }
  if (beat != nullptr && saves && !at.is_foreign) {
    if (const auto* saved = std::get_if<control::Saved>(&beat->message); saved && saved->durable)
      promised_ = std::max(promised_, saved->step);
  }
  bool died = false;
  for (const CoordinatorAction& action : at.machine->Step(event, network_.now() + at.offset)) {
    Do(host, action, died);
    if (died || !error_.empty()) return;
  }
  const CoordinatorPhase phase = at.machine->phase();
  if (phase == CoordinatorPhase::kSteppedDown) {
    Trace("coordinator {} steps down", at.machine->state().incarnation);
    at.machine.reset();
    ++at.timer;
    network_.Crash(host);
    return;
  }
  if (phase != CoordinatorPhase::kDone && !at.has_timer)
    Fail(fmt::format("the coordinator waits without a timer in {}",
                     kPhaseNames[static_cast<size_t>(phase)]));
}

void Cluster::Do(int host, const CoordinatorAction& action, bool& died) {
  CoordinatorHost& at = coordinators_[static_cast<size_t>(host)];
  std::visit(
      Overloaded{
          [&](const AppendJournal& append) {
            if (Append(at, append.bytes)) return;
            died = true;
            if (at.machine) Tell(host, JournalRefused{"another coordinator owns the journal"});
          },
          [&](const SendToAgent& send) {
            CheckSend(at, send.message);
            if (at.streams.count(send.stream) == 0) return;
            network_.Send(send.stream, host, [this, stream = send.stream, message = send.message] {
              for (int node = 0; node < nodes(); ++node) {
                if (Agent(node).stream == stream) return Give(node, CoordinatorSaid{message});
              }
            });
          },
          [&](const CloseStream& close) {
            Trace("coordinator closes stream {}: {}", close.stream, close.reason);
            at.streams.erase(close.stream);
            network_.Close(close.stream, host);
          },
          [&](const ArmTimer& arm) {
            at.has_timer = true;
            const uint64_t serial = ++at.timer;
            const absl::Duration late = faulty_ && network_.Below(20) == 0 ? Some(3000) : Some(1);
            const absl::Duration in = arm.at - (network_.now() + at.offset);
            network_.RunOn(host, std::max(absl::ZeroDuration(), in) + late, [this, host, serial] {
              CoordinatorHost& fires = coordinators_[static_cast<size_t>(host)];
              if (fires.timer != serial || !fires.has_timer) return;
              fires.has_timer = false;
              Tell(host, TimerFired{1});
            });
          },
          [&](const DisarmTimer&) { at.has_timer = false; },
          [&](const RecordFault& record) {
            faults_.push_back(record.fault);
            if (record.fault.fault_class == FaultClass::kLinkCut &&
                !ever_cut_.contains(record.fault.node))
              Fail(fmt::format("{} is left out for a cut that does not touch it",
                               record.fault.node));
            Trace("fault: {}{}", record.fault.detail, record.fault.victim ? " (victim)" : "");
          },
          [&](const FinishJob& finish) {
            if (at.is_foreign) return;
            if (job_code_ && *job_code_ != finish.exit_code) Fail("the job ends twice");
            job_code_ = finish.exit_code;
            Trace("job ends with {}: {}", finish.exit_code, finish.reason);
          },
          [&](const Announce& announce) { Trace("says: {}", announce.line); },
          [&](const StepDown&) {},
      },
      action);
}

// False: the coordinator is dead, or is to be told that the journal is not its own.
bool Cluster::Append(CoordinatorHost& at, const std::string& bytes) {
  if (at.is_foreign) return true;
  uint64_t incarnation = 0;
  std::memcpy(&incarnation, bytes.data() + 16, sizeof(incarnation));
  if (incarnation != journal_owner_) return false;
  if (crash_in_append_) {
    journal_ += bytes.substr(0, std::min(*crash_in_append_, bytes.size() - 1));
    crash_in_append_.reset();
    Trace("coordinator crashes while it appends");
    at.machine.reset();
    ++at.timer;
    network_.Crash(at.host);
    return false;
  }
  journal_ += bytes;
  const CoordinatorState former = at.shadow;
  const auto content = ReadJournal(bytes, at.shadow);
  if (!content.ok() || content->valid_bytes != bytes.size()) {
    Fail("an append that is no record");
    return true;
  }
  at.shadow = content->state;
  CheckBudget(former, at.shadow);
  return true;
}

void Cluster::CheckBudget(const CoordinatorState& before, const CoordinatorState& after) {
  const int charged = before.history.crashes + before.history.others;
  const bool less = after.history.crashes + after.history.others < charged;
  const bool progress =
      after.step_committed > before.step_committed ||
      after.progress_base >= before.progress_base + options_.elastic.budget.progress_steps;
  if (less && !progress) Fail("a refund without progress");
  if (after.history.crashes > options_.elastic.budget.max_restarts + 1)
    Fail("charged beyond the budget");
}

// Nothing is told before its record is on disk.
void Cluster::CheckSend(const CoordinatorHost& at, const control::CoordinatorMessage& message) {
  if (at.is_foreign) {
    if (std::holds_alternative<control::Commit>(message)) Fail("a stranger commits");
    return;
  }
  if (std::holds_alternative<control::Welcome>(message)) {
    if (at.shadow.terms.terms.empty() && !at.shadow.ended) Fail("WELCOME before its terms' record");
  } else if (const auto* commit = std::get_if<control::Commit>(&message)) {
    control::Commit recorded = *commit;
    recorded.links.clear();  // each agent's own
    if (at.shadow.commit != recorded) Fail("COMMIT before its record");
    CheckCommit(*commit);
  } else if (const auto* prepare = std::get_if<control::Prepare>(&message)) {
    if (at.shadow.target != prepare->generation) Fail("PREPARE before its record");
  } else if (std::holds_alternative<control::Go>(message)) {
    if (at.shadow.stop_went == 0) Fail("GO before its record");
  } else if (std::holds_alternative<control::Exclude>(message)) {
    if (at.shadow.excluded.empty()) Fail("EXCLUDE before its record");
  } else if (const auto* done = std::get_if<control::Done>(&message)) {
    if (!at.shadow.ended && done->exit_code != 86) Fail("DONE before its record");
  }
}

void Cluster::CheckCommit(const control::Commit& commit) {
  const auto known = commits_.find(commit.generation);
  if (known != commits_.end()) {
    if (known->second.map != commit.map) Fail("two COMMITs of one generation");
    return;
  }
  if (!commits_.empty() && commit.generation != commits_.rbegin()->first + 1)
    Fail("a generation is missing");
  const RankMap& map = commit.map;
  int next = 0;
  std::set<std::pair<std::string, int>> places;
  for (const RankRun& run : map.runs) {
    if (run.first_rank != next || run.count <= 0) Fail("ranks with a gap");
    next += run.count;
    for (int i = 0; i < run.count; ++i) {
      if (!places.insert({run.node, run.first_slot + i}).second) Fail("two ranks share a slot");
    }
  }
  if (next != map.world) Fail("ranks that do not sum to the world");
  // Who enters may wait for any of them: all are there, but plain ones that are done for ever.
  for (int node = 0; node < nodes(); ++node) {
    for (int slot = 0; slot < capacity(node); ++slot) {
      const int rank = map.RankOf(fmt::format("n{:02}", node), slot);
      if (rank < 0) continue;
      const Worker& worker = At(node, slot);
      if (worker.joins && Agent(node).machine && worker.alive && worker.done)
        Fail(fmt::format("rank {} is to enter, and its work is done", rank));
      const bool is_left_out =
          std::binary_search(commit.finished.begin(), commit.finished.end(), rank);
      if (is_left_out && worker.joined)
        Fail(fmt::format("rank {} had joined, and is left out", rank));
    }
  }
  const auto reaches = [this](const control::ResumeCandidate& resume) {
    return resume.step >= promised_;
  };
  if (promised_ > 0 && std::none_of(commit.resume.begin(), commit.resume.end(), reaches))
    Fail(fmt::format("step {}, which was saved before the world changed, is lost", promised_));
  if (commit.lead_address != map.runs.front().node + ":2")
    Fail(fmt::format("the lead {} is at '{}'", map.runs.front().node, commit.lead_address));
  if (commit.finished.empty() && !FitsWorld(map.world, options_.elastic.membership))
    Fail(fmt::format("a world of {}", map.world));
  if (!commits_.empty() && map.world >= newest_commit().map.world) {
    for (const RankRun& run : newest_commit().map.runs) {
      for (int i = 0; i < run.count; ++i) {
        const int rank = map.RankOf(run.node, run.first_slot + i);
        if (rank >= 0 && rank != run.first_rank + i) Fail("renumbered without shrinking");
      }
    }
  }
  Trace("COMMIT of generation {}, world {}", commit.generation, map.world);
  commits_[commit.generation] = commit;
}

void Cluster::Accept(int host, int node, Network::Stream stream) {
  CoordinatorHost& at = coordinators_[static_cast<size_t>(host)];
  if (!at.machine) return network_.Break(stream);
  at.streams[stream] = true;
  network_.WhenDown(stream, host, [this, host, stream] {
    CoordinatorHost& loses = coordinators_[static_cast<size_t>(host)];
    if (loses.streams.erase(stream) > 0) Tell(host, StreamLost{stream});
  });
  (void)node;
}

// --- Agents ---

void Cluster::StartAgent(int node) {
  AgentHost& agent = Agent(node);
  if (agent.machine || agent.exit_code) return;
  agent.machine.emplace(
      NodeOptions{.elastic = options_.elastic,
                  .terms = options_.terms,
                  .node = fmt::format("n{:02}", node),
                  .incarnation = ++last_agent_,
                  .capacity = capacity(node),
                  .segment = node % 2 == 0 ? "even" : "odd",
                  .peer_address = fmt::format("n{:02}:2", node),
                  .measure_address = options_.measures ? fmt::format("n{:02}:3", node) : ""});
  agent.workers.assign(static_cast<size_t>(capacity(node)), {});
  agent.ranks.assign(static_cast<size_t>(capacity(node)), -1);
  agent.opened = agent.aborted = 0;
  agent.stream = 0;
  agent.ever_welcome = agent.misled = false;
  agent.held.clear();
  ++agent.starts;
  Trace("agent n{} starts", node);
  Give(node, StartEvent{});
}

// Its workers die with it: the guardian sees to that.
void Cluster::CrashAgent(int node) {
  AgentHost& agent = Agent(node);
  if (!agent.machine) return;
  Trace("agent n{} crashes", node);
  agent.machine.reset();
  ++agent.timer;
  for (Worker& worker : agent.workers) worker.alive = false;
  network_.Crash(host(node));
}

void Cluster::MisleadAgent(int node) {
  Start(2, true);
  if (Agent(node).ever_welcome) Agent(node).misled = true;
}

void Cluster::Give(int node, const NodeEvent& event) {
  AgentHost& agent = Agent(node);
  if (!agent.machine || !error_.empty()) return;
  ++events_;
  const size_t role = agent.machine->is_stopping()                                   ? 3
                      : agent.machine->aborted() >= agent.opened && agent.opened > 0 ? 2
                      : agent.opened == 0                                            ? 0
                                                                                     : 1;
  ++coverage_.node[role][IndexOf(event)];
  if (traces_ && !std::holds_alternative<TimerFired>(event))
    Trace("  n{} {}: {}", node, kRoleNames[role], ClusterCoverage::NodeEventName(IndexOf(event)));
  if (const auto* said = std::get_if<CoordinatorSaid>(&event)) {
    if (std::holds_alternative<control::Welcome>(said->message)) agent.ever_welcome = true;
    if (const auto* measure = std::get_if<control::Measure>(&said->message);
        measure != nullptr && !measure->address.empty()) {
      const control::Measured measured{measure->number, 900, "900 MB/s"};
      network_.RunOn(host(node), Some(1500), [this, node, measured] {
        if (Agent(node).machine) DoSend(node, measured);
      });
    }
  }
  const auto actions =
      agent.machine->Step(event, {.now = network_.now() + agent.offset, .newest_step = step_});
  for (const NodeAction& action : actions) {
    if (!agent.machine) return;
    Do(node, action);
  }
}

void Cluster::Do(int node, const NodeAction& action) {
  AgentHost& agent = Agent(node);
  std::visit(Overloaded{
                 [&](const OpenStream&) { Open(node); },
                 [&](const DropStream& drop) {
                   Trace("  n{} drops its stream: {}", node, drop.reason);
                   if (agent.stream != 0) network_.Close(agent.stream, host(node));
                   agent.stream = 0;
                   ++agent.attempt;
                 },
                 [&](const SendToCoordinator& send) { DoSend(node, send.message); },
                 [&](const SayHello& hello) {
                   const Network::Stream stream = agent.stream;
                   for (int to = 0; to < kCoordinatorHosts; ++to) {
                     if (coordinators_[static_cast<size_t>(to)].streams.count(stream) == 0)
                       continue;
                     network_.Send(stream, host(node), [this, to, stream, said = hello.hello] {
                       Tell(to, HelloReceived{stream, said, said.node, ""});
                     });
                   }
                 },
                 [&](const SpawnWorker& spawn) {
                   Trace("  n{} spawns in slot {}", node, spawn.slot);
                   DoSpawn(node, spawn);
                 },
                 [&](const AbortGeneration& abort) { DoAbort(node, abort); },
                 [&](const OpenGeneration& open) { DoOpen(node, open); },
                 [&](const TryCandidate& next) { Restore(node, next.generation, next.candidate); },
                 [&](const outlast::KillWorker& kill) { DoKill(node, kill); },
                 [&](const ForwardSignal& forward) {
                   Worker& worker = At(node, forward.slot);
                   if (worker.joined) Fail("a signal for a joined worker");
                   if (worker.ignores_term) return;
                   OnWorker(node, forward.slot, Some(3000), [this, node, forward] {
                     Die(node, forward.slot, {.signal = forward.signal});
                   });
                 },
                 [&](const CaptureStacks&) {},
                 [&](const AskStop& ask) { DoAskStop(node, ask); },
                 [&](const GoStop& go) { DoGoStop(node, go); },
                 [&](const PersistCommon&) {
                   if (Moody(2)) return;
                   network_.RunOn(host(node), Some(15'000), [this, node] {
                     Give(node, StopPersisted{step_, true});
                   });
                 },
                 [&](const WantSave& want) { DoSave(node, want); },
                 [&](const ArmTimer& arm) {
                   const uint64_t serial = ++agent.timer;
                   const absl::Duration late =
                       faulty_ && network_.Below(40) == 0 ? Some(2000) : Some(1);
                   const absl::Duration in = arm.at - (network_.now() + agent.offset);
                   network_.RunOn(host(node), std::max(absl::ZeroDuration(), in) + late,
                                  [this, node, serial] {
                                    if (Agent(node).timer == serial) Give(node, TimerFired{1});
                                  });
                 },
                 [&](const DisarmTimer&) { ++agent.timer; },
                 [&](const RecordFault&) {},
                 [&](const FinishJob& finish) { DoFinish(node, finish); },
             },
             action);
}

void Cluster::Open(int node) {
  AgentHost& agent = Agent(node);
  const int to = std::exchange(agent.misled, false) ? 2 : coordinator_host_;
  const uint64_t attempt = ++agent.attempt;
  network_.Open(
      host(node), to,
      [this, node, attempt](Network::Stream stream) {
        AgentHost& opens = Agent(node);
        // One that was given up, and is open after all.
        if (!opens.machine || opens.attempt != attempt) return network_.Close(stream, host(node));
        opens.stream = stream;
        network_.WhenDown(stream, host(node), [this, node, stream] {
          AgentHost& loses = Agent(node);
          if (loses.stream != stream) return;
          loses.stream = 0;
          Give(node, StreamDown{});
        });
        Give(node, StreamUp{});
      },
      [this, node, attempt] {
        if (Agent(node).attempt == attempt) Give(node, StreamDown{});
      },
      [this, to, node](Network::Stream stream) { Accept(to, node, stream); });
}

void Cluster::DoSend(int node, const control::AgentMessage& message) {
  AgentHost& agent = Agent(node);
  control::AgentMessage sent = message;
  if (auto* prepared = std::get_if<control::Prepared>(&sent)) {
    prepared->snapshots = agent.held;
    prepared->bootstrap = agent.machine->options().node + ":1";
  }
  if (auto* beat = std::get_if<control::Beat>(&sent)) LookAtLinks(node, *beat);
  const Network::Stream stream = agent.stream;
  if (stream == 0) return;
  for (int to = 0; to < kCoordinatorHosts; ++to) {
    if (coordinators_[static_cast<size_t>(to)].streams.count(stream) == 0) continue;
    network_.Send(stream, host(node), [this, to, stream, said = std::move(sent)] {
      if (coordinators_[static_cast<size_t>(to)].streams.count(stream) > 0)
        Tell(to, AgentSaid{stream, said});
    });
    return;
  }
}

void Cluster::CutBetween(int from, int to) {
  Trace("nothing passes from n{} to n{}", from, to);
  cut_between_.insert({from, to});
  for (const int node : {from, to}) ever_cut_.insert(fmt::format("n{:02}", node));
}

// A connection breaks at both its ends, whichever way is cut.
bool Cluster::IsCutBetween(int one, int other) const {
  return cut_between_.contains({one, other}) || cut_between_.contains({other, one});
}

void Cluster::LookAtLinks(int node, control::Beat& beat) {
  AgentHost& agent = Agent(node);
  const NodeAgent& machine = *agent.machine;
  const auto commit = commits_.find(machine.generation());
  if (commit == commits_.end() || machine.aborted() >= machine.generation()) return;
  const RankMap& map = commit->second.map;
  const std::string& lead = map.runs.front().node;
  const std::string& self = machine.options().node;
  if (!map.Has(self, machine.options().incarnation)) return;
  for (int other = 0; other < nodes(); ++other) {
    if (other == node || !Agent(other).machine) continue;
    const NodeOptions& peer = Agent(other).machine->options();
    if (!map.Has(peer.node, peer.incarnation)) continue;
    const bool is_cut = IsCutBetween(node, other);
    const bool is_watched =
        std::find(agent.links.begin(), agent.links.end(), peer.node) != agent.links.end();
    if (!is_watched && self != lead && peer.node != lead) continue;
    if (!is_cut) agent.met.insert(peer.node);
    if (!is_cut) continue;
    const bool is_unmet = is_watched && !agent.met.contains(peer.node);
    (is_unmet ? beat.unmet : beat.unreached).push_back(peer.node);
  }
}

void Cluster::DoSpawn(int node, const SpawnWorker& spawn) {
  Worker& worker = At(node, spawn.slot);
  if (worker.alive) Fail(fmt::format("two processes in slot {} of n{}", spawn.slot, node));
  ++spawns_;
  worker = {.process = spawn.incarnation,
            .alive = true,
            .joins = !options_.plain,
            .quiet = network_.now()};
  worker.ignores_abort = Moody();
  worker.ignores_term = Moody();
  worker.unkillable = Moody(40);
  const int slot = spawn.slot;
  if (worker.joins) {
    OnWorker(node, slot, Some(Moody(4) ? 200'000 : 2000), [this, node, slot] { Join(node, slot); });
  }
  if (Moody()) {
    OnWorker(node, slot, Some(4000), [this, node, slot] { Die(node, slot, {.code = 1}); });
  }
}

void Cluster::DoAbort(int node, const AbortGeneration& abort) {
  AgentHost& agent = Agent(node);
  if (abort.generation < agent.opened) Fail("aborts an older generation");
  agent.aborted = std::max(agent.aborted, abort.generation);
  if (const auto sealed = sealed_.find(abort.generation); sealed != sealed_.end()) {
    for (size_t slot = 0; slot < agent.ranks.size(); ++slot) {
      if (agent.ranks[slot] < 0 || agent.opened != abort.generation) continue;
      agent.held.push_back({{abort.generation, sealed->second},
                            agent.ranks[slot],
                            commits_.at(abort.generation).map.world});
    }
    if (agent.held.size() > 8) agent.held.erase(agent.held.begin(), agent.held.end() - 8);
  }
  for (int slot = 0; slot < capacity(node); ++slot) {
    const Worker& worker = At(node, slot);
    if (!worker.alive || worker.in == 0 || worker.ignores_abort) continue;
    OnWorker(node, slot, Some(500), [this, node, slot] { LeaveBody(node, slot); });
  }
}

void Cluster::DoOpen(int node, const OpenGeneration& open) {
  AgentHost& agent = Agent(node);
  if (open.commit.generation <= agent.opened) Fail("an older generation is opened");
  agent.opened = open.commit.generation;
  agent.ranks = open.ranks;
  agent.links.clear();
  for (const control::NodeAddress& link : open.commit.links) agent.links.push_back(link.node);
  if (commits_.at(agent.opened).map != open.commit.map) Fail("another map than was committed");
  for (int slot = 0; slot < capacity(node); ++slot) EnterIfOpen(node, slot);
  if (!open.commit.resume.empty()) Restore(node, open.commit.generation, open.commit.candidate);
}

void Cluster::Restore(int node, uint64_t generation, int candidate) {
  const bool ok = !std::exchange(fail_restore_, false);
  network_.RunOn(host(node), Some(Moody(8) ? 150'000 : 300),
                 [this, node, generation, candidate, ok] {
                   Give(node, RanksRestored{generation, candidate, ok, "chunk 3"});
                 });
}

// All ranks seal a step that none has reached, and it is written while they train on; a rank that
// dies, or an abort, ends the save.
void Cluster::DoSave(int node, const WantSave& want) {
  if (!options_.commits) {
    return network_.RunOn(host(node), Some(5), [this, node, number = want.number] {
      Give(node, WantedSaveEnded{number, false});
    });
  }
  if (std::exchange(lose_save_, false) || Moody(2)) return;
  const bool fails = std::exchange(fail_save_, false) || Moody(2);
  network_.RunOn(host(node), Some(3000), [this, node, number = want.number, fails, at = step_] {
    if (!Agent(node).machine) return;
    const bool ends = IsWhole() && Agent(node).machine->generation() == commits_.rbegin()->first &&
                      Agent(node).machine->aborted() < Agent(node).machine->generation();
    if (fails || !ends) return Give(node, WantedSaveEnded{number, false, 0, "no space"});
    const int64_t step = std::max(at + 1, step_);
    step_ = step;
    Give(node, SaveReported{{control::SaveOutcome::kCommitted, step, ""}});
    Give(node, WantedSaveEnded{number, true, step});
  });
}

void Cluster::DoKill(int node, const outlast::KillWorker& kill) {
  Worker& worker = At(node, kill.slot);
  if (!worker.alive || worker.process != kill.incarnation) return;
  const NodeAgent& machine = *Agent(node).machine;
  const bool survives =
      machine.rank(kill.slot) >= 0 && !machine.is_stopping() && worker.staged && !worker.doomed;
  worker.doomed = true;
  if (survives) Fail(fmt::format("a survivor on n{} is ended: {}", node, kill.reason));
  const bool hard = kill.how == KillHow::kKill;
  Trace("  n{} {} slot {}: {}", node, hard ? "kills" : "terminates", kill.slot, kill.reason);
  if (hard ? worker.unkillable : worker.ignores_term || worker.unkillable) return;
  OnWorker(node, kill.slot, Some(200), [this, node, slot = kill.slot, hard] {
    Die(node, slot, {.signal = hard ? SIGKILL : SIGTERM, .by_us = true});
  });
}

void Cluster::DoAskStop(int node, const AskStop& ask) {
  for (int slot = 0; slot < capacity(node); ++slot) {
    if (!At(node, slot).joined || Moody(2)) continue;
    OnWorker(node, slot, Some(500), [this, node, slot, asked = ask.step] {
      const uint64_t process = At(node, slot).process;
      FromWorker(node, slot, Some(20), [this, node, slot, process, asked, at = step_] {
        Give(node, StopAnswered{slot, process, at < asked, at, asked});
      });
    });
  }
}

void Cluster::DoGoStop(int node, const GoStop& go) {
  if (went_ != 0 && went_ != go.step) Fail("two steps to stop at");
  went_ = go.step;
  for (int slot = 0; slot < capacity(node); ++slot) {
    if (!At(node, slot).joined || Moody(4)) continue;
    OnWorker(node, slot, Some(1500), [this, node, slot, step = go.step] {
      Worker& worker = At(node, slot);
      if (worker.in == 0 || worker.done) return;
      worker.done = true;
      FromWorker(node, slot, Some(20), [this, node, slot, process = worker.process, step] {
        Give(node, WorkerStopped{slot, process, step});
      });
      if (!Moody()) OnWorker(node, slot, Some(2000), [this, node, slot] { Die(node, slot, {}); });
    });
  }
  if (Moody(2)) return;
  network_.RunOn(host(node), Some(6000), [this, node, step = go.step] {
    Give(node, StopPersisted{step, true});
  });
}

void Cluster::DoFinish(int node, const FinishJob& finish) {
  AgentHost& agent = Agent(node);
  Trace("  n{} ends with {}: {}", node, finish.exit_code, finish.reason);
  for (const Worker& worker : agent.workers) {
    if (worker.alive && !worker.unkillable)
      Fail(fmt::format("n{} ends while a worker lives", node));
  }
  const int code = finish.exit_code;
  const bool own = (code >= 80 && code <= 87) || code == 129 || code == 130;
  if (!own && (!job_code_ || *job_code_ != code))
    Fail(fmt::format("n{} ends with {}, the job with {}", node, code, job_code_.value_or(-1)));
  if (agent.stream != 0) network_.Close(agent.stream, host(node));
  agent.stream = 0;
  agent.exit_code = code;
  agent.machine.reset();
  ++agent.timer;
}

// --- Workers ---

// Does `act` later if the slot's worker is still the same process. Workers run on while the agent
// is paused, so it is not the agent's host that this runs on.
void Cluster::OnWorker(int node, int slot, absl::Duration delay, std::function<void()> act) {
  const uint64_t agent = Agent(node).machine->options().incarnation;
  network_.After(delay,
                 [this, node, slot, agent, process = At(node, slot).process, act = std::move(act)] {
                   const AgentHost& at = Agent(node);
                   if (!at.machine || at.machine->options().incarnation != agent) return;
                   const Worker& worker = at.workers[static_cast<size_t>(slot)];
                   if (worker.alive && worker.process == process) act();
                 });
}

// From the worker to its agent, in order.
void Cluster::FromWorker(int node, int slot, absl::Duration delay, std::function<void()> act) {
  Worker& worker = At(node, slot);
  worker.quiet = std::max(worker.quiet, network_.now() + delay);
  network_.RunOn(host(node), worker.quiet - network_.now(), std::move(act));
}

void Cluster::Join(int node, int slot) {
  const uint64_t process = At(node, slot).process;
  FromWorker(node, slot, Some(10), [this, node, slot, process] {
    if (At(node, slot).process == process) At(node, slot).joined = true;
    Give(node, WorkerJoined{slot, process});
  });
  OnWorker(node, slot, Some(Moody(4) ? 300'000 : 300),
           [this, node, slot] { Stage(node, slot, 0); });
}

void Cluster::Stage(int node, int slot, uint64_t left) {
  const uint64_t process = At(node, slot).process;
  FromWorker(node, slot, Some(10), [this, node, slot, process, left] {
    Worker& worker = At(node, slot);
    if (worker.alive && worker.process == process) {
      worker.staged = true;
      worker.left = left;
    }
    Give(node, WorkerStaged{slot, process, left});
    if (Agent(node).machine && worker.alive && worker.process == process) EnterIfOpen(node, slot);
  });
}

// The keeper's rule, as CommitGeneration states it.
void Cluster::EnterIfOpen(int node, int slot) {
  AgentHost& agent = Agent(node);
  Worker& worker = At(node, slot);
  const int rank = agent.ranks[static_cast<size_t>(slot)];
  if (!worker.alive || !worker.staged || agent.opened <= agent.aborted ||
      worker.left >= agent.opened || rank < 0)
    return;
  worker.staged = false;
  worker.in = agent.opened;
  const auto [at, is_new] =
      entered_.insert({{agent.opened, rank}, {node * 100 + slot, worker.process}});
  // A process may die and be replaced within the first generation only where it is plain.
  if (!is_new && at->second != std::make_pair(node * 100 + slot, worker.process))
    Fail(fmt::format("rank {} of generation {} is held twice", rank, agent.opened));
  const bool shrank = worker.rank >= 0 && worker.left != 0 && commits_.count(worker.left) > 0 &&
                      commits_.at(agent.opened).map.world < commits_.at(worker.left).map.world;
  if (worker.rank >= 0 && worker.rank != rank && !shrank && worker.left + 1 == agent.opened)
    Fail("a survivor got another rank");
  worker.rank = rank;
}

void Cluster::LeaveBody(int node, int slot) {
  if (!Agent(node).machine) return;
  Worker& worker = At(node, slot);
  if (!worker.alive || worker.in == 0 || worker.done) return;
  const uint64_t left = std::exchange(worker.in, 0);
  Stage(node, slot, left);
}

void Cluster::KillWorker(int node, int slot, ProcessEnd end) {
  if (!Agent(node).machine || !At(node, slot).alive) return;
  Trace("worker in slot {} of n{} dies: {}", slot, node, TextOf(end));
  Die(node, slot, end);
}

void Cluster::Die(int node, int slot, ProcessEnd end) {
  Worker& worker = At(node, slot);
  if (!worker.alive) return;
  const uint64_t process = worker.process;
  absl::Duration dying = Some(20);
  if (worker.in != 0 && end.signal != 0 && !end.by_us && network_.Below(2) == 0) {
    FromWorker(node, slot, Some(5), [this, node, slot, process, end] {
      if (At(node, slot).process == process) Give(node, WorkerDying{slot, process, end.signal});
    });
    dying = Some(100);
  }
  worker.in = 0;
  worker.staged = false;
  // Alive for the invariants until the agent hears of the end.
  const uint64_t agent = Agent(node).machine->options().incarnation;
  FromWorker(node, slot, dying, [this, node, slot, process, end, agent] {
    if (!Agent(node).machine || Agent(node).machine->options().incarnation != agent) return;
    Worker& dead = At(node, slot);
    if (!dead.alive || dead.process != process) return;
    dead.alive = false;
    Give(node, WorkerEnded{slot, process, end});
  });
}

void Cluster::GiveVerdict(int node, int slot, bool stopped) {
  if (!Agent(node).machine || network_.is_paused(host(node))) return;
  Trace("verdict on slot {} of n{}", slot, node);
  Give(node, VerdictGiven{slot, "hung", "", 1, stopped});
}

void Cluster::Signal(int node, int signal) {
  if (!Agent(node).machine) return;
  Trace("signal {} for agent n{}", signal, node);
  network_.RunOn(host(node), absl::ZeroDuration(),
                 [this, node, signal] { Give(node, StopAsked{signal}); });
}

void Cluster::StopJob(int signal) {
  network_.RunOn(coordinator_host_, absl::ZeroDuration(),
                 [this, host = coordinator_host_, signal] { Tell(host, StopAsked{signal}); });
}

void Cluster::ReportSave(int node, control::SaveOutcome outcome) {
  if (!Agent(node).machine || network_.is_paused(host(node))) return;
  Give(node, SaveReported{{outcome, step_, "x"}});
}

void Cluster::FinishWork(int node, int slot) {
  if (!Agent(node).machine) return;
  Worker& worker = At(node, slot);
  if (!worker.alive) return;
  if (worker.in != 0 && !worker.done) {
    worker.done = true;
    FromWorker(node, slot, Some(20), [this, node, slot, process = worker.process] {
      Give(node, WorkerFinished{slot, process});
    });
  }
  if (worker.in != 0 || !worker.joins)
    OnWorker(node, slot, Some(2000), [this, node, slot] { Die(node, slot, {}); });
}

void Cluster::FinishAllWork() {
  for (int node = 0; node < nodes(); ++node) {
    for (int slot = 0; slot < capacity(node); ++slot) FinishWork(node, slot);
  }
}

// Steps are made, sealed and committed while the newest generation is whole.
void Cluster::Train() {
  network_.After(absl::Milliseconds(400), [this] { Train(); });
  if (commits_.empty() || !IsWhole()) return;
  ++step_;
  sealed_[commits_.rbegin()->first] = step_;
  if (!options_.commits || step_ % 16 != 0) return;
  const RankRun& first = newest_commit().map.runs.front();
  for (int node = 0; node < nodes(); ++node) {
    const AgentHost& agent = Agent(node);
    if (agent.machine && agent.machine->options().node == first.node)
      ReportSave(node, control::SaveOutcome::kCommitted);
  }
}

bool Cluster::IsWhole() const {
  if (commits_.empty()) return false;
  const control::Commit& commit = newest_commit();
  for (int rank = 0; rank < commit.map.world; ++rank) {
    const RankRun& run = *commit.map.Find(rank);
    const int slot = run.first_slot + rank - run.first_rank;
    if (std::binary_search(commit.finished.begin(), commit.finished.end(), rank)) continue;
    const Coordinator* machine = current();
    if (machine != nullptr && machine->state().generation() == commit.generation &&
        machine->state().is_finished(rank))
      continue;
    bool holds = false;
    for (int node = 0; node < nodes(); ++node) {
      const AgentHost& agent = Agent(node);
      if (!agent.machine || agent.machine->options().node != run.node) continue;
      if (slot >= capacity(node)) continue;
      const Worker& worker = agent.workers[static_cast<size_t>(slot)];
      holds =
          worker.done || (worker.alive && (worker.in == commit.generation ||
                                           (!worker.joins && agent.opened == commit.generation)));
    }
    if (!holds) return false;
  }
  return true;
}

bool Cluster::AllAgentsAreOver() const {
  return std::none_of(agents_.begin(), agents_.end(),
                      [](const AgentHost& agent) { return agent.machine.has_value(); });
}

uint64_t Cluster::process(int node, int slot) const {
  return Agent(node).workers[static_cast<size_t>(slot)].process;
}

void Cluster::FaultsEnd() {
  Trace("no more faults");
  faulty_ = false;
  moody_one_in_ = 0;
  crash_in_append_.reset();
  network_.FaultsEnd();
  network_.Heal();
  cut_between_.clear();
  for (int at = 0; at < kCoordinatorHosts + nodes(); ++at) network_.Resume(at);
  StartCoordinator();
  for (int node = 0; node < nodes(); ++node) StartAgent(node);
}

}  // namespace outlast
