// What it costs to lose an agent, a coordinator, or a rank whose peer ignores SIGTERM. Agents of
// one machine, each at a loopback address of its own, stand for nodes.
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>

#include "base/error.h"
#include "base/socket.h"
#include "figures/figures.h"
#include "figures/nodes_page.h"
#include "outlast/base/clock.h"
#include "outlast/base/memory.h"
#include "tests/support/piped_process.h"

namespace outlast::bench {
namespace {

using testing::PipedProcess;

constexpr absl::Duration kWithin = absl::Seconds(60);
constexpr double kGraceMs = 500;  // of the stubborn ones
constexpr double kRejoinGraceMs = 10'000;

template <typename Condition>
bool WaitFor(Condition condition, absl::Duration within = kWithin) {
  const absl::Duration deadline = Clock::Real().Uptime() + within;
  while (!condition()) {
    if (Clock::Real().Uptime() > deadline) return false;
    Clock::Real().SleepFor(absl::Microseconds(200));
  }
  return true;
}

double MillisBetween(int64_t from_ns, int64_t to_ns) {
  return static_cast<double>(to_ns - from_ns) / 1e6;
}

absl::Status DidNot(std::string_view what, const std::string& said) {
  return Error(absl::StatusCode::kDeadlineExceeded, "{}:\n{}", what,
               said.substr(said.size() - std::min<size_t>(said.size(), 1500)));
}

// A folder with a page that its workers write to.
class Workers {
 public:
  Workers(const Settings& settings, const std::string& name)
      : folder_(settings.folder + "/" + name), trainer_(settings.nodes_trainer) {
    std::filesystem::create_directories(folder_);
    const UniqueFd file(open(page_path().c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (ftruncate(file.get(), sizeof(NodesPage)) != 0) return;
    if (auto memory = Mapping::Shared(file.get(), sizeof(NodesPage)); memory.ok())
      memory_ = *std::move(memory);
  }
  ~Workers() { std::filesystem::remove_all(folder_); }
  Workers(const Workers&) = delete;

  const std::string& folder() const { return folder_; }
  std::string page_path() const { return folder_ + "/page"; }
  bool is_ready() const { return memory_.size() != 0; }
  std::span<NodeCell> cells() const { return reinterpret_cast<NodesPage*>(memory_.data())->cells; }
  std::vector<std::string> Command(const std::string& mode) const {
    return {trainer_, page_path(), mode};
  }
  // All ranks have made a step in a generation from `first` on, and as many more.
  bool AllTrain(uint64_t first, int64_t more = 0) const {
    if (!WaitFor([&] {
          return std::ranges::all_of(
              cells(), [&](const NodeCell& cell) { return cell.generation >= first; });
        }))
      return false;
    std::vector<int64_t> goals;
    for (const NodeCell& cell : cells()) goals.push_back(cell.steps + more);
    return WaitFor([&] {
      for (size_t i = 0; i < goals.size(); ++i)
        if (cells()[i].steps < goals[i]) return false;
      return true;
    });
  }
  int64_t LastFirstStep() const {
    int64_t last = 0;
    for (const NodeCell& cell : cells()) last = std::max<int64_t>(last, cell.first_step_ns);
    return last;
  }

 private:
  const std::string folder_, trainer_;
  Mapping memory_;
};

// A port that was free a moment ago.
absl::StatusOr<std::string> FreeAddress() {
  OUTLAST_ASSIGN_OR_RETURN(const SocketAddress any, NumericAddress({"127.0.0.1", 0}));
  OUTLAST_ASSIGN_OR_RETURN(const UniqueFd socket, ListenOn(any));
  OUTLAST_ASSIGN_OR_RETURN(const SocketAddress at, SocketAddress::Local(socket.get()));
  return at.host_port().text();
}

// Two nodes of two ranks and perhaps a spare.
class Cluster {
 public:
  Cluster(const Settings& settings, const std::string& name, std::string coordinator)
      : tool_(settings.tool), workers(settings, name), coordinator_(std::move(coordinator)) {}

  void StartAgent(int k, int spares) {
    const std::string number = std::to_string(k);
    std::vector<std::string> command = {tool_,
                                        "run",
                                        "-n",
                                        "2",
                                        "--nnodes",
                                        "2",
                                        "--spares",
                                        std::to_string(spares),
                                        "--job",
                                        "outage",
                                        "--coordinator",
                                        coordinator_,
                                        "--node",
                                        "n" + number,
                                        "--node-rank",
                                        number,
                                        "--advertise",
                                        "127.0.0." + number,
                                        "--run-dir",
                                        workers.folder() + "/runs",
                                        "--last-call",
                                        "0.5",
                                        "--"};
    for (const std::string& word : workers.Command("train")) command.push_back(word);
    agents[k] = std::make_unique<PipedProcess>(command);
  }
  // A process of its own; again at the same address and journal after a kill.
  bool StartCoordinator() {
    lead = std::make_unique<PipedProcess>(std::vector<std::string>{
        tool_, "coordinator", "--job", "outage", "--journal", workers.folder() + "/journal",
        "--nnodes", "2", "-n", "2", "--listen", coordinator_, "--last-call", "0.5"});
    return !lead->LineWith("coordinator of job outage at ", kWithin).empty();
  }
  std::string Said() const {
    std::string all;
    for (const auto& [k, agent] : agents) all += agent->seen();
    return all;
  }
  // The leader has judged the loss of a node.
  bool LossIsKnown() const {
    std::ifstream events(workers.folder() + "/runs/latest-n1/events.jsonl");
    const std::string all{std::istreambuf_iterator<char>(events), {}};
    return all.find("\"job_fault\"") != std::string::npos;
  }

 private:
  const std::string tool_;

 public:
  Workers workers;
  std::map<int, std::unique_ptr<PipedProcess>> agents;
  std::unique_ptr<PipedProcess> lead;

 private:
  const std::string coordinator_;
};

struct NodeLoss {
  double from_kill_ms, from_known_ms;
};

absl::StatusOr<NodeLoss> LoseNode(const Settings& settings, int round) {
  OUTLAST_ASSIGN_OR_RETURN(const std::string address, FreeAddress());
  Cluster cluster(settings, "node-lost-" + std::to_string(round), address);
  for (const int k : {1, 2, 3}) cluster.StartAgent(k, 1);
  if (!cluster.workers.is_ready() || !cluster.workers.AllTrain(1, 50))
    return DidNot("the nodes did not train", cluster.Said());
  const int64_t killed_ns = MonotonicNanos();
  cluster.agents.at(2)->Kill();
  if (!WaitFor([&] { return cluster.LossIsKnown(); }))
    return DidNot("the loss was not noticed", cluster.Said());
  const int64_t known_ns = MonotonicNanos();
  if (!cluster.workers.AllTrain(2)) return DidNot("the spare did not go on", cluster.Said());
  const int64_t back_ns = cluster.workers.LastFirstStep();
  return NodeLoss{MillisBetween(killed_ns, back_ns), MillisBetween(known_ns, back_ns)};
}

absl::Status MeasureNodeLost(const Settings& settings, Report& report) {
  Figure known{.name = "restart.node_lost", .unit = "ms", .goal = 500};
  Figure killed{.name = "restart.node_lost_from_kill", .unit = "ms", .goal = kRejoinGraceMs + 500};
  for (int round = 0; round < (settings.smoke ? 1 : 5); ++round) {
    OUTLAST_ASSIGN_OR_RETURN(const NodeLoss loss, LoseNode(settings, round));
    known.samples.push_back(loss.from_known_ms);
    killed.samples.push_back(loss.from_kill_ms);
  }
  killed.limit = Reference{"the time in which it may come back", kRejoinGraceMs};
  report.Add(known);
  report.Add(killed);
  return absl::OkStatus();
}

struct Outage {
  double steps_lost, pace;  // steps a second beside those before
};

// Steps that a rank made twice, or that another process has to make: all of a generation that
// ended.
absl::StatusOr<Outage> LoseCoordinator(const Settings& settings, int round) {
  constexpr absl::Duration kAway = absl::Seconds(2);
  OUTLAST_ASSIGN_OR_RETURN(const std::string address, FreeAddress());
  Cluster cluster(settings, "coordinator-" + std::to_string(round), address);
  if (!cluster.StartCoordinator()) return DidNot("no coordinator", cluster.lead->seen());
  for (const int k : {1, 2}) cluster.StartAgent(k, 0);
  if (!cluster.workers.AllTrain(1, 50)) return DidNot("the nodes did not train", cluster.Said());

  NodeCell& cell = cluster.workers.cells()[0];
  const auto steps_in = [&](absl::Duration time) {
    const int64_t before = cell.steps;
    Clock::Real().SleepFor(time);
    return static_cast<double>(cell.steps - before);
  };
  const double steps_before = steps_in(kAway);
  std::vector<int32_t> pids;
  for (const NodeCell& one : cluster.workers.cells()) pids.push_back(one.pid);
  const int64_t at_kill = cell.steps;
  cluster.lead->Kill();
  const double steps_away = steps_in(kAway);
  if (!cluster.StartCoordinator()) return DidNot("it did not come back", cluster.lead->seen());
  for (const int k : {1, 2}) {
    if (cluster.agents.at(k)->LineWith("the coordinator is there", kWithin).empty())
      return DidNot("the agents did not find it", cluster.Said());
  }
  if (!cluster.workers.AllTrain(1, 50)) return DidNot("the training stands", cluster.Said());
  Outage outage{0, steps_away / steps_before};
  for (size_t rank = 0; rank < pids.size(); ++rank) {
    const NodeCell& one = cluster.workers.cells()[rank];
    if (one.pid != pids[rank] || one.generation != 1)
      outage.steps_lost = static_cast<double>(at_kill);
  }
  return outage;
}

absl::Status MeasureCoordinatorLost(const Settings& settings, Report& report) {
  Figure lost{.name = "coordinator.steps_lost", .unit = "steps", .goal = 0};
  Figure pace{.name = "coordinator.outage_pace", .unit = "x", .goal = 0.9, .sense = Goal::kAtLeast};
  for (int round = 0; round < (settings.smoke ? 1 : 5); ++round) {
    OUTLAST_ASSIGN_OR_RETURN(const Outage outage, LoseCoordinator(settings, round));
    lost.samples.push_back(outage.steps_lost);
    pace.samples.push_back(outage.pace);
  }
  report.Add(lost);
  report.Add(pace);
  return absl::OkStatus();
}

// Milliseconds from kill -9 of an agent until nothing of its workers lives, helpers that hid
// included.
absl::StatusOr<double> KillAgent(const Settings& settings, int round) {
  const std::string folder = settings.folder + "/agent-" + std::to_string(round);
  std::filesystem::create_directories(folder);
  const std::string pids_path = folder + "/pids";
  const std::string script =
      "echo $$ >>$P; sleep 300 & echo $! >>$P; setsid sleep 301 & echo $! >>$P;"
      "(setsid sh -c 'sleep 302 & echo $! >>'$P);"
      "(setsid env -i PATH=/usr/bin:/bin P=$P sh -c '(sleep 303 & echo $! >>$P)');"
      "echo up; wait; sleep 300";
  PipedProcess agent({"/usr/bin/env", "P=" + pids_path, settings.tool, "run", "-n", "2",
                      "--run-dir", folder + "/runs", "--", "/bin/sh", "-c", script});
  for (int worker = 0; worker < 2; ++worker) {
    if (agent.LineWith("up", kWithin).empty()) return DidNot("no workers", agent.seen());
  }
  std::ifstream file(pids_path);
  const std::vector<pid_t> pids{std::istream_iterator<pid_t>(file), {}};
  const int64_t killed_ns = MonotonicNanos();
  agent.Kill();
  const auto is_gone = [](pid_t pid) { return kill(pid, 0) != 0; };
  if (pids.size() != 10 || !WaitFor([&] { return std::ranges::all_of(pids, is_gone); }))
    return DidNot("helpers that live on", agent.seen());
  return MillisBetween(killed_ns, MonotonicNanos());
}

absl::Status MeasureAgentKilled(const Settings& settings, Report& report) {
  Figure figure{.name = "agent.kill_to_no_orphan", .unit = "ms", .goal = 1000};
  for (int round = 0; round < (settings.smoke ? 2 : 20); ++round) {
    OUTLAST_ASSIGN_OR_RETURN(const double took, KillAgent(settings, round));
    figure.samples.push_back(took);
  }
  report.Add(figure);
  return absl::OkStatus();
}

absl::Status MeasureTermIgnored(const Settings& settings, Report& report) {
  Figure figure{.name = "restart.term_ignored", .unit = "ms", .goal = kGraceMs + 50};
  for (int round = 0; round < (settings.smoke ? 1 : 10); ++round) {
    Workers workers(settings, "stubborn-" + std::to_string(round));
    std::vector<std::string> command = {settings.tool, "run",
                                        "-n",          "2",
                                        "--grace",     std::to_string(kGraceMs / 1e3),
                                        "--run-dir",   workers.folder() + "/runs",
                                        "--"};
    for (const std::string& word : workers.Command("stubborn")) command.push_back(word);
    if (!workers.is_ready() || !TimeCommand(command))
      return Error(absl::StatusCode::kInternal, "the job did not end well");
    const auto cells = workers.cells();
    figure.samples.push_back(MillisBetween(
        cells[1].failed_ns, std::max<int64_t>(cells[0].began_ns[1], cells[1].began_ns[1])));
  }
  figure.limit = Reference{"the grace", kGraceMs};
  figure.peer = settings.PeerOf(figure.name);
  report.Add(figure);
  return absl::OkStatus();
}

}  // namespace

void MeasureOutage(const Settings& settings, Report& report) {
  report.Measure({"restart.term_ignored"}, [&] { return MeasureTermIgnored(settings, report); });
  report.Measure({"agent.kill_to_no_orphan"}, [&] { return MeasureAgentKilled(settings, report); });
  if (settings.agent_streams.empty()) return;  // built without gRPC
  report.Measure({"restart.node_lost", "restart.node_lost_from_kill"},
                 [&] { return MeasureNodeLost(settings, report); });
  report.Measure({"coordinator.steps_lost", "coordinator.outage_pace"},
                 [&] { return MeasureCoordinatorLost(settings, report); });
}

}  // namespace outlast::bench
