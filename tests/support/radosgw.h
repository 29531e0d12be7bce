// A real S3 server for the tests that want one: started once a process, ended with it.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "outlast/base/clock.h"
#include "outlast/testing/time_factor.h"
#include "tests/support/paths.h"

namespace outlast::testing {

class RadosGateway {
 public:
  // Null where Ceph's programs are not installed, or it did not come up; `why` then says which.
  // Exports its credentials and endpoint to this process's environment.
  static RadosGateway* Shared(std::string* why) {
    static std::string failure;
    static const std::unique_ptr<RadosGateway> gateway = Start(&failure);
    *why = failure;
    return gateway.get();
  }

  ~RadosGateway() {
    close(input_);  // it ends when its input does
    int status = 0;
    while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    std::filesystem::remove_all(folder_);
  }

  const std::string& endpoint() const { return endpoint_; }

 private:
  RadosGateway(std::string folder, pid_t pid, int input)
      : folder_(std::move(folder)), pid_(pid), input_(input) {}

  static bool IsInstalled(const char* program) {
    return access((std::string("/usr/bin/") + program).c_str(), X_OK) == 0;
  }

  static std::unique_ptr<RadosGateway> Start(std::string* why) {
    for (const char* program : {"radosgw", "ceph-mon", "ceph-osd", "ceph", "curl", "python3"}) {
      if (IsInstalled(program)) continue;
      *why = std::string(program) +
             " is not installed (apt-get install radosgw ceph-mon ceph-osd ceph-common)";
      return nullptr;
    }
    std::string folder = ::testing::TempDir() + "/radosgw_XXXXXX";
    int ends[2];
    if (mkdtemp(folder.data()) == nullptr || pipe2(ends, O_CLOEXEC) != 0) {
      *why = "no folder or pipe for it";
      return nullptr;
    }
    const std::string script = SourceFolder() / "tests/support/radosgw.sh";
    const pid_t pid = fork();
    if (pid == 0) {
      dup2(ends[0], 0);
      const int log = open((folder + "/script.log").c_str(), O_WRONLY | O_CREAT, 0644);
      dup2(log, 1);
      dup2(log, 2);
      execl("/bin/bash", "bash", script.c_str(), folder.c_str(), nullptr);
      _exit(127);
    }
    close(ends[0]);
    std::unique_ptr<RadosGateway> gateway(new RadosGateway(folder, pid, ends[1]));
    const int64_t deadline =
        MonotonicNanos() + absl::ToInt64Nanoseconds(absl::Seconds(90) * TimeFactor());
    while (!std::filesystem::exists(folder + "/ready")) {
      if (MonotonicNanos() > deadline || waitpid(pid, nullptr, WNOHANG) != 0) {
        std::ifstream log(folder + "/script.log");
        *why = "it did not come up: " + std::string(std::istreambuf_iterator<char>(log), {});
        return nullptr;
      }
      Clock::Real().SleepFor(absl::Milliseconds(50));
    }
    std::ifstream(folder + "/ready") >> gateway->endpoint_;
    setenv("AWS_ENDPOINT_URL_S3", gateway->endpoint_.c_str(), 1);
    setenv("AWS_ACCESS_KEY_ID", "outlast-test", 1);
    setenv("AWS_SECRET_ACCESS_KEY", "not-a-secret-of-anybody", 1);
    setenv("AWS_REGION", "us-east-1", 1);
    for (const char* name : {"AWS_SESSION_TOKEN", "http_proxy", "HTTP_PROXY", "ALL_PROXY"})
      unsetenv(name);
    return gateway;
  }

  std::string folder_;
  std::string endpoint_;
  pid_t pid_;
  int input_;
};

// In a test: a running gateway, or the test is skipped by a word; where CI=true it fails.
#define OUTLAST_RADOSGW_OR_SKIP(gateway)                        \
  std::string gateway##_why;                                    \
  ::outlast::testing::RadosGateway* gateway =                   \
      ::outlast::testing::RadosGateway::Shared(&gateway##_why); \
  if (gateway == nullptr && std::getenv("CI") != nullptr &&     \
      std::string(std::getenv("CI")) == "true")                 \
    FAIL() << "radosgw: " << gateway##_why;                     \
  if (gateway == nullptr) GTEST_SKIP() << "radosgw: " << gateway##_why

}  // namespace outlast::testing
