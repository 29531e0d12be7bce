#include "run/chain_connect.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <list>
#include <map>
#include <optional>
#include <span>
#include <utility>

#include "base/error.h"
#include "base/socket.h"
#include "outlast/base/clock.h"
#include "outlast/base/digest.h"
#include "outlast/base/id.h"
#include "outlast/blackbox/segment.h"

namespace outlast {
namespace {

constexpr int kSliceMs = 20;  // how long an abort may go unseen here
constexpr absl::Duration kGuestTime = absl::Seconds(5);
constexpr size_t kMostGuests = 64;
constexpr absl::Duration kRetry = absl::Milliseconds(20);
// An agent that is cut off is waited for: beat loss and rejoin grace, 13 s. A cut that costs no
// node its place costs no collective its connections either, though the kernel sends again only
// after 0.2, 0.6, 1.4, 3, 6.2, 12.6 and 25.4 s.
constexpr absl::Duration kSilence = absl::Seconds(30);

// What the two ends of an edge say, little endian: GREETING ->, <- ANSWER, PROOF ->, <- the
// answer's first byte again.
struct Greeting {
  uint32_t magic = 0x4743544f;  // "OTCG"
  uint32_t version = 1;
  Id128 nonce;
  uint64_t generation = 0;
  uint64_t group = 0;  // Fnv1a64 of its name
  uint64_t max_bytes = 0;
  int32_t rank = 0;
  int32_t edge = 0;
};
static_assert(sizeof(Greeting) == 56);
struct Answer {
  Id128 nonce;
  uint64_t max_bytes = 0;
  Sha256Digest proof{};
};
static_assert(sizeof(Answer) == 56);

template <typename Value>
std::string_view BytesOf(const Value& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

Sha256Digest Proof(const Id128& ticket, std::string_view side, const Greeting& greeting,
                   const Id128& nonce) {
  return HmacSha256(BytesOf(ticket), fmt::format("outlast group 1 {}", side) +
                                         std::string(BytesOf(greeting)) +
                                         std::string(BytesOf(nonce)));
}

// A connection that came, until it is known for an edge.
struct Guest {
  UniqueFd fd;
  int64_t deadline_ns = 0;
  std::string host;
  std::string read;
  Id128 nonce;
  bool is_answered = false;
};

class Connector {
 public:
  Connector(Generation& generation, const ChainPlan& plan, const ChainConnectOptions& options)
      : generation_(generation),
        plan_(plan),
        options_(options),
        deadline_ns_(MonotonicNanos() + absl::ToInt64Nanoseconds(options.timeout)) {}

  absl::StatusOr<std::vector<ChainStage>> Run();

 private:
  absl::Status Listen();
  absl::Status TakeTicket();
  // Edge e joins stages e and e + 1; the latter connects.
  absl::StatusOr<UniqueFd> AcceptEdge(int edge);
  absl::StatusOr<UniqueFd> ConnectEdge(int edge);
  absl::StatusOr<UniqueFd> TryEdge(const SocketAddress& at, int edge);
  absl::Status CompareSizes(int peer, uint64_t max_bytes) const;

  void Let();
  // False: it is no guest any more.
  bool Hear(Guest& guest);
  absl::Status AnswerGuest(Guest& guest);
  absl::Status ProveGuest(Guest& guest);
  Greeting GreetingOf(const Guest& guest) const;

  absl::Status Wait(int fd, short events, int64_t deadline_ns);
  absl::Status SendAll(int fd, std::string_view bytes);
  absl::Status ReadAll(int fd, std::span<std::byte> bytes);
  std::string key(std::string_view rest) const {
    return fmt::format("group/{}/{}", options_.group, rest);
  }
  absl::Duration left() const {
    return std::max(absl::Nanoseconds(deadline_ns_ - MonotonicNanos()), absl::Milliseconds(1));
  }
  int holder(int stage) const { return plan_.lane_of_stage[static_cast<size_t>(stage)]; }
  bool IsOwn(int stage) const {
    return std::find(plan_.own_stages.begin(), plan_.own_stages.end(), stage) !=
           plan_.own_stages.end();
  }

  Generation& generation_;
  const ChainPlan& plan_;
  const ChainConnectOptions& options_;
  const int64_t deadline_ns_;
  Id128 ticket_;
  UniqueFd listener_;
  std::list<Guest> guests_;
  std::map<int, UniqueFd> accepted_;  // by edge
  absl::Status sizes_;                // whether all that came were made for the same
};

absl::StatusOr<std::vector<ChainStage>> Connector::Run() {
  OUTLAST_RETURN_IF_ERROR(Listen());
  OUTLAST_RETURN_IF_ERROR(TakeTicket());
  std::vector<ChainStage> stages;
  for (const int number : plan_.own_stages) stages.push_back({.number = number});
  const auto stage_at = [&](int number) {
    return std::find_if(stages.begin(), stages.end(),
                        [&](const ChainStage& stage) { return stage.number == number; });
  };
  // All ranks take edges in ascending order, so the lowest that is missing has both its ends at it.
  const int edges = static_cast<int>(plan_.stages.size()) - 1;
  for (int edge = 0; edge < edges; ++edge) {
    if (IsOwn(edge)) {
      OUTLAST_ASSIGN_OR_RETURN(UniqueFd fd, AcceptEdge(edge));
      EndWhenUnheard(fd.get(), kSilence);
      stage_at(edge)->next = {std::move(fd), holder(edge + 1)};
    } else if (IsOwn(edge + 1)) {
      OUTLAST_ASSIGN_OR_RETURN(UniqueFd fd, ConnectEdge(edge));
      EndWhenUnheard(fd.get(), kSilence);
      stage_at(edge + 1)->previous = {std::move(fd), holder(edge)};
    }
  }
  return stages;
}

absl::Status Connector::Listen() {
  OUTLAST_ASSIGN_OR_RETURN(const auto addresses, ResolveAddress({options_.address, 0}));
  OUTLAST_ASSIGN_OR_RETURN(listener_, ListenOn(addresses.front()));
  OUTLAST_ASSIGN_OR_RETURN(const SocketAddress bound, SocketAddress::Local(listener_.get()));
  const HostPort at{options_.address, bound.host_port().port};
  return generation_.Put(key(fmt::format("at/{}", generation_.rank())), at.text());
}

absl::Status Connector::TakeTicket() {
  if (generation_.rank() == 0) {
    ticket_ = Id128::Random();
    return generation_.Put(key("ticket"), BytesOf(ticket_));
  }
  OUTLAST_ASSIGN_OR_RETURN(const std::string ticket, generation_.Get(key("ticket"), left()));
  if (ticket.size() != sizeof ticket_) {
    return Error(absl::StatusCode::kInternal, "key '{}': {} bytes, {} wanted", key("ticket"),
                 ticket.size(), sizeof ticket_);
  }
  std::memcpy(&ticket_, ticket.data(), sizeof ticket_);
  return absl::OkStatus();
}

// --- The side that connects ---

absl::StatusOr<UniqueFd> Connector::ConnectEdge(int edge) {
  const int peer = holder(edge);
  OUTLAST_ASSIGN_OR_RETURN(const std::string text,
                           generation_.Get(key(fmt::format("at/{}", peer)), left()));
  OUTLAST_ASSIGN_OR_RETURN(const HostPort at, HostPort::Parse(text));
  OUTLAST_ASSIGN_OR_RETURN(const auto addresses, ResolveAddress(at));
  for (size_t attempt = 0;; ++attempt) {
    auto fd = TryEdge(addresses[attempt % addresses.size()], edge);
    if (fd.ok() || absl::IsAborted(fd.status()) || absl::IsInvalidArgument(fd.status())) return fd;
    if (deadline_ns_ - MonotonicNanos() < absl::ToInt64Nanoseconds(kRetry)) {
      return Error(absl::StatusCode::kDeadlineExceeded,
                   "rank {} at {}: not connected within {}: {}", peer, text,
                   absl::FormatDuration(options_.timeout), MessageOf(fd.status()));
    }
    poll(nullptr, 0, static_cast<int>(absl::ToInt64Milliseconds(kRetry)));
    OUTLAST_RETURN_IF_ERROR(generation_.Check());
  }
}

absl::StatusOr<UniqueFd> Connector::TryEdge(const SocketAddress& at, int edge) {
  OUTLAST_ASSIGN_OR_RETURN(UniqueFd fd, StartConnect(at));
  OUTLAST_RETURN_IF_ERROR(Wait(fd.get(), POLLOUT, deadline_ns_));
  OUTLAST_RETURN_IF_ERROR(SocketError(fd.get()));
  const Greeting greeting{.nonce = Id128::Random(),
                          .generation = generation_.number(),
                          .group = Fnv1a64(options_.group),
                          .max_bytes = options_.max_bytes,
                          .rank = generation_.rank(),
                          .edge = edge};
  OUTLAST_RETURN_IF_ERROR(SendAll(fd.get(), BytesOf(greeting)));
  Answer answer;
  OUTLAST_RETURN_IF_ERROR(ReadAll(fd.get(), std::as_writable_bytes(std::span(&answer, 1))));
  if (!IsEqualSecret(answer.proof, Proof(ticket_, "accepts", greeting, answer.nonce)))
    return absl::UnavailableError("whoever answers does not know the ticket of this generation");
  OUTLAST_RETURN_IF_ERROR(
      SendAll(fd.get(), BytesOf(Proof(ticket_, "connects", greeting, answer.nonce))));
  OUTLAST_RETURN_IF_ERROR(CompareSizes(holder(edge), answer.max_bytes));
  std::byte done;
  OUTLAST_RETURN_IF_ERROR(ReadAll(fd.get(), std::span(&done, 1)));
  return fd;
}

absl::Status Connector::CompareSizes(int peer, uint64_t max_bytes) const {
  if (max_bytes == options_.max_bytes) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument,
               "rank {} made it for {} bytes, this rank {} for {}", peer, max_bytes,
               generation_.rank(), options_.max_bytes);
}

// --- The side that accepts ---

absl::StatusOr<UniqueFd> Connector::AcceptEdge(int edge) {
  while (sizes_.ok() && !accepted_.contains(edge)) {
    OUTLAST_RETURN_IF_ERROR(generation_.Check());
    const int64_t now_ns = MonotonicNanos();
    if (now_ns >= deadline_ns_) {
      return Error(absl::StatusCode::kDeadlineExceeded, "rank {} did not connect within {}",
                   holder(edge + 1), absl::FormatDuration(options_.timeout));
    }
    guests_.remove_if([&](const Guest& guest) { return guest.deadline_ns <= now_ns; });
    std::vector<pollfd> polled = {{.fd = listener_.get(), .events = POLLIN}};
    for (const Guest& guest : guests_) polled.push_back({.fd = guest.fd.get(), .events = POLLIN});
    if (poll(polled.data(), polled.size(), kSliceMs) <= 0) continue;
    size_t at = 1;
    for (auto guest = guests_.begin(); guest != guests_.end(); ++at) {
      const bool stays = polled[at].revents == 0 || Hear(*guest);
      guest = stays ? std::next(guest) : guests_.erase(guest);
    }
    if (polled[0].revents != 0) Let();
  }
  OUTLAST_RETURN_IF_ERROR(sizes_);
  return std::move(accepted_.extract(edge).mapped());
}

void Connector::Let() {
  auto fd = AcceptOn(listener_.get());
  if (!fd.ok()) return;
  if (guests_.size() >= kMostGuests) guests_.pop_front();
  const auto remote = SocketAddress::Remote(fd->get());
  guests_.push_back({.fd = std::move(*fd),
                     .deadline_ns = MonotonicNanos() + absl::ToInt64Nanoseconds(kGuestTime),
                     .host = remote.ok() ? remote->host_port().host : "?",
                     .nonce = Id128::Random()});
}

bool Connector::Hear(Guest& guest) {
  std::array<char, 128> piece;
  const size_t wanted =
      guest.is_answered ? sizeof(Greeting) + sizeof(Sha256Digest) : sizeof(Greeting);
  const ssize_t count = recv(guest.fd.get(), piece.data(),
                             std::min(piece.size(), wanted - guest.read.size()), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (count <= 0) return false;
  guest.read.append(piece.data(), static_cast<size_t>(count));
  if (guest.read.size() < wanted) return true;
  const absl::Status heard = guest.is_answered ? ProveGuest(guest) : AnswerGuest(guest);
  if (heard.ok()) return guest.fd.is_open();
  PrintToStderr("outlast: group '{}' of rank {}: refused a connection from {}: {}\n",
                options_.group, generation_.rank(), guest.host, MessageOf(heard));
  return false;
}

Greeting Connector::GreetingOf(const Guest& guest) const {
  Greeting greeting;
  std::memcpy(&greeting, guest.read.data(), sizeof greeting);
  return greeting;
}

absl::Status Connector::AnswerGuest(Guest& guest) {
  const Greeting greeting = GreetingOf(guest);
  const Greeting wanted;
  if (greeting.magic != wanted.magic) return absl::InvalidArgumentError("a stranger's bytes");
  if (greeting.version != wanted.version) {
    return Error(absl::StatusCode::kInvalidArgument, "version {} of the protocol, {} wanted",
                 greeting.version, wanted.version);
  }
  if (greeting.generation != generation_.number() || greeting.group != Fnv1a64(options_.group)) {
    return Error(absl::StatusCode::kInvalidArgument, "rank {} of generation {} means another group",
                 greeting.rank, greeting.generation);
  }
  const Answer answer{.nonce = guest.nonce,
                      .max_bytes = options_.max_bytes,
                      .proof = Proof(ticket_, "accepts", greeting, guest.nonce)};
  guest.is_answered = true;
  return SendAll(guest.fd.get(), BytesOf(answer));
}

absl::Status Connector::ProveGuest(Guest& guest) {
  const Greeting greeting = GreetingOf(guest);
  const Sha256Digest wanted = Proof(ticket_, "connects", greeting, guest.nonce);
  const std::string_view found = std::string_view(guest.read).substr(sizeof greeting);
  if (!IsEqualSecret(std::as_bytes(std::span(found)), wanted))
    return absl::PermissionDeniedError("it does not know the ticket of this generation");
  if (!IsOwn(greeting.edge) || greeting.edge < 0 || accepted_.contains(greeting.edge) ||
      greeting.rank != holder(greeting.edge + 1)) {
    return Error(absl::StatusCode::kInvalidArgument, "rank {} is not awaited on edge {}",
                 greeting.rank, greeting.edge);
  }
  sizes_ = CompareSizes(greeting.rank, greeting.max_bytes);
  OUTLAST_RETURN_IF_ERROR(SendAll(guest.fd.get(), "+"));
  accepted_[greeting.edge] = std::move(guest.fd);
  return absl::OkStatus();
}

// --- Waiting ---

absl::Status Connector::Wait(int fd, short events, int64_t deadline_ns) {
  pollfd polled{.fd = fd, .events = events};
  while (poll(&polled, 1, kSliceMs) <= 0) {
    OUTLAST_RETURN_IF_ERROR(generation_.Check());
    if (MonotonicNanos() >= deadline_ns) return absl::UnavailableError("no answer");
  }
  return absl::OkStatus();
}

// A few bytes into a fresh connection: they fit its buffer.
absl::Status Connector::SendAll(int fd, std::string_view bytes) {
  const ssize_t count = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (count == static_cast<ssize_t>(bytes.size())) return absl::OkStatus();
  return ErrnoStatus(count < 0 ? errno : EAGAIN, "greet");
}

absl::Status Connector::ReadAll(int fd, std::span<std::byte> bytes) {
  // An answer comes once the peer listens for this edge; a dead end must not hold us for good.
  while (!bytes.empty()) {
    OUTLAST_RETURN_IF_ERROR(Wait(fd, POLLIN, deadline_ns_));
    const ssize_t count = recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (count == 0) return absl::UnavailableError("it closed the connection");
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (count < 0) return ErrnoStatus(errno, "greet");
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<ChainStage>> ConnectChain(Generation& generation, const ChainPlan& plan,
                                                     const ChainConnectOptions& options) {
  return Connector(generation, plan, options).Run();
}

}  // namespace outlast
