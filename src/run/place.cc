#include "run/place.h"

#include <charconv>
#include <limits>
#include <optional>
#include <utility>

#include "base/error.h"
#include "run/pod.h"

namespace outlast {
namespace {

absl::Status Contradiction(std::string_view what, std::string_view wanted) {
  return Error(absl::StatusCode::kInvalidArgument, "contradictory environment: {}: {}", what,
               wanted);
}

// Reads the variables of one claim, and remembers which were there.
class Reader {
 public:
  explicit Reader(const Variables& variables) : variables_(variables) {}

  bool has(const char* name) const { return variables_(name) != nullptr; }
  const char* Text(const char* name) const { return variables_(name); }

  absl::StatusOr<int> Number(const char* name, int otherwise, int least) {
    const char* text = variables_(name);
    if (text == nullptr) return otherwise;
    const std::string_view view(text);
    int number = 0;
    const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), number);
    if (error != std::errc() || end != view.data() + view.size() || number < least) {
      return Error(absl::StatusCode::kInvalidArgument,
                   "{}='{}': a whole number from {} to {} wanted", name, view, least,
                   std::numeric_limits<int>::max());
    }
    read_.push_back({name, text});
    return number;
  }

  std::vector<Variable> TakeRead() { return std::exchange(read_, {}); }

 private:
  const Variables& variables_;
  std::vector<Variable> read_;
};

struct Names {
  Launcher launcher;
  const char* rank;
  const char* world;
  const char* local_rank;
};

// None: the launcher was not there. `rank` alone or `world` alone is an error.
absl::StatusOr<std::optional<PlaceClaim>> ReadClaim(const Names& names, Reader& reader) {
  if (!reader.has(names.rank) && !reader.has(names.world)) return std::nullopt;
  if (reader.has(names.rank) != reader.has(names.world)) {
    const char* there = reader.has(names.rank) ? names.rank : names.world;
    const char* missing = reader.has(names.rank) ? names.world : names.rank;
    return Error(absl::StatusCode::kInvalidArgument, "{}={} is set without {}: both or none wanted",
                 there, reader.Text(there), missing);
  }
  PlaceClaim claim{.launcher = names.launcher, .variables = {}};
  OUTLAST_ASSIGN_OR_RETURN(claim.rank, reader.Number(names.rank, 0, 0));
  OUTLAST_ASSIGN_OR_RETURN(claim.world, reader.Number(names.world, 1, 1));
  OUTLAST_ASSIGN_OR_RETURN(claim.local_rank, reader.Number(names.local_rank, claim.rank, 0));
  claim.variables = reader.TakeRead();
  if (claim.rank >= claim.world) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "{}={} with {}={}: a rank below the world's size wanted", names.rank, claim.rank,
                 names.world, claim.world);
  }
  return claim;
}

// srun starts tasks in a step; the batch script and an allocation's shell have numbers near 2^32 in
// its place, or none.
bool IsInSlurmStep(const Variables& variables) {
  constexpr uint64_t kFirstSpecialStep = 0xfffffff0;
  const char* text = variables("SLURM_STEP_ID");
  if (text == nullptr) return false;
  const std::string_view view(text);
  uint64_t step = kFirstSpecialStep;
  std::from_chars(view.data(), view.data() + view.size(), step);
  return step < kFirstSpecialStep;
}

Launcher LauncherOfRank(const Variables& variables) {
  if (variables("OUTLAST_SOCKET_FD") != nullptr) return Launcher::kOutlast;
  if (variables("TORCHELASTIC_RUN_ID") != nullptr) return Launcher::kTorchrun;
  return Launcher::kByHand;
}

// By hand one may repeat what the launcher says, or number the processes that each of its tasks
// starts.
bool Agree(const PlaceClaim& by_hand, const PlaceClaim& launcher) {
  if (by_hand.world == launcher.world) return by_hand.rank == launcher.rank;
  return by_hand.world > launcher.world && by_hand.world % launcher.world == 0;
}

}  // namespace

std::string_view NameOf(Launcher launcher) {
  switch (launcher) {
    case Launcher::kNone:
      return "none";
    case Launcher::kOutlast:
      return "outlast run";
    case Launcher::kTorchrun:
      return "torchrun";
    case Launcher::kByHand:
      return "set by hand";
    case Launcher::kOpenMpi:
      return "Open MPI";
    case Launcher::kMpich:
      return "MPICH";
    case Launcher::kSlurm:
      return "Slurm step";
  }
  return "unknown";
}

std::string PlaceClaim::Text() const {
  std::string text;
  for (const Variable& variable : variables)
    text += fmt::format("{}{}={}", text.empty() ? "" : " ", variable.name, variable.value);
  return text;
}

absl::StatusOr<std::vector<PlaceClaim>> FindPlace(const Variables& variables) {
  Reader reader(variables);
  std::vector<PlaceClaim> claims;
  const auto add = [&](const Names& names) -> absl::Status {
    OUTLAST_ASSIGN_OR_RETURN(std::optional<PlaceClaim> claim, ReadClaim(names, reader));
    if (claim) claims.push_back(*std::move(claim));
    return absl::OkStatus();
  };
  OUTLAST_RETURN_IF_ERROR(add({LauncherOfRank(variables), "RANK", "WORLD_SIZE", "LOCAL_RANK"}));
  OUTLAST_RETURN_IF_ERROR(add({Launcher::kOpenMpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                               "OMPI_COMM_WORLD_LOCAL_RANK"}));
  OUTLAST_RETURN_IF_ERROR(add({Launcher::kMpich, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"}));
  if (IsInSlurmStep(variables)) {
    OUTLAST_RETURN_IF_ERROR(
        add({Launcher::kSlurm, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"}));
  }
  if (claims.empty() && variables("PMIX_RANK") != nullptr) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "PMIX_RANK={}: a PMIx launcher that does not tell the world's size: RANK and "
                 "WORLD_SIZE wanted",
                 variables("PMIX_RANK"));
  }
  OUTLAST_ASSIGN_OR_RETURN(const std::optional<PodClaim> pod, FindPod(variables));
  if (pod && !claims.empty() && claims[0].launcher == Launcher::kByHand &&
      claims[0].world <= pod->index) {
    return Contradiction(
        fmt::format("{} (set by hand) and {} (Kubernetes)", claims[0].Text(), pod->Text()),
        "a world of more ranks than there are pods before this one");
  }
  if (claims.size() < 2) return claims;
  const PlaceClaim &first = claims[0], &second = claims[1];
  const std::string both = fmt::format("{} ({}) and {} ({})", first.Text(), NameOf(first.launcher),
                                       second.Text(), NameOf(second.launcher));
  if (first.launcher == Launcher::kByHand && !Agree(first, second))
    return Contradiction(both, "the same rank and world wanted, or one of the two unset");
  const bool is_mpi = second.launcher == Launcher::kOpenMpi || second.launcher == Launcher::kMpich;
  // `outlast run` refuses to start inside such a world, so that one is in a worker of it.
  if (first.launcher == Launcher::kOutlast && is_mpi && second.world > 1)
    return Contradiction(both, "ranks that one launcher started wanted");
  return claims;
}

}  // namespace outlast
