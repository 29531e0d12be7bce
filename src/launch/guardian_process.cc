#include "launch/guardian_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <map>
#include <set>

#include "base/error.h"
#include "base/listening.h"
#include "base/prompt_thread.h"
#include "launch/guardian_state.h"
#include "launch/process.h"
#include "launch/run_ledger.h"
#include "outlast/base/clock.h"
#include "run/template_wire.h"

namespace outlast {
namespace {

constexpr std::string_view kBlackBoxVariable = "OUTLAST_BLACKBOX_FD";
constexpr std::string_view kRunDirVariable = "OUTLAST_RUN_DIR=";
constexpr int64_t kStuckAfterNanos = 5'000'000'000;
// A safety net only: ends are told by SIGCHLD. It catches a helper that was forked between a look
// and its parent's kill.
constexpr int kLookAgainMillis = 5;
constexpr int64_t kMasterNanos = 100'000'000;
constexpr absl::Duration kEndAllLimit = absl::Seconds(10);

}  // namespace

bool GuardianProcess::SetUp() {
  prctl(PR_SET_NAME, "outlast-guard");
  BecomePrompt();
  // What it keeps for the next agent is several a worker.
  if (door_.is_open()) RaiseDescriptorLimit();
  setsid();  // Ctrl-C in the terminal is for the agent, which then asks the workers
  if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0) return false;
  // It must not hold the user's pipes open when the agent is gone.
  const UniqueFd null(open("/dev/null", O_RDWR | O_CLOEXEC));
  for (int fd = 0; fd < 3; ++fd) dup2(null.get(), fd);
  signal(SIGCHLD, SIG_DFL);
  sigset_t child;
  sigemptyset(&child);
  sigaddset(&child, SIGCHLD);
  sigaddset(&child, SIGTERM);
  child_ended_ = UniqueFd(signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK));
  return child_ended_.is_open();
}

void GuardianProcess::Serve() {
  while (true) {
    const int of_template = template_.has_value() ? template_->fd() : -1;  // -1: poll leaves it out
    const int door = candidate_.fd() < 0 ? door_.get() : -1;               // one at a time
    pollfd waits[5] = {{agent_.fd(), POLLIN, 0},
                       {child_ended_.get(), POLLIN, 0},
                       {of_template, POLLIN, 0},
                       {door, POLLIN, 0},
                       {candidate_.fd(), POLLIN, 0}};
    if (poll(waits, 5, PollMillis()) < 0 && errno != EINTR) return;
    if (waits[1].revents != 0) {
      signalfd_siginfo info[16];
      ssize_t bytes;
      while ((bytes = read(child_ended_.get(), info, sizeof info)) > 0) {
        for (size_t i = 0; i < static_cast<size_t>(bytes) / sizeof info[0]; ++i)
          was_terminated_ = was_terminated_ || info[i].ssi_signo == SIGTERM;
      }
    }
    // Before children are reaped: what it has forked must be known by then.
    if (template_.has_value()) ListenToTemplate(waits[2].revents != 0);
    Reap();
    if (waits[0].revents != 0 && !TakeOrder()) {
      if (was_told_to_finish_ || !MayOutliveAgent()) return;
      LoseAgent();
    }
    if (was_terminated_ && !has_agent()) return;  // an agent decides itself
    if (waits[3].revents != 0) Meet();
    // Of an agent that is gone all orders are read first: so long it still counts as there.
    const bool is_agent_leaving = has_agent() && (waits[0].revents & POLLHUP) != 0;
    if (waits[4].revents != 0 && !is_agent_leaving) Hear();
    if (candidate_.fd() >= 0 && MonotonicNanos() >= candidate_due_) candidate_ = Channel();
    if (!has_agent() && MonotonicNanos() >= adopt_due_) return;
    Settle();
  }
}

int GuardianProcess::PollMillis() const {
  if (is_killing()) return kLookAgainMillis;
  const auto is_held = [](const auto& entry) { return entry.second.gate.has_value(); };
  if (std::any_of(wards_.begin(), wards_.end(), is_held)) return 1;
  int64_t due = TemplateProcess::kNever;
  if (template_.has_value()) due = template_->due_nanos();
  if (!has_agent()) due = std::min(due, adopt_due_);
  if (candidate_.fd() >= 0) due = std::min(due, candidate_due_);
  if (due == TemplateProcess::kNever) return -1;
  // Rounded up: woken early, it would ask for no time at all.
  return static_cast<int>(std::max<int64_t>(0, (due - MonotonicNanos()) / 1'000'000 + 1));
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
  if (kind == GuardianOrder::kTemplate) {
    StartTemplate(order, std::move((*packet)->fds));
    return true;
  }
  if (kind == GuardianOrder::kKeep) {
    const std::string key(order.Text());
    kept_[key] = {std::string(order.Text()), std::move((*packet)->fds)};
    return true;
  }
  const auto found = wards_.find(slot);
  if (found == wards_.end() || found->second.incarnation != incarnation) {
    CancelBirth(slot, incarnation);
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

// Ended meanwhile, or not born yet: then it never is.
void GuardianProcess::CancelBirth(int slot, uint64_t incarnation) {
  const bool was_waiting = std::erase_if(births_, [&](const Birth& birth) {
                             return birth.slot == slot && birth.incarnation == incarnation;
                           }) > 0;
  const bool was_asked = template_.has_value() && template_->Cancel(slot, incarnation);
  if (!was_waiting && !was_asked) return;
  Report(GuardianReportKind::kExited, slot, incarnation, 0, SIGKILL);
  Report(GuardianReportKind::kGone, slot, incarnation, 0, 0);
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
  Birth birth{.slot = slot, .incarnation = incarnation, .fds = std::move(fds)};
  birth.may_be_forked = order.Int<uint8_t>() != 0;
  for (uint32_t left = order.Int<uint32_t>(); left > 0 && order.ok(); --left)
    birth.environment.emplace_back(order.Text());
  for (uint32_t left = order.Int<uint32_t>(); left > 0 && order.ok(); --left)
    birth.variables.emplace_back(order.Text());
  for (uint32_t left = order.Int<uint32_t>(); left > 0 && order.ok(); --left)
    birth.binding.cpus.push_back(order.Int<int32_t>());
  birth.binding.numa = order.Int<int32_t>();
  birth.master_port = order.Int<uint16_t>();
  birth.is_master = order.Int<uint8_t>() != 0;
  KeepBlackBox(birth);
  fates_[slot] = {.incarnation = incarnation, .error = {}};
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

std::string GuardianProcess::TagOf(const Birth& birth) const {
  return fmt::format("{}.{}.{}", command_.run_id, birth.slot, birth.incarnation);
}

void GuardianProcess::Deliver(Birth birth) {
  if (birth.may_be_forked && AskTemplate(birth)) return;
  Ward ward;
  ward.incarnation = birth.incarnation;
  ward.tag = TagOf(birth);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
    return RefuseBirth(birth, fmt::format("make a pipe: {}", std::strerror(errno)));
  ward.failure = UniqueFd(ends[0]);
  const UniqueFd write_end(ends[1]);
  PreparedBirth prepared;
  if (const absl::Status ready = Prepare(birth, ward.tag, command_.arguments, prepared);
      !ready.ok())
    return RefuseBirth(birth, MessageOf(ready));
  ward.pid = fork();
  if (ward.pid == 0) {
    BecomeProgram(command_.program, birth, prepared, self_,
                  {command_.signal_mask, command_.descriptors}, write_end.get());
  }
  if (ward.pid < 0) return RefuseBirth(birth, fmt::format("fork: {}", std::strerror(errno)));
  setpgid(ward.pid,
          ward.pid);  // the child does so too: whoever comes first, no signal can miss the group
  const absl::StatusOr<UniqueFd> pidfd = OpenPidFd(ward.pid);
  Report(GuardianReportKind::kStarted, birth.slot, birth.incarnation, ward.pid, 0, {},
         pidfd.ok() ? pidfd->get() : -1);
  wards_[birth.slot] = std::move(ward);
}

// --- Template ---

void GuardianProcess::StartTemplate(PayloadReader& order, std::vector<UniqueFd> fds) {
  if (template_.has_value()) return;  // a former agent had it started
  const std::string program(order.Text());
  std::vector<std::string> arguments;
  for (uint32_t left = order.Int<uint32_t>(); left > 0 && order.ok(); --left)
    arguments.emplace_back(order.Text());
  Birth birth{.fds = std::move(fds)};
  for (uint32_t left = order.Int<uint32_t>(); left > 0 && order.ok(); --left)
    birth.environment.emplace_back(order.Text());
  template_.emplace(command_, program, std::move(arguments), std::move(birth));
}

bool GuardianProcess::AskTemplate(Birth& birth) {
  if (!template_.has_value()) return false;
  if (!template_->is_ready()) {
    Report(GuardianReportKind::kTemplateNote, 0, 0, 0, 0, "it is not ready");
    return false;
  }
  const absl::Status asked = template_->Fork(birth, TagOf(birth));
  if (!asked.ok()) Report(GuardianReportKind::kTemplateNote, 0, 0, 0, 0, MessageOf(asked));
  TakeNewsOfTemplate();  // a parked one is there at once
  return asked.ok();
}

void GuardianProcess::ListenToTemplate(bool is_readable) {
  template_->SetSlots(fates_.size());
  if (is_readable) template_->OnReadable();
  template_->Tick();
  TakeNewsOfTemplate();
}

void GuardianProcess::TakeNewsOfTemplate() {
  TemplateProcess::News news = template_->TakeNews();
  if (news.is_ready) Report(GuardianReportKind::kTemplateReady, 0, 0, template_->pid(), 0);
  is_template_untold_ = !has_agent() && (news.is_ready || is_template_untold_);
  for (auto& forked : news.forked) Adopt(std::move(forked));
  for (const std::string& note : news.notes)
    Report(GuardianReportKind::kTemplateNote, 0, 0, 0, 0, note);
  for (Birth& birth : news.refused) {
    birth.may_be_forked = false;
    births_.push_front(std::move(birth));
  }
}

void GuardianProcess::Adopt(TemplateProcess::News::Forked forked) {
  const Birth& birth = forked.birth;
  Ward ward;
  ward.incarnation = birth.incarnation;
  ward.tag = TagOf(birth);
  ward.pid = forked.pid;
  ward.gate = std::move(forked.gate);
  ward.master_port = birth.master_port;
  ward.is_master = birth.is_master;
  setpgid(ward.pid, ward.pid);
  BindToCpus(ward.pid, birth.binding);
  const absl::StatusOr<UniqueFd> pidfd = OpenPidFd(ward.pid);
  constexpr int kFromTemplate = 1;
  Report(GuardianReportKind::kStarted, birth.slot, birth.incarnation, ward.pid, kFromTemplate, {},
         pidfd.ok() ? pidfd->get() : -1);
  wards_[birth.slot] = std::move(ward);
}

// A new process never meets one of a tree that is being killed.
void GuardianProcess::OpenGates() {
  if (is_killing()) return;
  for (auto& [slot, ward] : wards_) {
    if (!ward.gate || is_behind_master(ward)) continue;
    kill(ward.pid, SIGCONT);  // somebody may have stopped it while it was nobody's
    ward.gate->Open();
    ward.gate.reset();
    if (ward.is_master) master_ = {ward.master_port, MonotonicNanos() + kMasterNanos};
  }
}

// Rank 0 was let go, and does not listen yet.
bool GuardianProcess::is_behind_master(const Ward& ward) {
  if (ward.is_master || ward.master_port == 0 || ward.master_port != master_.port) return false;
  if (MonotonicNanos() >= master_.due || IsListenedOn(ward.master_port).value_or(true))
    master_ = {};
  return master_.port != 0;
}

// --- Death ---

void GuardianProcess::Reap() {
  for (const pid_t pid : ChildrenOf(self_)) {
    Ward* ward = nullptr;
    for (auto& [slot, candidate] : wards_) {
      if (candidate.pid == pid) ward = &candidate;
    }
    const bool is_template = template_.has_value() && pid == template_->pid();
    // It may be a fork that is about to be told.
    if (ward == nullptr && !is_template && template_.has_value() && template_->is_asked()) continue;
    siginfo_t info{};
    // A worker's zombie stays until its tree is gone: so long nobody else can get its pid, or its
    // process group.
    const int flags = WEXITED | WNOHANG | (ward != nullptr ? WNOWAIT : 0);
    if ((ward != nullptr && ward->ended) ||
        waitid(P_PID, static_cast<id_t>(pid), &info, flags) != 0 || info.si_pid == 0)
      continue;
    if (ward == nullptr) {
      if (template_.has_value()) template_->OnForkEnded(pid);
      if (is_template) {
        const bool has_code = info.si_code == CLD_EXITED;
        template_->OnEnded(has_code ? info.si_status : 0, has_code ? 0 : info.si_status);
      }
      continue;
    }
    ward->ended = true;
    (info.si_code == CLD_EXITED ? ward->code : ward->signal) = info.si_status;
  }
}

void GuardianProcess::TellEnd(int slot, Ward& ward) {
  if (std::exchange(ward.end_told, true)) return;
  ExecFailure failure{};
  std::string error;
  if (read(ward.failure.get(), &failure, sizeof failure) == static_cast<ssize_t>(sizeof failure)) {
    error = TextOf(failure);
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
  if (template_.has_value()) TakeNewsOfTemplate();
  RefuseBirthsIfStuck();
  while (!births_.empty() && !is_killing() && !wards_.contains(births_.front().slot)) {
    Birth birth = std::move(births_.front());
    births_.pop_front();
    Deliver(std::move(birth));
  }
  OpenGates();
}

std::vector<ProcessInfo> GuardianProcess::TreeOf(const Ward& ward, bool with_worker) const {
  std::vector<ProcessInfo> tree;
  std::set<pid_t> members = {ward.pid};
  std::set<pid_t> others;  // other slots' workers: what is below them is theirs
  for (const auto& [slot, other] : wards_) {
    if (other.pid != ward.pid) others.insert(other.pid);
  }
  if (template_.has_value()) {
    for (const pid_t parked : template_->ParkedPids()) others.insert(parked);
  }
  for (const ProcessInfo& process : DescendantsOf(self_, others)) {
    if (process.pid == ward.pid) {
      if (with_worker) tree.push_back(process);
      continue;
    }
    const bool belongs =
        process.group == ward.pid || process.session == ward.pid ||
        members.contains(process.parent) ||
        (process.parent == self_ && EnvironmentOf(process.pid, kSlotTagVariable) == ward.tag);
    // One that is just ending does not tell any more whose it was, and its children may come to us
    // behind this look: it counts as this ward's too, so that there is another look when it is
    // reaped. Whose its children are is seen then.
    const bool may_belong = process.parent == self_ && !process.has_memory;
    if (!belongs && !may_belong) continue;
    if (belongs) members.insert(process.pid);
    tree.push_back(process);
  }
  return tree;
}

void GuardianProcess::Report(GuardianReportKind kind, int slot, uint64_t incarnation, int value,
                             int signal, std::string_view error, int fd) {
  Remember(kind, slot, incarnation, value, signal, error);
  // A report that cannot be sent means that the agent is gone: the next look at its socket says so.
  if (has_agent())
    Say(agent_, kind, slot, incarnation, value, signal, error,
        fd >= 0 ? std::span<const int>(&fd, 1) : std::span<const int>());
}

// False: it is not read.
bool GuardianProcess::Say(const Channel& to, GuardianReportKind kind, int slot,
                          uint64_t incarnation, int value, int signal, std::string_view error,
                          std::span<const int> fds, std::string_view more) {
  PayloadWriter report;
  report.Int(static_cast<uint8_t>(kind)).Int<int32_t>(slot).Int<uint64_t>(incarnation);
  report.Int<int32_t>(value).Int<int32_t>(signal).Text(error);
  if (kind == GuardianReportKind::kKept) report.Text(more);
  return to.Send(report.bytes(), fds).ok();
}

void RunGuardian(const GuardianCommand& command, Channel agent, pid_t agent_pid, UniqueFd door) {
  GuardianProcess process(command, std::move(agent), agent_pid, std::move(door));
  if (process.SetUp()) process.Serve();
  process.CloseDoor();
  EndDescendants(kEndAllLimit).IgnoreError();
  process.CompleteLedgerOfAgent();
  process.RemoveFile();
}

}  // namespace outlast
