#include "run/peer_dialer.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "outlast/base/clock.h"
#include "outlast/base/id.h"

namespace outlast {
namespace {

constexpr absl::Duration kFirstBackOff = absl::Milliseconds(50);
constexpr absl::Duration kLongestBackOff = absl::Seconds(2);
// A connection that stood so long was a good one: the next attempt need not be careful.
constexpr absl::Duration kGoodConnection = absl::Seconds(2);

// Between half of `most` and all of it: followers of one lead should not come all at once.
absl::Duration WithJitter(absl::Duration most) {
  constexpr double kAll = 18446744073709551616.0;  // 2^64
  return most * (0.5 + 0.5 * static_cast<double>(RandomU64()) / kAll);
}

}  // namespace

PeerDialer::PeerDialer(EventLoop& loop, const TcpPeersOptions& options, Ears ears)
    : loop_(loop), options_(options), ears_(std::move(ears)) {}

PeerDialer::~PeerDialer() {
  *is_gone_ = true;
  Stop();
}

void PeerDialer::Dial(const PeerIdentity& self, const std::string& lead_address) {
  Stop();
  self_ = self;
  lead_address_ = lead_address;
  back_off_ = kFirstBackOff;
  timer_ = loop_.RunAfter(absl::ZeroDuration(), [this] { Resolve(); });
}

void PeerDialer::DialAgain() {
  if (Clock::Real().Uptime() - up_at_ >= kGoodConnection) back_off_ = kFirstBackOff;
  Retry();
}

void PeerDialer::Stop() {
  ++dial_;
  loop_.Cancel(timer_);
  socket_.reset();
  addresses_.clear();
}

// Numbers are known at once; for names the machine's name service may take seconds, so they are
// asked for on a thread.
void PeerDialer::Resolve() {
  const auto at = HostPort::Parse(lead_address_);
  if (!at.ok()) return Fail(at.status());
  if (const auto number = NumericAddress(*at); number.ok()) {
    addresses_ = {*number};
    return Connect();
  }
  if (resolver_ == nullptr) resolver_ = std::make_unique<SerialThread>("outlast-names");
  resolver_->Post([this, at = *at, dial = dial_, is_gone = is_gone_, loop = &loop_] {
    auto found = ResolveAddress(at);
    loop->Post([this, dial, is_gone, found = std::move(found)] {
      if (*is_gone || dial != dial_) return;
      if (!found.ok()) return Fail(found.status());
      addresses_ = *found;
      Connect();
    });
  });
}

void PeerDialer::Connect() {
  // Each attempt tries the next of its addresses.
  auto fd = StartConnect(addresses_[next_address_++ % addresses_.size()]);
  if (!fd.ok()) return Fail(fd.status());
  is_proven_ = false;
  greeting_.emplace(self_, options_.token, Id128::Random());
  socket_ = std::make_unique<FrameSocket>(loop_, std::move(*fd), kMaxGreetingBytes);
  socket_->Listen({.on_frame = [this](uint16_t channel,
                                      const std::string& payload) { OnFrame(channel, payload); },
                   .on_end =
                       [this](const absl::Status& why) {
                         if (absl::IsUnavailable(why) || absl::IsDeadlineExceeded(why))
                           return Fail(why);
                         ears_.on_refused(TakeSocket(), why);
                         Retry();
                       }});
  socket_->SendWord(PeerWord::kHello, greeting_->hello());
  timer_ = loop_.RunAfter(options_.greeting, [this] {
    Fail(Error(absl::StatusCode::kDeadlineExceeded, "it did not answer within {}",
               absl::FormatDuration(options_.greeting)));
  });
}

void PeerDialer::OnFrame(uint16_t channel, const std::string& payload) {
  const auto word = static_cast<PeerWord>(payload.empty() ? 0 : payload[0]);
  const std::string_view rest = std::string_view(payload).substr(payload.empty() ? 0 : 1);
  if (channel == kLinkChannel && word == PeerWord::kRefused) return OnRefused(rest);
  if (channel == kLinkChannel && word == PeerWord::kChallenge && !is_proven_) {
    const auto proof = greeting_->Answer(rest);
    if (!proof.ok()) {
      ears_.on_refused(TakeSocket(), proof.status());
      return Retry();
    }
    is_proven_ = true;
    loop_.Cancel(timer_);
    socket_->SendWord(PeerWord::kProof, *proof);
    socket_->KeepAlive(options_.beat, options_.loss);  // it may wait for the lead's Enter
    return;
  }
  if (channel == kLinkChannel && word == PeerWord::kWelcome && is_proven_) {
    up_at_ = Clock::Real().Uptime();
    std::unique_ptr<FrameSocket> socket = TakeSocket();
    socket->set_max_payload(options_.max_message_bytes);
    return ears_.on_up(std::move(socket));
  }
  ears_.on_refused(TakeSocket(), absl::InvalidArgumentError("its words are no greeting"));
  Retry();
}

// Only the lead itself, proven, is believed that the generation is over.
void PeerDialer::OnRefused(std::string_view rest) {
  const RefusedWord word = ReadRefused(rest);
  const bool is_over = is_proven_ && word.kind == PeerRefusal::kGenerationIsOver;
  TakeSocket();
  if (!is_over) Retry();
  ears_.on_failed(MakeStatus(absl::StatusCode::kFailedPrecondition, "it refused: " + word.why));
}

void PeerDialer::Fail(const absl::Status& why) {
  TakeSocket();
  Retry();
  ears_.on_failed(why);
}

void PeerDialer::Retry() {
  loop_.Cancel(timer_);
  timer_ = loop_.RunAfter(WithJitter(back_off_), [this] { Resolve(); });
  back_off_ = std::min(back_off_ * 2, kLongestBackOff);
}

std::unique_ptr<FrameSocket> PeerDialer::TakeSocket() {
  loop_.Cancel(timer_);
  return std::move(socket_);
}

}  // namespace outlast
