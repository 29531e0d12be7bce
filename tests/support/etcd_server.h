// A real etcd for the tests that want one: a child process on loopback, with a folder of its own.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/child_program.h"
#include "control/certificates.h"
#include "control/load_transport.h"
#include "launch/worker_environment.h"
#include "outlast/base/clock.h"
#include "outlast/testing/time_factor.h"
#include "tests/support/piped_process.h"
#include "tests/support/temp_folder.h"

namespace outlast::testing {

class EtcdServer {
 public:
  static constexpr char kProgram[] = "/usr/bin/etcd";
  static bool is_installed() { return access(kProgram, X_OK) == 0; }

  // With TLS its client's side shows and wants certificates, which openssl makes in a folder of its
  // own: "ca.pem", "client.pem" with "client.key", and "stranger.pem" with its key, of another CA.
  enum class Tls { kNo, kBothSides };

  // The ports are held, so that nobody else gets them while it is down; etcd may listen there all
  // the same.
  explicit EtcdServer(Tls tls = Tls::kNo) : tls_(tls), ports_("127.0.0.1") {
    clients_ = "127.0.0.1:" + std::to_string(ports_.Of(1).value());
    peers_ = "127.0.0.1:" + std::to_string(other_ports_.Of(1).value());
    if (tls_ != Tls::kNo) MakeCertificates();
    Start();
  }

  std::string Path(const std::string& name) const { return folder_ / name; }
  // How it is reached by those whom it trusts.
  control::EtcdServers servers() const {
    control::EtcdServers servers{.endpoints = {clients_}};
    if (tls_ == Tls::kNo) return servers;
    servers.uses_tls = true;
    servers.certificates =
        ReadCertificates(Path("ca.pem"), Path("client.pem"), Path("client.key")).value();
    return servers;
  }
  // By curl to its JSON gateway, such as Post("auth/enable", "{}"); what it answers.
  std::string Post(const std::string& path, const std::string& body) const {
    const std::string scheme = tls_ == Tls::kNo ? "http://" : "https://";
    std::vector<std::string> command = {"/usr/bin/curl", "--silent", "--show-error"};
    if (tls_ != Tls::kNo) {
      command.insert(command.end(), {"--cacert", Path("ca.pem"), "--cert", Path("client.pem"),
                                     "--key", Path("client.key")});
    }
    command.insert(command.end(), {"--data", body, scheme + clients_ + "/v3/" + path});
    return RunProgram({.command = command, .deadline = absl::Seconds(20) * TimeFactor()})
        .value()
        .output;
  }
  // From then on it wants users: root, who may do everything, and `name`, who may do so with the
  // keys of `job`; their password is "secret".
  void WantUsers(const std::string& name, const std::string& job) const {
    const std::string folder = "/outlast/v1/" + job + "/", end = "/outlast/v1/" + job + "0";
    const auto role = [](const std::string& user, const std::string& of) {
      return R"({"user": ")" + user + R"(", "role": ")" + of + R"("})";
    };
    for (const std::string& user : {std::string("root"), name}) {
      EXPECT_THAT(Post("auth/user/add", R"({"name": ")" + user + R"(", "password": "secret"})"),
                  ::testing::HasSubstr("revision"));
    }
    for (const char* of : {"root", "trains"})
      Post("auth/role/add", std::string(R"({"name": ")") + of + R"("})");
    EXPECT_THAT(Post("auth/role/grant",
                     R"({"name": "trains", "perm": {"permType": "READWRITE", "key": ")" +
                         Base64(folder) + R"(", "range_end": ")" + Base64(end) + R"("}})"),
                ::testing::HasSubstr("revision"));
    Post("auth/user/grant", role("root", "root"));
    Post("auth/user/grant", role(name, "trains"));
    EXPECT_THAT(Post("auth/enable", "{}"), ::testing::HasSubstr("revision"));
  }

  const std::string& endpoint() const { return clients_; }
  const PipedProcess& process() const { return *process_; }
  void Kill() { process_->Kill(); }
  // On the data that it left. Returns when it answers.
  void Start() {
    const std::string scheme = tls_ == Tls::kNo ? "http://" : "https://";
    const std::string clients = scheme + clients_, peers = "http://" + peers_;
    std::vector<std::string> command = {kProgram,
                                        "--name",
                                        "test",
                                        "--data-dir",
                                        folder_ / "data",
                                        "--listen-client-urls",
                                        clients,
                                        "--advertise-client-urls",
                                        clients,
                                        "--listen-peer-urls",
                                        peers,
                                        "--initial-advertise-peer-urls",
                                        peers,
                                        "--initial-cluster",
                                        "test=" + peers,
                                        "--unsafe-no-fsync",
                                        "--logger",
                                        "zap",
                                        "--log-level",
                                        "error"};
    if (tls_ != Tls::kNo) {
      command.insert(command.end(),
                     {"--cert-file", Path("etcd.pem"), "--key-file", Path("etcd.key"),
                      "--trusted-ca-file", Path("ca.pem"), "--client-cert-auth"});
    }
    process_ = std::make_unique<PipedProcess>(command);
    const auto client = control::LoadEtcd(servers()).value();
    const absl::Duration deadline = Clock::Real().Uptime() + absl::Seconds(20) * TimeFactor();
    // One that wants users refuses, and so it answers.
    while (client->Read("/outlast/", "", 1).outcome == control::EtcdReply::Outcome::kUnreached) {
      ASSERT_LT(Clock::Real().Uptime(), deadline) << "etcd does not come up: " << Said();
      Clock::Real().SleepFor(absl::Milliseconds(10));
    }
  }

 private:
  static std::string Base64(const std::string& text) {
    constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string coded;
    for (size_t i = 0; i < text.size(); i += 3) {
      uint32_t bits = 0;
      for (size_t k = 0; k < 3; ++k)
        bits = bits << 8 | (i + k < text.size() ? static_cast<unsigned char>(text[i + k]) : 0u);
      for (size_t k = 0; k < 4; ++k)
        coded += i + k > text.size() ? '=' : kDigits[bits >> (18 - 6 * k) & 63];
    }
    return coded;
  }
  void MakeCertificates() const {
    const std::string key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 ";
    std::string make = "cd '" + folder_.path() + "'";
    for (const std::string who : {"ca", "other"}) {
      make += " && openssl req -x509 " + key + "-keyout " + who + ".key -out " + who +
              ".pem -subj /CN=" + who;
    }
    make += " && printf 'subjectAltName=IP:127.0.0.1' >names";
    for (const auto& [who, ca] : std::vector<std::pair<std::string, std::string>>{
             {"etcd", "ca"}, {"client", "ca"}, {"stranger", "other"}}) {
      make += " && openssl req " + key + "-keyout " + who + ".key -out " + who +
              ".csr -subj /CN=" + who + " && openssl x509 -req -in " + who + ".csr -CA " + ca +
              ".pem -CAkey " + ca + ".key -CAcreateserial -days 2 -extfile names -out " + who +
              ".pem";
    }
    ASSERT_EQ(std::system(("(" + make + ") >/dev/null 2>&1").c_str()), 0) << "openssl is wanted";
  }
  std::string Said() {
    (void)process_->LineWith("\n", absl::Milliseconds(100));
    return process_->seen();
  }

  const TempFolder folder_;
  const Tls tls_;
  MasterPorts ports_;
  MasterPorts other_ports_{"127.0.0.1"};
  std::string clients_, peers_;
  std::unique_ptr<PipedProcess> process_;
};

// In a test: the test is skipped by a word where etcd is not installed; where CI=true it fails.
#define OUTLAST_ETCD_OR_SKIP()                                                    \
  if (!::outlast::testing::EtcdServer::is_installed()) {                          \
    const char* ci = std::getenv("CI");                                           \
    if (ci != nullptr && std::string(ci) == "true") FAIL() << "no /usr/bin/etcd"; \
    GTEST_SKIP() << "etcd is not installed (apt-get install etcd-server)";        \
  }

}  // namespace outlast::testing
