#include "base/listening.h"

#include <gtest/gtest.h>

#include "base/socket.h"

namespace outlast {
namespace {

class Listening : public ::testing::TestWithParam<const char*> {};

TEST_P(Listening, IsSeenUntilTheListenerIsClosed) {
  const auto address = NumericAddress({GetParam(), 0});
  ASSERT_TRUE(address.ok());
  auto listener = ListenOn(*address);
  if (!listener.ok()) GTEST_SKIP() << listener.status();
  const uint16_t port = SocketAddress::Local(listener->get())->host_port().port;
  const auto found = IsListenedOn(port);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_TRUE(*found);
  listener->Reset();
  EXPECT_FALSE(*IsListenedOn(port));
}

// As a launcher holds a port for somebody else.
TEST_P(Listening, IsNotABoundSocket) {
  const auto address = NumericAddress({GetParam(), 0});
  ASSERT_TRUE(address.ok());
  const UniqueFd held(socket(address->family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (bind(held.get(), address->get(), address->size()) != 0) GTEST_SKIP() << "no such address";
  EXPECT_FALSE(*IsListenedOn(SocketAddress::Local(held.get())->host_port().port));
}

INSTANTIATE_TEST_SUITE_P(Listening, Listening, ::testing::Values("127.0.0.1", "::1"),
                         [](const auto& row) {
                           return row.param[0] == ':' ? std::string("IPv6") : std::string("IPv4");
                         });

}  // namespace
}  // namespace outlast
