// A trainer that is its own template. Each process that does the set-up adds a line to "setups".
//   template_trainer WHAT [FILE TEXT]
// In its first attempt rank 0 ends by SIGKILL once FILE holds TEXT; a joined one adds a line to
// "waits" first. Later attempts add a line to
// "starts", "rank <r> forked|fresh", and then
//   plain   end; so does a joined rank of `join`
//   helper  leave a helper in a session of its own, a fork of a fork, and fail; the attempt behind
//           that adds "gone" or "alive" to "helpers"
//   meet    rank 0 listens on MASTER_PORT, 40 ms after its start, until the others have come; they
//           connect once, and add "met" or "refused" to "meetings"
//   stay    add their own pid and a helper's to "pids", write to "ready" and stay
// TEMPLATE_FAULT, for the template alone: what it does instead of serving.
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "outlast/outlast.h"
#include "outlast/run/template.h"

namespace {

void AppendLine(const char* path, const std::string& line) {
  const int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  (void)!write(fd, (line + "\n").data(), line.size() + 1);
  close(fd);
}

std::string Read(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

int NumberOf(const char* variable) {
  const char* const text = getenv(variable);
  return text == nullptr ? -1 : std::atoi(text);
}

void PauseForEver() {
  while (true) pause();
}

void Misbehave(const std::string& fault) {
  const int fd = NumberOf("OUTLAST_TEMPLATE_FD");
  if (fault == "exit") _exit(3);
  if (fault == "join")
    _exit(outlast::Run::Join().status().code() == absl::StatusCode::kFailedPrecondition ? 4 : 5);
  if (fault == "sleep") AppendLine("sleeps", "yes"), PauseForEver();
  if (fault == "thread") std::thread(PauseForEver).detach();
  constexpr char kReady[] = {1, 1, 0, 0, 0}, kVersion9[] = {1, 9, 0, 0, 0};
  if (fault == "nonsense") (void)send(fd, "what?", 5, 0);
  if (fault == "version") (void)send(fd, kVersion9, sizeof kVersion9, 0);
  if (fault == "silent") (void)send(fd, kReady, sizeof kReady, 0);
  if (fault == "nonsense" || fault == "version" || fault == "silent") PauseForEver();
}

// In a session of its own, and a child of nobody of ours; it has run no program since the fork.
pid_t StartHelper() {
  int ends[2];
  if (pipe(ends) != 0) return -1;
  if (fork() == 0) {
    setsid();
    const pid_t helper = fork();
    if (helper == 0) PauseForEver();
    (void)!write(ends[1], &helper, sizeof helper);
    _exit(0);
  }
  pid_t helper = -1;
  (void)!read(ends[0], &helper, sizeof helper);
  close(ends[0]);
  close(ends[1]);
  return helper;
}

void Meet() {
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(static_cast<uint16_t>(NumberOf("MASTER_PORT")));
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (NumberOf("RANK") != 0) {
    const bool met = connect(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) == 0;
    return AppendLine("meetings", met ? "met" : "refused");
  }
  usleep(40'000);
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) != 0 || listen(fd, 16) != 0)
    std::abort();
  for (int rank = 1; rank < NumberOf("WORLD_SIZE"); ++rank) accept(fd, nullptr, nullptr);
}

[[noreturn]] void DieOnce(const std::string& file, const std::string& text) {
  while (Read(file).find(text) == std::string::npos) usleep(1000);
  kill(getpid(), SIGKILL);
  std::abort();
}

void NoteStart(bool is_forked) {
  const bool leads_its_group = getpgrp() == getpid();
  AppendLine("starts", "rank " + std::to_string(NumberOf("RANK")) +
                           (is_forked ? " forked" : " fresh") +
                           (leads_its_group ? "" : " in a strange group"));
}

int Join(bool is_forked, char** argv) {
  const auto run = outlast::Run::Join();
  if (!run.ok()) return 1;
  const absl::Status status =
      (*run)->ForEachGeneration([&](outlast::Generation& generation) -> absl::Status {
        if (generation.number() > 1) {
          NoteStart(is_forked);
          return absl::OkStatus();
        }
        if ((*run)->rank() == 0) AppendLine("waits", ""), DieOnce(argv[2], argv[3]);
        while (generation.Check().ok()) usleep(1000);
        return generation.Check();
      });
  return status.ok() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  AppendLine("setups", std::to_string(getpid()));
  const char* const fault = getenv("TEMPLATE_FAULT");
  if (fault != nullptr && getenv("OUTLAST_TEMPLATE_FD") != nullptr) Misbehave(fault);
  const bool is_forked = outlast::Template::ServeIfAsked(argc, argv);
  if (argc != 4) return 2;
  const std::string what = argv[1];
  if (what == "join") return Join(is_forked, argv);
  const int attempt = NumberOf("TORCHELASTIC_RESTART_COUNT");
  if (attempt == 0 && NumberOf("RANK") == 0) DieOnce(argv[2], argv[3]);
  if (attempt == 0) PauseForEver();
  NoteStart(is_forked);
  if (what == "meet") Meet();
  if (what == "helper" && attempt == 1) {
    AppendLine("helper_pid", std::to_string(StartHelper()));
    return 4;
  }
  if (what == "helper") {
    const pid_t helper = std::atoi(Read("helper_pid").c_str());
    AppendLine("helpers", kill(helper, 0) == 0 ? "alive" : "gone");
  }
  if (what == "stay") {
    AppendLine("pids", std::to_string(getpid()));
    AppendLine("pids", std::to_string(StartHelper()));
    AppendLine("ready", "");
    PauseForEver();
  }
  return 0;
}
