#include "launch/status_service.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "launch/metrics_text.h"
#include "launch/process.h"
#include "outlast/base/clock.h"

namespace outlast {
namespace {

constexpr int kBacklog = 64;

std::string StateOf(const RankLook& look, bool is_joined, char letter) {
  const ProcessState process = is_joined       ? look.process
                               : letter == 'T' ? ProcessState::kStopped
                               : letter == 't' ? ProcessState::kTraced
                                               : ProcessState::kRunning;
  switch (process) {
    case ProcessState::kStopped:
      return "stopped";
    case ProcessState::kTraced:
      return "traced";
    case ProcessState::kUninterruptible:
      return "uninterruptible";
    case ProcessState::kDead:
      return "ended";
    case ProcessState::kUnknown:
    case ProcessState::kRunning:
      break;
  }
  return is_joined ? "running" : "starting";
}

absl::Status WriteAddress(const std::string& run_dir, const HostPort& at) {
  const std::string path = fmt::format("{}/{}", run_dir, kMetricsFile);
  const UniqueFd file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!file.is_open()) return ErrnoStatus(errno, fmt::format("open {}", path));
  const std::string line = at.text() + "\n";
  return Annotate(WriteAll(file.get(), std::as_bytes(std::span(line))), path);
}

}  // namespace

absl::StatusOr<UniqueFd> ListenIn(const std::string& folder, const std::string& name) {
  const UniqueFd directory(open(folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!directory.is_open()) return ErrnoStatus(errno, fmt::format("open {}", folder));
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.is_open()) return ErrnoStatus(errno, "make a socket");
  sockaddr_un address{.sun_family = AF_UNIX};
  const std::string path = fmt::format("/proc/self/fd/{}/{}", directory.get(), name);
  if (path.size() >= sizeof address.sun_path)
    return Error(absl::StatusCode::kInvalidArgument, "socket {}: the name is too long", name);
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  // The file gets the socket's mode, so that there is no moment at which others may connect.
  const bool is_listening =
      fchmod(fd.get(), 0600) == 0 &&
      bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
      listen(fd.get(), kBacklog) == 0;
  if (!is_listening) return ErrnoStatus(errno, fmt::format("listen on {}/{}", folder, name));
  return fd;
}

StatusService::StatusService(EventLoop& loop, Keeper& keeper, Monitor& monitor, RunLedger& ledger,
                             RunRecord& record)
    : keeper_(keeper),
      monitor_(monitor),
      ledger_(ledger),
      record_(record),
      http_(loop, [this](const PageRequest& request) { return Answer(request); }) {}

StatusService::~StatusService() {
  if (!socket_path_.empty()) unlink(socket_path_.c_str());
}

absl::Status StatusService::ServeFolder() {
  const std::string& folder = record_.status().run_dir;
  // A killed agent's may lie there; the folder is this run's alone.
  unlink(fmt::format("{}/{}", folder, kStatusSocket).c_str());
  OUTLAST_ASSIGN_OR_RETURN(UniqueFd listener, ListenIn(folder, kStatusSocket));
  socket_path_ = fmt::format("{}/{}", folder, kStatusSocket);
  return http_.Serve(std::move(listener));
}

absl::StatusOr<HostPort> StatusService::ServeTcp(const HostPort& at) {
  OUTLAST_ASSIGN_OR_RETURN(const std::vector<SocketAddress> addresses, ResolveAddress(at));
  OUTLAST_ASSIGN_OR_RETURN(UniqueFd listener, ListenOn(addresses.front()));
  OUTLAST_ASSIGN_OR_RETURN(const SocketAddress chosen, SocketAddress::Local(listener.get()));
  OUTLAST_RETURN_IF_ERROR(http_.Serve(std::move(listener)));
  OUTLAST_RETURN_IF_ERROR(WriteAddress(record_.status().run_dir, chosen.host_port()));
  record_.Serving(chosen.host_port().text());
  return chosen.host_port();
}

void StatusService::LookAt(RankStatus& rank) {
  rank.rank = keeper_.rank(rank.slot);
  const bool has_finished = keeper_.is_finished(rank.slot);
  if (has_finished) rank.state = "finished";
  if (rank.pid == 0 && !has_finished) return;
  const bool is_joined = keeper_.is_joined(rank.slot);
  const RankLook look = monitor_.Peek(rank.slot);
  if (!has_finished) {
    const auto process = is_joined ? std::nullopt : ReadProcess(rank.pid);
    rank.state = StateOf(look, is_joined, process ? process->state : '?');
  }
  if (!look.has_data || (!is_joined && !has_finished)) return;
  rank.step = static_cast<int64_t>(look.progress.step);
  if (has_finished) return;
  if (!look.progress.sections.empty()) {
    const OpenSection& section = look.progress.sections.back();
    rank.section = section.name;
    rank.phase = std::string(PhaseName(section.phase));
    rank.age_seconds = static_cast<double>(section.age_ns) / 1e9;
  } else if (const int64_t ended_ns = ledger_.LastStepEnd(rank.slot); ended_ns != 0) {
    rank.age_seconds = static_cast<double>(std::max<int64_t>(MonotonicNanos() - ended_ns, 0)) / 1e9;
  }
  if (look.pace.source == LimitSource::kNone) return;
  rank.age_seconds = absl::ToDoubleSeconds(look.pace.age);
  if (look.pace.limit == absl::InfiniteDuration()) return;
  rank.limit_seconds = absl::ToDoubleSeconds(look.pace.limit);
  rank.limit_source = std::string(LimitSourceName(look.pace.source));
}

JobStatus StatusService::Snapshot() {
  JobStatus status = record_.status();
  status.agent_state = "answers";
  status.seconds = record_.Seconds();
  status.world = keeper_.world();
  status.node = keeper_.node();
  for (RankStatus& rank : status.ranks) {
    LookAt(rank);
    rank.node = status.node;
  }
  return status;
}

PageAnswer StatusService::Answer(const PageRequest& request) {
  if (request.path == "/status") {
    JobStatus status = Snapshot();
    status.mfu = ledger_.Totals().mfu;
    return {.content_type = "application/json", .body = StatusJson(status) + "\n"};
  }
  if (request.path == "/metrics") {
    const MetricsFormat format = FormatFor(request.accept);
    const RunTotals totals = ledger_.Totals();
    return {.content_type = std::string(ContentTypeOf(format)),
            .body = MetricsText(Snapshot(), totals, format)};
  }
  if (request.path == "/") return {.body = "/metrics\n/status\n"};
  return {.code = 404, .body = "no such page: /metrics and /status are here\n"};
}

}  // namespace outlast
