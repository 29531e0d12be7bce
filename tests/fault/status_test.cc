// `outlast status`, `outlast top` and /metrics of a real job.
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdio>
#include <functional>
#include <optional>

#include "base/socket.h"
#include "tests/fault/launched.h"
#include "tests/support/metrics_lint.h"

namespace outlast::testing {
namespace {

using nlohmann::json;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

struct Said {
  int code = -1;
  std::string text;  // both outputs
};

// The tool beside a run, in its folder.
Said Tool(const Launched& run, const std::string& arguments) {
  const std::string command =
      "cd '" + run.folder() + "' && '" + ToolPath() + "' " + arguments + " 2>&1";
  Said said;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return said;
  char buffer[4096];
  for (size_t count; (count = fread(buffer, 1, sizeof buffer, pipe)) > 0;)
    said.text.append(buffer, count);
  const int status = pclose(pipe);
  said.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return said;
}

json Status(const Launched& run) {
  return json::parse(Tool(run, "status --json").text, nullptr, false);
}

// Asks until `holds`; the last answer.
json Await(const Launched& run, const std::function<bool(const json&)>& holds) {
  const int64_t deadline = MonotonicNanos() + absl::ToInt64Nanoseconds(absl::Seconds(60)) *
                                                  static_cast<int64_t>(TimeFactor());
  while (true) {
    json status = Status(run);
    if (status.is_object() && holds(status)) return status;
    if (MonotonicNanos() > deadline) {
      ADD_FAILURE() << "not within the limit: " << status.dump();
      return status;
    }
  }
}

bool AllBeyond(const json& status, int64_t step) {
  if (status["ranks"].size() != 4) return false;
  for (const json& rank : status["ranks"])
    if (!rank["step"].is_number() || rank["step"].get<int64_t>() <= step) return false;
  return true;
}

pid_t PidOf(const json& status, size_t rank) {
  return status["ranks"][rank]["pid"].is_number() ? status["ranks"][rank]["pid"].get<pid_t>() : -1;
}

class StatusOfAJob : public ::testing::Test {
 protected:
  void Start(const std::vector<std::string>& options = {},
             const std::vector<std::string>& of_trainer = {}) {
    std::vector<std::string> words = {"-n", "4", "--job", "seen", "--grace", "5"};
    words.insert(words.end(), options.begin(), options.end());
    for (const std::string& word :
         {std::string("--"), (BuildFolder() / "outlast_toy_trainer").string(),
          std::string("--steps"), std::string("1000000"), std::string("--step-ms"),
          std::string("2"), std::string("--ckpt-dir"), run.Path("ckpt"),
          std::string("--ckpt-every"), std::string("20"), std::string("--state-mb"),
          std::string("0.25")})
      words.push_back(word);
    words.insert(words.end(), of_trainer.begin(), of_trainer.end());
    run.Start(words);
  }
  int Stop() {
    kill(run.pid(), SIGTERM);
    return run.Wait().code;
  }

  Launched run;
};

TEST_F(StatusOfAJob, ShowsItsRanksAndThatTheyMove) {
  Start({}, {"--watch-floor", "30"});
  const json first = Await(run, [](const json& status) { return AllBeyond(status, 3); });
  const int64_t step = first["ranks"][0]["step"];
  const json later = Await(run, [&](const json& status) {
    return AllBeyond(status, step + 3) && status["checkpoint"].is_object() &&
           status["ranks"][0]["limit_seconds"].is_number();
  });

  EXPECT_EQ(later["job"], "seen");
  EXPECT_EQ(later["phase"], "running");
  EXPECT_EQ(later["generation"], 1);
  EXPECT_EQ(later["agent"]["pid"], run.pid());
  EXPECT_EQ(later["agent"]["state"], "answers");
  EXPECT_GE(later["checkpoint"]["step"], 20);
  EXPECT_TRUE(later["goodput"].is_object());
  EXPECT_EQ(later["ranks"][3]["state"], "running");
  EXPECT_GE(later["ranks"][0]["limit_seconds"], 30);
  EXPECT_LT(later["ranks"][0]["age_seconds"], 30);
  EXPECT_TRUE(is_alive(PidOf(later, 3)));
  const Said text = Tool(run, "status");
  EXPECT_EQ(text.code, 0);
  EXPECT_THAT(text.text, StartsWith("job seen: running, generation 1 of 4 ranks, for "));

  const int code = Stop();
  const json ended = Status(run);
  EXPECT_EQ(ended["phase"], "ended");
  EXPECT_EQ(ended["exit_code"], code);
  EXPECT_EQ(ended["agent"]["state"], "ended");
  EXPECT_FALSE(std::filesystem::exists(run.Path("outlast-runs/latest/status.sock")));
}

TEST_F(StatusOfAJob, ShowsAFaultAndTheGenerationBehindIt) {
  Start();
  const json before = Await(run, [](const json& status) { return AllBeyond(status, 3); });
  kill(PidOf(before, 2), SIGKILL);

  const json after = Await(run, [](const json& status) {
    return status["generation"] == 2 && status["phase"] == "running" && AllBeyond(status, 3);
  });

  EXPECT_EQ(after["faults"], 1);
  EXPECT_EQ(after["last_fault"]["class"], "crash");
  EXPECT_EQ(after["last_fault"]["rank"], 2);
  EXPECT_EQ(after["last_fault"]["generation"], 1);
  EXPECT_EQ(after["ranks"][2]["end"], "signal 9");
  EXPECT_NE(PidOf(after, 2), PidOf(before, 2));
  EXPECT_EQ(PidOf(after, 0), PidOf(before, 0));
  Stop();
}

TEST_F(StatusOfAJob, ShowsARankThatIsStoppedAndForHowLong) {
  Start();
  const json before = Await(run, [](const json& status) { return AllBeyond(status, 3); });
  kill(PidOf(before, 1), SIGSTOP);

  const json stopped = Await(run, [](const json& status) {
    const json& rank = status["ranks"][1];
    return rank["state"] == "stopped" && rank["age_seconds"].is_number() &&
           rank["age_seconds"] > 0.2;
  });
  EXPECT_THAT(Tool(run, "status").text, HasSubstr("  stopped  "));

  kill(PidOf(before, 1), SIGCONT);
  const int64_t step = stopped["ranks"][1]["step"];
  Await(run, [&](const json& status) { return AllBeyond(status, step + 3); });
  Stop();
}

TEST_F(StatusOfAJob, SaysThatItsAgentWasKilled) {
  Start();
  const json before = Await(run, [](const json& status) { return AllBeyond(status, 3); });
  kill(run.pid(), SIGKILL);
  run.Wait();
  std::vector<pid_t> workers;
  for (size_t rank = 0; rank < 4; ++rank) workers.push_back(PidOf(before, rank));
  ASSERT_EQ(CountAliveAfter(workers, absl::Seconds(10)), 0);

  const json after = Status(run);
  EXPECT_EQ(after["phase"], "killed");
  EXPECT_EQ(after["agent"]["state"], "gone");
  EXPECT_TRUE(after["exit_code"].is_null());
  EXPECT_EQ(after["ranks"][0]["state"], "ended");
  EXPECT_EQ(Tool(run, "status").code, 0);
  EXPECT_THAT(Tool(run, "status").text, HasSubstr("gone without a report"));
}

TEST_F(StatusOfAJob, IsReadFromItsFilesWhileItsAgentDoesNotAnswer) {
  Start();
  Await(run, [](const json& status) { return AllBeyond(status, 3); });
  kill(run.pid(), SIGSTOP);

  const json silent = Status(run);

  EXPECT_EQ(silent["agent"]["state"], "silent");
  EXPECT_EQ(silent["generation"], 1);
  kill(run.pid(), SIGCONT);
  Await(run, [](const json& status) { return status["agent"]["state"] == "answers"; });
  Stop();
}

TEST(Status, OfAFolderWithoutARunIsRefused) {
  const Launched run;
  const Said none = Tool(run, "status");
  EXPECT_EQ(none.code, 85);
  EXPECT_THAT(none.text, StartsWith("outlast: status: 'outlast-runs/latest': No such file"));
  const Said empty = Tool(run, "status .");
  EXPECT_EQ(empty.code, 85);
  EXPECT_THAT(empty.text, HasSubstr("the RUN_DIR of a run wanted"));
  EXPECT_EQ(Tool(run, "status --nope").code, 85);
}

TEST(Status, OfARunThatWasRefusedByItsWorkersEndNamesTheCode) {
  Launched run;
  EXPECT_EQ(run.Run({"-n", "2", "--max-restarts", "0", "--", "sh", "-c", "exit 7"}), 7);
  const json status = Status(run);
  EXPECT_EQ(status["exit_code"], 7);
  EXPECT_EQ(status["phase"], "ended");
  EXPECT_EQ(Tool(run, "status outlast-runs").code, 0);
}

// --- /metrics and /status over TCP ---

class Visitor {
 public:
  explicit Visitor(const std::string& address) {
    const auto at = HostPort::Parse(address.substr(0, address.find('\n')));
    if (!at.ok()) return;
    const SocketAddress to = *NumericAddress(*at);
    fd_ = UniqueFd(socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(fd_.get(), to.get(), to.size()), 0);
  }
  void Say(std::string_view text) {
    (void)!send(fd_.get(), text.data(), text.size(), MSG_NOSIGNAL);
  }
  std::string Hear() {
    std::string heard;
    char buffer[4096];
    for (ssize_t count; (count = recv(fd_.get(), buffer, sizeof buffer, 0)) > 0;)
      heard.append(buffer, static_cast<size_t>(count));
    return heard;
  }

 private:
  UniqueFd fd_;
};

// The body of a page; what was refused keeps its head.
std::string Page(const std::string& address, const std::string& path,
                 const std::string& accept = "*/*") {
  Visitor visitor(address);
  visitor.Say("GET " + path + " HTTP/1.1\r\nHost: x\r\nAccept: " + accept + "\r\n\r\n");
  const std::string heard = visitor.Hear();
  return heard.starts_with("HTTP/1.1 200 ") ? heard.substr(heard.find("\r\n\r\n") + 4) : heard;
}

TEST_F(StatusOfAJob, IsServedOverHttpBesideSlowAndBrokenClients) {
  Start({"--metrics", "127.0.0.1:0"});
  const json status = Await(run, [](const json& now) { return AllBeyond(now, 3); });
  const std::string address = run.Read("outlast-runs/latest/metrics.address");
  ASSERT_EQ(address, status["metrics"].get<std::string>() + "\n");
  EXPECT_THAT(run.Read("err"), HasSubstr("outlast: metrics at http://127.0.0.1:"));
  Visitor slow(address), garbage(address);
  slow.Say("GET /metrics HT");
  garbage.Say("\x16\x03\x01\x02garbage\n\n");

  const std::string page = Page(address, "/metrics");
  const MetricsLint metrics(page, false);
  EXPECT_THAT(metrics.wrong(), IsEmpty()) << page;
  EXPECT_EQ(metrics.value("outlast_ranks{job=\"seen\",state=\"running\"}"), 4);
  EXPECT_GT(metrics.value("outlast_steps_total{job=\"seen\"}"), 3);
  const std::string open = Page(address, "/metrics", "application/openmetrics-text");
  EXPECT_THAT(MetricsLint(open, true).wrong(), IsEmpty()) << open;
  EXPECT_EQ(json::parse(Page(address, "/status"), nullptr, false)["generation"], 1);
  EXPECT_THAT(Page(address, "/nope"), StartsWith("HTTP/1.1 404 "));
  EXPECT_THAT(garbage.Hear(), StartsWith("HTTP/1.1 400 "));
  if (system("command -v promtool >/dev/null") == 0) {
    run.Write("page", page);
    EXPECT_EQ(system(("promtool check metrics <'" + run.Path("page") + "'").c_str()), 0);
  }
  Stop();
}

TEST(Metrics, OfAPortThatIsTakenAreRefusedBeforeAWorkerRuns) {
  const auto taken = ListenOn(*NumericAddress({"127.0.0.1", 0}));
  const std::string at = SocketAddress::Local(taken->get())->host_port().text();
  Launched run;
  EXPECT_EQ(run.Run({"-n", "1", "--metrics", at, "--", "touch", "ran"}), 85);
  EXPECT_THAT(run.Read("err"), HasSubstr("listen on " + at));
  EXPECT_FALSE(std::filesystem::exists(run.Path("ran")));
  EXPECT_EQ(run.Run({"-n", "1", "--metrics", "9400", "--", "true"}), 85);
}

// --- top ---

TEST_F(StatusOfAJob, IsWrittenOnceByTopWhereThereIsNoTerminal) {
  Start();
  Await(run, [](const json& status) { return AllBeyond(status, 3); });
  const Said said = Tool(run, "top");
  EXPECT_EQ(said.code, 0);
  EXPECT_THAT(said.text, StartsWith("job seen: running, generation 1"));
  EXPECT_THAT(said.text, Not(HasSubstr("\x1b")));
  Stop();
}

TEST_F(StatusOfAJob, NamesTheOwnerWhereItIsAnotherUsers) {
  if (geteuid() != 0) GTEST_SKIP() << "another user wanted";
  constexpr uid_t kNobody = 65534;
  Start();
  Await(run, [](const json& status) { return AllBeyond(status, 3); });
  Launched other;
  other.RunAs(kNobody);
  other.StartProgram({ToolPath(), "status", run.Path("outlast-runs")});
  EXPECT_EQ(other.Wait().code, 85);
  EXPECT_THAT(other.Read("err"), HasSubstr("permission is missing; it is user root's"));
  // Who may read its files is told what they say.
  std::filesystem::permissions(run.folder(), std::filesystem::perms(0755));
  other.StartProgram({ToolPath(), "status", run.Path("outlast-runs")});
  EXPECT_EQ(other.Wait().code, 0) << other.Read("err");
  EXPECT_THAT(other.Read("out"),
              HasSubstr("lives, but permission to ask it is missing, it is user root's"));
  Stop();
}

TEST_F(StatusOfAJob, IsRedrawnByTopUntilAKey) {
  Start();
  Await(run, [](const json& status) { return AllBeyond(status, 3); });
  Launched top;
  top.StartProgram({ToolPath(), "top", run.Path("outlast-runs")}, Output::kTerminal);
  top.Type("q");

  EXPECT_EQ(top.Wait().code, 0);
  const std::string drawn = top.Read("terminal");
  EXPECT_THAT(drawn, HasSubstr("\x1b[?1049h\x1b[?25l\x1b[H"));
  EXPECT_THAT(drawn, HasSubstr("\x1b[J\x1b[?25h\x1b[?1049l"));  // and the last picture stays
  EXPECT_THAT(drawn.substr(drawn.rfind("\x1b[?1049l")), HasSubstr("job seen: running"));
  Stop();
}

TEST_F(StatusOfAJob, IsRedrawnByTopUntilTheRunsEnd) {
  Start();
  Await(run, [](const json& status) { return AllBeyond(status, 3); });
  Launched top;
  top.StartProgram({ToolPath(), "top", run.Path("outlast-runs")}, Output::kTerminal);
  Stop();

  EXPECT_EQ(top.Wait().code, 0);
  EXPECT_THAT(top.Read("terminal"), HasSubstr("job seen: ended with exit code 80"));
}

}  // namespace
}  // namespace outlast::testing
