// The Link over a real socket.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/channel.h"
#include "outlast/base/mutex.h"
#include "run/link.h"

namespace outlast {

// Its owner's reader thread feeds it: Deliver for each message, Abort before older generations'
// answers are useless, Close at the end. Safe for concurrent use.
class SocketLink final : public Link {
 public:
  explicit SocketLink(Channel channel) : channel_(std::move(channel)) {}

  absl::StatusOr<Message> Call(MessageKind kind, uint64_t generation, std::string_view payload,
                               absl::Duration timeout) override;
  absl::Status Notify(MessageKind kind, uint64_t generation, std::string_view payload) override;
  void OnMessage(MessageKind kind, std::function<void(const Message&)> handler) override;

  const Channel& channel() const { return channel_; }

  // An answer goes to the call that waits for it (a late one is dropped), a pushed message to the
  // handlers of its kind.
  void Deliver(Message message);
  // Ends the waiting calls of `generation` and older ones with kAborted, and later ones at once.
  void Abort(uint64_t generation, std::string_view reason);
  // Another process reads the other end from now on, and has none of the requests that it did not
  // see answered: sends those again that no generation's end has ended. One that is just being made
  // may be sent twice.
  void AskAgain();
  // Ends all calls, waiting and later ones, with `status`.
  void Close(const absl::Status& status);

 private:
  struct Waiting {
    uint64_t generation = 0;
    bool done = false;
    std::string encoded;  // of a request that outlives its generation
    absl::StatusOr<Message> result = absl::UnknownError("");
  };

  absl::Status CheckOpen(uint64_t generation) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Finish(Waiting& waiting, absl::StatusOr<Message> result)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Channel channel_;
  mutable Mutex mutex_;
  CondVar done_;
  uint64_t next_request_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<uint64_t, Waiting*> waiting_ ABSL_GUARDED_BY(mutex_);  // on the callers' stacks
  std::map<MessageKind, std::vector<std::function<void(const Message&)>>> handlers_
      ABSL_GUARDED_BY(mutex_);
  uint64_t aborted_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string abort_reason_ ABSL_GUARDED_BY(mutex_);
  absl::Status closed_ ABSL_GUARDED_BY(mutex_);
};

// The Link where no keeper is: each use tells why.
class NoLink final : public Link {
 public:
  explicit NoLink(absl::Status why) : why_(std::move(why)) {}

  absl::StatusOr<Message> Call(MessageKind, uint64_t, std::string_view, absl::Duration) override {
    return why_;
  }
  absl::Status Notify(MessageKind, uint64_t, std::string_view) override { return why_; }
  void OnMessage(MessageKind, std::function<void(const Message&)>) override {}

 private:
  const absl::Status why_;
};

}  // namespace outlast
