#include "watch/look_reader.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "outlast/base/fd.h"
#include "outlast/base/status.h"

namespace outlast {
namespace {

// The value of "Name:\t..." in /proc/PID/status; empty when it is not there.
std::string_view StatusField(std::string_view text, std::string_view name) {
  for (size_t line = 0; line < text.size();) {
    const size_t end = std::min(text.find('\n', line), text.size());
    const std::string_view row = text.substr(line, end - line);
    if (row.substr(0, name.size()) == name && row.substr(name.size(), 2) == ":\t")
      return row.substr(name.size() + 2);
    line = end + 1;
  }
  return {};
}

bool HasPending(const CommSnapshot& row) {
  return row.state == CommState::kReady &&
         (row.done_seq == kUnknownSeq || row.api_seq > row.done_seq);
}

// The lowest free row is taken first, so a long run of free rows is the end: reading all 4,096 each
// poll would cost more than everything else together, and would allocate the memory behind them.
std::vector<PairRow> PairsOf(const SegmentView& view) {
  constexpr uint64_t kEnoughFree = 64;
  std::vector<PairRow> pairs;
  uint64_t free_rows = 0;
  for (uint64_t i = 0; i < view.rows(AreaKind::kPairs) && free_rows < kEnoughFree; ++i) {
    const auto row = view.Row<PairRow>(AreaKind::kPairs, i);
    free_rows = row.comm == 0 ? free_rows + 1 : 0;
    if (row.comm != 0) pairs.push_back(row);
  }
  return pairs;
}

}  // namespace

ProcessState ParseProcessStatus(std::string_view text) {
  const std::string_view state = StatusField(text, "State");
  const std::string_view tracer = StatusField(text, "TracerPid");
  if (state.empty()) return ProcessState::kUnknown;
  switch (state.front()) {
    case 'Z':
    case 'X':
    case 'x':
      return ProcessState::kDead;
    default:
      break;
  }
  if (!tracer.empty() && tracer != "0") return ProcessState::kTraced;
  switch (state.front()) {
    case 'T':
      return ProcessState::kStopped;
    case 't':
      return ProcessState::kTraced;
    case 'D':
      return ProcessState::kUninterruptible;
    default:
      return ProcessState::kRunning;
  }
}

ProcessState ReadProcessState(int pid, uint64_t start_time) {
  if (pid <= 0) return ProcessState::kUnknown;
  if (ProcessStartTime(pid) != start_time) return ProcessState::kDead;
  const UniqueFd file(open(fmt::format("/proc/{}/status", pid).c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.is_open()) return ProcessState::kDead;
  std::array<char, 4096> text;
  const ssize_t bytes = read(file.get(), text.data(), text.size());
  // The process may end between open and read.
  if (bytes <= 0) return ProcessState::kDead;
  return ParseProcessStatus({text.data(), static_cast<size_t>(bytes)});
}

int64_t BoottimeNanos() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

LookReader::LookReader(SegmentView view, int slot) : view_(std::move(view)), slot_(slot) {}

absl::StatusOr<LookReader> LookReader::Open(int fd, int slot) {
  OUTLAST_ASSIGN_OR_RETURN(SegmentView view, SegmentView::Open(fd));
  return LookReader(std::move(view), slot);
}

RankLook LookReader::Look(int rank, int64_t now_ns) {
  RankLook look;
  look.rank = rank;
  look.slot = slot_;
  look.has_data = true;
  look.progress = ReadProgress(view_, static_cast<uint64_t>(now_ns));
  look.process = ReadProcessState(look.progress.pid, look.progress.pid_start_time);
  for (CommSnapshot& row : ReadComms(view_)) {
    CommLook comm;
    if (HasPending(row)) comm.operations = ReadOperations(view_, row.index);
    auto& members = members_[row.members_digest];
    if (members == nullptr)
      members = std::make_shared<const std::vector<uint32_t>>(view_.Members(row.members_digest));
    comm.members = members;
    // A list that was not there yet may come.
    if (members->empty()) members_.erase(row.members_digest);
    comm.row = std::move(row);
    look.comms.push_back(std::move(comm));
  }
  look.pairs = PairsOf(view_);
  return look;
}

std::vector<StepRecord> LookReader::NewSteps() {
  StepLogRead read = ReadStepLog(view_, next_step_seq_);
  next_step_seq_ = read.next_seq;
  return std::move(read.records);
}

}  // namespace outlast
