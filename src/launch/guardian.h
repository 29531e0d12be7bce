// The guardian: a small single-threaded process that the agent forks before anything else. It is
// the parent and the subreaper of all workers, so no process of theirs can hide from it, and it
// outlives a killed agent long enough to end them all.
//
//   agent ── Spawn, Forward, Terminate, Kill, Finish ──> guardian ── fork, exec ──> workers, in
//   groups of their own
//         <── Started (pid, pidfd), Ended, Gone, Stuck ──
//
// A slot's *tree* is what its process group, its session, its environment tag (OUTLAST_SLOT_TAG) or
// its parent chain names. When a worker ends by itself, what is left of its tree is killed at once;
// when it was asked to end (Forward of a signal, Terminate), its helpers get the same time as the
// worker, and the end is told when all are gone. Nothing is spawned while a tree is being killed: a
// new process never meets one of the old.
//
// If the agent dies, the guardian kills everything below it within a second: helpers too that
// changed session, forked twice and cleared their environment. If the guardian is killed, workers
// die by PR_SET_PDEATHSIG, and the agent, a subreaper as well, inherits and ends the rest
// (EndDescendants).
//
// With adopt_within it outlives the agent for longer: it holds what the agent kept in it
// (run/vault.h), tells joined workers that their generation has ended, and waits for the next agent
// (adoption.h), so long at most; then it ends all as above. Not while the job was ending anyway,
// and not before the agent kept kGuardianFileKey, for then nobody could find it. While it waits,
// SIGTERM ends it and all workers. For an agent that has adopted is no ancestor of the workers,
// such a guardian has a small reaper above it, which ends what a killed guardian leaves.
#pragma once

#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/channel.h"
#include "launch/binding.h"
#include "outlast/base/fd.h"
#include "run/vault.h"

namespace outlast {

// What all workers have in common. They also inherit the environment, the working directory, the
// signal dispositions and the open descriptors that the caller of Guardian::Fork had.
struct GuardianCommand {
  std::string program;                 // a path
  std::vector<std::string> arguments;  // argument 0 too
  std::string run_id;
  sigset_t signal_mask = {};                           // the workers'
  absl::Duration adopt_within = absl::ZeroDuration();  // zero: it ends with its agent
  rlimit descriptors = {};  // the workers' limit on them; rlim_max 0: the guardian's
};

// Keys that the guardian itself understands.
inline constexpr char kGuardianFileKey[] = "guardian.file";  // bytes: a path; removed at its end
inline constexpr char kJobMemoKey[] = "job";                 // bytes: EncodeJobMemo
// The guardian's own. Bytes: when the agent before this one was lost, CLOCK_MONOTONIC as an int64
// of nanoseconds.
inline constexpr char kAgentLostKey[] = "guardian.agent_lost";
// A pipe that is readable once the reaper has ended; the agent keeps it.
inline constexpr char kReaperKey[] = "guardian.reaper";

struct WorkerSpec {
  int slot = 0;
  uint64_t incarnation = 1;
  std::vector<std::string> environment;  // NAME=value, in addition or instead
  std::array<int, 3> standard{};         // borrowed: standard input, output and error
  // Borrowed; each gets a number in the worker that is put into the environment variable of that
  // name.
  std::vector<std::pair<std::string, int>> descriptors;
  Binding binding;
  bool may_be_forked = false;  // from the template, if it is ready
  // Of ranks that start together on the node of rank 0, which may listen there. Forks begin at the
  // same instant, and torch.distributed, refused once, looks again after half a second: the others
  // are let go when rank 0 listens, or 100 ms after it.
  uint16_t master_port = 0;  // 0: it does not matter
  bool is_master = false;
};

// A program that speaks the template protocol (run/template_wire.h).
struct TemplateSpec {
  std::string program;                   // a path
  std::vector<std::string> arguments;    // argument 0 too
  std::vector<std::string> environment;  // NAME=value, in addition or instead
  std::array<int, 3> standard{};         // borrowed
};

struct WorkerStarted {
  int slot;
  uint64_t incarnation;
  pid_t pid;
  UniqueFd pidfd;          // closed: it was gone before an adoption
  bool is_forked = false;  // from the template
};
struct WorkerExited {
  int slot;
  uint64_t incarnation;
  int code = 0;  // meaningful when signal is 0
  int signal = 0;
  std::string error;  // not empty: no program was ever run, and why
};
// Nothing of the tree is left. Follows WorkerExited.
struct TreeGone {
  int slot;
  uint64_t incarnation;
};
// Something of the tree lives on 5 s after SIGKILL (uninterruptible sleep).
struct TreeStuck {
  int slot;
  uint64_t incarnation;
  pid_t pid;
};
// Why a fresh process took the place of a fork, or why the template is started again.
struct TemplateNote {
  std::string line;
};
struct TemplateReady {
  pid_t pid;
};
using GuardianReport =
    std::variant<WorkerStarted, WorkerExited, TreeGone, TreeStuck, TemplateNote, TemplateReady>;

// The newest process that was ordered for a slot.
struct OrderedWorker {
  uint64_t incarnation = 0;
  pid_t pid = 0;  // 0: not born yet
};

// The agent's handle. Not safe for concurrent use.
class Guardian {
 public:
  // Call while the process has one thread. The caller becomes a subreaper.
  static absl::StatusOr<std::unique_ptr<Guardian>> Fork(const GuardianCommand& command);
  // What another agent left with the guardian `pid`, whose process is `process`.
  struct Adoption {
    std::unique_ptr<Guardian> guardian;
    Kept kept;
    std::map<int, OrderedWorker> workers;  // by slot
  };
  // Asks the guardian behind `channel` for the workers of `run_id`. kFailedPrecondition: it
  // refuses, and says why. kUnavailable: it is gone, or silent for 5 s.
  static absl::StatusOr<Adoption> Adopt(pid_t pid, UniqueFd process, Channel channel,
                                        const std::string& run_id);
  // Ends everything and waits for the guardian, up to 10 s.
  ~Guardian();

  pid_t pid() const { return pid_; }
  // Readable when a report waits or the guardian is gone.
  int fd() const { return channel_.fd(); }

  // Orders; they return at once. kUnavailable: the guardian is gone.
  absl::Status Spawn(const WorkerSpec& spec);
  // Once. It runs until the job ends; when it ends before, it is started again after a pause.
  absl::Status StartTemplate(const TemplateSpec& spec);
  // To the worker if it has a handler for `signal`; else to each process of its tree, as SIGTERM
  // where it has none.
  absl::Status Forward(int slot, uint64_t incarnation, int signal);
  absl::Status Terminate(int slot, uint64_t incarnation);  // SIGTERM to the whole tree
  absl::Status Kill(int slot, uint64_t incarnation);       // SIGKILL, until the tree is gone

  // For the agent after this one (Vault::Keep).
  absl::Status Keep(const std::string& key, std::string_view bytes, std::span<const int> fds);
  // Of a guardian with adopt_within; else closed.
  const UniqueFd& reaper() const { return reaper_; }
  // The guardian is gone: until what it left has been ended, so long at most. At once without
  // adopt_within.
  void AwaitReaper(absl::Duration limit);
  // Leaves it to the next agent, as a kill of this one would.
  void Abandon();

  // The next report; blocks. nullopt: the guardian is gone.
  absl::StatusOr<std::optional<GuardianReport>> Receive();

  // Kills what is left and waits until the guardian has ended. kDeadlineExceeded: something does
  // not end.
  absl::Status Finish(absl::Duration limit);

 private:
  Guardian(pid_t pid, Channel channel) : pid_(pid), child_(pid), channel_(std::move(channel)) {}
  absl::Status TakeKept(Adoption& adoption);
  absl::Status Order(uint8_t kind, int slot, uint64_t incarnation, int signal);

  pid_t pid_;
  pid_t child_;       // it, or the reaper above it; 0: another agent's
  UniqueFd process_;  // of one that is another agent's
  UniqueFd reaper_;
  Channel channel_;
  bool finished_ = false;
};

}  // namespace outlast
