#include "run/node_machine.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "base/error.h"
#include "base/overloaded.h"

namespace outlast {
namespace {

SaveReported Report(control::SaveOutcome outcome, int64_t step, const std::string& detail) {
  return {{.outcome = outcome, .step = step, .detail = detail}};
}

// What of the keeper's events goes to the coordinator as a report.
NodeEvent ToNode(const JobEvent& event) {
  using control::SaveOutcome;
  return std::visit(Overloaded{
                        [](const CheckpointCommitted& saved) -> NodeEvent {
                          return Report(SaveOutcome::kCommitted, saved.step, "");
                        },
                        [](const RestoreFailed& failed) -> NodeEvent {
                          return Report(SaveOutcome::kNothingRestores, 0, failed.detail);
                        },
                        [](const RootRefused& refused) -> NodeEvent {
                          return Report(SaveOutcome::kRefused, 0, refused.detail);
                        },
                        [](const RootLost& lost) -> NodeEvent {
                          return Report(SaveOutcome::kRootLost, 0, lost.detail);
                        },
                        [](const FinalSaveFailed& failed) -> NodeEvent {
                          return Report(SaveOutcome::kFinalSaveFailed, 0, failed.detail);
                        },
                        [](const auto& of_workers) -> NodeEvent { return of_workers; },
                    },
                    event);
}

std::vector<std::string> NodesOf(const RankMap& map) {
  std::vector<std::string> nodes;
  for (const RankRun& run : map.runs) {
    if (std::find(nodes.begin(), nodes.end(), run.node) == nodes.end()) nodes.push_back(run.node);
  }
  return nodes;
}

}  // namespace

class NodeMachine::Impl {
 public:
  Impl(NodeMachineOptions options, CoordinatorLink& link, Peers& peers)
      : options_(std::move(options)),
        link_(link),
        peers_(peers),
        agent_(WithAddress(options_.node, peers)) {}
  ~Impl() { link_.Listen({}); }

  void Listen(Tell tell);
  // The machine's actions for the keeper; its own are done.
  std::vector<JobAction> Step(const NodeEvent& event, const JobView& view);

  const NodeAgent& agent() const { return agent_; }
  Peers& peers() { return peers_; }

 private:
  static NodeOptions WithAddress(NodeOptions node, const Peers& peers) {
    node.peer_address = peers.address();
    return node;
  }

  void Give(NodeEvent event);
  void Do(NodeAction action, std::vector<JobAction>& rest);
  void Send(control::AgentMessage message);
  void Fill(control::Prepared& prepared);
  CommitGeneration Open(OpenGeneration open);
  void SaidByCoordinator(const control::CoordinatorMessage& message);
  void LinkIsUp();
  void LinkIsDown(const std::string& why);
  void Say(const std::string& line) const {
    if (options_.say) options_.say(line);
  }

  const NodeMachineOptions options_;
  CoordinatorLink& link_;
  Peers& peers_;
  NodeAgent agent_;
  Tell tell_;
  uint64_t group_ = 0;  // the generation whose peers this node is among
  // Held for the newest generation that this node prepared rank 0 for.
  uint64_t bootstrap_generation_ = 0;
  std::string bootstrap_;
  bool is_welcome_ = false;
  std::string said_down_;  // why the link is down, as people were told
};

// --- Events ---

void NodeMachine::Impl::Listen(Tell tell) {
  tell_ = std::move(tell);
  link_.Listen({.on_up = [this] { Give(StreamUp{}); },
                .on_down =
                    [this](const std::string& why) {
                      LinkIsDown(why);
                      Give(StreamDown{});
                    },
                .on_said =
                    [this](const control::CoordinatorMessage& message) {
                      SaidByCoordinator(message);
                      Give(CoordinatorSaid{message});
                    }});
}

void NodeMachine::Impl::Give(NodeEvent event) {
  tell_([this, event = std::move(event)](const JobView& view) { return Step(event, view); });
}

std::vector<JobAction> NodeMachine::Impl::Step(const NodeEvent& event, const JobView& view) {
  std::vector<JobAction> rest;
  for (NodeAction& action : agent_.Step(event, view)) Do(std::move(action), rest);
  if (group_ != 0 && agent_.generation() > group_) peers_.Leave(std::exchange(group_, 0));
  return rest;
}

void NodeMachine::Impl::SaidByCoordinator(const control::CoordinatorMessage& message) {
  if (std::holds_alternative<control::Welcome>(message)) LinkIsUp();
  if (const auto* refused = std::get_if<control::Refused>(&message))
    LinkIsDown("refused: " + refused->reason);
  if (const auto* excluded = std::get_if<control::Exclude>(&message))
    Say("the coordinator excludes this node: " + excluded->reason);
}

// --- People ---

void NodeMachine::Impl::LinkIsUp() {
  const bool was_down = !std::exchange(is_welcome_, true) && !said_down_.empty();
  said_down_.clear();
  if (was_down) Say("the coordinator is there");
}

void NodeMachine::Impl::LinkIsDown(const std::string& why) {
  const bool was_up = std::exchange(is_welcome_, false);
  if (agent_.is_over() || (!was_up && why == said_down_)) return;
  said_down_ = why;
  Say(fmt::format("no coordinator: {}{}", why,
                  agent_.generation() > 0 ? "; training goes on" : ""));
}

// --- Actions ---

void NodeMachine::Impl::Do(NodeAction action, std::vector<JobAction>& rest) {
  std::visit(
      Overloaded{
          // All by plain reference: the last one would take a better match away from const ones.
          [&](OpenStream&) { link_.Open(); },
          [&](DropStream& drop) {
            LinkIsDown(drop.reason);
            link_.Drop(drop.reason);
          },
          [&](SayHello& say) { link_.Hello(say.hello); },
          [&](SendToCoordinator& send) { Send(std::move(send.message)); },
          [&](OpenGeneration& open) {
            const control::Commit& commit = open.commit;
            if (!commit.resume.empty())
              Give(RanksRestored{commit.generation, commit.candidate, true, ""});
            rest.emplace_back(Open(std::move(open)));
          },
          [&](TryCandidate& next) {
            Give(RanksRestored{next.generation, next.candidate, true, ""});
          },
          [&](auto& of_workers) { rest.emplace_back(std::move(of_workers)); },
      },
      action);
}

void NodeMachine::Impl::Send(control::AgentMessage message) {
  if (auto* prepared = std::get_if<control::Prepared>(&message)) Fill(*prepared);
  link_.Send(message);
}

void NodeMachine::Impl::Fill(control::Prepared& prepared) {
  if (options_.snapshots) prepared.snapshots = options_.snapshots();
  bool holds_lead = false;
  for (int slot = 0; slot < agent_.options().capacity; ++slot)
    holds_lead = holds_lead || agent_.rank(slot) == 0;
  if (!holds_lead || !options_.bootstrap) return;
  if (bootstrap_generation_ != prepared.generation) {
    bootstrap_generation_ = prepared.generation;
    bootstrap_.clear();
    absl::StatusOr<std::string> held = options_.bootstrap(prepared.generation);
    if (held.ok()) {
      bootstrap_ = *std::move(held);
    } else {
      Say(fmt::format("no port for rank 0 of generation {}: {}", prepared.generation,
                      MessageOf(held.status())));
    }
  }
  prepared.bootstrap = bootstrap_;
}

CommitGeneration NodeMachine::Impl::Open(OpenGeneration open) {
  auto job = std::make_shared<const control::Commit>(std::move(open.commit));
  group_ = job->generation;
  peers_.Enter({.run_id = agent_.run_id(),
                .generation = job->generation,
                .self = agent_.options().node,
                .lead = job->map.runs.front().node,
                .nodes = NodesOf(job->map),
                .lead_address = job->lead_address});
  CommitGeneration commit{.generation = job->generation, .members = {}};
  for (size_t slot = 0; slot < open.ranks.size(); ++slot) {
    const int rank = open.ranks[slot];
    const bool is_done = std::binary_search(job->finished.begin(), job->finished.end(), rank);
    if (rank >= 0 && !is_done) commit.members.push_back(static_cast<int>(slot));
  }
  commit.ranks = std::move(open.ranks);
  commit.job = std::move(job);
  return commit;
}

// --- The face ---

NodeMachine::NodeMachine(NodeMachineOptions options, CoordinatorLink& link, Peers& peers)
    : impl_(std::make_unique<Impl>(std::move(options), link, peers)) {}
NodeMachine::~NodeMachine() = default;
void NodeMachine::Listen(Tell tell) { impl_->Listen(std::move(tell)); }
std::vector<JobAction> NodeMachine::Step(const JobEvent& event, const JobView& view) {
  return impl_->Step(ToNode(event), view);
}
int NodeMachine::slots() const { return impl_->agent().options().capacity; }
int NodeMachine::rank(int slot) const { return impl_->agent().rank(slot); }
int NodeMachine::world() const { return impl_->agent().world(); }
Id128 NodeMachine::run_id() const { return impl_->agent().run_id(); }
Peers* NodeMachine::peers() { return &impl_->peers(); }
std::string NodeMachine::node() const { return impl_->agent().options().node; }

}  // namespace outlast
