// Memory that the keeper makes and holds for ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"
#include "outlast/base/fd.h"
#include "run/link.h"
#include "run/wire.h"

namespace outlast {

// Asks the keeper for `bytes` under `name`. `generation`: 0 for what outlives one. The keeper's
// errors are those of GenerationStore::SharedMemory; kAborted: the generation ended.
absl::StatusOr<UniqueFd> AskForMemory(Link& link, std::string_view name, size_t bytes,
                                      SharedScope scope, uint64_t generation);

}  // namespace outlast
