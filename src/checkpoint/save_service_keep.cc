// What a keeper's save service leaves for the next one, and how that goes on with it.
#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "checkpoint/made_buffers.h"
#include "checkpoint/save_service_nodes.h"
#include "outlast/base/memory.h"

namespace outlast {
namespace {

constexpr char kOpenKey[] = "save.open";      // Text options, u8 resume
constexpr char kLastKey[] = "save.last";      // i64 durable step, Text parent, u8 committed here
constexpr char kTablesKey[] = "save.tables";  // u64 bytes of all tables; tables, seal table

std::string BuffersKey(size_t slot) { return fmt::format("save.buffers.{}", slot); }

std::string ReadAll(int fd, uint64_t bytes) {
  const auto mapping = Mapping::SharedReadOnly(fd, bytes);
  if (!mapping.ok()) return {};
  const auto* text = reinterpret_cast<const char*>(mapping->data());
  return {text, text + bytes};
}

}  // namespace

// --- Keeping ---

void SaveService::KeepOpened() {
  Vault* const vault = keeper_.options().vault;
  if (vault == nullptr) return;
  const PayloadWriter open =
      PayloadWriter().Text(open_text_).Int(static_cast<uint8_t>(opened_->resume));
  vault->Keep(kOpenKey, open.bytes(), {});
}

void SaveService::KeepLast() {
  Vault* const vault = keeper_.options().vault;
  if (vault == nullptr) return;
  const PayloadWriter last = PayloadWriter()
                                 .Int(durable_step_)
                                 .Text(parent_.value_or(""))
                                 .Int(static_cast<uint8_t>(committed_here_));
  vault->Keep(kLastKey, last.bytes(), {});
}

void SaveService::KeepBuffers() {
  Vault* const vault = keeper_.options().vault;
  if (vault == nullptr) return;
  for (size_t slot = 0; slot < buffers_.size(); ++slot) {
    std::vector<int> fds;
    for (const Buffer& buffer : buffers_[slot]) fds.push_back(buffer.fd());
    vault->Keep(BuffersKey(slot), "", fds);
  }
  // Last: who finds it finds all.
  const int fds[] = {tables_fd_.get(), table_fd_.get()};
  vault->Keep(kTablesKey, PayloadWriter().Int(tables_bytes_).bytes(), fds);
}

// --- Going on ---

absl::Status SaveService::GoOn(Kept& kept) {
  const auto open = kept.extract(kOpenKey);
  if (open.empty()) return absl::OkStatus();  // nobody saves yet
  PayloadReader reader(open.mapped().bytes);
  const std::string text(reader.Text());
  const bool resume = reader.Int<uint8_t>() != 0;
  OUTLAST_ASSIGN_OR_RETURN(checkpointer_, DecodeOptions(text));
  checkpointer_.hooks.own = options_.own_hooks;
  hooks_ = MakeHooks(checkpointer_.hooks);
  limiter_ = std::make_unique<RateLimiter>(checkpointer_.disk_bytes_per_second);
  open_text_ = text;
  if (const auto last = kept.extract(kLastKey); !last.empty()) {
    PayloadReader fields(last.mapped().bytes);
    durable_step_ = fields.Int<int64_t>();
    const std::string parent(fields.Text());
    committed_here_ = fields.Int<uint8_t>() != 0;
    if (!parent.empty()) parent_ = parent;
  }
  const StartMode mode = resume || committed_here_ ? StartMode::kResume : StartMode::kFresh;
  // The ranks train on: what memory holds is enough, wherever the rest lies.
  auto opened = OpenToWrite(checkpointer_.uri, TierOptions(), mode, RootsNeed::kNothing,
                            options_.committer, {});
  if (!opened.ok())
    return Annotate(opened.status(), fmt::format("checkpoint root '{}'", checkpointer_.uri));
  (*opened)->resume = resume;
  const bool is_in_reach = (*opened)->remote_error.ok();
  OUTLAST_RETURN_IF_ERROR(Adopt(*std::move(opened)));
  OUTLAST_RETURN_IF_ERROR(LookForNewestOfThisRun());
  KeepLast();
  GoOnUploading(is_in_reach);
  return TakeBuffers(kept);
}

// The former agent may have been killed in the middle of an upload, or before it, and it may be
// that nothing newer is ever committed.
void SaveService::GoOnUploading(bool is_in_reach) {
  if (!tier_ || !parent_ || !committed_here_) return;
  std::string note;  // what is out of reach was told already
  if (is_in_reach) tier_->View(&note).status().IgnoreError();
  tier_->OnRestored(durable_step_, *parent_);
}

// The former agent may have committed a step and been killed before it could say so, and one that
// lacked nothing but its manifest has been committed just now.
absl::Status SaveService::LookForNewestOfThisRun() {
  OUTLAST_ASSIGN_OR_RETURN(const Listing listing, opened_->root->List());
  const Chain chain = ResolveChain(listing.checkpoints);
  for (const size_t i : chain.members) {
    const CheckpointInfo& info = listing.checkpoints[i];
    const auto claim = std::ranges::find(listing.claims, info.manifest->claim, &ClaimFile::number);
    const bool is_ours = claim != listing.claims.end() && claim->claim.has_value() &&
                         claim->claim->run == keeper_.run_id();
    if (!is_ours) return absl::OkStatus();
    if (info.state != CheckpointState::kCommitted) continue;
    durable_step_ = info.step;
    parent_ = info.name;
    committed_here_ = true;
    return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::Status SaveService::TakeBuffers(Kept& kept) {
  auto tables = kept.extract(kTablesKey);
  if (tables.empty() || tables.mapped().fds.size() != 2) return absl::OkStatus();  // none yet
  tables_bytes_ = PayloadReader(tables.mapped().bytes).Int<uint64_t>();
  tables_fd_ = std::move(tables.mapped().fds[0]);
  table_fd_ = std::move(tables.mapped().fds[1]);
  const std::string text = ReadAll(tables_fd_.get(), tables_bytes_);
  OUTLAST_ASSIGN_OR_RETURN(const std::vector<RankTable> own, DecodeTables(text));
  if (own.size() != tables_.size())
    return Error(absl::StatusCode::kInternal, "{} kept tables of tensors: {} wanted", own.size(),
                 tables_.size());
  for (size_t slot = 0; slot < own.size(); ++slot) tables_[slot] = EncodeTable(own[slot]);
  std::vector<int> ranks(tables_.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  MadeBuffers made;
  OUTLAST_RETURN_IF_ERROR(PlanBuffers(NeedsOf(text, std::move(ranks)), &made));
  rank_tables_ = std::move(made.rank_tables);
  plan_ = std::move(made.plan);
  assignments_ = std::move(made.assignments);
  for (size_t slot = 0; slot < tables_.size(); ++slot) {
    std::vector<Buffer>& buffers = made.buffers[slot];
    auto item = kept.extract(BuffersKey(slot));
    for (size_t i = 0; !item.empty() && i < item.mapped().fds.size(); ++i) {
      OUTLAST_ASSIGN_OR_RETURN(Buffer buffer, Buffer::Open(std::move(item.mapped().fds[i])));
      buffers.push_back(std::move(buffer));
    }
    if (buffers.empty())
      return Error(absl::StatusCode::kInternal, "slot {}: its kept buffers are missing", slot);
  }
  OUTLAST_ASSIGN_OR_RETURN(Mapping rows,
                           Mapping::Shared(table_fd_.get(), SealTable::BytesFor(made.world)));
  table_ = std::make_unique<SealTable>(std::move(rows), made.world);
  buffers_ = std::move(made.buffers);
  ArmAutoSave();
  return absl::OkStatus();
}

}  // namespace outlast
