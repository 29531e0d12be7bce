#include "launch/worker_environment.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <thread>

namespace outlast {
namespace {

// What a program does: a socket of its own, bound to the port. errno, or 0.
struct Attempt {
  UniqueFd socket;
  int error = 0;
};
enum class Reuse : bool { kNo, kYes };

Attempt Bind(int port, Reuse reuse) {
  const auto address = NumericAddress({"127.0.0.1", static_cast<uint16_t>(port)});
  Attempt attempt{UniqueFd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0))};
  const int on = reuse == Reuse::kYes;
  setsockopt(attempt.socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(attempt.socket.get(), address->get(), address->size()) != 0) attempt.error = errno;
  return attempt;
}
Attempt Serve(int port) {
  Attempt attempt = Bind(port, Reuse::kYes);
  if (attempt.error == 0 && listen(attempt.socket.get(), 16) != 0) attempt.error = errno;
  return attempt;
}
int Connect(int port) {
  const auto address = NumericAddress({"127.0.0.1", static_cast<uint16_t>(port)});
  const UniqueFd client(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return connect(client.get(), address->get(), address->size()) == 0 ? 0 : errno;
}

TEST(MasterPorts, AreHeldForTheirGenerationAndTheNext) {
  MasterPorts ports("127.0.0.1");
  const int first = ports.Of(1).value();
  EXPECT_EQ(ports.Of(1).value(), first);
  EXPECT_EQ(Bind(first, Reuse::kNo).error, EADDRINUSE) << "a stranger's";
  EXPECT_EQ(Connect(first), ECONNREFUSED) << "nobody serves yet";
  {
    const Attempt server = Serve(first);
    EXPECT_EQ(server.error, 0) << "the worker's";
    EXPECT_EQ(Connect(first), 0);
  }
  EXPECT_NE(ports.Of(2).value(), first);
  EXPECT_EQ(Bind(first, Reuse::kNo).error, EADDRINUSE) << "who is late may still be there";
  ports.Of(3).value();
  EXPECT_EQ(Serve(first).error, 0) << "it is let go, and connections that were there are no matter";
}

TEST(MasterPorts, AreNeverStolenBetweenTheirChoiceAndTheWorkersServer) {
  MasterPorts ports("127.0.0.1");
  std::atomic<int> known{0};
  std::atomic<int> tries{0}, stolen{0};
  std::thread thief([&] {
    for (int port; (port = known) >= 0;) {
      if (port == 0) continue;
      if (Bind(port, Reuse::kNo).error == 0) ++stolen;
      ++tries;
    }
  });
  for (uint64_t generation = 1; generation <= 200; ++generation) {
    const int port = ports.Of(generation).value();
    known = port;
    const int before = tries;
    while (tries < before + 2) std::this_thread::yield();  // one whole try of this port
    EXPECT_EQ(Serve(port).error, 0) << generation;
  }
  known = -1;
  thief.join();
  EXPECT_EQ(stolen, 0);
}

}  // namespace
}  // namespace outlast
