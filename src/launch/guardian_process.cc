#include "launch/guardian_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <deque>
#include <map>
#include <set>

#include "base/error.h"
#include "launch/guardian_wire.h"
#include "launch/process.h"
#include "launch/run_ledger.h"
#include "outlast/base/clock.h"

extern char** environ;  // NOLINT(readability-redundant-declaration): POSIX asks for it

namespace outlast {
namespace {

constexpr char kTagVariable[] = "OUTLAST_SLOT_TAG";
constexpr std::string_view kBlackBoxVariable = "OUTLAST_BLACKBOX_FD";
constexpr std::string_view kRunDirVariable = "OUTLAST_RUN_DIR=";
constexpr int64_t kStuckAfterNanos = 5'000'000'000;
// A safety net only: ends are told by SIGCHLD. It catches a helper that was forked between a look
// and its parent's kill.
constexpr int kLookAgainMillis = 5;
constexpr absl::Duration kEndAllLimit = absl::Seconds(10);

constexpr int kPreferred = 1;  // MPOL_PREFERRED of linux/mempolicy.h

// An order to spawn, as it came.
struct Birth {
  int slot = 0;
  uint64_t incarnation = 0;
  std::vector<std::string> environment;
  std::vector<std::string> variables;  // of the descriptors after the first three
  std::vector<UniqueFd> fds;
  Binding binding;
};

// What a child that could not run the program tells through a pipe that a successful exec closes.
struct ExecFailure {
  int error_number;
  char step[28];
};

[[noreturn]] void FailChild(int pipe, const char* step) {
  ExecFailure failure{errno, {}};
  std::strncpy(failure.step, step, sizeof failure.step - 1);
  (void)!write(pipe, &failure, sizeof failure);
  _exit(127);
}

// In the child. A cpuset may have shrunk since the topology was read: then it is said in the
// worker's own errors, and the worker runs where it may.
void BindSelf(const Binding& binding) {
  if (!binding.cpus.empty()) {
    const auto count = static_cast<size_t>(binding.cpus.back()) + 1;
    cpu_set_t* const set = CPU_ALLOC(count);
    CPU_ZERO_S(CPU_ALLOC_SIZE(count), set);
    for (const int cpu : binding.cpus)
      CPU_SET_S(static_cast<size_t>(cpu), CPU_ALLOC_SIZE(count), set);
    if (sched_setaffinity(0, CPU_ALLOC_SIZE(count), set) != 0)
      PrintToStderr("outlast: CPUs {}: {}: not bound\n", CpuList(binding.cpus),
                    std::strerror(errno));
    CPU_FREE(set);
  }
  if (binding.numa < 0) return;
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, 16> nodes{};  // the kernel's largest configuration has 1024 of them
  const auto node = static_cast<size_t>(binding.numa);
  if (node >= kBits * nodes.size()) return;
  nodes[node / kBits] = 1ul << node % kBits;
  // A container's filter may forbid it, and the node may have no memory for us.
  if (syscall(SYS_set_mempolicy, kPreferred, nodes.data(), kBits * nodes.size() + 1) != 0)
    PrintToStderr("outlast: memory of NUMA node {}: {}: it comes from where it is touched\n",
                  binding.numa, std::strerror(errno));
}

// All that a child needs, ready before it is made: each page that it touches is copied for it. Not
// vfork, under which a program on a disk that hangs would stop us too.
struct Prepared {
  std::vector<std::string> strings;  // of the environment
  std::vector<char*> environment, arguments;
  std::vector<UniqueFd> handed_down;  // not close-on-exec; here only until the child has its own
};

// One worker, from its fork until nothing of its tree is left.
struct Ward {
  uint64_t incarnation = 0;
  pid_t pid = 0;
  std::string tag;
  UniqueFd failure;           // the reading end of the exec pipe
  bool asked_to_end = false;  // by a signal that a trainer may answer in its own time
  bool killing = false;
  bool stuck_told = false;
  int64_t killing_since = 0;
  bool ended = false;  // a zombie that keeps its pid ours until the tree is gone
  bool end_told = false;
  int code = 0, signal = 0;
};

class GuardianProcess {
 public:
  GuardianProcess(const GuardianCommand& command, Channel agent)
      : command_(command), agent_(std::move(agent)), self_(getpid()) {}

  bool SetUp();
  void Serve();
  // The agent was killed, and its workers are gone: writes the end of its ledger.
  void CompleteLedgerOfAgent() const;

 private:
  bool TakeOrder();
  void TakeBirth(PayloadReader& order, int slot, uint64_t incarnation, std::vector<UniqueFd> fds);
  // A slot keeps its box for the whole job.
  void KeepBlackBox(const Birth& birth);
  void Deliver(Birth birth);
  absl::Status Prepare(const Birth& birth, const std::string& tag, Prepared& prepared) const;
  [[noreturn]] void BecomeWorker(const Birth& birth, const Prepared& prepared, int failure_pipe);
  void RefuseBirth(const Birth& birth, std::string_view why);

  void Forward(Ward& ward, int signal);
  void SignalTree(const Ward& ward, int signal);
  void BeginKill(Ward& ward);

  void Reap();
  void Settle();
  void RefuseBirthsIfStuck();
  bool SettleWard(int slot, Ward& ward);
  void TellEnd(int slot, Ward& ward);
  bool is_killing() const;

  // The slot's living processes and zombies but for its worker's own, parents first.
  std::vector<ProcessInfo> TreeOf(const Ward& ward, bool with_worker) const;
  void Report(GuardianReportKind kind, int slot, uint64_t incarnation, int value, int signal,
              std::string_view error = {}, int fd = -1);

  const GuardianCommand& command_;
  Channel agent_;
  const pid_t self_;
  UniqueFd child_ended_;                 // a signalfd
  std::map<int, Ward> wards_;            // by slot
  std::deque<Birth> births_;             // wait until no tree is being killed
  std::map<int, UniqueFd> black_boxes_;  // by slot
  std::string run_dir_;
  bool was_told_to_finish_ = false;
};

bool GuardianProcess::SetUp() {
  prctl(PR_SET_NAME, "outlast-guard");
  setsid();  // Ctrl-C in the terminal is for the agent, which then asks the workers
  if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0) return false;
  // It must not hold the user's pipes open when the agent is gone.
  const UniqueFd null(open("/dev/null", O_RDWR | O_CLOEXEC));
  for (int fd = 0; fd < 3; ++fd) dup2(null.get(), fd);
  signal(SIGCHLD, SIG_DFL);
  sigset_t child;
  sigemptyset(&child);
  sigaddset(&child, SIGCHLD);
  child_ended_ = UniqueFd(signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK));
  return child_ended_.is_open();
}

void GuardianProcess::Serve() {
  while (true) {
    pollfd waits[2] = {{agent_.fd(), POLLIN, 0}, {child_ended_.get(), POLLIN, 0}};
    if (poll(waits, 2, is_killing() ? kLookAgainMillis : -1) < 0 && errno != EINTR) return;
    if (waits[1].revents != 0) {
      signalfd_siginfo info[16];
      while (read(child_ended_.get(), info, sizeof info) > 0) {
      }
    }
    Reap();
    if (waits[0].revents != 0 && !TakeOrder()) return;
    Settle();
  }
}

// --- Orders ---

bool GuardianProcess::TakeOrder() {
  auto packet = agent_.Receive();
  if (!packet.ok() || !packet->has_value()) return false;
  PayloadReader order((*packet)->bytes);
  const auto kind = static_cast<GuardianOrder>(order.Int<uint8_t>());
  const int slot = order.Int<int32_t>();
  const auto incarnation = order.Int<uint64_t>();
  if (kind == GuardianOrder::kFinish) {
    was_told_to_finish_ = true;
    return false;
  }
  if (kind == GuardianOrder::kSpawn) {
    TakeBirth(order, slot, incarnation, std::move((*packet)->fds));
    return true;
  }
  const auto found = wards_.find(slot);
  if (found == wards_.end() || found->second.incarnation != incarnation) {
    // Ended meanwhile, or not born yet: then it never is.
    for (auto birth = births_.begin(); birth != births_.end(); ++birth) {
      if (birth->slot != slot || birth->incarnation != incarnation) continue;
      Report(GuardianReportKind::kExited, slot, incarnation, 0, SIGKILL);
      Report(GuardianReportKind::kGone, slot, incarnation, 0, 0);
      births_.erase(birth);
      break;
    }
    return true;
  }
  Ward& ward = found->second;
  if (kind == GuardianOrder::kKill) {
    BeginKill(ward);
  } else if (kind == GuardianOrder::kTerminate) {
    ward.asked_to_end = true;
    SignalTree(ward, SIGTERM);
  } else {
    ward.asked_to_end = true;
    Forward(ward, order.Int<int32_t>());
  }
  return true;
}

void GuardianProcess::Forward(Ward& ward, int signal) {
  const std::optional<ProcessInfo> worker = ReadProcess(ward.pid);
  if (worker.has_value() && !ward.ended && CatchesSignal(ward.pid, signal)) {
    SendSignal(*worker, signal);  // a trainer with a handler knows its helpers itself
    return;
  }
  for (const ProcessInfo& process : TreeOf(ward, /*with_worker=*/true)) {
    SendSignal(process, CatchesSignal(process.pid, signal) ? signal : SIGTERM);
  }
}

void GuardianProcess::SignalTree(const Ward& ward, int signal) {
  for (const ProcessInfo& process : TreeOf(ward, /*with_worker=*/true)) {
    if (!process.is_zombie()) SendSignal(process, signal);
  }
}

void GuardianProcess::BeginKill(Ward& ward) {
  if (!ward.killing) ward.killing_since = MonotonicNanos();
  ward.killing = true;
  SignalTree(ward, SIGKILL);
}

// --- Birth ---

void GuardianProcess::TakeBirth(PayloadReader& order, int slot, uint64_t incarnation,
                                std::vector<UniqueFd> fds) {
  Birth birth{slot, incarnation, {}, {}, std::move(fds), {}};
  for (uint32_t left = order.Int<uint32_t>(); left > 0 && order.ok(); --left)
    birth.environment.emplace_back(order.Text());
  for (uint32_t left = order.Int<uint32_t>(); left > 0 && order.ok(); --left)
    birth.variables.emplace_back(order.Text());
  for (uint32_t left = order.Int<uint32_t>(); left > 0 && order.ok(); --left)
    birth.binding.cpus.push_back(order.Int<int32_t>());
  birth.binding.numa = order.Int<int32_t>();
  KeepBlackBox(birth);
  births_.push_back(std::move(birth));
}

void GuardianProcess::KeepBlackBox(const Birth& birth) {
  for (const std::string& variable : birth.environment) {
    if (variable.starts_with(kRunDirVariable)) run_dir_ = variable.substr(kRunDirVariable.size());
  }
  for (size_t i = 0; i < birth.variables.size() && i + 3 < birth.fds.size(); ++i) {
    if (birth.variables[i] != kBlackBoxVariable || black_boxes_.contains(birth.slot)) continue;
    UniqueFd box(fcntl(birth.fds[i + 3].get(), F_DUPFD_CLOEXEC, 3));
    if (box.is_open()) black_boxes_.emplace(birth.slot, std::move(box));
  }
}

void GuardianProcess::CompleteLedgerOfAgent() const {
  if (was_told_to_finish_ || run_dir_.empty()) return;
  std::map<int, int> boxes;
  for (const auto& [slot, box] : black_boxes_) boxes[slot] = box.get();
  CompleteLedger(run_dir_, boxes).IgnoreError();  // there is nobody left to tell
}

void GuardianProcess::RefuseBirth(const Birth& birth, std::string_view why) {
  Report(GuardianReportKind::kExited, birth.slot, birth.incarnation, 127, 0, why);
  Report(GuardianReportKind::kGone, birth.slot, birth.incarnation, 0, 0);
}

void GuardianProcess::Deliver(Birth birth) {
  Ward ward;
  ward.incarnation = birth.incarnation;
  ward.tag = fmt::format("{}.{}.{}", command_.run_id, birth.slot, birth.incarnation);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
    return RefuseBirth(birth, fmt::format("make a pipe: {}", std::strerror(errno)));
  ward.failure = UniqueFd(ends[0]);
  const UniqueFd write_end(ends[1]);
  Prepared prepared;
  if (const absl::Status ready = Prepare(birth, ward.tag, prepared); !ready.ok())
    return RefuseBirth(birth, MessageOf(ready));
  ward.pid = fork();
  if (ward.pid == 0) BecomeWorker(birth, prepared, write_end.get());
  if (ward.pid < 0) return RefuseBirth(birth, fmt::format("fork: {}", std::strerror(errno)));
  setpgid(ward.pid,
          ward.pid);  // the child does so too: whoever comes first, no signal can miss the group
  const absl::StatusOr<UniqueFd> pidfd = OpenPidFd(ward.pid);
  Report(GuardianReportKind::kStarted, birth.slot, birth.incarnation, ward.pid, 0, {},
         pidfd.ok() ? pidfd->get() : -1);
  wards_[birth.slot] = std::move(ward);
}

absl::Status GuardianProcess::Prepare(const Birth& birth, const std::string& tag,
                                      Prepared& prepared) const {
  // The tag comes first: it is found also in a very large environment.
  std::vector<std::string>& wanted = prepared.strings;
  wanted = {std::string(kTagVariable) + "=" + tag};
  wanted.insert(wanted.end(), birth.environment.begin(), birth.environment.end());
  for (size_t i = 0; i < birth.variables.size(); ++i) {
    // Not close-on-exec; numbers that the user handed down stay his.
    UniqueFd copy(fcntl(birth.fds[i + 3].get(), F_DUPFD, 3));
    if (!copy.is_open()) return ErrnoStatus(errno, "hand down descriptors");
    wanted.push_back(birth.variables[i] + "=" + std::to_string(copy.get()));
    prepared.handed_down.push_back(std::move(copy));
  }
  std::set<std::string_view> names;
  for (const std::string_view variable : wanted)
    names.insert(variable.substr(0, variable.find('=')));
  for (const std::string& variable : wanted)
    prepared.environment.push_back(const_cast<char*>(variable.c_str()));
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text(*variable);
    if (!names.contains(text.substr(0, text.find('=')))) prepared.environment.push_back(*variable);
  }
  for (const std::string& argument : command_.arguments)
    prepared.arguments.push_back(const_cast<char*>(argument.c_str()));
  prepared.environment.push_back(nullptr);
  prepared.arguments.push_back(nullptr);
  return absl::OkStatus();
}

void GuardianProcess::BecomeWorker(const Birth& birth, const Prepared& prepared, int failure_pipe) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != self_) _exit(127);  // the guardian died before the line above
  for (int fd = 0; fd < 3; ++fd) {
    if (dup2(birth.fds[static_cast<size_t>(fd)].get(), fd) < 0)
      FailChild(failure_pipe, "set up standard files");
  }
  BindSelf(birth.binding);
  sigprocmask(SIG_SETMASK, &command_.signal_mask, nullptr);
  execve(command_.program.c_str(), prepared.arguments.data(), prepared.environment.data());
  FailChild(failure_pipe, "run the command");
}

// --- Death ---

void GuardianProcess::Reap() {
  for (const pid_t pid : ChildrenOf(self_)) {
    Ward* ward = nullptr;
    for (auto& [slot, candidate] : wards_) {
      if (candidate.pid == pid) ward = &candidate;
    }
    siginfo_t info{};
    // A worker's zombie stays until its tree is gone: so long nobody else can get its pid, or its
    // process group.
    const int flags = WEXITED | WNOHANG | (ward != nullptr ? WNOWAIT : 0);
    if ((ward != nullptr && ward->ended) ||
        waitid(P_PID, static_cast<id_t>(pid), &info, flags) != 0 || info.si_pid == 0)
      continue;
    if (ward == nullptr) continue;
    ward->ended = true;
    (info.si_code == CLD_EXITED ? ward->code : ward->signal) = info.si_status;
  }
}

void GuardianProcess::TellEnd(int slot, Ward& ward) {
  if (std::exchange(ward.end_told, true)) return;
  ExecFailure failure{};
  std::string error;
  if (read(ward.failure.get(), &failure, sizeof failure) == static_cast<ssize_t>(sizeof failure)) {
    error = fmt::format("{}: {}", failure.step, std::strerror(failure.error_number));
  }
  ward.failure.Reset();
  Report(GuardianReportKind::kExited, slot, ward.incarnation, ward.code, ward.signal, error);
}

bool GuardianProcess::is_killing() const {
  for (const auto& [slot, ward] : wards_) {
    if (ward.killing) return true;
  }
  return false;
}

// True when nothing is left of it.
bool GuardianProcess::SettleWard(int slot, Ward& ward) {
  if (!ward.ended && !ward.killing) return false;
  if (ward.ended && !ward.asked_to_end) TellEnd(slot, ward);
  // `ended` was known before this look: what the worker left behind had come to us by then and
  // cannot be missed.
  const std::vector<ProcessInfo> tree = TreeOf(ward, /*with_worker=*/false);
  if (ward.ended && tree.empty()) {
    waitid(P_PID, static_cast<id_t>(ward.pid), nullptr, WEXITED | WNOHANG);
    TellEnd(slot, ward);
    Report(GuardianReportKind::kGone, slot, ward.incarnation, 0, 0);
    return true;
  }
  if (ward.ended && !ward.asked_to_end && !ward.killing) {
    ward.killing = true;
    ward.killing_since = MonotonicNanos();
  }
  if (!ward.killing) return false;
  for (const ProcessInfo& process : tree) {
    if (!process.is_zombie()) SendSignal(process, SIGKILL);
  }
  if (!ward.stuck_told && MonotonicNanos() - ward.killing_since > kStuckAfterNanos) {
    ward.stuck_told = true;
    Report(GuardianReportKind::kStuck, slot, ward.incarnation,
           tree.empty() ? ward.pid : tree[0].pid, 0);
  }
  return false;
}

// A slot is refilled only when nothing of its former process can write any more; and a wait has an
// end.
void GuardianProcess::RefuseBirthsIfStuck() {
  for (const auto& [stuck_slot, ward] : wards_) {
    if (!ward.stuck_told) continue;
    for (const Birth& birth : births_) {
      RefuseBirth(birth, fmt::format("slot {}'s former process {} does not end after SIGKILL",
                                     stuck_slot, ward.pid));
    }
    births_.clear();
    return;
  }
}

void GuardianProcess::Settle() {
  for (auto at = wards_.begin(); at != wards_.end();) {
    at = SettleWard(at->first, at->second) ? wards_.erase(at) : std::next(at);
  }
  RefuseBirthsIfStuck();
  while (!births_.empty() && !is_killing() && !wards_.contains(births_.front().slot)) {
    Birth birth = std::move(births_.front());
    births_.pop_front();
    Deliver(std::move(birth));
  }
}

std::vector<ProcessInfo> GuardianProcess::TreeOf(const Ward& ward, bool with_worker) const {
  std::vector<ProcessInfo> tree;
  std::set<pid_t> members = {ward.pid};
  std::set<pid_t> others;  // other slots' workers: what is below them is theirs
  for (const auto& [slot, other] : wards_) {
    if (other.pid != ward.pid) others.insert(other.pid);
  }
  for (const ProcessInfo& process : DescendantsOf(self_, others)) {
    if (process.pid == ward.pid) {
      if (with_worker) tree.push_back(process);
      continue;
    }
    const bool belongs =
        process.group == ward.pid || process.session == ward.pid ||
        members.contains(process.parent) ||
        (process.parent == self_ && EnvironmentOf(process.pid, kTagVariable) == ward.tag);
    if (!belongs) continue;
    members.insert(process.pid);
    tree.push_back(process);
  }
  return tree;
}

void GuardianProcess::Report(GuardianReportKind kind, int slot, uint64_t incarnation, int value,
                             int signal, std::string_view error, int fd) {
  PayloadWriter report;
  report.Int(static_cast<uint8_t>(kind)).Int<int32_t>(slot).Int<uint64_t>(incarnation);
  report.Int<int32_t>(value).Int<int32_t>(signal).Text(error);
  // A report that cannot be sent means that the agent is gone: the next look at its socket says so.
  agent_.Send(report.bytes(), fd >= 0 ? std::span<const int>(&fd, 1) : std::span<const int>())
      .IgnoreError();
}

}  // namespace

void RunGuardian(const GuardianCommand& command, Channel agent) {
  GuardianProcess process(command, std::move(agent));
  if (process.SetUp()) process.Serve();
  EndDescendants(kEndAllLimit).IgnoreError();
  process.CompleteLedgerOfAgent();
}

}  // namespace outlast
