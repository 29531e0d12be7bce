#include "outlast/run/run.h"

#include <cstdio>
#include <utility>

#include "base/error.h"
#include "outlast/base/clock.h"
#include "run/run_state.h"
#include "run/shared_memory.h"

namespace outlast {

absl::StatusOr<std::unique_ptr<Run>> Run::Join(const RunOptions& options) {
  OUTLAST_ASSIGN_OR_RETURN(auto state, RunState::Join(options));
  return std::unique_ptr<Run>(new Run(std::move(state)));
}

Run::Run(std::shared_ptr<RunState> state) : state_(std::move(state)) {}
Run::~Run() = default;

int Run::rank() const { return state_->rank(); }
int Run::world() const { return state_->world(); }
int Run::local_rank() const { return state_->environment().local_rank; }
bool Run::has_agent() const { return state_->has_agent(); }
const Id128& Run::run_id() const { return state_->run_id(); }
const std::string& Run::run_dir() const { return state_->run_dir(); }

bool Run::stopped() const { return state_->stopped(); }
bool Run::StopRequested() const { return state_->stop_requested(); }
Segment& Run::black_box() { return state_->box(); }
ProgressWriter& Run::progress() { return state_->progress(); }
Link& Run::link() { return state_->link(); }
bool Run::AttachToLocalKeeper(
    const std::function<std::unique_ptr<KeeperExtension>(Keeper&)>& make) {
  if (state_->local_keeper() == nullptr) return false;
  state_->local_keeper()->Adopt(make);
  return true;
}
void Run::WhileStaged(MessageKind kind, std::function<void(const Message&)> work) {
  state_->WhileStaged(kind, std::move(work));
}
uint64_t Run::generation() const { return state_->running(); }
bool Run::is_aborted() const {
  return state_->running() != 0 && !state_->Check(state_->running()).ok();
}
absl::StatusOr<Run::StepVerdict> Run::CompleteStep(int64_t step) {
  return state_->CompleteStep(step);
}
void Run::MarkStopped(int64_t step) { state_->MarkStopped(step); }

namespace {

absl::StatusOr<Membership> NextMembership(Run& run, RunState& state, StagedOutcome outcome,
                                          std::string_view message) {
  if (!state.has_keeper()) return state.OnlyMembership();
  // Waiting for others is no work of this rank's.
  const SectionScope waiting =
      run.Section("await_generation", {.phase = Phase::kIdle, .limit = absl::InfiniteDuration()});
  return state.WaitForMembership(outcome, message);
}

// One generation's body, and how it left.
absl::Status RunBody(const std::shared_ptr<RunState>& state, const Membership& membership,
                     const std::function<absl::Status(Generation&)>& body) {
  absl::Status left;
  {
    Generation generation(state, membership);
    left = body(generation);
  }
  state->Leave();
  return left;
}

}  // namespace

absl::Status Run::ForEachGeneration(const std::function<absl::Status(Generation&)>& body) {
  StagedOutcome outcome = StagedOutcome::kFresh;
  absl::Status left;
  do {
    absl::StatusOr<Membership> membership =
        NextMembership(*this, *state_, outcome, MessageOf(left));
    if (!membership.ok()) {
      left = membership.status();
      break;
    }
    left = RunBody(state_, *membership, body);
    outcome = state_->WasAborted(membership->generation) ? StagedOutcome::kAborted
                                                         : StagedOutcome::kUncaused;
  } while (absl::IsAborted(left) && !state_->stopped() && state_->has_keeper());
  if (state_->stopped() && absl::IsAborted(left)) left = absl::OkStatus();
  if (left.ok() && !state_->stopped()) state_->NotifyFinished();
  state_->NotifyLeft();
  return left;
}

absl::StatusOr<Mapping> Run::SlotMemory(std::string_view name, size_t bytes) {
  if (!state_->has_keeper()) return Mapping::Anonymous(bytes);
  OUTLAST_ASSIGN_OR_RETURN(const UniqueFd fd,
                           AskForMemory(state_->link(), name, bytes, SharedScope::kSlot, 0));
  return Mapping::SharedTouched(fd.get(), bytes);
}

SectionScope Run::Section(std::string_view name, const SectionOptions& options) {
  uint64_t limit_ns = 0;
  if (options.limit.has_value() && *options.limit > absl::ZeroDuration()) {
    limit_ns =
        static_cast<uint64_t>(absl::ToInt64Nanoseconds(*options.limit));  // infinite: the largest
  } else if (options.limit.has_value()) {
    PrintToStderr("outlast: section '{}': a limit of {} is none; a positive one is wanted\n", name,
                  absl::FormatDuration(*options.limit));
  }
  const uint16_t interned = state_->SectionName(name);
  const SectionDepth depth = state_->progress().OpenSection(
      interned, options.phase, limit_ns, static_cast<uint64_t>(MonotonicNanos()));
  return SectionScope(&state_->progress(), depth);
}

SectionScope::~SectionScope() {
  if (progress_ != nullptr) progress_->CloseSection(depth_);
}

void SectionScope::Progress(uint64_t count) {
  if (progress_ != nullptr) progress_->Tick(depth_, count);
}

}  // namespace outlast
