#include "run/shared_memory.h"

#include <utility>

#include "base/channel.h"
#include "base/error.h"
#include "run/generation_store.h"

namespace outlast {

absl::StatusOr<UniqueFd> AskForMemory(Link& link, std::string_view name, size_t bytes,
                                      SharedScope scope, uint64_t generation) {
  if (name.size() > kMaxKeyBytes) {  // the keeper judges the rest; this one might not fit a message
    return Error(absl::StatusCode::kInvalidArgument,
                 "name of shared memory of {} bytes: 1 to {} wanted", name.size(), kMaxKeyBytes);
  }
  const PayloadWriter payload = PayloadWriter().Text(name).Int(uint64_t{bytes}).Int(scope);
  OUTLAST_ASSIGN_OR_RETURN(Message answer, link.Call(MessageKind::kSharedMemory, generation,
                                                     payload.bytes(), kKeeperSlack));
  if (answer.fds.size() != 1) {
    return Error(absl::StatusCode::kInternal, "shared memory '{}': {} descriptors came, 1 wanted",
                 name, answer.fds.size());
  }
  return std::move(answer.fds.front());
}

}  // namespace outlast
