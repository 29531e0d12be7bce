// Which CPUs and whose memory each worker of a node gets (`--bind`). A pure function of the
// topology and the slot: the same after every restart.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace outlast {

struct Core {
  int package = 0;
  int numa = 0;           // the memory next to it
  std::vector<int> cpus;  // its hardware threads that we may use, ascending
};
struct Topology {
  std::vector<Core> cores;  // by NUMA node, then package, then first CPU
  std::vector<int>
      card_numas;  // NUMA node of each GPU, in CUDA's order by PCI address; -1: unknown
};

// What /sys says of the CPUs in `allowed`, and of NVIDIA's cards. Without NUMA there is one node,
// 0. kNotFound: nothing is known of any CPU.
absl::StatusOr<Topology> ReadTopology(const std::vector<int>& allowed,
                                      const std::string& sys = "/sys");
// The CPUs that this process may run on, ascending.
std::vector<int> AllowedCpus();

enum class BindTo : uint8_t {
  kNone,  // wherever the kernel likes
  kNuma,  // all CPUs of one NUMA node, which ranks of it share, and its memory first
  kCore,  // whole cores of one NUMA node, which no other rank has, and its memory first
};

struct Binding {
  std::vector<int> cpus;  // ascending; empty: not bound
  int numa = -1;          // whose memory is taken first; -1: none is named
  bool operator==(const Binding&) const = default;
};

// One for each of `slots` slots. A slot goes to the NUMA node of its card where there is a card for
// each slot (slot i uses card i); else slots are dealt out over the NUMA nodes in blocks, in order,
// so that neighbours by rank are neighbours in the machine. kInvalidArgument (kCore): a NUMA node
// has fewer cores than slots.
absl::StatusOr<std::vector<Binding>> Bind(const Topology& topology, int slots, BindTo to);

// "0-3,8": for people, and as taskset takes it.
std::string CpuList(const std::vector<int>& cpus);
// The reverse. Errors: not such a list.
absl::StatusOr<std::vector<int>> ParseCpuList(std::string_view text);

}  // namespace outlast
