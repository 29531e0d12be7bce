#include "outlast/adapters/s3.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>

#include "adapters/s3_options.h"
#include "outlast/base/plugins.h"
#include "outlast/base/status.h"
#include "outlast/testing/blob_contract.h"
#include "tests/support/radosgw.h"

namespace outlast {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

// --- Against a real server

std::string BucketUri(const std::string& bucket, const std::string& prefix) {
  return "s3://" + bucket + "/" + prefix;
}

void KeepsTheContract() {
  const std::string uri = BucketUri("contract", "some/prefix");
  ASSERT_EQ(MakeS3Bucket(uri), absl::OkStatus());
  Plugins plugins;
  ASSERT_TRUE(RegisterS3(plugins).ok());
  const auto blob = plugins.Make<Blob>(uri).value();
  for (const testing::BlobContractCase& one : testing::BlobContract())
    EXPECT_EQ(one.check(*blob), absl::OkStatus()) << one.name;
}

void KeepsPrefixesApart() {
  const auto a = MakeS3Blob(BucketUri("contract", "a")).value();
  const auto b = MakeS3Blob(BucketUri("contract", "a-b")).value();
  ASSERT_TRUE(PutSmall(*a, "x", "of a", PutMode::kCreate).ok());
  ASSERT_TRUE(PutSmall(*b, "x", "of b", PutMode::kCreate).ok());
  EXPECT_EQ(GetSmall(*a, "x", 10).value(), "of a");
  EXPECT_EQ(ListAll(*a, "").value().size(), 1u);
}

// Lightning#21499: one stream up is as slow as the store is far.
void SendsPartsSideBySide() {
  std::atomic<int> active{0}, most{0};
  const BlobSource source{uint64_t{64} << 20, [&](uint64_t, std::span<std::byte>) {
                            const int now = ++active;
                            for (int i = 0; i < 1000 && most < 2; ++i) {
                              most = std::max<int>(most, std::max<int>(now, active));
                              Clock::Real().SleepFor(absl::Milliseconds(5));
                            }
                            --active;
                            return absl::OkStatus();
                          }};
  const auto blob = MakeS3Blob(BucketUri("contract", "parts")).value();
  EXPECT_EQ(blob->Put("a", source, PutMode::kReplace, {}), absl::OkStatus());
  EXPECT_GE(most, 2);
}

void SaysThatABucketIsMissing() {
  const auto blob = MakeS3Blob(BucketUri("no-such-bucket", "")).value();
  const auto listed = blob->List("", "", 10, {});
  EXPECT_EQ(listed.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(MessageOf(listed.status())), HasSubstr("NoSuchBucket"));
}

void SaysThatASecretIsWrongWithoutTellingIt() {
  setenv("AWS_SECRET_ACCESS_KEY", "another-secret", 1);
  const auto blob = MakeS3Blob(BucketUri("contract", "")).value();
  setenv("AWS_SECRET_ACCESS_KEY", "not-a-secret-of-anybody", 1);
  const absl::Status put = PutSmall(*blob, "a", "x", PutMode::kReplace);
  EXPECT_EQ(put.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(MessageOf(put)),
              AllOf(HasSubstr("SignatureDoesNotMatch"), Not(HasSubstr("another-secret"))));
}

// One test, since each is a process of its own, and the server takes 15 s to start.
TEST(S3, KeepsTheContractOnARealServerAndNamesWhatIsWrong) {
  OUTLAST_RADOSGW_OR_SKIP(gateway);
  KeepsTheContract();
  KeepsPrefixesApart();
  SendsPartsSideBySide();
  SaysThatABucketIsMissing();
  SaysThatASecretIsWrongWithoutTellingIt();
}

// --- Against a server that misbehaves: a few lines of HTTP on a free port of loopback

class BadServer {
 public:
  // `answer` gets the request's first line, and how many came before it.
  using Answer = std::function<std::string(const std::string& line, int before)>;
  explicit BadServer(Answer answer) : answer_(std::move(answer)) {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(listen(listener_, 16), 0);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Serve(); });
  }
  ~BadServer() {
    shutdown(listener_, SHUT_RDWR);
    thread_.join();
    close(listener_);
  }

  std::string uri() const {
    return "s3://bucket/p?endpoint=http://127.0.0.1:" + std::to_string(port_);
  }
  int requests() const { return requests_; }
  std::string last_line() {
    const std::lock_guard lock(mutex_);
    return last_line_;
  }

 private:
  void Serve() {
    for (int peer; (peer = accept(listener_, nullptr, nullptr)) >= 0; close(peer)) {
      std::string text;
      char buffer[65536];
      size_t end = 0;
      while ((end = text.find("\r\n\r\n")) == std::string::npos) {
        const ssize_t count = read(peer, buffer, sizeof buffer);
        if (count <= 0) break;
        text.append(buffer, static_cast<size_t>(count));
      }
      const std::string line = text.substr(0, text.find("\r\n"));
      {
        const std::lock_guard lock(mutex_);
        last_line_ = line;
      }
      const std::string reply = answer_(line, requests_++);
      (void)!write(peer, reply.data(), reply.size());
    }
  }

  Answer answer_;
  int listener_ = -1, port_ = 0;
  std::atomic<int> requests_{0};
  std::mutex mutex_;
  std::string last_line_;
  std::thread thread_;
};

std::string Http(int status, const std::string& body, const std::string& headers = "") {
  return "HTTP/1.1 " + std::to_string(status) + " x\r\nConnection: close\r\n" + headers +
         "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

const char kSlowDown[] = "<Error><Code>SlowDown</Code><Message>Reduce your rate</Message></Error>";

class S3AgainstABadServer : public ::testing::Test {
 protected:
  void SetUp() override {
    setenv("AWS_ACCESS_KEY_ID", "outlast-test", 1);
    setenv("AWS_SECRET_ACCESS_KEY", "not-a-secret-of-anybody", 1);
  }
};

// dlio_benchmark#348: a SlowDown on a listing was read as "nothing is there".
TEST_F(S3AgainstABadServer, CallsASlowListingUnavailableAndNeverEmpty) {
  BadServer server([](const std::string&, int) { return Http(503, kSlowDown); });
  const auto blob = MakeS3Blob(server.uri()).value();
  const auto listed = blob->List("", "", 10, {.timeout = absl::Seconds(1), .is_cancelled = {}});
  EXPECT_THAT(listed.status().code(), ::testing::AnyOf(absl::StatusCode::kUnavailable,
                                                       absl::StatusCode::kDeadlineExceeded));
  EXPECT_GT(server.requests(), 2);
}

TEST_F(S3AgainstABadServer, TriesAgainUntilItIsServed) {
  BadServer server([](const std::string&, int before) {
    if (before < 3) return Http(503, kSlowDown);
    return Http(200,
                "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>p/a&amp;b"
                "</Key><Size>7</Size></Contents></ListBucketResult>");
  });
  const auto blob = MakeS3Blob(server.uri()).value();
  const auto page = blob->List("", "", 10, {});
  ASSERT_EQ(page.status(), absl::OkStatus());
  ASSERT_EQ(page->objects.size(), 1u);
  EXPECT_EQ(page->objects[0].key, "a&b");
  EXPECT_EQ(page->objects[0].bytes, 7u);
  EXPECT_EQ(server.requests(), 4);
}

TEST_F(S3AgainstABadServer, TakesNoAnswerForAnEmptyListing) {
  BadServer server([](const std::string&, int) { return Http(200, "<html>a proxy</html>"); });
  const auto blob = MakeS3Blob(server.uri()).value();
  const auto listed = blob->List("", "", 10, {});
  EXPECT_EQ(listed.status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(S3AgainstABadServer, SeesThatOtherBytesWereStored) {
  BadServer server([](const std::string&, int) {
    return Http(200, "", "ETag: \"00000000000000000000000000000000\"\r\n");
  });
  const auto blob = MakeS3Blob(server.uri()).value();
  const absl::Status put = PutSmall(*blob, "a", "x", PutMode::kReplace);
  EXPECT_EQ(put.code(), absl::StatusCode::kDataLoss);
  // MD5("x"), RFC 1321's function.
  EXPECT_THAT(std::string(MessageOf(put)), HasSubstr("9dd4e461268c8034f5c8564e155c67a6"));
}

TEST_F(S3AgainstABadServer, TakesNoShortRangeForAWholeOne) {
  BadServer server([](const std::string&, int before) {
    return before == 0 ? Http(206, "only") : Http(206, "all of it!");
  });
  const auto blob = MakeS3Blob(server.uri()).value();
  std::string into(10, '\0');
  ASSERT_EQ(blob->Get("a", 0, std::as_writable_bytes(std::span(into)), {}), absl::OkStatus());
  EXPECT_EQ(into, "all of it!");
  EXPECT_EQ(server.requests(), 2);
}

TEST_F(S3AgainstABadServer, TriesARangeAgainThatWasRefusedOrCut) {
  BadServer server([](const std::string&, int before) {
    if (before == 0) return Http(503, kSlowDown);
    const std::string cut = "HTTP/1.1 206 x\r\nConnection: close\r\nContent-Length: 10\r\n\r\nonly";
    return before == 1 ? cut : Http(206, "all of it!");
  });
  const auto blob = MakeS3Blob(server.uri()).value();
  std::string into(10, '\0');
  ASSERT_EQ(blob->Get("a", 0, std::as_writable_bytes(std::span(into)), {}), absl::OkStatus());
  EXPECT_EQ(into, "all of it!");
  EXPECT_EQ(server.requests(), 3);
}

TEST_F(S3AgainstABadServer, ReportsAnUploadThatFailsAfterA200) {
  BadServer server([](const std::string& line, int) {
    if (line.find("uploads=") != std::string::npos)
      return Http(200, "<R><UploadId>u</UploadId></R>");
    if (line.find("partNumber") != std::string::npos)
      return Http(200, "", "x-amz-server-side-encryption: aws:kms\r\nETag: \"e\"\r\n");
    if (line.starts_with("POST")) {
      return Http(200, "<Error><Code>InternalError</Code><Message>try again</Message></Error>");
    }
    return Http(204, "");
  });
  const auto blob = MakeS3Blob(server.uri()).value();
  const std::string content(17 << 20, 'x');
  const absl::Status put = blob->Put("a", BlobSource::Of(content), PutMode::kReplace,
                                     {.timeout = absl::Seconds(5), .is_cancelled = {}});
  EXPECT_THAT(put.code(), ::testing::AnyOf(absl::StatusCode::kUnavailable,
                                           absl::StatusCode::kDeadlineExceeded));
  EXPECT_THAT(server.last_line(), HasSubstr("DELETE /bucket/p/a?uploadId=u"));
}

TEST_F(S3AgainstABadServer, EndsSoonWhenItIsCancelled) {
  BadServer server([](const std::string&, int) { return Http(503, kSlowDown); });
  const auto blob = MakeS3Blob(server.uri()).value();
  const auto put = PutSmall(
      *blob, "a", "x", PutMode::kReplace,
      {.timeout = absl::Minutes(5), .is_cancelled = [&] { return server.requests() > 1; }});
  EXPECT_EQ(put.code(), absl::StatusCode::kCancelled);
}

// --- URIs and credentials

Environment Given(std::map<std::string, std::string> values) {
  return [values = std::move(values)](const char* name) -> std::optional<std::string> {
    const auto found = values.find(name);
    if (found == values.end()) return std::nullopt;
    return found->second;
  };
}

TEST(S3Uri, AddressesAwsByHost) {
  const S3Place place =
      ParseS3Uri("s3://my-bucket/a/b/", Given({{"AWS_REGION", "eu-west-1"}})).value();
  EXPECT_EQ(place.origin, "https://my-bucket.s3.eu-west-1.amazonaws.com");
  EXPECT_EQ(place.host, "my-bucket.s3.eu-west-1.amazonaws.com");
  EXPECT_EQ(place.base_path, "");
  EXPECT_EQ(place.prefix, "a/b/");
}

TEST(S3Uri, AddressesAnEndpointByPath) {
  const S3Place place =
      ParseS3Uri("s3://my-bucket?endpoint=http://10.0.0.1:80&region=here", Given({})).value();
  EXPECT_EQ(place.origin, "http://10.0.0.1:80");
  EXPECT_EQ(place.host, "10.0.0.1");
  EXPECT_EQ(place.base_path, "/my-bucket");
  EXPECT_EQ(place.prefix, "");
  EXPECT_EQ(place.region, "here");
}

TEST(S3Uri, IsRefusedByName) {
  for (const char* uri : {"s3://", "s3://UPPER/a", "s3://bucket/a//b", "s3://bucket?key=x",
                          "s3://bucket?endpoint=ftp://x", "s3://bucket?endpoint=http://u:p@h",
                          "s3://bucket?addressing=other", "file:///x"}) {
    const auto place = ParseS3Uri(uri, Given({}));
    EXPECT_EQ(place.status().code(), absl::StatusCode::kInvalidArgument) << uri;
    EXPECT_THAT(std::string(MessageOf(place.status())), Not(HasSubstr("u:p@"))) << uri;
  }
}

TEST(S3Credentials, ComeFromTheProfileOfTheSharedFile) {
  const std::string file = ::testing::TempDir() + "/credentials";
  std::ofstream(file) << "[default]\naws_access_key_id = a\naws_secret_access_key=b\n"
                         "# c\n[other]\naws_access_key_id = x\naws_secret_access_key = y=z\n"
                         "aws_session_token = t\n";
  const auto other =
      FindS3Credentials(Given({{"AWS_SHARED_CREDENTIALS_FILE", file}, {"AWS_PROFILE", "other"}}))
          .value();
  EXPECT_EQ(other.access_key, "x");
  EXPECT_EQ(other.secret_key, "y=z");
  EXPECT_EQ(other.session_token, "t");
  EXPECT_EQ(FindS3Credentials(Given({{"AWS_SHARED_CREDENTIALS_FILE", file}})).value().access_key,
            "a");
  const auto missing =
      FindS3Credentials(Given({{"AWS_SHARED_CREDENTIALS_FILE", file}, {"AWS_PROFILE", "none"}}));
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(MessageOf(missing.status())), HasSubstr("profile 'none' in " + file));
}

}  // namespace
}  // namespace outlast
