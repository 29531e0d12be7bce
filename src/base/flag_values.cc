#include "base/flag_values.h"

#include <cerrno>
#include <cmath>
#include <cstdlib>

#include "base/error.h"

namespace outlast {

std::string OneLine(std::string_view text) {
  std::string line;
  for (const char c : text) {
    if (c == '\n') {
      line += "\\n";
    } else if (static_cast<unsigned char>(c) < ' ' || c == '\x7f') {
      line += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      line += c;
    }
  }
  return line;
}

absl::Status RefuseValue(std::string_view flag, std::string_view found, std::string_view wanted) {
  return Error(absl::StatusCode::kInvalidArgument, "{} '{}': {} wanted", flag, OneLine(found),
               wanted);
}

absl::Status ReadInteger(std::string_view flag, const std::string& text, int least, int most,
                         int& value) {
  if (text.empty()) return absl::OkStatus();
  errno = 0;
  char* end = nullptr;
  const long number = std::strtol(text.c_str(), &end, 10);
  if (*end != '\0' || end == text.c_str() || errno != 0 || number < least || number > most) {
    return RefuseValue(flag, text, fmt::format("a whole number from {} to {}", least, most));
  }
  value = static_cast<int>(number);
  return absl::OkStatus();
}

absl::Status ReadCodes(std::string_view flag, const std::string& text, std::vector<int>& codes) {
  if (text.empty()) return absl::OkStatus();
  codes.clear();
  for (size_t begin = 0; begin <= text.size();) {
    const std::string part = text.substr(begin, text.find(',', begin) - begin);
    begin += part.size() + 1;
    const size_t dash = part.find('-', 1);
    int first = 0, last = 0;
    absl::Status read = ReadInteger(flag, part.substr(0, dash), 1, 255, first);
    last = first;
    if (read.ok() && dash != std::string::npos)
      read = ReadInteger(flag, part.substr(dash + 1), 1, 255, last);
    if (!read.ok() || first == 0 || last < first)
      return RefuseValue(flag, text, "exit codes from 1 to 255 such as 1,9,128-255");
    for (int code = first; code <= last; ++code) codes.push_back(code);
  }
  return absl::OkStatus();
}

absl::Status ReadSeconds(std::string_view flag, const std::string& text, absl::Duration& value) {
  if (text.empty()) return absl::OkStatus();
  char* end = nullptr;
  const double seconds = std::strtod(text.c_str(), &end);
  if (*end != '\0' || end == text.c_str() || !std::isfinite(seconds) || seconds < 0 ||
      seconds > 1e7) {
    return RefuseValue(flag, text, "seconds, 0 or more");
  }
  value = absl::Seconds(seconds);
  return absl::OkStatus();
}

absl::Status CheckName(std::string_view flag, const std::string& name) {
  const bool fits =
      name.size() <= 64 &&
      name.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") ==
          std::string::npos;
  if (fits && (name.empty() || (name[0] != '.' && name[0] != '-'))) return absl::OkStatus();
  return RefuseValue(flag, name,
                     "up to 64 letters, digits, '.', '_' or '-', not starting with '.' or '-'");
}

absl::Status CheckJobId(const std::string& id) { return CheckName("--job", id); }

}  // namespace outlast
