// --bind, as workers find it.
#include <algorithm>

#include "launch/binding.h"
#include "tests/fault/launched.h"

namespace outlast::testing {
namespace {

using ::testing::HasSubstr;

class Bound : public ::testing::Test {
 protected:
  int Run(int workers, const std::string& bind) {
    return job_.Run({"-n", std::to_string(workers), "--bind", bind, "--", "/bin/sh", "-c",
                     "grep Cpus_allowed_list /proc/self/status > " + job_.Path("cpus.$RANK")});
  }
  std::string CpusOf(int rank) const {
    const std::string line = job_.Read("cpus." + std::to_string(rank));
    const size_t begin = line.find_last_of("\t ");
    return begin == std::string::npos ? line : line.substr(begin + 1, line.size() - begin - 2);
  }

  Launched job_;
  const Topology topology_ = ReadTopology(AllowedCpus()).value();
};

TEST_F(Bound, AWorkerRunsOnTheCpusOfItsSlot) {
  const int workers = std::min<int>(4, static_cast<int>(topology_.cores.size()));
  const auto bindings = Bind(topology_, workers, BindTo::kCore);
  if (!bindings.ok()) GTEST_SKIP() << "cores lie unevenly here: " << bindings.status();
  EXPECT_EQ(Run(workers, "core"), 0) << job_.Read("err");
  for (int rank = 0; rank < workers; ++rank)
    EXPECT_EQ(CpusOf(rank), CpuList((*bindings)[static_cast<size_t>(rank)].cpus));
  EXPECT_THAT(job_.Read("err"), HasSubstr("outlast: rank 0: CPUs " + CpusOf(0)));
}

TEST_F(Bound, WithoutTheFlagNobodyIsBound) {
  EXPECT_EQ(Run(1, "none"), 0) << job_.Read("err");
  EXPECT_EQ(CpusOf(0), CpuList(AllowedCpus()));
}

TEST_F(Bound, MoreWorkersThanCoresAreRefused) {
  EXPECT_EQ(Run(static_cast<int>(topology_.cores.size()) + 1, "core"), 85);
  EXPECT_THAT(job_.Read("err"), HasSubstr("--bind numa"));
  EXPECT_EQ(Run(1, "socket"), 85);
  EXPECT_THAT(job_.Read("err"), HasSubstr("--bind 'socket'"));
}

}  // namespace
}  // namespace outlast::testing
