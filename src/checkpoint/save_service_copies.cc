#include "checkpoint/save_service_copies.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/machine_memory.h"
#include "base/socket.h"
#include "outlast/base/clock.h"
#include "outlast/base/crc32c.h"
#include "outlast/base/memory.h"

namespace outlast {
namespace {

absl::Status Cancelled() { return absl::AbortedError("the generation ended"); }

// One snapshot, pinned, becomes a copy; each chunk is checked on the way.
absl::Status CopyOut(const Buffer& buffer, const Id128& run_id, const SnapshotKey& key,
                     std::optional<SnapshotKey> keep, ReplicaStore& store,
                     const std::atomic<bool>& cancelled) {
  OUTLAST_ASSIGN_OR_RETURN(const Buffer::Sealed sealed, buffer.ReadSealed(run_id, BootId()));
  const BufferHeader& header = sealed.header;
  if (header.generation != key.generation || header.step != key.step)
    return absl::AbortedError("the buffer was filled again");
  const ReplicaName name{header.rank, key};
  if (store.Find(name)) return absl::OkStatus();
  OUTLAST_ASSIGN_OR_RETURN(const std::span<const std::byte> extra, buffer.ReadExtra(sealed));
  ReplicaHead head;
  head.run_id = run_id;
  head.name = name;
  head.world = header.world;
  head.layout_hash = header.layout_hash;
  head.update_stamp = header.update_stamp;
  head.image_bytes = header.image_bytes;
  head.replicated_bytes = header.replicated_bytes;
  const std::span<uint32_t> crcs = buffer.chunk_crcs();
  head.crcs.assign(crcs.begin(), crcs.end());
  head.extra.assign(reinterpret_cast<const char*>(extra.data()), extra.size());
  head.keep = keep;
  OUTLAST_ASSIGN_OR_RETURN(const auto copy, store.Begin(std::move(head), ReplicaUse::kRound));
  for (uint32_t i = 0; i < copy->chunk_count(); ++i) {
    if (cancelled) return Cancelled();
    OUTLAST_RETURN_IF_ERROR(copy->Put(i, buffer.chunk(i)));
  }
  return store.Commit(copy);
}

// A copy becomes the snapshot of a buffer that was begun for it.
absl::Status CopyIn(const Replica& copy, Buffer& buffer, uint32_t turn, const Id128& job_id,
                    const std::atomic<bool>& cancelled) {
  const ReplicaHead& head = copy.head();
  if (head.image_bytes != buffer.layout().image_bytes ||
      head.replicated_bytes != buffer.layout().replicated_bytes ||
      head.extra.size() > buffer.extra().size()) {
    return Error(absl::StatusCode::kDataLoss,
                 "copy of rank {}: {} and {} bytes with {} of extras, the buffer has {} and {}, {}",
                 head.name.rank, head.image_bytes, head.replicated_bytes, head.extra.size(),
                 buffer.layout().image_bytes, buffer.layout().replicated_bytes,
                 buffer.extra().size());
  }
  for (uint32_t i = 0; i < copy.chunk_count(); ++i) {
    if (cancelled) return Cancelled();
    const std::span<const std::byte> bytes = copy.chunk(i);
    if (const uint32_t crc = Crc32c(bytes); crc != head.crcs[i]) {
      return Error(absl::StatusCode::kDataLoss,
                   "copy of rank {}, step {}: chunk {} has crc {:08x}, {:08x} wanted",
                   head.name.rank, head.name.snapshot.step, i, crc, head.crcs[i]);
    }
    std::memcpy(buffer.chunk(i).data(), bytes.data(), bytes.size());
    buffer.chunk_crcs()[i] = head.crcs[i];
  }
  std::memcpy(buffer.extra().data(), head.extra.data(), head.extra.size());
  SealInfo info;
  info.job_id = job_id;
  info.generation = head.name.snapshot.generation;
  info.step = head.name.snapshot.step;
  info.rank = head.name.rank;
  info.world = head.world;
  info.layout_hash = head.layout_hash;
  info.update_stamp = head.update_stamp;
  info.sealed_at_ns = static_cast<uint64_t>(MonotonicNanos());
  info.extra_bytes = static_cast<uint32_t>(head.extra.size());
  return buffer.Seal(turn, info);
}

}  // namespace

// --- Life

SaveService::Nodes::Copies::Copies(Nodes& nodes, uint64_t most_bytes)
    : nodes_(nodes),
      of_(nodes.of_),
      store_(most_bytes),
      copier_(
          std::make_unique<SerialThread>("outlast-copier", SerialThread::Priority::kBackground)) {}

std::unique_ptr<SaveService::Nodes::Copies> SaveService::Nodes::Copies::Start(Nodes& nodes) {
  const PeerTierOptions& options = nodes.of_.options_.peers;
  if (options.bytes_per_second == 0) return nullptr;
  std::unique_ptr<Copies> copies(
      new Copies(nodes, options.most_bytes != 0 ? options.most_bytes : MachineMemoryBytes() / 4));
  Keeper& keeper = nodes.of_.keeper_;
  ReplicaLinkOptions link{.job = nodes.of_.options_.job_name,
                          .node = keeper.node(),
                          .host = "127.0.0.1",
                          .token = options.token,
                          .bytes_per_second = options.bytes_per_second};
  if (const auto at = HostPort::Parse(keeper.peers()->address()); at.ok()) link.host = at->host;
  link.say = [&loop = keeper.loop(), alive = copies->alive_,
              &service = nodes.of_](const std::string& line) {
    loop.Post([alive, &service, line] {
      if (*alive) service.options_.observer.on_note(line);
    });
  };
  auto started = ReplicaLink::Start(std::move(link), copies->store_);
  if (!started.ok()) {
    nodes.of_.options_.observer.on_note(
        fmt::format("no copies on other nodes: {}", MessageOf(started.status())));
    return nullptr;
  }
  copies->link_ = *std::move(started);
  return copies;
}

SaveService::Nodes::Copies::~Copies() {
  *alive_ = false;
  OnAbort();
  link_.reset();
}

void SaveService::Nodes::Copies::OnCommit(std::set<std::string> nodes) {
  OnAbort();
  doors_.clear();
  partner_.clear();
  noted_.clear();
  from_peer_.clear();
  doors_told_.clear();
  rounds_ = ReplicaRounds();
  copy_wanted_.reset();
  newest_.reset();
  view_ = {};
  distrusted_.clear();
  lead_fetch_.reset();
  store_.Serve(of_.keeper_.run_id(), nodes_.world_);
  link_->Enter(of_.keeper_.run_id(), of_.generation_, std::move(nodes));
  TellDoor();
}

void SaveService::Nodes::Copies::OnAbort() {
  StopWork();
  lead_fetch_.reset();
}

void SaveService::Nodes::Copies::StopWork() {
  job_->cancelled = true;
  if (std::exchange(is_copying_, false)) {
    copier_.reset();  // waits for a chunk
    copier_ = std::make_unique<SerialThread>("outlast-copier", SerialThread::Priority::kBackground);
  }
  job_ = std::make_shared<Job>();
  UnpinAll();
  round_.reset();
  fetching_.reset();
}

void SaveService::Nodes::Copies::TellDoor() {
  const std::string& node = of_.keeper_.node();
  const std::string& domain = of_.options_.peers.domain;
  nodes_.council_->TellLead("door",
                            DoorTold{{node, link_->address(), domain.empty() ? node : domain}});
}

void SaveService::Nodes::Copies::NoteOnce(const std::string& what, const std::string& line) {
  if (noted_.insert(what).second) of_.options_.observer.on_note(line);
}

void SaveService::Nodes::Copies::OnRestored(int64_t step) { store_.DropNewerThan(step); }

// --- Rounds, on every node

void SaveService::Nodes::Copies::Take(const DoorsTold& told) {
  nodes_.council_->Answered("door");
  doors_ = told.doors;
  const auto partners = ChoosePartners(doors_);
  const auto found = partners.find(of_.keeper_.node());
  partner_ = found == partners.end() ? "" : found->second;
}

void SaveService::Nodes::Copies::Take(const CopyWanted& wanted) {
  if (round_ && round_->key == wanted.snapshot) {  // said again
    if (round_->told) nodes_.council_->TellLead("copy", *round_->told);
    return;
  }
  if (round_ && !round_->told) StopWork();  // given up by a lead whose ranks restored again
  round_ = Round{wanted.snapshot, std::nullopt};
  round_began_ = Clock::Real().Uptime();
  Copy(wanted);
}

void SaveService::Nodes::Copies::Copy(const CopyWanted& wanted) {
  const std::optional<Save> save = nodes_.Find(wanted.snapshot);
  absl::Status status;
  for (size_t slot = 0; save && slot < save->held.size(); ++slot) {
    if (!save->held[slot]) continue;
    const auto& [index, turn] = *save->held[slot];
    const Buffer& buffer = of_.buffers_[slot][static_cast<size_t>(index)];
    if (!buffer.control().TryPin(BufferPin::kReplicate, turn)) {
      status = absl::UnavailableError("a snapshot was overwritten meanwhile");
      break;
    }
    pinned_.push_back({&buffer, turn});
  }
  if (!save) status = absl::UnavailableError("its ranks hold it no more");
  if (!status.ok()) {
    UnpinAll();
    return EndRound(wanted.snapshot, 0, status);
  }
  is_copying_ = true;
  copier_->Post([this, alive = alive_, &loop = of_.keeper_.loop(), job = job_, wanted,
                 run_id = of_.keeper_.run_id(), pinned = pinned_] {
    absl::Status copied;
    for (const Pinned& one : pinned) {
      if (copied.ok()) {
        copied = CopyOut(*one.buffer, run_id, wanted.snapshot, wanted.keep, store_, job->cancelled);
      }
    }
    loop.Post([this, alive, job, wanted, copied = std::move(copied)] {
      if (*alive && !job->cancelled) OnCopied(wanted, copied);
    });
  });
}

void SaveService::Nodes::Copies::UnpinAll() {
  for (const Pinned& one : std::exchange(pinned_, {}))
    one.buffer->control().Unpin(BufferPin::kReplicate, one.turn);
}

void SaveService::Nodes::Copies::OnCopied(const CopyWanted& wanted, const absl::Status& outcome) {
  is_copying_ = false;
  UnpinAll();
  if (!outcome.ok()) return EndRound(wanted.snapshot, 0, outcome);
  Push(wanted);
}

void SaveService::Nodes::Copies::Push(const CopyWanted& wanted) {
  const auto door = std::ranges::find(doors_, partner_, &ReplicaDoor::node);
  if (partner_.empty() || door == doors_.end())
    return EndRound(wanted.snapshot, 0, absl::UnavailableError("it has no partner"));
  std::vector<ReplicaName> names;
  for (const int rank : nodes_.ranks_) {
    if (rank >= 0) names.push_back({static_cast<uint32_t>(rank), wanted.snapshot});
  }
  link_->Push(partner_, door->address, std::move(names), wanted.keep,
              [this, alive = alive_, &loop = of_.keeper_.loop(), job = job_, key = wanted.snapshot](
                  const absl::Status& outcome, uint64_t bytes) {
                loop.Post([this, alive, job, key, bytes,
                           pushed = MakeStatus(outcome.code(), MessageOf(outcome))] {
                  if (*alive && !job->cancelled) EndRound(key, bytes, pushed);
                });
              });
}

void SaveService::Nodes::Copies::EndRound(const SnapshotKey& key, uint64_t bytes,
                                          const absl::Status& outcome) {
  if (!round_ || round_->key != key) return;
  round_->told = CopyTold{key, bytes, outcome};
  nodes_.council_->TellLead("copy", *round_->told);
  if (outcome.ok()) {
    of_.options_.observer.on_copied(key.step, partner_, bytes,
                                    Clock::Real().Uptime() - round_began_);
  }
}

// --- Rounds, at the lead

void SaveService::Nodes::Copies::Take(const std::string& node, const DoorTold& told) {
  if (told.door.address.empty()) {
    return NoteOnce("door", fmt::format("no copies on other nodes: node '{}' takes no part "
                                        "(--peer-rate 0 there?)",
                                        node));
  }
  if (told.door.node != node) return;
  doors_told_[node] = told.door;
  if (doors_told_.size() < nodes_.ranks_of_.size()) return;
  std::map<uint32_t, std::string> order;
  for (const auto& [name, ranks] : nodes_.ranks_of_) order[ranks.front()] = name;
  DoorsTold all;
  for (const auto& [first, name] : order) all.doors.push_back(doors_told_[name]);
  nodes_.council_->TellAll(all);
}

void SaveService::Nodes::Copies::OnUp(const std::string& node) {
  if (!doors_.empty()) nodes_.council_->Tell(node, DoorsTold{doors_});
  if (rounds_.is_running() && copy_wanted_) nodes_.council_->Tell(node, *copy_wanted_);
  if (lead_fetch_ && lead_fetch_->waiting.contains(node)) {
    nodes_.council_->Tell(node, FetchWanted{lead_fetch_->number, lead_fetch_->plan.snapshot,
                                            lead_fetch_->plan.fetches.at(node)});
  }
}

void SaveService::Nodes::Copies::OnCommon(const SnapshotKey& key) {
  newest_ = key;
  if (doors_.size() < 2 || nodes_.active_.size() < nodes_.ranks_of_.size()) return;
  if (!rounds_.Begin(key, Clock::Real().Uptime())) return;
  copy_wanted_ = CopyWanted{key, rounds_.whole()};
  nodes_.council_->TellAll(*copy_wanted_);
}

void SaveService::Nodes::Copies::Take(const std::string& node, const CopyTold& told) {
  if (!told.outcome.ok() && rounds_.is_running()) {
    const bool has_no_room = absl::IsResourceExhausted(told.outcome);
    NoteOnce(has_no_room ? "room" : "failed",
             fmt::format("copies of step {} on other nodes: node '{}': {}{}", told.snapshot.step,
                         node, MessageOf(told.outcome),
                         has_no_room ? "; no more are made in this generation"
                                     : "; they are made of a later step"));
    if (has_no_room) rounds_.Stop();
  }
  const auto outcome = rounds_.Told(node, told.snapshot, told.outcome.ok());
  if (outcome == ReplicaRounds::Outcome::kGoesOn) return;
  // What became common meanwhile is held until a newer one is known to all.
  if (newest_ && *newest_ > told.snapshot) OnCommon(SnapshotKey(*newest_));
  if (outcome == ReplicaRounds::Outcome::kFailed) return;
  std::string pairs;
  for (const auto& [from, to] : ChoosePartners(doors_))
    pairs += fmt::format("{}{} on {}", pairs.empty() ? "" : ", ", from, to);
  NoteOnce("whole", fmt::format("step {}: every rank's snapshot lies on another node too ({})",
                                told.snapshot.step, pairs));
}

// --- Restore, at the lead

void SaveService::Nodes::Copies::Look(std::map<std::string, std::vector<SnapshotKey>> held) {
  view_.held = std::move(held);
  view_.ranks.clear();
  for (const auto& [node, keys] : view_.held) view_.ranks[node] = nodes_.ranks_of_[node];
  rounds_ =
      ReplicaRounds(nodes_.council_->nodes(), NewestWholeRound(view_), of_.options_.peers.every);
}

bool SaveService::Nodes::Copies::Distrust(const std::set<std::string>& nodes,
                                          const SnapshotKey& key) {
  bool is_new = false;
  for (const std::string& node : nodes) {
    view_.bad_buffers.insert({node, key});
    is_new = distrusted_.insert({node, key}).second || is_new;
  }
  return is_new;
}

void SaveService::Nodes::Copies::Fetch(const MemoryPlan& plan,
                                       std::function<void(bool all_hold_it)> then) {
  lead_fetch_ = LeadFetch{plan, ++fetches_, {}, std::move(then)};
  for (const auto& [node, parts] : plan.fetches) {
    lead_fetch_->waiting.insert(node);
    std::string text;
    for (const FetchPart& part : parts) {
      if (part.from == node) continue;
      text +=
          fmt::format("{}rank {} from node '{}'", text.empty() ? "" : ", ", part.rank, part.from);
    }
    if (!text.empty()) {
      of_.options_.observer.on_note(
          fmt::format("restoring step {} on node '{}': {}", plan.snapshot.step, node, text));
    }
    nodes_.council_->Tell(node, FetchWanted{lead_fetch_->number, plan.snapshot, parts});
  }
}

void SaveService::Nodes::Copies::Take(const std::string& node, const FetchTold& told) {
  if (!lead_fetch_ || told.number != lead_fetch_->number || !lead_fetch_->waiting.contains(node))
    return;
  if (told.outcome.ok()) {
    lead_fetch_->waiting.erase(node);
    // What it holds by now is not the bad one.
    view_.bad_buffers.erase({node, lead_fetch_->plan.snapshot});
    if (!lead_fetch_->waiting.empty()) return;
  } else {
    const SnapshotKey& key = lead_fetch_->plan.snapshot;
    const std::vector<FetchPart>& parts = lead_fetch_->plan.fetches.at(node);
    const FetchPart bad = told.bad.value_or(parts.front());
    view_.bad_copies.insert({bad.from, {bad.rank, key}});
    // Not among what was passed over: a job that never saved starts anew without copies, as ever.
    of_.options_.observer.on_note(
        fmt::format("restore: passed over: step {}, copy of rank {} on node '{}': {}", key.step,
                    bad.rank, bad.from, MessageOf(told.outcome)));
  }
  const auto then = std::move(lead_fetch_->then);
  lead_fetch_.reset();
  then(told.outcome.ok());
}

// --- Restore, on every node

void SaveService::Nodes::Copies::Take(const FetchWanted& wanted) {
  if (fetching_ && fetching_->wanted.number == wanted.number) {  // said again
    if (fetching_->told) nodes_.council_->TellLead("fetch", *fetching_->told);
    return;
  }
  StopWork();  // a former fetch, which the lead has given up
  fetching_ = Fetching{wanted, {}, std::nullopt};
  for (const FetchPart& part : wanted.parts) {
    const bool is_known =
        std::ranges::find(fetching_->sources, part.from) != fetching_->sources.end();
    if (part.from != of_.keeper_.node() && !is_known) fetching_->sources.push_back(part.from);
  }
  FetchNext();
}

void SaveService::Nodes::Copies::FetchNext() {
  if (fetching_->sources.empty()) return FillBuffers();
  const std::string from = fetching_->sources.back();
  fetching_->sources.pop_back();
  std::vector<ReplicaName> names;
  std::optional<FetchPart> first;
  for (const FetchPart& part : fetching_->wanted.parts) {
    if (part.from != from) continue;
    names.push_back({part.rank, fetching_->wanted.snapshot});
    if (!first) first = part;
  }
  const auto door = std::ranges::find(doors_, from, &ReplicaDoor::node);
  if (door == doors_.end())
    return EndFetch(first, absl::UnavailableError("its agent's address is not known"));
  link_->Fetch(from, door->address, names,
               [this, alive = alive_, &loop = of_.keeper_.loop(), job = job_, from, names](
                   const absl::Status& outcome, uint64_t) {
                 loop.Post([this, alive, job, from, names,
                            fetched = MakeStatus(outcome.code(), MessageOf(outcome))] {
                   if (!*alive || job->cancelled || !fetching_) return;
                   if (fetched.ok()) return FetchNext();
                   FetchPart bad{names.front().rank, from};
                   for (const ReplicaName& name : names) {
                     if (store_.Find(name)) continue;
                     bad.rank = name.rank;
                     break;
                   }
                   EndFetch(bad, fetched);
                 });
               });
}

// Where a snapshot may be written now that no rank does; one that is there already is a bad one.
std::optional<SaveService::Nodes::Copies::Target> SaveService::Nodes::Copies::PickTarget(
    const FetchPart& part, const SnapshotKey& key) {
  const auto place = std::ranges::find(nodes_.ranks_, static_cast<int>(part.rank));
  if (place == nodes_.ranks_.end()) return std::nullopt;
  Target target{part, static_cast<size_t>(place - nodes_.ranks_.begin())};
  if (!nodes_.has_buffers(target.slot)) return std::nullopt;
  std::vector<std::pair<SnapshotKey, const Buffer*>> by_age;  // empty ones first
  for (const Buffer& buffer : of_.buffers_[target.slot]) {
    SnapshotKey holds;
    if (const auto sealed = buffer.ReadSealed(of_.keeper_.run_id(), BootId()); sealed.ok()) {
      holds = {sealed->header.generation, sealed->header.step};
      if (holds == key) {
        buffer.control().Discard(sealed->turn);
        holds = {};
      }
    }
    by_age.emplace_back(holds, &buffer);
  }
  std::ranges::sort(by_age);
  for (const auto& [holds, buffer] : by_age) {
    if (!buffer->control().TryBeginFill(Replace::kSealedToo, &target.turn)) continue;
    target.buffer = buffer;
    return target;
  }
  return std::nullopt;
}

void SaveService::Nodes::Copies::FillBuffers() {
  const SnapshotKey key = fetching_->wanted.snapshot;
  std::vector<Target> targets;
  for (const FetchPart& part : fetching_->wanted.parts) {
    auto target = PickTarget(part, key);
    if (target) {
      targets.push_back(*target);
      continue;
    }
    for (const Target& begun : targets) begun.buffer->control().Abandon(begun.turn);
    return EndFetch(part, absl::UnavailableError("the rank has no free buffer"));
  }
  is_copying_ = true;
  copier_->Post([this, alive = alive_, &loop = of_.keeper_.loop(), job = job_, key, targets,
                 job_id = of_.opened_->root->job()] {
    absl::Status filled;
    std::optional<FetchPart> bad;
    for (const Target& target : targets) {
      if (filled.ok()) {
        const auto copy = store_.Find({target.part.rank, key});
        filled = copy ? CopyIn(*copy, const_cast<Buffer&>(*target.buffer), target.turn, job_id,
                               job->cancelled)
                      : absl::NotFoundError("the copy is gone");
        if (!filled.ok()) bad = target.part;
      }
      if (!filled.ok()) target.buffer->control().Abandon(target.turn);
    }
    loop.Post([this, alive, job, targets, bad, filled = std::move(filled)] {
      if (!*alive || job->cancelled || !fetching_) return;
      is_copying_ = false;
      for (const Target& target : targets) {
        from_peer_.erase(target.slot);
        if (filled.ok() && target.part.from != of_.keeper_.node()) from_peer_.insert(target.slot);
      }
      EndFetch(bad, filled);
    });
  });
}

void SaveService::Nodes::Copies::EndFetch(std::optional<FetchPart> bad,
                                          const absl::Status& outcome) {
  fetching_->told = FetchTold{fetching_->wanted.number, std::move(bad), outcome};
  nodes_.council_->TellLead("fetch", *fetching_->told);
}

}  // namespace outlast
