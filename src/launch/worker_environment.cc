#include "launch/worker_environment.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>

#include "base/error.h"

namespace outlast {
namespace {

// Bound first, SO_REUSEADDR after: so the kernel gives a port that nobody else holds, not even with
// that option.
absl::StatusOr<UniqueFd> BindFreePort(const std::string& host) {
  OUTLAST_ASSIGN_OR_RETURN(const SocketAddress address, NumericAddress({host, 0}));
  UniqueFd held(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!held.is_open()) return ErrnoStatus(errno, "make a socket");
  if (bind(held.get(), address.get(), address.size()) != 0)
    return ErrnoStatus(errno, fmt::format("bind {} port 0", host));
  const int on = 1;
  if (setsockopt(held.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0)
    return ErrnoStatus(errno, "set SO_REUSEADDR");
  return held;
}

// Beside the tool, in the build tree as after the install.
std::string OwnPythonFolder() {
  std::error_code unknown;
  const auto bin = std::filesystem::read_symlink("/proc/self/exe", unknown).parent_path();
  auto folder = bin / "share/outlast/python";
  if (!std::filesystem::exists(folder, unknown))
    folder = bin.parent_path() / "share/outlast/python";
  return folder;
}

// Defaults: our own environment's go first.
void AddDefaults(int local_world, std::vector<std::string>& variables) {
  if (local_world > 1 && std::getenv("OMP_NUM_THREADS") == nullptr)
    variables.push_back("OMP_NUM_THREADS=1");
  if (std::getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING") == nullptr)
    variables.push_back("TORCH_NCCL_ASYNC_ERROR_HANDLING=1");
}

}  // namespace

std::vector<std::string> EnvironmentOf(const WorkerPlace& place) {
  std::vector<std::string> variables = {
      fmt::format("RANK={}", place.rank),
      fmt::format("WORLD_SIZE={}", place.world),
      fmt::format("LOCAL_RANK={}", place.local_rank),
      fmt::format("LOCAL_WORLD_SIZE={}", place.local_world),
      fmt::format("GROUP_RANK={}", place.group_rank),
      fmt::format("GROUP_WORLD_SIZE={}", place.group_world),
      "ROLE_NAME=default",
      fmt::format("ROLE_RANK={}", place.rank),
      fmt::format("ROLE_WORLD_SIZE={}", place.world),
      fmt::format("TORCHELASTIC_RESTART_COUNT={}", place.attempt),
      fmt::format("TORCHELASTIC_MAX_RESTARTS={}", place.max_restarts),
      fmt::format("TORCHELASTIC_RUN_ID={}", place.job),
      "TORCHELASTIC_USE_AGENT_STORE=False",
      fmt::format("OUTLAST_RUN_ID={}", place.run_id),
      fmt::format("OUTLAST_RUN_DIR={}", place.run_dir),
      fmt::format("OUTLAST_INCARNATION={}", place.incarnation),
  };
  if (place.micro_batches > 0)
    variables.push_back(fmt::format("OUTLAST_MICRO_BATCHES={}", place.micro_batches));
  if (place.ranks_per_replica > 1)
    variables.push_back(fmt::format("OUTLAST_RANKS_PER_REPLICA={}", place.ranks_per_replica));
  if (!place.address.empty()) variables.push_back(fmt::format("OUTLAST_ADDRESS={}", place.address));
  if (place.master) {
    variables.push_back(fmt::format("MASTER_ADDR={}", place.master->host));
    variables.push_back(fmt::format("MASTER_PORT={}", place.master->port));
  }
  AddDefaults(place.local_world, variables);
  return variables;
}

std::vector<std::string> TemplateEnvironment(int slots, const std::string& program,
                                             const std::vector<std::string>& arguments) {
  std::vector<std::string> variables;
  AddDefaults(slots, variables);
  if (std::find(arguments.begin(), arguments.end(), "outlast_template") == arguments.end())
    return variables;
  variables.push_back(fmt::format("OUTLAST_TEMPLATE_PROGRAM={}", program));
  const char* const before = std::getenv("PYTHONPATH");
  if (before != nullptr) variables.push_back(fmt::format("OUTLAST_TEMPLATE_PYTHONPATH={}", before));
  variables.push_back(
      fmt::format("PYTHONPATH={}{}", OwnPythonFolder(),
                  before == nullptr || *before == '\0' ? "" : fmt::format(":{}", before)));
  return variables;
}

absl::StatusOr<int> MasterPorts::Of(uint64_t generation) {
  if (const auto found = held_.find(generation); found != held_.end()) return found->second.port;
  OUTLAST_ASSIGN_OR_RETURN(UniqueFd held, BindFreePort(address_));
  OUTLAST_ASSIGN_OR_RETURN(const SocketAddress bound, SocketAddress::Local(held.get()));
  const int port = bound.host_port().port;
  while (!held_.empty() && held_.begin()->first + 1 < generation) held_.erase(held_.begin());
  held_[generation] = {std::move(held), port};
  return port;
}

}  // namespace outlast
