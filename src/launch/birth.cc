#include "launch/birth.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <set>

#include "base/error.h"
#include "run/template_wire.h"

extern char** environ;  // NOLINT(readability-redundant-declaration): POSIX asks for it

namespace outlast {
namespace {

constexpr char kRunStep[] = "run the command";
constexpr int kPreferred = 1;  // MPOL_PREFERRED of linux/mempolicy.h

[[noreturn]] void FailChild(int pipe, const char* step) {
  ExecFailure failure{errno, {}};
  std::strncpy(failure.step, step, sizeof failure.step - 1);
  (void)!write(pipe, &failure, sizeof failure);
  _exit(127);
}

void PreferMemoryOf(int numa) {
  if (numa < 0) return;
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, 16> nodes{};  // the kernel's largest configuration has 1024 of them
  const auto node = static_cast<size_t>(numa);
  if (node >= kBits * nodes.size()) return;
  nodes[node / kBits] = 1ul << node % kBits;
  // A container's filter may forbid it, and the node may have no memory for us.
  if (syscall(SYS_set_mempolicy, kPreferred, nodes.data(), kBits * nodes.size() + 1) != 0)
    PrintToStderr("outlast: memory of NUMA node {}: {}: it comes from where it is touched\n", numa,
                  std::strerror(errno));
}

}  // namespace

absl::Status Prepare(const Birth& birth, std::string_view tag,
                     const std::vector<std::string>& arguments, PreparedBirth& prepared) {
  // The tag comes first: it is found also in a very large environment.
  std::vector<std::string>& wanted = prepared.strings;
  wanted = {fmt::format("{}={}", kSlotTagVariable, tag)};
  wanted.insert(wanted.end(), birth.environment.begin(), birth.environment.end());
  for (size_t i = 0; i < birth.variables.size(); ++i) {
    // Not close-on-exec; numbers that the user handed down stay his.
    UniqueFd copy(fcntl(birth.fds[i + 3].get(), F_DUPFD, 3));
    if (!copy.is_open()) return ErrnoStatus(errno, "hand down descriptors");
    wanted.push_back(birth.variables[i] + "=" + std::to_string(copy.get()));
    prepared.handed_down.push_back(std::move(copy));
  }
  std::set<std::string_view> names;
  for (const std::string_view variable : wanted)
    names.insert(variable.substr(0, variable.find('=')));
  for (const std::string& variable : wanted)
    prepared.environment.push_back(const_cast<char*>(variable.c_str()));
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text(*variable);
    if (!names.contains(text.substr(0, text.find('=')))) prepared.environment.push_back(*variable);
  }
  for (const std::string& argument : arguments)
    prepared.arguments.push_back(const_cast<char*>(argument.c_str()));
  prepared.environment.push_back(nullptr);
  prepared.arguments.push_back(nullptr);
  return absl::OkStatus();
}

void BindToCpus(pid_t pid, const Binding& binding) {
  if (binding.cpus.empty()) return;
  const auto count = static_cast<size_t>(binding.cpus.back()) + 1;
  cpu_set_t* const set = CPU_ALLOC(count);
  CPU_ZERO_S(CPU_ALLOC_SIZE(count), set);
  for (const int cpu : binding.cpus)
    CPU_SET_S(static_cast<size_t>(cpu), CPU_ALLOC_SIZE(count), set);
  if (sched_setaffinity(pid, CPU_ALLOC_SIZE(count), set) != 0)
    PrintToStderr("outlast: CPUs {}: {}: not bound\n", CpuList(binding.cpus), std::strerror(errno));
  CPU_FREE(set);
}

std::string TextOf(const ExecFailure& failure) {
  std::string text = fmt::format("{}: {}", failure.step, std::strerror(failure.error_number));
  // The file itself was looked for before.
  if (std::strcmp(failure.step, kRunStep) == 0 && failure.error_number == ENOENT)
    text += " (it is gone, or the interpreter that it names is missing)";
  return text;
}

// Not vfork, under which a program on a disk that hangs would stop the parent too.
void BecomeProgram(const std::string& program, const Birth& birth, const PreparedBirth& prepared,
                   pid_t parent, const Inherited& inherited, int failure_pipe) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);  // it died before the line above
  for (int fd = 0; fd < 3; ++fd) {
    if (dup2(birth.fds[static_cast<size_t>(fd)].get(), fd) < 0)
      FailChild(failure_pipe, "set up standard files");
  }
  BindToCpus(0, birth.binding);
  PreferMemoryOf(birth.binding.numa);
  if (inherited.descriptors.rlim_max != 0) setrlimit(RLIMIT_NOFILE, &inherited.descriptors);
  sigprocmask(SIG_SETMASK, &inherited.mask, nullptr);
  execve(program.c_str(), prepared.arguments.data(), prepared.environment.data());
  FailChild(failure_pipe, kRunStep);
}

}  // namespace outlast
