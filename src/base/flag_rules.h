// Rules that all of the tool's command lines share, over a CLI11 App, which says these things in
// its own words or not at all. Templates, for only command lines know that library.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/error.h"
#include "base/flag_values.h"

namespace outlast {

template <typename App>
auto* FlagOf(App& app, const std::string& name) {
  auto* const option = app.get_option_no_throw(name);
  return option != nullptr && option->get_expected_min() > 0 ? option : nullptr;
}

// Before the parse: CLI11 takes the next argument for the value of "--flag=".
template <typename App>
absl::Status RefuseCutValues(App& app, const std::vector<std::string>& flags) {
  for (const std::string& flag : flags) {
    if (!flag.starts_with("--") || !flag.ends_with('=')) continue;
    const std::string name = flag.substr(0, flag.size() - 1);
    if (FlagOf(app, name) != nullptr) return RefuseValue(name, "", "a value");
  }
  return absl::OkStatus();
}

// After a parse, also one that failed: a flag that was given more than once though it has one value
// or none. CLI11 itself refuses the former, in its own words, and takes the latter.
template <typename App>
absl::Status RefuseRepeatedFlags(const App& app) {
  for (const auto* option : app.get_options()) {
    const auto& values = option->results();
    if (option->get_expected_max() > 1 || values.size() < 2) continue;
    std::string found = option->get_name();
    const bool takes_value = option->get_expected_min() > 0;
    for (size_t i = 0; takes_value && i < values.size(); ++i)
      found += fmt::format("{} '{}'", i == 0 ? "" : ",", OneLine(values[i]));
    return Error(absl::StatusCode::kInvalidArgument, "{}: given {} times, once wanted", found,
                 values.size());
  }
  return absl::OkStatus();
}

// After the parse: a value that was given but is empty must not pass for one that was left out.
template <typename App>
absl::Status RefuseEmptyValues(const App& app) {
  for (const auto* option : app.get_options()) {
    if (option->get_expected_min() == 0) continue;
    for (const std::string& value : option->results()) {
      if (value.empty()) return RefuseValue(option->get_name(), "", "a value");
    }
  }
  return absl::OkStatus();
}

}  // namespace outlast
