#include "launch/node_side.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/plain_number.h"
#include "base/socket.h"
#include "control/agent_link.h"
#include "control/endpoint.h"
#include "control/etcd_keys.h"
#include "control/load_transport.h"
#include "outlast/base/status.h"
#include "run/node_machine.h"
#include "run/tcp_peers.h"

namespace outlast {
namespace {

uint64_t IncarnationOf(const Id128& agent) {
  uint64_t number = 0;
  std::memcpy(&number, agent.bytes.data(), sizeof number);
  return number | 1;  // 0: none
}

ElasticOptions ElasticOf(const LaunchOptions& options) {
  const NodesOptions& nodes = *options.nodes;
  const int slots = options.job.world;
  ElasticOptions elastic;
  elastic.job = options.job_id;
  elastic.budget = options.job;
  elastic.membership = MembershipOf(options.job, slots, nodes.count);
  elastic.spare_slots = nodes.spares * slots;
  elastic.last_call = nodes.last_call;
  elastic.join = nodes.join;
  elastic.exclude_for = nodes.exclude_for;
  elastic.peer_rate_floor = nodes.preflight_peer_rate.floor;
  elastic.peer_rate_share = nodes.preflight_peer_rate.share;
  return elastic;
}

std::string CommandText(const LaunchOptions& options) {
  const char* how = options.interpreter == Interpreter::kModule ? "-m "
                    : options.interpreter == Interpreter::kNone ? "--no-python "
                                                                : "";
  return how + QuotedCommand(options.command);
}

// What a node may have of its own is not among them: its name, addresses, files, CPUs, how long it
// waits.
Terms TermsOf(const LaunchOptions& options) {
  const auto is_given = [](std::string flag, bool value) {
    return MakeTerm(std::move(flag), value ? "given" : "not given");
  };
  Terms terms = {MakeTerm("the command", CommandText(options)), is_given("--fresh", options.fresh),
                 is_given("--take-over", options.take_over)};
  terms.push_back(MakeTerm("--restore-from", options.start.text()));
  terms.push_back(MakeTerm("--template", options.template_command.empty()
                                             ? "not given"
                                             : QuotedCommand(options.template_command)));
  const NodesOptions& nodes = *options.nodes;
  for (Term& term : JobTerms(options.job, options.job.world, nodes.count, nodes.spares))
    terms.push_back(std::move(term));
  return terms;
}

// Connections between agents are proven by the token alone.
absl::Status CheckTrust(const NodesOptions& nodes, const std::string& address) {
  if (IsLoopback(address) || !nodes.trust.token.empty() || nodes.trust.allow_strangers)
    return absl::OkStatus();
  return Error(absl::StatusCode::kFailedPrecondition,
               "listen at {}: others than this machine reach it, so a job token is wanted "
               "(--token-file), or --allow-strangers",
               address);
}

// Of several servers of etcd the first one that there is a way to.
absl::StatusOr<std::string> AddressTowardsAll(const NodesOptions& nodes) {
  std::vector<std::string> endpoints = nodes.etcd.endpoints;
  if (endpoints.empty()) endpoints = {nodes.coordinator};
  absl::Status why;
  for (const std::string& endpoint : endpoints) {
    OUTLAST_ASSIGN_OR_RETURN(const HostPort to, HostPort::Parse(endpoint));
    auto address = AddressTowards(to);
    if (address.ok()) return address;
    why = address.status();
  }
  return why;
}

}  // namespace

absl::StatusOr<std::string> OwnAddress(const NodesOptions& nodes) {
  if (nodes.advertise.empty()) return AddressTowardsAll(nodes);
  auto addresses = ResolveHost(nodes.advertise);
  if (!addresses.ok()) return Annotate(addresses.status(), "--advertise");
  absl::Status why;
  for (const std::string& address : *addresses) {
    OUTLAST_ASSIGN_OR_RETURN(const SocketAddress number, NumericAddress({address, 0}));
    why = ListenOn(number).status();
    if (why.ok()) return address;
  }
  return Error(absl::StatusCode::kInvalidArgument,
               "--advertise '{}': an address of this machine wanted: {}", nodes.advertise,
               MessageOf(why));
}

NodeSide::NodeSide(EventLoop& loop, const LaunchOptions& options, std::string address,
                   const Id128& agent, Ears ears)
    : loop_(loop),
      options_(options),
      nodes_(*options.nodes),
      address_(std::move(address)),
      agent_(agent),
      ears_(std::move(ears)) {}

absl::StatusOr<std::unique_ptr<NodeSide>> NodeSide::Start(EventLoop& loop,
                                                          const LaunchOptions& options,
                                                          const std::string& address,
                                                          const Id128& agent,
                                                          const std::string& run_dir, Ears ears) {
  std::unique_ptr<NodeSide> side(new NodeSide(loop, options, address, agent, std::move(ears)));
  OUTLAST_RETURN_IF_ERROR(CheckTrust(side->nodes_, address));
  OUTLAST_RETURN_IF_ERROR(CheckDeadlines(ElasticOf(options)));
  OUTLAST_ASSIGN_OR_RETURN(side->transport_, control::LoadTransport());
  OUTLAST_RETURN_IF_ERROR(side->Lead(run_dir));
  OUTLAST_RETURN_IF_ERROR(side->Join());
  return side;
}

// --- Leading ---

absl::Status NodeSide::Lead(const std::string& run_dir) {
  if (IsEtcdAddress(nodes_.coordinator)) return absl::OkStatus();
  OUTLAST_ASSIGN_OR_RETURN(const HostPort endpoint, HostPort::Parse(nodes_.coordinator));
  auto theirs = ResolveHost(endpoint.host);
  if (!theirs.ok()) return Annotate(theirs.status(), "--coordinator");
  // Agents of one machine can have addresses of their own.
  const std::vector<std::string> own =
      nodes_.advertise.empty() ? LocalAddresses() : std::vector<std::string>{address_};
  if (!IsMine(*theirs, own)) return absl::OkStatus();
  absl::Status led = TryToListen(run_dir);
  if (absl::IsUnavailable(led)) {
    ears_.say(fmt::format("joins whoever listens at {} ({})", nodes_.coordinator, MessageOf(led)));
    return absl::OkStatus();
  }
  if (led.ok()) ears_.say(fmt::format("leads job {} at {}", options_.job_id, host_->address()));
  return led;
}

absl::Status NodeSide::TryToListen(const std::string& run_dir) {
  ElasticOptions elastic = ElasticOf(options_);
  elastic.terms = TermsOf(options_);
  elastic.terms_of = fmt::format("agent {}, which leads,", nodes_.node);
  CoordinatorHostOptions options{.elastic = std::move(elastic),
                                 .listen = nodes_.coordinator,
                                 .journal = run_dir + "/coordinator",
                                 .token = nodes_.trust.token,
                                 .certificates = nodes_.trust.certificates,
                                 .allow_strangers = nodes_.trust.allow_strangers};
  const auto leave = [this] {
    may_leave_ = true;
    if (is_serving_) loop_.Stop();
  };
  CoordinatorHost::Ears ears{
      .on_line = [this](const std::string& line) { ears_.say("coordinator: " + line); },
      .on_fault = [this](const RecordFault& fault) { ears_.on_job_fault(fault); },
      .on_finish = [this](const FinishJob&) { job_has_ended_ = true; },
      .on_all_told = leave,
      .on_over =
          [this, leave](const absl::Status& why) {
            if (!why.ok()) ears_.say(fmt::format("coordinator: {}", MessageOf(why)));
            leave();
          }};
  OUTLAST_ASSIGN_OR_RETURN(
      host_, CoordinatorHost::Start(loop_, *transport_, std::move(options), std::move(ears)));
  return absl::OkStatus();
}

void NodeSide::StopJob(int signal) {
  if (host_ == nullptr) return;
  host_->AskStop(signal);
  if (!is_serving_) return;
  // This node's part is over. A job that goes on is given the time to stop.
  if (job_has_ended_ || ++stops_ > 1) loop_.Stop();
}

void NodeSide::ServeOthers() {
  if (host_ == nullptr || may_leave_) return;
  is_serving_ = true;
  loop_.Run();
  is_serving_ = false;
}

// --- Joining ---

absl::Status NodeSide::Join() {
  AgentLinkOptions link{.coordinator = nodes_.coordinator,
                        .job = options_.job_id,
                        .node = nodes_.node,
                        .token = nodes_.trust.token,
                        .certificates = nodes_.trust.certificates};
  if (IsEtcdAddress(nodes_.coordinator)) {
    OUTLAST_ASSIGN_OR_RETURN(std::shared_ptr<control::EtcdClient> client,
                             control::LoadEtcd(nodes_.etcd));
    link.find = [client = std::move(client), job = options_.job_id] {
      return FindEtcdLeader(*client, job);
    };
  }
  OUTLAST_ASSIGN_OR_RETURN(link_, MakeAgentLink(loop_, *transport_, std::move(link)));
  OUTLAST_ASSIGN_OR_RETURN(
      peers_, MakeTcpPeers(loop_, {.job = options_.job_id,
                                   .node = nodes_.node,
                                   .token = nodes_.trust.token.SecretFor("peers", options_.job_id),
                                   .bind = HostPort{address_, 0}.text(),
                                   .say = ears_.say}));
  if (options_.preflight) {
    OUTLAST_ASSIGN_OR_RETURN(meter_, LinkMeter::Start(loop_, address_));
  }
  return absl::OkStatus();
}

void NodeSide::Measure(const control::Measure& measure,
                       const std::function<void(control::Measured)>& done) {
  if (measure.address.empty()) return meter_->Expect(measure.ticket);
  meter_->Measure(
      measure.address, measure.ticket,
      [done, number = measure.number, to = measure.address](const absl::StatusOr<LinkRate>& rate) {
        if (!rate.ok()) {
          const std::string why(MessageOf(rate.status()));
          return done({number, 0, fmt::format("{}: {}", to, why)});
        }
        done({number, std::min(rate->there, rate->back),
              fmt::format("{} MB/s, back {} MB/s", PlainNumber(rate->there),
                          PlainNumber(rate->back))});
      });
}

std::unique_ptr<JobMachine> NodeSide::MakeMachine(MasterPorts& ports) {
  NodeMachineOptions machine;
  machine.node.elastic = ElasticOf(options_);
  machine.node.terms = TermsOf(options_);
  machine.node.node = nodes_.node;
  machine.node.incarnation = IncarnationOf(agent_);
  machine.node.capacity = options_.job.world;
  machine.node.slot_hint = nodes_.hint;
  machine.node.addresses = {address_};
  machine.bootstrap = [&ports](uint64_t generation) -> absl::StatusOr<std::string> {
    OUTLAST_ASSIGN_OR_RETURN(const int port, ports.Of(generation));
    return HostPort{ports.address(), static_cast<uint16_t>(port)}.text();
  };
  if (meter_ != nullptr) {
    machine.node.measure_address = meter_->address();
    machine.measure = [this](const control::Measure& measure,
                             const std::function<void(control::Measured)>& done) {
      Measure(measure, done);
    };
  }
  machine.say = ears_.say;
  return std::make_unique<NodeMachine>(std::move(machine), *link_, *peers_);
}

void NodeSide::Leave() {
  meter_.reset();
  link_.reset();
  peers_.reset();
}

}  // namespace outlast
