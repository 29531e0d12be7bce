#include "control/agent_link.h"

#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/serial_thread.h"
#include "control/endpoint.h"
#include "control/software.h"

namespace outlast {
namespace {

class AgentLink final : public CoordinatorLink {
 public:
  AgentLink(EventLoop& loop, control::Transport& transport, AgentLinkOptions options,
            HostPort endpoint)
      : loop_(loop),
        transport_(transport),
        options_(std::move(options)),
        endpoint_(std::move(endpoint)) {}
  ~AgentLink() override {
    Forget();
    transport_.Settle();
  }

  void Listen(Ears ears) override { ears_ = std::move(ears); }
  void Open() override;
  void Hello(const control::Hello& hello) override;
  void Send(const control::AgentMessage& message) override {
    if (stream_ != nullptr && is_trusted_) stream_->Send(message);
  }
  void Drop(const std::string&) override { Forget(); }

 private:
  // `work`, on the loop, unless the attempt or the link is over by then. Any thread.
  void Post(uint64_t attempt, std::function<void()> work) {
    loop_.Post([this, attempt, alive = std::weak_ptr<int>(alive_), work = std::move(work)] {
      if (alive.lock() != nullptr && attempt == attempt_) work();
    });
  }
  struct Place {
    HostPort endpoint;
    std::vector<std::string> addresses;
  };
  absl::StatusOr<Place> Locate(const HostPort& last) const;
  void Located(const absl::StatusOr<Place>& place);
  void TryAddress();
  void Hear(const control::CoordinatorFrame& frame);
  void Hear(const control::Challenge& challenge);
  std::string_view TrustHint(std::string_view why) const;
  void Closed(const std::string& why);
  void Down(const std::string& why) {
    Forget();
    ears_.on_down(why);
  }
  void RefuseLater(std::string reason) {
    refusal_ = control::Refused{control::Refusal::kNever, std::move(reason)};
    is_up_ = true;
    ears_.on_up();
  }
  // Ends the attempt: what was sent still leaves.
  void Forget() {
    ++attempt_;
    if (stream_ != nullptr && is_up_) stream_->Finish();
    stream_.reset();
    refusal_.reset();
    is_up_ = is_trusted_ = false;
  }
  std::string Where() const { return HostPort{address_, endpoint_.port}.text(); }

  EventLoop& loop_;
  control::Transport& transport_;
  const AgentLinkOptions options_;
  HostPort endpoint_;  // where it was last
  Ears ears_;
  const std::shared_ptr<int> alive_ = std::make_shared<int>();

  // Of the present attempt.
  uint64_t attempt_ = 0;
  std::vector<std::string> addresses_;
  size_t next_ = 0;
  std::string address_;
  std::string tried_;
  std::unique_ptr<control::FrameStream> stream_;
  std::string nonce_, their_nonce_;
  std::string their_job_;
  bool is_up_ = false;
  bool is_trusted_ = false;
  std::optional<control::Refused> refusal_;  // our own, or what came before the challenge

  std::unique_ptr<SerialThread> resolver_;  // last: it ends before what its work reads
};

void AgentLink::Open() {
  Forget();
  tried_.clear();
  next_ = 0;
  if (!options_.find && NumericAddress(endpoint_).ok()) {
    Post(attempt_, [this] { Located(Place{endpoint_, {endpoint_.host}}); });
    return;
  }
  if (resolver_ == nullptr) resolver_ = std::make_unique<SerialThread>("outlast-resolve");
  resolver_->Post([this, attempt = attempt_, last = endpoint_] {
    auto place = Locate(last);
    Post(attempt, [this, place = std::move(place)] { Located(place); });
  });
}

// On the resolver's thread. Whoever cannot ask where it is, or may not any more, goes where it was.
absl::StatusOr<AgentLink::Place> AgentLink::Locate(const HostPort& last) const {
  Place place;
  if (options_.find) {
    const auto found = options_.find();
    const bool has_no_word =
        absl::IsUnavailable(found.status()) || absl::IsFailedPrecondition(found.status());
    if (!found.ok() && (!has_no_word || last.port == 0)) return found.status();
    OUTLAST_ASSIGN_OR_RETURN(place.endpoint, HostPort::Parse(found.ok() ? *found : last.text()));
  } else {
    OUTLAST_ASSIGN_OR_RETURN(place.endpoint, HostPort::Parse(options_.coordinator));
  }
  OUTLAST_ASSIGN_OR_RETURN(place.addresses, ResolveHost(place.endpoint.host));
  return place;
}

void AgentLink::Located(const absl::StatusOr<Place>& place) {
  const std::string why(MessageOf(place.status()));
  if (absl::IsFailedPrecondition(place.status()))
    return RefuseLater(why);  // asking on mends nothing
  if (!place.ok()) return Down(why);
  endpoint_ = place->endpoint;
  addresses_ = place->addresses;
  TryAddress();
}

void AgentLink::TryAddress() {
  if (next_ == addresses_.size()) {
    const bool is_named = addresses_.size() != 1 || Where() != endpoint_.text();
    return Down(is_named ? fmt::format("{}: tried {}", endpoint_.text(), tried_) : tried_);
  }
  address_ = addresses_[next_++];
  ++attempt_;
  const uint64_t attempt = attempt_;
  stream_ = transport_.Connect(
      address_, endpoint_.port, endpoint_.host, options_.certificates, options_.liveness,
      {.on_frame =
           [this, attempt](control::CoordinatorFrame frame, size_t) {
             Post(attempt, [this, frame = std::move(frame)] { Hear(frame); });
           },
       .on_closed = [this, attempt](
                        const std::string& why) { Post(attempt, [this, why] { Closed(why); }); }});
  nonce_ = MakeNonce();
  stream_->Send(control::Opening{
      .software = control::kSoftware, .job = options_.job, .node = options_.node, .nonce = nonce_});
}

// gRPC says no more of a handshake that the other side broke off.
std::string_view AgentLink::TrustHint(std::string_view why) const {
  const bool is_broken_off = why.find("closed") != std::string_view::npos ||
                             why.find("andshak") != std::string_view::npos ||
                             why.find("ertificate") != std::string_view::npos;
  if (!is_broken_off) return "";
  return options_.certificates.empty()
             ? " (perhaps it wants TLS: --tls-ca)"
             : " (under TLS each side's certificate must be from the other's --tls-ca, and a side "
               "that has one wants one)";
}

void AgentLink::Closed(const std::string& why) {
  if (refusal_) return;  // it is what will be said
  if (is_up_) return Down(fmt::format("the stream to {} ended: {}", Where(), why));
  if (!tried_.empty()) tried_ += "; ";
  tried_ += fmt::format("{}: {}{}", Where(), why, TrustHint(why));
  TryAddress();
}

void AgentLink::Hear(const control::CoordinatorFrame& frame) {
  if (const auto* challenge = std::get_if<control::Challenge>(&frame)) return Hear(*challenge);
  const auto& message = std::get<control::CoordinatorMessage>(frame);
  if (!is_up_) {
    const auto* refused = std::get_if<control::Refused>(&message);
    if (refused != nullptr)
      return RefuseLater(fmt::format("the coordinator at {}: {}", Where(), refused->reason));
    return Down(fmt::format("{} speaks before its challenge", Where()));
  }
  if (!is_trusted_) return;
  const auto* refused = std::get_if<control::Refused>(&message);
  if (refused == nullptr || their_job_ == options_.job) return ears_.on_said(message);
  // Whoever has two jobs at one port wants to know which.
  control::Refused named = *refused;
  named.reason += fmt::format(" (at {})", Where());
  ears_.on_said(named);
}

void AgentLink::Hear(const control::Challenge& challenge) {
  if (is_up_) return Down(fmt::format("{} sent a second challenge", Where()));
  if (challenge.version != control::kProtocolVersion) {
    return RefuseLater(fmt::format(
        "the coordinator at {} speaks protocol version {} ({}), this agent {} ({})", Where(),
        challenge.version, challenge.software, control::kProtocolVersion, control::kSoftware));
  }
  their_nonce_ = challenge.nonce;
  their_job_ = challenge.job;
  is_trusted_ =
      options_.token.empty() ||
      options_.token.Checks(challenge.proof, "coordinator", challenge.job, nonce_, challenge.nonce);
  if (!is_trusted_) {
    return RefuseLater(fmt::format("the coordinator at {} {}", Where(),
                                   challenge.proof.empty()
                                       ? "has no job token, this agent has one"
                                       : "did not prove that it knows this agent's job token"));
  }
  is_up_ = true;
  ears_.on_up();
}

void AgentLink::Hello(const control::Hello& hello) {
  if (!is_up_) return;
  // Also to one that is not trusted: it says on its side what it thinks of us.
  if (stream_ != nullptr) {
    stream_->Send(control::Greeting{
        hello, options_.token.Prove("agent", options_.job, their_nonce_, nonce_)});
  }
  if (refusal_) Post(attempt_, [this, refused = *refusal_] { ears_.on_said(refused); });
}

}  // namespace

absl::StatusOr<std::unique_ptr<CoordinatorLink>> MakeAgentLink(EventLoop& loop,
                                                               control::Transport& transport,
                                                               AgentLinkOptions options) {
  if (options.find)
    return std::make_unique<AgentLink>(loop, transport, std::move(options), HostPort());
  auto endpoint = HostPort::Parse(options.coordinator);
  if (!endpoint.ok()) return Annotate(endpoint.status(), "coordinator");
  return std::make_unique<AgentLink>(loop, transport, std::move(options), *std::move(endpoint));
}

}  // namespace outlast
