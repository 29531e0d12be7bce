// Coordinator and agents, the production machines, in a simulated cluster: hosts, streams, workers,
// a journal on a disk. Faults are given by the caller (a test's own, or a seeded schedule's); after
// each event the invariants of the design are looked at.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "outlast/elastic/coordinator.h"
#include "outlast/elastic/journal.h"
#include "outlast/elastic/node_agent.h"
#include "outlast/testing/sim_network.h"

namespace outlast {

// Which (state, event) pairs were seen.
struct ClusterCoverage {
  // Coordinator phases, and one that awaits a save; agents: 0 spare, 1 active, 2 preparing, 3
  // stopping.
  static constexpr size_t kPhases = 9, kRoles = 4;
  static constexpr size_t kCoordinatorEvents = 18, kNodeEvents = 30;
  std::array<std::array<int64_t, kCoordinatorEvents>, kPhases> coordinator{};
  std::array<std::array<int64_t, kNodeEvents>, kRoles> node{};
  static const char* PhaseName(size_t phase);
  static const char* RoleName(size_t role);
  static const char* CoordinatorEventName(size_t event);
  static const char* NodeEventName(size_t event);
};

struct ClusterOptions {
  ElasticOptions elastic;
  Terms terms = {{"-n", "1"}};  // of each agent
  std::vector<int> capacities;  // of the nodes
  testing::SimNetworkOptions network;
  bool plain = false;         // workers never join
  bool measures = false;      // agents measure their links
  bool commits = true;        // checkpoints are committed
  uint32_t moody_one_in = 0;  // workers that ignore an abort, or SIGTERM, or are slow or die young
};

class Cluster {
 public:
  using Network = testing::SimNetwork;

  Cluster(uint64_t seed, ClusterOptions options, ClusterCoverage& coverage);

  // --- What a test does ---
  void StartCoordinator();
  // A second one on the same journal, which the agents' name points to from now on.
  void StartSuccessor();
  void StartAgent(int node);
  void CrashCoordinator();
  // At its next append: the record's first `keep` bytes are on disk.
  void CrashCoordinatorInAppend(size_t keep) { crash_in_append_ = keep; }
  void CrashAgent(int node);
  void KillWorker(int node, int slot, ProcessEnd end);
  void GiveVerdict(int node, int slot, bool stopped);
  void Signal(int node, int signal);
  void StopJob(int signal);            // an operator asks the coordinator
  void LeaveBody(int node, int slot);  // kAborted, which nobody had asked for
  void ReportSave(int node, control::SaveOutcome outcome);
  void FailRestore() { fail_restore_ = true; }
  // The next save that the coordinator wants never ends, or fails.
  void LoseSave() { lose_save_ = true; }
  void FailSave() { fail_save_ = true; }
  int64_t step() const { return step_; }
  // Of the newest save that the coordinator heard to be durable before it changed the world.
  int64_t promised() const { return promised_; }
  void MisleadAgent(int node);  // its next stream leads to the coordinator of another run or job
  void PauseAgent(int node) { network_.Pause(host(node)); }
  void ResumeAgent(int node) { network_.Resume(host(node)); }
  void PauseCoordinator() { network_.Pause(coordinator_host_); }
  void ResumeCoordinators();
  void CutAgent(int node) { network_.Cut(host(node), coordinator_host_); }
  // Of agents that both reach the coordinator: what the one sends does not come to the other any
  // more, so they have no connection, and their beats say so where they should have one. What it
  // does to their workers is the test's.
  void CutBetween(int from, int to);
  void HealBetween() { cut_between_.clear(); }
  bool IsCutBetween(int one, int other) const;
  bool any_was_cut() const { return !ever_cut_.empty(); }
  // All is well from now on: whatever was stopped, cut or crashed comes back.
  void FaultsEnd();
  void FinishWork(int node, int slot);
  void FinishAllWork();

  // Runs for `time`, or until `done` holds. False when it did not hold in time.
  bool Run(absl::Duration time, const std::function<bool()>& done = nullptr);

  const std::string& journal() const { return journal_; }
  // What the disk holds before the coordinator starts.
  void SetJournal(std::string journal) { journal_ = std::move(journal); }

  // --- What it sees ---
  Network& network() { return network_; }
  const std::string& error() const { return error_; }
  int64_t events() const { return events_; }
  int nodes() const { return static_cast<int>(agents_.size()); }
  int capacity(int node) const { return options_.capacities[static_cast<size_t>(node)]; }
  const Coordinator* coordinator() const { return current(); }
  bool coordinator_is_up() const { return current() != nullptr; }
  bool has_agent(int node) const { return Agent(node).machine.has_value(); }
  const NodeAgent& agent(int node) const { return *Agent(node).machine; }
  std::optional<int> exit_code(int node) const { return Agent(node).exit_code; }
  std::optional<int> job_code() const { return job_code_; }
  // Every rank of the newest generation is in its body, or its work is done.
  bool IsWhole() const;
  bool AllAgentsAreOver() const;
  uint64_t process(int node, int slot) const;
  int spawns() const { return spawns_; }
  const control::Commit& newest_commit() const { return commits_.rbegin()->second; }
  std::vector<FaultRecord> faults() const { return faults_; }
  std::string Story() const;  // where it stands, in one line
  void StartTrace() { traces_ = true; }
  const std::vector<std::string>& trace() const { return trace_; }

 private:
  struct Worker {
    uint64_t process = 0;
    bool alive = false, joins = true, joined = false, staged = false, done = false;
    bool ignores_abort = false, ignores_term = false, unkillable = false;
    bool doomed = false;  // it was sent a signal
    uint64_t left = 0, in = 0;
    int rank = -1;  // in the body
    absl::Duration quiet;
  };
  struct AgentHost {
    std::optional<NodeAgent> machine;
    std::vector<Worker> workers;
    std::vector<int> ranks;  // by slot, of the newest generation that it opened
    uint64_t opened = 0, aborted = 0;
    Network::Stream stream = 0;
    uint64_t timer = 0, attempt = 0;
    bool ever_welcome = false, misled = false;
    std::optional<int> exit_code;
    absl::Duration offset;  // of its clock
    std::vector<control::HeldSnapshot> held;
    std::vector<std::string> links;  // that its newest COMMIT tells it to watch
    std::set<std::string> met;       // whom it has reached
    int starts = 0;
  };
  struct CoordinatorHost {
    std::unique_ptr<Coordinator> machine;
    CoordinatorState shadow;  // the fold of what it has appended
    std::map<Network::Stream, bool> streams;
    uint64_t timer = 0;
    bool has_timer = false;
    absl::Duration offset;
    int host = 0;
    bool is_foreign = false;
  };

  static constexpr int kCoordinatorHosts = 3;  // two, and a stranger's
  int host(int node) const { return kCoordinatorHosts + node; }
  AgentHost& Agent(int node) { return agents_[static_cast<size_t>(node)]; }
  const AgentHost& Agent(int node) const { return agents_[static_cast<size_t>(node)]; }
  Worker& At(int node, int slot) { return Agent(node).workers[static_cast<size_t>(slot)]; }
  const Coordinator* current() const {
    const auto& host = coordinators_[static_cast<size_t>(coordinator_host_)];
    return host.machine.get();
  }
  bool Moody(uint64_t factor = 1) {
    return moody_one_in_ != 0 && network_.Below(moody_one_in_ * factor) == 0;
  }
  absl::Duration Some(int64_t milliseconds) {
    return network_.UpTo(absl::Milliseconds(milliseconds));
  }
  void Fail(const std::string& what);
  template <typename... Args>
  void Trace(const char* format, Args... args);

  void Start(int host, bool foreign);
  void Tell(int host, const CoordinatorEvent& event);
  void Do(int host, const CoordinatorAction& action, bool& died);
  void Accept(int host, int node, Network::Stream stream);
  bool Append(CoordinatorHost& at, const std::string& bytes);
  void CheckSend(const CoordinatorHost& at, const control::CoordinatorMessage& message);
  void CheckCommit(const control::Commit& commit);
  void CheckBudget(const CoordinatorState& before, const CoordinatorState& after);

  void Give(int node, const NodeEvent& event);
  void Do(int node, const NodeAction& action);
  void Open(int node);
  void DoSend(int node, const control::AgentMessage& message);
  void LookAtLinks(int node, control::Beat& beat);
  void DoSpawn(int node, const SpawnWorker& spawn);
  void DoAbort(int node, const AbortGeneration& abort);
  void DoOpen(int node, const OpenGeneration& open);
  void DoKill(int node, const outlast::KillWorker& kill);
  void DoAskStop(int node, const AskStop& ask);
  void DoGoStop(int node, const GoStop& go);
  void DoFinish(int node, const FinishJob& finish);
  void Restore(int node, uint64_t generation, int candidate);
  void DoSave(int node, const WantSave& want);

  void OnWorker(int node, int slot, absl::Duration delay, std::function<void()> act);
  void FromWorker(int node, int slot, absl::Duration delay, std::function<void()> act);
  void Join(int node, int slot);
  void Stage(int node, int slot, uint64_t left);
  void EnterIfOpen(int node, int slot);
  void Die(int node, int slot, ProcessEnd end);
  void Train();

  ClusterOptions options_;
  ClusterCoverage& coverage_;
  Network network_;
  uint32_t moody_one_in_;
  std::array<CoordinatorHost, kCoordinatorHosts> coordinators_;
  int coordinator_host_ = 0;
  std::string journal_;
  uint64_t journal_owner_ = 0;
  std::optional<size_t> crash_in_append_;
  std::vector<AgentHost> agents_;
  uint64_t last_agent_ = 0;

  std::map<uint64_t, control::Commit> commits_;                           // by generation
  std::map<std::pair<uint64_t, int>, std::pair<int, uint64_t>> entered_;  // (generation, rank)
  std::map<uint64_t, int64_t> sealed_;  // generation -> step that all ranks have
  int64_t step_ = 0;
  std::optional<int> job_code_;
  int64_t went_ = 0;  // the step of a stop's GO
  std::vector<FaultRecord> faults_;
  std::set<std::pair<int, int>> cut_between_;  // one way
  std::set<std::string> ever_cut_;
  bool fail_restore_ = false, faulty_ = true;
  bool lose_save_ = false, fail_save_ = false;
  int64_t promised_ = 0;
  int spawns_ = 0;
  int64_t events_ = 0;
  std::string error_;
  bool traces_ = false;
  std::vector<std::string> trace_;
};

}  // namespace outlast
