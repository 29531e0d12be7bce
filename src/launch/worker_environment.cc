#include "launch/worker_environment.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdlib>

#include "base/error.h"

namespace outlast {
namespace {

// Bound first, SO_REUSEADDR after: so the kernel gives a port that nobody else holds, not even with
// that option.
absl::StatusOr<UniqueFd> BindFreePort() {
  UniqueFd held(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!held.is_open()) return ErrnoStatus(errno, "make a socket");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (bind(held.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
    return ErrnoStatus(errno, "bind 127.0.0.1 port 0");
  const int on = 1;
  if (setsockopt(held.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0)
    return ErrnoStatus(errno, "set SO_REUSEADDR");
  return held;
}

absl::StatusOr<int> PortOf(int fd) {
  sockaddr_in address{};
  socklen_t size = sizeof address;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0)
    return ErrnoStatus(errno, "ask for a socket's port");
  return ntohs(address.sin_port);
}

}  // namespace

std::vector<std::string> EnvironmentOf(const WorkerPlace& place) {
  std::vector<std::string> variables = {
      fmt::format("RANK={}", place.rank),
      fmt::format("WORLD_SIZE={}", place.world),
      fmt::format("LOCAL_RANK={}", place.rank),
      fmt::format("LOCAL_WORLD_SIZE={}", place.world),
      "GROUP_RANK=0",
      "GROUP_WORLD_SIZE=1",
      "ROLE_NAME=default",
      fmt::format("ROLE_RANK={}", place.rank),
      fmt::format("ROLE_WORLD_SIZE={}", place.world),
      "MASTER_ADDR=127.0.0.1",
      fmt::format("MASTER_PORT={}", place.master_port),
      fmt::format("TORCHELASTIC_RESTART_COUNT={}", place.attempt),
      fmt::format("TORCHELASTIC_MAX_RESTARTS={}", place.max_restarts),
      fmt::format("TORCHELASTIC_RUN_ID={}", place.job),
      "TORCHELASTIC_USE_AGENT_STORE=False",
      fmt::format("OUTLAST_RUN_ID={}", place.run_id),
      fmt::format("OUTLAST_RUN_DIR={}", place.run_dir),
      fmt::format("OUTLAST_INCARNATION={}", place.incarnation),
  };
  if (place.world > 1 && std::getenv("OMP_NUM_THREADS") == nullptr)
    variables.push_back("OMP_NUM_THREADS=1");
  if (std::getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING") == nullptr)
    variables.push_back("TORCH_NCCL_ASYNC_ERROR_HANDLING=1");
  return variables;
}

absl::StatusOr<int> MasterPorts::Of(uint64_t generation) {
  if (const auto found = held_.find(generation); found != held_.end()) return found->second.port;
  OUTLAST_ASSIGN_OR_RETURN(UniqueFd held, BindFreePort());
  OUTLAST_ASSIGN_OR_RETURN(const int port, PortOf(held.get()));
  while (!held_.empty() && held_.begin()->first + 1 < generation) held_.erase(held_.begin());
  held_[generation] = {std::move(held), port};
  return port;
}

}  // namespace outlast
