#include "launch/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <sstream>
#include <string>

#include "launch/env_tool.h"
#include "outlast/base/status.h"

namespace outlast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string RefusalOf(std::vector<std::string> arguments) {
  std::string help;
  const auto options = ParseLaunchOptions(arguments, &help);
  if (options.ok()) return "accepted";
  return std::string(MessageOf(options.status()));
}

TEST(ParseLaunchOptions, PreflightIsOnOfSeveralNodesAndOffOfOne) {
  const auto preflight = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"-n1", "--", "x"});
    std::string help;
    const auto options = ParseLaunchOptions(arguments, &help);
    return options.ok() ? options->preflight : false;
  };
  const std::vector<std::string> several = {"--nnodes", "2", "--coordinator", "a:1", "--job", "j"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), several.begin(), several.end());
    return more;
  };
  EXPECT_FALSE(preflight({}));
  EXPECT_TRUE(preflight({"--preflight", "on"}));
  EXPECT_TRUE(preflight({"--probe", "x", "--probe", "y"}));
  EXPECT_TRUE(preflight(with({})));
  EXPECT_FALSE(preflight(with({"--preflight", "off"})));
  EXPECT_THAT(RefusalOf({"-n1", "--preflight", "maybe", "x"}),
              HasSubstr("--preflight 'maybe': on or off wanted"));
  EXPECT_THAT(RefusalOf({"-n1", "--preflight", "off", "--probe", "a", "x"}),
              HasSubstr("--probe 'a' and --preflight off"));
}

TEST(ParseLaunchOptions, TakesTheCommandBehindTheDashes) {
  std::string help;
  const auto options = ParseLaunchOptions(
      {"-n", "4", "--grace", "2.5", "--max-restarts=0", "--", "sh", "-c", "exit 3"}, &help);
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->job.world, 4);
  EXPECT_EQ(options->job.grace, absl::Milliseconds(2500));
  EXPECT_EQ(options->job.max_restarts, 0);
  EXPECT_THAT(options->command, ElementsAre("sh", "-c", "exit 3"));
}

TEST(ParseLaunchOptions, TakesTheCommandAtTheFirstWordThatIsNoFlag) {
  std::string help;
  const auto options = ParseLaunchOptions({"-n", "2", "train.py", "--lr", "3", "-n", "9"}, &help);
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->job.world, 2);
  EXPECT_THAT(options->command, ElementsAre("train.py", "--lr", "3", "-n", "9"));
}

TEST(ParseLaunchOptions, ReadsListsAndRangesOfCodes) {
  std::string help;
  const auto options =
      ParseLaunchOptions({"-n1", "--no-retry", "7,9", "--retry", "128-130", "--", "x"}, &help);
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_THAT(options->job.no_retry_codes, ElementsAre(7, 9));
  EXPECT_THAT(options->job.retry_codes, ElementsAre(128, 129, 130));
}

TEST(ParseLaunchOptions, GivesRankZeroTheInputOnlyWhenItIsAloneOrAsked) {
  std::string help;
  EXPECT_TRUE(ParseLaunchOptions({"-n", "1", "x"}, &help)->stdin_to_rank_0);
  EXPECT_FALSE(ParseLaunchOptions({"-n", "2", "x"}, &help)->stdin_to_rank_0);
  EXPECT_TRUE(ParseLaunchOptions({"-n", "2", "--stdin", "0", "x"}, &help)->stdin_to_rank_0);
  EXPECT_FALSE(ParseLaunchOptions({"-n", "1", "--stdin", "none", "x"}, &help)->stdin_to_rank_0);
}

TEST(ParseLaunchOptions, NamesWhatItRefusesAndWhatItWants) {
  EXPECT_EQ(RefusalOf({"-n", "0", "x"}), "-n '0': a whole number from 1 to 4096 wanted");
  EXPECT_EQ(RefusalOf({"-n", "two", "x"}), "-n 'two': a whole number from 1 to 4096 wanted");
  EXPECT_EQ(RefusalOf({"-n", "-2", "x"}), "-n '-2': a whole number from 1 to 4096 wanted");
  EXPECT_THAT(RefusalOf({"-n", "3", "--micro-batches", "8", "x"}),
              HasSubstr("--micro-batches 8: a world of 3 ranks (3 replicas) cannot split them "
                        "evenly; world sizes that fit: none"));
  EXPECT_THAT(RefusalOf({"-n", "3", "--ranks-per-replica", "2", "x"}),
              HasSubstr("a world of 3 ranks is not made of whole replicas"));
  EXPECT_THAT(RefusalOf({"-n", "2", "--max-restarts", "-1", "x"}),
              HasSubstr("--max-restarts '-1': a whole number from 0"));
  EXPECT_EQ(RefusalOf({"-n", "2", "--grace", "-3", "x"}),
            "--grace '-3': seconds, 0 or more wanted");
  EXPECT_EQ(RefusalOf({"-n", "2", "--grace", "nan", "x"}),
            "--grace 'nan': seconds, 0 or more wanted");
  EXPECT_THAT(RefusalOf({"-n", "2", "--no-retry", "300", "x"}),
              HasSubstr("--no-retry '300': exit codes from 1 to 255"));
  EXPECT_THAT(RefusalOf({"-n", "2", "--no-retry", "9-3", "x"}), HasSubstr("--no-retry '9-3'"));
  EXPECT_EQ(RefusalOf({"-n", "2", "--frobnicate", "x"}),
            "unknown flag '--frobnicate': see outlast run --help");
  EXPECT_EQ(RefusalOf({"--master-port", "29500", "-n", "2", "x"}),
            "unknown flag '--master-port': see outlast run --help");
  EXPECT_EQ(RefusalOf({"-n", "2", "--run-dir=", "--fresh", "x"}), "--run-dir '': a value wanted");
  EXPECT_EQ(RefusalOf({"--nnodes=", "-n", "2", "x"}), "--nnodes '': a value wanted");
  EXPECT_THAT(RefusalOf({"-n", "2", "--stdin", "3", "x"}), HasSubstr("none or 0 wanted"));
  EXPECT_THAT(RefusalOf({"-n", "2", "--job", "a/b", "x"}), HasSubstr("--job 'a/b'"));
  EXPECT_THAT(RefusalOf({"-n", "2", "--job", "..", "x"}), HasSubstr("--job '..'"));
  EXPECT_THAT(RefusalOf({"-n", "2", "--job", "", "x"}), HasSubstr("--job"));
  EXPECT_THAT(RefusalOf({"--", "x"}), HasSubstr("-n is missing"));
  EXPECT_THAT(RefusalOf({"-n", "2"}), HasSubstr("no command"));
  EXPECT_THAT(RefusalOf({"-n", "2", "--"}), HasSubstr("no command"));
  EXPECT_THAT(RefusalOf({"-n", "2", "--grace"}), HasSubstr("--grace"));
}

TEST(ParseLaunchOptions, NamesAFlagThatIsGivenTwiceAndBothValues) {
  std::string help;
  const auto refused =
      ParseLaunchOptions({"-n", "1", "--grace", "5", "--grace=6\n", "--", "true"}, &help);
  EXPECT_EQ(MessageOf(refused.status()), "--grace '5', '6\\n': given 2 times, once wanted");
  EXPECT_TRUE(
      ParseLaunchOptions({"-n", "1", "--probe", "a", "--probe", "b", "--", "true"}, &help).ok());
  EXPECT_EQ(RefusalOf({"-n", "1", "--fresh", "--fresh", "--", "true"}),
            "--fresh: given 2 times, once wanted");
  EXPECT_EQ(RefusalOf({"-n", "1", "-m", "--module", "--", "true"}),
            "--module: given 2 times, once wanted");
}

TEST(ParseLaunchOptions, NestsItsDeadlinesInThoseAroundTheJob) {
  std::string help;
  const auto pod = ParseLaunchOptions({"-n", "1", "--kill-after", "60", "--", "true"}, &help);
  ASSERT_TRUE(pod.ok()) << pod.status();
  EXPECT_EQ(pod->job.stop_within, absl::Seconds(55));
  EXPECT_EQ(
      RefusalOf({"-n", "1", "--kill-after", "20", "--", "true"}),
      "--grace is 15s, and the platform kills after --kill-after 20s: a grace that is shorter "
      "by more than 5s wanted");
  EXPECT_EQ(RefusalOf({"-n", "1", "--kill-after", "30", "--stop-within", "30", "--", "true"}),
            "--stop-within is 30s, and the platform kills after --kill-after 30s: a shorter stop "
            "wanted");
  EXPECT_THAT(RefusalOf({"-n", "1", "--collective-timeout", "23", "--", "true"}),
              HasSubstr("--collective-timeout is 23s, and a lost node is known, and the others "
                        "prepared, after 23s (beat loss 3s, prepare 20s)"));
  EXPECT_TRUE(
      ParseLaunchOptions({"-n", "1", "--collective-timeout", "24", "--", "true"}, &help).ok());
}

TEST(ParseLaunchOptions, BeginsAtOnePlace) {
  std::string help;
  const auto at = [&](const std::string& text) {
    return ParseLaunchOptions({"-n", "1", "--restore-from", text, "--", "true"}, &help);
  };
  EXPECT_EQ(at("40")->start.step, 40);
  EXPECT_TRUE(at("latest")->start.is_latest());
  EXPECT_EQ(at("/tmp")->start.folder, "/tmp");
  EXPECT_EQ(RefusalOf({"-n", "1", "--restore-from", "40", "--fresh", "--", "true"}),
            "--restore-from '40' and --fresh: at most one wanted");
  EXPECT_THAT(RefusalOf({"-n", "1", "--restore-from", "newest", "--", "true"}),
              HasSubstr("--restore-from 'newest': latest, a step of the checkpoint root, or "));
}

TEST(ParseLaunchOptions, HelpsWithAnExample) {
  std::string help;
  ASSERT_TRUE(ParseLaunchOptions({"--help"}, &help).ok());
  EXPECT_THAT(help, HasSubstr("outlast run -n N [FLAGS] -- CMD"));
  EXPECT_THAT(help, HasSubstr("Example:"));
}

TEST(ResolveCommand, RunsPythonFilesUnderPython) {
  const std::string script = ::testing::TempDir() + "/outlast_options_test.py";
  fclose(fopen(script.c_str(), "w"));
  const auto resolved = ResolveCommand({script, "--lr"}, "/usr/bin:/bin");
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_EQ(resolved->program, "/usr/bin/python3");
  EXPECT_THAT(resolved->arguments, ElementsAre("python3", "-u", script, "--lr"));
}

TEST(ResolveCommand, NamesACommandThatIsMissingOrNotExecutable) {
  EXPECT_EQ(MessageOf(ResolveCommand({"no-such-command"}, "/bin").status()),
            "command 'no-such-command': not found in PATH");
  EXPECT_EQ(MessageOf(ResolveCommand({"/no/such"}, "/bin").status()),
            "command '/no/such': no such file");
  EXPECT_EQ(MessageOf(ResolveCommand({"/etc/passwd"}, "/bin").status()),
            "command '/etc/passwd': the file is not executable");
  EXPECT_THAT(MessageOf(ResolveCommand({"/etc"}, "/bin").status()), HasSubstr("not a file"));
  EXPECT_EQ(ResolveCommand({"no-such.py"}, "/bin").status().code(), absl::StatusCode::kNotFound);
}

TEST(ParseLaunchOptions, TakesTorchrunsFlags) {
  std::string help;
  const auto options =
      ParseLaunchOptions({"--nproc_per_node=2", "--nnodes", "1:1", "--rdzv_backend", "c10d",
                          "--rdzv-endpoint=h:1", "--rdzv_id", "7", "--max_restarts=5", "--log_dir",
                          "logs", "--no-python", "train.py", "--nnodes", "9"},
                         &help);
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->job.max_restarts, 5);
  EXPECT_EQ(options->run_dir, "logs");
  EXPECT_EQ(options->job.world, 2);
  EXPECT_EQ(options->interpreter, Interpreter::kNone);
  EXPECT_THAT(options->command, ElementsAre("train.py", "--nnodes", "9"));
  EXPECT_EQ(ParseLaunchOptions({"-n1", "-m", "pkg.train"}, &help)->interpreter,
            Interpreter::kModule);
  EXPECT_GE(ParseLaunchOptions({"-n", "cpu", "x"}, &help)->job.world, 1);
  EXPECT_GE(ParseLaunchOptions({"-n", "auto", "x"}, &help)->job.world, 1);
}

TEST(ParseLaunchOptions, RefusesTwoInterpreters) {
  EXPECT_EQ(RefusalOf({"-n1", "-m", "--no-python", "x"}), "-m and --no-python: at most one wanted");
}

// --- Several nodes ---

TEST(ParseLaunchOptions, WithoutNodesTheJobIsOfThisMachine) {
  std::string help;
  EXPECT_FALSE(ParseLaunchOptions({"-n2", "x"}, &help)->nodes.has_value());
  EXPECT_FALSE(ParseLaunchOptions({"-n2", "--nnodes=1", "--node-rank=0", "x"}, &help)->nodes);
}

TEST(ParseLaunchOptions, ReadsANodesPartInAJobOfSeveral) {
  std::string help;
  const auto options = ParseLaunchOptions({"--nnodes",
                                           "2:4",
                                           "--coordinator",
                                           "10.0.0.1:29400",
                                           "--job",
                                           "j7",
                                           "--node",
                                           "n1",
                                           "--advertise",
                                           "10.0.0.2",
                                           "--spares",
                                           "1",
                                           "--node-rank",
                                           "3",
                                           "--exclude-for",
                                           "60",
                                           "-n",
                                           "8",
                                           "--",
                                           "x"},
                                          &help);
  ASSERT_TRUE(options.ok()) << options.status();
  ASSERT_TRUE(options->nodes.has_value());
  EXPECT_EQ(options->nodes->count.min, 2);
  EXPECT_EQ(options->nodes->count.max, 4);
  EXPECT_EQ(options->nodes->coordinator, "10.0.0.1:29400");
  EXPECT_EQ(options->nodes->node, "n1");
  EXPECT_EQ(options->nodes->advertise, "10.0.0.2");
  EXPECT_EQ(options->nodes->spares, 1);
  EXPECT_EQ(options->nodes->exclude_for, absl::Seconds(60));
  EXPECT_EQ(options->nodes->hint, 3);
  EXPECT_EQ(options->job_id, "j7");
  EXPECT_EQ(options->job.world, 8);
}

TEST(ParseLaunchOptions, ReadsWhatCopiesOnOtherNodesMayCost) {
  std::string help;
  const auto read = [&](std::vector<std::string> more) {
    std::vector<std::string> words = {"-n1", "--nnodes", "2", "--job", "j", "--coordinator", "a:1"};
    words.insert(words.end(), more.begin(), more.end());
    words.emplace_back("x");
    return ParseLaunchOptions(words, &help).value().nodes->peers;
  };
  const PeerTierOptions usual = read({});
  EXPECT_EQ(usual.bytes_per_second, 200'000'000u);
  EXPECT_EQ(usual.every, absl::Seconds(1));
  EXPECT_EQ(usual.most_bytes, 0u);
  const PeerTierOptions given = read({"--peer-rate", "50", "--peer-every", "0.5", "--peer-memory",
                                      "4000", "--failure-domain", "rack-3"});
  EXPECT_EQ(given.bytes_per_second, 50'000'000u);
  EXPECT_EQ(given.every, absl::Milliseconds(500));
  EXPECT_EQ(given.most_bytes, 4'000'000'000u);
  EXPECT_EQ(given.domain, "rack-3");
  EXPECT_EQ(read({"--peer-rate", "0"}).bytes_per_second, 0u);
  EXPECT_EQ(RefusalOf({"-n1", "--peer-rate", "50", "x"}),
            "--peer-rate '50' without several nodes: --nnodes N or MIN:MAX with more than one "
            "wanted");
}

TEST(ParseLaunchOptions, ReadsWhatALinkIsToCarry) {
  std::string help;
  const auto read = [&](const std::string& rate) {
    return ParseLaunchOptions({"-n1", "--nnodes", "2", "--job", "j", "--coordinator", "a:1",
                               "--preflight-peer-rate", rate, "x"},
                              &help);
  };
  EXPECT_EQ(read("800")->nodes->preflight_peer_rate.floor, 800);
  EXPECT_EQ(read("800")->nodes->preflight_peer_rate.share, 0);
  EXPECT_EQ(read("40%")->nodes->preflight_peer_rate.floor, 0);
  EXPECT_EQ(read("40%")->nodes->preflight_peer_rate.share, 0.4);
  for (const char* odd : {"%", "0%", "100%", "4.5%"})
    EXPECT_THAT(
        std::string(read(odd).status().message()),
        HasSubstr(std::string("--preflight-peer-rate '") + odd + "': MB/s, or 1% to 99% wanted"));
}

TEST(ParseLaunchOptions, TakesTorchrunsNamesOfSeveralNodes) {
  std::string help;
  const auto options = ParseLaunchOptions(
      {"--nnodes=1:3", "--nproc-per-node=2", "--rdzv-id=j7", "--rdzv-backend=c10d",
       "--rdzv-endpoint=node1", "--node_rank=2", "train.py"},
      &help);
  ASSERT_TRUE(options.ok()) << options.status();
  ASSERT_TRUE(options->nodes.has_value());
  EXPECT_EQ(options->nodes->coordinator, "node1:29400");
  EXPECT_EQ(options->job_id, "j7");
  EXPECT_FALSE(options->nodes->node.empty()) << "the machine's";
  EXPECT_FALSE(options->stdin_to_rank_0);
}

TEST(ParseLaunchOptions, NamesWhatIsMissingOfAJobOfSeveralNodes) {
  EXPECT_EQ(RefusalOf({"-n1", "--nnodes", "2", "--job", "j", "x"}),
            "--nnodes '2' without --coordinator: HOST:PORT of one of the nodes wanted, the same on "
            "all");
  EXPECT_EQ(RefusalOf({"-n1", "--nnodes", "2", "--coordinator", "a:1", "x"}),
            "--nnodes '2' without --job: the job's id wanted, the same on all nodes");
  EXPECT_EQ(RefusalOf({"-n1", "--coordinator", "a:1", "x"}),
            "--coordinator 'a:1' without several nodes: --nnodes N or MIN:MAX with more than one "
            "wanted");
  EXPECT_EQ(RefusalOf({"-n1", "--nnodes=1", "--node", "a", "x"}),
            "--node 'a' without several nodes: --nnodes N or MIN:MAX with more than one wanted");
  EXPECT_EQ(RefusalOf({"-n1", "--token-file", "t", "x"}),
            "--token-file without several nodes: --nnodes N or MIN:MAX with more than one wanted");
}

TEST(ParseLaunchOptions, NamesWhatIsWrongOfAJobOfSeveralNodes) {
  const auto refusal = [](std::vector<std::string> more) {
    std::vector<std::string> words = {"-n1", "--nnodes", "2", "--job", "j", "--coordinator", "a:1"};
    words.insert(words.end(), more.begin(), more.end());
    words.emplace_back("x");
    return RefusalOf(words);
  };
  EXPECT_EQ(refusal({}), "accepted");
  EXPECT_EQ(RefusalOf({"-n1", "--nnodes", "3:2", "x"}),
            "--nnodes '3:2': N or MIN:MAX is wanted, such as 4 or 2:4");
  EXPECT_EQ(refusal({"--rdzv-endpoint", "b:1"}),
            "--coordinator 'a:1' and --rdzv-endpoint 'b:1': one of them wanted");
  EXPECT_EQ(refusal({"--standalone"}), "--standalone and --nnodes '2': one of them wanted");
  EXPECT_THAT(refusal({"--node", "a/b"}), HasSubstr("--node 'a/b': up to 64 letters"));
  EXPECT_THAT(refusal({"--spares", "-1"}), HasSubstr("--spares '-1': a whole number from 0"));
  EXPECT_THAT(refusal({"--node-rank", "x"}), HasSubstr("--node-rank 'x': a whole number from 0"));
  EXPECT_THAT(refusal({"--token-file", "/no/such"}), HasSubstr("/no/such"));
  EXPECT_THAT(refusal({"--token-file", "t", "--token-fd", "3"}),
              HasSubstr("--token-file t and --token-fd 3: one of them wanted"));
  EXPECT_EQ(RefusalOf({"-n1", "--nnodes", "2", "--job", "j", "--coordinator", "a", "x"}),
            "--coordinator 'a': HOST:PORT wanted");
  EXPECT_EQ(RefusalOf({"-n1", "--nnodes", "2", "--job", "j", "--coordinator", "a:0", "x"}),
            "--coordinator 'a:0': a port that all nodes can name, not 0, wanted");
  EXPECT_EQ(RefusalOf({"-n1", "--nnodes", "2", "--job", "j", "--coordinator", "[::]:1", "x"}),
            "--coordinator '[::]:1': an address of one of the nodes, the same on all, wanted");
  EXPECT_EQ(refusal({"--advertise", "0.0.0.0"}),
            "--advertise '0.0.0.0': an address that other nodes reach wanted");
}

TEST(ParseLaunchOptions, NamesTheTemplateWhoseQuoteDoesNotEnd) {
  EXPECT_EQ(RefusalOf({"-n1", "--template", "'./t", "x"}),
            "--template: ''./t': the quote ' does not end");
}

TEST(ResolveCommand, RunsAModuleUnderPython) {
  const auto resolved = ResolveCommand({"pkg.train", "a"}, "/usr/bin:/bin", Interpreter::kModule);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_THAT(resolved->arguments, ElementsAre("python3", "-u", "-m", "pkg.train", "a"));
}

absl::Status PlaceAllows(int world, std::map<std::string, std::string> set) {
  return CheckPlace(world, [&](const char* name) {
    const auto found = set.find(name);
    return found == set.end() ? nullptr : found->second.c_str();
  });
}

TEST(CheckPlace, RefusesAWorldInEachProcessOfAnotherLauncher) {
  const absl::Status refused = PlaceAllows(
      4, {{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}});
  EXPECT_THAT(std::string(MessageOf(refused)),
              HasSubstr("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 (Slurm step), while -n 4"));
  EXPECT_FALSE(PlaceAllows(2, {{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}).ok());
  EXPECT_FALSE(PlaceAllows(2, {{"RANK", "0"}, {"WORLD_SIZE", "4"}}).ok());
  EXPECT_FALSE(PlaceAllows(4, {{"RANK", "1"}, {"WORLD_SIZE", "4"}}).ok()) << "one of four";
}

TEST(CheckPlace, AllowsOneTaskOneselfAndAWorkerOfOurs) {
  EXPECT_TRUE(PlaceAllows(4, {}).ok());
  EXPECT_TRUE(
      PlaceAllows(4, {{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}})
          .ok());
  EXPECT_TRUE(PlaceAllows(4, {{"RANK", "0"}, {"WORLD_SIZE", "4"}}).ok());
  EXPECT_TRUE(PlaceAllows(4, {{"OUTLAST_RUN_ID", "x"}, {"RANK", "0"}, {"WORLD_SIZE", "2"}}).ok());
}

// --- Kubernetes ---

TEST(TakePod, GivesTheNodeItsPlaceUnlessAFlagContradicts) {
  const auto take = [](NodesOptions& nodes, const std::map<std::string, std::string>& set) {
    return TakePod(nodes, [&](const char* name) {
      const auto found = set.find(name);
      return found == set.end() ? nullptr : found->second.c_str();
    });
  };
  const std::map<std::string, std::string> pod = {{"JOB_COMPLETION_INDEX", "3"},
                                                  {"HOSTNAME", "gpt-3"}};
  NodesOptions nodes;
  ASSERT_TRUE(take(nodes, {}).ok());
  EXPECT_EQ(nodes.hint, -1);
  ASSERT_TRUE(take(nodes, pod).ok());
  EXPECT_EQ(nodes.hint, 3);
  ASSERT_TRUE(take(nodes, pod).ok()) << "the same by --node-rank";
  nodes.hint = 1;
  EXPECT_THAT(std::string(MessageOf(take(nodes, pod))),
              HasSubstr("--node-rank '1' and JOB_COMPLETION_INDEX=3 HOSTNAME=gpt-3"));
  NodesOptions other;
  auto trainer = pod;
  trainer["PET_NODE_RANK"] = "2";  // Kubeflow's, from the same index
  EXPECT_THAT(std::string(MessageOf(take(other, trainer))),
              HasSubstr("PET_NODE_RANK=2 and JOB_COMPLETION_INDEX=3"));
}

TEST(EnvTool, ShowsAPodAndThatItIsNoRank) {
  const std::map<std::string, std::string> pod = {{"JOB_COMPLETION_INDEX", "3"},
                                                  {"HOSTNAME", "gpt-3"}};
  const Variables variables = [&](const char* name) {
    const auto found = pod.find(name);
    return found == pod.end() ? nullptr : found->second.c_str();
  };
  std::ostringstream words, json, none;

  EXPECT_EQ(RunEnvTool({}, variables, words, none), 0);
  EXPECT_EQ(RunEnvTool({"--json"}, variables, json, none), 0);

  EXPECT_THAT(words.str(), HasSubstr("Kubernetes Job: JOB_COMPLETION_INDEX=3 HOSTNAME=gpt-3\n"));
  EXPECT_THAT(words.str(), HasSubstr("pod 3: says no rank"));
  EXPECT_THAT(json.str(), HasSubstr(R"("rank":0,"world":1)"));
  EXPECT_THAT(json.str(), HasSubstr(R"("pod":{"index":3,"node":3,)"));
  EXPECT_EQ(none.str(), "");
}

TEST(SplitWords, TakesQuotesAndBackslashesAsAShellDoes) {
  using Words = std::vector<std::string>;
  EXPECT_EQ(SplitWords(" python3  -m t\t").value(), (Words{"python3", "-m", "t"}));
  EXPECT_EQ(SplitWords(R"('a b' "c 'd'"e f\ g '' '\')").value(),
            (Words{"a b", "c 'd'e", "f g", "", "\\"}));
  EXPECT_EQ(SplitWords("").value(), Words{});
  EXPECT_EQ(SplitWords("a 'b").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace outlast
