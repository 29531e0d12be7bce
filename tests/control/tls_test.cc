// Streams under TLS, with certificates that openssl makes.
#include <cstdlib>

#include "control/certificates.h"
#include "tests/control/control_fixture.h"

namespace outlast::testing {
namespace {

class Tls : public ControlTest {
 protected:
  void SetUp() override {
    const std::string make =
        "cd " + folder_ +
        " && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key "
        "-out ca.pem -subj /CN=ca -days 2 && for who in coordinator agent; do "
        "openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout $who.key "
        "-out $who.csr -subj /CN=$who && printf 'subjectAltName=IP:127.0.0.1' > $who.ext && "
        "openssl x509 -req -in $who.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 "
        "-extfile $who.ext -out $who.pem || exit 1; done";
    ASSERT_EQ(std::system(("(" + make + ") >/dev/null 2>&1").c_str()), 0) << "openssl is wanted";
  }
  control::Certificates Read(const std::string& who, const std::string& ca = "ca.pem") {
    auto read = ReadCertificates(ca.empty() ? "" : folder_ + "/" + ca,
                                 who.empty() ? "" : folder_ + "/" + who + ".pem",
                                 who.empty() ? "" : folder_ + "/" + who + ".key");
    EXPECT_TRUE(read.ok()) << read.status();
    return *read;
  }
};

TEST_F(Tls, BothSidesShowCertificates) {
  CoordinatorHostOptions options = HostOptions(1);
  options.certificates = Read("coordinator");
  ASSERT_TRUE(StartHost(options).ok());
  AgentLinkOptions link = LinkOptions(0);
  link.certificates = Read("agent");
  StartNode(0, link);
  EXPECT_TRUE(AllOpen(1, 1));
}

TEST_F(Tls, AnAgentWithoutACertificateIsNotHeardWhereOneIsWanted) {
  CoordinatorHostOptions options = HostOptions(1);
  options.certificates = Read("coordinator");
  ASSERT_TRUE(StartHost(options).ok());
  AgentLinkOptions link = LinkOptions(0);
  link.certificates = Read("");
  StartNode(0, link);
  EXPECT_TRUE(loop_.WaitFor([&] { return !downs_[0].empty(); }));
  EXPECT_EQ(opened_[0], 0u);
}

TEST_F(Tls, APlainAgentIsNotHeard) {
  CoordinatorHostOptions options = HostOptions(1);
  options.certificates = Read("coordinator", "");
  ASSERT_TRUE(StartHost(options).ok());
  StartNode(0);
  EXPECT_TRUE(loop_.WaitFor([&] { return !downs_[0].empty(); }));
  EXPECT_EQ(opened_[0], 0u);
}

TEST_F(Tls, ACertificateWantsItsKey) {
  EXPECT_EQ(ReadCertificates("", folder_ + "/agent.pem", "").status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace outlast::testing
