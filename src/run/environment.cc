#include "outlast/run/environment.h"

#include <charconv>
#include <cstdlib>
#include <limits>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "outlast/base/id.h"
#include "run/place.h"

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
  OUTLAST_ASSIGN_OR_RETURN(const std::vector<PlaceClaim> claims,
                           FindPlace([](const char* name) { return std::getenv(name); }));
  if (!claims.empty()) {
    environment.rank = claims.front().rank;
    environment.world = claims.front().world;
    environment.local_rank = claims.front().local_rank;
  }
  OUTLAST_ASSIGN_OR_RETURN(environment.socket_fd, ReadNumber<int>("OUTLAST_SOCKET_FD", -1, 0));
  OUTLAST_ASSIGN_OR_RETURN(environment.black_box_fd, ReadNumber<int>("OUTLAST_BLACKBOX_FD", -1, 0));
  OUTLAST_ASSIGN_OR_RETURN(environment.incarnation,
                           ReadNumber<uint64_t>("OUTLAST_INCARNATION", 1, 1));
  OUTLAST_ASSIGN_OR_RETURN(environment.micro_batches,
                           ReadNumber<int>("OUTLAST_MICRO_BATCHES", 0, 1));
  OUTLAST_ASSIGN_OR_RETURN(environment.ranks_per_replica,
                           ReadNumber<int>("OUTLAST_RANKS_PER_REPLICA", 1, 1));
  environment.run_id = ReadText("OUTLAST_RUN_ID");
  environment.run_dir = ReadText("OUTLAST_RUN_DIR");
  if (std::string address = ReadText("OUTLAST_ADDRESS"); !address.empty())
    environment.address = std::move(address);
  OUTLAST_RETURN_IF_ERROR(CheckAgent(environment));
  return environment;
}

}  // namespace outlast
