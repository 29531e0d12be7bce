#include "watch/look_wire.h"

#include <cstddef>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "base/error.h"
#include "elastic/codec.h"

namespace outlast {
namespace {

// What cannot be told field by field.
struct WireComm {
  CommSnapshot row;
  std::vector<KeptOperation> operations;
  std::vector<uint32_t> members;
};
struct WireLook {
  RankLook look;
  bool has_exit_code = false;
  int exit_code = 0;
  std::vector<WireComm> comms;
};
struct WireLooks {
  LookAsked asked;
  std::vector<WireLook> looks;
};

bool HasPending(const CommSnapshot& row) {
  return row.state == CommState::kInit || row.done_seq == kUnknownSeq || row.api_seq > row.done_seq;
}

WireLooks ToWire(const LooksTold& told) {
  WireLooks wire{told.asked, {}};
  for (const RankLook& look : told.looks) {
    WireLook& to = wire.looks.emplace_back();
    to.look = look;
    to.has_exit_code = look.exit_code.has_value();
    to.exit_code = look.exit_code.value_or(0);
    for (const CommLook& comm : look.comms) {
      WireComm& one = to.comms.emplace_back(WireComm{comm.row, {}, {}});
      if (!HasPending(comm.row)) continue;
      one.operations = comm.operations;
      if (comm.members != nullptr) one.members = *comm.members;
    }
  }
  return wire;
}

LooksTold FromWire(WireLooks wire) {
  LooksTold told{wire.asked, {}};
  for (WireLook& from : wire.looks) {
    RankLook& look = told.looks.emplace_back(std::move(from.look));
    if (from.has_exit_code) look.exit_code = from.exit_code;
    for (WireComm& comm : from.comms) {
      look.comms.push_back(
          {std::move(comm.row), std::move(comm.operations),
           std::make_shared<const std::vector<uint32_t>>(std::move(comm.members))});
    }
  }
  return told;
}

// A duration without an end is the longest one on the wire.
void MendInfinite(absl::Duration& limit) {
  if (limit >= absl::Nanoseconds(std::numeric_limits<int64_t>::max()))
    limit = absl::InfiniteDuration();
}

bool IsSound(RankLook& look) {
  MendInfinite(look.pace.limit);
  bool sound = look.rank >= 0 && look.process <= ProcessState::kDead &&
               look.pace.source <= LimitSource::kDeclared &&
               static_cast<size_t>(look.progress.phase) < kPhaseCount;
  for (const OpenSection& section : look.progress.sections)
    sound = sound && static_cast<size_t>(section.phase) < kPhaseCount;
  return sound;
}

bool IsSound(const Verdict& verdict) {
  bool sound = verdict.verdict_class <= VerdictClass::kCommStuckUnknown &&
               verdict.confidence <= Confidence::kCertain;
  for (const Culprit& culprit : verdict.culprits)
    sound = sound && static_cast<size_t>(culprit.phase) < kPhaseCount;
  return sound;
}

}  // namespace

// --- Fields, by their declaration's order ---

template <typename Codec>
void Fields(Codec& codec, StallTold& told) {
  codec(told.generation);
}
template <typename Codec>
void Fields(Codec& codec, LookAsked& asked) {
  codec(asked.generation, asked.number, asked.look);
}
template <typename Codec>
void Fields(Codec& codec, OpenSection& section) {
  codec(section.id, section.phase, section.name, section.age_ns, section.limit_ns,
        section.limit_is_declared, section.progress, section.opened);
}
template <typename Codec>
void Fields(Codec& codec, ProgressSnapshot& progress) {
  codec(progress.generation, progress.incarnation, progress.pid, progress.step,
        progress.sections_opened, progress.unwinding, progress.last_error, progress.depth,
        progress.phase, progress.sections);
}
template <typename Codec>
void Fields(Codec& codec, CommSnapshot& row) {
  codec(row.id_hash, row.size, row.my_rank, row.kind, row.state, row.async_error, row.api_seq,
        row.launched_seq, row.started_seq, row.done_seq, row.name);
}
template <typename Codec>
void Fields(Codec& codec, OperationSignature& operation) {
  codec(operation.function, operation.datatype, operation.reduction, operation.known,
        operation.root, operation.count);
}
template <typename Codec>
void Fields(Codec& codec, KeptOperation& kept) {
  codec(kept.seq, kept.operation, kept.signature);
}
template <typename Codec>
void Fields(Codec& codec, PairRow& row) {
  codec(row.comm, row.peer, row.sends_entered, row.sends_done, row.receives_entered,
        row.receives_done);
}
template <typename Codec>
void Fields(Codec& codec, Pace& pace) {
  codec(pace.age, pace.limit, pace.source, pace.section);
}
namespace {
template <typename Codec>
void Fields(Codec& codec, WireComm& comm) {
  codec(comm.row, comm.operations, comm.members);
}
template <typename Codec>
void Fields(Codec& codec, WireLook& wire) {
  RankLook& look = wire.look;
  codec(look.rank, look.slot, look.has_data, look.incarnation, look.process, look.has_finished,
        look.progress, look.pairs, look.pace, wire.has_exit_code, wire.exit_code, wire.comms);
}
template <typename Codec>
void Fields(Codec& codec, WireLooks& wire) {
  codec(wire.asked, wire.looks);
}
}  // namespace
template <typename Codec>
void Fields(Codec& codec, Culprit& culprit) {
  codec(culprit.rank, culprit.slot, culprit.node, culprit.section, culprit.phase, culprit.step,
        culprit.age);
}
template <typename Codec>
void Fields(Codec& codec, CommFinding& comm) {
  codec(comm.name, comm.id_hash, comm.seq, comm.op);
}
template <typename Codec>
void Fields(Codec& codec, Verdict& verdict) {
  codec(verdict.verdict_class, verdict.confidence, verdict.ambiguous, verdict.kind,
        verdict.generation, verdict.culprits, verdict.waiting, verdict.comm,
        verdict.first_divergent_seq, verdict.cycle, verdict.evidence, verdict.reason,
        verdict.ignored_looks);
}
template <typename Codec>
void Fields(Codec& codec, VerdictFound& found) {
  codec(found.number, found.took, found.verdict);
}

namespace {

template <typename Message>
std::optional<Message> Read(FieldReader& reader) {
  Message message;
  reader(message);
  if (!reader.at_end()) return std::nullopt;
  return message;
}

std::optional<WatchMessage> Read(uint8_t kind, FieldReader& reader) {
  switch (kind) {
    case 0:
      return Read<StallTold>(reader);
    case 1:
      return Read<LookAsked>(reader);
    case 2: {
      std::optional<WireLooks> wire = Read<WireLooks>(reader);
      if (!wire) return std::nullopt;
      LooksTold told = FromWire(*std::move(wire));
      for (RankLook& look : told.looks) {
        if (!IsSound(look)) return std::nullopt;
      }
      return told;
    }
    case 3: {
      std::optional<VerdictFound> found = Read<VerdictFound>(reader);
      if (!found || !IsSound(found->verdict)) return std::nullopt;
      return found;
    }
    default:
      return std::nullopt;
  }
}

}  // namespace

std::string EncodeWatchMessage(const WatchMessage& message) {
  FieldWriter writer;
  uint8_t version = kWatchWireVersion;
  auto kind = static_cast<uint8_t>(message.index());
  writer(version, kind);
  if (const auto* told = std::get_if<LooksTold>(&message)) {
    WireLooks wire = ToWire(*told);
    writer(wire);
  } else {
    std::visit(
        [&](const auto& typed) {
          if constexpr (!std::is_same_v<std::decay_t<decltype(typed)>, LooksTold>) writer(typed);
        },
        message);
  }
  return writer.Take();
}

absl::StatusOr<WatchMessage> DecodeWatchMessage(std::string_view bytes) {
  FieldReader reader(bytes);
  uint8_t version = 0, kind = 0;
  reader(version, kind);
  if (version != kWatchWireVersion) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "a message about ranks of version {}, {} wanted", version, kWatchWireVersion);
  }
  std::optional<WatchMessage> message = Read(kind, reader);
  if (message) return *std::move(message);
  return Error(absl::StatusCode::kInvalidArgument,
               "a message about ranks of kind {}: its {} bytes do not fit", kind, bytes.size());
}

}  // namespace outlast
