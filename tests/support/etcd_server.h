// A real etcd for the tests that want one: a child process on loopback, with a folder of its own.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

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

  // The ports are held, so that nobody else gets them while it is down; etcd may listen there all
  // the same.
  EtcdServer() : ports_("127.0.0.1") {
    clients_ = "127.0.0.1:" + std::to_string(ports_.Of(1).value());
    peers_ = "127.0.0.1:" + std::to_string(other_ports_.Of(1).value());
    Start();
  }

  const std::string& endpoint() const { return clients_; }
  const PipedProcess& process() const { return *process_; }
  void Kill() { process_->Kill(); }
  // On the data that it left. Returns when it answers.
  void Start() {
    const std::string clients = "http://" + clients_, peers = "http://" + peers_;
    process_ =
        std::make_unique<PipedProcess>(std::vector<std::string>{kProgram,
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
                                                                "error"});
    const auto client = control::LoadEtcd({clients_}).value();
    const absl::Duration deadline = Clock::Real().Uptime() + absl::Seconds(20) * TimeFactor();
    while (!client->Read("/outlast/", "", 1).done()) {
      ASSERT_LT(Clock::Real().Uptime(), deadline) << "etcd does not come up: " << Said();
      Clock::Real().SleepFor(absl::Milliseconds(10));
    }
  }

 private:
  std::string Said() {
    (void)process_->LineWith("\n", absl::Milliseconds(100));
    return process_->seen();
  }

  const TempFolder folder_;
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
