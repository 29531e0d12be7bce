#include "outlast/data/consumption_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <fstream>
#include <iterator>

#include "base/error.h"
#include "outlast/data/cursor.h"

namespace outlast {
namespace {

// Cuts the text before the first `separator` off `rest`; all of it when there is none.
std::string_view Cut(std::string_view& rest, char separator) {
  const size_t end = rest.find(separator);
  const std::string_view part = rest.substr(0, end);
  rest = end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
  return part;
}

absl::Status BadField(std::string_view name, std::string_view found, std::string_view wanted) {
  return Error(absl::StatusCode::kInvalidArgument, "{} '{}': {} wanted", name, found.substr(0, 64),
               wanted);
}

// A decimal number from 0, of digits only.
template <typename Number>
absl::StatusOr<Number> NumberOf(std::string_view name, std::string_view text) {
  Number number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || text.front() == '-') {
    return BadField(name, text, "a number from 0");
  }
  return number;
}

absl::StatusOr<std::vector<int64_t>> PlacesOf(std::string_view text) {
  std::vector<int64_t> ids;
  // Not "while text is left": a comma at the end announces one more place, and nothing is not a
  // place.
  for (bool more = true; more;) {
    more = text.find(',') != std::string_view::npos;
    const std::string_view place = Cut(text, ',');
    if (place == "-") {
      ids.push_back(Cursor::kPadding);
      continue;
    }
    OUTLAST_ASSIGN_OR_RETURN(const int64_t id, NumberOf<int64_t>("sample", place));
    ids.push_back(id);
  }
  return ids;
}

}  // namespace

std::string FormatLine(const ConsumptionLine& line) {
  std::string text =
      fmt::format("{} {} {} {} ", line.run.hex(), line.generation, line.step, line.rank);
  for (size_t i = 0; i < line.ids.size(); ++i) {
    if (i > 0) text += ',';
    text += line.ids[i] == Cursor::kPadding ? "-" : fmt::format("{}", line.ids[i]);
  }
  return text;
}

absl::StatusOr<ConsumptionLine> ParseLine(std::string_view text) {
  ConsumptionLine line;
  OUTLAST_ASSIGN_OR_RETURN(line.run, Id128::FromHex(Cut(text, ' ')));
  OUTLAST_ASSIGN_OR_RETURN(line.generation, NumberOf<uint64_t>("generation", Cut(text, ' ')));
  OUTLAST_ASSIGN_OR_RETURN(line.step, NumberOf<int64_t>("step", Cut(text, ' ')));
  OUTLAST_ASSIGN_OR_RETURN(line.rank, NumberOf<int>("rank", Cut(text, ' ')));
  OUTLAST_ASSIGN_OR_RETURN(line.ids, PlacesOf(text));
  return line;
}

absl::StatusOr<std::vector<ConsumptionLine>> ParseLines(std::string_view text) {
  std::vector<ConsumptionLine> lines;
  while (text.find('\n') != std::string_view::npos) {
    const auto line = ParseLine(Cut(text, '\n'));
    if (!line.ok()) return Annotate(line.status(), fmt::format("line {}", lines.size() + 1));
    lines.push_back(*line);
  }
  return lines;
}

absl::StatusOr<std::vector<ConsumptionLine>> ReadConsumptionLog(const std::string& path) {
  errno = 0;
  std::ifstream stream(path, std::ios::binary);
  if (!stream) return ErrnoStatus(errno, fmt::format("open {}", path));
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  auto lines = ParseLines(text);
  if (!lines.ok()) return Annotate(lines.status(), path);
  return lines;
}

absl::StatusOr<ConsumptionLog> ConsumptionLog::Open(const std::string& path) {
  UniqueFd fd(open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644));
  if (!fd.is_open()) return ErrnoStatus(errno, fmt::format("open {}", path));
  return ConsumptionLog(std::move(fd), path);
}

absl::Status ConsumptionLog::Append(const ConsumptionLine& line) {
  const std::string text = FormatLine(line) + "\n";
  ssize_t written;
  do {
    written = write(fd_.get(), text.data(), text.size());
  } while (written < 0 && errno == EINTR);
  if (written < 0) return ErrnoStatus(errno, fmt::format("append to {}", path_));
  // A second write would not be atomic: another rank's line could come between.
  if (static_cast<size_t>(written) < text.size()) {
    return Error(absl::StatusCode::kResourceExhausted, "append to {}: {} of {} bytes written",
                 path_, written, text.size());
  }
  return absl::OkStatus();
}

}  // namespace outlast
