// Error messages by fmt. Sources only: fmt is not part of any public header.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <string>
#include <string_view>
#include <utility>

#include "outlast/base/status.h"

namespace outlast {

template <typename... Args>
absl::Status Error(absl::StatusCode code, fmt::format_string<Args...> format, Args&&... args) {
  return MakeStatus(code, fmt::format(format, std::forward<Args>(args)...));
}

// One line for people, by a single write. Nothing comes of it where nobody can read it (a full
// disk, a closed pipe): no message may end a trainer or an agent.
template <typename... Args>
void PrintToStderr(fmt::format_string<Args...> format, Args&&... args) {
  const std::string line = fmt::format(format, std::forward<Args>(args)...);
  (void)!write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace outlast
