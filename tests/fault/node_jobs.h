// Jobs of several nodes as tests start them: real agents, each at an address of its own.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "launch/worker_environment.h"
#include "tests/fault/launched.h"
#include "tests/support/node_log.h"
#include "tests/support/piped_process.h"
#include "tests/support/temp_folder.h"

namespace outlast::testing {

namespace fs = std::filesystem;

inline absl::Duration Within(int seconds) { return absl::Seconds(seconds) * TimeFactor(); }

class Nodes : public ::testing::Test {
 protected:
  Nodes() : ports_("127.0.0.1") {
    // Held, so that nobody else gets it; the coordinator may listen there all the same.
    coordinator_ = "127.0.0.1:" + std::to_string(ports_.Of(1).value());
  }
  // What stands before the command of node n<k>, or of the coordinator, 0: where it runs.
  virtual std::vector<std::string> Place(int) const { return {}; }
  // The program that the coordinator (0) or node n<k> runs.
  virtual std::string Program(int) const { return BuildFolder() / "outlast"; }
  // Of node n<k>.
  virtual std::string Host(int k) const { return "127.0.0." + std::to_string(k); }
  ~Nodes() override {
    agents_.clear();
    lead_.reset();
  }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  std::string Read(const std::string& name) const {
    std::ifstream file(Path(name));
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void WriteToken(const std::string& name, char digit) const {
    std::ofstream(Path(name)) << std::string(64, digit);
    fs::permissions(Path(name), fs::perms::owner_read | fs::perms::owner_write);
  }
  std::vector<std::string> Trainer() const {
    return {BuildFolder() / "outlast_node_trainer", Path("log"), Path("until")};
  }

  // Node n<k> at 127.0.0.<k>, so that node n1 leads where no coordinator was started.
  PipedProcess& Start(int k, const std::string& nodes, const std::vector<std::string>& flags,
                      const std::vector<std::string>& command) {
    const std::string number = std::to_string(k);
    std::map<std::string, std::string> values = {{"--nnodes", nodes},
                                                 {"--coordinator", coordinator_},
                                                 {"--job", "job"},
                                                 {"--node", "n" + number},
                                                 {"--advertise", Host(k)},
                                                 {"--node-rank", number},
                                                 {"--run-dir", Path("runs")},
                                                 {"--last-call", "0.5"},
                                                 {"--grace", "3"},
                                                 {"--preflight", "off"},
                                                 {"-n", "2"}};
    for (size_t i = 0; i + 1 < flags.size(); i += 2) values[flags[i]] = flags[i + 1];
    for (const auto& [flag, value] : all_flags_) values[flag] = value;
    std::vector<std::string> words = Place(k);
    words.insert(words.end(), {Program(k), "run"});
    for (const auto& [flag, value] : values) words.insert(words.end(), {flag, value});
    words.emplace_back("--");
    words.insert(words.end(), command.begin(), command.end());
    agents_[k] = std::make_unique<PipedProcess>(words);
    return *agents_[k];
  }
  PipedProcess& StartTrainer(int k, const std::string& nodes,
                             const std::vector<std::string>& flags = {}) {
    return Start(k, nodes, flags, Trainer());
  }
  void LaunchCoordinator(const std::string& nodes) {
    std::map<std::string, std::string> values = {
        {"--job", "job"}, {"--journal", Path("journal")}, {"--nnodes", nodes},
        {"-n", "2"},      {"--listen", coordinator_},     {"--last-call", "0.5"}};
    for (const auto& [flag, value] : all_flags_) values[flag] = value;
    std::vector<std::string> words = Place(0);
    words.insert(words.end(), {Program(0), "coordinator"});
    for (const auto& [flag, value] : values) words.insert(words.end(), {flag, value});
    lead_ = std::make_unique<PipedProcess>(words);
  }
  void StartCoordinator(const std::string& nodes) {
    LaunchCoordinator(nodes);
    ASSERT_NE(lead_->LineWith("coordinator of job job at ", Within(10)), "") << lead_->seen();
  }
  void EndTraining() const { std::ofstream(Path("until")) << "now\n"; }

  std::vector<Round> Rounds() const { return ReadRounds(Path("log")); }
  // A probe that does not end, and has a helper in a session of its own: its pid is in Path("pid").
  std::string ProbeWithHelper() const {
    return "setsid sh -c 'echo $$ >" + Path("pid.new") + "; exec sleep 600' & while [ ! -s " +
           Path("pid.new") + " ]; do sleep 0.01; done; mv " + Path("pid.new") + " " + Path("pid") +
           "; wait";
  }
  // Waits until the log says so.
  bool Comes(const std::function<bool(const std::vector<Round>&)>& what, int seconds = 40) const {
    const absl::Duration deadline = Clock::Real().Uptime() + Within(seconds);
    while (!what(Rounds())) {
      if (Clock::Real().Uptime() > deadline) return false;
      Clock::Real().SleepFor(absl::Milliseconds(5));
    }
    return true;
  }
  // All `world` ranks have gone through `round` of a generation from `first` on.
  bool AllTrain(int world, uint64_t first = 1, int64_t round = 20, int seconds = 40) {
    return Comes(
        [&](const std::vector<Round>& rounds) {
          std::map<uint64_t, std::set<int>> ranks;
          for (const Round& one : rounds) {
            if (one.generation < first || one.round < round || one.world != world) continue;
            ranks[one.generation].insert(one.rank);
          }
          for (const auto& [generation, seen] : ranks) {
            if (static_cast<int>(seen.size()) == world) return true;
          }
          return false;
        },
        seconds);
  }
  // By rank, of the newest generation that it was seen in.
  std::map<int, pid_t> Pids() const {
    std::map<int, std::pair<uint64_t, pid_t>> newest;
    for (const Round& one : Rounds()) {
      auto& known = newest[one.rank];
      known = std::max(known, {one.generation, one.pid});
    }
    std::map<int, pid_t> pids;
    for (const auto& [rank, known] : newest) pids[rank] = known.second;
    return pids;
  }
  nlohmann::json Report(int k) const {
    return nlohmann::json::parse(Read("runs/latest-n" + std::to_string(k) + "/report.json"),
                                 nullptr, false);
  }
  std::string Seen() const {
    std::string all;
    for (const auto& [k, agent] : agents_)
      all += "--- n" + std::to_string(k) + "\n" + agent->seen();
    return all + (lead_ != nullptr ? "--- coordinator\n" + lead_->seen() : "");
  }
  void EndsWith(int k, int code, int seconds = 40) {
    EXPECT_EQ(agents_.at(k)->Wait(Within(seconds)), code) << "n" << k << "\n" << Seen();
  }

  const TempFolder temp_;
  const std::string folder_ = temp_.path();
  MasterPorts ports_;
  std::string coordinator_;
  std::map<std::string, std::string> all_flags_;  // of agents and coordinator alike
  std::unique_ptr<PipedProcess> lead_;            // a coordinator of its own
  std::map<int, std::unique_ptr<PipedProcess>> agents_;
};

// The trainer knows its state of each step, and checks what it restores.
class NodesThatSave : public Nodes {
 protected:
  std::vector<std::string> Toy(int steps) const {
    return {BuildFolder() / "outlast_toy_trainer",
            "--steps",
            std::to_string(steps),
            "--step-ms",
            "10",
            "--ckpt-dir",
            Path("root"),
            "--ckpt-every",
            "10",
            "--log",
            Path("log")};
  }
  void StartToys(const std::vector<int>& nodes, int steps,
                 const std::vector<std::string>& flags = {}) {
    for (const int k : nodes) Start(k, "2", flags, Toy(steps));
  }
  bool HasLine(const std::string& file, const std::string& part, int seconds = 60) const {
    const absl::Duration deadline = Clock::Real().Uptime() + Within(seconds);
    while (Read(file).find(part) == std::string::npos) {
      if (Clock::Real().Uptime() > deadline) return false;
      Clock::Real().SleepFor(absl::Milliseconds(5));
    }
    return true;
  }
  // The manifest of `step`; null: there is none.
  nlohmann::json Manifest(int step) const {
    for (const auto& entry : fs::directory_iterator(Path("root"))) {
      const std::string name = entry.path().filename();
      if (!name.starts_with("step-") || std::stoi(name.substr(5)) != step) continue;
      std::ifstream file(entry.path() / "MANIFEST.json");
      if (file) return nlohmann::json::parse(file, nullptr, false);
    }
    return nullptr;
  }
  static std::string PidOf(const std::string& events, int rank) {
    std::istringstream lines(events);
    std::string pid;
    for (std::string line; std::getline(lines, line);) {
      const auto event = nlohmann::json::parse(line, nullptr, false);
      if (event.value("event", "") == "worker_started" && event.value("rank", -1) == rank)
        pid = std::to_string(event.value("pid", 0));
    }
    return pid;
  }
};

}  // namespace outlast::testing
