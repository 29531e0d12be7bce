// What a coordinator answers to those who do not keep to the protocol, frame by frame.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "tests/control/control_fixture.h"

namespace outlast::testing {
namespace {

using ::testing::HasSubstr;

// A stream by hand.
class Frames : public ControlTest {
 protected:
  void Connect() {
    const std::string& address = host_->address();
    const size_t colon = address.rfind(':');
    stream_ = Grpc().Connect(
        address.substr(0, colon), std::stoi(address.substr(colon + 1)), "", {}, {},
        {.on_frame = [this](control::CoordinatorFrame frame,
                            size_t) { loop_.Note([&] { frames_.push_back(std::move(frame)); }); },
         .on_closed = [this](const std::string& why) { loop_.Note([&] { closed_ = why; }); }});
  }
  void TearDown() override { stream_.reset(); }
  bool IsClosed() {
    return loop_.WaitFor([&] { return closed_.has_value(); });
  }
  // The refusal that came last.
  std::string Refusal() {
    if (!IsClosed() || frames_.empty()) return "not refused";
    const auto* message = std::get_if<control::CoordinatorMessage>(&frames_.back());
    const auto* refused = message != nullptr ? std::get_if<control::Refused>(message) : nullptr;
    return refused != nullptr ? refused->reason : "not refused";
  }
  control::Opening Open() {
    return {.software = "test", .job = "job", .node = "n0", .nonce = std::string(32, 'n')};
  }
  control::Greeting Greet() {
    return {.hello = {.job = "job", .node = "n0", .incarnation = 1, .capacity = 1}};
  }

  std::unique_ptr<control::FrameStream> stream_;
  std::vector<control::CoordinatorFrame> frames_;
  std::optional<std::string> closed_;
};

TEST_F(Frames, AnotherProtocolVersionIsRefusedAndBothAreNamed) {
  ASSERT_TRUE(StartHost(HostOptions(1)).ok());
  Connect();
  control::Opening opening = Open();
  opening.version = 2;
  opening.software = "outlast 9.9";

  stream_->Send(opening);

  EXPECT_EQ(Refusal(),
            "agent n0 speaks protocol version 2 (outlast 9.9), this coordinator 1 (outlast 0.1.0)");
  EXPECT_TRUE(Says("agent n0 speaks protocol version 2"));
}

TEST_F(Frames, AnOversizedGreetingIsRefusedInOneLine) {
  ASSERT_TRUE(StartHost(HostOptions(1)).ok());
  Connect();
  stream_->Send(Open());
  control::Greeting greeting = Greet();
  greeting.hello.addresses.assign(70, std::string(1000, 'a'));

  stream_->Send(greeting);

  EXPECT_THAT(Refusal(), HasSubstr("bytes, at most 65536 are allowed"));
  EXPECT_TRUE(Says("at most 65536 are allowed"));
}

TEST_F(Frames, AFrameOverTheLimitIsNotSent) {
  ASSERT_TRUE(StartHost(HostOptions(1)).ok());
  Connect();
  stream_->Send(Open());
  stream_->Send(Greet());

  stream_->Send(control::AgentMessage(control::Fault{.detail = std::string(5 << 20, 'x')}));

  EXPECT_TRUE(IsClosed());
  EXPECT_THAT(*closed_, HasSubstr("bytes, at most 4194304 are allowed"));
}

TEST_F(Frames, AMessageBeforeTheHelloIsRefused) {
  ASSERT_TRUE(StartHost(HostOptions(1)).ok());
  Connect();
  stream_->Send(control::AgentMessage(control::Beat{}));
  EXPECT_EQ(Refusal(), "a message before the hello");
}

TEST_F(Frames, AHelloBeforeTheOpeningIsRefused) {
  ASSERT_TRUE(StartHost(HostOptions(1)).ok());
  Connect();
  stream_->Send(Greet());
  EXPECT_EQ(Refusal(), "a hello before the opening");
}

TEST_F(Frames, AHelloForAnotherNodeThanTheOpeningsIsRefused) {
  ASSERT_TRUE(StartHost(HostOptions(1)).ok());
  Connect();
  stream_->Send(Open());
  control::Greeting greeting = Greet();
  greeting.hello.node = "n1";

  stream_->Send(greeting);

  EXPECT_EQ(Refusal(), "agent n1: its hello names another job or node than its opening");
}

TEST_F(Frames, AnAgentThatDoesNotReadDelaysNoOther) {
  // A peer that took part in the handshake of TCP alone.
  ASSERT_TRUE(StartHost(HostOptions(2)).ok());
  const std::string& address = host_->address();
  const int port = std::stoi(address.substr(address.rfind(':') + 1));
  const UniqueFd silent(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in to{.sin_family = AF_INET, .sin_port = htons(static_cast<uint16_t>(port))};
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(connect(silent.get(), reinterpret_cast<sockaddr*>(&to), sizeof(to)), 0);
  Connect();  // and one that never says a word

  for (int i = 0; i < 2; ++i) StartNode(i);

  EXPECT_TRUE(AllOpen(2, 1, absl::Seconds(2)));
}

}  // namespace
}  // namespace outlast::testing
