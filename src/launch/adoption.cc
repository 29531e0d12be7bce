#include "launch/adoption.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"
#include "launch/process.h"
#include "outlast/base/clock.h"
#include "outlast/base/id.h"

namespace outlast {
namespace {

using nlohmann::ordered_json;

constexpr int kVersion = 1;
constexpr size_t kMaxFileBytes = 4 << 20;  // a command line may be long
constexpr int kBacklog = 8;
constexpr absl::Duration kEndingLimit = absl::Seconds(12);  // it gives its workers 10

std::string JobName(const LaunchOptions& options) {
  return options.job_id.empty() ? "run" : options.job_id;
}

std::string Quoted(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return fmt::format("'{}'", text);
}

// `name` in `object`: a text.
bool Read(const ordered_json& object, const char* name, std::string& target) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_string()) return false;
  target = found->get<std::string>();
  return true;
}

template <typename Number>
bool ReadNumber(const ordered_json& object, const char* name, Number& target) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_number_unsigned()) return false;
  target = found->get<Number>();
  return true;
}

bool Read(const ordered_json& object, const char* name, std::vector<std::string>& target) {
  const auto found = object.find(name);
  if (found == object.end() || !found->is_array()) return false;
  for (const ordered_json& word : *found) {
    if (!word.is_string()) return false;
    target.push_back(word.get<std::string>());
  }
  return true;
}

absl::StatusOr<sockaddr_un> AbstractAddress(const std::string& name, socklen_t* size) {
  sockaddr_un address{.sun_family = AF_UNIX};
  if (name.empty() || name.size() + 1 > sizeof address.sun_path)
    return Error(absl::StatusCode::kInvalidArgument, "socket '{}': 1 to {} bytes wanted", name,
                 sizeof address.sun_path - 1);
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  *size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

absl::StatusOr<UniqueFd> MakeSocket(int flags) {
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | flags, 0));
  if (!fd.is_open()) return ErrnoStatus(errno, "make a socket");
  return fd;
}

void RaiseSendBuffer(int fd) {
  const int bytes = 4 * static_cast<int>(Channel::kMaxMessageBytes);
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

absl::StatusOr<ucred> PeerOf(int fd) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0)
    return ErrnoStatus(errno, "ask who is connected");
  return peer;
}

absl::StatusOr<std::string> ReadWhole(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!fd.is_open()) return ErrnoStatus(errno, fmt::format("open {}", path));
  std::string text;
  char buffer[16 << 10];
  ssize_t count;
  while ((count = read(fd.get(), buffer, sizeof buffer)) > 0 && text.size() <= kMaxFileBytes)
    text.append(buffer, static_cast<size_t>(count));
  if (count < 0) return ErrnoStatus(errno, fmt::format("read {}", path));
  return text;
}

// A file of any version has these fields.
bool ReadGuardian(const ordered_json& json, GuardianFile& file) {
  return ReadNumber(json, "pid", file.pid) && ReadNumber(json, "start_ticks", file.start_ticks) &&
         Read(json, "boot_id", file.boot_id) && file.pid > 0;
}

// The job that has the place now. none: nobody, or what is there says nothing. kUnimplemented: one
// of another version of the program.
absl::StatusOr<std::optional<GuardianFile>> LivingAt(const std::string& path) {
  const auto text = ReadWhole(path);
  if (!text.ok()) return std::optional<GuardianFile>();
  auto file = ParseGuardianFile(*text);
  if (file.ok() && IsAlive(*file)) return std::optional(*std::move(file));
  if (!absl::IsUnimplemented(file.status())) return std::optional<GuardianFile>();
  GuardianFile other;
  const bool is_known = ReadGuardian(ordered_json::parse(*text, nullptr, false), other);
  if (is_known && !IsAlive(other)) return std::optional<GuardianFile>();
  return Error(absl::StatusCode::kUnimplemented,
               "{}: {}: a job lives there that another version of outlast has begun; adopt it with "
               "that one, end it by kill {}, or choose another --run-dir or --job",
               path, MessageOf(file.status()), other.pid);
}

absl::StatusOr<Channel> Connect(const GuardianFile& file) {
  OUTLAST_ASSIGN_OR_RETURN(UniqueFd fd, MakeSocket(0));
  socklen_t size = 0;
  OUTLAST_ASSIGN_OR_RETURN(const sockaddr_un address, AbstractAddress(file.socket, &size));
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0)
    return Error(absl::StatusCode::kUnavailable, "guardian {}: {}: it may just be ending", file.pid,
                 std::strerror(errno));
  OUTLAST_ASSIGN_OR_RETURN(const ucred peer, PeerOf(fd.get()));
  if (peer.pid != file.pid || peer.uid != geteuid())
    return Error(absl::StatusCode::kPermissionDenied,
                 "socket {}: process {} of user {} listens there, guardian {} wanted", file.socket,
                 peer.pid, peer.uid, file.pid);
  RaiseSendBuffer(fd.get());
  return Channel(std::move(fd));
}

// Waits for it.
bool HasEnded(int process) {
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(kEndingLimit);
  while (true) {
    pollfd ended{process, POLLIN, 0};
    const int64_t left = std::max<int64_t>(0, (deadline - MonotonicNanos()) / 1'000'000);
    const int ready = poll(&ended, 1, static_cast<int>(left));
    if (ready >= 0 || errno != EINTR) return ready > 0;
  }
}

}  // namespace

std::string GuardianFilePath(const LaunchOptions& options) {
  return fmt::format("{}/guardian-{}.json", options.run_dir, JobName(options));
}

std::string ToText(const GuardianFile& file) {
  const ordered_json json = {{"version", kVersion},
                             {"run_id", file.run_id},
                             {"run_dir", file.run_dir},
                             {"pid", file.pid},
                             {"start_ticks", file.start_ticks},
                             {"boot_id", file.boot_id},
                             {"socket", file.socket},
                             {"world", file.world},
                             {"flags", file.flags},
                             {"command", file.command}};
  return json.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

absl::StatusOr<GuardianFile> ParseGuardianFile(std::string_view text) {
  const ordered_json json = ordered_json::parse(text, nullptr, false);
  int version = 0;
  if (!json.is_object() || !ReadNumber(json, "version", version))
    return Error(absl::StatusCode::kDataLoss, "guardian's file: {} bytes that are none",
                 text.size());
  if (version != kVersion)
    return Error(absl::StatusCode::kUnimplemented, "guardian's file of version {}: {} wanted",
                 version, kVersion);
  GuardianFile file;
  const bool is_whole = Read(json, "run_id", file.run_id) && Read(json, "run_dir", file.run_dir) &&
                        ReadGuardian(json, file) && Read(json, "socket", file.socket) &&
                        ReadNumber(json, "world", file.world) && Read(json, "flags", file.flags) &&
                        Read(json, "command", file.command) && Id128::FromHex(file.run_id).ok();
  if (!is_whole) return Error(absl::StatusCode::kDataLoss, "guardian's file: a field is missing");
  return file;
}

bool IsAlive(const GuardianFile& file) {
  if (file.boot_id != BootId().hex()) return false;
  const std::optional<ProcessInfo> found = ReadProcess(file.pid);
  return found.has_value() && !found->is_zombie() && found->start_ticks == file.start_ticks;
}

std::string WhatDiffers(const GuardianFile& file, const LaunchOptions& options) {
  if (options.fresh) return "--fresh begins anew, while its workers live: leave it out";
  if (options.job.world != file.world)
    return fmt::format("-n {}, while it runs with -n {}", options.job.world, file.world);
  if (options.command != file.command)
    return fmt::format("the command {}, while it runs {}", Quoted(options.command),
                       Quoted(file.command));
  if (options.flags != file.flags)
    return fmt::format("the flags {}, while it runs with {}", Quoted(options.flags),
                       Quoted(file.flags));
  return "";
}

absl::Status WriteGuardianFile(const LaunchOptions& options, const GuardianFile& file) {
  const std::string path = GuardianFilePath(options);
  // Two that begin at once take turns; a file system without locks leaves the race to them.
  const UniqueFd folder(open(options.run_dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  (void)flock(folder.get(), LOCK_EX);
  OUTLAST_ASSIGN_OR_RETURN(const auto other, LivingAt(path));
  if (other.has_value())
    return Error(absl::StatusCode::kAlreadyExists,
                 "{}: run {} has just begun there; another --run-dir or --job wanted", path,
                 other->run_id);
  const std::string temporary = fmt::format("{}.{}", path, getpid());
  {
    const UniqueFd fd(
        open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!fd.is_open()) return ErrnoStatus(errno, fmt::format("create {}", temporary));
    const std::string text = ToText(file);
    OUTLAST_RETURN_IF_ERROR(
        Annotate(WriteAll(fd.get(), std::as_bytes(std::span(text))), temporary));
  }
  if (rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  const int error = errno;
  unlink(temporary.c_str());
  return ErrnoStatus(error, fmt::format("rename {}", path));
}

absl::StatusOr<std::optional<FoundJob>> FindJob(const LaunchOptions& options) {
  const std::string path = GuardianFilePath(options);
  OUTLAST_ASSIGN_OR_RETURN(std::optional<GuardianFile> file, LivingAt(path));
  if (!file.has_value()) return std::optional<FoundJob>();
  auto process = OpenPidFd(file->pid);
  if (!process.ok() || !IsAlive(*file)) return std::optional<FoundJob>();  // just ended
  const std::string what =
      fmt::format("job '{}' (run {}, {})", JobName(options), file->run_id.substr(0, 8), path);
  if (const std::string differs = WhatDiffers(*file, options); !differs.empty()) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "{} is there already: {}; adopt it with its own command line, end it by kill {} "
                 "once its agent is gone, or choose another --run-dir or --job",
                 what, differs, file->pid);
  }
  const auto adopt = [&]() -> absl::StatusOr<Guardian::Adoption> {
    OUTLAST_ASSIGN_OR_RETURN(Channel channel, Connect(*file));
    OUTLAST_ASSIGN_OR_RETURN(UniqueFd own, Duplicate(process->get()));
    // From here on it is ours to stop the workers: a signal waits until the agent looks for it.
    const sigset_t wanted = AgentSignals();
    sigset_t before;
    sigprocmask(SIG_BLOCK, &wanted, &before);
    auto adopted = Guardian::Adopt(file->pid, std::move(own), std::move(channel), file->run_id);
    if (!adopted.ok()) sigprocmask(SIG_SETMASK, &before, nullptr);
    return adopted;
  };
  auto adoption = adopt();
  if (adoption.ok()) return FoundJob{*std::move(file), *std::move(adoption)};
  // One that ends its workers at this moment makes way.
  const bool may_be_ending = absl::IsUnavailable(adoption.status());
  if (may_be_ending && HasEnded(process->get())) return std::optional<FoundJob>();
  return Annotate(adoption.status(), what);
}

std::optional<GuardianFile> GuardianOf(const std::string& run_dir, const std::string& run_id) {
  std::error_code unknown;  // then there are no files
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(run_dir).parent_path(), unknown)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("guardian-") || !name.ends_with(".json")) continue;
    auto file = LivingAt(entry.path());
    if (file.ok() && file->has_value() && (*file)->run_id == run_id) return **std::move(file);
  }
  return std::nullopt;
}

std::string SocketOf(std::string_view run_id) { return fmt::format("outlast-guardian-{}", run_id); }

absl::StatusOr<UniqueFd> ListenForAgents(std::string_view run_id) {
  OUTLAST_ASSIGN_OR_RETURN(UniqueFd fd, MakeSocket(SOCK_NONBLOCK));
  socklen_t size = 0;
  OUTLAST_ASSIGN_OR_RETURN(const sockaddr_un address, AbstractAddress(SocketOf(run_id), &size));
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
      listen(fd.get(), kBacklog) != 0)
    return ErrnoStatus(errno, "listen for agents");
  return fd;
}

absl::StatusOr<Channel> AcceptAgent(int listener, pid_t* pid) {
  UniqueFd fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (!fd.is_open()) return ErrnoStatus(errno, "accept an agent");
  OUTLAST_ASSIGN_OR_RETURN(const ucred peer, PeerOf(fd.get()));
  if (peer.uid != geteuid())
    return Error(absl::StatusCode::kPermissionDenied, "process {} of user {}", peer.pid, peer.uid);
  *pid = peer.pid;
  RaiseSendBuffer(fd.get());
  return Channel(std::move(fd));
}

}  // namespace outlast
