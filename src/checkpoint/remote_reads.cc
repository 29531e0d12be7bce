#include "checkpoint/remote_reads.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/channel.h"
#include "base/error.h"
#include "outlast/base/clock.h"
#include "store/folder.h"

namespace outlast {
namespace {

// Of a rank: eight reads of 4 MiB at once.
constexpr uint64_t kWindowBytes = uint64_t{32} << 20;
constexpr int kThreads = 16;  // of a node

absl::StatusOr<uint64_t> BytesOf(int fd) {
  struct stat facts;
  if (fstat(fd, &facts) != 0) return FileError(errno, "fstat", "memory of a restore");
  return static_cast<uint64_t>(facts.st_size);
}

// Shards as the agent brings them.
class RangeSource final : public ShardSource {
 public:
  RangeSource(Link& link, uint64_t generation, uint32_t attempt, absl::Duration until,
              Mapping window)
      : link_(link),
        generation_(generation),
        attempt_(attempt),
        until_(until),
        window_(std::move(window)) {}

  absl::Status Read(uint32_t rank, uint64_t offset, std::span<std::byte> into) override {
    const RangeWanted wanted{attempt_, rank, offset, into.size(),
                             static_cast<uint64_t>(into.data() - window_.data())};
    const absl::Duration left =
        std::max(until_ - Clock::Real().Uptime(), absl::Duration(absl::Milliseconds(1)));
    return link_.Call(MessageKind::kReadRange, generation_, wanted.Encode(), left).status();
  }
  std::span<std::byte> memory() override { return window_.bytes(); }

 private:
  Link& link_;
  const uint64_t generation_;
  const uint32_t attempt_;
  const absl::Duration until_;
  const Mapping window_;
};

}  // namespace

std::string RangeWanted::Encode() const {
  return PayloadWriter().Int(attempt).Int(rank).Int(offset).Int(bytes).Int(at).bytes();
}

absl::StatusOr<RangeWanted> RangeWanted::Decode(std::string_view payload) {
  PayloadReader reader(payload);
  RangeWanted wanted;
  wanted.attempt = reader.Int<uint32_t>();
  wanted.rank = reader.Int<uint32_t>();
  wanted.offset = reader.Int<uint64_t>();
  wanted.bytes = reader.Int<uint64_t>();
  wanted.at = reader.Int<uint64_t>();
  if (reader.ok()) return wanted;
  return Error(absl::StatusCode::kInvalidArgument, "a range of a shard: malformed");
}

// --- The agent's side

absl::StatusOr<std::shared_ptr<RemoteReads>> RemoteReads::Open(std::shared_ptr<RemoteRoot> root,
                                                               const std::string& checkpoint,
                                                               int slots) {
  OUTLAST_ASSIGN_OR_RETURN(const std::string head, root->ReadHead(checkpoint));
  OUTLAST_ASSIGN_OR_RETURN(
      auto reader, CheckpointReader::Of(fmt::format("{}/{}", root->uri(), checkpoint), head));
  uint64_t window_bytes = kWindowBytes, all = kBlockAlignment;
  for (const Receipt& receipt : reader->receipts()) {
    if (!receipt.file) continue;
    window_bytes = std::max(window_bytes, 2 * uint64_t{receipt.file->chunk_bytes});
    all += (receipt.file->bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
  }
  window_bytes = std::min(window_bytes, all);
  std::shared_ptr<RemoteReads> reads(new RemoteReads(std::move(root), std::move(reader)));
  OUTLAST_ASSIGN_OR_RETURN(reads->head_, MakeSealedMemory("outlast-head", head.size()));
  OUTLAST_RETURN_IF_ERROR(WriteAll(reads->head_.get(), std::as_bytes(std::span(head))));
  for (int slot = 0; slot < slots; ++slot) {
    Window& window = reads->windows_.emplace_back();
    OUTLAST_ASSIGN_OR_RETURN(window.fd, MakeSealedMemory("outlast-window", window_bytes));
    OUTLAST_ASSIGN_OR_RETURN(window.memory, Mapping::Shared(window.fd.get(), window_bytes));
  }
  for (int i = 0; i < kThreads; ++i)
    reads->threads_.push_back(std::make_unique<SerialThread>("outlast-range"));
  return reads;
}

RemoteReads::~RemoteReads() {
  Cancel();
  threads_.clear();
}

void RemoteReads::Read(int slot, const RangeWanted& wanted,
                       std::function<void(absl::Status)> done) {
  threads_[next_++ % threads_.size()]->Post([this, slot, wanted, done = std::move(done)] {
    done(Fill(windows_[static_cast<size_t>(slot)], wanted));
  });
}

absl::Status RemoteReads::Fill(const Window& window, const RangeWanted& wanted) {
  if (is_cancelled_) return Error(absl::StatusCode::kCancelled, "the restore is over");
  const auto& receipts = reader_->receipts();
  const bool has_shard = wanted.rank < receipts.size() && receipts[wanted.rank].file.has_value();
  const uint64_t file_bytes = has_shard ? receipts[wanted.rank].file->bytes : 0;
  const uint64_t room = window.memory.size();
  if (wanted.offset > file_bytes || wanted.bytes > file_bytes - wanted.offset || wanted.at > room ||
      wanted.bytes > room - wanted.at) {
    return Error(absl::StatusCode::kInternal,
                 "{}: {} bytes from {} of rank {}'s shard of {} wanted, at {} of a window of {}",
                 reader_->folder(), wanted.bytes, wanted.offset, wanted.rank, file_bytes, wanted.at,
                 room);
  }
  OUTLAST_RETURN_IF_ERROR(root_->ReadRange(reader_->manifest().checkpoint,
                                           *receipts[wanted.rank].file, wanted.offset,
                                           window.memory.bytes().subspan(wanted.at, wanted.bytes),
                                           [this] { return is_cancelled_.load(); }));
  bytes_read_ += wanted.bytes;
  return absl::OkStatus();
}

// --- The rank's side

RangeLink::RangeLink(Link& link, uint64_t generation, uint32_t attempt, absl::Duration limit)
    : link_(link),
      generation_(generation),
      attempt_(attempt),
      until_(Clock::Real().Uptime() + limit) {}

absl::StatusOr<std::unique_ptr<CheckpointReader>> RangeLink::OpenReader(const std::string& place,
                                                                        int head,
                                                                        int window) const {
  OUTLAST_ASSIGN_OR_RETURN(const uint64_t head_bytes, BytesOf(head));
  OUTLAST_ASSIGN_OR_RETURN(const Mapping text, Mapping::SharedReadOnly(head, head_bytes));
  OUTLAST_ASSIGN_OR_RETURN(const uint64_t window_bytes, BytesOf(window));
  OUTLAST_ASSIGN_OR_RETURN(Mapping memory, Mapping::Shared(window, window_bytes));
  return CheckpointReader::Of(
      place, {reinterpret_cast<const char*>(text.data()), text.size()},
      std::make_unique<RangeSource>(link_, generation_, attempt_, until_, std::move(memory)));
}

}  // namespace outlast
