#include "launch/guardian.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "base/error.h"
#include "launch/adoption.h"
#include "launch/guardian_process.h"
#include "launch/guardian_wire.h"
#include "launch/process.h"
#include "outlast/base/clock.h"
#include "run/wire.h"

namespace outlast {

namespace {

constexpr absl::Duration kReaperLimit = absl::Seconds(10);

// Between the agent and a guardian that may outlive it: inherits and ends what a killed guardian
// leaves, as the agent does for one that ends with it. `alive` is open as long as it lives.
// Returns in the guardian, which has a door by then, and has said so with its pid: the kernel tells
// whoever knocks the pid of the process that listened.
UniqueFd StartBelowReaper(const Channel& channel, UniqueFd alive, const std::string& run_id) {
  prctl(PR_SET_NAME, "outlast-reaper");
  setsid();
  if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0) _exit(1);
  const pid_t guardian = fork();
  if (guardian == 0) {
    auto door = ListenForAgents(run_id);
    const pid_t self = getpid();
    if (!door.ok() || write(alive.get(), &self, sizeof self) != sizeof self) _exit(1);
    return *std::move(door);
  }
  close(channel.fd());  // the guardian's alone
  const UniqueFd null(open("/dev/null", O_RDWR | O_CLOEXEC));
  for (int fd = 0; fd < 3; ++fd) dup2(null.get(), fd);
  while (waitpid(guardian, nullptr, 0) < 0 && errno == EINTR) {
  }
  _exit(EndDescendants(kReaperLimit).ok() ? 0 : 1);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Guardian>> Guardian::Fork(const GuardianCommand& command) {
  if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0)
    return ErrnoStatus(errno, "become a subreaper");
  OUTLAST_ASSIGN_OR_RETURN(auto ends, Channel::MakePair());
  const bool may_outlive = command.adopt_within > absl::ZeroDuration();
  UniqueFd reaper, reaper_end;
  if (may_outlive) {
    int pipe_ends[2];
    if (pipe2(pipe_ends, O_CLOEXEC) != 0) return ErrnoStatus(errno, "make a pipe");
    reaper = UniqueFd(pipe_ends[0]);
    reaper_end = UniqueFd(pipe_ends[1]);
  }
  // Blocked from its first instruction: a Ctrl-C between fork and the guardian's own set-up must
  // not end it.
  sigset_t all, before;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, &before);
  const pid_t agent = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    ends.first = Channel();
    reaper.Reset();
    UniqueFd door;
    if (may_outlive) door = StartBelowReaper(ends.second, std::move(reaper_end), command.run_id);
    RunGuardian(command, std::move(ends.second), agent, std::move(door));
    _exit(0);
  }
  const int fork_errno = errno;
  sigprocmask(SIG_SETMASK, &before, nullptr);
  if (pid < 0) return ErrnoStatus(fork_errno, "fork the guardian");
  std::unique_ptr<Guardian> guardian(new Guardian(pid, std::move(ends.first)));
  if (!may_outlive) return guardian;
  reaper_end.Reset();
  ssize_t count;
  while ((count = read(reaper.get(), &guardian->pid_, sizeof guardian->pid_)) < 0 &&
         errno == EINTR) {
  }
  if (count != sizeof guardian->pid_)
    return Error(absl::StatusCode::kUnavailable, "the guardian could not be forked");
  guardian->child_ = pid;
  guardian->reaper_ = std::move(reaper);
  return guardian;
}

void Guardian::AwaitReaper(absl::Duration limit) {
  if (!reaper_.is_open()) return;
  pollfd ended{reaper_.get(), POLLIN, 0};
  poll(&ended, 1, static_cast<int>(absl::ToInt64Milliseconds(limit)));
}

absl::StatusOr<Guardian::Adoption> Guardian::Adopt(pid_t pid, UniqueFd process, Channel channel,
                                                   const std::string& run_id) {
  PayloadWriter order;
  order.Int(static_cast<uint8_t>(GuardianOrder::kAdopt)).Int<int32_t>(0).Int<uint64_t>(0);
  order.Int(kGuardianVersion).Int(static_cast<uint32_t>(kWireVersion)).Text(run_id);
  OUTLAST_RETURN_IF_ERROR(channel.Send(order.bytes()));
  Adoption adoption;
  adoption.guardian.reset(new Guardian(pid, std::move(channel)));
  adoption.guardian->child_ = 0;
  adoption.guardian->process_ = std::move(process);
  const absl::Status taken = adoption.guardian->TakeKept(adoption);
  if (const auto reaper = adoption.kept.find(kReaperKey);
      reaper != adoption.kept.end() && !reaper->second.fds.empty())
    adoption.guardian->reaper_ = std::move(reaper->second.fds.front());
  if (taken.ok()) return adoption;
  adoption.guardian->Abandon();
  return taken;
}

absl::Status Guardian::TakeKept(Adoption& adoption) {
  constexpr int kPatienceMillis = 5000;
  while (true) {
    pollfd readable{channel_.fd(), POLLIN, 0};
    const int ready = poll(&readable, 1, kPatienceMillis);
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0)
      return Error(absl::StatusCode::kUnavailable, "guardian {}: no answer within {} s", pid_,
                   kPatienceMillis / 1000);
    OUTLAST_ASSIGN_OR_RETURN(auto packet, channel_.Receive());
    if (!packet.has_value())
      return Error(absl::StatusCode::kUnavailable, "guardian {}: it has just ended", pid_);
    PayloadReader reader(packet->bytes);
    const auto kind = static_cast<GuardianReportKind>(reader.Int<uint8_t>());
    reader.Int<int32_t>();
    reader.Int<uint64_t>();
    reader.Int<int32_t>();
    reader.Int<int32_t>();
    const std::string_view text = reader.Text();
    if (kind == GuardianReportKind::kRefused)
      return Error(absl::StatusCode::kFailedPrecondition, "guardian {}: {}", pid_, text);
    if (kind == GuardianReportKind::kKept) {
      adoption.kept[std::string(text)] = {std::string(reader.Text()), std::move(packet->fds)};
      continue;
    }
    PayloadReader list(text);
    for (uint32_t left = list.Int<uint32_t>(); left > 0 && list.ok(); --left) {
      const int slot = list.Int<int32_t>();
      const auto incarnation = list.Int<uint64_t>();
      adoption.workers[slot] = {incarnation, list.Int<int32_t>()};
    }
    if (kind == GuardianReportKind::kAdopted && list.ok()) return absl::OkStatus();
    return Error(absl::StatusCode::kInternal, "guardian {}: report {} in an adoption", pid_,
                 static_cast<int>(kind));
  }
}

absl::Status Guardian::Keep(const std::string& key, std::string_view bytes,
                            std::span<const int> fds) {
  PayloadWriter order;
  order.Int(static_cast<uint8_t>(GuardianOrder::kKeep)).Int<int32_t>(0).Int<uint64_t>(0);
  order.Text(key).Text(bytes);
  return channel_.Send(order.bytes(), fds);
}

void Guardian::Abandon() {
  finished_ = true;
  channel_ = Channel();
}

Guardian::~Guardian() { Finish(absl::Seconds(10)).IgnoreError(); }

absl::Status Guardian::Spawn(const WorkerSpec& spec) {
  PayloadWriter order;
  order.Int(static_cast<uint8_t>(GuardianOrder::kSpawn))
      .Int<int32_t>(spec.slot)
      .Int<uint64_t>(spec.incarnation)
      .Int<uint8_t>(spec.may_be_forked ? 1 : 0);
  order.Int(static_cast<uint32_t>(spec.environment.size()));
  for (const std::string& variable : spec.environment) order.Text(variable);
  order.Int(static_cast<uint32_t>(spec.descriptors.size()));
  std::vector<int> fds(spec.standard.begin(), spec.standard.end());
  for (const auto& [variable, fd] : spec.descriptors) {
    order.Text(variable);
    fds.push_back(fd);
  }
  order.Int(static_cast<uint32_t>(spec.binding.cpus.size()));
  for (const int cpu : spec.binding.cpus) order.Int<int32_t>(cpu);
  order.Int<int32_t>(spec.binding.numa).Int<uint16_t>(spec.master_port);
  order.Int<uint8_t>(spec.is_master ? 1 : 0);
  return channel_.Send(order.bytes(), fds);
}

absl::Status Guardian::StartTemplate(const TemplateSpec& spec) {
  PayloadWriter order;
  order.Int(static_cast<uint8_t>(GuardianOrder::kTemplate)).Int<int32_t>(0).Int<uint64_t>(0);
  order.Text(spec.program);
  for (const auto* texts : {&spec.arguments, &spec.environment}) {
    order.Int(static_cast<uint32_t>(texts->size()));
    for (const std::string& text : *texts) order.Text(text);
  }
  return channel_.Send(order.bytes(), spec.standard);
}

absl::Status Guardian::Order(uint8_t kind, int slot, uint64_t incarnation, int signal) {
  return channel_.Send(PayloadWriter()
                           .Int(kind)
                           .Int<int32_t>(slot)
                           .Int<uint64_t>(incarnation)
                           .Int<int32_t>(signal)
                           .bytes());
}

absl::Status Guardian::Forward(int slot, uint64_t incarnation, int signal) {
  return Order(static_cast<uint8_t>(GuardianOrder::kForward), slot, incarnation, signal);
}

absl::Status Guardian::Terminate(int slot, uint64_t incarnation) {
  return Order(static_cast<uint8_t>(GuardianOrder::kTerminate), slot, incarnation, SIGTERM);
}

absl::Status Guardian::Kill(int slot, uint64_t incarnation) {
  return Order(static_cast<uint8_t>(GuardianOrder::kKill), slot, incarnation, SIGKILL);
}

absl::StatusOr<std::optional<GuardianReport>> Guardian::Receive() {
  OUTLAST_ASSIGN_OR_RETURN(auto packet, channel_.Receive());
  if (!packet.has_value()) return std::optional<GuardianReport>();
  PayloadReader reader(packet->bytes);
  const auto kind = static_cast<GuardianReportKind>(reader.Int<uint8_t>());
  const int slot = reader.Int<int32_t>();
  const auto incarnation = reader.Int<uint64_t>();
  const int value = reader.Int<int32_t>();
  const int signal = reader.Int<int32_t>();
  const std::string error(reader.Text());
  switch (kind) {
    case GuardianReportKind::kStarted:
      return std::optional<GuardianReport>(
          WorkerStarted{slot, incarnation, value,
                        packet->fds.empty() ? UniqueFd() : std::move(packet->fds[0]), signal != 0});
    case GuardianReportKind::kExited:
      return std::optional<GuardianReport>(WorkerExited{slot, incarnation, value, signal, error});
    case GuardianReportKind::kGone:
      return std::optional<GuardianReport>(TreeGone{slot, incarnation});
    case GuardianReportKind::kStuck:
      return std::optional<GuardianReport>(TreeStuck{slot, incarnation, value});
    case GuardianReportKind::kTemplateReady:
      return std::optional<GuardianReport>(TemplateReady{value});
    case GuardianReportKind::kTemplateNote:
      return std::optional<GuardianReport>(TemplateNote{error});
    case GuardianReportKind::kKept:
    case GuardianReportKind::kAdopted:
    case GuardianReportKind::kRefused:
      break;
  }
  return Error(absl::StatusCode::kInternal, "report {} of the guardian: unknown",
               static_cast<int>(kind));
}

absl::Status Guardian::Finish(absl::Duration limit) {
  if (std::exchange(finished_, true)) return absl::OkStatus();
  // Told so, it knows that the agent was not killed.
  Order(static_cast<uint8_t>(GuardianOrder::kFinish), 0, 0, 0).IgnoreError();
  // Its handle first: after waitpid the pid may be anybody's.
  const bool is_child = child_ > 0;
  absl::StatusOr<UniqueFd> process = is_child ? OpenPidFd(child_) : std::move(process_);
  channel_ = Channel();  // the guardian ends at the end of file too
  if (process.ok()) {
    pollfd ended{process->get(), POLLIN, 0};
    const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(limit);
    int ready;
    do {
      const int64_t left = (deadline - MonotonicNanos()) / 1'000'000;
      ready = poll(&ended, 1, left > 0 ? static_cast<int>(left) : 0);
    } while (ready < 0 && errno == EINTR);
    if (ready == 0) {
      return Error(absl::StatusCode::kDeadlineExceeded,
                   "guardian {}: its workers did not end within {} s", pid_,
                   absl::ToDoubleSeconds(limit));
    }
  }
  while (is_child && waitpid(child_, nullptr, 0) < 0 && errno == EINTR) {
  }
  return absl::OkStatus();
}

}  // namespace outlast
