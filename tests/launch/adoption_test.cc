#include "launch/adoption.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "launch/process.h"
#include "tests/support/temp_folder.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;

// A guardian's file that names this very process.
GuardianFile Own() {
  return {.run_id = "6be46f8efa3ad4d94e7eb756ce8cdadb",
          .run_dir = "/runs/run-1",
          .pid = getpid(),
          .start_ticks = ReadProcess(getpid())->start_ticks,
          .boot_id = BootId().hex(),
          .socket = "outlast-guardian-6be4",
          .world = 2,
          .flags = {"-n", "2"},
          .command = {"train", "--steps", "9"}};
}

LaunchOptions SameAs(const GuardianFile& file) {
  LaunchOptions options;
  options.job.world = file.world;
  options.flags = file.flags;
  options.command = file.command;
  return options;
}

TEST(GuardianFile, IsReadAsItWasWritten) {
  const auto read = ParseGuardianFile(ToText(Own()));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(*read == Own());
}

TEST(GuardianFile, ThatIsCutOrOfAnotherKindIsRefused) {
  const std::string text = ToText(Own());
  for (size_t length = 0; length + 2 < text.size(); ++length)
    EXPECT_FALSE(ParseGuardianFile(text.substr(0, length)).ok()) << length;
  for (const char* other : {"", "[]", "7", "{}", "{\"version\": 2}", "{\"version\": \"1\"}"})
    EXPECT_FALSE(ParseGuardianFile(other).ok()) << other;
  GuardianFile nobody = Own();
  nobody.pid = 0;
  EXPECT_FALSE(ParseGuardianFile(ToText(nobody)).ok());
}

TEST(GuardianFile, OfAReusedPidOrAnotherBootIsNobodys) {
  EXPECT_TRUE(IsAlive(Own()));
  GuardianFile stranger = Own();
  ++stranger.start_ticks;
  EXPECT_FALSE(IsAlive(stranger));
  GuardianFile before = Own();
  before.boot_id = Id128::Random().hex();
  EXPECT_FALSE(IsAlive(before));
}

TEST(GuardianFile, NamesWhatDiffers) {
  const GuardianFile file = Own();
  EXPECT_EQ(WhatDiffers(file, SameAs(file)), "");
  LaunchOptions options = SameAs(file);
  options.job.world = 3;
  EXPECT_THAT(WhatDiffers(file, options), HasSubstr("-n 3, while it runs with -n 2"));
  options = SameAs(file);
  options.command[2] = "10";
  EXPECT_THAT(WhatDiffers(file, options),
              HasSubstr("the command 'train --steps 10', while it runs 'train --steps 9'"));
  options = SameAs(file);
  options.flags.emplace_back("--grace");
  EXPECT_THAT(WhatDiffers(file, options), HasSubstr("the flags '-n 2 --grace'"));
  options = SameAs(file);
  options.fresh = true;
  EXPECT_THAT(WhatDiffers(file, options), HasSubstr("--fresh"));
}

TEST(GuardianFile, TakesThePlaceOfADeadOneAndOfNoOther) {
  const TempFolder folder;
  LaunchOptions options = SameAs(Own());
  options.run_dir = folder.path();
  options.job_id = "j7";
  GuardianFile dead = Own();
  ++dead.start_ticks;
  ASSERT_TRUE(WriteGuardianFile(options, dead).ok());
  ASSERT_TRUE(WriteGuardianFile(options, Own()).ok());

  EXPECT_EQ(WriteGuardianFile(options, Own()).code(), absl::StatusCode::kAlreadyExists);
  struct stat file {};
  ASSERT_EQ(stat((folder.path() + "/guardian-j7.json").c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0600u);
}

TEST(FindJob, BeginsAnewWhereNobodyIsOrTheGuardianIsGone) {
  const TempFolder folder;
  LaunchOptions options = SameAs(Own());
  options.run_dir = folder.path();
  auto found = FindJob(options);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_FALSE(found->has_value());
  GuardianFile dead = Own();
  ++dead.start_ticks;
  std::ofstream(GuardianFilePath(options)) << ToText(dead);
  found = FindJob(options);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_FALSE(found->has_value());
}

TEST(FindJob, DoesNotTrustAnotherProcessOnTheSocket) {
  const TempFolder folder;
  GuardianFile file = Own();
  file.pid = getppid();
  file.start_ticks = ReadProcess(getppid())->start_ticks;
  file.socket = SocketOf(Id128::Random().hex());
  const auto listener =
      ListenForAgents(file.socket.substr(std::string("outlast-guardian-").size()));
  ASSERT_TRUE(listener.ok()) << listener.status();
  LaunchOptions options = SameAs(file);
  options.run_dir = folder.path();
  std::ofstream(GuardianFilePath(options)) << ToText(file);

  const auto found = FindJob(options);
  EXPECT_EQ(found.status().code(), absl::StatusCode::kPermissionDenied) << found.status();
}

TEST(OnAgentDeath, IsReadAndRefusedWhereItDoesNotFit) {
  std::string help;
  const auto parse = [&](std::vector<std::string> flags) {
    flags.insert(flags.end(), {"-n", "2", "--", "true"});
    return ParseLaunchOptions(flags, &help);
  };
  auto options = parse({"--on-agent-death", "adopt", "--adopt-within", "7", "--fresh"});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->on_agent_death, OnAgentDeath::kAdopt);
  EXPECT_EQ(options->adopt_within, absl::Seconds(7));
  EXPECT_EQ(options->flags.size(), 6u);  // without --fresh
  EXPECT_EQ(parse({})->on_agent_death, OnAgentDeath::kKill);
  EXPECT_THAT(parse({"--on-agent-death", "keep"}).status().ToString(), HasSubstr("kill or adopt"));
  EXPECT_THAT(parse({"--adopt-within", "7"}).status().ToString(),
              HasSubstr("--on-agent-death adopt wanted"));
  EXPECT_THAT(parse({"--on-agent-death", "adopt", "--nnodes", "2", "--coordinator", "n1:29400",
                     "--job", "j"})
                  .status()
                  .ToString(),
              HasSubstr("a job of one node wanted"));
}

}  // namespace
}  // namespace outlast
