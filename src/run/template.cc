#include "outlast/run/template.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/channel.h"
#include "base/error.h"
#include "run/template_wire.h"

namespace outlast {
namespace {

constexpr int kPreferred = 1;  // MPOL_PREFERRED of linux/mempolicy.h

// What makes a fork a rank.
struct Role {
  std::vector<std::string> environment;
  std::vector<std::string> names;
  int numa = -1;
  std::vector<UniqueFd> fds;
};

struct ForkRequest {
  uint64_t request = 0;
  pid_t guardian = 0;
  UniqueFd gate;
  std::optional<Role> role;  // none: it comes through the gate
};

std::vector<std::string> TakeTexts(PayloadReader& reader) {
  std::vector<std::string> texts;
  for (auto left = reader.Int<uint32_t>(); left > 0 && reader.ok(); --left)
    texts.emplace_back(reader.Text());
  return texts;
}

[[noreturn]] void EndTemplate(std::string_view why) {
  PrintToStderr("outlast: template: {}\n", why);
  _exit(1);
}

std::optional<Role> TakeRole(PayloadReader& reader, std::vector<UniqueFd> fds) {
  Role role;
  role.environment = TakeTexts(reader);
  role.names = TakeTexts(reader);
  role.numa = reader.Int<int32_t>();
  role.fds = std::move(fds);
  if (!reader.ok() || role.fds.size() != kStandardFiles + role.names.size()) return std::nullopt;
  return role;
}

// Calls `see` with each name in the folder.
template <typename See>
void ForEachEntry(const char* folder, See see) {
  DIR* const entries = opendir(folder);
  if (entries == nullptr) return;
  while (const dirent* entry = readdir(entries)) {
    if (entry->d_name[0] != '.') see(entry->d_name);
  }
  closedir(entries);
}

// Empty: this process may be forked.
std::string WhyNotForked() {
  int threads = 0;
  ForEachEntry("/proc/self/task", [&](const char*) { ++threads; });
  if (threads != 1) return fmt::format("it has {} threads, 1 wanted", threads);
  std::string device;
  ForEachEntry("/proc/self/fd", [&](const char* name) {
    char target[64];
    const std::string link = fmt::format("/proc/self/fd/{}", name);
    const ssize_t length = readlink(link.c_str(), target, sizeof target);
    const std::string_view path(target, length > 0 ? static_cast<size_t>(length) : 0);
    if (path.starts_with("/dev/nvidia")) device = path;
  });
  return device.empty() ? "" : fmt::format("it holds {} open: CUDA was touched", device);
}

void PreferMemoryOf(int numa) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  unsigned long nodes[16] = {};
  const auto node = static_cast<size_t>(numa);
  if (numa < 0 || node >= kBits * std::size(nodes)) return;
  nodes[node / kBits] = 1ul << node % kBits;
  if (syscall(SYS_set_mempolicy, kPreferred, nodes, kBits * std::size(nodes) + 1) != 0)
    PrintToStderr("outlast: memory of NUMA node {}: {}: it comes from where it is touched\n", numa,
                  std::strerror(errno));
}

class TemplateServer {
 public:
  explicit TemplateServer(int fd) : guardian_(UniqueFd(fd)), tag_(getenv(kSlotTagVariable)) {
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    unsetenv(kTemplateVariable);
  }

  // Returns in forked children.
  void Serve(int& argc, char**& argv);

 private:
  void TakeStart();
  std::optional<ForkRequest> Read(Channel::Packet& packet) const;
  // True in the child.
  bool Fork(ForkRequest& request);
  void Answer(const PayloadWriter& answer) const {
    if (!guardian_.Send(answer.bytes()).ok()) _exit(0);
  }
  void Refuse(uint64_t request, std::string_view why) const {
    Answer(
        PayloadWriter().Int(static_cast<uint8_t>(TemplateAnswer::kRefused)).Int(request).Text(why));
  }
  void BecomeRank(ForkRequest& request);
  static std::optional<Role> AwaitRole(ForkRequest& request);
  void ShowTag(std::string_view tag) const;

  Channel guardian_;
  char* const tag_;  // in the memory that the kernel shows as this process's environment
  std::vector<std::string> arguments_;
  uint32_t version_ = kOldestTemplateVersion;
};

void TemplateServer::TakeStart() {
  auto packet = guardian_.Receive();
  if (packet.ok() && !packet->has_value()) _exit(0);
  if (!packet.ok()) EndTemplate(MessageOf(packet.status()));
  PayloadReader reader((*packet)->bytes);
  const bool is_start = reader.Int<uint8_t>() == static_cast<uint8_t>(TemplateOrder::kStart);
  const auto version = reader.Int<uint32_t>();
  if (!is_start || version != kOldestTemplateVersion)
    EndTemplate(
        fmt::format("the launcher begins with version {} of the template protocol, {} wanted",
                    version, kOldestTemplateVersion));
  (void)reader.Text();  // the program is this one
  arguments_ = TakeTexts(reader);
  if (!reader.rest().empty()) version_ = std::min(reader.Int<uint32_t>(), kTemplateVersion);
}

std::optional<ForkRequest> TemplateServer::Read(Channel::Packet& packet) const {
  PayloadReader reader(packet.bytes);
  if (reader.Int<uint8_t>() != static_cast<uint8_t>(TemplateOrder::kFork)) return std::nullopt;
  ForkRequest request;
  request.request = reader.Int<uint64_t>();
  request.guardian = reader.Int<int32_t>();
  if (!reader.ok() || packet.fds.empty()) return std::nullopt;
  request.gate = std::move(packet.fds.front());
  packet.fds.erase(packet.fds.begin());
  if (version_ > 1) return request;
  request.role = TakeRole(reader, std::move(packet.fds));
  if (!request.role) return std::nullopt;
  return request;
}

void TemplateServer::Serve(int& argc, char**& argv) {
  TakeStart();
  Answer(PayloadWriter().Int(static_cast<uint8_t>(TemplateAnswer::kReady)).Int<uint32_t>(version_));
  while (true) {
    auto packet = guardian_.Receive();
    if (!packet.ok() || !packet->has_value()) _exit(0);
    std::optional<ForkRequest> request = Read(**packet);
    if (!request) EndTemplate("a message that is no request");
    if (!Fork(*request)) continue;
    // Both live as long as the process.
    static std::vector<std::string> arguments = std::move(arguments_);
    static std::vector<char*> pointers;
    pointers.reserve(arguments.size() + 1);
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    argc = static_cast<int>(pointers.size());
    pointers.push_back(nullptr);
    argv = pointers.data();
    return;
  }
}

// Twice, and the process between ends at once: the child's parent is then the nearest subreaper
// above us, the guardian.
bool TemplateServer::Fork(ForkRequest& request) {
  if (const std::string why = WhyNotForked(); !why.empty()) {
    Refuse(request.request, why);
    return false;
  }
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    Refuse(request.request, fmt::format("make a pipe: {}", std::strerror(errno)));
    return false;
  }
  UniqueFd read_end(ends[0]), write_end(ends[1]);
  std::fflush(nullptr);  // else both would write what is in the buffers
  const pid_t between = fork();
  if (between == 0) {
    const pid_t child = fork();
    if (child == 0) {
      read_end.Reset();
      write_end.Reset();
      BecomeRank(request);
      return true;
    }
    (void)!write(write_end.get(), &child, sizeof child);
    _exit(0);
  }
  const int error = errno;
  write_end.Reset();
  pid_t child = -1;
  if (between > 0) {
    (void)!read(read_end.get(), &child, sizeof child);
    while (waitpid(between, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  if (child <= 0) {
    Refuse(request.request, fmt::format("fork: {}", std::strerror(between < 0 ? error : EAGAIN)));
    return false;
  }
  Answer(PayloadWriter()
             .Int(static_cast<uint8_t>(TemplateAnswer::kForked))
             .Int(request.request)
             .Int<int32_t>(child));
  return false;
}

void TemplateServer::BecomeRank(ForkRequest& request) {
  setpgid(0, 0);
  guardian_ = Channel();
  std::optional<Role> role = AwaitRole(request);
  if (!role) _exit(127);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != request.guardian) _exit(127);  // it died before the line above
  for (int fd = 0; fd < static_cast<int>(kStandardFiles); ++fd) {
    if (dup2(role->fds[static_cast<size_t>(fd)].get(), fd) < 0) _exit(127);
  }
  for (size_t i = 0; i < role->names.size(); ++i) {
    const int fd = role->fds[kStandardFiles + i].Release();
    fcntl(fd, F_SETFD, 0);
    setenv(role->names[i].c_str(), std::to_string(fd).c_str(), 1);
  }
  for (const std::string& variable : role->environment) {
    const size_t equals = variable.find('=');
    if (equals == std::string::npos) continue;
    const std::string name = variable.substr(0, equals);
    if (name == kSlotTagVariable) ShowTag(variable.substr(equals + 1));
    setenv(name.c_str(), variable.c_str() + equals + 1, 1);
  }
  PreferMemoryOf(role->numa);
}

// none: it was given up.
std::optional<Role> TemplateServer::AwaitRole(ForkRequest& request) {
  if (request.role) {
    char go;
    ssize_t count;
    do {
      count = read(request.gate.get(), &go, 1);
    } while (count < 0 && errno == EINTR);
    return count == 1 ? std::move(request.role) : std::nullopt;
  }
  auto packet = Channel(std::move(request.gate)).Receive();
  if (!packet.ok() || !packet->has_value()) return std::nullopt;
  PayloadReader reader((*packet)->bytes);
  return TakeRole(reader, std::move((*packet)->fds));
}

void TemplateServer::ShowTag(std::string_view tag) const {
  if (tag_ == nullptr || std::strlen(tag_) < tag.size()) return;
  const size_t room = std::strlen(tag_);
  std::memset(tag_, 0, room);
  std::memcpy(tag_, tag.data(), tag.size());
}

}  // namespace

bool Template::ServeIfAsked(int& argc, char**& argv) {
  const char* const text = getenv(kTemplateVariable);
  if (text == nullptr) return false;
  int fd = -1;
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), fd);
  if (error != std::errc() || *end != '\0' || fd < 3)
    EndTemplate(fmt::format("{}={}: a descriptor wanted", kTemplateVariable, text));
  TemplateServer(fd).Serve(argc, argv);
  return true;
}

}  // namespace outlast
