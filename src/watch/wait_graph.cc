#include "watch/wait_graph.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>

namespace outlast {
namespace {

bool IsLive(const CommSnapshot& row) {
  return row.state == CommState::kInit || row.state == CommState::kReady;
}

const CommLook* FindComm(const RankLook& look, uint64_t id_hash) {
  for (const CommLook& comm : look.comms) {
    if (comm.row.id_hash == id_hash && IsLive(comm.row)) return &comm;
  }
  return nullptr;
}

const KeptOperation* FindOperation(const CommLook& comm, uint64_t seq) {
  for (auto operation = comm.operations.rbegin(); operation != comm.operations.rend();
       ++operation) {
    if (operation->seq == seq) return &*operation;
  }
  return nullptr;
}

// A member of one communicator.
struct Member {
  int index = 0;  // into the ranks
  const CommLook* first = nullptr;
  const CommLook* second = nullptr;

  bool knows_done() const { return second->row.done_seq != kUnknownSeq; }
  bool has_joined(uint64_t seq) const { return second->row.api_seq >= seq; }
  bool may_wait(uint64_t seq) const {
    return has_joined(seq) && (!knows_done() || second->row.done_seq < seq);
  }
  bool is_still() const {
    return first != nullptr && first->row.api_seq == second->row.api_seq &&
           first->row.done_seq == second->row.done_seq && first->row.state == second->row.state;
  }
};

class Builder {
 public:
  Builder(std::span<const RankLooks> ranks, int world, const std::vector<bool>& elsewhere)
      : ranks_(ranks), world_(world), elsewhere_(elsewhere) {
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (ranks[i].second != nullptr) index_of_rank_[ranks[i].second->rank] = static_cast<int>(i);
    }
  }

  WaitGraph Build() {
    for (const auto& [id_hash, members] : CollectComms()) JudgeComm(members);
    JudgePairs();
    return std::move(graph_);
  }

 private:
  bool is_usable(size_t index) const {
    return ranks_[index].first != nullptr && ranks_[index].second->has_data;
  }

  std::map<uint64_t, std::vector<Member>> CollectComms() const {
    std::map<uint64_t, std::vector<Member>> comms;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      if (!is_usable(i)) continue;
      for (const CommLook& comm : ranks_[i].second->comms) {
        if (!IsLive(comm.row)) continue;
        comms[comm.row.id_hash].push_back(
            {static_cast<int>(i), FindComm(*ranks_[i].first, comm.row.id_hash), &comm});
      }
    }
    return comms;
  }

  bool IsElsewhere(int rank) const {
    return rank >= 0 && static_cast<size_t>(rank) < elsewhere_.size() &&
           elsewhere_[static_cast<size_t>(rank)];
  }
  bool AnyElsewhere() const {
    return std::find(elsewhere_.begin(), elsewhere_.end(), true) != elsewhere_.end();
  }

  // Indices of the ranks that belong to the communicator, ascending; notes in `group` whether all
  // are known, and whether others live elsewhere.
  std::vector<int> MembersOf(const std::vector<Member>& rows, WaitGroup* group) const {
    std::vector<int> indices;
    const CommLook* listed = nullptr;
    for (const Member& member : rows) {
      if (member.second->members != nullptr && !member.second->members->empty())
        listed = member.second;
    }
    if (listed != nullptr) {
      for (const uint32_t rank : *listed->members) {
        group->is_elsewhere = group->is_elsewhere || IsElsewhere(static_cast<int>(rank));
        if (const auto found = index_of_rank_.find(static_cast<int>(rank));
            found != index_of_rank_.end()) {
          indices.push_back(found->second);
        }
      }
    } else if (rows.front().second->row.size == static_cast<uint32_t>(world_)) {
      for (const auto& [rank, index] : index_of_rank_) indices.push_back(index);
      group->is_elsewhere = AnyElsewhere();
    } else {
      for (const Member& member : rows) indices.push_back(member.index);
      group->is_elsewhere = AnyElsewhere() && indices.size() < rows.front().second->row.size;
    }
    std::sort(indices.begin(), indices.end());
    group->is_complete = indices.size() >= rows.front().second->row.size;
    return indices;
  }

  // The lowest operation that some member entered and is not known to have finished; nullopt:
  // nothing is pending. Seq 0 is the communicator's init.
  static std::optional<uint64_t> PendingSeq(const std::vector<Member>& rows, size_t members) {
    const auto in_init = [](const Member& member) {
      return member.second->row.state == CommState::kInit;
    };
    if (std::any_of(rows.begin(), rows.end(), in_init)) return 0;
    uint64_t lowest_api = rows.size() < members ? 0 : kUnknownSeq;
    uint64_t highest_api = 0;
    std::optional<uint64_t> pending;
    for (const Member& member : rows) {
      const uint64_t api = member.second->row.api_seq;
      lowest_api = std::min(lowest_api, api);
      highest_api = std::max(highest_api, api);
      if (member.knows_done() && api > member.second->row.done_seq) {
        pending = std::min(pending.value_or(kUnknownSeq), member.second->row.done_seq + 1);
      }
    }
    const bool unknown_done =
        std::any_of(rows.begin(), rows.end(), [](const Member& m) { return !m.knows_done(); });
    if (unknown_done && highest_api > lowest_api)
      pending = std::min(pending.value_or(kUnknownSeq), lowest_api + 1);
    return pending;
  }

  void JudgeComm(const std::vector<Member>& rows) {
    WaitGroup group;
    const std::vector<int> members = MembersOf(rows, &group);
    const std::optional<uint64_t> seq = PendingSeq(rows, members.size());
    if (!seq) return JudgeSilent(rows, std::move(group));
    group.comm = {rows.front().second->row.name, rows.front().second->row.id_hash, *seq,
                  *seq == 0 ? "init" : ""};
    group.kind = rows.front().second->row.kind;
    std::vector<const Member*> row_of(ranks_.size(), nullptr);
    for (const Member& member : rows) row_of[static_cast<size_t>(member.index)] = &member;

    for (const int index : members) {
      const Member* member = row_of[static_cast<size_t>(index)];
      if (member == nullptr || !(*seq == 0 ? true : member->has_joined(*seq))) {
        group.missing.push_back(index);
        if (!is_usable(static_cast<size_t>(index))) group.is_complete = false;
      } else if (*seq == 0 ? member->second->row.state == CommState::kInit
                           : member->may_wait(*seq)) {
        if (!member->is_still()) return;  // the operation moves: slow, not hung
        group.waiting.push_back(index);
        if (!member->knows_done()) group.is_complete = false;
      }
    }
    if (group.waiting.empty()) return;
    if (*seq > 0) Compare(rows, *seq, &group);
    const bool is_full = group.missing.empty() && !group.is_elsewhere;
    (is_full ? graph_.full : graph_.groups).push_back(std::move(group));
  }

  // A communicator that does not tell which operations are done, all of whose members here are
  // equally far: whoever sits in a wait may wait for a member elsewhere.
  void JudgeSilent(const std::vector<Member>& rows, WaitGroup group) {
    if (!group.is_elsewhere) return;
    for (const Member& member : rows) {
      const auto& sections = ranks_[static_cast<size_t>(member.index)].second->progress.sections;
      const bool waits = !sections.empty() && sections.back().phase == Phase::kCommWait;
      if (member.knows_done() || !waits || !member.is_still()) continue;
      group.comm = {rows.front().second->row.name, rows.front().second->row.id_hash,
                    member.second->row.api_seq, ""};
      group.waiting.push_back(member.index);
    }
    if (group.waiting.empty()) return;
    group.kind = rows.front().second->row.kind;
    group.is_complete = false;
    graph_.groups.push_back(std::move(group));
  }

  // --- Signatures ---

  struct Side {
    const KeptOperation* operation;
    std::vector<const Member*> members;
  };

  static std::vector<Side> SidesAt(const std::vector<Member>& rows, uint64_t seq) {
    std::vector<Side> sides;
    for (const Member& member : rows) {
      const KeptOperation* operation =
          member.has_joined(seq) ? FindOperation(*member.second, seq) : nullptr;
      if (operation == nullptr) continue;
      const auto same = std::find_if(sides.begin(), sides.end(), [&](const Side& side) {
        return Agree(side.operation->operation, operation->operation);
      });
      if (same == sides.end()) {
        sides.push_back({operation, {&member}});
      } else {
        same->members.push_back(&member);
      }
    }
    return sides;
  }

  static std::string Describe(const OperationSignature& operation) {
    std::string text;
    if (operation.known & kKnowsFunction) text += fmt::format("function {}", operation.function);
    if (operation.known & kKnowsCount) text += fmt::format(" count {}", operation.count);
    if (operation.known & kKnowsDatatype) text += fmt::format(" datatype {}", operation.datatype);
    if (operation.known & kKnowsReduction)
      text += fmt::format(" reduction {}", operation.reduction);
    if (operation.known & kKnowsRoot) text += fmt::format(" root {}", operation.root);
    return text.empty() ? "unknown operation" : text;
  }

  // Whether one side is a step ahead of the other in the same sequence: an operation was skipped,
  // added or swapped.
  static bool IsShifted(const Side& a, const Side& b, uint64_t seq) {
    const auto matches_later = [seq](const Side& ahead, const Side& behind) {
      const KeptOperation* later = FindOperation(*behind.members.front()->second, seq + 1);
      return later != nullptr && Agree(ahead.operation->operation, later->operation);
    };
    return matches_later(a, b) || matches_later(b, a);
  }

  static std::string KindOf(const Side& a, const Side& b, uint64_t seq) {
    const OperationSignature& x = a.operation->operation;
    const OperationSignature& y = b.operation->operation;
    const uint8_t known = x.known & y.known;
    if (IsShifted(a, b, seq)) return "order";
    if ((known & kKnowsFunction) && x.function != y.function) return "type";
    if ((known & kKnowsCount) && x.count != y.count) return "size";
    if ((known & kKnowsDatatype) && x.datatype != y.datatype) return "datatype";
    if ((known & kKnowsRoot) && x.root != y.root) return "root";
    return "reduction";
  }

  void Compare(const std::vector<Member>& rows, uint64_t seq, WaitGroup* group) {
    std::vector<Side> sides = SidesAt(rows, seq);
    if (!sides.empty()) {
      group->comm.op = Describe(sides.front().operation->operation);
    }
    if (sides.size() < 2) return;
    // Walk back to the first operation that differs, as far as it is kept.
    uint64_t first = seq;
    while (first > 1) {
      std::vector<Side> earlier = SidesAt(rows, first - 1);
      if (earlier.size() < 2) break;
      sides = std::move(earlier);
      --first;
    }
    std::stable_sort(sides.begin(), sides.end(), [](const Side& a, const Side& b) {
      return a.members.size() > b.members.size();
    });
    // Where more members live elsewhere, the majority may be there.
    const bool is_tie = group->is_elsewhere || sides[0].members.size() == sides[1].members.size();
    Divergence found;
    found.comm = group->comm;
    found.kind = KindOf(sides[0], sides[1], first);
    found.first_seq = first;
    found.waiting = group->waiting;
    found.detail = fmt::format("{} rank(s) with {}, {} with {}", sides[0].members.size(),
                               Describe(sides[0].operation->operation), sides[1].members.size(),
                               Describe(sides[1].operation->operation));
    for (size_t i = 0; i < sides.size(); ++i) {
      std::vector<int>& side = i == 0 && !is_tie ? found.majority : found.minority;
      for (const Member* member : sides[i].members) side.push_back(member->index);
    }
    std::sort(found.minority.begin(), found.minority.end());
    graph_.divergences.push_back(std::move(found));
  }

  // --- Sends and receives ---

  static const PairRow* FindPair(const RankLook& look, uint64_t comm, uint32_t peer) {
    for (const PairRow& pair : look.pairs) {
      if (pair.comm == comm && pair.peer == peer) return &pair;
    }
    return nullptr;
  }

  // Peers are ranks in the communicator.
  static int RankOfPeer(const CommLook* comm, uint32_t peer) {
    if (comm != nullptr && comm->members != nullptr && peer < comm->members->size())
      return static_cast<int>((*comm->members)[peer]);
    return static_cast<int>(peer);
  }

  void JudgePairs() {
    for (size_t i = 0; i < ranks_.size(); ++i) {
      if (!is_usable(i)) continue;
      for (const PairRow& mine : ranks_[i].second->pairs) JudgePair(static_cast<int>(i), mine);
    }
  }

  // Counters alone: the order of sends and receives may differ between the two sides.
  void JudgePair(int index, const PairRow& mine) {
    const RankLook& look = *ranks_[static_cast<size_t>(index)].second;
    const PairRow* before =
        FindPair(*ranks_[static_cast<size_t>(index)].first, mine.comm, mine.peer);
    if (before == nullptr || before->sends_done != mine.sends_done ||
        before->receives_done != mine.receives_done)
      return;
    const CommLook* comm = FindComm(look, mine.comm);
    const int peer = RankOfPeer(comm, mine.peer);
    const auto known = index_of_rank_.find(peer);
    if (known == index_of_rank_.end() && !IsElsewhere(peer)) return;
    const bool has_other =
        known != index_of_rank_.end() && is_usable(static_cast<size_t>(known->second));
    const PairRow* theirs =
        has_other ? FindPair(*ranks_[static_cast<size_t>(known->second)].second, mine.comm,
                             comm != nullptr ? comm->row.my_rank : static_cast<uint32_t>(look.rank))
                  : nullptr;
    const uint64_t received = theirs == nullptr ? 0 : theirs->receives_entered;
    const uint64_t sent = theirs == nullptr ? 0 : theirs->sends_entered;
    const bool waits_to_send =
        mine.sends_entered > mine.sends_done && received < mine.sends_entered;
    const bool waits_to_receive =
        mine.receives_entered > mine.receives_done && sent < mine.receives_entered;
    if (!waits_to_send && !waits_to_receive) return;
    WaitGroup group;
    group.comm = {comm == nullptr ? "" : comm->row.name, mine.comm,
                  waits_to_send ? mine.sends_entered : mine.receives_entered,
                  waits_to_send ? "send" : "receive"};
    group.waiting = {index};
    if (known != index_of_rank_.end()) group.missing = {known->second};
    group.is_elsewhere = known == index_of_rank_.end();
    group.is_pair = true;
    group.is_complete = has_other;
    graph_.groups.push_back(std::move(group));
  }

  std::span<const RankLooks> ranks_;
  int world_;
  const std::vector<bool>& elsewhere_;
  std::map<int, int> index_of_rank_;
  WaitGraph graph_;
};

}  // namespace

WaitGraph BuildWaitGraph(std::span<const RankLooks> ranks, int world,
                         const std::vector<bool>& elsewhere) {
  return Builder(ranks, world, elsewhere).Build();
}

}  // namespace outlast
