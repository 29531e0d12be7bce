#include "run/frame_socket.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "base/socket.h"
#include "outlast/base/clock.h"

namespace outlast {
namespace {

constexpr size_t kReadBytes = 64 << 10;
constexpr int kReadsAtOnce = 16;  // a peer that sends much must not keep the loop from others
constexpr size_t kPiecesAtOnce = 32;

std::string RemoteHost(int fd) {
  const auto remote = SocketAddress::Remote(fd);
  return remote.ok() ? remote->host_port().host : "?";
}

}  // namespace

FrameSocket::FrameSocket(EventLoop& loop, UniqueFd fd, size_t max_payload)
    : loop_(loop), fd_(std::move(fd)), remote_host_(RemoteHost(fd_.get())), parser_(max_payload) {
  const absl::Status watched = loop_.Watch(fd_.get(), [this] { OnReady(); });
  if (!watched.ok()) {  // no memory in the kernel
    loop_.Post([this, watched, is_gone = is_gone_] {
      if (!*is_gone) End(watched);
    });
  }
  WatchWritesIfNeeded();
}

FrameSocket::~FrameSocket() {
  *is_gone_ = true;
  loop_.Cancel(timer_);
  loop_.Unwatch(fd_.get());
}

// --- Out ---

void FrameSocket::Send(Frame frame) {
  if (is_over_ || is_finishing_) return;
  queued_bytes_ += frame.size();
  queue_.push_back(std::move(frame));
  if (is_decided_ && !watches_writes_) Write();
}

void FrameSocket::SendWord(PeerWord word, std::string_view rest) {
  std::string payload(1, static_cast<char>(word));
  payload.append(rest);
  Send(MakeFrame(kLinkChannel, std::move(payload)));
}

void FrameSocket::Finish() {
  if (std::exchange(is_finishing_, true)) return;
  if (queue_.empty()) shutdown(fd_.get(), SHUT_WR);
}

// An error is left for the loop to find: none of the ears is called from within Send.
void FrameSocket::Write() {
  while (!queue_.empty()) {
    std::array<iovec, kPiecesAtOnce> pieces;
    size_t count = 0;
    size_t skip = sent_of_first_;
    for (auto frame = queue_.begin(); frame != queue_.end() && count + 2 <= pieces.size();
         ++frame) {
      for (std::string* part : {&frame->header, &frame->payload}) {
        const size_t skipped = std::min(skip, part->size());
        skip -= skipped;
        if (skipped < part->size())
          pieces[count++] = {part->data() + skipped, part->size() - skipped};
      }
    }
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = count;
    const ssize_t sent = sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) break;
    queued_bytes_ -= static_cast<size_t>(sent);
    sent_of_first_ += static_cast<size_t>(sent);
    while (!queue_.empty() && sent_of_first_ >= queue_.front().size()) {
      sent_of_first_ -= queue_.front().size();
      queue_.pop_front();
    }
  }
  if (queue_.empty() && is_finishing_) shutdown(fd_.get(), SHUT_WR);
  WatchWritesIfNeeded();
}

void FrameSocket::WatchWritesIfNeeded() {
  const bool wanted = !is_over_ && (!is_decided_ || !queue_.empty());
  if (wanted == watches_writes_) return;
  watches_writes_ = wanted;
  (void)loop_.WatchWrites(fd_.get(), wanted);
}

std::deque<Frame> FrameSocket::TakeUnsent() {
  std::deque<Frame> queue = std::exchange(queue_, {});
  if (sent_of_first_ > 0) queue_.push_back(queue.front());
  queued_bytes_ = queue_.empty() ? 0 : queue_.front().size() - sent_of_first_;
  std::erase_if(queue, [](const Frame& frame) { return frame.channel() == kLinkChannel; });
  return queue;
}

// --- In ---

void FrameSocket::OnReady() {
  if (!is_decided_) {
    const absl::Status error = SocketError(fd_.get());
    if (!error.ok()) return End(error);
    is_decided_ = true;
    remote_host_ = RemoteHost(fd_.get());
  }
  const auto is_gone = is_gone_;
  Read();
  if (*is_gone || is_over_) return;
  if (!queue_.empty() || is_finishing_) {
    Write();
  } else {
    WatchWritesIfNeeded();
  }
}

void FrameSocket::Read() {
  std::array<char, kReadBytes> buffer;
  for (int i = 0; i < kReadsAtOnce; ++i) {
    const ssize_t count = recv(fd_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (count > 0) {
      heard_at_ = Clock::Real().Uptime();
      if (!is_finishing_ && !is_deaf_ && !Parse({buffer.data(), static_cast<size_t>(count)}))
        return;
      if (static_cast<size_t>(count) < buffer.size()) return;
      continue;
    }
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (is_finishing_) Write();  // a peer that has shut its side may still read ours
    End(count < 0 ? ErrnoStatus(errno, "connection")
                  : absl::UnavailableError("it closed the connection"));
    return;
  }
}

bool FrameSocket::Parse(std::string_view bytes) {
  FrameParser::Parsed frame;
  while (!bytes.empty()) {
    if (const absl::Status parsed = parser_.Take(&bytes, &frame); !parsed.ok()) {
      is_deaf_ = true;
      TellEnd(parsed);
      return false;
    }
    if (!parser_.is_whole()) continue;
    if (frame.channel == kLinkChannel && frame.payload.size() == 1 &&
        frame.payload[0] == static_cast<char>(PeerWord::kBeat))
      continue;
    const auto ears = ears_;
    const auto is_gone = is_gone_;
    ears->on_frame(frame.channel, frame.payload);
    if (*is_gone || is_over_) return false;
    if (is_finishing_) return true;  // the rest is dropped
  }
  return true;
}

void FrameSocket::End(const absl::Status& why) {
  if (std::exchange(is_over_, true)) return;
  loop_.Cancel(timer_);
  loop_.Unwatch(fd_.get());  // the socket stays open until it is destroyed
  TellEnd(why);
}

void FrameSocket::TellEnd(const absl::Status& why) {
  if (std::exchange(has_told_, true)) return;
  const auto ears = ears_;
  ears->on_end(why);
}

// --- Signs of life ---

void FrameSocket::KeepAlive(absl::Duration beat, absl::Duration loss) {
  beat_ = beat;
  loss_ = loss;
  heard_at_ = Clock::Real().Uptime();
  beat_at_ = heard_at_ + beat_;
  ArmTimer();
}

void FrameSocket::ArmTimer() {
  loop_.Cancel(timer_);
  timer_ = loop_.RunAt(std::min(beat_at_, heard_at_ + loss_), [this] { OnTimer(); });
}

void FrameSocket::OnTimer() {
  // What lies in the socket counts: this process may be the one that stood still.
  const auto is_gone = is_gone_;
  if (Clock::Real().Uptime() >= heard_at_ + loss_) Read();
  if (*is_gone || is_over_) return;
  const absl::Duration now = Clock::Real().Uptime();
  if (now >= heard_at_ + loss_) {
    End(Error(absl::StatusCode::kDeadlineExceeded, "nothing was heard of it for {}",
              absl::FormatDuration(loss_)));
    return;
  }
  if (now >= beat_at_) {
    // Where something waits already, that is the sign of life.
    if (queue_.empty()) SendWord(PeerWord::kBeat, {});
    beat_at_ = now + beat_;
  }
  ArmTimer();
}

}  // namespace outlast
