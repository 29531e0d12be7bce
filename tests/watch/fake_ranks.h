// Ranks as the watch sees them, made by hand.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "outlast/blackbox/segment.h"
#include "watch/verdict.h"

namespace outlast {

constexpr int64_t kSecondNs = 1'000'000'000;

inline uint32_t SectionId(std::string_view name) {
  const uint64_t hash = Fnv1a64(name);
  return static_cast<uint32_t>(hash ^ (hash >> 32)) | 1;
}

inline OperationSignature AllReduce(uint64_t count, uint8_t datatype = 7, uint8_t reduction = 0) {
  return {.function = 1,
          .datatype = datatype,
          .reduction = reduction,
          .known = kKnowsFunction | kKnowsDatatype | kKnowsReduction | kKnowsCount,
          .count = count};
}

// A comm row: `entered` operations, `done` of them finished; all of them AllReduce(1024) unless
// said otherwise.
inline CommLook Comm(std::string_view name, std::vector<uint32_t> members, uint64_t entered,
                     uint64_t done, CommKind kind = CommKind::kWorld) {
  CommLook comm;
  comm.row.id_hash = Fnv1a64(name);
  comm.row.size = static_cast<uint32_t>(members.size());
  comm.row.kind = kind;
  comm.row.state = CommState::kReady;
  comm.row.api_seq = entered;
  comm.row.done_seq = done;
  comm.row.name = name;
  for (uint64_t seq = entered > 63 ? entered - 63 : 1; seq <= entered; ++seq) {
    comm.operations.push_back({seq, AllReduce(1024), Signature(AllReduce(1024))});
  }
  comm.members = std::make_shared<const std::vector<uint32_t>>(std::move(members));
  return comm;
}

inline void SetOperation(CommLook* comm, uint64_t seq, const OperationSignature& operation) {
  for (KeptOperation& kept : comm->operations) {
    if (kept.seq == seq) kept = {seq, operation, Signature(operation)};
  }
}

inline std::vector<uint32_t> Ranks(uint32_t count) {
  std::vector<uint32_t> ranks(count);
  for (uint32_t i = 0; i < count; ++i) ranks[i] = i;
  return ranks;
}

// A healthy process in generation 1 at step 17, outside any section, idle.
inline RankLook Rank(int rank) {
  RankLook look;
  look.rank = rank;
  look.slot = rank;
  look.has_data = true;
  look.process = ProcessState::kRunning;
  look.progress.generation = 1;
  look.progress.incarnation = 1;
  look.progress.pid = 1000 + rank;
  look.progress.rank = static_cast<uint32_t>(rank);
  look.progress.step = 17;
  look.pace = {absl::Seconds(60), absl::Seconds(10), LimitSource::kNone, ""};
  return look;
}

// In a section, past its learned limit of 10 s for 60 s.
inline RankLook In(RankLook look, Phase phase, std::string_view name = "") {
  OpenSection section;
  section.phase = phase;
  section.name = name.empty() ? PhaseName(phase) : name;
  section.id = SectionId(section.name);
  section.opened = look.progress.sections_opened + 1;
  look.progress.sections_opened = section.opened;
  look.progress.phase = phase;
  look.progress.depth = static_cast<uint32_t>(look.progress.sections.size() + 1);
  look.pace = {absl::Seconds(60), absl::Seconds(10), LimitSource::kLearned, section.name};
  look.progress.sections.push_back(std::move(section));
  return look;
}

inline RankLook With(RankLook look, CommLook comm) {
  look.comms.push_back(std::move(comm));
  return look;
}

// Waits in operation `seq` of a comm, past its deadline.
inline RankLook WaitingIn(RankLook look, CommLook comm) {
  look = In(std::move(look), Phase::kCommWait);
  return With(std::move(look), std::move(comm));
}

inline RankLook Within(RankLook look, absl::Duration limit, LimitSource source) {
  look.pace.limit = limit;
  look.pace.source = source;
  return look;
}

// Looks that stay alive, and pairs of them.
class Looks {
 public:
  Looks() = default;
  // Moves only: the pairs point into what is kept.
  Looks(Looks&&) = default;
  Looks& operator=(Looks&&) = default;

  // The rank did not move between the looks.
  void Add(const RankLook& look) { Add(look, look); }
  void Add(const RankLook& first, const RankLook& second) {
    kept_.push_back(first);
    const RankLook* earlier = &kept_.back();
    kept_.push_back(second);
    pairs_.push_back({earlier, &kept_.back()});
  }
  void AddNew(const RankLook& second) {
    kept_.push_back(second);
    pairs_.push_back({nullptr, &kept_.back()});
  }

  std::vector<RankLooks>& pairs() { return pairs_; }
  Verdict Judge() const { return JudgeRanks(pairs_, {.world = static_cast<int>(pairs_.size())}); }

 private:
  std::deque<RankLook> kept_;
  std::vector<RankLooks> pairs_;
};

inline std::vector<int> CulpritRanks(const Verdict& verdict) {
  std::vector<int> ranks;
  for (const Culprit& culprit : verdict.culprits) ranks.push_back(culprit.rank);
  return ranks;
}

}  // namespace outlast
