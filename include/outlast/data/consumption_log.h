// The consumption log: which rank took which samples at which step, written down before the step's
// update. From it CheckConsumption (consumption_check.h) proves that a run with any number of kills
// consumed its data exactly once.
//
// A text file, one line a rank and step, in the order of writing:
//
//   <run> <generation> <step> <rank> <place>[,<place>]...
//   4f0c0d3d2f0e4a5b8c9d0e1f2a3b4c5d 2 117 3 20931,77,-
//
// run: the invocation's id, 32 lower-case hex digits; the rest decimal. A place is a sample's id,
// or "-" for padding.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "outlast/base/fd.h"
#include "outlast/base/id.h"

namespace outlast {

struct ConsumptionLine {
  Id128 run;                // a new one each time the job is started
  uint64_t generation = 0;  // of the membership, within the run
  int64_t step = 0;         // the first is 0
  int rank = 0;
  std::vector<int64_t> ids;  // Cursor::RankIds; Cursor::kPadding for padding

  bool operator==(const ConsumptionLine&) const = default;
};

// One line, without its end.
std::string FormatLine(const ConsumptionLine& line);

// kInvalidArgument: not such a line, with the field that is wrong.
absl::StatusOr<ConsumptionLine> ParseLine(std::string_view text);

// All lines of `text`. A last one without an end was cut off by a full disk or a kill, and is left
// out: its step was not run. kInvalidArgument: a line that does not parse, with its number.
absl::StatusOr<std::vector<ConsumptionLine>> ParseLines(std::string_view text);

// ParseLines of the file at `path`. kNotFound: there is none.
absl::StatusOr<std::vector<ConsumptionLine>> ReadConsumptionLog(const std::string& path);

// Appends to a log that the ranks of one machine share. Not for concurrent use within a process.
class ConsumptionLog {
 public:
  // Creates the file if need be. Errors: those of open(2), with the path.
  static absl::StatusOr<ConsumptionLog> Open(const std::string& path);

  // Writes `line` by one write(2) with O_APPEND, so that lines of several ranks never mix; what was
  // written survives a kill of the process (not of the machine: there is no fsync).
  // kResourceExhausted: the disk is full, the line may be cut off.
  absl::Status Append(const ConsumptionLine& line);

 private:
  ConsumptionLog(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  UniqueFd fd_;
  std::string path_;
};

}  // namespace outlast
