#include "watch/verdict.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "watch/wait_graph.h"

namespace outlast {
namespace {

bool IsPending(const CommLook& comm) {
  const bool live = comm.row.state == CommState::kInit || comm.row.state == CommState::kReady;
  return live && comm.row.done_seq != kUnknownSeq && comm.row.api_seq > comm.row.done_seq;
}

bool HasPendingWork(const RankLook& look) {
  return look.pace.source != LimitSource::kNone ||
         std::any_of(look.comms.begin(), look.comms.end(), IsPending);
}

// The innermost section whose phase says something about what the rank does.
const OpenSection* TellingSection(const RankLook& look) {
  const auto& sections = look.progress.sections;
  for (auto section = sections.rbegin(); section != sections.rend(); ++section) {
    if (section->phase != Phase::kUser && section->phase != Phase::kNone) return &*section;
  }
  return sections.empty() ? nullptr : &sections.back();
}

Phase TellingPhase(const RankLook& look) {
  const OpenSection* section = TellingSection(look);
  return section == nullptr ? look.progress.phase : section->phase;
}

bool HasLeft(const RankLook& look) {
  return look.has_finished || look.progress.unwinding != 0 ||
         TellingPhase(look) == Phase::kTeardown;
}

std::string SectionName(const RankLook& look) {
  if (!look.pace.section.empty()) return look.pace.section;
  const OpenSection* section = TellingSection(look);
  return section == nullptr ? "" : section->name;
}

// The class of a live rank that is not where it should be.
VerdictClass ClassOfLive(const RankLook& look) {
  if (HasLeft(look)) return VerdictClass::kRankLeftEarly;
  switch (TellingPhase(look)) {
    case Phase::kData:
      return VerdictClass::kDataLoaderStall;
    case Phase::kCheckpointSnapshot:
    case Phase::kCheckpointWrite:
    case Phase::kRestore:
      return VerdictClass::kCheckpointStall;
    case Phase::kCompile:
      return VerdictClass::kCompileSkew;
    default:
      break;
  }
  if (look.process == ProcessState::kUninterruptible) return VerdictClass::kIoStuck;
  if (TellingPhase(look) == Phase::kInit) return VerdictClass::kInitMissing;
  if (look.pace.source == LimitSource::kDeclared && look.pace.is_over())
    return VerdictClass::kSectionOverLimit;
  return VerdictClass::kStuckOutsideComm;
}

std::string_view ProcessName(ProcessState state) {
  switch (state) {
    case ProcessState::kUnknown:
      return "process unknown";
    case ProcessState::kRunning:
      return "process alive";
    case ProcessState::kUninterruptible:
      return "in uninterruptible sleep (D)";
    case ProcessState::kStopped:
      return "process stopped (T)";
    case ProcessState::kTraced:
      return "a debugger is attached";
    case ProcessState::kDead:
      return "process dead";
  }
  return "process unknown";
}

class Judge {
 public:
  Judge(std::span<const RankLooks> looks, const VerdictOptions& options)
      : options_(options), ranks_(looks.begin(), looks.end()) {
    std::erase_if(ranks_, [](const RankLooks& rank) { return rank.second == nullptr; });
    std::sort(ranks_.begin(), ranks_.end(), [](const RankLooks& a, const RankLooks& b) {
      return a.second->rank < b.second->rank;
    });
    verdict_.generation = options.generation;
    if (verdict_.generation == 0) {
      for (const RankLooks& rank : ranks_) {
        if (rank.second->has_data)
          verdict_.generation = std::max(verdict_.generation, rank.second->progress.generation);
      }
    }
    for (const RankLooks& rank : ranks_) usable_.push_back(Usable(rank));
  }

  Verdict Run() {
    if (!JudgeExpired() && !JudgeDead() && !JudgeFrozen() && !JudgeStopped()) JudgeWork();
    std::sort(verdict_.culprits.begin(), verdict_.culprits.end(),
              [](const Culprit& a, const Culprit& b) { return a.rank < b.rank; });
    return std::move(verdict_);
  }

 private:
  const RankLook& look(int index) const { return *ranks_[static_cast<size_t>(index)].second; }
  bool is_usable(int index) const { return usable_[static_cast<size_t>(index)].second != nullptr; }
  int count() const { return static_cast<int>(ranks_.size()); }
  // A process that was stopped at the first look and runs again has had no time to move yet: it
  // counts as moving.
  bool has_moved(int index) const {
    const auto& [first, second] = ranks_[static_cast<size_t>(index)];
    if (first == nullptr || second->MovedSince(*first)) return true;
    return first->process == ProcessState::kStopped && second->process != ProcessState::kStopped;
  }

  // The pair with null looks where the tables say nothing of the present: no data, an old
  // generation or incarnation, a new rank, another process in between.
  RankLooks Usable(const RankLooks& rank) {
    const RankLook& now = *rank.second;
    if (!now.has_data) return {};
    const bool is_old = now.progress.generation != verdict_.generation ||
                        (now.incarnation != 0 && now.progress.incarnation != now.incarnation);
    if (is_old) {
      ++verdict_.ignored_looks;
      return {};
    }
    if (rank.first == nullptr || !rank.first->has_data ||
        rank.first->progress.generation != now.progress.generation ||
        rank.first->progress.incarnation != now.progress.incarnation) {
      return {};
    }
    return rank;
  }

  void Say(VerdictClass verdict_class, Confidence confidence, std::string reason) {
    verdict_.verdict_class = verdict_class;
    verdict_.confidence = confidence;
    verdict_.reason = std::move(reason);
  }
  void SayNone(std::string reason) {
    Say(VerdictClass::kNone, Confidence::kLikely, std::move(reason));
  }

  void Blame(int index) {
    const RankLook& rank = look(index);
    Culprit culprit{rank.rank,          rank.slot,          rank.node,    SectionName(rank),
                    TellingPhase(rank), rank.progress.step, rank.pace.age};
    std::string line = fmt::format("rank {} (slot {}, pid {}): {}, ", rank.rank, rank.slot,
                                   rank.progress.pid, ProcessName(rank.process));
    line += culprit.section.empty() ? "outside any section"
                                    : fmt::format("in section {}", culprit.section);
    if (rank.has_data)
      line +=
          fmt::format(" for {}, step {}", absl::FormatDuration(rank.pace.age), rank.progress.step);
    if (rank.pace.source != LimitSource::kNone) {
      line += fmt::format(", {} limit {}", LimitSourceName(rank.pace.source),
                          absl::FormatDuration(rank.pace.limit));
    }
    if (rank.progress.unwinding != 0) line += ", unwinding";
    if (rank.has_finished) line += ", its work is done";
    if (rank.exit_code) line += fmt::format(", exit code {}", *rank.exit_code);
    verdict_.evidence.push_back(std::move(line));
    verdict_.culprits.push_back(std::move(culprit));
  }

  std::vector<int> RankNumbers(const std::vector<int>& indices) const {
    std::vector<int> numbers;
    numbers.reserve(indices.size());
    for (const int index : indices) numbers.push_back(look(index).rank);
    std::sort(numbers.begin(), numbers.end());
    numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
    return numbers;
  }

  static std::string Whereabouts(const Culprit& culprit) {
    return fmt::format(" {}, step {},",
                       culprit.section.empty() ? "outside any section"
                                               : fmt::format("in section {}", culprit.section),
                       culprit.step);
  }

  std::string CulpritList() const {
    std::vector<int> numbers;
    for (const Culprit& culprit : verdict_.culprits) numbers.push_back(culprit.rank);
    std::sort(numbers.begin(), numbers.end());
    return RankList(numbers);
  }

  void SayWaiting(const CommFinding& comm, const std::vector<int>& indices) {
    verdict_.comm = comm;
    verdict_.waiting = RankNumbers(indices);
    verdict_.evidence.push_back(fmt::format("ranks {} wait in operation {} of comm {}{}{}",
                                            RankList(verdict_.waiting), comm.seq, comm.name,
                                            comm.op.empty() ? "" : ": ", comm.op));
  }

  // --- Rule 1 ---

  bool JudgeExpired() {
    if (!options_.needs_expired_deadline) return false;
    for (const RankLooks& rank : ranks_) {
      if (rank.second->pace.is_over()) return false;
    }
    SayNone("no deadline has passed");
    return true;
  }

  bool JudgeDead() {
    std::vector<int> dead;
    for (int i = 0; i < count(); ++i) {
      if (look(i).process == ProcessState::kDead) dead.push_back(i);
    }
    if (dead.empty()) return false;
    const WaitGraph& graph = Graph();
    std::vector<int> awaited;
    for (const WaitGroup& group : graph.groups) {
      for (const int index : dead) {
        if (!std::count(group.missing.begin(), group.missing.end(), index)) continue;
        if (!std::count(awaited.begin(), awaited.end(), index)) awaited.push_back(index);
        if (verdict_.waiting.empty()) SayWaiting(group.comm, group.waiting);
      }
    }
    const auto ended_well = [this](int index) { return look(index).exit_code == 0; };
    // An exit with 0 is nobody's fault while no one waits: the job machine gives it its grace.
    if (awaited.empty()) std::erase_if(dead, ended_well);
    const std::vector<int>& culprits = awaited.empty() ? dead : awaited;
    if (culprits.empty()) return false;
    for (const int index : culprits) Blame(index);
    const bool all_well = std::all_of(culprits.begin(), culprits.end(), ended_well);
    const VerdictClass found = awaited.empty() ? VerdictClass::kProcessDead
                               : all_well      ? VerdictClass::kRankLeftEarly
                                               : VerdictClass::kMissingRank;
    Say(found, Confidence::kCertain, fmt::format("rank {} is dead", CulpritList()));
    return true;
  }

  bool JudgeFrozen() {
    int stopped = 0, running = 0;
    for (int i = 0; i < count(); ++i) {
      const ProcessState process = look(i).process;
      if (process == ProcessState::kTraced) {
        Say(VerdictClass::kFrozen, Confidence::kCertain,
            fmt::format("a debugger is attached to rank {}", look(i).rank));
        return true;
      }
      if (process == ProcessState::kUnknown || process == ProcessState::kDead) continue;
      ++(process == ProcessState::kStopped ? stopped : running);
    }
    // Who is stopped while others run, here or on other nodes, may well be a culprit.
    if (stopped == 0 || running > 0 || HasElsewhere()) return false;
    Say(VerdictClass::kFrozen, Confidence::kCertain, "all ranks are stopped");
    return true;
  }

  bool JudgeStopped() {
    std::vector<int> stopped;
    bool has_pending = false;
    for (int i = 0; i < count(); ++i) {
      has_pending = has_pending || HasPendingWork(look(i));
      const RankLook* before = ranks_[static_cast<size_t>(i)].first;
      if (look(i).process == ProcessState::kStopped && before != nullptr &&
          before->process == ProcessState::kStopped) {
        stopped.push_back(i);
      }
    }
    if (stopped.empty() || !has_pending) return false;
    for (const int index : stopped) Blame(index);
    std::vector<int> waiting;
    for (const auto* groups : {&Graph().groups, &Graph().full}) {
      for (const WaitGroup& group : *groups) {
        std::vector<int> others = group.waiting;
        std::erase_if(others, [&](int index) {
          return std::count(stopped.begin(), stopped.end(), index) > 0;
        });
        if (others.empty() || !waiting.empty()) continue;
        waiting = others;
        SayWaiting(group.comm, waiting);
      }
    }
    Say(VerdictClass::kStopped, Confidence::kLikely,
        fmt::format("rank {} is stopped{} while its peers run", CulpritList(),
                    verdict_.culprits.size() == 1 ? Whereabouts(verdict_.culprits.front()) : ""));
    return true;
  }

  // --- Rules 2 to 6 ---

  void JudgeWork() {
    if (std::none_of(ranks_.begin(), ranks_.end(),
                     [](const RankLooks& rank) { return HasPendingWork(*rank.second); })) {
      return SayNone("nothing is pending");
    }
    const WaitGraph& graph = Graph();
    if (!graph.divergences.empty()) return SayDesync(graph.divergences.front());
    std::vector<char> waits(ranks_.size(), 0), awaited(ranks_.size(), 0);
    for (const WaitGroup& group : graph.groups) {
      for (const int index : group.waiting) waits[static_cast<size_t>(index)] = 1;
      for (const int index : group.missing) awaited[static_cast<size_t>(index)] = 1;
    }
    std::vector<int> roots;
    for (int i = 0; i < count(); ++i) {
      if (awaited[static_cast<size_t>(i)] && !waits[static_cast<size_t>(i)]) roots.push_back(i);
    }
    const bool waits_elsewhere =
        std::any_of(graph.groups.begin(), graph.groups.end(),
                    [](const WaitGroup& group) { return group.is_elsewhere; });
    if (!graph.groups.empty() && roots.empty() && !waits_elsewhere) return SayCycle();
    if (SayRoots(roots)) return;
    if (SayOverLimit(waits)) return;
    if (roots.empty() && SayAllJoined()) return;
    if (roots.empty() && waits_elsewhere) {
      verdict_.needs_others = true;
      return SayNone("who waits here may wait for ranks of other nodes");
    }
    if (verdict_.reason.empty()) SayNone("what is past its deadline moved between the looks");
  }

  void SayDesync(const Divergence& found) {
    SayWaiting(found.comm, found.waiting);
    for (const int index : found.minority) Blame(index);
    verdict_.ambiguous = found.majority.empty();
    verdict_.kind = found.kind;
    verdict_.first_divergent_seq = found.first_seq;
    const bool is_clear = found.majority.size() >= 3 * found.minority.size();
    verdict_.evidence.push_back(fmt::format("operation {}: {}", found.first_seq, found.detail));
    Say(VerdictClass::kDesync,
        verdict_.ambiguous ? Confidence::kWeak
        : is_clear         ? Confidence::kCertain
                           : Confidence::kLikely,
        fmt::format(
            "operation {} of comm {} differs in {}: {}", found.first_seq, found.comm.name,
            found.kind,
            verdict_.ambiguous ? "a tie" : fmt::format("rank {} is the minority", CulpritList())));
  }

  // The groups that wait for one of `indices`.
  std::vector<const WaitGroup*> GroupsWaitingFor(const std::vector<int>& indices) {
    std::vector<const WaitGroup*> groups;
    for (const WaitGroup& group : Graph().groups) {
      const bool hit = std::any_of(indices.begin(), indices.end(), [&](int index) {
        return std::binary_search(group.missing.begin(), group.missing.end(), index);
      });
      if (hit) groups.push_back(&group);
    }
    return groups;
  }

  bool HasFirmWaiter(const std::vector<const WaitGroup*>& groups) const {
    for (const WaitGroup* group : groups) {
      for (const int index : group->waiting) {
        const Pace& pace = look(index).pace;
        if (pace.source == LimitSource::kDeclared && pace.is_over()) return true;
      }
    }
    return false;
  }

  bool SayRoots(const std::vector<int>& roots) {
    if (roots.empty()) return false;
    std::vector<int> guilty, unknown, spared;
    for (const int index : roots) {
      const auto is_late = [&] {
        return look(index).pace.is_past_limit() || !options_.needs_expired_deadline ||
               HasFirmWaiter(GroupsWaitingFor({index}));
      };
      if (!is_usable(index)) {
        unknown.push_back(index);
      } else if (HasLeft(look(index)) || (!has_moved(index) && is_late())) {
        guilty.push_back(index);
      } else {
        spared.push_back(index);
      }
    }
    if (!guilty.empty()) {
      SayGuilty(guilty, !unknown.empty());
      return true;
    }
    if (!spared.empty()) {
      const RankLook& rank = look(spared.front());
      const bool moved = has_moved(spared.front());
      SayNone(moved ? fmt::format("rank {} moves: slow, not hung", rank.rank)
                    : fmt::format(
                          "rank {} is within its own limit of {} ({})", rank.rank,
                          absl::FormatDuration(rank.pace.limit),
                          rank.pace.section.empty() ? "outside any section" : rank.pace.section));
      return false;
    }
    const auto groups = GroupsWaitingFor(unknown);
    SayWaiting(groups.front()->comm, groups.front()->waiting);
    verdict_.evidence.push_back(fmt::format("nothing is known of ranks {}, for which they wait",
                                            RankList(RankNumbers(unknown))));
    Say(VerdictClass::kCommStuckUnknown, Confidence::kWeak,
        "the ranks that are waited for cannot be read");
    return true;
  }

  // Of several roots the most telling class names the verdict: the enumerators are in that order.
  void SayGuilty(const std::vector<int>& guilty, bool has_unknown) {
    const auto groups = GroupsWaitingFor(guilty);
    bool is_complete = !has_unknown;
    bool in_init = false;
    for (const WaitGroup* group : groups) {
      is_complete = is_complete && group->is_complete;
      in_init = in_init || group->comm.seq == 0;
    }
    if (!groups.empty()) SayWaiting(groups.front()->comm, groups.front()->waiting);
    VerdictClass found = VerdictClass::kStuckOutsideComm;
    bool is_declared = false;
    for (const int index : guilty) {
      VerdictClass of_rank = ClassOfLive(look(index));
      if (of_rank == VerdictClass::kStuckOutsideComm && in_init)
        of_rank = VerdictClass::kInitMissing;
      found = std::min(found, of_rank);
      const Pace& pace = look(index).pace;
      is_declared = is_declared || (pace.source == LimitSource::kDeclared && pace.is_over());
      Blame(index);
    }
    const Confidence confidence = is_declared   ? Confidence::kCertain
                                  : is_complete ? Confidence::kLikely
                                                : Confidence::kWeak;
    const std::string section = verdict_.culprits.front().section;
    Say(found, confidence,
        fmt::format("rank {} is {}{}", CulpritList(),
                    section.empty() ? "outside any section" : fmt::format("in section {}", section),
                    groups.empty()
                        ? ", past its limit"
                        : fmt::format(", and ranks {} wait for it", RankList(verdict_.waiting))));
  }

  // Nobody that could be blamed is waited for: who is past a limit of its own, and waits for
  // nobody?
  bool SayOverLimit(const std::vector<char>& waits) {
    std::vector<char> in_full(ranks_.size(), 0);
    for (const WaitGroup& group : Graph().full) {
      for (const int index : group.waiting) in_full[static_cast<size_t>(index)] = 1;
    }
    std::vector<int> guilty;
    for (int i = 0; i < count(); ++i) {
      const auto at = static_cast<size_t>(i);
      const bool is_firm = look(i).pace.source == LimitSource::kDeclared;
      if (waits[at] || (in_full[at] && !is_firm) || !is_usable(i) || !look(i).pace.is_over() ||
          has_moved(i))
        continue;
      guilty.push_back(i);
    }
    if (guilty.empty()) return false;
    SayGuilty(guilty, false);
    return true;
  }

  bool SayAllJoined() {
    for (const WaitGroup& group : Graph().full) {
      const bool is_over =
          std::any_of(group.waiting.begin(), group.waiting.end(), [this](int index) {
            return look(index).pace.is_over() || !options_.needs_expired_deadline;
          });
      if (!is_over) continue;
      SayWaiting(group.comm, group.waiting);
      verdict_.evidence.push_back(
          "all members joined it with equal signatures; candidates are all of them");
      Say(VerdictClass::kCommStuckUnknown,
          group.is_complete ? Confidence::kLikely : Confidence::kWeak,
          fmt::format("operation {} of comm {} does not finish although all joined", group.comm.seq,
                      group.comm.name));
      return true;
    }
    return false;
  }

  // --- Cycles ---

  // The first group in which the rank waits.
  const WaitGroup* GroupOf(int index) {
    for (const WaitGroup& group : Graph().groups) {
      if (std::count(group.waiting.begin(), group.waiting.end(), index)) return &group;
    }
    return nullptr;
  }

  // Every awaited rank waits itself, so following the edges from anywhere ends in a cycle; the
  // lowest rank starts.
  void SayCycle() {
    std::vector<int> path;
    std::vector<const WaitGroup*> through;
    int at = count();
    for (const WaitGroup& group : Graph().groups) {
      for (const int index : group.missing) at = std::min(at, index);
    }
    while (std::find(path.begin(), path.end(), at) == path.end()) {
      path.push_back(at);
      through.push_back(GroupOf(at));
      at = through.back()->missing.front();
    }
    const auto start = std::find(path.begin(), path.end(), at) - path.begin();
    path.erase(path.begin(), path.begin() + start);
    through.erase(through.begin(), through.begin() + start);
    // Written from its lowest rank, so that the same cycle reads the same.
    const auto lowest = std::min_element(path.begin(), path.end()) - path.begin();
    std::rotate(path.begin(), path.begin() + lowest, path.end());
    std::rotate(through.begin(), through.begin() + lowest, through.end());
    SayCycleAlong(path, through);
  }

  void SayCycleAlong(const std::vector<int>& path, const std::vector<const WaitGroup*>& through) {
    for (size_t i = 0; i < path.size(); ++i) {
      const int next = look(path[(i + 1) % path.size()]).rank;
      verdict_.evidence.push_back(
          fmt::format("rank {} waits for rank {} in operation {} of comm {}", look(path[i]).rank,
                      next, through[i]->comm.seq, through[i]->comm.name));
      verdict_.cycle.push_back(look(path[i]).rank);
      if (through[i]->is_pair && verdict_.kind.empty())
        verdict_.kind = fmt::format("{}->{}", look(path[i]).rank, next);
    }
    verdict_.comm = through.front()->comm;
    verdict_.waiting = RankNumbers(path);
    bool is_complete = true;
    for (const WaitGroup* group : through) is_complete = is_complete && group->is_complete;
    for (const int index : path) Blame(index);
    const bool is_pair = !verdict_.kind.empty();
    Say(is_pair ? VerdictClass::kP2pUnmatched : VerdictClass::kCollectiveOrderDeadlock,
        is_complete ? Confidence::kLikely : Confidence::kWeak,
        is_pair
            ? fmt::format("the send or receive {} has no partner", verdict_.kind)
            : fmt::format("ranks {} wait for each other: operations were issued in opposite orders",
                          RankList(verdict_.waiting)));
  }

  const WaitGraph& Graph() {
    if (!graph_) graph_ = BuildWaitGraph(GraphInput(), options_.world, options_.elsewhere);
    return *graph_;
  }
  bool HasElsewhere() const {
    return std::find(options_.elsewhere.begin(), options_.elsewhere.end(), true) !=
           options_.elsewhere.end();
  }

  // What the graph may use: ranks whose tables count; the others stay known by number only.
  std::vector<RankLooks> GraphInput() const {
    std::vector<RankLooks> input = ranks_;
    for (size_t i = 0; i < input.size(); ++i) {
      if (usable_[i].second == nullptr) input[i].first = nullptr;
    }
    return input;
  }

  VerdictOptions options_;
  std::vector<RankLooks> ranks_;   // by rank
  std::vector<RankLooks> usable_;  // same order; null looks where not
  std::optional<WaitGraph> graph_;
  Verdict verdict_;
};

}  // namespace

bool RankLook::MovedSince(const RankLook& earlier) const {
  if (progress.incarnation != earlier.progress.incarnation || progress.MovedSince(earlier.progress))
    return true;
  if (comms.size() != earlier.comms.size()) return true;
  for (size_t i = 0; i < comms.size(); ++i) {
    const CommSnapshot& a = comms[i].row;
    const CommSnapshot& b = earlier.comms[i].row;
    const auto counters = [](const CommSnapshot& row) {
      return std::tuple(row.id_hash, row.state, row.api_seq, row.launched_seq, row.started_seq,
                        row.done_seq);
    };
    if (counters(a) != counters(b)) return true;
  }
  return false;
}

std::string_view LimitSourceName(LimitSource source) {
  switch (source) {
    case LimitSource::kNone:
      return "no";
    case LimitSource::kConfigured:
      return "configured";
    case LimitSource::kLearned:
      return "learned";
    case LimitSource::kDeclared:
      return "declared";
  }
  return "unknown";
}

std::string_view VerdictClassName(VerdictClass verdict_class) {
  switch (verdict_class) {
    case VerdictClass::kNone:
      return "none";
    case VerdictClass::kFrozen:
      return "frozen";
    case VerdictClass::kStopped:
      return "stopped";
    case VerdictClass::kProcessDead:
      return "process_dead";
    case VerdictClass::kMissingRank:
      return "missing_rank";
    case VerdictClass::kRankLeftEarly:
      return "rank_left_early";
    case VerdictClass::kDesync:
      return "desync";
    case VerdictClass::kP2pUnmatched:
      return "p2p_unmatched";
    case VerdictClass::kCollectiveOrderDeadlock:
      return "collective_order_deadlock";
    case VerdictClass::kDataLoaderStall:
      return "data_loader_stall";
    case VerdictClass::kCheckpointStall:
      return "checkpoint_stall";
    case VerdictClass::kCompileSkew:
      return "compile_skew";
    case VerdictClass::kIoStuck:
      return "io_stuck";
    case VerdictClass::kInitMissing:
      return "init_missing";
    case VerdictClass::kSectionOverLimit:
      return "section_over_limit";
    case VerdictClass::kStuckOutsideComm:
      return "stuck_outside_comm";
    case VerdictClass::kCommStuckUnknown:
      return "comm_stuck_unknown";
  }
  return "unknown";
}

std::string_view ConfidenceName(Confidence confidence) {
  switch (confidence) {
    case Confidence::kWeak:
      return "weak";
    case Confidence::kLikely:
      return "likely";
    case Confidence::kCertain:
      return "certain";
  }
  return "unknown";
}

std::string RankList(std::span<const int> ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (!text.empty()) text += ',';
    text += last == i ? fmt::format("{}", ranks[i]) : fmt::format("{}-{}", ranks[i], ranks[last]);
    i = last + 1;
  }
  return text;
}

Verdict JudgeRanks(std::span<const RankLooks> looks, const VerdictOptions& options) {
  return Judge(looks, options).Run();
}

}  // namespace outlast
