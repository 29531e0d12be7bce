#include "run/peer_door.h"

#include <utility>

#include "base/error.h"
#include "base/socket.h"

namespace outlast {
namespace {

constexpr size_t kMostGuests = 4096;  // that have not proven anything yet
constexpr int kAcceptsAtOnce = 64;
constexpr absl::Duration kRest = absl::Milliseconds(100);

}  // namespace

PeerDoor::PeerDoor(EventLoop& loop, const TcpPeersOptions& options, UniqueFd listener, Ears ears)
    : loop_(loop), options_(options), listener_(std::move(listener)), ears_(std::move(ears)) {
  if (!loop_.Watch(listener_.get(), [this] { Accept(); }).ok()) Rest();
}

PeerDoor::~PeerDoor() {
  loop_.Unwatch(listener_.get());
  loop_.Cancel(rest_);
  for (const auto& [id, guest] : guests_) loop_.Cancel(guest.deadline);
}

void PeerDoor::Accept() {
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    if (guests_.size() >= kMostGuests) return Rest();
    auto fd = AcceptOn(listener_.get());
    if (absl::IsNotFound(fd.status())) return;
    if (!fd.ok()) return Rest();
    Let(std::move(*fd));
  }
}

// No descriptor is left, or too many guests are here: looking at once again would find no other.
void PeerDoor::Rest() {
  loop_.Unwatch(listener_.get());
  rest_ = loop_.RunAfter(kRest, [this] {
    if (!loop_.Watch(listener_.get(), [this] { Accept(); }).ok()) Rest();
  });
}

void PeerDoor::Let(UniqueFd fd) {
  const uint64_t id = next_guest_++;
  Guest guest{
      .socket = std::make_unique<FrameSocket>(loop_, std::move(fd), kMaxGreetingBytes),
      .greeting = LeadGreeting(options_.job, options_.node, options_.token, Id128::Random())};
  guest.socket->Listen(
      {.on_frame = [this, id](uint16_t channel,
                              const std::string& payload) { OnFrame(id, channel, payload); },
       .on_end = [this, id](const absl::Status& why) { OnEnd(id, why); }});
  guest.deadline = loop_.RunAfter(options_.greeting, [this, id] {
    Refuse(id, Error(absl::StatusCode::kDeadlineExceeded, "it did not greet within {}",
                     absl::FormatDuration(options_.greeting)));
  });
  guests_.emplace(id, std::move(guest));
}

void PeerDoor::OnFrame(uint64_t id, uint16_t channel, const std::string& payload) {
  Guest& guest = guests_.at(id);
  const auto word = static_cast<PeerWord>(payload.empty() ? 0 : payload[0]);
  const PeerWord wanted = guest.is_asked ? PeerWord::kProof : PeerWord::kHello;
  if (channel == kLinkChannel && word == PeerWord::kRefused) {
    return Refuse(id, Error(absl::StatusCode::kFailedPrecondition, "it refused: {}",
                            ReadRefused(payload.substr(1)).why));
  }
  if (channel != kLinkChannel || word != wanted) {
    return Refuse(id, absl::InvalidArgumentError("its words are no greeting"));
  }
  const std::string_view rest = std::string_view(payload).substr(1);
  if (!guest.is_asked) {
    const auto challenge = guest.greeting.Challenge(rest);
    if (!challenge.ok()) return Refuse(id, challenge.status());
    guest.is_asked = true;
    guest.socket->SendWord(PeerWord::kChallenge, *challenge);
    return;
  }
  if (const absl::Status proven = guest.greeting.CheckProof(rest); !proven.ok())
    return Refuse(id, proven);
  Guest known = Take(id);
  known.socket->set_max_payload(options_.max_message_bytes);
  known.socket->KeepAlive(options_.beat, options_.loss);
  ears_.on_proven(known.greeting.follower(), std::move(known.socket));
}

void PeerDoor::OnEnd(uint64_t id, const absl::Status& why) {
  if (!absl::IsUnavailable(why)) return Refuse(id, why);
  Take(id);  // it came and went
}

void PeerDoor::Refuse(uint64_t id, const absl::Status& why) {
  Guest guest = Take(id);
  const std::string& node = guest.greeting.follower().node;
  const std::string who = fmt::format("{} at {}", node.empty() ? "somebody" : "node '" + node + "'",
                                      guest.socket->remote_host());
  ears_.on_refused(std::move(guest.socket), who, why);
}

PeerDoor::Guest PeerDoor::Take(uint64_t id) {
  auto node = guests_.extract(id);
  loop_.Cancel(node.mapped().deadline);
  return std::move(node.mapped());
}

}  // namespace outlast
