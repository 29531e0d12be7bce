#include "control/grpc/proto_frames.h"

#include <cstring>

#include "control.pb.h"

namespace outlast::control {
namespace {

// --- Parts ---

// Enumerators are those of messages.h plus one: 0 is what was left out.
template <typename Proto, typename Enum>
Proto ToEnum(Enum value) {
  return static_cast<Proto>(static_cast<int>(value) + 1);
}
template <typename Enum>
Enum FromEnum(int value, Enum last, bool& ok) {
  ok = ok && value >= 1 && value <= static_cast<int>(last) + 1;
  return ok ? static_cast<Enum>(value - 1) : Enum{};
}

std::string ToBytes(const Id128& id) {
  if (id.is_zero()) return {};
  return std::string(reinterpret_cast<const char*>(id.bytes.data()), id.bytes.size());
}
Id128 FromBytes(const std::string& bytes, bool& ok) {
  Id128 id;
  ok = ok && (bytes.empty() || bytes.size() == id.bytes.size());
  if (ok && !bytes.empty()) std::memcpy(id.bytes.data(), bytes.data(), bytes.size());
  return id;
}

std::vector<int> ToVector(const google::protobuf::RepeatedField<int32_t>& list) {
  return {list.begin(), list.end()};
}
void AddAll(const std::vector<int>& from, google::protobuf::RepeatedField<int32_t>* to) {
  to->Add(from.begin(), from.end());
}

void To(const RankMap& map, v1::RankMap* proto) {
  for (const RankRun& run : map.runs) {
    v1::RankRun* to = proto->add_runs();
    to->set_node(run.node);
    to->set_incarnation(run.incarnation);
    to->set_segment(run.segment);
    to->set_first_rank(run.first_rank);
    to->set_count(run.count);
    to->set_first_slot(run.first_slot);
  }
  proto->set_world(map.world);
  proto->set_micro_batches(map.micro_batches);
}
RankMap From(const v1::RankMap& proto) {
  RankMap map{.world = proto.world(), .micro_batches = proto.micro_batches()};
  for (const v1::RankRun& run : proto.runs()) {
    map.runs.push_back({run.node(), run.incarnation(), run.segment(), run.first_rank(), run.count(),
                        run.first_slot()});
  }
  return map;
}

// --- Agent to coordinator ---

void To(const Opening& opening, v1::AgentFrame& frame) {
  v1::Opening* to = frame.mutable_opening();
  to->set_version(opening.version);
  to->set_software(opening.software);
  to->set_job(opening.job);
  to->set_node(opening.node);
  to->set_nonce(opening.nonce);
}
Opening From(const v1::Opening& proto) {
  return {proto.version(), proto.software(), proto.job(), proto.node(), proto.nonce()};
}

void To(const Greeting& greeting, v1::AgentFrame& frame) {
  const Hello& hello = greeting.hello;
  frame.mutable_greeting()->set_proof(greeting.proof);
  v1::Hello* to = frame.mutable_greeting()->mutable_hello();
  to->set_job(hello.job);
  to->set_node(hello.node);
  to->set_incarnation(hello.incarnation);
  to->set_slot_hint(hello.slot_hint);
  to->set_capacity(hello.capacity);
  to->set_segment(hello.segment);
  for (const std::string& address : hello.addresses) to->add_addresses(address);
  to->set_run_id(ToBytes(hello.run_id));
  to->set_coordinator(hello.coordinator);
  to->set_generation(hello.generation);
  to->set_peer_address(hello.peer_address);
  to->set_measure_address(hello.measure_address);
  to->set_saves_on_request(hello.saves_on_request);
  to->set_watches_links(hello.watches_links);
  for (const Term& term : hello.terms) {
    v1::Term* one = to->add_terms();
    one->set_flag(term.flag);
    one->set_value(term.value);
  }
}
Greeting From(const v1::Greeting& proto, bool& ok) {
  const v1::Hello& from = proto.hello();
  Greeting greeting{.proof = proto.proof()};
  Hello& hello = greeting.hello;
  hello.job = from.job();
  hello.node = from.node();
  hello.incarnation = from.incarnation();
  hello.slot_hint = from.slot_hint();
  hello.capacity = from.capacity();
  hello.segment = from.segment();
  hello.addresses.assign(from.addresses().begin(), from.addresses().end());
  hello.run_id = FromBytes(from.run_id(), ok);
  hello.coordinator = from.coordinator();
  hello.measure_address = from.measure_address();
  hello.saves_on_request = from.saves_on_request();
  hello.watches_links = from.watches_links();
  hello.generation = from.generation();
  hello.peer_address = from.peer_address();
  for (const v1::Term& term : from.terms()) hello.terms.push_back({term.flag(), term.value()});
  return greeting;
}

void To(const Beat& beat, v1::AgentFrame& frame) {
  v1::Beat* to = frame.mutable_beat();
  to->set_counter(beat.counter);
  to->set_newest_step(beat.newest_step);
  for (const RankBeat& rank : beat.ranks) {
    v1::RankBeat* one = to->add_ranks();
    one->set_rank(rank.rank);
    const bool plain_done = rank.phase == RankPhase::kPlainDone;
    one->set_phase(ToEnum<v1::RankPhase>(plain_done ? RankPhase::kFinished : rank.phase));
    one->set_never_joined(plain_done);
  }
  for (const std::string& node : beat.unreached) to->add_unreached(node);
  for (const std::string& node : beat.unmet) to->add_unmet(node);
}
Beat From(const v1::Beat& proto, bool& ok) {
  Beat beat{.counter = proto.counter(), .newest_step = proto.newest_step()};
  for (const v1::RankBeat& rank : proto.ranks()) {
    const auto phase = FromEnum(rank.phase(), RankPhase::kFinished, ok);
    const bool plain_done = phase == RankPhase::kFinished && rank.never_joined();
    beat.ranks.push_back({rank.rank(), plain_done ? RankPhase::kPlainDone : phase});
  }
  beat.unreached.assign(proto.unreached().begin(), proto.unreached().end());
  beat.unmet.assign(proto.unmet().begin(), proto.unmet().end());
  return beat;
}

void To(const Fault& fault, v1::AgentFrame& frame) {
  v1::Fault* to = frame.mutable_fault();
  to->set_rank(fault.rank);
  to->set_generation(fault.generation);
  to->set_process(fault.process);
  to->set_born(fault.born);
  to->set_fault_class(ToEnum<v1::FaultClass>(fault.fault_class));
  to->set_evidence(ToEnum<v1::Evidence>(fault.evidence));
  to->mutable_end()->set_code(fault.end.code);
  to->mutable_end()->set_signal(fault.end.signal);
  to->mutable_end()->set_by_us(fault.end.by_us);
  to->set_what(fault.what);
  to->set_phase(fault.phase);
  to->set_detail(fault.detail);
  to->set_plain(fault.plain);
  to->set_finished(fault.finished);
}
Fault From(const v1::Fault& proto, bool& ok) {
  return {.rank = proto.rank(),
          .generation = proto.generation(),
          .process = proto.process(),
          .born = proto.born(),
          .fault_class = FromEnum(proto.fault_class(), FaultClass::kNodeLost, ok),
          .evidence = FromEnum(proto.evidence(), Evidence::kPeer, ok),
          .end = {proto.end().code(), proto.end().signal(), proto.end().by_us()},
          .what = proto.what(),
          .phase = proto.phase(),
          .detail = proto.detail(),
          .plain = proto.plain(),
          .finished = proto.finished()};
}

void To(const Prepared& prepared, v1::AgentFrame& frame) {
  v1::Prepared* to = frame.mutable_prepared();
  to->set_generation(prepared.generation);
  to->set_round(prepared.round);
  to->set_staged(prepared.staged);
  to->set_last_step(prepared.last_step);
  for (const HeldSnapshot& held : prepared.snapshots) {
    v1::HeldSnapshot* one = to->add_snapshots();
    one->set_generation(held.id.generation);
    one->set_step(held.id.step);
    one->set_rank(held.rank);
    one->set_world(held.world);
  }
  to->set_bootstrap(prepared.bootstrap);
}
Prepared From(const v1::Prepared& proto) {
  Prepared prepared{.generation = proto.generation(),
                    .round = proto.round(),
                    .staged = proto.staged(),
                    .last_step = proto.last_step(),
                    .bootstrap = proto.bootstrap()};
  for (const v1::HeldSnapshot& held : proto.snapshots()) {
    prepared.snapshots.push_back({{held.generation(), held.step()}, held.rank(), held.world()});
  }
  return prepared;
}

void To(const Committed& committed, v1::AgentFrame& frame) {
  frame.mutable_committed()->set_generation(committed.generation);
}
void To(const Restored& restored, v1::AgentFrame& frame) {
  v1::Restored* to = frame.mutable_restored();
  to->set_generation(restored.generation);
  to->set_candidate(restored.candidate);
  to->set_ok(restored.ok);
  to->set_detail(restored.detail);
}
void To(const Stopping& stopping, v1::AgentFrame& frame) {
  v1::Stopping* to = frame.mutable_stopping();
  to->set_asked(stopping.asked);
  to->set_on_time(stopping.on_time);
  to->set_step(stopping.step);
}
void To(const Leave& leave, v1::AgentFrame& frame) {
  v1::Leave* to = frame.mutable_leave();
  to->set_signal(leave.signal);
  to->set_hurry(leave.hurry);
  to->set_within_nanoseconds(absl::ToInt64Nanoseconds(leave.within));
  to->set_stays_nanoseconds(absl::ToInt64Nanoseconds(leave.stays));
}
void To(const SaveReport& report, v1::AgentFrame& frame) {
  v1::SaveReport* to = frame.mutable_save_report();
  to->set_outcome(ToEnum<v1::SaveOutcome>(report.outcome));
  to->set_step(report.step);
  to->set_detail(report.detail);
}
void To(const Bye& bye, v1::AgentFrame& frame) {
  v1::Bye* to = frame.mutable_bye();
  to->set_generation(bye.generation);
  to->set_durable(bye.durable);
  to->set_final_step(bye.final_step);
}
void To(const Measured& measured, v1::AgentFrame& frame) {
  v1::Measured* to = frame.mutable_measured();
  to->set_number(measured.number);
  to->set_megabytes_per_second(measured.megabytes_per_second);
  to->set_detail(measured.detail);
}
void To(const Saved& saved, v1::AgentFrame& frame) {
  v1::Saved* to = frame.mutable_saved();
  to->set_number(saved.number);
  to->set_durable(saved.durable);
  to->set_step(saved.step);
  to->set_detail(saved.detail);
}
void To(const AgentMessage& message, v1::AgentFrame& frame) {
  std::visit([&](const auto& typed) { To(typed, frame); }, message);
}

// --- Coordinator to agent ---

void To(const Challenge& challenge, v1::CoordinatorFrame& frame) {
  v1::Challenge* to = frame.mutable_challenge();
  to->set_version(challenge.version);
  to->set_software(challenge.software);
  to->set_job(challenge.job);
  to->set_nonce(challenge.nonce);
  to->set_proof(challenge.proof);
}
void To(const Welcome& welcome, v1::CoordinatorFrame& frame) {
  v1::Welcome* to = frame.mutable_welcome();
  to->set_run_id(ToBytes(welcome.run_id));
  to->set_incarnation(welcome.incarnation);
  to->set_generation(welcome.generation);
}
void To(const Refused& refused, v1::CoordinatorFrame& frame) {
  frame.mutable_refused()->set_kind(ToEnum<v1::Refusal>(refused.kind));
  frame.mutable_refused()->set_reason(refused.reason);
}
void To(const Prepare& prepare, v1::CoordinatorFrame& frame) {
  v1::Prepare* to = frame.mutable_prepare();
  to->set_generation(prepare.generation);
  to->set_round(prepare.round);
  To(prepare.map, to->mutable_map());
  AddAll(prepare.plain, to->mutable_plain());
  AddAll(prepare.finished, to->mutable_finished());
  to->set_spawn_delay_nanoseconds(absl::ToInt64Nanoseconds(prepare.spawn_delay));
  to->set_end_plain(prepare.end_plain);
  to->set_reason(prepare.reason);
}
Prepare From(const v1::Prepare& proto) {
  return {.generation = proto.generation(),
          .round = proto.round(),
          .map = From(proto.map()),
          .plain = ToVector(proto.plain()),
          .finished = ToVector(proto.finished()),
          .spawn_delay = absl::Nanoseconds(proto.spawn_delay_nanoseconds()),
          .end_plain = proto.end_plain(),
          .reason = proto.reason()};
}
void To(const Commit& commit, v1::CoordinatorFrame& frame) {
  v1::Commit* to = frame.mutable_commit();
  to->set_generation(commit.generation);
  To(commit.map, to->mutable_map());
  AddAll(commit.plain, to->mutable_plain());
  AddAll(commit.finished, to->mutable_finished());
  to->set_bootstrap(commit.bootstrap);
  to->set_lead_address(commit.lead_address);
  for (const ResumeCandidate& candidate : commit.resume) {
    v1::ResumeCandidate* one = to->add_resume();
    one->set_generation(candidate.generation);
    one->set_step(candidate.step);
  }
  to->set_candidate(commit.candidate);
  for (const NodeAddress& link : commit.links) {
    v1::NodeAddress* one = to->add_links();
    one->set_node(link.node);
    one->set_address(link.address);
  }
}
Commit From(const v1::Commit& proto) {
  Commit commit{.generation = proto.generation(),
                .map = From(proto.map()),
                .plain = ToVector(proto.plain()),
                .finished = ToVector(proto.finished()),
                .bootstrap = proto.bootstrap(),
                .lead_address = proto.lead_address(),
                .candidate = proto.candidate()};
  for (const v1::ResumeCandidate& candidate : proto.resume())
    commit.resume.push_back({candidate.generation(), candidate.step()});
  for (const v1::NodeAddress& link : proto.links())
    commit.links.push_back({link.node(), link.address()});
  return commit;
}
void To(const Next& next, v1::CoordinatorFrame& frame) {
  frame.mutable_next()->set_generation(next.generation);
  frame.mutable_next()->set_candidate(next.candidate);
}
void To(const Stop& stop, v1::CoordinatorFrame& frame) {
  v1::Stop* to = frame.mutable_stop();
  to->set_how(ToEnum<v1::StopHow>(stop.how));
  to->set_step(stop.step);
  to->set_signal(stop.signal);
  to->set_within_nanoseconds(absl::ToInt64Nanoseconds(stop.within));
  to->set_reason(stop.reason);
}
void To(const Go& go, v1::CoordinatorFrame& frame) { frame.mutable_go()->set_step(go.step); }
void To(const Exclude& exclude, v1::CoordinatorFrame& frame) {
  frame.mutable_exclude()->set_reason(exclude.reason);
}
void To(const Collect& collect, v1::CoordinatorFrame& frame) {
  frame.mutable_collect()->set_reason(collect.reason);
}
void To(const Done& done, v1::CoordinatorFrame& frame) {
  frame.mutable_done()->set_exit_code(done.exit_code);
  frame.mutable_done()->set_reason(done.reason);
}
void To(const Measure& measure, v1::CoordinatorFrame& frame) {
  v1::Measure* to = frame.mutable_measure();
  to->set_number(measure.number);
  to->set_ticket(ToBytes(measure.ticket));
  to->set_address(measure.address);
}
void To(const Save& save, v1::CoordinatorFrame& frame) {
  v1::Save* to = frame.mutable_save();
  to->set_number(save.number);
  to->set_generation(save.generation);
  to->set_reason(save.reason);
}
void To(const CoordinatorMessage& message, v1::CoordinatorFrame& frame) {
  std::visit([&](const auto& typed) { To(typed, frame); }, message);
}

}  // namespace

void ToProto(const AgentFrame& frame, v1::AgentFrame& proto) {
  std::visit([&](const auto& typed) { To(typed, proto); }, frame);
}
void ToProto(const CoordinatorFrame& frame, v1::CoordinatorFrame& proto) {
  std::visit([&](const auto& typed) { To(typed, proto); }, frame);
}

std::optional<AgentFrame> FromProto(const v1::AgentFrame& proto) {
  using Case = v1::AgentFrame::FrameCase;
  std::optional<AgentFrame> frame;
  bool ok = true;
  switch (proto.frame_case()) {
    case Case::kOpening:
      frame = From(proto.opening());
      break;
    case Case::kGreeting:
      frame = From(proto.greeting(), ok);
      break;
    case Case::kBeat:
      frame = AgentMessage(From(proto.beat(), ok));
      break;
    case Case::kFault:
      frame = AgentMessage(From(proto.fault(), ok));
      break;
    case Case::kPrepared:
      frame = AgentMessage(From(proto.prepared()));
      break;
    case Case::kCommitted:
      frame = AgentMessage(Committed{proto.committed().generation()});
      break;
    case Case::kRestored: {
      const v1::Restored& from = proto.restored();
      frame = AgentMessage(Restored{from.generation(), from.candidate(), from.ok(), from.detail()});
      break;
    }
    case Case::kStopping: {
      const v1::Stopping& from = proto.stopping();
      frame = AgentMessage(Stopping{from.asked(), from.on_time(), from.step()});
      break;
    }
    case Case::kLeave: {
      const v1::Leave& from = proto.leave();
      frame = AgentMessage(Leave{from.signal(), from.hurry(),
                                 absl::Nanoseconds(from.within_nanoseconds()),
                                 absl::Nanoseconds(from.stays_nanoseconds())});
      break;
    }
    case Case::kSaveReport: {
      const v1::SaveReport& from = proto.save_report();
      frame = AgentMessage(SaveReport{FromEnum(from.outcome(), SaveOutcome::kNothingRestores, ok),
                                      from.step(), from.detail()});
      break;
    }
    case Case::kBye: {
      const v1::Bye& from = proto.bye();
      frame = AgentMessage(Bye{from.generation(), from.durable(), from.final_step()});
      break;
    }
    case Case::kMeasured: {
      const v1::Measured& from = proto.measured();
      frame = AgentMessage(Measured{from.number(), from.megabytes_per_second(), from.detail()});
      break;
    }
    case Case::kSaved: {
      const v1::Saved& from = proto.saved();
      frame = AgentMessage(Saved{from.number(), from.durable(), from.step(), from.detail()});
      break;
    }
    case Case::FRAME_NOT_SET:
      break;
  }
  if (!ok) return std::nullopt;
  return frame;
}

std::optional<CoordinatorFrame> FromProto(const v1::CoordinatorFrame& proto) {
  using Case = v1::CoordinatorFrame::FrameCase;
  std::optional<CoordinatorFrame> frame;
  bool ok = true;
  switch (proto.frame_case()) {
    case Case::kChallenge: {
      const v1::Challenge& from = proto.challenge();
      frame = Challenge{from.version(), from.software(), from.job(), from.nonce(), from.proof()};
      break;
    }
    case Case::kWelcome: {
      const v1::Welcome& from = proto.welcome();
      frame = CoordinatorMessage(
          Welcome{FromBytes(from.run_id(), ok), from.incarnation(), from.generation()});
      break;
    }
    case Case::kRefused: {
      const v1::Refused& from = proto.refused();
      frame = CoordinatorMessage(
          Refused{FromEnum(from.kind(), Refusal::kBegunAnew, ok), from.reason()});
      break;
    }
    case Case::kPrepare:
      frame = CoordinatorMessage(From(proto.prepare()));
      break;
    case Case::kCommit:
      frame = CoordinatorMessage(From(proto.commit()));
      break;
    case Case::kNext:
      frame = CoordinatorMessage(Next{proto.next().generation(), proto.next().candidate()});
      break;
    case Case::kStop: {
      const v1::Stop& from = proto.stop();
      frame = CoordinatorMessage(Stop{FromEnum(from.how(), StopHow::kHurry, ok), from.step(),
                                      from.signal(), absl::Nanoseconds(from.within_nanoseconds()),
                                      from.reason()});
      break;
    }
    case Case::kGo:
      frame = CoordinatorMessage(Go{proto.go().step()});
      break;
    case Case::kExclude:
      frame = CoordinatorMessage(Exclude{proto.exclude().reason()});
      break;
    case Case::kCollect:
      frame = CoordinatorMessage(Collect{proto.collect().reason()});
      break;
    case Case::kDone:
      frame = CoordinatorMessage(Done{proto.done().exit_code(), proto.done().reason()});
      break;
    case Case::kMeasure: {
      const v1::Measure& from = proto.measure();
      frame =
          CoordinatorMessage(Measure{from.number(), FromBytes(from.ticket(), ok), from.address()});
      break;
    }
    case Case::kSave:
      frame = CoordinatorMessage(
          Save{proto.save().number(), proto.save().generation(), proto.save().reason()});
      break;
    case Case::FRAME_NOT_SET:
      break;
  }
  if (!ok) return std::nullopt;
  return frame;
}

}  // namespace outlast::control
