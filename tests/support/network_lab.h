// Several machines' network on one machine, with real cuts: a network namespace each, joined by a
// router in a namespace of its own, whose nftables say what passes. Programs in it are started
// behind the words of Place. Needs root, iproute2 and nftables, and a kernel that has them.
//
//   machine k: 10.99.<k>.2 ── veth ── 10.99.<k>.1: router, which forwards to all others
//
// The namespaces have no names: they end with this process and those that run in them.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "outlast/base/fd.h"
#include "tests/support/temp_folder.h"

namespace outlast::testing {

class NetworkLab {
 public:
  // What happens to packets from one machine to another.
  enum class Deed { kDrop, kReject };
  struct Way {
    int from = 0, to = 0;
  };
  static std::vector<Way> Both(int one, int other) { return {{one, other}, {other, one}}; }

  // Machines 0 .. count-1. Look at why_not() before anything else.
  explicit NetworkLab(int count) {
    if (geteuid() != 0) {
      why_not_ = "needs root for network namespaces";
      return;
    }
    for (int k = 0; k <= count && why_not_.empty(); ++k) Open();
    if (!why_not_.empty()) return;
    router_ = count;
    std::string script = "ip link set lo up; echo 1 >/proc/sys/net/ipv4/ip_forward\n";
    for (int k = 0; k < count; ++k) {
      const std::string link = "m" + std::to_string(k), net = Net(k);
      script += "ip link add " + link + " type veth peer name eth0 netns " + Namespace(k) +
                "\nip addr add " + net + "1/24 dev " + link + "\nip link set " + link + " up\n";
    }
    Do(router_, script + "nft list ruleset");
    for (int k = 0; k < count && why_not_.empty(); ++k) {
      Do(k, "ip link set lo up\nip addr add " + address(k) +
                "/24 dev eth0\nip link set eth0 up\nip route add default via " + Net(k) + "1");
    }
    Heal();
  }

  // Empty: it stands. Else what this machine lacks.
  const std::string& why_not() const { return why_not_; }
  std::string address(int machine) const { return Net(machine) + "2"; }
  // What stands before a command that is to run on `machine`: its process is the command's.
  std::vector<std::string> Place(int machine) const {
    return {"/usr/bin/nsenter", "--net=" + Namespace(machine)};
  }

  // These ways are cut from now on, and no others. Connections that stand are cut too.
  void Cut(const std::vector<Way>& ways, Deed deed = Deed::kDrop) {
    std::string rules;
    for (const Way& way : ways) {
      const std::string pair = "ip saddr " + address(way.from) + " ip daddr " + address(way.to);
      rules += deed == Deed::kDrop
                   ? pair + " drop\n"
                   : pair + " meta l4proto tcp reject with tcp reset\n" + pair + " reject\n";
    }
    Do(router_,
       "nft -f - <<END\nflush ruleset\ntable ip cut {\nchain forward {\n"
       "type filter hook forward priority 0\n" +
           rules + "}\n}\nEND");
  }
  void Heal() { Cut({}); }
  // From now on `machine` sends and receives at most so much.
  void Slow(int machine, int megabits_per_second) {
    const std::string shape =
        " root tbf rate " + std::to_string(megabits_per_second) + "mbit burst 64kb latency 100ms";
    Do(router_, "tc qdisc replace dev m" + std::to_string(machine) + shape);
    Do(machine, "tc qdisc replace dev eth0" + shape);
  }

 private:
  static std::string Net(int k) { return "10.99." + std::to_string(k) + "."; }
  std::string Namespace(int k) const {
    return "/proc/" + std::to_string(getpid()) + "/fd/" +
           std::to_string(namespaces_[static_cast<size_t>(k)].get());
  }
  void Open() {
    std::thread([this] {
      if (unshare(CLONE_NEWNET) != 0) {
        why_not_ = "needs network namespaces, which this machine refuses";
        return;
      }
      namespaces_.emplace_back(open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
    }).join();
  }
  // Runs a script on a machine, up to its first failure, which is what this machine lacks.
  void Do(int k, const std::string& script) {
    if (!why_not_.empty()) return;
    const std::string said = temp_.path() + "/said";
    std::ofstream(temp_.path() + "/script") << "exec >" << said << " 2>&1; set -e\n"
                                            << "PATH=$PATH:/usr/sbin:/sbin\n"
                                            << script << "\n";
    const std::string command = "nsenter --net=" + Namespace(k) + " sh " + temp_.path() + "/script";
    if (std::system(command.c_str()) == 0) return;
    std::ifstream file(said);
    std::string line;
    std::getline(file, line);
    why_not_ = "needs veth pairs, nftables and traffic control: " + line;
  }

  const TempFolder temp_;
  std::vector<UniqueFd> namespaces_;
  int router_ = 0;
  std::string why_not_;
};

}  // namespace outlast::testing
