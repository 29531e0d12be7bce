#include "run/wire.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "outlast/base/status.h"
#include "outlast/run/environment.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;

absl::StatusOr<Message> DecodeText(std::string bytes) { return Decode({std::move(bytes), {}}); }

TEST(Wire, ReadsBackWhatItWrote) {
  const Message sent{.kind = MessageKind::kAnswer,
                     .generation = 7,
                     .request = 42,
                     .status = absl::StatusCode::kAborted,
                     .payload = "why"};
  const auto read = DecodeText(Encode(sent));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->kind, MessageKind::kAnswer);
  EXPECT_EQ(read->generation, 7u);
  EXPECT_EQ(read->request, 42u);
  EXPECT_EQ(read->status, absl::StatusCode::kAborted);
  EXPECT_EQ(read->payload, "why");
}

TEST(Wire, HasTheLayoutThatTheHeaderDraws) {
  const std::string bytes =
      Encode({.kind = MessageKind::kPut, .generation = 2, .request = 3, .payload = "ab"});
  ASSERT_EQ(bytes.size(), 34u);
  EXPECT_EQ(bytes.substr(0, 4), "OTLW");
  EXPECT_EQ(bytes[4], 1);   // version
  EXPECT_EQ(bytes[6], 4);   // kind
  EXPECT_EQ(bytes[8], 2);   // generation
  EXPECT_EQ(bytes[16], 3);  // request
  EXPECT_EQ(bytes[28], 2);  // payload bytes
  EXPECT_EQ(bytes.substr(32), "ab");
}

TEST(Wire, NamesBothVersionsOfAMismatch) {
  std::string bytes = Encode({.kind = MessageKind::kJoined});
  bytes[4] = 9;
  const auto read = DecodeText(bytes);
  EXPECT_EQ(read.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(MessageOf(read.status())), HasSubstr("version 9"));
  EXPECT_THAT(std::string(MessageOf(read.status())), HasSubstr("version 1"));
}

TEST(Wire, RefusesACutOrPaddedMessageAtEveryByte) {
  const std::string whole =
      Encode({.kind = MessageKind::kPut, .generation = 1, .request = 1, .payload = "payload"});
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_EQ(DecodeText(whole.substr(0, size)).status().code(), absl::StatusCode::kInvalidArgument)
        << size;
  }
  EXPECT_EQ(DecodeText(whole + "x").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(Wire, SurvivesNoise) {
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    std::string bytes =
        Encode({.kind = MessageKind::kGet, .payload = std::string(random() % 40, 'p')});
    for (int flips = 0; flips < 4; ++flips)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    (void)DecodeText(bytes);
  }
}

// Sets variables for a test, and takes them back.
class Variables {
 public:
  explicit Variables(std::vector<std::pair<const char*, const char*>> values) {
    for (const char* name : kNames) unsetenv(name);
    for (const auto& [name, value] : values) setenv(name, value, 1);
  }
  ~Variables() {
    for (const char* name : kNames) unsetenv(name);
  }

 private:
  static constexpr const char* kNames[] = {"RANK",
                                           "WORLD_SIZE",
                                           "LOCAL_RANK",
                                           "OUTLAST_SOCKET_FD",
                                           "OUTLAST_BLACKBOX_FD",
                                           "OUTLAST_RUN_ID",
                                           "OUTLAST_INCARNATION"};
};

std::string EnvironmentError(std::vector<std::pair<const char*, const char*>> values) {
  const Variables variables(std::move(values));
  const auto environment = WorkerEnvironment::FromProcess();
  EXPECT_EQ(environment.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(MessageOf(environment.status()));
}

TEST(WorkerEnvironment, IsAWorldOfOneWhenNothingIsSet) {
  const Variables none({});
  const auto environment = WorkerEnvironment::FromProcess();
  ASSERT_TRUE(environment.ok());
  EXPECT_EQ(environment->rank, 0);
  EXPECT_EQ(environment->world, 1);
  EXPECT_EQ(environment->socket_fd, -1);
}

TEST(WorkerEnvironment, ReadsTorchrunsNames) {
  const Variables variables({{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}});
  const auto environment = WorkerEnvironment::FromProcess();
  ASSERT_TRUE(environment.ok());
  EXPECT_EQ(environment->rank, 5);
  EXPECT_EQ(environment->world, 8);
  EXPECT_EQ(environment->local_rank, 1);
}

TEST(WorkerEnvironment, NamesTheVariableThatIsWrong) {
  EXPECT_THAT(EnvironmentError({{"RANK", "two"}, {"WORLD_SIZE", "4"}}), HasSubstr("RANK='two'"));
  EXPECT_THAT(EnvironmentError({{"RANK", "-1"}, {"WORLD_SIZE", "4"}}), HasSubstr("RANK='-1'"));
  EXPECT_THAT(EnvironmentError({{"RANK", "0"}, {"WORLD_SIZE", "0"}}), HasSubstr("WORLD_SIZE='0'"));
  EXPECT_THAT(EnvironmentError({{"RANK", "4"}, {"WORLD_SIZE", "4"}}),
              HasSubstr("RANK=4 with WORLD_SIZE=4"));
  EXPECT_THAT(EnvironmentError({{"RANK", "0"}}), HasSubstr("RANK=0 is set without WORLD_SIZE"));
  EXPECT_THAT(EnvironmentError({{"OUTLAST_SOCKET_FD", "7"}}), HasSubstr("OUTLAST_SOCKET_FD=7"));
  EXPECT_THAT(EnvironmentError({{"OUTLAST_RUN_ID", "xyz"}}), HasSubstr("OUTLAST_RUN_ID"));
}

}  // namespace
}  // namespace outlast
