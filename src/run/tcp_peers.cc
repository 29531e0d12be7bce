#include "run/tcp_peers.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/socket.h"
#include "outlast/base/clock.h"
#include "run/frame_socket.h"
#include "run/link_probes.h"
#include "run/peer_dialer.h"
#include "run/peer_door.h"

namespace outlast {
namespace {

constexpr absl::Duration kFarewell = absl::Seconds(1);
constexpr absl::Duration kSayAgain = absl::Minutes(1);
constexpr size_t kMostLinesKept = 256;

class TcpPeers final : public Peers {
 public:
  TcpPeers(EventLoop& loop, TcpPeersOptions options, UniqueFd listener, std::string address);
  ~TcpPeers() override;

  void Listen(uint16_t channel, Ears ears) override {
    ears_[channel] = std::make_shared<const Ears>(std::move(ears));
  }
  std::string address() const override { return address_; }
  void Enter(const PeerGroup& group) override;
  void Leave(uint64_t generation) override;
  absl::Status Send(const std::string& node, uint16_t channel, std::string bytes) override;

 private:
  using Socket = std::unique_ptr<FrameSocket>;
  struct Peer {
    std::deque<Frame> waiting;  // while it is down
    size_t waiting_bytes = 0;
    Socket socket;  // null: down
  };
  // Proven, of a generation that this agent has not entered yet.
  struct Early {
    PeerIdentity who;
    Socket socket;
    EventLoop::TimerId deadline = 0;
  };

  bool is_lead() const { return group_.lead == options_.node; }
  void CloseGroup(const std::string& why);

  // Followers that come.
  void Admit(const PeerIdentity& who, Socket socket);
  absl::Status CheckMembership(const PeerIdentity& who) const;
  bool IsOver(uint64_t generation) const {
    return generation <= left_ || generation < group_.generation;
  }
  bool IsEarly(uint64_t generation) const {
    return !IsOver(generation) && (group_.generation == 0 || generation > group_.generation);
  }
  void LetWait(const PeerIdentity& who, Socket socket);
  Early TakeEarly(const std::string& node);
  void LookAtEarly();
  void AdmitEarly();

  // Connections that stand.
  void Up(const std::string& node, Socket socket);
  void Down(const std::string& node, const std::string& why);
  static Socket Detach(Peer& peer);
  void OnFrame(const std::string& node, uint16_t channel, const std::string& payload);
  void OnLinkWord(const std::string& node, std::string_view payload);
  void OnEnd(const std::string& node, const absl::Status& why);

  // For who hears of links. Null: nobody does.
  std::shared_ptr<const Ears> LinkEars() const {
    const auto found = ears_.find(kPeerLinks);
    return found == ears_.end() ? nullptr : found->second;
  }

  // Ends.
  void Refuse(Socket socket, const std::string& who, std::string_view why, PeerRefusal kind);
  void SayGoodbye(Socket socket, std::string_view why, PeerRefusal kind);
  void Say(const std::string& who, std::string_view why);
  std::string self() const;

  EventLoop& loop_;
  const TcpPeersOptions options_;
  const std::string address_;
  const std::shared_ptr<bool> is_gone_ = std::make_shared<bool>(false);
  std::map<uint16_t, std::shared_ptr<const Ears>> ears_;
  PeerGroup group_;  // generation 0: none
  uint64_t left_ = 0;
  std::map<std::string, Peer> peers_;
  std::map<std::string, Early> early_;  // by node
  std::map<uint64_t, Socket> farewells_;
  uint64_t next_farewell_ = 1;
  std::unordered_map<std::string, absl::Duration> said_;
  PeerDialer dialer_;
  LinkProbes probes_;
  PeerDoor door_;
};

TcpPeers::TcpPeers(EventLoop& loop, TcpPeersOptions options, UniqueFd listener, std::string address)
    : loop_(loop),
      options_(std::move(options)),
      address_(std::move(address)),
      dialer_(loop, options_,
              {.on_up = [this](Socket socket) { Up(group_.lead, std::move(socket)); },
               .on_failed =
                   [this](const absl::Status& why) {
                     Say(fmt::format("node '{}' at {}", group_.lead, group_.lead_address),
                         MessageOf(why));
                   },
               .on_refused =
                   [this](Socket socket, const absl::Status& why) {
                     Refuse(std::move(socket),
                            fmt::format("node '{}' at {}", group_.lead, group_.lead_address),
                            MessageOf(why), PeerRefusal::kRetry);
                   }}),
      probes_(loop, {.beat = options_.beat, .patience = options_.loss},
              {.on_reached =
                   [this](const std::string& node) {
                     if (const auto ears = LinkEars()) ears->on_up(node);
                   },
               .on_unreached =
                   [this](const std::string& node, const std::string& why) {
                     if (const auto ears = LinkEars()) ears->on_down(node, why);
                   }}),
      door_(loop, options_, std::move(listener),
            {.on_proven = [this](const PeerIdentity& who,
                                 Socket socket) { Admit(who, std::move(socket)); },
             .on_refused =
                 [this](Socket socket, const std::string& who, const absl::Status& why) {
                   Refuse(std::move(socket), who, MessageOf(why), PeerRefusal::kRetry);
                 }}) {}

TcpPeers::~TcpPeers() {
  *is_gone_ = true;
  for (const auto& [node, early] : early_) loop_.Cancel(early.deadline);
}

// --- The group ---

void TcpPeers::Enter(const PeerGroup& group) {
  if (IsOver(group.generation) || group.generation == group_.generation) return;
  CloseGroup(fmt::format("generation {} is over: node '{}' enters {}", group_.generation,
                         options_.node, group.generation));
  group_ = group;
  if (!is_lead()) {
    peers_[group_.lead];
    dialer_.Dial({.job = options_.job,
                  .run_id = group_.run_id,
                  .generation = group_.generation,
                  .node = options_.node,
                  .lead = group_.lead},
                 group_.lead_address);
  }
  for (const std::string& node : group_.nodes) {
    if (is_lead() && node != options_.node) peers_[node];
  }
  probes_.Watch(group_.links);
  LookAtEarly();
}

void TcpPeers::Leave(uint64_t generation) {
  left_ = std::max(left_, generation);
  LookAtEarly();
  if (group_.generation == 0 || group_.generation > left_) return;
  CloseGroup(fmt::format("node '{}' has left generation {}", options_.node, group_.generation));
}

void TcpPeers::CloseGroup(const std::string& why) {
  dialer_.Stop();
  probes_.Watch({});
  for (auto& [node, peer] : std::exchange(peers_, {})) {
    if (peer.socket != nullptr)
      SayGoodbye(std::move(peer.socket), why, PeerRefusal::kGenerationIsOver);
  }
  group_ = {};
}

absl::Status TcpPeers::Send(const std::string& node, uint16_t channel, std::string bytes) {
  const auto found = peers_.find(node);
  if (found == peers_.end()) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "message to node '{}': no peer of node '{}' in generation {}", node, options_.node,
                 group_.generation);
  }
  if (bytes.size() > options_.max_message_bytes || channel == kLinkChannel) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "message to node '{}' on channel {}: {} bytes, at most {} wanted", node, channel,
                 bytes.size(), options_.max_message_bytes);
  }
  Peer& peer = found->second;
  const size_t waiting =
      peer.waiting_bytes + (peer.socket == nullptr ? 0 : peer.socket->queued_bytes());
  if (waiting + bytes.size() > options_.max_waiting_bytes) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "message of {} bytes to node '{}': {} bytes wait for it already, at most {} may",
                 bytes.size(), node, waiting, options_.max_waiting_bytes);
  }
  Frame frame = MakeFrame(channel, std::move(bytes));
  if (peer.socket != nullptr) {
    peer.socket->Send(std::move(frame));
  } else {
    peer.waiting_bytes += frame.size();
    peer.waiting.push_back(std::move(frame));
  }
  return absl::OkStatus();
}

// --- Followers that come ---

void TcpPeers::Admit(const PeerIdentity& who, Socket socket) {
  const std::string name = fmt::format("node '{}' at {}", who.node, socket->remote_host());
  if (group_.generation != 0 && who.run_id != group_.run_id) {
    const std::string why =
        fmt::format("it is of run {}, this node of run {}", who.run_id.hex(), group_.run_id.hex());
    return Refuse(std::move(socket), name, why, PeerRefusal::kRetry);
  }
  if (IsOver(who.generation)) {
    const std::string why = fmt::format("its generation {} is over, this node is in {}",
                                        who.generation, std::max(group_.generation, left_));
    return Refuse(std::move(socket), name, why, PeerRefusal::kGenerationIsOver);
  }
  if (IsEarly(who.generation)) return LetWait(who, std::move(socket));
  if (const absl::Status member = CheckMembership(who); !member.ok())
    return Refuse(std::move(socket), name, MessageOf(member), PeerRefusal::kRetry);
  if (Peer& peer = peers_.at(who.node); peer.socket != nullptr) {
    const std::string why = "a newer connection of the node took its place";
    SayGoodbye(Detach(peer), why, PeerRefusal::kRetry);
    const uint64_t generation = group_.generation;
    Down(who.node, why);
    // Whoever heard of it may have left.
    if (group_.generation != generation) return Admit(who, std::move(socket));
  }
  socket->SendWord(PeerWord::kWelcome, {});
  Up(who.node, std::move(socket));
}

absl::Status TcpPeers::CheckMembership(const PeerIdentity& who) const {
  if (!is_lead()) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "node '{}' is not the lead of generation {}, node '{}' is", options_.node,
                 group_.generation, group_.lead);
  }
  if (!peers_.contains(who.node)) {
    return Error(absl::StatusCode::kFailedPrecondition, "it has no part in generation {}",
                 group_.generation);
  }
  return absl::OkStatus();
}

void TcpPeers::LetWait(const PeerIdentity& who, Socket socket) {
  if (early_.contains(who.node)) {
    Early former = TakeEarly(who.node);
    SayGoodbye(std::move(former.socket), "a newer connection of the node took its place",
               PeerRefusal::kRetry);
  }
  const std::string node = who.node;
  socket->Listen({.on_end = [this, node](const absl::Status&) { TakeEarly(node); }});
  const EventLoop::TimerId deadline = loop_.RunAfter(options_.enter, [this, node] {
    Early early = TakeEarly(node);
    Refuse(std::move(early.socket), fmt::format("node '{}'", node),
           fmt::format("generation {} was not entered here within {}", early.who.generation,
                       absl::FormatDuration(options_.enter)),
           PeerRefusal::kRetry);
  });
  early_[node] = {who, std::move(socket), deadline};
}

TcpPeers::Early TcpPeers::TakeEarly(const std::string& node) {
  auto taken = early_.extract(node);
  loop_.Cancel(taken.mapped().deadline);
  return std::move(taken.mapped());
}

// Later: nobody is called back before Enter or Leave returned.
void TcpPeers::LookAtEarly() {
  loop_.Post([this, is_gone = is_gone_] {
    if (!*is_gone) AdmitEarly();
  });
}

void TcpPeers::AdmitEarly() {
  std::vector<std::string> due;
  for (const auto& [node, early] : early_) {
    const bool is_foreign = group_.generation != 0 && early.who.run_id != group_.run_id;
    if (is_foreign || !IsEarly(early.who.generation)) due.push_back(node);
  }
  for (const std::string& node : due) {
    if (!early_.contains(node)) continue;
    Early early = TakeEarly(node);
    Admit(early.who, std::move(early.socket));
  }
}

// --- Connections that stand ---

void TcpPeers::Up(const std::string& node, Socket socket) {
  Peer& peer = peers_.at(node);
  peer.socket = std::move(socket);
  peer.socket->Listen(
      {.on_frame = [this, node](uint16_t channel,
                                const std::string& payload) { OnFrame(node, channel, payload); },
       .on_end = [this, node](const absl::Status& why) { OnEnd(node, why); }});
  peer.waiting_bytes = 0;
  for (Frame& frame : std::exchange(peer.waiting, {})) peer.socket->Send(std::move(frame));
  const uint64_t generation = group_.generation;
  for (const auto& [channel, ears] : std::map(ears_)) {
    if (group_.generation == generation) ears->on_up(node);
  }
}

void TcpPeers::Down(const std::string& node, const std::string& why) {
  if (Peer& peer = peers_.at(node); peer.socket != nullptr) Detach(peer);
  const uint64_t generation = group_.generation;
  for (const auto& [channel, ears] : std::map(ears_)) {
    if (group_.generation == generation) ears->on_down(node, why);
  }
}

// What has not left waits for the next connection.
TcpPeers::Socket TcpPeers::Detach(Peer& peer) {
  peer.waiting = peer.socket->TakeUnsent();
  for (const Frame& frame : peer.waiting) peer.waiting_bytes += frame.size();
  return std::move(peer.socket);
}

void TcpPeers::OnFrame(const std::string& node, uint16_t channel, const std::string& payload) {
  if (channel == kLinkChannel) return OnLinkWord(node, payload);
  const auto found = ears_.find(channel);
  if (found == ears_.end()) return;
  const auto ears = found->second;
  ears->on_message(node, payload);
}

void TcpPeers::OnLinkWord(const std::string& node, std::string_view payload) {
  if (payload.empty() || payload[0] != static_cast<char>(PeerWord::kRefused)) return;
  const RefusedWord word = ReadRefused(payload.substr(1));
  if (!is_lead() && word.kind == PeerRefusal::kRetry) {
    Say(fmt::format("node '{}'", node), "it ended the connection: " + word.why);
    dialer_.DialAgain();
  }
  Down(node, word.why);
}

void TcpPeers::OnEnd(const std::string& node, const absl::Status& why) {
  const std::string text(MessageOf(why));
  if (!absl::IsUnavailable(why) && !absl::IsDeadlineExceeded(why)) {  // what came is no message
    Refuse(Detach(peers_.at(node)), fmt::format("node '{}'", node), text, PeerRefusal::kRetry);
  }
  if (!is_lead()) dialer_.DialAgain();
  Down(node, text);
}

// --- Ends ---

void TcpPeers::Refuse(Socket socket, const std::string& who, std::string_view why,
                      PeerRefusal kind) {
  Say(who, why);
  SayGoodbye(std::move(socket), fmt::format("{}: {}", self(), why), kind);
}

void TcpPeers::SayGoodbye(Socket socket, std::string_view why, PeerRefusal kind) {
  const uint64_t id = next_farewell_++;
  socket->SendWord(PeerWord::kRefused, WriteRefused(kind, why));
  socket->Finish();
  socket->Listen({.on_end = [this, id](const absl::Status&) { farewells_.erase(id); }});
  farewells_[id] = std::move(socket);
  loop_.RunAfter(kFarewell, [this, id, is_gone = is_gone_] {
    if (!*is_gone) farewells_.erase(id);
  });
}

std::string TcpPeers::self() const {
  return group_.generation == 0 ? fmt::format("node '{}' of job '{}'", options_.node, options_.job)
                                : fmt::format("node '{}' of job '{}', generation {}", options_.node,
                                              options_.job, group_.generation);
}

void TcpPeers::Say(const std::string& who, std::string_view why) {
  const std::string line = fmt::format("peers: {}: {}: {}", self(), who, why);
  const absl::Duration now = Clock::Real().Uptime();
  const auto said = said_.find(line);
  if (said != said_.end() && now - said->second < kSayAgain) return;
  if (said_.size() >= kMostLinesKept) said_.clear();
  said_[line] = now;
  if (options_.say) {
    options_.say(line);
  } else {
    PrintToStderr("outlast: {}\n", line);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Peers>> MakeTcpPeers(EventLoop& loop, TcpPeersOptions options) {
  OUTLAST_ASSIGN_OR_RETURN(const HostPort at, HostPort::Parse(options.bind));
  OUTLAST_ASSIGN_OR_RETURN(const auto addresses, ResolveAddress(at));
  OUTLAST_ASSIGN_OR_RETURN(UniqueFd listener, ListenOn(addresses.front()));
  OUTLAST_ASSIGN_OR_RETURN(const SocketAddress bound, SocketAddress::Local(listener.get()));
  HostPort announced = bound.host_port();
  if (!options.announced_host.empty()) announced.host = options.announced_host;
  return std::make_unique<TcpPeers>(loop, std::move(options), std::move(listener),
                                    announced.text());
}

}  // namespace outlast
