#include "launch/template_process.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "base/error.h"
#include "launch/process.h"
#include "outlast/base/clock.h"
#include "run/template_wire.h"

namespace outlast {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kLongestPause = 60 * kSecond;
constexpr int64_t kSteadyAfter = 60 * kSecond;  // ready for so long, its next pause is the first
// In the template's environment a tag is as long as any (run id, slot, incarnation): forks put
// their own there.
constexpr size_t kTagRoom = 72;

void PutTexts(PayloadWriter& writer, const std::vector<std::string>& texts) {
  writer.Int(static_cast<uint32_t>(texts.size()));
  for (const std::string& text : texts) writer.Text(text);
}

}  // namespace

TemplateProcess::TemplateProcess(const GuardianCommand& orders, std::string program,
                                 std::vector<std::string> arguments, Birth birth)
    : orders_(orders),
      guardian_(getpid()),
      program_(std::move(program)),
      arguments_(std::move(arguments)),
      birth_(std::move(birth)) {
  Start();
}

// --- Its life ---

void TemplateProcess::Start() {
  is_given_up_ = false;
  end_by_ = kNever;
  if (const absl::Status started = TryStart(); !started.ok()) {
    news_.notes.push_back(fmt::format("it could not be started: {}", MessageOf(started)));
    PauseThenStart();
  }
}

absl::Status TemplateProcess::TryStart() {
  OUTLAST_ASSIGN_OR_RETURN(auto ends, Channel::MakePair());
  int pipe_ends[2];
  if (pipe2(pipe_ends, O_CLOEXEC | O_NONBLOCK) != 0) return ErrnoStatus(errno, "make a pipe");
  failure_ = UniqueFd(pipe_ends[0]);
  const UniqueFd write_end(pipe_ends[1]);
  Birth birth;
  birth.environment = birth_.environment;
  birth.variables = {kTemplateVariable};
  for (int i = 0; i < 3; ++i) {
    OUTLAST_ASSIGN_OR_RETURN(UniqueFd copy, Duplicate(birth_.fds[static_cast<size_t>(i)].get()));
    birth.fds.push_back(std::move(copy));
  }
  birth.fds.push_back(ends.second.Release());
  PreparedBirth prepared;
  OUTLAST_RETURN_IF_ERROR(Prepare(birth, std::string(kTagRoom, '-'), arguments_, prepared));
  const pid_t pid = fork();
  if (pid == 0)
    BecomeProgram(program_, birth, prepared, guardian_, {orders_.signal_mask, orders_.descriptors},
                  write_end.get());
  if (pid < 0) return ErrnoStatus(errno, "fork");
  setpgid(pid, pid);
  pid_ = pid;
  channel_ = std::move(ends.first);
  PayloadWriter start;
  start.Int(static_cast<uint8_t>(TemplateOrder::kStart)).Int<uint32_t>(kTemplateVersion);
  start.Text(orders_.program);
  PutTexts(start, orders_.arguments);
  if (const absl::Status sent = channel_.TrySend(start.bytes()); !sent.ok())
    GiveUp(fmt::format("the job's command was not taken: {}", MessageOf(sent)));
  return absl::OkStatus();
}

void TemplateProcess::PauseThenStart() {
  const int64_t now = MonotonicNanos();
  if (is_ready_ && now - ready_at_ > kSteadyAfter) pause_ = 0;
  is_ready_ = false;
  pause_ = std::clamp(2 * pause_, kSecond, kLongestPause);
  start_at_ = now + pause_;
}

void TemplateProcess::GiveUp(std::string why) {
  if (pid_ > 0) kill(pid_, SIGKILL);  // our child, and not reaped: nobody else has its pid
  if (!std::exchange(is_given_up_, true)) news_.notes.push_back(std::move(why));
  channel_ = Channel();
  ReleaseAsked();
}

// Whatever it may still fork finds its gate closed.
void TemplateProcess::ReleaseAsked() {
  for (auto& [request, asked] : asked_) news_.refused.push_back(std::move(asked.birth));
  asked_.clear();
}

void TemplateProcess::OnEnded(int code, int signal) {
  ExecFailure failure{};
  if (read(failure_.get(), &failure, sizeof failure) == static_cast<ssize_t>(sizeof failure)) {
    GiveUp(TextOf(failure));
  } else if (signal != 0) {
    GiveUp(fmt::format("it was ended by signal {}", signal));
  } else {
    GiveUp(fmt::format("it ended with exit code {}", code));
  }
  pid_ = 0;
  PauseThenStart();
}

int64_t TemplateProcess::due_nanos() const {
  int64_t due = pid_ == 0 ? start_at_ : end_by_;
  for (const auto& [request, asked] : asked_) due = std::min(due, asked.deadline);
  return due;
}

void TemplateProcess::Tick() {
  const int64_t now = MonotonicNanos();
  if (pid_ == 0 && now >= start_at_) return Start();
  if (now >= end_by_) {
    end_by_ = kNever;
    return GiveUp("it closed its socket and did not end");
  }
  for (const auto& [request, asked] : asked_) {
    if (now >= asked.deadline)
      return GiveUp(fmt::format("it did not fork within {} s", kTemplateDeadlineNanos / kSecond));
  }
}

// --- Forks ---

absl::Status TemplateProcess::Fork(Birth& birth, const std::string& tag) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    return ErrnoStatus(errno, "make a socket pair");
  Asked asked{.gate = UniqueFd(ends[0]), .deadline = MonotonicNanos() + kTemplateDeadlineNanos};
  const UniqueFd far_end(ends[1]);
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  PayloadWriter order;
  order.Int(static_cast<uint8_t>(TemplateOrder::kFork))
      .Int<uint64_t>(++last_request_)
      .Int<int32_t>(guardian_);
  std::vector<std::string> environment = birth.environment;
  environment.push_back(fmt::format("{}={}", kSlotTagVariable, tag));
  PutTexts(order, environment);
  PutTexts(order, birth.variables);
  order.Int<int32_t>(birth.binding.numa);
  std::vector<int> fds = {far_end.get()};
  for (const UniqueFd& fd : birth.fds) fds.push_back(fd.get());
  OUTLAST_RETURN_IF_ERROR(channel_.TrySend(order.bytes(), fds));
  asked.birth = std::move(birth);
  asked_.emplace(last_request_, std::move(asked));
  return absl::OkStatus();
}

bool TemplateProcess::Cancel(int slot, uint64_t incarnation) {
  return std::erase_if(asked_, [&](const auto& entry) {
           return entry.second.birth.slot == slot && entry.second.birth.incarnation == incarnation;
         }) > 0;
}

void TemplateProcess::OnReadable() {
  // Which may bring more than one message; the rest wakes us again.
  const auto packet = channel_.TryReceive();
  if (packet.status().code() == absl::StatusCode::kResourceExhausted) return;
  if (!packet.ok()) return GiveUp(fmt::format("it said: {}", MessageOf(packet.status())));
  if (packet->has_value()) return Read(**packet);
  // How it ends is told when it is reaped, which may take it a moment.
  channel_ = Channel();
  end_by_ = MonotonicNanos() + kTemplateDeadlineNanos;
  ReleaseAsked();
}

void TemplateProcess::Read(const Channel::Packet& packet) {
  PayloadReader answer(packet.bytes);
  const auto kind = static_cast<TemplateAnswer>(answer.Int<uint8_t>());
  if (kind == TemplateAnswer::kReady && !is_ready_) {
    const auto version = answer.Int<uint32_t>();
    if (version != kTemplateVersion)
      return GiveUp(fmt::format("it speaks version {} of the protocol, {} wanted", version,
                                kTemplateVersion));
    is_ready_ = true;
    ready_at_ = MonotonicNanos();
    news_.is_ready = true;
    return;
  }
  const auto request = answer.Int<uint64_t>();
  if (kind == TemplateAnswer::kForked) {
    const pid_t pid = answer.Int<int32_t>();
    if (answer.ok() && is_ready_) return TakeForked(request, pid);
  }
  if (kind == TemplateAnswer::kRefused && is_ready_) {
    std::string why(answer.Text().substr(0, kTemplateTextBytes));
    std::replace_if(
        why.begin(), why.end(), [](char c) { return c >= 0 && c < ' '; }, ' ');
    const auto found = asked_.find(request);
    if (answer.ok() && found != asked_.end()) {
      news_.notes.push_back(fmt::format("it refused to fork: {}", why));
      news_.refused.push_back(std::move(found->second.birth));
      asked_.erase(found);
    }
    if (answer.ok()) return;
  }
  GiveUp("it said something that is no answer");
}

void TemplateProcess::TakeForked(uint64_t request, pid_t pid) {
  const auto found = asked_.find(request);
  if (found == asked_.end()) return;  // given up: its gate is closed
  const auto process = ReadProcess(pid);
  // A child that has ended stays one until it is reaped, and it is not while we ask.
  if (!process.has_value() || process->parent != guardian_ || pid == pid_)
    return GiveUp("it forked a process that is no child of the guardian");
  news_.forked.push_back({std::move(found->second.birth), pid, std::move(found->second.gate)});
  asked_.erase(found);
}

}  // namespace outlast
