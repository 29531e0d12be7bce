#include "run/place.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "outlast/base/status.h"

namespace outlast {
namespace {

using Set = std::map<std::string, std::string>;
using ::testing::HasSubstr;

absl::StatusOr<std::vector<PlaceClaim>> Find(const Set& set) {
  return FindPlace([&](const char* name) {
    const auto found = set.find(name);
    return found == set.end() ? nullptr : found->second.c_str();
  });
}

// "launcher rank/world local_rank" of the claim that counts.
std::string PlaceIn(const Set& set) {
  const auto claims = Find(set);
  if (!claims.ok()) return std::string(MessageOf(claims.status()));
  if (claims->empty()) return "none";
  const PlaceClaim& claim = claims->front();
  return std::string(NameOf(claim.launcher)) + " " + std::to_string(claim.rank) + "/" +
         std::to_string(claim.world) + " " + std::to_string(claim.local_rank);
}

Set operator+(Set left, const Set& right) {
  left.insert(right.begin(), right.end());
  return left;
}

const Set kSlurmTask{{"SLURM_STEP_ID", "0"},
                     {"SLURM_PROCID", "5"},
                     {"SLURM_NTASKS", "8"},
                     {"SLURM_STEP_NUM_TASKS", "8"},
                     {"SLURM_LOCALID", "1"}};
const Set kOpenMpiRank{{"OMPI_COMM_WORLD_RANK", "3"},
                       {"OMPI_COMM_WORLD_SIZE", "4"},
                       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                       {"PMIX_RANK", "3"}};

TEST(FindPlace, IsAWorldOfOneWhereNobodySaysOtherwise) { EXPECT_EQ(PlaceIn({}), "none"); }

TEST(FindPlace, KnowsEachLaunchersNames) {
  EXPECT_EQ(PlaceIn({{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}}),
            "set by hand 5/8 1");
  EXPECT_EQ(PlaceIn({{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"TORCHELASTIC_RUN_ID", "x"}}),
            "torchrun 5/8 5");
  EXPECT_EQ(PlaceIn({{"RANK", "1"},
                     {"WORLD_SIZE", "2"},
                     {"TORCHELASTIC_RUN_ID", "x"},
                     {"OUTLAST_SOCKET_FD", "9"}}),
            "outlast run 1/2 1");
  EXPECT_EQ(PlaceIn(kOpenMpiRank), "Open MPI 3/4 1");
  EXPECT_EQ(PlaceIn({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}}),
            "MPICH 1/2 0");
  EXPECT_EQ(PlaceIn(kSlurmTask), "Slurm step 5/8 1");
}

TEST(FindPlace, TakesNoAllocationAndNoBatchScriptForAStep) {
  EXPECT_EQ(PlaceIn({{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "8"}}), "none");
  EXPECT_EQ(PlaceIn({{"SLURM_STEP_ID", "4294967291"},
                     {"SLURM_PROCID", "0"},
                     {"SLURM_NTASKS", "8"},
                     {"SLURM_STEP_NUM_TASKS", "1"}}),
            "none");
}

// srun starts one torchrun or one mpirun daemon a node, whose children inherit its variables.
TEST(FindPlace, BelievesTheInnermostLauncher) {
  EXPECT_EQ(
      PlaceIn(kSlurmTask + Set{{"RANK", "41"}, {"WORLD_SIZE", "64"}, {"TORCHELASTIC_RUN_ID", "x"}}),
      "torchrun 41/64 41");
  EXPECT_EQ(PlaceIn(kSlurmTask + kOpenMpiRank), "Open MPI 3/4 1");
  EXPECT_EQ(Find(kSlurmTask + kOpenMpiRank)->size(), 2u);
}

TEST(FindPlace, TakesByHandWhatTheLauncherSaysToo) {
  EXPECT_EQ(PlaceIn(kSlurmTask + Set{{"RANK", "5"}, {"WORLD_SIZE", "8"}}), "set by hand 5/8 5");
  // Each task started four processes and numbered them.
  EXPECT_EQ(PlaceIn(kSlurmTask + Set{{"RANK", "22"}, {"WORLD_SIZE", "32"}}),
            "set by hand 22/32 22");
}

TEST(FindPlace, RefusesAContradictionAndNamesBothSides) {
  for (const Set& by_hand :
       {Set{{"RANK", "4"}, {"WORLD_SIZE", "8"}}, Set{{"RANK", "0"}, {"WORLD_SIZE", "1"}},
        Set{{"RANK", "5"}, {"WORLD_SIZE", "12"}}}) {
    const std::string said = PlaceIn(kSlurmTask + by_hand);
    EXPECT_THAT(said, HasSubstr("contradictory"));
    EXPECT_THAT(said, HasSubstr("WORLD_SIZE=" + by_hand.at("WORLD_SIZE")));
    EXPECT_THAT(said, HasSubstr("SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=8"));
  }
}

TEST(FindPlace, RefusesAnMpiWorldInsideOneOfItsWorkers) {
  const Set worker{{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"OUTLAST_SOCKET_FD", "9"}};
  EXPECT_THAT(PlaceIn(worker + kOpenMpiRank), HasSubstr("OMPI_COMM_WORLD_SIZE=4"));
  EXPECT_EQ(PlaceIn(worker + Set{{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}), "outlast run 0/1 0")
      << "a job of one agent that mpirun started";
}

TEST(FindPlace, NamesTheVariableThatIsWrongOrMissing) {
  EXPECT_EQ(PlaceIn({{"OMPI_COMM_WORLD_RANK", "1"}}),
            "OMPI_COMM_WORLD_RANK=1 is set without OMPI_COMM_WORLD_SIZE: both or none wanted");
  EXPECT_EQ(PlaceIn({{"PMI_RANK", "x"}, {"PMI_SIZE", "2"}}),
            "PMI_RANK='x': a whole number from 0 to 2147483647 wanted");
  EXPECT_EQ(PlaceIn({{"PMI_RANK", "2"}, {"PMI_SIZE", "2"}}),
            "PMI_RANK=2 with PMI_SIZE=2: a rank below the world's size wanted");
  EXPECT_THAT(PlaceIn({{"PMIX_RANK", "0"}, {"PMIX_NAMESPACE", "n"}}),
              HasSubstr("does not tell the world's size"))
      << "a world of one for each of its processes would be a false world";
}

}  // namespace
}  // namespace outlast
