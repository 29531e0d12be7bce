#include "outlast/elastic/journal.h"

#include <cstring>
#include <optional>
#include <utility>

#include "base/error.h"
#include "elastic/codec.h"
#include "outlast/base/crc32c.h"

namespace outlast {

// --- Fields, by their declaration's order ---

template <typename Codec, typename First, typename Second>
void Fields(Codec& codec, std::pair<First, Second>& pair) {
  codec(pair.first, pair.second);
}
template <typename Codec, typename Value>
void Fields(Codec& codec, std::optional<Value>& value) {
  bool has_value = value.has_value();
  codec(has_value);
  if (!has_value) return value.reset();
  if (!value) value.emplace();
  codec(*value);
}
template <typename Codec>
void Fields(Codec& codec, Id128& id) {
  codec(id.bytes);
}
template <typename Codec>
void Fields(Codec& codec, ProcessEnd& end) {
  codec(end.code, end.signal, end.by_us);
}
template <typename Codec>
void Fields(Codec& codec, FaultRecord& fault) {
  codec(fault.fault_class, fault.rank, fault.generation, fault.step_reached, fault.step_committed,
        fault.end, fault.found_by, fault.detail, fault.root, fault.victim, fault.node,
        fault.as_crash);
}
template <typename Codec>
void Fields(Codec& codec, RankRun& run) {
  codec(run.node, run.incarnation, run.segment, run.first_rank, run.count, run.first_slot);
}
template <typename Codec>
void Fields(Codec& codec, RankMap& map) {
  codec(map.runs, map.world, map.micro_batches);
}
namespace control {
template <typename Codec>
void Fields(Codec& codec, ResumeCandidate& candidate) {
  codec(candidate.generation, candidate.step);
}
template <typename Codec>
void Fields(Codec& codec, Commit& commit) {
  codec(commit.generation, commit.map, commit.plain, commit.finished, commit.bootstrap,
        commit.lead_address, commit.resume, commit.candidate);
}
}  // namespace control
template <typename Codec>
void Fields(Codec& codec, StartedRecord& record) {
  codec(record.run_id, record.incarnation);
}
template <typename Codec>
void Fields(Codec& codec, FormingRecord& record) {
  codec(record.target, record.reason);
}
template <typename Codec>
void Fields(Codec& codec, CommittedRecord& record) {
  codec(record.commit);
}
template <typename Codec>
void Fields(Codec& codec, NextRecord& record) {
  codec(record.candidate);
}
template <typename Codec>
void Fields(Codec& codec, FaultedRecord& record) {
  codec(record.fault, record.agent, record.process, record.evidence, record.charged,
        record.replaces, record.restarts, record.at);
}
template <typename Codec>
void Fields(Codec& codec, RefundedRecord& record) {
  codec(record.step_committed, record.progress_base);
}
template <typename Codec>
void Fields(Codec& codec, ExcludedRecord& record) {
  codec(record.node, record.reason, record.until);
}
template <typename Codec>
void Fields(Codec& codec, FinishedRecord& record) {
  codec(record.ranks);
}
template <typename Codec>
void Fields(Codec& codec, PlainDoneRecord& record) {
  codec(record.ranks);
}
template <typename Codec>
void Fields(Codec& codec, StopBegunRecord& record) {
  codec(record.signal, record.reason);
}
template <typename Codec>
void Fields(Codec& codec, StopWentRecord& record) {
  codec(record.step);
}
template <typename Codec>
void Fields(Codec& codec, StopGaveUpRecord& record) {
  codec(record.hurry, record.reason);
}
template <typename Codec>
void Fields(Codec& codec, SaveFailedRecord& record) {
  codec(record.root_lost, record.final_save_failed);
}
template <typename Codec>
void Fields(Codec& codec, EndingRecord& record) {
  codec(record.exit_code, record.reason, record.keep);
}
template <typename Codec>
void Fields(Codec& codec, EndedRecord& record) {
  codec(record.exit_code, record.reason);
}
template <typename Codec>
void Fields(Codec& codec, Term& term) {
  codec(term.flag, term.value);
}
template <typename Codec>
void Fields(Codec& codec, TermsRecord& record) {
  codec(record.node, record.terms);
}
template <typename Codec>
void Fields(Codec& codec, SeenFault& fault) {
  codec(fault.fault_class, fault.root, fault.step, fault.node, fault.as_crash);
}
template <typename Codec>
void Fields(Codec& codec, FaultHistory& history) {
  auto& [crashes, others, restarts, resources, roots, seen_faults, restart_times] = history;
  codec(crashes, others, restarts, resources, roots, seen_faults, restart_times);
}
// All but `records`, which is the base's index. A member that is new does not compile here before
// it is written.
template <typename Codec>
void Fields(Codec& codec, CoordinatorState& state) {
  auto& [run_id, incarnation, records, target, commit, finished, plain_done, history, faulted,
         cause, faults, excluded, late_failure, step_committed, progress_base, root_lost,
         final_save_failed, stop, stop_went, stop_gave_up, stop_hurries, stop_failure, ending,
         ended, terms, job_time] = state;
  static_cast<void>(records);
  codec(run_id, incarnation, target, commit, finished, history, faulted, cause, faults, excluded,
        late_failure, step_committed, progress_base, root_lost, final_save_failed, stop, stop_went,
        stop_gave_up, stop_hurries, stop_failure, ending, ended, terms, job_time);
  // What came later: a base that an older program wrote ends here.
  if constexpr (requires { codec.at_end(); }) {
    if (codec.at_end()) return;
  }
  codec(plain_done);
}

namespace {

constexpr uint8_t kBaseKind = 255;
static_assert(std::variant_size_v<JournalPayload> <= kBaseKind);

struct Header {
  uint32_t length = 0;
  uint32_t crc32c = 0;
  uint64_t index = 0;
  uint64_t incarnation = 0;
  uint64_t generation = 0;
};
static_assert(sizeof(Header) == kJournalHeaderBytes);
constexpr size_t kUnchecked = 8;  // length and checksum

template <size_t kKind = 0>
std::optional<JournalPayload> DecodePayload(size_t kind, FieldReader& reader) {
  if constexpr (kKind < std::variant_size_v<JournalPayload>) {
    if (kind != kKind) return DecodePayload<kKind + 1>(kind, reader);
    std::variant_alternative_t<kKind, JournalPayload> record;
    reader(record);
    if (!reader.at_end()) return std::nullopt;
    return record;
  } else {
    return std::nullopt;
  }
}

// The header of a whole record at `offset`, or nothing and why.
std::optional<Header> WholeRecordAt(std::string_view bytes, size_t offset, std::string& why) {
  Header header;
  if (bytes.size() - offset < sizeof(header)) {
    why = "its header is cut off";
    return std::nullopt;
  }
  std::memcpy(&header, bytes.data() + offset, sizeof(header));
  if (header.length > kMaxJournalPayload) {
    why = fmt::format("a length of {} bytes, at most {} are allowed", header.length,
                      kMaxJournalPayload);
  } else if (bytes.size() - offset - sizeof(header) < header.length) {
    why = "its payload is cut off";
  } else if (const uint32_t crc = Crc32c(
                 bytes.substr(offset + kUnchecked, sizeof(header) - kUnchecked + header.length));
             crc != header.crc32c) {
    why = fmt::format("checksum {:#x}, {:#x} is written", crc, header.crc32c);
  } else {
    return header;
  }
  return std::nullopt;
}

// Whether a whole record starts anywhere after the bad one at `offset`: then it was no torn tail.
// A crash tears the last append only, so what follows a tear is at most that record's own bytes.
bool IsFollowedByWhole(std::string_view bytes, size_t offset, uint64_t index) {
  std::string ignored;
  for (size_t at = offset + 1; at + sizeof(Header) <= bytes.size(); ++at) {
    uint64_t found = 0;
    std::memcpy(&found, bytes.data() + at + kUnchecked, sizeof(found));
    if (found == index + 1 && WholeRecordAt(bytes, at, ignored)) return true;
  }
  return false;
}

// The header, with the checksum that is due, and the payload.
std::string Seal(Header header, const std::string& payload) {
  header.length = static_cast<uint32_t>(payload.size());
  std::string bytes(sizeof(header), '\0');
  std::memcpy(bytes.data(), &header, sizeof(header));
  bytes += payload;
  header.crc32c = Crc32c(std::string_view(bytes).substr(kUnchecked));
  std::memcpy(bytes.data() + sizeof(header.length), &header.crc32c, sizeof(header.crc32c));
  return bytes;
}

// Nothing but a base begins a journal with another index than 0.
bool BeginsWithABase(std::string_view bytes) {
  Header header;
  if (bytes.size() < sizeof(header)) return false;
  std::memcpy(&header, bytes.data(), sizeof(header));
  return header.index != 0;
}

}  // namespace

std::string EncodeJournalBase(const CoordinatorState& state) {
  FieldWriter writer;
  uint8_t kind = kBaseKind;
  CoordinatorState copy = state;  // a writer names its fields as a reader does
  writer(kind, copy);
  return Seal({.index = state.records - 1,
               .incarnation = state.incarnation,
               .generation = state.generation()},
              writer.Take());
}

std::string EncodeJournalRecord(const CoordinatorState& state, const JournalPayload& record) {
  FieldWriter writer;
  auto kind = static_cast<uint8_t>(record.index());
  writer(kind);
  std::visit([&](const auto& typed) { writer(typed); }, record);
  Header header{
      .index = state.records, .incarnation = state.incarnation, .generation = state.generation()};
  if (const auto* started = std::get_if<StartedRecord>(&record))
    header.incarnation = started->incarnation;
  if (const auto* committed = std::get_if<CommittedRecord>(&record))
    header.generation = committed->commit.generation;
  return Seal(header, writer.Take());
}

absl::StatusOr<JournalContent> ReadJournal(std::string_view bytes, CoordinatorState from) {
  JournalContent content{.state = std::move(from)};
  while (content.valid_bytes < bytes.size()) {
    const size_t offset = content.valid_bytes;
    const uint64_t index = content.state.records;
    const auto damage = [&](std::string_view what) {
      return Error(absl::StatusCode::kDataLoss, "record {} at offset {} of the journal: {}", index,
                   offset, what);
    };
    std::string why;
    const std::optional<Header> header = WholeRecordAt(bytes, offset, why);
    if (!header) {
      if (index == 0 && BeginsWithABase(bytes)) return damage(why);
      if (IsFollowedByWhole(bytes, offset, index)) return damage(why);
      content.torn = fmt::format("record {} at offset {}: {}", index, offset, why);
      break;
    }
    if (header->incarnation < content.state.incarnation) {
      return damage(fmt::format("written by incarnation {} after {} had begun", header->incarnation,
                                content.state.incarnation));
    }
    FieldReader reader(bytes.substr(offset + sizeof(Header), header->length));
    uint8_t kind = 0;
    reader(kind);
    const bool is_base = kind == kBaseKind;
    if (is_base ? header->index < index : header->index != index)
      return damage(fmt::format("its index is {}", header->index));
    if (is_base) {
      CoordinatorState base;
      reader(base);
      if (!reader.at_end()) return damage("a base whose fields do not fit");
      base.records = header->index + 1;
      content.state = std::move(base);
      content.valid_bytes = offset + sizeof(Header) + header->length;
      continue;
    }
    const std::optional<JournalPayload> record = DecodePayload(kind, reader);
    if (!record) return damage(fmt::format("kind {}: its fields do not fit", kind));
    content.state.Apply(*record);
    content.valid_bytes = offset + sizeof(Header) + header->length;
  }
  return content;
}

}  // namespace outlast
