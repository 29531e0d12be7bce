#include "base/channel.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "outlast/base/memory.h"
#include "outlast/base/status.h"

namespace outlast {
namespace {

using ::testing::HasSubstr;

struct Ends {
  Channel near, far;
};

Ends MakeEnds() {
  auto pair = Channel::MakePair();
  EXPECT_TRUE(pair.ok());
  return {std::move(pair->first), std::move(pair->second)};
}

ino_t InodeOf(int fd) {
  struct stat about {};
  EXPECT_EQ(fstat(fd, &about), 0);
  return about.st_ino;
}

TEST(Channel, GivesWhatAPeerSaidThatWentAwayWithoutReadingAll) {
  Ends ends = MakeEnds();
  ASSERT_TRUE(ends.near.Send("never read").ok());
  ASSERT_TRUE(ends.far.Send("the last word").ok());
  ends.far = Channel();

  const auto said = ends.near.Receive();
  ASSERT_TRUE(said.ok()) << said.status();
  ASSERT_TRUE(said->has_value());
  EXPECT_EQ((*said)->bytes, "the last word");
  EXPECT_FALSE(ends.near.Receive().value().has_value());
}

TEST(Channel, KeepsMessagesApartAndInOrder) {
  const Ends ends = MakeEnds();
  ASSERT_TRUE(ends.near.Send("one").ok());
  ASSERT_TRUE(ends.near.Send("two").ok());

  EXPECT_EQ((*ends.far.Receive())->bytes, "one");
  EXPECT_EQ((*ends.far.Receive())->bytes, "two");
}

TEST(Channel, CarriesTheLargestMessageAndRefusesALargerOne) {
  const Ends ends = MakeEnds();
  const std::string largest(Channel::kMaxMessageBytes, 'x');
  ASSERT_TRUE(ends.near.Send(largest).ok());
  EXPECT_EQ((*ends.far.Receive())->bytes, largest);

  const absl::Status refused = ends.near.Send(largest + "y");
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(MessageOf(refused)), HasSubstr("131073"));
}

TEST(Channel, PassesDescriptorsOfTheSameFiles) {
  const Ends ends = MakeEnds();
  const UniqueFd memory = std::move(MakeSealedMemory("a", 4096)).value();
  const UniqueFd other = std::move(MakeSealedMemory("b", 4096)).value();
  const int fds[] = {memory.get(), other.get()};
  ASSERT_TRUE(ends.near.Send("take", fds).ok());

  const auto packet = ends.far.Receive();
  ASSERT_TRUE(packet.ok() && packet->has_value());
  ASSERT_EQ((*packet)->fds.size(), 2u);
  EXPECT_EQ(InodeOf((*packet)->fds[0].get()), InodeOf(memory.get()));
  EXPECT_EQ(InodeOf((*packet)->fds[1].get()), InodeOf(other.get()));
  EXPECT_NE(fcntl((*packet)->fds[0].get(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(Channel, TellsThatThePeerIsGoneAfterItsLastMessage) {
  Ends ends = MakeEnds();
  ASSERT_TRUE(ends.far.Send("last words").ok());
  ends.far = Channel();

  EXPECT_EQ((*ends.near.Receive())->bytes, "last words");
  EXPECT_FALSE(ends.near.Receive()->has_value());
  EXPECT_EQ(ends.near.Send("anybody?").code(), absl::StatusCode::kUnavailable);  // and no SIGPIPE
}

TEST(Channel, TriesWithoutWaiting) {
  const Ends ends = MakeEnds();
  EXPECT_EQ(ends.far.TryReceive().status().code(), absl::StatusCode::kResourceExhausted);

  const std::string large(Channel::kMaxMessageBytes, 'x');
  absl::Status sent;
  int count = 0;
  for (; sent.ok() && count < 1000; ++count) sent = ends.near.TrySend(large);
  EXPECT_EQ(sent.code(), absl::StatusCode::kResourceExhausted);
  for (int i = 0; i < count - 1; ++i)
    EXPECT_EQ((*ends.far.TryReceive())->bytes.size(), large.size());
  EXPECT_EQ(ends.far.TryReceive().status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(Channel, SendWaitsForASlowReader) {
  const Ends ends = MakeEnds();
  constexpr int kMessages = 50;
  const std::string large(Channel::kMaxMessageBytes, 'x');
  std::thread reader([&] {
    for (int i = 0; i < kMessages; ++i)
      EXPECT_EQ((*ends.far.Receive())->bytes.size(), large.size());
  });
  for (int i = 0; i < kMessages; ++i) EXPECT_TRUE(ends.near.Send(large).ok());
  reader.join();
}

TEST(Payload, ReadsBackItsFields) {
  const PayloadWriter writer =
      PayloadWriter().Int(uint8_t{7}).Text("name").Int(int64_t{-5}).Text("");
  PayloadReader reader(writer.bytes());
  EXPECT_EQ(reader.Int<uint8_t>(), 7);
  EXPECT_EQ(reader.Text(), "name");
  EXPECT_EQ(reader.Int<int64_t>(), -5);
  EXPECT_EQ(reader.Text(), "");
  EXPECT_TRUE(reader.ok());
  EXPECT_TRUE(reader.rest().empty());
}

TEST(Payload, NeverReadsPastTheEnd) {
  const PayloadWriter writer =
      PayloadWriter().Int(uint32_t{0xffffffff}).Int(uint8_t{1});  // a text of 4 GiB, they say
  PayloadReader reader(writer.bytes());
  EXPECT_EQ(reader.Text(), "");
  EXPECT_FALSE(reader.ok());
  EXPECT_EQ(reader.Int<uint8_t>(), 0);  // once wrong, all is zero
}

}  // namespace
}  // namespace outlast
