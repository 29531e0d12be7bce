#include "run/link_probes.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace outlast {

LinkProbes::LinkProbes(EventLoop& loop, Options options, Ears ears)
    : loop_(loop), options_(options), ears_(std::move(ears)) {}

LinkProbes::~LinkProbes() { Stop(); }

void LinkProbes::Watch(const std::vector<PeerGroup::Link>& links) {
  Stop();
  for (const PeerGroup::Link& wanted : links) {
    const auto at = HostPort::Parse(wanted.address);
    const auto address = at.ok() ? NumericAddress(*at) : at.status();
    if (!address.ok()) continue;
    Link& link = links_.emplace_back();
    link.node = wanted.node;
    link.at = *address;
    link.timer = loop_.RunAfter(absl::ZeroDuration(), [this, &link] { Knock(link); });
  }
}

void LinkProbes::Stop() {
  for (Link& link : links_) {
    loop_.Cancel(link.timer);
    HangUp(link);
  }
  links_.clear();
}

void LinkProbes::Knock(Link& link) {
  auto fd = StartConnect(link.at);
  if (!fd.ok()) return Done(link, fd.status());
  link.fd = std::move(*fd);
  absl::Status watched = loop_.Watch(link.fd.get(), [this, &link] { Answered(link); });
  if (watched.ok()) watched = loop_.WatchWrites(link.fd.get(), true);
  if (!watched.ok()) return Done(link, watched);
  link.timer = loop_.RunAfter(options_.patience, [this, &link] { NotAnswered(link); });
}

void LinkProbes::Answered(Link& link) {
  loop_.Cancel(link.timer);
  Done(link, SocketError(link.fd.get()));
}

// A loop that was held up may find the time over and the answer there.
void LinkProbes::NotAnswered(Link& link) {
  pollfd polled{.fd = link.fd.get(), .events = POLLOUT, .revents = 0};
  if (poll(&polled, 1, 0) > 0) return Done(link, SocketError(link.fd.get()));
  Done(link, Error(absl::StatusCode::kDeadlineExceeded, "it did not answer within {}",
                   absl::FormatDuration(options_.patience)));
}

// Whoever hears of it may watch others from then on: the link is not looked at any more.
void LinkProbes::Done(Link& link, const absl::Status& how) {
  HangUp(link);
  link.timer = loop_.RunAfter(options_.beat, [this, &link] { Knock(link); });
  const auto state = how.ok() ? Link::kReached : Link::kUnreached;
  if (std::exchange(link.state, state) == state) return;
  const std::string node = link.node;
  if (how.ok()) return ears_.on_reached(node);
  ears_.on_unreached(node, std::string(MessageOf(how)));
}

// With a reset: a port that is in use once a second would else not be free for a minute.
void LinkProbes::HangUp(Link& link) {
  if (!link.fd.is_open()) return;
  loop_.Unwatch(link.fd.get());
  constexpr linger kAtOnce{.l_onoff = 1, .l_linger = 0};
  (void)setsockopt(link.fd.get(), SOL_SOCKET, SO_LINGER, &kAtOnce, sizeof kAtOnce);
  link.fd = UniqueFd();
}

}  // namespace outlast
