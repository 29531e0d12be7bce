#include "launch/status_tool.h"

#include <fcntl.h>
#include <poll.h>
#include <pwd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <sstream>

#include "base/error.h"
#include "launch/adoption.h"
#include "launch/event_log.h"
#include "launch/options.h"
#include "launch/process.h"
#include "launch/status_service.h"
#include "launch/status_text.h"
#include "launch/top.h"
#include "meter/report.h"
#include "outlast/base/clock.h"
#include "outlast/base/id.h"
#include "outlast/meter/ledger_file.h"

namespace outlast {
namespace {

using nlohmann::ordered_json;

constexpr size_t kMaxAnswer = 64 << 20;
constexpr absl::Duration kPatience = absl::Seconds(2);
constexpr char kDefaultFolder[] = "outlast-runs/latest";

bool Exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

// Of `path`, or of the nearest folder above it that shows itself.
std::string OwnerOf(std::filesystem::path path) {
  struct stat info {};
  while (stat(path.c_str(), &info) != 0) {
    if (!path.has_parent_path() || path == path.parent_path()) return "?";
    path = path.parent_path();
  }
  const passwd* const user = getpwuid(info.st_uid);  // the tool has one thread
  return user != nullptr ? user->pw_name : std::to_string(info.st_uid);
}

absl::Status Denied(const std::string& path) {
  return Error(absl::StatusCode::kPermissionDenied, "'{}': permission is missing; it is user {}'s",
               path, OwnerOf(path));
}

absl::StatusOr<std::string> FindRunDir(const std::string& folder) {
  struct stat info {};
  if (stat(folder.c_str(), &info) != 0)
    return errno == EACCES ? Denied(folder) : ErrnoStatus(errno, fmt::format("'{}'", folder));
  for (const std::string& candidate : {folder, folder + "/latest"}) {
    const std::string events = candidate + "/events.jsonl";
    if (access(events.c_str(), R_OK) != 0) {
      if (errno == EACCES) return Denied(candidate);
      continue;
    }
    std::string path = candidate;
    if (char* absolute = realpath(candidate.c_str(), nullptr); absolute != nullptr) {
      path = absolute;
      free(absolute);
    }
    return path;
  }
  return Error(absl::StatusCode::kNotFound,
               "'{}': no events.jsonl in it: the RUN_DIR of a run wanted", folder);
}

// --- The agent's answer ---

// Waits until `fd` is ready for `events`; false: not before the deadline.
bool Await(int fd, short events, int64_t deadline_ns) {
  while (true) {
    const int64_t left_ms = (deadline_ns - MonotonicNanos()) / 1'000'000;
    pollfd wait{fd, events, 0};
    const int ready = poll(&wait, 1, static_cast<int>(std::max<int64_t>(left_ms, 0)));
    if (ready > 0) return true;
    if (ready == 0 || errno != EINTR) return false;
  }
}

absl::StatusOr<UniqueFd> ConnectIn(const std::string& folder, const std::string& name) {
  const UniqueFd directory(open(folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{.sun_family = AF_UNIX};
  const std::string path = fmt::format("/proc/self/fd/{}/{}", directory.get(), name);
  std::memcpy(address.sun_path, path.c_str(), std::min(path.size() + 1, sizeof address.sun_path));
  if (!directory.is_open() || !fd.is_open() ||
      connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    return ErrnoStatus(errno, fmt::format("connect to {}/{}", folder, name));
  return fd;
}

absl::StatusOr<std::string> ReadToEnd(int fd, int64_t deadline_ns) {
  std::string bytes;
  std::array<char, 1 << 16> buffer;
  while (true) {
    if (!Await(fd, POLLIN, deadline_ns))
      return Error(absl::StatusCode::kDeadlineExceeded, "the agent gave no whole answer");
    const ssize_t count = recv(fd, buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count < 0) return ErrnoStatus(errno, "read the agent's answer");
    if (count == 0) return bytes;
    bytes.append(buffer.data(), static_cast<size_t>(count));
    if (bytes.size() > kMaxAnswer)
      return Error(absl::StatusCode::kDataLoss, "the agent's answer has more than {} bytes",
                   kMaxAnswer);
  }
}

absl::StatusOr<JobStatus> AskAgent(const std::string& run_dir, absl::Duration patience) {
  const int64_t deadline_ns = MonotonicNanos() + absl::ToInt64Nanoseconds(patience);
  OUTLAST_ASSIGN_OR_RETURN(const UniqueFd fd, ConnectIn(run_dir, kStatusSocket));
  constexpr std::string_view kRequest = "GET /status HTTP/1.1\r\nHost: agent\r\n\r\n";
  if (send(fd.get(), kRequest.data(), kRequest.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(kRequest.size()))
    return ErrnoStatus(errno, "ask the agent");
  OUTLAST_ASSIGN_OR_RETURN(const std::string answer, ReadToEnd(fd.get(), deadline_ns));
  const size_t head = answer.find("\r\n\r\n");
  if (!answer.starts_with("HTTP/1.1 200 ") || head == std::string::npos)
    return Error(absl::StatusCode::kDataLoss, "the agent's answer is no status");
  return ParseStatusJson(std::string_view(answer).substr(head + 4));
}

// --- What a run left ---

std::optional<ordered_json> ReadReport(const std::string& run_dir) {
  std::ifstream file(run_dir + "/report.json", std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  auto json = ordered_json::parse(text.str(), nullptr, false);
  if (!json.is_object()) return std::nullopt;
  return json;
}

// The event log may have lost its end to a full disk; the report stands or does not.
void AddReport(JobStatus& status) {
  if (status.is_over()) return;
  const auto report = ReadReport(status.run_dir);
  if (!report) return;
  const auto code = report->find("exit_code");
  if (code == report->end() || !code->is_number_integer()) return;
  status.exit_code = code->get<int>();
  status.phase = "ended";
  if (const auto reason = report->find("reason"); reason != report->end() && reason->is_string())
    status.reason = reason->get<std::string>();
}

// What became of an agent that does not answer.
void FindAgent(JobStatus& status, const absl::Status& answer) {
  if (status.is_over()) {
    status.agent_state = "ended";
    return;
  }
  if (!status.boot_id.empty() && status.boot_id != BootId().hex()) {
    status.agent_state = "elsewhere";
    return;
  }
  const auto process = ReadProcess(status.agent_pid);
  const bool is_alive = process.has_value() && !process->is_zombie() &&
                        process->start_ticks == status.agent_start_ticks;
  if (is_alive) {
    const bool is_denied = absl::IsPermissionDenied(answer);
    status.agent_state = is_denied ? "denied" : "silent";
    if (is_denied) status.agent_owner = OwnerOf(status.run_dir + "/" + kStatusSocket);
    return;
  }
  status.agent_state = "gone";
  status.phase = "killed";
  const auto guardian = GuardianOf(status.run_dir, status.run_id);
  if (!guardian) return;
  status.agent_state = "awaited";
  status.phase = "waiting";
}

// An agent that is gone says nothing of its workers' end: its guardian ends them.
void LookForWorkers(JobStatus& status) {
  const bool is_over = status.agent_state == "gone" || status.agent_state == "ended";
  if (!is_over && status.agent_state != "awaited") return;
  for (RankStatus& rank : status.ranks) {
    if (rank.pid == 0 || EnvironmentOf(rank.pid, "OUTLAST_RUN_ID") == status.run_id) continue;
    rank.pid = 0;
    rank.state = "ended";
    rank.end = "with its agent";
  }
}

void SetTimeSinceStart(JobStatus& status) {
  if (status.agent_state != "silent" && status.agent_state != "denied" &&
      status.agent_state != "awaited")
    return;
  if (const auto age = AgeOf(status.started_at, Clock::Real().WallTime()))
    status.seconds = std::max(status.seconds, *age);
}

struct Arguments {
  std::string folder = kDefaultFolder;
  bool json = false;
};

// The exit code, where it ends there.
std::optional<int> Parse(const std::vector<std::string>& words, const std::string& name,
                         const std::string& description, Arguments& arguments, std::ostream& out,
                         std::ostream& err) {
  CLI::App app(description, "outlast " + name);
  app.set_help_flag("-h,--help", "This text");
  app.footer(fmt::format("Example:\n  outlast {} outlast-runs/latest", name));
  app.add_option("RUN_DIR", arguments.folder,
                 fmt::format("The run's folder, or one of runs with a latest ({})", kDefaultFolder))
      ->type_name("");
  if (name == "status") app.add_flag("--json", arguments.json, "As one JSON object");
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::CallForHelp&) {
    out << app.help();
    return 0;
  } catch (const CLI::ParseError&) {
    err << fmt::format("outlast: {}: unknown argument: see outlast {} --help\n", name, name);
    return kExitRefused;
  }
  return std::nullopt;
}

int PrintOnce(const Arguments& arguments, const std::string& name, std::ostream& out,
              std::ostream& err) {
  auto status = FindStatus(arguments.folder, kPatience);
  if (!status.ok()) {
    err << fmt::format("outlast: {}: {}\n", name, MessageOf(status.status()));
    return kExitRefused;
  }
  AddLedger(*status);
  if (arguments.json) {
    out << StatusJson(*status) << '\n';
  } else {
    out << StatusText(*status, {}, Clock::Real().WallTime());
  }
  return 0;
}

}  // namespace

absl::StatusOr<JobStatus> FindStatus(const std::string& folder, absl::Duration patience) {
  OUTLAST_ASSIGN_OR_RETURN(const std::string run_dir, FindRunDir(folder));
  auto answer = AskAgent(run_dir, patience);
  if (answer.ok()) return answer;
  OUTLAST_ASSIGN_OR_RETURN(EventLogRead read, ReadEventLog(run_dir));
  JobStatus& status = read.status;
  for (RankStatus& rank : status.ranks) rank.node = status.node;
  AddReport(status);
  FindAgent(status, answer.status());
  if (!status.is_over() && status.agent_state == "silent" && !Exists(run_dir + "/" + kStatusSocket))
    status.phase = status.generation == 0 ? "forming" : "ending";
  LookForWorkers(status);
  SetTimeSinceStart(status);
  return std::move(read.status);
}

void AddLedger(JobStatus& status, size_t most_bytes) {
  const std::string path = status.run_dir + "/ledger.bin";
  struct stat info {};
  if (stat(path.c_str(), &info) != 0 || static_cast<size_t>(info.st_size) > most_bytes) return;
  const std::vector<std::string> folders = {status.run_dir};
  const auto report = BuildReport(folders);
  if (!report.ok() || report->timeline.wall_ns <= 0) return;
  GoodputStatus goodput;
  goodput.ratio = report->ratios.goodput;
  goodput.wall_seconds = static_cast<double>(report->timeline.wall_ns) / 1e9;
  for (size_t i = 0; i < kJobStates; ++i) {
    const auto state = static_cast<JobState>(i);
    if (report->timeline.in(state) > 0)
      goodput.states.emplace_back(StateName(state),
                                  static_cast<double>(report->timeline.in(state)) / 1e9);
  }
  status.goodput = std::move(goodput);
  if (!status.mfu) status.mfu = report->mfu;
  if (status.agent_state == "answers") return;
  const auto ledger = ReadLedger(path);
  if (!ledger.ok()) return;
  std::map<int, int64_t> last_steps;  // by slot
  for (const LedgerEntry& entry : ledger->entries)
    if (const auto* step = std::get_if<StepEntry>(&entry)) last_steps[step->slot] = step->step;
  for (RankStatus& rank : status.ranks)
    if (const auto last = last_steps.find(rank.slot); last != last_steps.end())
      rank.step = last->second;
}

int RunStatusTool(const std::vector<std::string>& arguments, std::ostream& out, std::ostream& err) {
  Arguments parsed;
  if (const auto end = Parse(arguments, "status", "Shows a run as it stands.", parsed, out, err))
    return *end;
  return PrintOnce(parsed, "status", out, err);
}

int RunTopTool(const std::vector<std::string>& arguments, std::ostream& out, std::ostream& err) {
  Arguments parsed;
  if (const auto end = Parse(arguments, "top", "Shows a run as it goes on; q or Ctrl-C ends it.",
                             parsed, out, err))
    return *end;
  if (isatty(STDOUT_FILENO) == 0) return PrintOnce(parsed, "top", out, err);
  return WatchOnTerminal(parsed.folder, err);
}

}  // namespace outlast
