#include "launch/binding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "outlast/base/status.h"

namespace outlast {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A made-up /sys.
class Sys : public ::testing::Test {
 protected:
  Sys()
      : root_(std::filesystem::path(::testing::TempDir()) /
              ("sys-" + std::to_string(getpid()) + "-" +
               ::testing::UnitTest::GetInstance()->current_test_info()->name())) {}
  ~Sys() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << '\n';
  }
  void AddCpu(int cpu, int package, const std::string& siblings) {
    const std::string folder = "devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
    Write(folder + "physical_package_id", std::to_string(package));
    Write(folder + "thread_siblings_list", siblings);
  }
  void AddNuma(int numa, const std::string& cpus) {
    Write("devices/system/node/node" + std::to_string(numa) + "/cpulist", cpus);
  }
  void AddPci(const std::string& address, const std::string& vendor, const std::string& kind,
              int numa) {
    const std::string folder = "bus/pci/devices/" + address + "/";
    Write(folder + "vendor", vendor);
    Write(folder + "class", kind);
    Write(folder + "numa_node", std::to_string(numa));
  }
  // Two packages of 4 cores with 2 threads each: threads of core c are c and c + 8.
  void MakeTwoPackages() {
    for (int cpu = 0; cpu < 16; ++cpu) {
      const int core = cpu % 8;
      AddCpu(cpu, core / 4, std::to_string(core) + "," + std::to_string(core + 8));
    }
    AddNuma(0, "0-3,8-11");
    AddNuma(1, "4-7,12-15");
  }
  Topology Read(const std::vector<int>& allowed) { return ReadTopology(allowed, root_).value(); }
  static std::vector<int> UpTo(int count) {
    std::vector<int> cpus(static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) cpus[static_cast<size_t>(i)] = i;
    return cpus;
  }

  const std::filesystem::path root_;
};

std::vector<std::string> Lists(const absl::StatusOr<std::vector<Binding>>& bindings) {
  std::vector<std::string> lists;
  for (const Binding& binding : bindings.value()) lists.push_back(CpuList(binding.cpus));
  return lists;
}

TEST_F(Sys, CoresGoOutInBlocksWithBothTheirThreads) {
  MakeTwoPackages();
  const Topology topology = Read(UpTo(16));
  EXPECT_EQ(topology.cores.size(), 8u);

  const auto bindings = Bind(topology, 4, BindTo::kCore);
  EXPECT_THAT(Lists(bindings), ElementsAre("0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"));
  EXPECT_EQ((*bindings)[1].numa, 0);
  EXPECT_EQ((*bindings)[2].numa, 1);
}

TEST_F(Sys, RanksOfANumaNodeShareItsCpus) {
  MakeTwoPackages();
  EXPECT_THAT(Lists(Bind(Read(UpTo(16)), 3, BindTo::kNuma)),
              ElementsAre("0-3,8-11", "0-3,8-11", "4-7,12-15"));
  EXPECT_THAT(Lists(Bind(Read(UpTo(16)), 1, BindTo::kNuma)), ElementsAre("0-3,8-11"));
}

// A cpuset of a container, say.
TEST_F(Sys, OnlyAllowedCpusAreGivenOut) {
  MakeTwoPackages();
  EXPECT_THAT(Lists(Bind(Read({2, 3, 4, 10}), 3, BindTo::kCore)), ElementsAre("2,10", "3", "4"));
}

TEST_F(Sys, ARankIsBesideItsCard) {
  MakeTwoPackages();
  AddPci("0000:81:00.0", "0x10de", "0x030200", 0);
  AddPci("0000:01:00.0", "0x10de", "0x030200", 1);
  AddPci("0000:00:1f.0", "0x8086", "0x030000", 0);  // somebody else's
  AddPci("0000:01:00.1", "0x10de", "0x040300", 1);  // a sound device
  const Topology topology = Read(UpTo(16));
  EXPECT_THAT(topology.card_numas, ElementsAre(1, 0));
  EXPECT_THAT(Lists(Bind(topology, 2, BindTo::kNuma)), ElementsAre("4-7,12-15", "0-3,8-11"));
  // More ranks than cards: cards tell nothing.
  EXPECT_THAT(Lists(Bind(topology, 3, BindTo::kNuma)),
              ElementsAre("0-3,8-11", "0-3,8-11", "4-7,12-15"));
}

TEST_F(Sys, ACardThatKnowsNoNumaNodeTellsNothing) {
  MakeTwoPackages();
  AddPci("0000:01:00.0", "0x10de", "0x030200", -1);
  AddPci("0000:02:00.0", "0x10de", "0x030200", -1);
  EXPECT_THAT(Lists(Bind(Read(UpTo(16)), 2, BindTo::kNuma)), ElementsAre("0-3,8-11", "4-7,12-15"));
}

TEST_F(Sys, WithoutNumaThereIsOneNode) {
  for (int cpu = 0; cpu < 4; ++cpu) AddCpu(cpu, 0, std::to_string(cpu));
  const auto bindings = Bind(Read(UpTo(4)), 2, BindTo::kCore);
  EXPECT_THAT(Lists(bindings), ElementsAre("0-1", "2-3"));
  EXPECT_EQ((*bindings)[0].numa, 0);
}

TEST_F(Sys, CoresAreNeverShared) {
  MakeTwoPackages();
  const auto bindings = Bind(Read(UpTo(16)), 9, BindTo::kCore);
  EXPECT_THAT(std::string(MessageOf(bindings.status())),
              AllOf(HasSubstr("5 workers on NUMA node 0"), HasSubstr("cores for us there: 4"),
                    HasSubstr("--bind numa")));
}

TEST_F(Sys, SaysWhenNothingIsKnown) {
  EXPECT_TRUE(absl::IsNotFound(ReadTopology(UpTo(2), root_).status()));
}

TEST(Bind, NoneBindsNobody) {
  EXPECT_EQ(Bind({}, 2, BindTo::kNone).value(), (std::vector<Binding>{{}, {}}));
}

TEST(Binding, KnowsThisMachine) {
  const std::vector<int> allowed = AllowedCpus();
  ASSERT_FALSE(allowed.empty());
  const auto topology = ReadTopology(allowed);
  ASSERT_TRUE(topology.ok()) << topology.status();
  std::vector<int> cpus;
  for (const Core& core : topology->cores)
    cpus.insert(cpus.end(), core.cpus.begin(), core.cpus.end());
  std::sort(cpus.begin(), cpus.end());
  EXPECT_EQ(cpus, allowed);
}

TEST(CpuList, IsReadAsItIsWritten) {
  for (const char* text : {"", "0", "0-3,8", "1,3,5-6", "65535"})
    EXPECT_EQ(CpuList(ParseCpuList(text).value()), text);
  EXPECT_EQ(CpuList(ParseCpuList("3,1-2,2").value()), "1-3");
  for (const char* text : {"a", "3-1", "-1", "1-", "1,,2", "70000", "0-65536", "1 2"})
    EXPECT_FALSE(ParseCpuList(text).ok()) << text;
}

}  // namespace
}  // namespace outlast
