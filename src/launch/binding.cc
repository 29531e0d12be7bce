#include "launch/binding.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "base/error.h"

namespace outlast {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxCpu = 1 << 16;

std::optional<std::string> FirstLine(const fs::path& file) {
  std::ifstream stream(file);
  std::string line;
  if (!std::getline(stream, line)) return std::nullopt;
  return line;
}

std::optional<int> Number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

int ReadNumber(const fs::path& file, int otherwise) {
  const auto line = FirstLine(file);
  return line ? Number(*line).value_or(otherwise) : otherwise;
}

// CPU -> NUMA node, of all nodes that list CPUs.
std::map<int, int> ReadNumaOfCpus(const fs::path& sys) {
  std::map<int, int> numa_of;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(sys / "devices/system/node", none)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("node")) continue;
    const auto numa = Number(std::string_view(name).substr(4));
    const auto list = FirstLine(entry.path() / "cpulist");
    if (!numa || !list) continue;
    const auto cpus = ParseCpuList(*list);
    if (!cpus.ok()) continue;
    for (const int cpu : *cpus) numa_of[cpu] = *numa;
  }
  return numa_of;
}

// 0x10de is NVIDIA's vendor id, 0x0300 and 0x0302 the PCI classes of display and 3D controllers.
bool IsCard(const fs::path& device) {
  const auto vendor = FirstLine(device / "vendor");
  const auto kind = FirstLine(device / "class");
  return vendor == "0x10de" && kind && (kind->starts_with("0x0300") || kind->starts_with("0x0302"));
}

std::vector<int> ReadCards(const fs::path& sys) {
  std::map<std::string, int> numa_of;  // by PCI address
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(sys / "bus/pci/devices", none)) {
    if (IsCard(entry.path()))
      numa_of[entry.path().filename()] = ReadNumber(entry.path() / "numa_node", -1);
  }
  std::vector<int> numas;
  numas.reserve(numa_of.size());
  for (const auto& [address, numa] : numa_of) numas.push_back(numa);
  return numas;
}

}  // namespace

absl::StatusOr<std::vector<int>> ParseCpuList(std::string_view text) {
  std::vector<int> cpus;
  const auto refuse = [&] {
    return Error(absl::StatusCode::kInvalidArgument,
                 "CPU list '{}': numbers and ranges such as 0-3,8 wanted", text);
  };
  for (size_t begin = 0; begin < text.size();) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    const std::string_view part = text.substr(begin, comma - begin);
    const size_t dash = part.find('-');
    const auto first = Number(part.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : Number(part.substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first || *last >= kMaxCpu) return refuse();
    for (int cpu = *first; cpu <= *last; ++cpu) cpus.push_back(cpu);
    begin = comma + 1;
  }
  std::sort(cpus.begin(), cpus.end());
  cpus.erase(std::unique(cpus.begin(), cpus.end()), cpus.end());
  return cpus;
}

std::string CpuList(const std::vector<int>& cpus) {
  std::string text;
  for (size_t i = 0; i < cpus.size();) {
    size_t end = i + 1;
    while (end < cpus.size() && cpus[end] == cpus[end - 1] + 1) ++end;
    text += fmt::format("{}{}", text.empty() ? "" : ",", cpus[i]);
    if (end - i > 1) text += fmt::format("-{}", cpus[end - 1]);
    i = end;
  }
  return text;
}

std::vector<int> AllowedCpus() {
  // The kernel may know more CPUs than cpu_set_t holds.
  std::vector<int> cpus;
  for (size_t count = CPU_SETSIZE; count <= kMaxCpu; count *= 2) {
    cpu_set_t* const set = CPU_ALLOC(count);
    const size_t bytes = CPU_ALLOC_SIZE(count);
    CPU_ZERO_S(bytes, set);
    const bool fits = sched_getaffinity(0, bytes, set) == 0;
    for (size_t cpu = 0; fits && cpu < count; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(static_cast<int>(cpu));
    }
    CPU_FREE(set);
    if (fits) break;
  }
  return cpus;
}

absl::StatusOr<Topology> ReadTopology(const std::vector<int>& allowed, const std::string& sys) {
  const fs::path root(sys);
  const std::map<int, int> numa_of = ReadNumaOfCpus(root);
  std::map<std::tuple<int, int, int>, Core> cores;  // by NUMA node, package and first CPU
  for (const int cpu : allowed) {
    const fs::path topology = root / fmt::format("devices/system/cpu/cpu{}/topology", cpu);
    const auto siblings = FirstLine(topology / "thread_siblings_list");
    if (!siblings) continue;
    OUTLAST_ASSIGN_OR_RETURN(const std::vector<int> threads, ParseCpuList(*siblings));
    const int package = ReadNumber(topology / "physical_package_id", 0);
    const auto numa = numa_of.find(cpu);
    const int numa_node = numa == numa_of.end() ? 0 : numa->second;
    Core& core = cores[{numa_node, package, threads.empty() ? cpu : threads.front()}];
    core.package = package;
    core.numa = numa_node;
    core.cpus.push_back(cpu);
  }
  if (cores.empty()) {
    return Error(absl::StatusCode::kNotFound, "{}: no topology of CPUs {} is told there", sys,
                 CpuList(allowed));
  }
  Topology topology;
  for (auto& [key, core] : cores) topology.cores.push_back(std::move(core));
  topology.card_numas = ReadCards(root);
  return topology;
}

namespace {

// The NUMA node of each slot.
std::vector<int> PlaceSlots(const Topology& topology, int slots) {
  std::set<int> numas;
  for (const Core& core : topology.cores) numas.insert(core.numa);
  const auto is_usable = [&](int slot) {
    return static_cast<size_t>(slot) < topology.card_numas.size() &&
           numas.contains(topology.card_numas[static_cast<size_t>(slot)]);
  };
  bool by_card = true;
  for (int slot = 0; slot < slots; ++slot) by_card = by_card && is_usable(slot);

  const std::vector<int> in_order(numas.begin(), numas.end());
  std::vector<int> numa_of;
  for (int slot = 0; slot < slots; ++slot) {
    const auto block =
        static_cast<size_t>(slot) * in_order.size() / static_cast<size_t>(std::max(1, slots));
    numa_of.push_back(by_card ? topology.card_numas[static_cast<size_t>(slot)] : in_order[block]);
  }
  return numa_of;
}

void AddCores(const std::vector<const Core*>& cores, size_t begin, size_t end, Binding& binding) {
  for (size_t i = begin; i < end; ++i)
    binding.cpus.insert(binding.cpus.end(), cores[i]->cpus.begin(), cores[i]->cpus.end());
  std::sort(binding.cpus.begin(), binding.cpus.end());
}

}  // namespace

absl::StatusOr<std::vector<Binding>> Bind(const Topology& topology, int slots, BindTo to) {
  std::vector<Binding> bindings(static_cast<size_t>(slots));
  if (to == BindTo::kNone) return bindings;
  const std::vector<int> numa_of = PlaceSlots(topology, slots);
  for (const int numa : std::set<int>(numa_of.begin(), numa_of.end())) {
    std::vector<const Core*> cores;
    for (const Core& core : topology.cores) {
      if (core.numa == numa) cores.push_back(&core);
    }
    const auto here =
        std::max<size_t>(1, static_cast<size_t>(std::count(numa_of.begin(), numa_of.end(), numa)));
    if (to == BindTo::kCore && cores.size() < here) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "--bind core: {} workers on NUMA node {}, cores for us there: {}; at most one a "
                   "core wanted, or --bind numa, which shares them",
                   here, numa, cores.size());
    }
    size_t place = 0;
    for (size_t slot = 0; slot < numa_of.size(); ++slot) {
      if (numa_of[slot] != numa) continue;
      bindings[slot].numa = numa;
      if (to == BindTo::kNuma) {
        AddCores(cores, 0, cores.size(), bindings[slot]);
      } else {
        AddCores(cores, place * cores.size() / here, (place + 1) * cores.size() / here,
                 bindings[slot]);
      }
      ++place;
    }
  }
  return bindings;
}

}  // namespace outlast
