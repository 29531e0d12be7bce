#include "checkpoint/save_council.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/channel.h"
#include "base/error.h"

namespace outlast {
namespace {

constexpr uint8_t kVersion = 2;
// Two kinds of messages share the channel.
constexpr char kCouncil = 'C', kTeam = 'T';
constexpr uint32_t kMostHeld = 64;
constexpr uint32_t kMostTables = 1 << 16;
constexpr uint32_t kMostReasons = 64;
constexpr uint32_t kMostCopies = 1 << 16;
constexpr uint32_t kMostDoors = 1 << 16;
constexpr size_t kMostDecided = 256;
constexpr int64_t kMostEvery = 0xffff;
constexpr int64_t kSlowestPace = 1024;
constexpr int kMostInVain = 4, kLongestPatience = 4096;  // snapshots

void PutBool(PayloadWriter& writer, bool value) { writer.Int(static_cast<uint8_t>(value)); }
bool TakeBool(PayloadReader& reader) { return reader.Int<uint8_t>() != 0; }
void PutKey(PayloadWriter& writer, const SnapshotKey& key) {
  writer.Int(key.generation).Int(key.step);
}
SnapshotKey TakeKey(PayloadReader& reader) {
  SnapshotKey key;
  key.generation = reader.Int<uint64_t>();
  key.step = reader.Int<int64_t>();
  return key;
}
void PutHeld(PayloadWriter& writer, const std::vector<SnapshotKey>& held) {
  writer.Int(static_cast<uint32_t>(held.size()));
  for (const SnapshotKey& key : held) PutKey(writer, key);
}
void PutTry(PayloadWriter& writer, const RestoreTry& at) { writer.Int(at.round).Int(at.attempt); }
RestoreTry TakeTry(PayloadReader& reader) {
  RestoreTry at;
  at.round = reader.Int<uint32_t>();
  at.attempt = reader.Int<uint32_t>();
  return at;
}

// Reads a count that its elements may follow; over the cap nothing of the message is believed.
class Counts {
 public:
  explicit Counts(PayloadReader& reader) : reader_(reader) {}
  uint32_t Take(uint32_t most) {
    const auto count = reader_.Int<uint32_t>();
    fits_ = fits_ && count <= most;
    return fits_ ? count : 0;
  }
  bool fits() const { return fits_; }

 private:
  PayloadReader& reader_;
  bool fits_ = true;
};

std::vector<SnapshotKey> TakeHeld(PayloadReader& reader, Counts& counts) {
  std::vector<SnapshotKey> held;
  for (uint32_t left = counts.Take(kMostHeld); left > 0 && reader.ok(); --left)
    held.push_back(TakeKey(reader));
  return held;
}

void Put(PayloadWriter& writer, const TablesTold& told) {
  writer.Text(told.known).Int(static_cast<uint32_t>(told.tables.size()));
  for (const auto& [rank, table] : told.tables) writer.Int(rank).Text(table);
}
void Put(PayloadWriter& writer, const SealedTold& told) {
  PutKey(writer, told.snapshot);
  PutBool(writer, told.last);
}
void Put(PayloadWriter& writer, const SkippedTold& told) { writer.Int(told.step).Text(told.why); }
void Put(PayloadWriter& writer, const FinishAsked& asked) { PutKey(writer, asked.snapshot); }
void Put(PayloadWriter& writer, const PersistAsked& asked) {
  PutHeld(writer, asked.held);
  writer.Text(asked.reason);
}
void Put(PayloadWriter& writer, const RestoreAsked& asked) {
  PutTry(writer, asked.at);
  PutHeld(writer, asked.held);
  writer.Int(static_cast<uint32_t>(asked.copies.size()));
  for (const ReplicaName& copy : asked.copies) {
    writer.Int(copy.rank);
    PutKey(writer, copy.snapshot);
  }
}
void Put(PayloadWriter& writer, const RestoreVoted& voted) {
  PutTry(writer, voted.at);
  PutBool(writer, voted.ok);
  PutBool(writer, voted.mismatch);
  const size_t reasons = std::min<size_t>(voted.reasons.size(), kMostReasons);
  writer.Int(static_cast<uint32_t>(reasons));
  for (size_t i = 0; i < reasons; ++i) writer.Text(voted.reasons[i]);
}
void Put(PayloadWriter& writer, const AllTables& all) {
  writer.Text(all.digest).Int(all.part).Int(all.parts).Text(all.bytes);
  PutStatus(writer, all.refused);
}
void Put(PayloadWriter& writer, const StepDecided& decided) {
  writer.Int(decided.step);
  PutBool(writer, decided.common);
  PutBool(writer, decided.saved);
  writer.Text(decided.why);
}
void Put(PayloadWriter& writer, const SaveOver& over) {
  writer.Int(over.step).Text(over.checkpoint).Int(over.bytes);
  writer.Int(absl::ToInt64Nanoseconds(over.write_time));
  PutStatus(writer, over.outcome);
  PutBool(writer, over.last);
  PutBool(writer, over.final);
}
void Put(PayloadWriter& writer, const RestoreChosen& chosen) {
  PutTry(writer, chosen.at);
  PutStatus(writer, chosen.refused);
  writer.Int(static_cast<uint8_t>(chosen.source));
  PutKey(writer, chosen.snapshot);
  writer.Text(chosen.checkpoint);
}
void Put(PayloadWriter& writer, const RestoreJudged& judged) {
  PutTry(writer, judged.at);
  PutBool(writer, judged.restored);
  writer.Text(judged.mismatch);
}
void Put(PayloadWriter& writer, const StepWanted& wanted) { writer.Int(wanted.step); }
void Put(PayloadWriter& writer, const RootClaimed& claimed) {
  writer.Int(claimed.number).Text(claimed.text);
}

void Put(PayloadWriter& writer, const HeldTold& told) {
  writer.Int(told.round).Int(static_cast<uint32_t>(told.steps.size()));
  for (const int64_t step : told.steps) writer.Int(step);
  writer.Int(told.reached);
}
void Put(PayloadWriter& writer, const CommonTold& told) {
  writer.Int(told.round).Int(told.common).Int(told.passed).Int(told.every);
}
void PutDoor(PayloadWriter& writer, const ReplicaDoor& door) {
  writer.Text(door.node).Text(door.address).Text(door.domain);
}
void Put(PayloadWriter& writer, const DoorTold& told) { PutDoor(writer, told.door); }
void Put(PayloadWriter& writer, const DoorsTold& told) {
  writer.Int(static_cast<uint32_t>(told.doors.size()));
  for (const ReplicaDoor& door : told.doors) PutDoor(writer, door);
}
void Put(PayloadWriter& writer, const CopyWanted& wanted) {
  PutKey(writer, wanted.snapshot);
  PutBool(writer, wanted.keep.has_value());
  PutKey(writer, wanted.keep.value_or(SnapshotKey{}));
}
void Put(PayloadWriter& writer, const CopyTold& told) {
  PutKey(writer, told.snapshot);
  writer.Int(told.bytes);
  PutStatus(writer, told.outcome);
}
void PutPart(PayloadWriter& writer, const FetchPart& part) {
  writer.Int(part.rank).Text(part.from);
}
void Put(PayloadWriter& writer, const FetchWanted& wanted) {
  writer.Int(wanted.number);
  PutKey(writer, wanted.snapshot);
  writer.Int(static_cast<uint32_t>(wanted.parts.size()));
  for (const FetchPart& part : wanted.parts) PutPart(writer, part);
}
void Put(PayloadWriter& writer, const FetchTold& told) {
  writer.Int(told.number);
  PutBool(writer, told.bad.has_value());
  PutPart(writer, told.bad.value_or(FetchPart{}));
  PutStatus(writer, told.outcome);
}

// Overloads by what is read; the argument is filled in.
void Take(PayloadReader& reader, Counts& counts, TablesTold& told) {
  told.known = std::string(reader.Text());
  for (uint32_t left = counts.Take(kMostTables); left > 0 && reader.ok(); --left) {
    const auto rank = reader.Int<uint32_t>();
    told.tables[rank] = std::string(reader.Text());
  }
}
void Take(PayloadReader& reader, Counts&, SealedTold& told) {
  told.snapshot = TakeKey(reader);
  told.last = TakeBool(reader);
}
void Take(PayloadReader& reader, Counts&, SkippedTold& told) {
  told.step = reader.Int<int64_t>();
  told.why = std::string(reader.Text());
}
void Take(PayloadReader& reader, Counts&, FinishAsked& asked) { asked.snapshot = TakeKey(reader); }
void Take(PayloadReader& reader, Counts& counts, PersistAsked& asked) {
  asked.held = TakeHeld(reader, counts);
  asked.reason = std::string(reader.Text());
}
void Take(PayloadReader& reader, Counts& counts, RestoreAsked& asked) {
  asked.at = TakeTry(reader);
  asked.held = TakeHeld(reader, counts);
  for (uint32_t left = counts.Take(kMostCopies); left > 0 && reader.ok(); --left) {
    const auto rank = reader.Int<uint32_t>();
    asked.copies.push_back({rank, TakeKey(reader)});
  }
}
void Take(PayloadReader& reader, Counts& counts, RestoreVoted& voted) {
  voted.at = TakeTry(reader);
  voted.ok = TakeBool(reader);
  voted.mismatch = TakeBool(reader);
  for (uint32_t left = counts.Take(kMostReasons); left > 0 && reader.ok(); --left)
    voted.reasons.emplace_back(reader.Text());
}
void Take(PayloadReader& reader, Counts&, AllTables& all) {
  all.digest = std::string(reader.Text());
  all.part = reader.Int<uint32_t>();
  all.parts = reader.Int<uint32_t>();
  all.bytes = std::string(reader.Text());
  all.refused = TakeStatus(reader);
}
void Take(PayloadReader& reader, Counts&, StepDecided& decided) {
  decided.step = reader.Int<int64_t>();
  decided.common = TakeBool(reader);
  decided.saved = TakeBool(reader);
  decided.why = std::string(reader.Text());
}
void Take(PayloadReader& reader, Counts&, SaveOver& over) {
  over.step = reader.Int<int64_t>();
  over.checkpoint = std::string(reader.Text());
  over.bytes = reader.Int<uint64_t>();
  over.write_time = absl::Nanoseconds(reader.Int<int64_t>());
  over.outcome = TakeStatus(reader);
  over.last = TakeBool(reader);
  over.final = TakeBool(reader);
}
void Take(PayloadReader& reader, Counts& counts, RestoreChosen& chosen) {
  chosen.at = TakeTry(reader);
  chosen.refused = TakeStatus(reader);
  chosen.source = static_cast<RestoreSource>(reader.Int<uint8_t>());
  if (chosen.source > RestoreSource::kRemote) counts.Take(0);
  chosen.snapshot = TakeKey(reader);
  chosen.checkpoint = std::string(reader.Text());
}
void Take(PayloadReader& reader, Counts&, RestoreJudged& judged) {
  judged.at = TakeTry(reader);
  judged.restored = TakeBool(reader);
  judged.mismatch = std::string(reader.Text());
}
void Take(PayloadReader& reader, Counts&, StepWanted& wanted) {
  wanted.step = reader.Int<int64_t>();
}
void Take(PayloadReader& reader, Counts&, RootClaimed& claimed) {
  claimed.number = reader.Int<uint64_t>();
  claimed.text = std::string(reader.Text());
}

void Take(PayloadReader& reader, Counts& counts, HeldTold& told) {
  told.round = reader.Int<uint32_t>();
  for (uint32_t left = counts.Take(kMostHeld); left > 0 && reader.ok(); --left)
    told.steps.push_back(reader.Int<int64_t>());
  told.reached = reader.Int<int64_t>();
}
void Take(PayloadReader& reader, Counts& counts, CommonTold& told) {
  told.round = reader.Int<uint32_t>();
  told.common = reader.Int<int64_t>();
  told.passed = reader.Int<int64_t>();
  told.every = reader.Int<int64_t>();
  if (told.every < 1 || told.every > kMostEvery) counts.Take(0);
}

ReplicaDoor TakeDoor(PayloadReader& reader) {
  ReplicaDoor door;
  door.node = std::string(reader.Text());
  door.address = std::string(reader.Text());
  door.domain = std::string(reader.Text());
  return door;
}
void Take(PayloadReader& reader, Counts&, DoorTold& told) { told.door = TakeDoor(reader); }
void Take(PayloadReader& reader, Counts& counts, DoorsTold& told) {
  for (uint32_t left = counts.Take(kMostDoors); left > 0 && reader.ok(); --left)
    told.doors.push_back(TakeDoor(reader));
}
void Take(PayloadReader& reader, Counts&, CopyWanted& wanted) {
  wanted.snapshot = TakeKey(reader);
  const bool has_keep = TakeBool(reader);
  const SnapshotKey keep = TakeKey(reader);
  if (has_keep) wanted.keep = keep;
}
void Take(PayloadReader& reader, Counts&, CopyTold& told) {
  told.snapshot = TakeKey(reader);
  told.bytes = reader.Int<uint64_t>();
  told.outcome = TakeStatus(reader);
}
FetchPart TakePart(PayloadReader& reader) {
  FetchPart part;
  part.rank = reader.Int<uint32_t>();
  part.from = std::string(reader.Text());
  return part;
}
void Take(PayloadReader& reader, Counts& counts, FetchWanted& wanted) {
  wanted.number = reader.Int<uint64_t>();
  wanted.snapshot = TakeKey(reader);
  for (uint32_t left = counts.Take(kMostCopies); left > 0 && reader.ok(); --left)
    wanted.parts.push_back(TakePart(reader));
}
void Take(PayloadReader& reader, Counts&, FetchTold& told) {
  told.number = reader.Int<uint64_t>();
  const bool has_bad = TakeBool(reader);
  FetchPart bad = TakePart(reader);
  if (has_bad) told.bad = std::move(bad);
  told.outcome = TakeStatus(reader);
}

template <size_t kIndex = 0>
std::optional<CouncilMessage> TakeKind(size_t kind, PayloadReader& reader, Counts& counts) {
  if constexpr (kIndex < std::variant_size_v<CouncilMessage>) {
    if (kind != kIndex) return TakeKind<kIndex + 1>(kind, reader, counts);
    std::variant_alternative_t<kIndex, CouncilMessage> message;
    Take(reader, counts, message);
    return CouncilMessage(std::move(message));
  } else {
    return std::nullopt;
  }
}

// A checkpoint's name becomes a path.
bool HasSoundName(const CouncilMessage& message) {
  const std::string* name = nullptr;
  if (const auto* over = std::get_if<SaveOver>(&message)) name = &over->checkpoint;
  if (const auto* chosen = std::get_if<RestoreChosen>(&message)) name = &chosen->checkpoint;
  if (name == nullptr || name->empty()) return true;
  std::string_view plain = *name;
  if (std::holds_alternative<RestoreChosen>(message) && plain.starts_with(kElsewhere))
    plain.remove_prefix(kElsewhere.size());
  return ParseCheckpointName(plain).has_value();
}

}  // namespace

std::string Encode(const CouncilMessage& message) {
  PayloadWriter writer;
  writer.Int(kVersion).Int(static_cast<uint8_t>(message.index()));
  std::visit([&](const auto& one) { Put(writer, one); }, message);
  return writer.bytes();
}

absl::StatusOr<CouncilMessage> DecodeCouncilMessage(std::string_view bytes) {
  PayloadReader reader(bytes);
  const auto version = reader.Int<uint8_t>();
  if (reader.ok() && version != kVersion) {
    return Error(absl::StatusCode::kUnimplemented,
                 "a message between agents about saves: version {}, this agent speaks {}", version,
                 kVersion);
  }
  const auto kind = reader.Int<uint8_t>();
  Counts counts(reader);
  std::optional<CouncilMessage> message = TakeKind(kind, reader, counts);
  if (!message || !reader.ok() || !counts.fits() || !reader.rest().empty() ||
      !HasSoundName(*message)) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "a message between agents about saves: kind {} in {} bytes is cut or malformed",
                 kind, bytes.size());
  }
  return *std::move(message);
}

// --- What is decided

std::optional<SnapshotKey> NewestCommon(
    const std::map<std::string, std::vector<SnapshotKey>>& held_by_node) {
  std::optional<SnapshotKey> newest;
  if (held_by_node.empty()) return newest;
  for (const SnapshotKey& key : held_by_node.begin()->second) {
    const bool all_have_it = std::ranges::all_of(held_by_node, [&](const auto& node) {
      return std::ranges::find(node.second, key) != node.second.end();
    });
    if (all_have_it && (!newest || key > *newest)) newest = key;
  }
  return newest;
}

bool SealTally::is_decided(int64_t step) const {
  return step <= forgotten_ || decided_.contains(step);
}

void SealTally::Decide(int64_t step) {
  open_.erase(step);
  decided_.insert(step);
  if (decided_.size() <= kMostDecided) return;
  forgotten_ = *decided_.begin();
  decided_.erase(decided_.begin());
}

std::vector<SealTally::Verdict> SealTally::Sealed(const std::string& node, const SealedTold& told) {
  const int64_t step = told.snapshot.step;
  std::vector<Verdict> verdicts;
  if (is_decided(step) || !nodes_.contains(node)) return verdicts;
  Open& open = open_[step];
  const bool is_first = open.nodes.empty();
  // One step of two generations is not one instant.
  if (!is_first && open.sealed.snapshot != told.snapshot)
    return Skipped(step, "its ranks sealed it in different generations");
  const bool last = open.sealed.last || told.last;
  open.sealed = told;
  open.sealed.last = last;
  open.nodes.insert(node);
  if (open.nodes.size() < nodes_.size()) return verdicts;
  const SealedTold sealed = open.sealed;
  while (!open_.empty() && open_.begin()->first < step) {
    const int64_t older = open_.begin()->first;
    Decide(older);
    verdicts.push_back({older, false, {}, "a newer step was complete first"});
  }
  Decide(step);
  verdicts.push_back({step, true, sealed, ""});
  return verdicts;
}

std::vector<SealTally::Verdict> SealTally::Skipped(int64_t step, const std::string& why) {
  if (is_decided(step)) return {};
  Decide(step);
  return {{step, false, {}, why}};
}

HeldTold HeldByNode(std::span<const HeldSteps> ranks, int64_t from) {
  HeldTold told;
  if (ranks.empty()) return told;
  told.reached = ranks.front().newest();
  for (const HeldSteps& held : ranks) told.reached = std::min(told.reached, held.newest());
  for (const int64_t step : ranks.front().step) {
    if (step == kNoStep || step < from) continue;
    if (std::ranges::all_of(ranks, [&](const HeldSteps& held) { return held.holds(step); }))
      told.steps.push_back(step);
  }
  std::ranges::sort(told.steps);
  return told;
}

HeldTally::HeldTally(const std::set<std::string>& nodes, int64_t common) : common_(common) {
  for (const std::string& node : nodes) nodes_.try_emplace(node);
}

bool HeldTally::Told(const std::string& node, const HeldTold& told) {
  const auto found = nodes_.find(node);
  if (found == nodes_.end()) return false;
  const bool is_news = told.reached > found->second.reached;
  found->second = told;
  for (const int64_t step : told.steps) {
    if (std::ranges::all_of(nodes_, [&](const auto& one) {
          return std::ranges::find(one.second.steps, step) != one.second.steps.end();
        }))
      common_ = std::max(common_, step);
  }
  return is_news;
}

// A step may still become common as long as nobody has passed it without it.
int64_t HeldTally::passed() const {
  int64_t reached = kNoStep, open = std::numeric_limits<int64_t>::max();
  for (const auto& [node, told] : nodes_) {
    reached = std::max(reached, told.reached);
    for (const int64_t step : told.steps) {
      const bool may_come = std::ranges::all_of(nodes_, [&](const auto& one) {
        return one.second.reached < step ||
               std::ranges::find(one.second.steps, step) != one.second.steps.end();
      });
      if (step > common_ && may_come) open = std::min(open, step);
    }
  }
  return std::min(open, reached + 1);
}

void MemoryPace::OnSeal() {
  if (++in_vain_ <= kMostInVain) return;
  in_vain_ = good_ = 0;
  every_ = std::min(2 * every_, kSlowestPace);
  patience_ = std::min(2 * patience_, kLongestPatience);
}

void MemoryPace::OnCommon() {
  in_vain_ = 0;
  if (every_ == 1 || ++good_ < patience_) return;
  good_ = 0;
  every_ /= 2;
}

// --- How it is said

SaveCouncil::SaveCouncil(EventLoop& loop, Peers& peers, Ears ears)
    : loop_(loop), peers_(peers), ears_(std::move(ears)) {
  peers_.Listen(kPeerSaves,
                {.on_message =
                     [this, alive = alive_](const std::string& node, const std::string& bytes) {
                       if (*alive && is_open()) Hear(node, bytes);
                     },
                 .on_up =
                     [this, alive = alive_](const std::string& node) {
                       if (!*alive || !is_open()) return;
                       if (node == lead_) {
                         const auto again = unanswered_;
                         for (const auto& [topic, said] : again) Send(lead_, said);
                       }
                       ears_.on_up(node);
                     },
                 .on_down =
                     [this, alive = alive_](const std::string& node, const std::string& why) {
                       if (*alive && is_open()) ears_.on_lost(node, why);
                     }});
}

SaveCouncil::~SaveCouncil() {
  *alive_ = false;
  peers_.Listen(kPeerSaves, {});
}

void SaveCouncil::Enter(std::string self, std::string lead, std::set<std::string> nodes) {
  self_ = std::move(self);
  lead_ = std::move(lead);
  nodes_ = std::move(nodes);
  unanswered_.clear();
  ++entered_;
}

void SaveCouncil::Leave() {
  nodes_.clear();
  unanswered_.clear();
}

void SaveCouncil::TellLead(const std::string& topic, const CouncilMessage& message) {
  if (!is_open()) return;
  std::string bytes = kCouncil + Encode(message);
  if (!topic.empty() && self_ != lead_) unanswered_[topic] = bytes;
  Send(lead_, bytes);
}

void SaveCouncil::Tell(const std::string& node, const CouncilMessage& message) {
  if (is_open()) Send(node, kCouncil + Encode(message));
}

void SaveCouncil::TellAll(const CouncilMessage& message) {
  const std::string bytes = kCouncil + Encode(message);
  for (const std::string& node : nodes_) Send(node, bytes);
}

void SaveCouncil::TellTeam(const std::string& node, const SaveTeamMessage& message) {
  if (is_open()) Send(node, kTeam + Encode(message));
}

void SaveCouncil::Send(const std::string& node, const std::string& bytes) {
  if (node == self_) {
    loop_.Post([this, alive = alive_, entered = entered_, bytes] {
      if (*alive && is_open() && entered == entered_) Hear(self_, bytes);
    });
    return;
  }
  // A lead or a follower that is gone: its loss ends the generation.
  if (!peers_.Send(node, kPeerSaves, bytes).ok()) ++refused_;
}

void SaveCouncil::Hear(const std::string& node, std::string_view bytes) {
  const char kind = bytes.empty() ? '\0' : bytes.front();
  if (!bytes.empty()) bytes.remove_prefix(1);
  if (kind == kTeam) {
    if (auto message = DecodeSaveTeamMessage(bytes); message.ok())
      return ears_.on_team(node, *message);
  } else if (kind == kCouncil) {
    if (auto message = DecodeCouncilMessage(bytes); message.ok())
      return ears_.on_message(node, *message);
  }
  ++refused_;
}

}  // namespace outlast
