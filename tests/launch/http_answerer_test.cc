#include "launch/http_answerer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>

#include "base/event_loop.h"
#include "base/socket.h"
#include "outlast/testing/time_factor.h"

namespace outlast {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using testing::TimeFactor;

TEST(ParseHttp, TakesThePathWithoutItsQuery) {
  const ParsedHttp parsed =
      ParseHttp("GET /metrics?name=x HTTP/1.1\r\nHost: a\r\nACCEPT: text/plain \r\n\r\n");

  EXPECT_EQ(parsed.refusal.code, 200);
  EXPECT_EQ(parsed.request.path, "/metrics");
  EXPECT_EQ(parsed.request.accept, "text/plain");
  EXPECT_FALSE(parsed.is_head_only);
  EXPECT_TRUE(ParseHttp("HEAD / HTTP/1.0\r\n\r\n").is_head_only);
}

TEST(ParseHttp, RefusesWhatIsNoGetRequest) {
  EXPECT_EQ(ParseHttp("").refusal.code, 400);
  EXPECT_EQ(ParseHttp("\x16\x03\x01\x02").refusal.code, 400);
  EXPECT_EQ(ParseHttp("GET /metrics\r\n\r\n").refusal.code, 400);
  EXPECT_EQ(ParseHttp("GET metrics HTTP/1.1\r\n\r\n").refusal.code, 400);
  EXPECT_EQ(ParseHttp("GET /a b HTTP/1.1\r\n\r\n").refusal.code, 400);
  EXPECT_EQ(ParseHttp("POST /metrics HTTP/1.1\r\n\r\n").refusal.code, 405);
  EXPECT_EQ(ParseHttp("PRI * HTTP/2.0\r\n\r\n").refusal.code, 505);
}

TEST(HttpBytes, NameTheLengthOfTheBodyAlsoWithoutIt) {
  EXPECT_THAT(HttpBytes({.body = "seven.\n"}, true), EndsWith("\r\n\r\nseven.\n"));
  const std::string head = HttpBytes({.body = "seven.\n"}, false);
  EXPECT_THAT(head, HasSubstr("Content-Length: 7\r\n"));
  EXPECT_THAT(head, EndsWith("\r\n\r\n"));
  EXPECT_THAT(HttpBytes({.code = 405}, true), HasSubstr("Allow: GET, HEAD\r\n"));
}

constexpr size_t kLarge = 16 << 20;

// Answers on a loop in a thread of its own.
class Server {
 public:
  explicit Server(HttpLimits limits = {}) {
    const auto any = NumericAddress({"127.0.0.1", 0});
    auto listener = ListenOn(*any);
    address_ = *SocketAddress::Local(listener->get());
    loop_ = *EventLoop::Make();
    http_ = std::make_unique<HttpAnswerer>(
        *loop_,
        [](const PageRequest& request) -> PageAnswer {
          if (request.path == "/large") return {.body = std::string(kLarge, 'x')};
          return {.body = "page " + request.path + "\n"};
        },
        limits);
    EXPECT_TRUE(http_->Serve(*std::move(listener)).ok());
    thread_ = std::thread([this] { loop_->Run(); });
  }
  ~Server() {
    loop_->Stop();
    thread_.join();
    http_.reset();
  }
  const SocketAddress& address() const { return address_; }

 private:
  SocketAddress address_;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<HttpAnswerer> http_;
  std::thread thread_;
};

class Visitor {
 public:
  explicit Visitor(const Server& server) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    EXPECT_EQ(connect(fd_.get(), server.address().get(), server.address().size()), 0);
  }
  void Say(std::string_view bytes) {
    (void)!send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  void CloseItsEnd() { shutdown(fd_.get(), SHUT_WR); }
  void Leave() { fd_.Reset(); }
  bool HasSomethingWithin(absl::Duration limit) {
    pollfd wait{fd_.get(), POLLIN, 0};
    return poll(&wait, 1, static_cast<int>(absl::ToInt64Milliseconds(limit))) > 0;
  }
  // Everything up to the end, which an error is as well.
  std::string Hear() {
    std::string bytes(1 << 16, '\0'), heard;
    ssize_t count;
    while (HasSomethingWithin(absl::Seconds(30) * TimeFactor()) &&
           (count = recv(fd_.get(), bytes.data(), bytes.size(), 0)) > 0)
      heard.append(bytes.data(), static_cast<size_t>(count));
    return heard;
  }

 private:
  UniqueFd fd_;
};

std::string Get(const Server& server, const std::string& path) {
  Visitor visitor(server);
  visitor.Say("GET " + path + " HTTP/1.1\r\nHost: x\r\n\r\n");
  return visitor.Hear();
}

TEST(HttpAnswerer, AnswersAGetAndCloses) {
  Server server;
  const std::string heard = Get(server, "/a");
  EXPECT_THAT(heard, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(heard, EndsWith("\r\n\r\npage /a\n"));
}

TEST(HttpAnswerer, TakesARequestThatComesByteByByte) {
  Server server;
  Visitor visitor(server);
  for (const char c : std::string("GET /b HTTP/1.0\n\n")) visitor.Say(std::string(1, c));
  EXPECT_THAT(visitor.Hear(), EndsWith("page /b\n"));
}

TEST(HttpAnswerer, ServesOthersBesideThoseWhoSayNothingOrGarbage) {
  Server server;
  Visitor silent(server), half(server), garbage(server);
  half.Say("GET /metrics HT");
  garbage.Say(std::string("\x00\xff\x16\x03\r\n\r\n", 8));

  EXPECT_THAT(Get(server, "/good"), EndsWith("page /good\n"));
  EXPECT_THAT(garbage.Hear(), StartsWith("HTTP/1.1 400 "));
}

TEST(HttpAnswerer, CutsOffWhoeverTakesTooLong) {
  Server server({.time = absl::Milliseconds(50)});
  Visitor silent(server), half(server);
  half.Say("GET /a");

  EXPECT_EQ(silent.Hear(), "");
  EXPECT_EQ(half.Hear(), "");
}

TEST(HttpAnswerer, DoesNotWaitForAReaderThatDoesNotRead) {
  Server server({.time = absl::Milliseconds(200) * TimeFactor()});
  Visitor slow(server);
  slow.Say("GET /large HTTP/1.1\r\n\r\n");
  ASSERT_TRUE(slow.HasSomethingWithin(absl::Seconds(30) * TimeFactor()));

  EXPECT_THAT(Get(server, "/good"), EndsWith("page /good\n"));
}

TEST(HttpAnswerer, GivesALargePageInFullToWhoeverReads) {
  Server server;
  const std::string heard = Get(server, "/large");
  ASSERT_NE(heard.find("\r\n\r\n"), std::string::npos);
  EXPECT_EQ(heard.size() - heard.find("\r\n\r\n") - 4, kLarge);
}

TEST(HttpAnswerer, GivesALargePageInFullAlsoToWhoeverClosedItsEnd) {
  Server server;
  Visitor visitor(server);
  visitor.Say("GET /large HTTP/1.1\r\n\r\n");
  visitor.CloseItsEnd();

  const std::string heard = visitor.Hear();

  EXPECT_EQ(heard.size() - heard.find("\r\n\r\n") - 4, kLarge);
}

TEST(HttpAnswerer, TellsARequestThatItIsTooLong) {
  Server server({.head_bytes = 100});
  Visitor visitor(server);
  visitor.Say("GET / HTTP/1.1\r\nX: " + std::string(200, 'x') + "\r\n\r\n");
  EXPECT_THAT(visitor.Hear(), StartsWith("HTTP/1.1 431 "));
}

TEST(HttpAnswerer, LetsTheNextOneInWhenOneLeaves) {
  Server server({.clients = 2, .time = absl::Minutes(10)});
  Visitor first(server), second(server), third(server);
  // Both places are taken once both were heard.
  first.Say("GET /");
  second.Say("GET /");
  third.Say("GET /third HTTP/1.1\r\n\r\n");

  first.Leave();

  EXPECT_THAT(third.Hear(), EndsWith("page /third\n"));
}

}  // namespace
}  // namespace outlast
