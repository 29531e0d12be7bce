#include "checkpoint/snapshotter.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/channel.h"
#include "base/error.h"
#include "base/split_mix.h"
#include "base/stream_copy.h"
#include "outlast/base/clock.h"
#include "outlast/base/crc32c.h"

namespace outlast {
namespace {

std::map<std::string, uint32_t, std::less<>> NumbersOf(const StateView& state) {
  std::map<std::string, uint32_t, std::less<>> numbers;
  for (size_t i = 0; i < state.regions.size(); ++i)
    numbers.emplace(state.regions[i].name, static_cast<uint32_t>(i));
  return numbers;
}

std::vector<bool> EagerOnesOf(const StateView& state) {
  std::vector<bool> eager;
  for (const Region& region : state.regions)
    eager.push_back(region.kind == RegionKind::kEager || region.bytes.size() <= kEagerBytes);
  return eager;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Snapshotter>> Snapshotter::Make(Options options, SealTable& table,
                                                               std::vector<Buffer> buffers,
                                                               Assignment assignment,
                                                               const StateView& state) {
  if (buffers.empty() || buffers.size() > kMaxBuffers) {
    return Error(absl::StatusCode::kInternal, "snapshot buffers: {} given, 1 to {} wanted",
                 buffers.size(), kMaxBuffers);
  }
  OUTLAST_ASSIGN_OR_RETURN(CopyPlan plan,
                           MakeCopyPlan(assignment, buffers.front().layout(), state));
  for (Buffer& buffer : buffers) {
    // The file's first bytes never change; a buffer that a former process filled has them already,
    // and may be on its way to disk.
    const auto head = buffer.image().first(assignment.header.size());
    if (std::memcmp(head.data(), assignment.header.data(), head.size()) != 0) {
      std::memcpy(head.data(), assignment.header.data(), head.size());
    }
  }
  std::unique_ptr<Snapshotter> made(new Snapshotter(std::move(options), table, std::move(buffers),
                                                    std::move(assignment), std::move(plan), state));
  return made;
}

Snapshotter::Snapshotter(Options options, SealTable& table, std::vector<Buffer> buffers,
                         Assignment assignment, CopyPlan plan, const StateView& state)
    : options_(std::move(options)),
      table_(table),
      buffers_(std::move(buffers)),
      assignment_(std::move(assignment)),
      plan_(std::move(plan)),
      region_of_name_(NumbersOf(state)),
      eager_(EagerOnesOf(state)),
      chunks_(plan_.chunks.size()) {
  held_ = table_.Read()[options_.rank];
  held_.buffers = static_cast<int>(buffers_.size());
  copier_ = std::thread([this] { CopierLoop(); });
  pthread_setname_np(copier_.native_handle(), "outlast-copier");
}

Snapshotter::~Snapshotter() {
  GiveUp();
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  copier_.join();
}

bool Snapshotter::is_running() const {
  MutexLock lock(mutex_);
  return active_;
}

void Snapshotter::SetHeld(int buffer, int64_t step) {
  held_.step[static_cast<size_t>(buffer)] = step;
  table_.Write(static_cast<int>(options_.rank), held_);
}

bool Snapshotter::is_being_saved() const {
  return std::any_of(buffers_.begin(), buffers_.end(), [](const Buffer& buffer) {
    return (buffer.control().Read().pins & static_cast<uint32_t>(BufferPin::kPersist)) != 0;
  });
}

// The buffer to fill, in state FILLING. The row forgets what it held first: a peer must not count
// on a step that is going.
std::optional<int> Snapshotter::PickFree(uint32_t* turn) {
  std::array<bool, kMaxBuffers> pinned{};
  const std::vector<HeldSteps> ranks = table_.Read();
  // The keeper rewrites the row between generations; what it says is newer than our copy.
  held_ = ranks[options_.rank];
  held_.buffers = static_cast<int>(buffers_.size());
  for (size_t i = 0; i < buffers_.size(); ++i) pinned[i] = buffers_[i].control().Read().pins != 0;
  while (const std::optional<int> picked = PickBuffer(ranks, options_.rank, pinned)) {
    const auto index = static_cast<size_t>(*picked);
    const int64_t forgotten = held_.step[index];
    SetHeld(*picked, kNoStep);
    if (buffers_[index].control().TryBeginFill(Replace::kSealedToo, turn)) return picked;
    SetHeld(*picked, forgotten);  // pinned meanwhile
    pinned[index] = true;
  }
  return std::nullopt;
}

// All but the common one may: word that came since a buffer was looked for counts too.
bool Snapshotter::awaits_others() const {
  const std::vector<HeldSteps> ranks = table_.Read();
  const int64_t common = CommonStep(ranks);
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (ranks[options_.rank].step[i] != common && buffers_[i].control().Read().pins == 0)
      return true;
  }
  return false;
}

absl::StatusOr<uint32_t> Snapshotter::PutExtras(const Extras& extras, Buffer& buffer) {
  PayloadWriter writer;
  writer.Int(static_cast<uint32_t>(extras.size()));
  for (const auto& [key, value] : extras) writer.Text(key).Text(value);
  const std::span<std::byte> room = buffer.extra();
  if (writer.bytes().size() > room.size()) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "extras of {} bytes: the snapshot buffers have room for {} "
                 "(CheckpointerOptions::extras_bytes)",
                 writer.bytes().size(), room.size());
  }
  std::memcpy(room.data(), writer.bytes().data(), writer.bytes().size());
  return static_cast<uint32_t>(writer.bytes().size());
}

absl::StatusOr<Extras> ParseExtras(std::span<const std::byte> bytes) {
  PayloadReader reader({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  Extras extras;
  const auto count = reader.Int<uint32_t>();
  for (uint32_t i = 0; i < count && reader.ok(); ++i) {
    const std::string key(reader.Text());
    extras[key] = std::string(reader.Text());
  }
  if (!reader.ok())
    return Error(absl::StatusCode::kDataLoss, "extras of a snapshot: cut after {} of {} entries",
                 extras.size(), count);
  return extras;
}

absl::StatusOr<bool> Snapshotter::Begin(const Request& request, const StateView& state) {
  {
    MutexLock lock(mutex_);
    if (active_ && copier_busy_)
      return false;  // given up at the stall limit, and its copier is still inside
  }
  GiveUp();
  uint32_t turn = 0;
  const std::optional<int> picked = PickFree(&turn);
  if (!picked) return false;
  Buffer& buffer = buffers_[static_cast<size_t>(*picked)];
  const auto extra_bytes = PutExtras(state.extras, buffer);
  if (!extra_bytes.ok()) {
    buffer.control().Abandon(turn);
    return extra_bytes.status();
  }
  running_ = {request, *picked, turn, *extra_bytes, {}};
  for (const Region& region : state.regions) running_.sources.push_back(region.bytes);
  const std::span<std::byte> whole = WholeOf(buffer);
  for (const auto& pieces : plan_.chunks) {
    for (const CopyPiece& piece : pieces) {
      if (!eager_[piece.region]) continue;
      const std::byte* source = running_.sources[piece.region].data();
      const auto to = whole.subspan(piece.to, piece.bytes);
      if (piece.packer != kNoPacker) {
        plan_.packers[piece.packer].Gather(source, piece.from, to);
      } else {
        std::memcpy(to.data(), source + piece.from, piece.bytes);
      }
    }
  }
  memory_is_known_ = false;
  cancelled_.store(false, std::memory_order_relaxed);
  is_void_.store(false, std::memory_order_relaxed);
  chunks_done_.store(0, std::memory_order_relaxed);
  next_chunk_.store(0, std::memory_order_relaxed);
  for (auto& chunk : chunks_) chunk.store(ChunkState::kFree, std::memory_order_relaxed);
  {
    MutexLock lock(mutex_);
    announced_.assign(chunks_.size(), false);
    active_ = true;
    succeeded_ = false;
    ++serial_;
    changed_.NotifyAll();
  }
  if (request.mode == Mode::kEager) Finish();
  return true;
}

void Snapshotter::CopierLoop() {
  uint64_t worked_on = 0;
  while (true) {
    {
      MutexLock lock(mutex_);
      while (!stopping_ && !(active_ && serial_ != worked_on)) changed_.Wait(mutex_);
      if (stopping_) return;
      worked_on = serial_;
      copier_busy_ = true;
    }
    CopyChunks();
    MutexLock lock(mutex_);
    copier_busy_ = false;
    changed_.NotifyAll();
  }
}

void Snapshotter::CopyChunks() {
  const auto total = static_cast<uint32_t>(chunks_.size());
  while (!cancelled_.load(std::memory_order_relaxed)) {
    const uint32_t chunk = next_chunk_.fetch_add(1, std::memory_order_relaxed);
    if (chunk >= total) return;
    CopyIfFree(chunk);
  }
}

void Snapshotter::CopyIfFree(uint32_t chunk) {
  ChunkState free = ChunkState::kFree;
  if (!chunks_[chunk].compare_exchange_strong(free, ChunkState::kTaken, std::memory_order_relaxed))
    return;
  // Of an aborted generation nothing is sealed: what is left is only counted, and the cores go to
  // those who start again.
  if (cancelled_.load(std::memory_order_relaxed) ||
      options_.is_aborted(running_.request.generation)) {
    is_void_.store(true, std::memory_order_relaxed);
  } else {
    buffers_[static_cast<size_t>(running_.buffer)].chunk_crcs()[chunk] = CopyChunk(running_, chunk);
  }
  chunks_[chunk].store(ChunkState::kDone, std::memory_order_release);
  if (chunks_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks_.size()) Complete();
}

uint32_t Snapshotter::CopyChunk(const Running& running, uint32_t chunk) {
  const Buffer& buffer = buffers_[static_cast<size_t>(running.buffer)];
  const std::span<std::byte> whole = WholeOf(buffer);
  // The CRC is of the source: it covers the copy too, and the source is then in the cache.
  return PassOverChunk(
      whole, buffer.layout().chunk(chunk), plan_.chunks[chunk],
      [&](Crc32cStream& crc, const CopyPiece& piece, uint64_t done, uint64_t bytes) {
        std::byte* to = whole.data() + piece.to + done;
        if (eager_[piece.region]) return crc.Update({to, bytes});  // was copied when it began
        if (piece.packer != kNoPacker) {
          plan_.packers[piece.packer].Gather(running.sources[piece.region].data(),
                                             piece.from + done, {to, bytes});
          return crc.Update({to, bytes});
        }
        const std::byte* from = running.sources[piece.region].data() + piece.from + done;
        crc.Update({from, bytes});
        StreamCopy(to, from, bytes);
      });
}

// What was copied in the save call itself may have changed since; the rest must not.
bool Snapshotter::HoldsSourceOf(uint32_t chunk) const {
  const Buffer& buffer = buffers_[static_cast<size_t>(running_.buffer)];
  const std::span<std::byte> whole = WholeOf(buffer);
  const uint32_t found = PassOverChunk(
      whole, buffer.layout().chunk(chunk), plan_.chunks[chunk],
      [&](Crc32cStream& crc, const CopyPiece& piece, uint64_t done, uint64_t bytes) {
        const std::byte* source = running_.sources[piece.region].data();
        if (eager_[piece.region]) {
          crc.Update({whole.data() + piece.to + done, bytes});
        } else if (piece.packer == kNoPacker) {
          crc.Update({source + piece.from + done, bytes});
        } else {
          std::array<std::byte, kCopyPieceBytes> packed;
          plan_.packers[piece.packer].Gather(source, piece.from + done, {packed.data(), bytes});
          crc.Update({packed.data(), bytes});
        }
      });
  return found == buffer.chunk_crcs()[chunk];
}

std::vector<uint32_t> Snapshotter::DrawRechecked() const {
  constexpr uint64_t kOneSnapshotIn = 4, kChunks = 4;
  if (running_.request.mode == Mode::kEager) return {};  // nobody else ran
  const auto total = static_cast<uint32_t>(chunks_.size());
  std::vector<uint32_t> drawn;
  if (options_.recheck == Options::Recheck::kAll) {
    drawn.resize(total);
    std::iota(drawn.begin(), drawn.end(), 0);
  } else if (running_.turn % kOneSnapshotIn == 0) {
    for (uint64_t i = 0; i < std::min<uint64_t>(total, kChunks); ++i) {
      const uint64_t number = static_cast<uint64_t>(running_.request.step) * kChunks + i + 1;
      drawn.push_back(static_cast<uint32_t>(Mix(number) % total));
    }
  }
  return drawn;
}

// The trainer still waits with its update, or has forgotten to: then a copy may hold two steps.
bool Snapshotter::IsSourceUnchanged() {
  std::vector<uint32_t> drawn = DrawRechecked();
  {
    MutexLock lock(mutex_);
    std::erase_if(drawn, [&](uint32_t chunk)
                             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return announced_[chunk]; });
    if (drawn.empty()) return true;
    rechecking_ = true;
  }
  const bool unchanged =
      std::ranges::all_of(drawn, [this](uint32_t chunk) { return HoldsSourceOf(chunk); });
  MutexLock lock(mutex_);
  rechecking_ = false;
  changed_.NotifyAll();
  return unchanged;
}

// On the thread that copied the last chunk.
void Snapshotter::Complete() {
  const Running& running = running_;
  Buffer& buffer = buffers_[static_cast<size_t>(running.buffer)];
  bool sealed = false;
  if (cancelled_.load(std::memory_order_relaxed) || is_void_.load(std::memory_order_relaxed) ||
      options_.is_aborted(running.request.generation)) {
    buffer.control().Abandon(running.turn);
  } else if (!IsSourceUnchanged()) {
    buffer.control().Abandon(running.turn);
    options_.on_changed(running.request.step, running.request.generation);
  } else {
    SealInfo info;
    info.job_id = options_.job_id;
    info.generation = running.request.generation;
    info.step = running.request.step;
    info.rank = options_.rank;
    info.world = options_.world;
    info.layout_hash = assignment_.layout_hash;
    info.update_stamp = running.request.update_stamp;
    info.sealed_at_ns = static_cast<uint64_t>(MonotonicNanos());
    info.extra_bytes = running.extra_bytes;
    sealed = buffer.Seal(running.turn, info).ok();
  }
  if (sealed) {
    bool wanted = running.request.want != Want::kMemory;
    // The save would be dropped, for the former one is still being written; and where nobody is
    // left to drop it (an agent that is dying), a second pin would end memory's snapshots.
    if (wanted && running.request.may_be_left_out && is_being_saved()) {
      wanted = false;
      options_.on_wanted_skipped(running.request.step, running.request.generation);
    }
    // Pinned before the row shows it: from here on nobody overwrites it before the keeper has seen
    // it.
    if (wanted) buffer.control().TryPin(BufferPin::kPersist, running.turn);
    SetHeld(running.buffer, running.request.step);
    sealed_.fetch_add(1, std::memory_order_relaxed);
    if (wanted) {
      options_.on_wanted_sealed(running.request.step, running.request.generation, running.buffer,
                                running.turn, running.request.want == Want::kDiskLast);
    } else {
      options_.on_memory_sealed(running.request.generation);
    }
  } else {
    TellSkippedIfWanted();
  }
  MutexLock lock(mutex_);
  active_ = false;
  succeeded_ = sealed;
  changed_.NotifyAll();
}

bool Snapshotter::Finish() {
  {
    MutexLock lock(mutex_);
    if (!active_ && !copier_busy_) return succeeded_;
  }
  if (is_running()) CopyChunks();
  const absl::Duration deadline = Clock::Real().Uptime() + options_.stall_limit;
  MutexLock lock(mutex_);
  // One that was cancelled is never complete: only its copier is waited for.
  while ((active_ && !cancelled_.load(std::memory_order_relaxed)) || copier_busy_) {
    const absl::Duration left = deadline - Clock::Real().Uptime();
    if (left <= absl::ZeroDuration()) {
      cancelled_.store(
          true, std::memory_order_relaxed);  // whatever the copier still reads is never sealed
      return false;
    }
    changed_.WaitFor(mutex_, left);
  }
  return succeeded_;
}

std::optional<uint32_t> Snapshotter::RegionOf(std::string_view name) const {
  const auto found = region_of_name_.find(name);
  if (found == region_of_name_.end()) return std::nullopt;
  return found->second;
}

std::span<const uint32_t> Snapshotter::ChunksOf(uint32_t region) {
  if (!memory_is_known_ && !(of_memory_ && of_memory_->IsOf(running_.sources)))
    of_memory_.emplace(plan_, eager_, running_.sources);
  memory_is_known_ = true;
  return of_memory_->Of(region);
}

bool Snapshotter::Announce(uint32_t region) {
  if (!is_running()) return true;
  const std::span<const uint32_t> chunks = ChunksOf(region);
  MutexLock lock(mutex_);
  for (const uint32_t chunk : chunks) announced_[chunk] = true;
  return !rechecking_ && std::ranges::all_of(chunks, [this](uint32_t chunk) {
    return chunks_[chunk].load(std::memory_order_acquire) == ChunkState::kDone;
  });
}

void Snapshotter::FinishRegion(uint32_t region) {
  constexpr absl::Duration kLook = absl::Microseconds(20);  // a chunk takes some 60
  const absl::Duration deadline = Clock::Real().Uptime() + options_.stall_limit;
  const std::span<const uint32_t> chunks = ChunksOf(region);
  for (const uint32_t chunk : chunks) CopyIfFree(chunk);
  const auto is_needed = [&] {
    MutexLock lock(mutex_);
    return rechecking_ || std::ranges::any_of(chunks, [this](uint32_t chunk) {
             return chunks_[chunk].load(std::memory_order_acquire) == ChunkState::kTaken;
           });
  };
  while (is_needed()) {
    if (Clock::Real().Uptime() > deadline) {
      cancelled_.store(true, std::memory_order_relaxed);
      return;
    }
    Clock::Real().SleepFor(kLook);
  }
}

// When it returns the copier looks at nothing of the last snapshot any more, also when that one was
// complete and the copier only on its way out: what is set up next is not handed to it by mistake.
void Snapshotter::GiveUp() {
  {
    MutexLock lock(mutex_);
    if (active_) cancelled_.store(true, std::memory_order_relaxed);
    while (copier_busy_) changed_.Wait(mutex_);
    if (!active_) return;
    buffers_[static_cast<size_t>(running_.buffer)].control().Abandon(running_.turn);
    active_ = false;
    succeeded_ = false;
  }
  TellSkippedIfWanted();
}

void Snapshotter::TellSkippedIfWanted() const {
  const Request& request = running_.request;
  if (request.want != Want::kMemory) options_.on_wanted_skipped(request.step, request.generation);
}

absl::Status Snapshotter::Restore(int index, uint32_t turn, const StateView& state, Belief belief) {
  if (index < 0 || static_cast<size_t>(index) >= buffers_.size()) {
    return Error(absl::StatusCode::kInternal, "restore from buffer {}: there are {}", index,
                 buffers_.size());
  }
  Buffer& buffer = buffers_[static_cast<size_t>(index)];
  OUTLAST_ASSIGN_OR_RETURN(const Buffer::Sealed sealed,
                           buffer.ReadSealed(options_.run_id, BootId(), assignment_.layout_hash));
  if (sealed.turn != turn) {
    return Error(absl::StatusCode::kDataLoss, "snapshot in buffer {}: turn {}, wanted {}", index,
                 sealed.turn, turn);
  }
  return CopyBack(buffer, plan_, sealed.header.step, state, belief);
}

absl::Status Snapshotter::Mend(int index, uint32_t turn, const StateView& state) {
  const Buffer& buffer = buffers_[static_cast<size_t>(index)];
  OUTLAST_ASSIGN_OR_RETURN(const Buffer::Sealed sealed,
                           buffer.ReadSealed(options_.run_id, BootId(), assignment_.layout_hash));
  if (sealed.turn != turn)
    return Error(absl::StatusCode::kFailedPrecondition, "snapshot in buffer {}: turn {}, wanted {}",
                 index, sealed.turn, turn);
  return CopyIn(buffer, plan_, std::as_bytes(std::span(assignment_.header)), state);
}

std::optional<Snapshotter::Borrowed> Snapshotter::Borrow() {
  uint32_t turn = 0;
  const std::optional<int> picked = PickFree(&turn);
  if (!picked) return std::nullopt;
  return Borrowed(buffers_[static_cast<size_t>(*picked)], *picked, turn);
}

absl::StatusOr<Extras> Snapshotter::ReadExtras(int index) const {
  const Buffer& buffer = buffers_[static_cast<size_t>(index)];
  OUTLAST_ASSIGN_OR_RETURN(const Buffer::Sealed sealed,
                           buffer.ReadSealed(options_.run_id, BootId(), assignment_.layout_hash));
  OUTLAST_ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, buffer.ReadExtra(sealed));
  return ParseExtras(bytes);
}

}  // namespace outlast
