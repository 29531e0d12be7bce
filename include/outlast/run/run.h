// A trainer's membership of a job: joins the agent that started the process, or a world of one
// without an agent.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "outlast/base/id.h"
#include "outlast/base/memory.h"
#include "outlast/blackbox/progress.h"
#include "outlast/run/environment.h"
#include "outlast/run/generation.h"
#include "outlast/run/section.h"

namespace outlast {

class Keeper;
class KeeperExtension;
class Link;
class RunState;
class Segment;
struct Message;
enum class MessageKind : uint16_t;

struct RunOptions {
  // Where rank, world and the agent's socket come from; unset: the process's environment
  // (WorkerEnvironment::FromProcess).
  std::optional<WorkerEnvironment> environment;
  absl::Duration join_timeout = absl::Seconds(60);
};

// One a process (a test may hold several: LocalWorld). Safe for concurrent use, but for
// ForEachGeneration, which one thread calls. Owns a background thread that reads the agent's
// messages.
class Run {
 public:
  // kDeadlineExceeded: the agent did not answer. kFailedPrecondition: another protocol version,
  // naming both. kInvalidArgument: a contradictory environment. Without an agent it is a world of
  // one (or, under another launcher's RANK and WORLD_SIZE, one line says which abilities need
  // `outlast run`).
  static absl::StatusOr<std::unique_ptr<Run>> Join(const RunOptions& options = {});
  ~Run();

  int rank() const;
  int world() const;
  int local_rank() const;
  bool has_agent() const;
  const Id128& run_id() const;
  // RUN_DIR of the agent; empty without one.
  const std::string& run_dir() const;

  // Runs `body` once a generation, until it returns OK (returned), fails with another code than
  // kAborted (returned), or a stop was agreed and saved (returns OK, and stopped() is true).
  absl::Status ForEachGeneration(const std::function<absl::Status(Generation&)>& body);
  bool stopped() const;

  // Somebody asked the job to stop (SIGTERM, ...), and the step is being agreed on or saved. One
  // load; any thread.
  bool StopRequested() const;

  // Opens a section of work that the watchdog judges by its own limit; ends with the scope. Main
  // thread.
  SectionScope Section(std::string_view name, const SectionOptions& options = {});

  // `bytes` of memory that belong to this rank's slot and are there for the whole job: under an
  // agent, the slot's next process gets them as this one leaves them, in place and in huge pages
  // where the kernel gives those. So a state that lies here costs a new process no zeroing and no
  // page faults, only the copy of Restore. Zero when the slot asks for `name` for the first time;
  // later it may hold anything of a process that died: fill what Restore does not bring. Only this
  // process may use it: a fork's child shares it.
  // kInvalidArgument: a former process of the slot asked for another size. kResourceExhausted: more
  // than the machine has available. Blocks while pages are made: 0.1 s a GiB or more.
  absl::StatusOr<Mapping> SlotMemory(std::string_view name, size_t bytes);

  // --- For the other core modules ---
  Segment& black_box();
  ProgressWriter& progress();
  Link& link();
  // In a world of one without agent: makes an extension on the in-process keeper's thread, which
  // keeps it until the run ends. False, and nothing done, where an agent has the extensions.
  bool AttachToLocalKeeper(const std::function<std::unique_ptr<KeeperExtension>(Keeper&)>& make);
  // Has `work` done, on the thread in ForEachGeneration, with each message of `kind` that comes
  // while that waits for a generation; null ends it. Call it from that thread.
  void WhileStaged(MessageKind kind, std::function<void(const Message&)> work);
  // The generation whose body runs, 0 outside. And whether it was aborted.
  uint64_t generation() const;
  bool is_aborted() const;
  // The trainer finished `step` and its state is whole: records it, and tells whether an agreed
  // stop wants a save here. Blocks (up to the stop's deadline) only when a stop at exactly this
  // step awaits its GO. kAborted: the generation ended.
  enum class StepVerdict { kGoOn, kSaveAndStop };
  absl::StatusOr<StepVerdict> CompleteStep(int64_t step);
  // The stop's step was sealed: from now on Check() returns kAborted and ForEachGeneration ends.
  void MarkStopped(int64_t step);

 private:
  friend class RunAccess;  // internal: src/run/run_state.h
  explicit Run(std::shared_ptr<RunState> state);
  std::shared_ptr<RunState> state_;
};

}  // namespace outlast
