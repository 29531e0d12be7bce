// Case O03, O04: jobs do not meet, and one machine needs no names.
#include "tests/fault/launched.h"

namespace outlast {
namespace {

using testing::Launched;

// Rank 0 serves on MASTER_PORT with SO_REUSEADDR, as torch's store does, and rank 1 asks it for its
// run id.
constexpr char kProgram[] = R"(
import os, socket, time
address = (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))
mine = os.environ['OUTLAST_RUN_ID'].encode()
if os.environ['RANK'] == '0':
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(address)
    server.listen()
    peer, _ = server.accept()
    peer.sendall(mine)
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.005)
    assert peer.recv(64) == mine
)";

class NetworkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (access("/usr/bin/python3", X_OK) != 0) GTEST_SKIP() << "no python3";
  }
};

// Case O03
TEST_F(NetworkTest, TwoDefaultJobsAtOnceNeverCollide) {
  for (int round = 0; round < (testing::kSanitized ? 3 : 20); ++round) {
    SCOPED_TRACE(round);
    Launched first, second;
    for (Launched* job : {&first, &second}) {
      job->Write("program.py", kProgram);
      job->Start({"-n", "2", "--max-restarts", "0", "program.py"});
    }
    EXPECT_EQ(first.Wait().code, 0) << first.Read("err");
    EXPECT_EQ(second.Wait().code, 0) << second.Read("err");
    if (HasFailure()) return;
  }
}

// Case O04
TEST_F(NetworkTest, NeedsNoNameResolution) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root for a mount namespace";
  Launched job;
  job.Write("program.py", kProgram);
  job.StartProgram(
      {"/usr/bin/unshare", "-m", "sh", "-c",
       std::string(
           "mount --bind /dev/null /etc/hosts && mount --bind /dev/null /etc/resolv.conf && "
           "mount --bind /dev/null /etc/nsswitch.conf || exit 99; exec ") +
           testing::ToolPath() + " run -n 2 --max-restarts 0 program.py"});
  const int code = job.Wait().code;
  if (code == 99) GTEST_SKIP() << "may not mount";
  EXPECT_EQ(code, 0) << job.Read("err");
}

}  // namespace
}  // namespace outlast
