#include "control/coordinator_host.h"

#include <pthread.h>

#include <algorithm>
#include <thread>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"
#include "control/endpoint.h"
#include "control/journal_file.h"
#include "control/software.h"
#include "outlast/base/clock.h"
#include "outlast/elastic/coordinator.h"
#include "outlast/elastic/exit_code.h"
#include "outlast/elastic/journal.h"

namespace outlast {
namespace {

constexpr absl::Duration kGreetWithin = absl::Seconds(10);

bool MayListen(const CoordinatorHostOptions& options, const std::string& address) {
  return IsLoopback(address) || !options.token.empty() || !options.certificates.ca.empty() ||
         options.allow_strangers;
}

}  // namespace

// All but Start and the end is on its own thread.
class CoordinatorHost::Work {
 public:
  Work(EventLoop& caller, CoordinatorHostOptions options, Ears ears,
       std::unique_ptr<CoordinatorJournal> journal, std::unique_ptr<EventLoop> loop)
      : caller_(caller),
        options_(std::move(options)),
        ears_(std::move(ears)),
        journal_(std::move(journal)),
        coordinator_(options_.elastic, journal_->state(), Id128::Random(),
                     journal_->least_incarnation()),
        records_(journal_->state().records),
        loop_(std::move(loop)) {}

  absl::Status Start(control::Transport& transport);
  ~Work();

  const std::string& address() const { return address_; }
  void AskStop(int signal) {
    loop_->Post([this, signal] { Step(StopAsked{signal}); });
  }

 private:
  struct Stream {
    std::string address;
    EventLoop::TimerId greet_due = 0;
    control::Opening opening;
    std::string nonce;  // not empty: it was challenged
    bool greeted = false;
  };

  void Opened(uint64_t id, const std::string& address);
  void Heard(uint64_t id, const control::AgentFrame& frame, size_t bytes);
  void Closed(uint64_t id);
  void Hear(uint64_t id, Stream& stream, const control::Opening& opening);
  void Hear(uint64_t id, Stream& stream, const control::Greeting& greeting);
  std::string Distrust(const Stream& stream, const control::Greeting& greeting) const;
  void Refuse(uint64_t id, const Stream& stream, const std::string& reason);
  void Close(uint64_t id, const std::string& reason);

  void Step(const CoordinatorEvent& event);
  void CompactIfDue();
  // The machine's time stands still while its journal is written: what agents said meanwhile is not
  // heard yet, so that nobody is lost for the silence of a slow disk or store.
  absl::Duration Now() const { return Clock::Real().Uptime() - stood_still_; }
  bool Do(const AppendJournal& append);
  bool Do(const SendToAgent& send);
  bool Do(const CloseStream& close);
  bool Do(const ArmTimer& arm);
  bool Do(const DisarmTimer&);
  bool Do(const RecordFault& fault);
  bool Do(const FinishJob& finish);
  bool Do(const Announce& announce);
  bool Do(const StepDown& down);
  void Over(const absl::Status& status);
  void LookIfAllAreGone();
  void Tell(std::function<void()> ear) {
    caller_.Post([alive = std::weak_ptr<int>(alive_), ear = std::move(ear)] {
      if (alive.lock() != nullptr) ear();
    });
  }
  void Line(std::string line) {
    Tell([this, line = std::move(line)] { ears_.on_line(line); });
  }

  EventLoop& caller_;
  const CoordinatorHostOptions options_;
  const Ears ears_;
  std::shared_ptr<int> alive_ = std::make_shared<int>();
  std::string address_;

  std::unique_ptr<CoordinatorJournal> journal_;
  Coordinator coordinator_;
  std::unordered_map<uint64_t, Stream> streams_;
  EventLoop::TimerId timer_ = 0;
  absl::Duration stood_still_;
  bool is_over_ = false;
  uint64_t records_;               // since the journal was compacted, as far as is known
  std::string told_later_;         // the newest reason for which somebody is to try again
  bool any_greeted_ = false;       // somebody may come back and ask
  bool awaits_farewells_ = false;  // the job has ended, and all that it had were told

  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<control::FrameServer> server_;
  std::thread thread_;
};

absl::Status CoordinatorHost::Work::Start(control::Transport& transport) {
  OUTLAST_ASSIGN_OR_RETURN(const HostPort endpoint, HostPort::Parse(options_.listen));
  OUTLAST_ASSIGN_OR_RETURN(std::vector<std::string> addresses, ResolveHost(endpoint.host));
  // Two addresses with a port of the system's choice would have two ports.
  if (endpoint.port == 0) addresses.resize(1);
  for (const std::string& address : addresses) {
    if (MayListen(options_, address)) continue;
    return Error(absl::StatusCode::kFailedPrecondition,
                 "listen at {}: others than this machine reach it, so a job token is wanted "
                 "(--token-file), or --allow-strangers",
                 HostPort{address, endpoint.port}.text());
  }
  server_ = transport.Listen(
      addresses, endpoint.port, options_.certificates, options_.liveness,
      {.on_open =
           [this](uint64_t id, const std::string& address) {
             loop_->Post([this, id, address] { Opened(id, address); });
           },
       .on_frame =
           [this](uint64_t id, control::AgentFrame frame, size_t bytes) {
             loop_->Post([this, id, frame = std::move(frame), bytes] { Heard(id, frame, bytes); });
           },
       .on_closed = [this](uint64_t id,
                           const std::string&) { loop_->Post([this, id] { Closed(id); }); }});
  if (server_ == nullptr) {
    std::string tried;
    for (const std::string& address : addresses) {
      tried +=
          fmt::format("{}{}", tried.empty() ? "" : "; ", WhyNotBound({address, endpoint.port}));
    }
    return Error(absl::StatusCode::kUnavailable, "cannot listen at {}: {}", options_.listen, tried);
  }
  address_ = HostPort{addresses.front(), static_cast<uint16_t>(server_->port())}.text();
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "outlast-coord");
    loop_->Run();
  });
  loop_->Post([this] {
    if (!journal_->torn().empty()) Line("the journal's torn tail was cut: " + journal_->torn());
    const bool had_ended = coordinator_.state().ended.has_value();
    Step(StartEvent{});
    if (!had_ended) return;
    const EndedRecord& ended = *coordinator_.state().ended;
    any_greeted_ = true;  // by the one before
    Do(FinishJob{ExitCodeOf(JobOutcome::kRefused),
                 fmt::format("it had ended before, with {} ({}): agents that still ask are told "
                             "so; a new job wants a new folder",
                             ended.exit_code, ended.reason)});
  });
  return absl::OkStatus();
}

CoordinatorHost::Work::~Work() {
  alive_.reset();
  if (!thread_.joinable()) return;
  loop_->Post([this] {
    for (const auto& [id, stream] : streams_) server_->Close(id, "the coordinator ends");
  });
  loop_->Stop();
  thread_.join();
  server_.reset();  // before the loop that it posts to
}

// --- Streams ---

void CoordinatorHost::Work::Opened(uint64_t id, const std::string& address) {
  Stream& stream = streams_[id];
  stream.address = address;
  stream.greet_due =
      loop_->RunAfter(kGreetWithin, [this, id] { Close(id, "no hello came in time"); });
}

void CoordinatorHost::Work::Closed(uint64_t id) {
  const auto at = streams_.find(id);
  if (at == streams_.end()) return;
  const bool greeted = at->second.greeted;
  loop_->Cancel(at->second.greet_due);
  streams_.erase(at);
  if (greeted) Step(StreamLost{id});
  LookIfAllAreGone();
}

void CoordinatorHost::Work::Close(uint64_t id, const std::string& reason) {
  server_->Close(id, reason);
  const auto at = streams_.find(id);
  if (at == streams_.end()) return;
  loop_->Cancel(at->second.greet_due);
  streams_.erase(at);
  LookIfAllAreGone();
}

void CoordinatorHost::Work::Heard(uint64_t id, const control::AgentFrame& frame, size_t bytes) {
  const auto at = streams_.find(id);
  if (at == streams_.end() || is_over_) return;
  Stream& stream = at->second;
  const auto* message = std::get_if<control::AgentMessage>(&frame);
  if (stream.greeted) {
    if (message == nullptr) return Refuse(id, stream, "a second handshake on one stream");
    return Step(AgentSaid{id, *message});
  }
  if (bytes > control::kMaxGreetingBytes) {
    return Refuse(id, stream,
                  fmt::format("a greeting of {} bytes, at most {} are allowed", bytes,
                              control::kMaxGreetingBytes));
  }
  if (message != nullptr) return Refuse(id, stream, "a message before the hello");
  if (const auto* opening = std::get_if<control::Opening>(&frame))
    return Hear(id, stream, *opening);
  Hear(id, stream, std::get<control::Greeting>(frame));
}

void CoordinatorHost::Work::Hear(uint64_t id, Stream& stream, const control::Opening& opening) {
  if (!stream.nonce.empty()) return Refuse(id, stream, "a second opening on one stream");
  if (opening.version != control::kProtocolVersion) {
    return Refuse(id, stream,
                  fmt::format("agent {} speaks protocol version {} ({}), this coordinator {} ({})",
                              opening.node, opening.version, opening.software,
                              control::kProtocolVersion, control::kSoftware));
  }
  stream.opening = opening;
  stream.nonce = MakeNonce();
  const std::string& job = options_.elastic.job;
  server_->Send(id, control::Challenge{.software = control::kSoftware,
                                       .job = job,
                                       .nonce = stream.nonce,
                                       .proof = options_.token.Prove("coordinator", job,
                                                                     opening.nonce, stream.nonce)});
}

void CoordinatorHost::Work::Hear(uint64_t id, Stream& stream, const control::Greeting& greeting) {
  if (stream.nonce.empty()) return Refuse(id, stream, "a hello before the opening");
  stream.greeted = any_greeted_ = true;
  loop_->Cancel(stream.greet_due);
  Step(HelloReceived{id, greeting.hello, stream.address, Distrust(stream, greeting)});
}

std::string CoordinatorHost::Work::Distrust(const Stream& stream,
                                            const control::Greeting& greeting) const {
  if (greeting.hello.job != stream.opening.job || greeting.hello.node != stream.opening.node)
    return "its hello names another job or node than its opening";
  if (options_.token.empty()) return {};
  if (greeting.proof.empty()) return "it has no job token, this coordinator wants one";
  const bool is_proved = options_.token.Checks(greeting.proof, "agent", stream.opening.job,
                                               stream.nonce, stream.opening.nonce);
  return is_proved ? "" : "it did not prove that it knows the job token";
}

void CoordinatorHost::Work::Refuse(uint64_t id, const Stream& stream, const std::string& reason) {
  Line(fmt::format("refused {}: {}", stream.address, reason));
  server_->Send(id, control::Refused{control::Refusal::kNever, reason});
  const bool greeted = stream.greeted;
  Close(id, reason);
  if (greeted) Step(StreamLost{id});
}

// --- The machine ---

void CoordinatorHost::Work::Step(const CoordinatorEvent& event) {
  if (is_over_) return;
  for (const CoordinatorAction& action : coordinator_.Step(event, Now())) {
    if (!std::visit([this](const auto& typed) { return Do(typed); }, action)) return;
  }
  CompactIfDue();
}

// Between two steps, when the machine's state is what its journal says.
void CoordinatorHost::Work::CompactIfDue() {
  if (is_over_ || records_ < options_.compact_after) return;
  records_ = 0;
  const std::string base = EncodeJournalBase(coordinator_.state());
  if (base.size() > kMaxJournalPayload) return;
  const absl::Duration begun = Clock::Real().Uptime();
  const absl::Status done = journal_->Compact(base);
  stood_still_ += Clock::Real().Uptime() - begun;
  if (done.ok()) return;
  const std::string why(MessageOf(done));
  if (absl::IsAborted(done)) return Step(JournalRefused{why});
  Line(fmt::format("the journal is not compacted, and goes on: {}", why));
}

// False: the rest of the actions is not to be done.
bool CoordinatorHost::Work::Do(const AppendJournal& append) {
  const absl::Duration begun = Clock::Real().Uptime();
  const absl::Status done = journal_->Append(append.bytes);
  stood_still_ += Clock::Real().Uptime() - begun;
  ++records_;
  if (done.ok()) return true;
  Step(JournalRefused{std::string(MessageOf(done))});
  return false;
}

bool CoordinatorHost::Work::Do(const SendToAgent& send) {
  if (const auto* refused = std::get_if<control::Refused>(&send.message)) {
    const auto at = streams_.find(send.stream);
    // Who is to try again does so often.
    const bool is_told = refused->kind == control::Refusal::kLater &&
                         std::exchange(told_later_, refused->reason) == refused->reason;
    if (!is_told)
      Line(fmt::format("refused {}: {}", at != streams_.end() ? at->second.address : "an agent",
                       refused->reason));
  }
  server_->Send(send.stream, send.message);
  return true;
}

bool CoordinatorHost::Work::Do(const CloseStream& close) {
  Close(close.stream, close.reason);
  return true;
}

bool CoordinatorHost::Work::Do(const ArmTimer& arm) {
  loop_->Cancel(timer_);
  timer_ = loop_->RunAt(arm.at + stood_still_, [this, id = arm.timer] { Step(TimerFired{id}); });
  return true;
}

bool CoordinatorHost::Work::Do(const DisarmTimer&) {
  loop_->Cancel(timer_);
  return true;
}

bool CoordinatorHost::Work::Do(const RecordFault& fault) {
  Tell([this, fault] { ears_.on_fault(fault); });
  return true;
}

bool CoordinatorHost::Work::Do(const FinishJob& finish) {
  Tell([this, finish] { ears_.on_finish(finish); });
  awaits_farewells_ = coordinator_.absent() == 0;
  LookIfAllAreGone();
  const absl::Duration serve = any_greeted_ ? options_.serve_late : absl::ZeroDuration();
  loop_->RunAfter(serve, [this] { Over(absl::OkStatus()); });
  return true;
}

bool CoordinatorHost::Work::Do(const Announce& announce) {
  Line(announce.line);
  return true;
}

bool CoordinatorHost::Work::Do(const StepDown& down) {
  Over(MakeStatus(absl::StatusCode::kAborted, down.reason));
  return false;
}

void CoordinatorHost::Work::LookIfAllAreGone() {
  if (!awaits_farewells_) return;
  for (const auto& [id, stream] : streams_) {
    if (stream.greeted) return;
  }
  awaits_farewells_ = false;
  Tell([this] { ears_.on_all_told(); });
}

void CoordinatorHost::Work::Over(const absl::Status& status) {
  is_over_ = true;
  loop_->Cancel(timer_);
  for (const auto& [id, stream] : streams_)
    server_->Close(id, status.ok() ? "the job is over" : std::string(MessageOf(status)));
  Tell([this, status] { ears_.on_over(status); });
}

// --- From outside ---

CoordinatorHost::CoordinatorHost(std::unique_ptr<Work> work) : work_(std::move(work)) {}
CoordinatorHost::~CoordinatorHost() = default;

absl::StatusOr<std::unique_ptr<CoordinatorHost>> CoordinatorHost::Start(
    EventLoop& caller, control::Transport& transport, CoordinatorHostOptions options, Ears ears) {
  OUTLAST_RETURN_IF_ERROR(CheckDeadlines(options.elastic));
  OUTLAST_ASSIGN_OR_RETURN(JournalFile journal,
                           JournalFile::Open(options.journal, options.elastic.job));
  return Start(caller, transport, std::move(options), std::move(ears),
               std::make_unique<JournalFile>(std::move(journal)));
}

absl::StatusOr<std::unique_ptr<CoordinatorHost>> CoordinatorHost::Start(
    EventLoop& caller, control::Transport& transport, CoordinatorHostOptions options, Ears ears,
    std::unique_ptr<CoordinatorJournal> journal) {
  OUTLAST_RETURN_IF_ERROR(CheckDeadlines(options.elastic));
  if (const std::string unlike = WhyUnlike(journal->state(), options.elastic.terms);
      !unlike.empty()) {
    return MakeStatus(absl::StatusCode::kFailedPrecondition, unlike);
  }
  OUTLAST_ASSIGN_OR_RETURN(std::unique_ptr<EventLoop> loop, EventLoop::Make());
  auto work = std::make_unique<Work>(caller, std::move(options), std::move(ears),
                                     std::move(journal), std::move(loop));
  OUTLAST_RETURN_IF_ERROR(work->Start(transport));
  return std::unique_ptr<CoordinatorHost>(new CoordinatorHost(std::move(work)));
}

const std::string& CoordinatorHost::address() const { return work_->address(); }
void CoordinatorHost::AskStop(int signal) { work_->AskStop(signal); }

}  // namespace outlast
