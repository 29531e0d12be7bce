// Error messages by fmt. Sources only: fmt is not part of any public header.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

#include "outlast/base/status.h"

namespace outlast {

template <typename... Args>
absl::Status Error(absl::StatusCode code, fmt::format_string<Args...> format, Args&&... args) {
  return MakeStatus(code, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace outlast
