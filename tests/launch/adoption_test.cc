#include "launch/adoption.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstring>
#include <fstream>

#include "launch/guardian_wire.h"
#include "launch/process.h"
#include "outlast/elastic/job_memo.h"
#include "run/wire.h"
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

TEST(FindJob, RefusesAJobThatAnotherVersionHasBegun) {
  const TempFolder folder;
  LaunchOptions options = SameAs(Own());
  options.run_dir = folder.path();
  const auto write = [&](const std::string& text) {
    std::ofstream(GuardianFilePath(options)) << text;
  };
  const std::string who =
      fmt::format(R"("version": 7, "pid": {}, "start_ticks": {}, "boot_id": "{}")", Own().pid,
                  Own().start_ticks, Own().boot_id);
  write("{" + who + "}");
  EXPECT_EQ(FindJob(options).status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(FindJob(options).status().ToString(), HasSubstr("of version 7: 1 wanted"));
  EXPECT_EQ(WriteGuardianFile(options, Own()).code(), absl::StatusCode::kUnimplemented);
  write(R"({"version": 7})");  // nobody can tell
  EXPECT_EQ(FindJob(options).status().code(), absl::StatusCode::kUnimplemented);
  GuardianFile dead = Own();
  write(fmt::format(R"({{"version": 7, "pid": {}, "start_ticks": {}, "boot_id": "{}"}})", dead.pid,
                    dead.start_ticks + 1, dead.boot_id));
  EXPECT_TRUE(FindJob(options).ok());
  EXPECT_TRUE(WriteGuardianFile(options, Own()).ok());
}

// A guardian that an agent has left, before it had any worker.
class LeftGuardian : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string run_id = Id128::Random().hex();
    auto guardian = Guardian::Fork({"/bin/true", {"true"}, run_id, {}, absl::Seconds(60)}).value();
    file_ = Own();
    file_.run_id = run_id;
    file_.pid = guardian->pid();
    file_.start_ticks = ReadProcess(file_.pid)->start_ticks;
    file_.socket = SocketOf(run_id);
    options_ = SameAs(file_);
    options_.run_dir = folder_.path();
    ASSERT_TRUE(WriteGuardianFile(options_, file_).ok());
    JobMemo memo;
    memo.slots.resize(2);
    ASSERT_TRUE(guardian->Keep(kGuardianFileKey, GuardianFilePath(options_), {}).ok());
    ASSERT_TRUE(guardian->Keep(kJobMemoKey, EncodeJobMemo(memo), {}).ok());
    guardian->Abandon();
  }
  // The reaper above it is our child, which an agent that adopts does not know.
  void TearDown() override {
    while (waitpid(-1, nullptr, 0) > 0) {
    }
  }

  const TempFolder folder_;
  GuardianFile file_;
  LaunchOptions options_;
};

TEST_F(LeftGuardian, IsFoundAndSignalsWaitForTheAgentFromThenOn) {
  constexpr int kSignals[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2};
  for (const int signal : kSignals) std::signal(signal, SIG_DFL);  // ignored ones stay so
  sigset_t before, after;
  sigprocmask(SIG_SETMASK, nullptr, &before);
  auto found = FindJob(options_);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_TRUE(found->has_value());

  sigprocmask(SIG_SETMASK, &before, &after);
  for (const int signal : kSignals) EXPECT_EQ(sigismember(&after, signal), 1) << signal;
  EXPECT_TRUE((*found)->adoption.kept.contains(kJobMemoKey));
  EXPECT_TRUE((*found)->adoption.guardian->Finish(absl::Seconds(10)).ok());
}

TEST_F(LeftGuardian, RefusesAnAgentOfAnotherVersionAndSaysWhichOne) {
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{.sun_family = AF_UNIX};
  std::memcpy(address.sun_path + 1, file_.socket.data(), file_.socket.size());
  const auto size =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + file_.socket.size());
  const auto ask = [&](uint32_t version, uint32_t workers) {
    fd = UniqueFd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), size), 0);
    const Channel channel(std::move(fd));
    PayloadWriter order;
    order.Int(static_cast<uint8_t>(GuardianOrder::kAdopt)).Int<int32_t>(0).Int<uint64_t>(0);
    order.Int(version).Int(workers).Text(file_.run_id);
    EXPECT_TRUE(channel.Send(order.bytes()).ok());
    const auto answer = channel.Receive();
    return answer.ok() && answer->has_value() ? (*answer)->bytes : "";
  };
  EXPECT_THAT(ask(kGuardianVersion + 1, kWireVersion),
              HasSubstr(fmt::format("it is of version {}, the agent of version {}",
                                    kGuardianVersion, kGuardianVersion + 1)));
  EXPECT_THAT(ask(kGuardianVersion, kWireVersion + 1u), HasSubstr("its workers are of version"));
  // It waits on.
  auto found = FindJob(options_);
  ASSERT_TRUE(found.ok() && found->has_value()) << found.status();
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  EXPECT_TRUE((*found)->adoption.guardian->Finish(absl::Seconds(10)).ok());
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
