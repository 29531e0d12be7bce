#include "outlast/run/generation.h"

#include <utility>

#include "base/error.h"
#include "run/generation_store.h"
#include "run/run_state.h"
#include "run/shared_memory.h"

namespace outlast {
namespace {

absl::Status CheckKey(std::string_view what, std::string_view key) {
  if (!key.empty() && key.size() <= kMaxKeyBytes) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "{} of {} bytes: 1 to {} wanted", what,
               key.size(), kMaxKeyBytes);
}

}  // namespace

Generation::Generation(std::shared_ptr<RunState> state, const Membership& membership)
    : state_(std::move(state)),
      number_(membership.generation),
      rank_(membership.rank),
      world_(membership.world),
      nodes_(membership.nodes) {}

int Generation::micro_batches() const {
  const WorkerEnvironment& job = state_->environment();
  const int replicas = world_ / job.ranks_per_replica;
  const bool is_even = replicas > 0 && replicas * job.ranks_per_replica == world_ &&
                       job.micro_batches % replicas == 0;
  return is_even ? job.micro_batches / replicas : 0;
}

Generation::~Generation() { state_->EndCallbacks(); }

absl::Status Generation::Check() const { return state_->Check(number_); }

void Generation::OnAbort(std::function<void()> callback) {
  state_->AddAbortCallback(number_, std::move(callback));
}

absl::Status Generation::Put(std::string_view key, std::string_view value) {
  OUTLAST_RETURN_IF_ERROR(CheckKey("key", key));
  if (value.size() > kMaxValueBytes) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "value of key '{}': {} bytes, at most {} wanted", key, value.size(),
                 kMaxValueBytes);
  }
  const PayloadWriter payload = PayloadWriter().Text(key).Text(value);
  return state_->link().Call(MessageKind::kPut, number_, payload.bytes(), kKeeperSlack).status();
}

absl::StatusOr<std::string> Generation::Get(std::string_view key, absl::Duration timeout) {
  OUTLAST_RETURN_IF_ERROR(CheckKey("key", key));
  const PayloadWriter payload = PayloadWriter().Text(key).Int(absl::ToInt64Nanoseconds(timeout));
  OUTLAST_ASSIGN_OR_RETURN(
      const Message answer,
      state_->link().Call(MessageKind::kGet, number_, payload.bytes(), timeout + kKeeperSlack));
  PayloadReader reader(answer.payload);
  const std::string_view value = reader.Text();
  if (!reader.ok())
    return Error(absl::StatusCode::kInternal, "key '{}': the answer's fields do not fit", key);
  return std::string(value);
}

absl::StatusOr<Mapping> Generation::SharedMemory(std::string_view name, size_t bytes) {
  OUTLAST_RETURN_IF_ERROR(CheckKey("name of shared memory", name));
  OUTLAST_ASSIGN_OR_RETURN(const UniqueFd fd, AskForMemory(state_->link(), name, bytes,
                                                           SharedScope::kGeneration, number_));
  return Mapping::Shared(fd.get(), bytes);
}

}  // namespace outlast
