#include "base/socket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include "outlast/base/status.h"

namespace outlast {
namespace {

TEST(HostPort, ReadsNamesAndNumbersOfBothFamilies) {
  EXPECT_EQ(*HostPort::Parse("127.0.0.1:80"), (HostPort{"127.0.0.1", 80}));
  EXPECT_EQ(*HostPort::Parse("[::1]:65535"), (HostPort{"::1", 65535}));
  EXPECT_EQ(*HostPort::Parse("node7.rack2:0"), (HostPort{"node7.rack2", 0}));
  EXPECT_EQ(HostPort::Parse("[::1]:9")->text(), "[::1]:9");
}

TEST(HostPort, RefusesWhatIsNoHostAndPort) {
  for (const char* text : {"", ":", "host", "host:", ":80", "::1:80", "[]:80", "[::1]", "host:80 ",
                           "host:-1", "host:65536", "host:http", "a[b]:1"}) {
    EXPECT_EQ(HostPort::Parse(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

class Connection : public ::testing::TestWithParam<const char*> {};

TEST_P(Connection, ReachesAListenerOnAFreePort) {
  const auto listener = ListenOn(*NumericAddress({GetParam(), 0}));
  if (!listener.ok()) GTEST_SKIP() << "no such address here: " << MessageOf(listener.status());
  const SocketAddress at = *SocketAddress::Local(listener->get());
  EXPECT_GT(at.host_port().port, 0);
  EXPECT_EQ(AcceptOn(listener->get()).status().code(), absl::StatusCode::kNotFound);

  const SocketAddress from = *NumericAddress({GetParam(), 0});
  const auto near = StartConnect(at, &from);
  ASSERT_TRUE(near.ok()) << near.status();
  pollfd decided{.fd = near->get(), .events = POLLOUT};
  ASSERT_EQ(poll(&decided, 1, 10'000), 1);
  EXPECT_TRUE(SocketError(near->get()).ok());
  pollfd came{.fd = listener->get(), .events = POLLIN};
  ASSERT_EQ(poll(&came, 1, 10'000), 1);
  const auto far = AcceptOn(listener->get());
  ASSERT_TRUE(far.ok()) << far.status();

  EXPECT_EQ(SocketAddress::Remote(far->get())->host_port(),
            SocketAddress::Local(near->get())->host_port());
}
INSTANTIATE_TEST_SUITE_P(BothFamilies, Connection, ::testing::Values("127.0.0.2", "::1"));

TEST(NumericAddress, AsksNobodyForAName) {
  EXPECT_EQ(NumericAddress({"localhost", 1}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(ResolveAddress({"localhost", 1})->empty());
}

}  // namespace
}  // namespace outlast
