// Values of command-line flags. Each error is kInvalidArgument, one line: flag, found, wanted.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace outlast {

// Control characters as in a C text, so that a message stays one line.
std::string OneLine(std::string_view text);
absl::Status RefuseValue(std::string_view flag, std::string_view found, std::string_view wanted);
// An empty text leaves `value` as it is.
absl::Status ReadInteger(std::string_view flag, const std::string& text, int least, int most,
                         int& value);
// Exit codes such as "1,9,128-255".
absl::Status ReadCodes(std::string_view flag, const std::string& text, std::vector<int>& codes);
absl::Status ReadSeconds(std::string_view flag, const std::string& text, absl::Duration& value);
// Of what becomes part of file names and messages. An empty one passes.
absl::Status CheckName(std::string_view flag, const std::string& name);
// A job's id is part of file names and messages. An empty one passes: the root's.
absl::Status CheckJobId(const std::string& id);

}  // namespace outlast
