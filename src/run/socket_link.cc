#include "run/socket_link.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "outlast/base/clock.h"

namespace outlast {

absl::Status SocketLink::CheckOpen(uint64_t generation) const {
  if (!closed_.ok()) return closed_;
  if (generation != 0 && generation <= aborted_) {
    return Error(absl::StatusCode::kAborted, "generation {} has ended: {}", generation,
                 abort_reason_);
  }
  return absl::OkStatus();
}

void SocketLink::Finish(Waiting& waiting, absl::StatusOr<Message> result) {
  waiting.result = std::move(result);
  waiting.done = true;
  done_.NotifyAll();
}

absl::StatusOr<Message> SocketLink::Call(MessageKind kind, uint64_t generation,
                                         std::string_view payload, absl::Duration timeout) {
  const absl::Duration deadline = Clock::Real().Uptime() + timeout;
  Waiting waiting;
  waiting.generation = generation;
  Message message{.kind = kind, .generation = generation, .payload = std::string(payload)};
  std::string encoded;
  {
    MutexLock lock(mutex_);
    OUTLAST_RETURN_IF_ERROR(CheckOpen(generation));
    message.request = next_request_++;
    encoded = Encode(message);
    if (generation == 0) waiting.encoded = encoded;
    waiting_[message.request] = &waiting;
  }
  const absl::Status sent = channel_.Send(encoded);
  MutexLock lock(mutex_);
  if (!sent.ok() && !waiting.done) Finish(waiting, Annotate(sent, "ask the agent"));
  while (!waiting.done && Clock::Real().Uptime() < deadline)
    done_.WaitFor(mutex_, deadline - Clock::Real().Uptime());
  waiting_.erase(message.request);
  if (waiting.done) return std::move(waiting.result);
  return Error(absl::StatusCode::kDeadlineExceeded,
               "request {} of kind {}: no answer from the agent within {}", message.request,
               static_cast<int>(kind), absl::FormatDuration(timeout));
}

absl::Status SocketLink::Notify(MessageKind kind, uint64_t generation, std::string_view payload) {
  {
    MutexLock lock(mutex_);
    if (!closed_.ok()) return closed_;
  }
  return Annotate(channel_.Send(Encode(
                      {.kind = kind, .generation = generation, .payload = std::string(payload)})),
                  "tell the agent");
}

void SocketLink::OnMessage(MessageKind kind, std::function<void(const Message&)> handler) {
  MutexLock lock(mutex_);
  handlers_[kind].push_back(std::move(handler));
}

void SocketLink::Deliver(Message message) {
  std::vector<std::function<void(const Message&)>> handlers;
  {
    MutexLock lock(mutex_);
    if (message.kind == MessageKind::kAnswer) {
      const auto found = waiting_.find(message.request);
      if (found == waiting_.end() || found->second->done) return;
      if (message.status != absl::StatusCode::kOk)
        return Finish(*found->second, MakeStatus(message.status, message.payload));
      return Finish(*found->second, std::move(message));
    }
    if (const auto found = handlers_.find(message.kind); found != handlers_.end())
      handlers = found->second;
  }
  for (const auto& handler : handlers) handler(message);
}

void SocketLink::Abort(uint64_t generation, std::string_view reason) {
  MutexLock lock(mutex_);
  if (generation <= aborted_) return;
  aborted_ = generation;
  abort_reason_ = reason;
  for (auto& [request, waiting] : waiting_) {
    if (waiting->done) continue;
    if (absl::Status ended = CheckOpen(waiting->generation); !ended.ok())
      Finish(*waiting, std::move(ended));
  }
}

void SocketLink::AskAgain() {
  std::vector<std::string> open;
  {
    MutexLock lock(mutex_);
    for (const auto& [request, waiting] : waiting_) {
      if (!waiting->done && !waiting->encoded.empty()) open.push_back(waiting->encoded);
    }
  }
  for (const std::string& request : open) (void)channel_.Send(request);
}

void SocketLink::Close(const absl::Status& status) {
  MutexLock lock(mutex_);
  if (!closed_.ok()) return;
  closed_ = status;
  for (auto& [request, waiting] : waiting_) {
    if (!waiting->done) Finish(*waiting, status);
  }
}

}  // namespace outlast
