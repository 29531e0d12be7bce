// Jobs of several nodes under TLS, and with a token that comes by a descriptor.
#include <gmock/gmock.h>

#include <cstdlib>

#include "tests/fault/node_jobs.h"

namespace outlast::testing {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

// Two authorities, each with a certificate of every host.
class NodesUnderTls : public Nodes {
 protected:
  void SetUp() override {
    const std::string make =
        "set -e; cd " + folder_ +
        "; key='-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes'; printf "
        "'subjectAltName=IP:127.0.0.1' >ext; for ca in ours theirs; do openssl req -x509 $key "
        "-keyout $ca.key -out $ca.pem -subj /CN=$ca -days 2; openssl req $key -keyout of-$ca.key "
        "-out of-$ca.csr -subj /CN=of-$ca; openssl x509 -req -in of-$ca.csr -CA $ca.pem -CAkey "
        "$ca.key -CAcreateserial -days 2 -extfile ext -out of-$ca.pem; done";
    if (std::system("openssl version >/dev/null 2>&1") != 0) GTEST_SKIP() << "no openssl";
    ASSERT_EQ(std::system(("(" + make + ") >/dev/null 2>&1").c_str()), 0);
  }
  std::vector<std::string> Mutual(const std::string& of = "ours") const {
    return {"-n",         "1",
            "--tls-ca",   Path("ours.pem"),
            "--tls-cert", Path("of-" + of + ".pem"),
            "--tls-key",  Path("of-" + of + ".key")};
  }
};

TEST_F(NodesUnderTls, BothSidesShowCertificatesAndTheJobTrainsToItsEnd) {
  for (const int k : {1, 2}) StartTrainer(k, "2", Mutual());
  ASSERT_TRUE(AllTrain(2)) << Seen();
  EndTraining();
  for (const int k : {1, 2}) EndsWith(k, 0);
}

// A stranger gets no further than the greeting, says so in one line, and disturbs nobody.
TEST_F(NodesUnderTls, WithoutACertificateOrWithAForeignOneNobodyJoins) {
  StartTrainer(1, "2", Mutual());
  ASSERT_NE(agents_.at(1)->LineWith("leads job job", Within(10)), "") << Seen();
  const std::vector<std::vector<std::string>> strangers = {
      Mutual("theirs"), {"-n", "1", "--tls-ca", Path("ours.pem")}, {"-n", "1"}};
  for (std::vector<std::string> flags : strangers) {
    flags.insert(flags.end(), {"--join-timeout", "1", "--last-call", "1"});
    StartTrainer(2, "2", flags);
    EndsWith(2, 84, 30);
    const std::string& seen = agents_.at(2)->seen();
    const size_t end = seen.find("exit code 84: ");
    ASSERT_NE(end, std::string::npos) << seen;
    const std::string line = seen.substr(end, seen.find('\n', end) - end);
    EXPECT_THAT(line, HasSubstr(coordinator_));
    EXPECT_THAT(line, AnyOf(HasSubstr("TLS"), HasSubstr("ertificate"), HasSubstr("--tls-")))
        << seen;
  }
  EXPECT_EQ(Read("log"), "") << "no worker ran";

  StartTrainer(2, "2", Mutual());
  ASSERT_TRUE(AllTrain(2)) << Seen();
  EndTraining();
  for (const int k : {1, 2}) EndsWith(k, 0);
}

// The tool opens no file for it, and it is in no argument.
class NodesWithATokenByDescriptor : public Nodes {
 protected:
  std::vector<std::string> Place(int) const override {
    return {"/bin/sh", "-c", "exec 7<" + Path("token") + "; exec \"$@\"", "with-token"};
  }
};

TEST_F(NodesWithATokenByDescriptor, AJobTrainsToItsEnd) {
  WriteToken("token", 'a');
  WriteToken("wrong", 'b');
  const std::vector<std::string> flags = {"-n", "1", "--token-fd", "7"};
  StartTrainer(1, "2", flags);
  ASSERT_NE(agents_.at(1)->LineWith("leads job job", Within(10)), "") << Seen();
  // It is the token, and not any.
  StartTrainer(2, "2", {"-n", "1", "--token-file", Path("wrong")});
  EndsWith(2, 85);
  StartTrainer(2, "2", flags);
  ASSERT_TRUE(AllTrain(2)) << Seen();
  EndTraining();
  for (const int k : {1, 2}) EndsWith(k, 0);
}

}  // namespace
}  // namespace outlast::testing
