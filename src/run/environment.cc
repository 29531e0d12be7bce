#include "outlast/run/environment.h"

#include <charconv>
#include <cstdlib>
#include <limits>
#include <string_view>

#include "base/error.h"
#include "outlast/base/id.h"

namespace outlast {
namespace {

// The variable's number, or `otherwise` where it is unset.
template <typename Number>
absl::StatusOr<Number> ReadNumber(const char* name, Number otherwise, Number least) {
  const char* text = std::getenv(name);
  if (text == nullptr) return otherwise;
  const std::string_view view(text);
  Number number{};
  const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), number);
  if (error != std::errc() || end != view.data() + view.size() || number < least) {
    return Error(absl::StatusCode::kInvalidArgument, "{}='{}': a whole number from {} to {} wanted",
                 name, view, least, std::numeric_limits<Number>::max());
  }
  return number;
}

std::string ReadText(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

absl::Status CheckRanks(const WorkerEnvironment& environment) {
  if ((std::getenv("RANK") == nullptr) != (std::getenv("WORLD_SIZE") == nullptr)) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "RANK and WORLD_SIZE: one is set without the other, both or none wanted");
  }
  if (environment.rank >= environment.world) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "RANK={} with WORLD_SIZE={}: a rank below the world's size wanted",
                 environment.rank, environment.world);
  }
  return absl::OkStatus();
}

absl::Status CheckAgent(const WorkerEnvironment& environment) {
  if ((environment.socket_fd >= 0) != (environment.black_box_fd >= 0)) {
    return Error(
        absl::StatusCode::kInvalidArgument,
        "OUTLAST_SOCKET_FD={} with OUTLAST_BLACKBOX_FD={}: both or none wanted (-1: not set)",
        environment.socket_fd, environment.black_box_fd);
  }
  if (environment.run_id.empty()) return absl::OkStatus();
  return Annotate(Id128::FromHex(environment.run_id).status(), "OUTLAST_RUN_ID");
}

}  // namespace

absl::StatusOr<WorkerEnvironment> WorkerEnvironment::FromProcess() {
  WorkerEnvironment environment;
  OUTLAST_ASSIGN_OR_RETURN(environment.rank, ReadNumber<int>("RANK", 0, 0));
  OUTLAST_ASSIGN_OR_RETURN(environment.world, ReadNumber<int>("WORLD_SIZE", 1, 1));
  OUTLAST_ASSIGN_OR_RETURN(environment.local_rank,
                           ReadNumber<int>("LOCAL_RANK", environment.rank, 0));
  OUTLAST_ASSIGN_OR_RETURN(environment.socket_fd, ReadNumber<int>("OUTLAST_SOCKET_FD", -1, 0));
  OUTLAST_ASSIGN_OR_RETURN(environment.black_box_fd, ReadNumber<int>("OUTLAST_BLACKBOX_FD", -1, 0));
  OUTLAST_ASSIGN_OR_RETURN(environment.incarnation,
                           ReadNumber<uint64_t>("OUTLAST_INCARNATION", 1, 1));
  environment.run_id = ReadText("OUTLAST_RUN_ID");
  environment.run_dir = ReadText("OUTLAST_RUN_DIR");
  OUTLAST_RETURN_IF_ERROR(CheckRanks(environment));
  OUTLAST_RETURN_IF_ERROR(CheckAgent(environment));
  return environment;
}

}  // namespace outlast
