#include "run/node_machine.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <utility>
#include <variant>

#include "base/error.h"
#include "base/overloaded.h"
#include "outlast/base/clock.h"
#include "outlast/elastic/exit_code.h"

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

// Each reason once, and once a minute while it comes again. Two are the same that differ in numbers
// alone: a port or an incarnation is another one each time.
class Repeats {
 public:
  bool IsDue(const std::string& reason, absl::Duration now) {
    constexpr absl::Duration kPause = absl::Minutes(1);
    std::erase_if(said_, [&](const auto& said) { return now - said.second >= kPause; });
    return said_.emplace(WithoutNumbers(reason), now).second;
  }
  void Forget() { said_.clear(); }

 private:
  static std::string WithoutNumbers(const std::string& reason) {
    const auto in_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
    std::string text;
    for (size_t i = 0; i < reason.size();) {
      const size_t begin = i;
      while (i < reason.size() && in_word(reason[i])) ++i;
      if (i == begin) {
        text += reason[i++];
        continue;
      }
      const std::string word = reason.substr(begin, i - begin);
      text += word.find_first_of("0123456789") == std::string::npos ? word : "#";
    }
    return text;
  }
  std::map<std::string, absl::Duration> said_;
};

}  // namespace

class NodeMachine::Impl {
 public:
  Impl(NodeMachineOptions options, CoordinatorLink& link, Peers& peers)
      : options_(std::move(options)),
        link_(link),
        peers_(peers),
        agent_(WithAddress(options_.node, peers)) {}
  ~Impl() {
    link_.Listen({});
    peers_.Listen(kPeerLinks, {});
  }

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
  void Fill(control::Beat& beat) const;
  CommitGeneration Open(OpenGeneration open);
  void SaidByCoordinator(const control::CoordinatorMessage& message);
  void Measure(const control::Measure& measure);
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
  // Of those that it should reach: since when it does not.
  std::map<std::string, absl::Duration> unreached_;
  std::set<std::string> links_;  // of them those to other followers
  std::set<std::string> met_;    // whom it has reached, in any generation
  // Held for the newest generation that this node prepared rank 0 for.
  uint64_t bootstrap_generation_ = 0;
  std::string bootstrap_;
  bool is_welcome_ = false;
  bool said_down_ = false;  // that the link is down, to people
  std::string refusal_;     // the newest
  std::string last_why_;    // that the link is down
  Repeats reasons_;
  absl::Duration now_;
  const std::shared_ptr<const bool> alive_ = std::make_shared<const bool>(true);
};

// --- Events ---

void NodeMachine::Impl::Listen(Tell tell) {
  tell_ = std::move(tell);
  link_.Listen({.on_up = [this] { Give(StreamUp{}); },
                .on_down =
                    [this](const std::string& why) {
                      tell_([this, why](const JobView& view) {
                        now_ = view.now;
                        LinkIsDown(why);
                        return Step(StreamDown{}, view);
                      });
                    },
                .on_said =
                    [this](const control::CoordinatorMessage& message) {
                      SaidByCoordinator(message);
                      Give(CoordinatorSaid{message});
                    }});
  peers_.Listen(kPeerLinks, {.on_up =
                                 [this](const std::string& node) {
                                   unreached_.erase(node);
                                   met_.insert(node);
                                 },
                             .on_down =
                                 [this](const std::string& node, const std::string&) {
                                   unreached_.try_emplace(node, Clock::Real().Uptime());
                                 }});
}

void NodeMachine::Impl::Give(NodeEvent event) {
  tell_([this, event = std::move(event)](const JobView& view) { return Step(event, view); });
}

std::vector<JobAction> NodeMachine::Impl::Step(const NodeEvent& event, const JobView& view) {
  std::vector<JobAction> rest;
  now_ = view.now;
  for (NodeAction& action : agent_.Step(event, view)) Do(std::move(action), rest);
  if (group_ != 0 && agent_.generation() > group_) peers_.Leave(std::exchange(group_, 0));
  return rest;
}

void NodeMachine::Impl::SaidByCoordinator(const control::CoordinatorMessage& message) {
  if (std::holds_alternative<control::Welcome>(message)) LinkIsUp();
  // It is told when the agent drops the stream for it, once.
  if (const auto* refused = std::get_if<control::Refused>(&message)) refusal_ = refused->reason;
  if (const auto* measure = std::get_if<control::Measure>(&message); measure && options_.measure)
    Measure(*measure);
  if (const auto* excluded = std::get_if<control::Exclude>(&message))
    Say("the coordinator excludes this node: " + excluded->reason);
}

void NodeMachine::Impl::Measure(const control::Measure& measure) {
  options_.measure(measure, [this, alive = std::weak_ptr<const bool>(alive_)](
                                const control::Measured& measured) {
    if (!alive.expired() && is_welcome_) link_.Send(measured);
  });
}

// --- People ---

void NodeMachine::Impl::LinkIsUp() {
  const bool was_down = !std::exchange(is_welcome_, true) && said_down_;
  said_down_ = false;
  reasons_.Forget();
  if (was_down) Say("the coordinator is there");
}

void NodeMachine::Impl::LinkIsDown(const std::string& why) {
  const bool was_up = std::exchange(is_welcome_, false);
  last_why_ = why;
  // What ends the agent is its last line.
  if (agent_.is_over() || (!reasons_.IsDue(why, now_) && !was_up)) return;
  said_down_ = true;
  const bool trains = agent_.generation() > 0 && !agent_.is_stopping();
  Say(fmt::format("{}: {}{}", why == refusal_ ? "refused" : "no coordinator", why,
                  trains ? "; training goes on" : ""));
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
          [&](FinishJob& finish) {
            const bool is_alone = finish.exit_code == ExitCodeOf(JobOutcome::kNoQuorum);
            if (is_alone && !is_welcome_ && !last_why_.empty()) finish.reason += ": " + last_why_;
            rest.emplace_back(std::move(finish));
          },
          [&](auto& of_workers) { rest.emplace_back(std::move(of_workers)); },
      },
      action);
}

void NodeMachine::Impl::Send(control::AgentMessage message) {
  if (auto* prepared = std::get_if<control::Prepared>(&message)) Fill(*prepared);
  if (auto* beat = std::get_if<control::Beat>(&message)) Fill(*beat);
  link_.Send(message);
}

void NodeMachine::Impl::Fill(control::Beat& beat) const {
  if (group_ == 0 || group_ != agent_.generation() || agent_.aborted() >= group_) return;
  const absl::Duration due = Clock::Real().Uptime() - agent_.options().elastic.beat_loss;
  for (const auto& [node, since] : unreached_) {
    if (since > due) continue;
    const bool is_unmet = links_.contains(node) && !met_.contains(node);
    (is_unmet ? beat.unmet : beat.unreached).push_back(node);
  }
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
  unreached_.clear();
  links_.clear();
  const std::string& self = agent_.options().node;
  const std::string& lead = job->map.runs.front().node;
  for (const std::string& node : NodesOf(job->map)) {
    if (node != self && (self == lead || node == lead)) unreached_[node] = Clock::Real().Uptime();
  }
  PeerGroup group{.run_id = agent_.run_id(),
                  .generation = job->generation,
                  .self = self,
                  .lead = lead,
                  .nodes = NodesOf(job->map),
                  .lead_address = job->lead_address,
                  .links = {}};
  for (const auto& [node, address] : job->links) {
    group.links.push_back({node, address});
    links_.insert(node);
    unreached_[node] = Clock::Real().Uptime();
  }
  peers_.Enter(group);
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
