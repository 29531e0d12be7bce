#include "base/flag_values.h"

#include <cerrno>
#include <cmath>
#include <cstdlib>

#include "base/error.h"

namespace outlast {

absl::Status RefuseValue(std::string_view flag, std::string_view found, std::string_view wanted) {
  return Error(absl::StatusCode::kInvalidArgument, "{} '{}': {} wanted", flag, found, wanted);
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
