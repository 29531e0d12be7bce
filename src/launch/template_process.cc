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
// From a birth, or from when the template was ready, to the next fork ahead: ranks that start have
// the machine for themselves.
constexpr int64_t kParkAfter = kSecond / 10;
// In the template's environment a tag is as long as any (run id, slot, incarnation): forks put
// their own there.
constexpr size_t kTagRoom = 72;

void PutTexts(PayloadWriter& writer, const std::vector<std::string>& texts) {
  writer.Int(static_cast<uint32_t>(texts.size()));
  for (const std::string& text : texts) writer.Text(text);
}

std::vector<int> NumbersOf(const std::vector<UniqueFd>& fds) {
  std::vector<int> numbers;
  numbers.reserve(fds.size());
  for (const UniqueFd& fd : fds) numbers.push_back(fd.get());
  return numbers;
}

void PutRole(PayloadWriter& writer, const Birth& birth, const std::string& tag) {
  std::vector<std::string> environment = birth.environment;
  environment.push_back(fmt::format("{}={}", kSlotTagVariable, tag));
  PutTexts(writer, environment);
  PutTexts(writer, birth.variables);
  writer.Int<int32_t>(birth.binding.numa);
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

void Gate::Open() { end_.TrySend(word_, NumbersOf(fds_)).IgnoreError(); }

// --- Its life ---

void TemplateProcess::Start() {
  is_given_up_ = false;
  end_by_ = kNever;
  if (const absl::Status started = TryStart(); !started.ok()) {
    Note(fmt::format("it could not be started: {}", MessageOf(started)));
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
  start.Int(static_cast<uint8_t>(TemplateOrder::kStart)).Int<uint32_t>(kOldestTemplateVersion);
  start.Text(orders_.program);
  PutTexts(start, orders_.arguments);
  start.Int<uint32_t>(kTemplateVersion);
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
  if (!std::exchange(is_given_up_, true)) Note(std::move(why));
  channel_ = Channel();
  parked_.clear();
  ReleaseAsked();
}

void TemplateProcess::Note(std::string line) { news_.notes.push_back(std::move(line)); }

// Whatever it may still fork finds its gate closed.
void TemplateProcess::ReleaseAsked() {
  for (auto& [request, asked] : asked_) {
    if (asked.birth) news_.refused.push_back(*std::move(asked.birth));
  }
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
  if (wants_to_park()) due = std::min(due, park_at_);
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
  if (wants_to_park() && now >= park_at_) {
    Asked asked;
    if (!Ask(asked).ok()) park_at_ = now + kParkAfter;
  }
}

// One at a time.
bool TemplateProcess::wants_to_park() const {
  return is_ready() && version_ > 1 && asked_.empty() && parked_.size() < slots_;
}

std::vector<pid_t> TemplateProcess::ParkedPids() const {
  std::vector<pid_t> pids;
  for (const Parked& parked : parked_) pids.push_back(parked.pid);
  return pids;
}

void TemplateProcess::OnForkEnded(pid_t pid) {
  std::erase_if(parked_, [&](const Parked& parked) { return parked.pid == pid; });
}

// --- Forks ---

absl::Status TemplateProcess::Fork(Birth& birth, const std::string& tag) {
  if (!parked_.empty()) {
    Parked parked = std::move(parked_.back());
    parked_.pop_back();
    TellForked(std::move(birth), tag, parked.pid, std::move(parked.gate));
    return absl::OkStatus();
  }
  for (auto& [request, asked] : asked_) {
    if (asked.birth) continue;
    asked.birth = std::move(birth);
    asked.tag = tag;
    return absl::OkStatus();
  }
  Asked asked;
  asked.birth = std::move(birth);
  asked.tag = tag;
  absl::Status sent = Ask(asked);
  if (!sent.ok()) birth = *std::move(asked.birth);
  return sent;
}

// Taken where it was sent.
absl::Status TemplateProcess::Ask(Asked& asked) {
  OUTLAST_ASSIGN_OR_RETURN(auto ends, Channel::MakePair());
  PayloadWriter order;
  order.Int(static_cast<uint8_t>(TemplateOrder::kFork))
      .Int<uint64_t>(++last_request_)
      .Int<int32_t>(guardian_);
  std::vector<int> fds = {ends.second.fd()};
  if (version_ == 1) {
    PutRole(order, *asked.birth, asked.tag);
    for (const UniqueFd& fd : asked.birth->fds) fds.push_back(fd.get());
  }
  OUTLAST_RETURN_IF_ERROR(channel_.TrySend(order.bytes(), fds));
  asked.gate = ends.first.Release();
  asked.deadline = MonotonicNanos() + kTemplateDeadlineNanos;
  asked_.emplace(last_request_, std::move(asked));
  return absl::OkStatus();
}

// What is asked for without a birth goes on, and is parked.
bool TemplateProcess::Cancel(int slot, uint64_t incarnation) {
  for (auto& [request, asked] : asked_) {
    if (!asked.birth || asked.birth->slot != slot || asked.birth->incarnation != incarnation)
      continue;
    if (version_ == 1) {
      asked_.erase(request);
    } else {
      asked.birth.reset();
    }
    return true;
  }
  return false;
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
    if (version < kOldestTemplateVersion || version > kTemplateVersion)
      return GiveUp(fmt::format("it speaks version {} of the protocol, {} to {} wanted", version,
                                kOldestTemplateVersion, kTemplateVersion));
    version_ = version;
    is_ready_ = true;
    ready_at_ = MonotonicNanos();
    park_at_ = ready_at_ + kParkAfter;
    refusal_.clear();
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
      if (std::exchange(refusal_, why) != why) Note(fmt::format("it refused to fork: {}", why));
      if (found->second.birth) news_.refused.push_back(*std::move(found->second.birth));
      asked_.erase(found);
      park_at_ = kNever;
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
  Asked asked = std::move(found->second);
  asked_.erase(found);
  if (asked.birth)
    return TellForked(*std::move(asked.birth), asked.tag, pid, std::move(asked.gate));
  parked_.push_back({pid, std::move(asked.gate)});
  park_at_ = MonotonicNanos() + kParkAfter;
}

void TemplateProcess::TellForked(Birth birth, const std::string& tag, pid_t pid, UniqueFd gate) {
  PayloadWriter role;
  std::vector<UniqueFd> fds;
  if (version_ == 1) {
    role.Int(uint8_t{1});  // it has its role already
  } else {
    PutRole(role, birth, tag);
    fds = std::exchange(birth.fds, {});
  }
  news_.forked.push_back(
      {std::move(birth), pid, Gate(std::move(gate), role.bytes(), std::move(fds))});
  park_at_ = MonotonicNanos() + kParkAfter;
}

}  // namespace outlast
