#include "outlast/testing/sim_network.h"

#include <algorithm>

namespace outlast::testing {

SimNetwork::SimNetwork(uint64_t seed, int hosts, SimNetworkOptions options)
    : options_(options), random_(seed), hosts_(static_cast<size_t>(hosts)) {}

// --- Time ---

absl::Duration SimNetwork::UpTo(absl::Duration longest) {
  return absl::Nanoseconds(Below(static_cast<uint64_t>(absl::ToInt64Nanoseconds(longest)) + 1));
}

void SimNetwork::After(absl::Duration delay, Act act) {
  queue_.push({now_ + delay, order_++, std::move(act)});
}

void SimNetwork::RunOn(int host, absl::Duration delay, Act act) {
  After(delay, [this, host, epoch = At(host).epoch, act = std::move(act)]() mutable {
    RunNow(host, epoch, std::move(act));
  });
}

void SimNetwork::RunNow(int host, uint64_t epoch, Act act) {
  Host& at = At(host);
  if (at.epoch != epoch) return;
  if (at.paused) {
    at.put_off.emplace_back(epoch, std::move(act));
  } else {
    act();
  }
}

bool SimNetwork::RunOne(absl::Duration end) {
  if (queue_.empty() || queue_.top().at > end) {
    now_ = std::max(now_, end);
    return false;
  }
  // The queue gives only a const view of what is popped next.
  Act act = std::move(const_cast<Due&>(queue_.top()).act);
  now_ = std::max(now_, queue_.top().at);
  queue_.pop();
  act();
  return true;
}

// --- Hosts ---

void SimNetwork::Crash(int host) {
  ++At(host).epoch;
  At(host).paused = false;
  At(host).put_off.clear();
  for (size_t i = 0; i < links_.size(); ++i) {
    Link& link = links_[i];
    if (link.ends[0].host == host || link.ends[1].host == host) Break(i + 1);
  }
}

void SimNetwork::Pause(int host) { At(host).paused = true; }

void SimNetwork::Resume(int host) {
  At(host).paused = false;
  for (auto& [epoch, act] : std::exchange(At(host).put_off, {}))
    RunNow(host, epoch, std::move(act));
}

// --- Network ---

void SimNetwork::Cut(int host, int other) { cuts_.emplace_back(host, other); }

void SimNetwork::Heal() { cuts_.clear(); }

bool SimNetwork::is_cut(int host, int other) const {
  return std::any_of(cuts_.begin(), cuts_.end(), [&](const auto& cut) {
    return cut == std::make_pair(host, other) || cut == std::make_pair(other, host);
  });
}

absl::Duration SimNetwork::Delay() {
  if (Chance(options_.slow_one_in)) return UpTo(options_.slow);
  return options_.shortest + UpTo(options_.longest - options_.shortest);
}

void SimNetwork::Open(int from, int to, std::function<void(Stream)> up, Act failed,
                      std::function<void(Stream)> accepted) {
  if (is_cut(from, to)) return RunOn(from, options_.slow, std::move(failed));
  links_.push_back({});
  const Stream stream = links_.size();
  links_.back().ends[0] = {.host = from, .epoch = At(from).epoch, .open = true};
  links_.back().ends[1] = {.host = to, .epoch = At(to).epoch, .open = true};
  RunOn(to, Delay(), [this, stream, up = std::move(up), accepted = std::move(accepted)] {
    accepted(stream);
    Send(stream, links_[stream - 1].ends[1].host, [stream, up] { up(stream); });
  });
}

void SimNetwork::Send(Stream stream, int from, const Act& deliver) {
  Link& link = links_[stream - 1];
  const int side = link.ends[0].host == from ? 1 : 0;
  if (link.broken || !link.ends[1 - side].open) return;
  if (Chance(options_.lost_one_in)) return Break(stream);
  End& end = link.ends[side];
  end.clear = std::max(end.clear, now_ + Delay());
  const bool twice = Chance(options_.twice_one_in);
  for (int i = 0; i < (twice ? 2 : 1); ++i) {
    queue_.push(
        {end.clear, order_++, [this, stream, side, deliver] { Arrive(stream, side, deliver); }});
  }
}

void SimNetwork::Arrive(Stream stream, int side, const Act& deliver) {
  Link& link = links_[stream - 1];
  if (link.broken || !link.ends[side].open) return;
  // TCP would send it again for a while; whoever waits longer has lost the stream by then.
  if (is_cut(link.ends[0].host, link.ends[1].host)) return Break(stream);
  if (At(link.ends[side].host).paused && !std::exchange(link.watched, true)) {
    After(options_.longest_half_open, [this, stream, host = link.ends[side].host] {
      links_[stream - 1].watched = false;
      if (At(host).paused) Break(stream);
    });
  }
  RunNow(link.ends[side].host, link.ends[side].epoch, [this, stream, side, deliver] {
    if (links_[stream - 1].ends[side].open) deliver();
  });
}

void SimNetwork::WhenDown(Stream stream, int host, Act down) {
  Link& link = links_[stream - 1];
  const int side = link.ends[0].host == host ? 0 : 1;
  link.ends[side].down = std::move(down);
  if (link.broken) HearOfBreak(stream, side);
}

void SimNetwork::Close(Stream stream, int host) {
  Link& link = links_[stream - 1];
  link.ends[link.ends[0].host == host ? 0 : 1].open = false;
  if (link.broken) return;
  // What was sent before still arrives.
  const int side = link.ends[0].host == host ? 1 : 0;
  End& end = link.ends[side];
  end.clear = std::max(end.clear, now_ + Delay());
  queue_.push({end.clear, order_++, [this, stream] { Break(stream); }});
}

void SimNetwork::Break(Stream stream) {
  Link& link = links_[stream - 1];
  if (std::exchange(link.broken, true)) return;
  for (const int side : {0, 1}) HearOfBreak(stream, side);
}

void SimNetwork::HearOfBreak(Stream stream, int side) {
  const End& end = links_[stream - 1].ends[side];
  if (!end.open || end.epoch != At(end.host).epoch) return;
  const bool at_once = Below(2) == 0;
  const absl::Duration until = at_once ? options_.longest : UpTo(options_.longest_half_open);
  RunOn(end.host, until, [this, stream, side] {
    End& hears = links_[stream - 1].ends[side];
    if (!std::exchange(hears.open, false) || !hears.down) return;
    hears.down();
  });
}

SimNetwork::Stream SimNetwork::AnyStream() {
  for (size_t i = links_.size(); i > 0 && i + 40 > links_.size(); --i) {
    const size_t at = links_.size() > 40 ? links_.size() - 1 - Below(40) : Below(links_.size());
    const Link& link = links_[at];
    if (!link.broken && link.ends[0].open && link.ends[1].open) return at + 1;
  }
  return 0;
}

void SimNetwork::FaultsEnd() {
  options_.slow_one_in = options_.twice_one_in = options_.lost_one_in = 0;
}

}  // namespace outlast::testing
