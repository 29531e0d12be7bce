#include "run/worker_line.h"

#include <utility>

#include "base/error.h"

namespace outlast {
namespace {

constexpr size_t kMaxOutboxBytes = 4 << 20;
constexpr absl::Duration kRetry = absl::Milliseconds(10);

}  // namespace

absl::StatusOr<UniqueFd> WorkerLine::Open(std::function<void()> on_readable) {
  Close();
  OUTLAST_ASSIGN_OR_RETURN(auto ends, Channel::MakePair());
  OUTLAST_RETURN_IF_ERROR(loop_.Watch(ends.first.fd(), std::move(on_readable)));
  channel_ = std::move(ends.first);
  return ends.second.Release();
}

absl::Status WorkerLine::Resume(UniqueFd end, std::function<void()> on_readable) {
  Close();
  OUTLAST_RETURN_IF_ERROR(loop_.Watch(end.get(), std::move(on_readable)));
  channel_ = Channel(std::move(end));
  return absl::OkStatus();
}

void WorkerLine::Close() {
  if (timer_.has_value()) loop_.Cancel(*timer_);
  timer_.reset();
  outbox_.clear();
  outbox_bytes_ = 0;
  if (!is_open()) return;
  loop_.Unwatch(channel_.fd());
  channel_ = Channel();
}

absl::Status WorkerLine::Send(const Message& message, std::span<const int> fds) {
  if (!is_open()) return absl::OkStatus();
  Outgoing outgoing{Encode(message), {}};
  if (outbox_.empty()) {
    const absl::Status sent = channel_.TrySend(outgoing.bytes, fds);
    if (sent.code() == absl::StatusCode::kInvalidArgument) return sent;
    if (sent.code() != absl::StatusCode::kResourceExhausted) return absl::OkStatus();
  }
  for (const int fd : fds) {
    if (auto copy = Duplicate(fd); copy.ok()) outgoing.fds.push_back(std::move(*copy));
  }
  outbox_bytes_ += outgoing.bytes.size();
  outbox_.push_back(std::move(outgoing));
  if (outbox_bytes_ > kMaxOutboxBytes) {
    const absl::Status cut_off =
        Error(absl::StatusCode::kUnavailable, "{} bytes of messages were not read: cut off",
              outbox_bytes_);
    Close();
    return cut_off;
  }
  if (!timer_.has_value()) SendLater();
  return absl::OkStatus();
}

void WorkerLine::SendLater() {
  timer_ = loop_.RunAfter(kRetry, [this] { Flush(); });
}

void WorkerLine::Flush() {
  timer_.reset();
  while (!outbox_.empty()) {
    const Outgoing& next = outbox_.front();
    std::vector<int> fds;
    for (const UniqueFd& fd : next.fds) fds.push_back(fd.get());
    const absl::Status sent = channel_.TrySend(next.bytes, fds);
    if (sent.code() == absl::StatusCode::kResourceExhausted) return SendLater();
    outbox_bytes_ -= next.bytes.size();
    outbox_.pop_front();
  }
}

absl::StatusOr<std::optional<Message>> WorkerLine::Receive() {
  if (!is_open()) return std::nullopt;
  auto packet = channel_.TryReceive();
  const absl::StatusCode code = packet.status().code();
  if (code == absl::StatusCode::kResourceExhausted || code == absl::StatusCode::kInvalidArgument)
    return packet.status();
  if (!packet.ok() || !packet->has_value()) {
    Close();
    return std::nullopt;
  }
  auto message = Decode(std::move(**packet));
  if (!message.ok()) return message.status();
  return std::optional<Message>(*std::move(message));
}

}  // namespace outlast
