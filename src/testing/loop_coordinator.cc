#include "testing/loop_coordinator.h"

#include <utility>
#include <variant>

#include "outlast/base/clock.h"
#include "outlast/elastic/journal.h"

namespace outlast::testing {

class LoopCoordinator::Link final : public CoordinatorLink {
 public:
  explicit Link(LoopCoordinator& host) : host_(host) {}
  ~Link() override { Drop(""); }

  void Listen(Ears ears) override { ears_ = std::move(ears); }
  void Open() override {
    Later([this] {
      if (host_.machine_.has_value()) {
        stream_ = host_.Accept(*this);
        ears_.on_up();
      } else {
        ears_.on_down("no coordinator listens");
      }
    });
  }
  void Hello(const control::Hello& hello) override {
    if (stream_ == 0) return;
    host_.Later([host = &host_, stream = stream_, hello] {
      host->Step(HelloReceived{stream, hello, "the loop", ""});
    });
  }
  void Send(const control::AgentMessage& message) override {
    if (stream_ == 0) return;
    host_.Later([host = &host_, stream = stream_, message] {
      host->Step(AgentSaid{stream, message});
    });
  }
  void Drop(const std::string&) override {
    attempt_ = std::make_shared<int>();
    if (stream_ != 0) host_.Lose(std::exchange(stream_, 0));
  }

  void Say(const control::CoordinatorMessage& message) {
    Later([this, message] { ears_.on_said(message); });
  }
  // The other side ended the stream: after what it had said.
  void Close(const std::string& why) {
    Later([this, why] {
      stream_ = 0;
      ears_.on_down(why);
    });
  }
  // Before anything that was under way.
  void Break() {
    attempt_ = std::make_shared<int>();
    Close("the coordinator crashed");
  }

 private:
  // `work`, later, unless the attempt is over by then.
  void Later(std::function<void()> work) {
    host_.loop_.Post([attempt = std::weak_ptr<int>(attempt_), work = std::move(work)] {
      if (!attempt.expired()) work();
    });
  }

  LoopCoordinator& host_;
  Ears ears_;
  std::shared_ptr<int> attempt_ = std::make_shared<int>();
  uint64_t stream_ = 0;
};

void LoopCoordinator::Start() {
  auto content = ReadJournal(journal_);
  machine_.emplace(options_, std::move(content).value().state, run_id_);
  life_ = std::make_shared<int>();
  Step(StartEvent{});
}

void LoopCoordinator::Crash() {
  machine_.reset();
  life_.reset();
  loop_.Cancel(timer_);
  for (const auto& [stream, link] : std::exchange(links_, {})) link->Break();
}

void LoopCoordinator::AskStop(int signal) { Step(StopAsked{signal}); }

std::unique_ptr<CoordinatorLink> LoopCoordinator::MakeLink() {
  return std::make_unique<Link>(*this);
}

void LoopCoordinator::Later(std::function<void()> work) {
  loop_.Post([life = std::weak_ptr<int>(life_), work = std::move(work)] {
    if (!life.expired()) work();
  });
}

uint64_t LoopCoordinator::Accept(Link& link) {
  links_[++last_stream_] = &link;
  return last_stream_;
}

void LoopCoordinator::Lose(uint64_t stream) {
  if (links_.erase(stream) == 0) return;
  Later([this, stream] { Step(StreamLost{stream}); });
}

void LoopCoordinator::Step(const CoordinatorEvent& event) {
  if (!machine_.has_value()) return;
  for (const CoordinatorAction& action : machine_->Step(event, Clock::Real().Uptime())) Do(action);
}

void LoopCoordinator::Do(const CoordinatorAction& action) {
  if (const auto* append = std::get_if<AppendJournal>(&action)) journal_ += append->bytes;
  if (const auto* send = std::get_if<SendToAgent>(&action)) {
    if (const auto link = links_.find(send->stream); link != links_.end())
      link->second->Say(send->message);
  }
  if (const auto* close = std::get_if<CloseStream>(&action)) {
    if (const auto link = links_.extract(close->stream); !link.empty())
      link.mapped()->Close(close->reason);
  }
  if (const auto* arm = std::get_if<ArmTimer>(&action)) {
    loop_.Cancel(timer_);
    timer_ = loop_.RunAt(arm->at, [this, id = arm->timer] { Step(TimerFired{id}); });
  }
  if (std::holds_alternative<DisarmTimer>(action)) loop_.Cancel(timer_);
  if (const auto* finish = std::get_if<FinishJob>(&action)) on_finish(*finish);
}

}  // namespace outlast::testing
