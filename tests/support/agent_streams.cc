// outlast_agent_streams HOST:PORT JOB FIRST COUNT [TOKEN_FILE]: COUNT agents of one slot, named
// n<FIRST> and on, with made-up workers, in one process. Prints "ready", opens the streams at the
// first byte of standard input, prints "open G" when all are in generation G, "down" at each lost
// stream, and ends with the last agent's code.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "control/load_transport.h"
#include "tests/support/fake_node.h"

namespace outlast::testing {
namespace {

void Say(const std::string& line) { (void)!write(STDOUT_FILENO, line.data(), line.size()); }

int Main(const std::vector<std::string>& arguments) {
  const int first = std::atoi(arguments[2].c_str()), count = std::atoi(arguments[3].c_str());
  JobToken token;
  if (arguments.size() > 4) token = JobToken::Read(arguments[4]).value();
  const auto transport = control::LoadTransport();
  if (!transport.ok()) {
    PrintToStderr("{}\n", MessageOf(transport.status()));
    return 1;
  }
  const auto loop = std::move(EventLoop::Make()).value();
  std::vector<std::unique_ptr<FakeNode>> nodes;
  int open = 0, over = 0, code = 0;
  for (int i = first; i < first + count; ++i) {
    NodeOptions options{.node = "n" + std::to_string(i),
                        .incarnation = RandomU64(),
                        .slot_hint = i,
                        .addresses = {"127.0.0.1"}};
    options.elastic.job = arguments[1];
    auto link = MakeAgentLink(
        *loop, **transport,
        {.coordinator = arguments[0], .job = arguments[1], .node = options.node, .token = token});
    nodes.push_back(std::make_unique<FakeNode>(*loop, std::move(link).value(), std::move(options)));
    nodes.back()->on_open = [&](uint64_t generation) {
      if (++open % count == 0) Say(fmt::format("open {}\n", generation));
    };
    nodes.back()->on_down = [](const std::string&) { Say("down\n"); };
    nodes.back()->on_over = [&](const FinishJob& finish) {
      code = finish.exit_code;
      if (++over == count) loop->Stop();
    };
  }
  Say("ready\n");
  char go = 0;
  if (read(STDIN_FILENO, &go, 1) != 1) return 1;
  for (const auto& node : nodes) node->Start();
  loop->Run();
  return code;
}

}  // namespace
}  // namespace outlast::testing

int main(int argc, char** argv) {
  if (argc < 5) return 2;
  return outlast::testing::Main({argv + 1, argv + argc});
}
