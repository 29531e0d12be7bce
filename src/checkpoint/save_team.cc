#include "checkpoint/save_team.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/channel.h"
#include "base/error.h"
#include "outlast/base/clock.h"
#include "outlast/base/memory.h"
#include "store/folder.h"

namespace outlast {
namespace {

constexpr uint8_t kVersion = 1;
constexpr absl::Duration kReceiptPatience = absl::Seconds(1);
constexpr absl::Duration kProgressInterval = absl::Seconds(5);
constexpr uint32_t kMostHooks = 1000;

void Put(PayloadWriter& writer, const SaveAnnounced& message) {
  const SaveOrder& order = message.order;
  writer.Int(order.job.bytes)
      .Int(order.run.bytes)
      .Int(order.claim)
      .Int(static_cast<uint8_t>(order.parent.has_value()))
      .Text(order.parent.value_or(""))
      .Int(order.step)
      .Int(order.snapshot_generation)
      .Int(order.world)
      .Text(order.plan)
      .Int(static_cast<uint32_t>(order.hooks.size()));
  for (const std::string& hook : order.hooks) writer.Text(hook);
}
void Put(PayloadWriter& writer, const SaveRankWritten& message) {
  const ReceiptEntry& entry = message.written.receipt;
  writer.Int(message.written.rank)
      .Text(entry.name)
      .Int(entry.bytes)
      .Int(entry.crc32c)
      .Int(entry.data_bytes)
      .Int(message.file_bytes);
}
void Put(PayloadWriter& writer, const SaveProgressed& message) { writer.Int(message.bytes); }
void Put(PayloadWriter& writer, const SavePartFailed& message) {
  writer.Int(message.rank);
  PutStatus(writer, message.why);
}
void Put(PayloadWriter& writer, const SaveOutcomeTold& message) {
  PutStatus(writer, message.outcome);
}

const SaveKey& KeyOf(const SaveAnnounced& message) { return message.order.key; }
template <typename Message>
const SaveKey& KeyOf(const Message& message) {
  return message.save;
}
const SaveKey& KeyOf(const SaveTeamMessage& message) {
  return std::visit([](const auto& one) -> const SaveKey& { return KeyOf(one); }, message);
}

SaveOrder TakeOrder(PayloadReader& reader, SaveKey key) {
  SaveOrder order;
  order.key = std::move(key);
  order.job.bytes = reader.Int<decltype(order.job.bytes)>();
  order.run.bytes = reader.Int<decltype(order.run.bytes)>();
  order.claim = reader.Int<uint64_t>();
  const bool has_parent = reader.Int<uint8_t>() != 0;
  std::string parent(reader.Text());
  if (has_parent) order.parent = std::move(parent);
  order.step = reader.Int<int64_t>();
  order.snapshot_generation = reader.Int<uint64_t>();
  order.world = reader.Int<uint32_t>();
  order.plan = std::string(reader.Text());
  const uint32_t hooks = std::min(reader.Int<uint32_t>(), kMostHooks);
  for (uint32_t i = 0; i < hooks && reader.ok(); ++i) order.hooks.emplace_back(reader.Text());
  return order;
}

SaveRankWritten TakeWritten(PayloadReader& reader, SaveKey key) {
  SaveRankWritten message{std::move(key), {}, 0};
  message.written.rank = reader.Int<uint32_t>();
  ReceiptEntry& entry = message.written.receipt;
  entry.name = std::string(reader.Text());
  entry.bytes = reader.Int<uint64_t>();
  entry.crc32c = reader.Int<uint32_t>();
  entry.data_bytes = reader.Int<uint64_t>();
  message.file_bytes = reader.Int<uint64_t>();
  return message;
}

SavePartFailed TakeFailed(PayloadReader& reader, SaveKey key) {
  SavePartFailed message{std::move(key), reader.Int<int32_t>(), {}};
  message.why = TakeStatus(reader);
  return message;
}

}  // namespace

std::string Encode(const SaveTeamMessage& message) {
  PayloadWriter writer;
  const SaveKey& key = KeyOf(message);
  writer.Int(kVersion)
      .Int(static_cast<uint8_t>(message.index()))
      .Int(key.generation)
      .Text(key.checkpoint);
  std::visit([&](const auto& one) { Put(writer, one); }, message);
  return writer.bytes();
}

absl::StatusOr<SaveTeamMessage> DecodeSaveTeamMessage(std::string_view bytes) {
  PayloadReader reader(bytes);
  const auto version = reader.Int<uint8_t>();
  if (reader.ok() && version != kVersion) {
    return Error(absl::StatusCode::kUnimplemented,
                 "a message about a save: version {}, this agent speaks {}", version, kVersion);
  }
  const auto kind = reader.Int<uint8_t>();
  SaveKey key;
  key.generation = reader.Int<uint64_t>();
  key.checkpoint = std::string(reader.Text());
  std::optional<SaveTeamMessage> message;
  switch (kind) {
    case 0:
      message = SaveAnnounced{TakeOrder(reader, std::move(key))};
      break;
    case 1:
      message = TakeWritten(reader, std::move(key));
      break;
    case 2:
      message = SaveProgressed{std::move(key), reader.Int<uint64_t>()};
      break;
    case 3:
      message = TakeFailed(reader, std::move(key));
      break;
    case 4:
      message = SaveOutcomeTold{std::move(key), TakeStatus(reader)};
      break;
    default:
      break;
  }
  // The folder's name becomes a path.
  if (!reader.ok() || !message || !ParseCheckpointName(KeyOf(*message).checkpoint)) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "a message about a save: kind {} in {} bytes is cut or malformed", kind,
                 bytes.size());
  }
  return *std::move(message);
}

// --- A node's part

SaveMember::SaveMember(EventLoop& loop, SaveMemberOptions options)
    : loop_(loop),
      options_(std::move(options)),
      writer_(std::make_unique<SerialThread>("outlast-save", SerialThread::Priority::kBackground)) {
}

SaveMember::~SaveMember() {
  *alive_ = false;
  if (progress_timer_) loop_.Cancel(*progress_timer_);
  if (part_) fence_->End(part_->order.key);  // between two ranks
  writer_.reset();
}

void SaveMember::OnMessage(const SaveTeamMessage& message) {
  if (const auto* announced = std::get_if<SaveAnnounced>(&message)) return Begin(announced->order);
  const auto* told = std::get_if<SaveOutcomeTold>(&message);
  if (told == nullptr) return;
  if (next_ && next_->key == told->save) next_.reset();
  if (!part_ || !(part_->order.key == told->save)) return;
  End(part_, told->outcome);
}

void SaveMember::Begin(const SaveOrder& order) {
  if (part_ && part_->order.key == order.key) {
    for (const SaveTeamMessage& said : part_->said) options_.send_to_lead(said);
    return;
  }
  const auto refuse = [&](absl::Status why) {
    options_.send_to_lead(SavePartFailed{order.key, -1, std::move(why)});
  };
  if (part_) {
    const SaveKey& newest = next_ ? next_->key : part_->order.key;
    if (newest.generation > order.key.generation) return;  // of a former lead
    // Its outcome was lost on the way: what is written of it now helps nobody.
    if (!part_->outcome) {
      End(part_, Error(absl::StatusCode::kUnavailable, "save of step {}: its outcome is not known",
                       part_->order.step));
    }
    // A disk that is slow or hangs: the lead's limits say how long this may take.
    if (part_) {
      next_ = order;
      return;
    }
  }
  if (const std::string plan = options_.plan(); plan != order.plan) {
    return refuse(Error(absl::StatusCode::kFailedPrecondition,
                        "the plan of its ranks is {}, the lead's is {}", plan.substr(0, 16),
                        order.plan.substr(0, 16)));
  }
  if (!fence_->Begin(order.key)) {
    return refuse(
        Error(absl::StatusCode::kAborted, "generation {} has ended there", order.key.generation));
  }
  auto ranks = options_.pin(order);
  if (!ranks.ok()) {
    fence_->End(order.key);
    return refuse(ranks.status());
  }
  part_ = std::make_shared<Part>();
  part_->order = order;
  part_->ranks = *std::move(ranks);
  part_->is_writing = true;
  TellProgressLater();
  Write(part_);
}

void SaveMember::Say(Part& part, SaveTeamMessage message) {
  options_.send_to_lead(message);
  part.said.push_back(std::move(message));
}

void SaveMember::Write(const std::shared_ptr<Part>& part) {
  writer_->Post([this, &loop = loop_, alive = alive_, part, fence = fence_,
                 limiter = options_.limiter,
                 folder = options_.root + "/" + part->order.key.checkpoint] {
    for (const LocalRank& one : part->ranks) {
      auto written =
          WriteRank(folder, one.from, one.rank, part->order, {limiter, fence.get(), &part->bytes});
      SaveTeamMessage message;
      const bool ok = written.ok();
      if (ok) {
        message = SaveRankWritten{part->order.key,
                                  {one.rank, written->entry},
                                  written->receipt.file ? written->receipt.file->bytes : 0};
      } else {
        message = SavePartFailed{part->order.key, static_cast<int32_t>(one.rank),
                                 std::move(written).status()};
      }
      loop.Post([this, alive, part, message = std::move(message)]() mutable {
        if (*alive && !part->outcome) Say(*part, std::move(message));
      });
      if (!ok) break;
    }
    loop.Post([this, alive, part] {
      if (*alive) OnWritten(part);
    });
  });
}

void SaveMember::OnWritten(const std::shared_ptr<Part>& part) {
  part->is_writing = false;
  if (part->outcome) End(part, *part->outcome);
  if (!part_ && next_) Begin(*std::exchange(next_, std::nullopt));
}

// The snapshots stay pinned until nobody reads them any more.
void SaveMember::End(const std::shared_ptr<Part>& part, const absl::Status& outcome) {
  fence_->End(part->order.key);
  part->outcome = outcome;
  if (part->is_writing) return;
  // `part` may be part_ itself.
  const std::shared_ptr<Part> ended = part;  // NOLINT(performance-unnecessary-copy-initialization)
  if (part_ == ended) part_.reset();
  options_.over(ended->order, outcome);
}

void SaveMember::OnAbort(uint64_t generation, const std::string& reason) {
  fence_->Abort(generation, kReceiptPatience);
  if (next_ && next_->key.generation <= generation) next_.reset();
  if (!part_ || part_->order.key.generation > generation) return;
  End(part_, Error(absl::StatusCode::kAborted, "save of step {}: generation {} ended: {}",
                   part_->order.step, part_->order.key.generation, reason));
}

void SaveMember::TellProgressLater() {
  if (progress_timer_) loop_.Cancel(*progress_timer_);
  progress_timer_ = loop_.RunAfter(kProgressInterval, [this] {
    progress_timer_.reset();
    if (!part_ || !part_->is_writing) return;
    const uint64_t bytes = part_->bytes.load();
    if (std::exchange(part_->told_bytes, bytes) != bytes)
      options_.send_to_lead(SaveProgressed{part_->order.key, bytes});
    TellProgressLater();
  });
}

// --- The lead

SaveLead::SaveLead(EventLoop& loop, Root& root, SerialThread& disk, Send send)
    : loop_(loop), root_(root), disk_(disk), send_(std::move(send)) {}

SaveLead::~SaveLead() {
  *alive_ = false;
  if (timer_) loop_.Cancel(*timer_);
}

absl::Status SaveLead::Start(TeamSaveRequest request, Done done) {
  if (is_saving()) {
    return Error(absl::StatusCode::kFailedPrecondition, "save of step {}: that of step {} is {}",
                 request.step, save_->request.step, NameOf(phase()));
  }
  OUTLAST_RETURN_IF_ERROR(request.limits.Check());
  save_ = std::make_shared<Save>();
  save_->machine.emplace(request.generation, request.step, request.parts, request.limits);
  save_->request = std::move(request);
  save_->done = std::move(done);
  save_->started_ns = MonotonicNanos();
  Do(save_, save_->machine->Start(Clock::Real().Uptime()));
  Arm(save_);
  return absl::OkStatus();
}

void SaveLead::Step(const SavePtr& save, const CommitEvent& event) {
  Do(save, save->machine->Step(event, Clock::Real().Uptime()));
  Arm(save);
}

void SaveLead::Arm(const SavePtr& save) {
  if (save != save_) return;
  if (timer_) loop_.Cancel(*std::exchange(timer_, std::nullopt));
  const absl::Duration due = save->machine->deadline();
  if (due == absl::InfiniteDuration()) return;
  timer_ = loop_.RunAt(due, [this, save] {
    timer_.reset();
    Step(save, TimePassed{});
  });
}

// `work` on the disk's thread, then `then` with what it gave here.
template <typename Work, typename Then>
void SaveLead::OnDisk(const SavePtr& save, Work work, Then then) {
  disk_.Post([this, &loop = loop_, alive = alive_, save, work, then] {
    loop.Post([this, alive, save, then, result = work()]() mutable {
      if (*alive) then(this, save, std::move(result));
    });
  });
}

void SaveLead::Do(const SavePtr& save, const std::vector<CommitAction>& actions) {
  for (const CommitAction& action : actions) {
    if (std::holds_alternative<MakeSaveFolder>(action)) {
      MakeFolder(save);
    } else if (std::holds_alternative<AnnounceSave>(action)) {
      for (const CommitPart& part : save->request.parts)
        send_(part.node, SaveAnnounced{save->order});
    } else if (std::holds_alternative<AskSaveHooks>(action)) {
      AskHooks(save);
    } else if (std::holds_alternative<LinkManifest>(action)) {
      Link(save);
    } else if (const auto* told = std::get_if<TellOutcome>(&action)) {
      Tell(save, *told);
    } else {
      disk_.Post([&root = root_, name = save->machine->save().checkpoint] {
        // Who has lost the root cleans nothing up: the new lead may commit it.
        if (root.CheckClaim().ok()) root.Delete(name).IgnoreError();
      });
    }
  }
}

void SaveLead::MakeFolder(const SavePtr& save) {
  OnDisk(
      save, [&root = root_, step = save->request.step] { return root.NewCheckpoint(step); },
      [](SaveLead* self, const SavePtr& of, absl::StatusOr<std::string> made) {
        if (!made.ok()) return self->Step(of, FolderRefused{std::move(made).status()});
        const TeamSaveRequest& request = of->request;
        SaveOrder& order = of->order;
        order.key = {request.generation, *made};
        order.job = self->root_.job();
        order.run = request.run_id;
        order.claim = self->root_.claim();
        order.parent = request.parent;
        order.step = request.step;
        order.snapshot_generation = request.snapshot_generation;
        order.world = request.world;
        order.plan = request.plan;
        order.hooks = NamesOf(request.hooks);
        of->result.checkpoint = *made;
        self->Step(of, FolderMade{*std::move(made)});
      });
}

namespace {

// The durable shards of other nodes, for hooks.
struct MappedShards {
  HookView view;
  std::vector<Receipt> receipts;
  std::vector<Mapping> files;
};

absl::Status MapShard(MappedShards& shards, const Receipt& receipt) {
  HookShard shard{receipt.rank, {}, {}};
  if (receipt.file) {
    shard.path = shards.view.folder + "/" + receipt.file->name;
    const UniqueFd fd(open(shard.path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
    if (!fd.is_open()) return FileError(errno, "open", shard.path);
    OUTLAST_ASSIGN_OR_RETURN(Mapping mapping,
                             Mapping::SharedReadOnly(fd.get(), receipt.file->bytes));
    const auto data =
        std::as_bytes(mapping.bytes()).subspan(receipt.file->bytes - receipt.data_bytes());
    for (const SavedBox& box : receipt.tensors) {
      shard.tensors.push_back({box.name, box.dtype, box.global, box.offset, box.extent,
                               data.subspan(box.begin, box.end - box.begin)});
    }
    shards.files.push_back(std::move(mapping));
  }
  shards.view.shards.push_back(std::move(shard));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<HookResult>> AskHooksOfAll(Root& root, const TeamSaveRequest& request,
                                                      const std::string& checkpoint) {
  if (request.hooks.empty()) return std::vector<HookResult>();
  MappedShards shards;
  shards.view.folder = root.PathOf(checkpoint);
  shards.view.step = request.step;
  for (uint32_t rank = 0; rank < request.world; ++rank) {
    const std::string path = shards.view.folder + "/" + ReceiptName(rank);
    OUTLAST_ASSIGN_OR_RETURN(const std::string text, ReadSmall(path, kMaxReceiptBytes));
    OUTLAST_ASSIGN_OR_RETURN(Receipt receipt, ParseReceipt(text));
    shards.receipts.push_back(std::move(receipt));
  }
  for (const Receipt& receipt : shards.receipts) OUTLAST_RETURN_IF_ERROR(MapShard(shards, receipt));
  return PassHooks(request.hooks, shards.view, checkpoint);
}

// What the nodes said is what the disk has.
absl::Status CheckReceipts(const Manifest& manifest,
                           const std::map<uint32_t, ReceiptEntry>& written) {
  for (const auto& [rank, said] : written) {
    const ReceiptEntry& found = manifest.receipts[rank];
    if (found.crc32c == said.crc32c && found.bytes == said.bytes) continue;
    return Error(absl::StatusCode::kDataLoss,
                 "{} of rank {}: {} bytes with CRC {:08x} on disk, its writer said {} with {:08x}",
                 found.name, rank, found.bytes, found.crc32c, said.bytes, said.crc32c);
  }
  return absl::OkStatus();
}

absl::Status LinkTeam(Root& root, const TeamSaveRequest& request, const std::string& checkpoint,
                      const std::map<uint32_t, ReceiptEntry>& written,
                      std::vector<HookResult> hooks) {
  OUTLAST_ASSIGN_OR_RETURN(Manifest manifest, root.ComposeManifest(checkpoint, request.world));
  OUTLAST_RETURN_IF_ERROR(CheckReceipts(manifest, written));
  return LinkCheckpoint(
      root, std::move(manifest),
      {std::move(hooks), {request.committer, root.claim(), request.generation}, request.elsewhere});
}

}  // namespace

void SaveLead::AskHooks(const SavePtr& save) {
  OnDisk(
      save,
      [&root = root_, save] { return AskHooksOfAll(root, save->request, save->result.checkpoint); },
      [](SaveLead* self, const SavePtr& of, absl::StatusOr<std::vector<HookResult>> hooks) {
        if (!hooks.ok()) return self->Step(of, HooksAnswered{std::move(hooks).status()});
        of->hooks = *std::move(hooks);
        self->Step(of, HooksAnswered{});
      });
}

void SaveLead::Link(const SavePtr& save) {
  OnDisk(
      save,
      [&root = root_, save, written = save->machine->written()] {
        return LinkTeam(root, save->request, save->result.checkpoint, written, save->hooks);
      },
      [](SaveLead* self, const SavePtr& of, absl::Status linked) {
        self->Step(of, ManifestLinked{std::move(linked)});
      });
}

void SaveLead::Tell(const SavePtr& save, const TellOutcome& told) {
  if (!told.save.checkpoint.empty()) {
    save->outcome = SaveOutcomeTold{told.save, told.outcome};
    for (const CommitPart& part : save->request.parts) send_(part.node, *save->outcome);
  }
  save->result.write_time = absl::Nanoseconds(MonotonicNanos() - save->started_ns);
  if (told.outcome.ok()) return save->done(save->result);
  save->done(told.outcome);
}

void SaveLead::OnMessage(const std::string& node, const SaveTeamMessage& message) {
  if (!save_) return;
  const SavePtr save = save_;
  if (const auto* written = std::get_if<SaveRankWritten>(&message)) {
    const size_t before = save->machine->written().size();
    Step(save, RankWritten{node, written->save, written->written});
    if (save->machine->written().size() > before) save->result.bytes += written->file_bytes;
  } else if (const auto* progressed = std::get_if<SaveProgressed>(&message)) {
    Step(save, PartProgressed{node, progressed->save});
  } else if (const auto* failed = std::get_if<SavePartFailed>(&message)) {
    Step(save, PartFailed{node, failed->save, failed->rank, failed->why});
  }
}

void SaveLead::OnUp(const std::string& node) {
  if (!save_ || std::ranges::find(save_->request.parts, node, &CommitPart::node) ==
                    save_->request.parts.end())
    return;
  if (save_->outcome) return send_(node, *save_->outcome);
  if (phase() == CommitPhase::kWriting) send_(node, SaveAnnounced{save_->order});
}

void SaveLead::OnLost(const std::string& node, const std::string& why) {
  if (save_) Step(SavePtr(save_), PartLost{node, why});
}

void SaveLead::OnAbort(uint64_t generation, const std::string& reason) {
  if (save_) Step(SavePtr(save_), SaveGenerationEnded{generation, reason});
}

}  // namespace outlast
