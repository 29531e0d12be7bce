// A real Slurm for the tests that want one: munged, slurmctld and three slurmd as our children, on
// loopback, with folders and ports of their own; it ends with the test.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pwd.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "base/child_program.h"
#include "outlast/base/clock.h"
#include "outlast/base/fd.h"
#include "outlast/testing/time_factor.h"
#include "tests/support/temp_folder.h"

namespace outlast::testing {

class SlurmCluster {
 public:
  static constexpr int kNodes = 3;  // n1 to n3, of 2 CPUs each; partitions "all" and "urgent"

  // Null where Slurm is not installed, or it did not come up; `why` then says which. Its commands
  // find it by this process's environment.
  static std::unique_ptr<SlurmCluster> Start(std::string* why) {
    for (const char* program :
         {"/usr/sbin/munged", "/usr/sbin/slurmctld", "/usr/sbin/slurmd", "/usr/bin/sbatch"}) {
      if (access(program, X_OK) == 0) continue;
      *why = std::string(program) +
             " is not installed (apt-get install slurmctld slurmd slurm-client "
             "slurm-wlm-basic-plugins munge)";
      return nullptr;
    }
    std::unique_ptr<SlurmCluster> cluster(new SlurmCluster);
    // For jobs of other users.
    std::filesystem::permissions(cluster->folder_.path(), std::filesystem::perms::owner_all |
                                                              std::filesystem::perms::group_exec |
                                                              std::filesystem::perms::others_exec);
    if (!cluster->ComesUp()) {
      *why = "it did not come up: " + cluster->Read("slurmctld.out") + cluster->Read("munged.out");
      return nullptr;
    }
    return cluster;
  }
  ~SlurmCluster() {
    Command({"scancel", "--me"});
    Command({"scancel", "--me", "--signal=KILL", "--full"});
    // Its jobs are slurmd's children, which outlive it.
    for (int i = 0; i < 200 && !Command({"squeue", "--noheader"}).empty(); ++i) Pause();
    while (!daemons_.empty()) {
      kill(daemons_.back(), SIGTERM);
      End(daemons_.back());
      daemons_.pop_back();
    }
  }

  std::string Path(const std::string& name) const { return folder_ / name; }
  std::string Read(const std::string& name) const {
    std::ifstream file(Path(name));
    return {std::istreambuf_iterator<char>(file), {}};
  }

  // As a machine that loses power: its slurmd and all processes of its jobs are killed, and stay
  // away. Then as slurmctld finds out, which takes SlurmdTimeout.
  void KillNode(int k) {
    kill(slurmds_.at(k), SIGKILL);
    const std::string node = "n" + std::to_string(k);
    for (const pid_t pid : Find({"SLURMD_NODENAME=" + node})) {
      // slurmstepd first, which would tell.
      if (const pid_t parent = ParentOf(pid); NameOf(parent).starts_with("slurmstepd"))
        kill(parent, SIGKILL);
      kill(pid, SIGKILL);
    }
    Command({"scontrol", "update", "NodeName=" + node, "State=DOWN", "Reason=dead"});
  }
  // Processes of this cluster's jobs that have all of `variables` in their environment.
  std::vector<pid_t> Find(const std::vector<std::string>& variables) const {
    std::vector<pid_t> found;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      const pid_t pid = std::atoi(entry.path().filename().c_str());
      if (pid <= 0) continue;
      std::ifstream file(entry.path() / "environ", std::ios::binary);
      const std::string all =
          std::string(1, '\0') + std::string(std::istreambuf_iterator<char>(file), {});
      const auto has = [&all](const std::string& one) {
        const std::string zero(1, '\0');
        return all.find(zero + one + zero) != std::string::npos;
      };
      if (has("SLURM_CONF=" + Path("slurm.conf")) &&
          std::all_of(variables.begin(), variables.end(), has))
        found.push_back(pid);
    }
    return found;
  }

  // What a command says; empty: it failed.
  static std::string Command(const std::vector<std::string>& command) {
    const auto end = RunProgram(
        {.command = command, .deadline = absl::Seconds(20) * TimeFactor(), .keep_output = 1 << 20});
    return end.ok() && end->code == 0 && end->signal == 0 ? end->output : "";
  }
  // A field of "scontrol show job ID", such as "JobState"; empty: no such job.
  static std::string JobField(const std::string& id, const std::string& name) {
    return Field(Command({"scontrol", "show", "job", id, "--oneliner"}), name);
  }
  static std::string NodeField(const std::string& node, const std::string& name) {
    return Field(Command({"scontrol", "show", "node", node, "--oneliner"}), name);
  }

 private:
  SlurmCluster() = default;

  static std::string Field(const std::string& line, const std::string& name) {
    std::istringstream words(line);
    for (std::string word; words >> word;)
      if (word.starts_with(name + "=")) return word.substr(name.size() + 1);
    return "";
  }
  static pid_t ParentOf(pid_t pid) {
    std::ifstream status("/proc/" + std::to_string(pid) + "/status");
    for (std::string word; status >> word;) {
      if (word == "PPid:" && status >> word) return std::atoi(word.c_str());
    }
    return pid;
  }
  static std::string NameOf(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/comm");
    return {std::istreambuf_iterator<char>(file), {}};
  }
  static void Pause() { Clock::Real().SleepFor(absl::Milliseconds(25)); }

  // A port that nobody else gets: bound here, without listening; a server may take it all the same.
  int HeldPort() {
    UniqueFd held(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1;
    setsockopt(held.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    socklen_t size = sizeof address;
    auto* raw = reinterpret_cast<sockaddr*>(&address);
    if (bind(held.get(), raw, size) != 0 || getsockname(held.get(), raw, &size) != 0) return 0;
    ports_.push_back(std::move(held));
    return ntohs(address.sin_port);
  }

  void WriteConfiguration() {
    const passwd* user = getpwuid(getuid());
    const std::string me = user != nullptr ? user->pw_name : "root", at = folder_.path();
    std::ofstream out(Path("slurm.conf"));
    out << "ClusterName=outlast\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=" << HeldPort()
        << "\nSlurmUser=" << me << "\nSlurmdUser=" << me
        << "\nAuthType=auth/munge\nAuthInfo=socket=" << at
        << "/munge.socket,cred_expire=5\nMpiDefault=none\nStateSaveLocation=" << at
        << "/state\nSlurmdSpoolDir=" << at << "/spool.%n\nSlurmctldPidFile=" << at
        << "/slurmctld.pid\nSlurmdPidFile=" << at
        << "/slurmd.%n.pid\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n"
           "SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\n"
           "SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,defer\n"
           "JobAcctGatherType=jobacct_gather/none\n"
           "AccountingStorageType=accounting_storage/none\nReturnToService=2\n"
           "SlurmdParameters=config_overrides\nSwitchType=switch/none\nKillWait=30\n";
    for (int k = 1; k <= kNodes; ++k) {
      out << "NodeName=n" << k << " NodeHostname=localhost NodeAddr=127.0.0.1 Port=" << HeldPort()
          << " CPUs=2\n";
      std::filesystem::create_directory(Path("spool.n" + std::to_string(k)));
    }
    // Jobs of "urgent" push those of "all" out, of which each process gets TERM first.
    out << "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
        << "PartitionName=all Nodes=n[1-" << kNodes
        << "] Default=YES MaxTime=60 State=UP PriorityTier=1 GraceTime=20\n"
        << "PartitionName=urgent Nodes=n[1-" << kNodes
        << "] MaxTime=60 State=UP PriorityTier=9 PreemptMode=OFF\n";
    std::filesystem::create_directory(Path("state"));
    std::ofstream(Path("munge.key")) << std::string(64, 'k');
    std::filesystem::permissions(Path("munge.key"), std::filesystem::perms::owner_read);
  }

  void StartDaemon(const std::string& name, const std::vector<std::string>& command) {
    std::vector<char*> argv;
    for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    const std::string log = Path(name + ".out");
    const pid_t pid = fork();
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGTERM);
      dup2(open("/dev/null", O_RDONLY), 0);
      const int out = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
      dup2(out, 1);
      dup2(out, 2);
      execv(argv[0], argv.data());
      _exit(127);
    }
    daemons_.push_back(pid);
  }

  bool ComesUp() {
    WriteConfiguration();
    setenv("SLURM_CONF", Path("slurm.conf").c_str(), 1);
    for (const char* name : {"SBATCH_PARTITION", "SBATCH_ACCOUNT", "SBATCH_WAIT", "SQUEUE_FORMAT"})
      unsetenv(name);
    StartDaemon("munged",
                {"/usr/sbin/munged", "--foreground", "--force", "--key-file=" + Path("munge.key"),
                 "--socket=" + Path("munge.socket"), "--pid-file=" + Path("munge.pid"),
                 "--seed-file=" + Path("munge.seed"), "--log-file=" + Path("munge.log")});
    const auto socket_is_there = [this] { return access(Path("munge.socket").c_str(), F_OK) == 0; };
    if (!Comes(socket_is_there)) return false;
    StartDaemon("slurmctld", {"/usr/sbin/slurmctld", "-D", "-c"});
    for (int k = 1; k <= kNodes; ++k) {
      const std::string node = "n" + std::to_string(k);
      StartDaemon("slurmd." + node, {"/usr/sbin/slurmd", "-D", "-N", node});
      slurmds_[k] = daemons_.back();
    }
    return Comes([] {
      const std::string states =
          Command({"sinfo", "--noheader", "--partition=all", "--Node", "--format=%T"});
      return states == "idle\nidle\nidle\n";
    });
  }
  template <typename What>
  static bool Comes(const What& what) {
    const absl::Duration deadline = Clock::Real().Uptime() + absl::Seconds(30) * TimeFactor();
    while (!what()) {
      if (Clock::Real().Uptime() > deadline) return false;
      Pause();
    }
    return true;
  }
  static void End(pid_t pid) {
    for (int i = 0; i < 400; ++i) {
      if (waitpid(pid, nullptr, WNOHANG) != 0) return;
      Pause();
    }
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }

  const TempFolder folder_;
  std::vector<UniqueFd> ports_;
  std::vector<pid_t> daemons_;
  std::map<int, pid_t> slurmds_;
};

// In a test: a running Slurm, or the test is skipped by a word; where CI=true it fails.
#define OUTLAST_SLURM_OR_SKIP(cluster)                                          \
  std::string cluster##_why;                                                    \
  const auto cluster = ::outlast::testing::SlurmCluster::Start(&cluster##_why); \
  if (cluster == nullptr && std::getenv("CI") != nullptr &&                     \
      std::string(std::getenv("CI")) == "true")                                 \
    FAIL() << "Slurm: " << cluster##_why;                                       \
  if (cluster == nullptr) GTEST_SKIP() << "Slurm: " << cluster##_why

}  // namespace outlast::testing
