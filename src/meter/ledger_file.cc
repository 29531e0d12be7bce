#include "outlast/meter/ledger_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <concepts>
#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "outlast/base/crc32c.h"

namespace outlast {
namespace {

static_assert(std::endian::native == std::endian::little,
              "fields are stored as they lie in memory");

constexpr size_t kRecordHeader = 8;
constexpr size_t kLongestPayload = 256 << 10;
constexpr size_t kLongestText = 0xffff;
constexpr uint16_t kVersion = 1;
constexpr uint64_t kLargestLedger = uint64_t{4} << 30;

// Each struct's fields once, for both directions.
template <typename A>
void Fields(A& a, auto& e) {
  using E = std::remove_cvref_t<decltype(e)>;
  if constexpr (std::same_as<E, ClockDomainEntry>) {
    a(e.job_id, e.run_id, e.boot_id, e.boottime_ns, e.realtime_ns, e.job, e.command);
  } else if constexpr (std::same_as<E, SubmitEntry>) {
    a(e.time_ns);
  } else if constexpr (std::same_as<E, UpEntry>) {
    a(e.time_ns, e.generation, e.slot, e.rank, e.pid);
  } else if constexpr (std::same_as<E, DownEntry>) {
    a(e.time_ns, e.generation, e.slot, e.rank, e.pid, e.cause, e.how);
  } else if constexpr (std::same_as<E, CommitEntry>) {
    a(e.time_ns, e.generation, e.world);
  } else if constexpr (std::same_as<E, StepEntry>) {
    a(e.start_ns, e.end_ns, e.generation, e.slot, e.rank, e.step, e.data_ns, e.forward_ns,
      e.backward_ns, e.optimizer_ns, e.checkpoint_stall_ns, e.collective_wait_ns, e.tokens_real,
      e.tokens_padded, e.tokens_loss, e.samples, e.model_flops, e.loss, e.gradient_norm, e.flags);
  } else if constexpr (std::same_as<E, SectionEntry>) {
    a(e.start_ns, e.end_ns, e.generation, e.slot, e.phase);
  } else if constexpr (std::same_as<E, DetectedEntry>) {
    a(e.time_ns, e.last_progress_ns, e.generation, e.slot, e.rank, e.step, e.fault_class, e.found);
  } else if constexpr (std::same_as<E, RollbackEntry>) {
    a(e.time_ns, e.generation, e.resume_step, e.reached_step, e.source);
  } else if constexpr (std::same_as<E, CheckpointEntry>) {
    a(e.start_ns, e.end_ns, e.generation, e.step, e.bytes, e.error);
  } else if constexpr (std::same_as<E, RestoreEntry>) {
    a(e.start_ns, e.end_ns, e.generation, e.slot, e.step, e.bytes, e.source);
  } else if constexpr (std::same_as<E, CardsEntry>) {
    a(e.time_ns, e.planned, e.held);
  } else if constexpr (std::same_as<E, EndEntry>) {
    a(e.time_ns, e.exit_code, e.reason);
  } else if constexpr (std::same_as<E, MeterEntry>) {
    a(e.time_ns, e.slot, e.flops_per_unit, e.peak_flops_per_second, e.flops_text, e.peak_text);
  } else {
    static_assert(std::same_as<E, JoinedEntry>);
    a(e.time_ns, e.run_id, e.node);
  }
}

class Encoder {
 public:
  explicit Encoder(std::vector<std::byte>& out) : out_(out) {}

  void operator()(const auto&... fields) { (Put(fields), ...); }

  void Put(const std::string& text) {
    const size_t length = std::min(text.size(), kLongestText);
    Put(static_cast<uint16_t>(length));
    Bytes(text.data(), length);
  }
  template <typename T>
  requires std::is_trivially_copyable_v<T>
  void Put(const T& value) { Bytes(&value, sizeof(value)); }

 private:
  void Bytes(const void* data, size_t size) {
    const auto* bytes = static_cast<const std::byte*>(data);
    out_.insert(out_.end(), bytes, bytes + size);
  }

  std::vector<std::byte>& out_;
};

class Decoder {
 public:
  explicit Decoder(std::span<const std::byte> bytes) : bytes_(bytes) {}

  void operator()(auto&... fields) { (Get(fields), ...); }

  void Get(std::string& text) {
    uint16_t length = 0;
    Get(length);
    if (length > bytes_.size()) {
      ok_ = false;
      return;
    }
    text.assign(reinterpret_cast<const char*>(bytes_.data()), length);
    bytes_ = bytes_.subspan(length);
  }
  template <typename T>
  requires std::is_trivially_copyable_v<T>
  void Get(T& value) {
    if (sizeof(value) > bytes_.size()) {
      ok_ = false;
      return;
    }
    std::memcpy(&value, bytes_.data(), sizeof(value));
    bytes_ = bytes_.subspan(sizeof(value));
  }

  bool ok() const { return ok_; }

 private:
  std::span<const std::byte> bytes_;
  bool ok_ = true;
};

// The entry of index `kind` - 1 in the variant, with its default fields.
template <size_t I = 0>
std::optional<LedgerEntry> MakeEntry(size_t kind) {
  if constexpr (I == std::variant_size_v<LedgerEntry>) {
    return std::nullopt;
  } else {
    if (kind == I + 1) return LedgerEntry(std::in_place_index<I>);
    return MakeEntry<I + 1>(kind);
  }
}

std::optional<LedgerEntry> DecodePayload(std::span<const std::byte> payload) {
  Decoder decoder(payload);
  uint16_t kind = 0;
  uint16_t version = 0;
  decoder(kind, version);
  std::optional<LedgerEntry> entry = MakeEntry(kind);
  if (!decoder.ok() || version < 1 || !entry) return std::nullopt;
  std::visit([&](auto& each) { Fields(decoder, each); }, *entry);
  return decoder.ok() ? entry : std::nullopt;
}

absl::StatusOr<std::vector<std::byte>> ReadAll(int fd, const std::string& path) {
  struct stat info {};
  if (fstat(fd, &info) != 0) return ErrnoStatus(errno, path);
  if (!S_ISREG(info.st_mode))
    return Error(absl::StatusCode::kDataLoss, "{} is not a regular file", path);
  if (static_cast<uint64_t>(info.st_size) > kLargestLedger) {
    return Error(absl::StatusCode::kResourceExhausted, "{} has {} bytes, a ledger is read up to {}",
                 path, info.st_size, kLargestLedger);
  }
  std::vector<std::byte> bytes(static_cast<size_t>(info.st_size));
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got =
        pread(fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, path);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  bytes.resize(done);
  return bytes;
}

// A writer that was killed in its very first record leaves less than that record says it has.
bool IsCutInFirstRecord(std::span<const std::byte> bytes) {
  if (bytes.size() < kRecordHeader) return true;
  uint32_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  return length >= 4 && length <= kLongestPayload && length > bytes.size() - kRecordHeader;
}

absl::Status CheckIsLedger(const LedgerRead& read, std::span<const std::byte> bytes,
                           const std::string& path) {
  const bool starts_right =
      !read.entries.empty() && std::holds_alternative<ClockDomainEntry>(read.entries.front());
  if (starts_right || (read.whole_bytes == 0 && IsCutInFirstRecord(bytes))) return absl::OkStatus();
  return Error(absl::StatusCode::kDataLoss,
               "{} is no ledger: its first record is no clock_domain record", path);
}

}  // namespace

std::string_view ToString(StateSource source) {
  switch (source) {
    case StateSource::kUnknown:
      return "unknown";
    case StateSource::kNothing:
      return "nothing";
    case StateSource::kMemory:
      return "memory";
    case StateSource::kPeer:
      return "peer";
    case StateSource::kDisk:
      return "disk";
    case StateSource::kRemote:
      return "remote";
  }
  return "unknown";
}

StepEntry ToStepEntry(const StepRecord& record, int32_t slot, int32_t rank,
                      int64_t boottime_minus_monotonic_ns) {
  const auto nanos = [](uint64_t value) { return static_cast<int64_t>(value); };
  const auto time = [&](uint64_t value) {
    return static_cast<int64_t>(value + static_cast<uint64_t>(boottime_minus_monotonic_ns));
  };
  return {.start_ns = time(record.start_ns),
          .end_ns = time(record.end_ns),
          .generation = record.generation,
          .slot = slot,
          .rank = rank,
          .step = nanos(record.step),
          .data_ns = nanos(record.data_ns),
          .forward_ns = nanos(record.forward_ns),
          .backward_ns = nanos(record.backward_ns),
          .optimizer_ns = nanos(record.optimizer_ns),
          .checkpoint_stall_ns = nanos(record.checkpoint_stall_ns),
          .collective_wait_ns = nanos(record.collective_wait_ns),
          .tokens_real = record.tokens_real,
          .tokens_padded = record.tokens_padded,
          .tokens_loss = record.tokens_loss,
          .samples = record.samples,
          .model_flops = record.model_flops,
          .loss = record.loss,
          .gradient_norm = record.gradient_norm,
          .flags = record.flags};
}

void AppendRecord(const LedgerEntry& entry, std::vector<std::byte>& out) {
  const size_t start = out.size();
  out.resize(start + kRecordHeader);
  Encoder encoder(out);
  encoder(static_cast<uint16_t>(entry.index() + 1), kVersion);
  std::visit([&](const auto& each) { Fields(encoder, each); }, entry);

  const std::span<const std::byte> payload(out.data() + start + kRecordHeader,
                                           out.size() - start - kRecordHeader);
  const auto bytes = static_cast<uint32_t>(payload.size());
  const uint32_t crc = Crc32c(payload);
  std::memcpy(out.data() + start, &bytes, sizeof(bytes));
  std::memcpy(out.data() + start + 4, &crc, sizeof(crc));
}

LedgerRead ParseLedger(std::span<const std::byte> bytes) {
  LedgerRead read;
  std::span<const std::byte> rest = bytes;
  while (rest.size() >= kRecordHeader) {
    uint32_t length = 0;
    uint32_t crc = 0;
    std::memcpy(&length, rest.data(), sizeof(length));
    std::memcpy(&crc, rest.data() + 4, sizeof(crc));
    // A run of zeros, as a lost tail of a file reads, is a record of length 0 with a right
    // checksum: not one of ours.
    if (length < 4 || length > kLongestPayload || length > rest.size() - kRecordHeader) break;
    const auto payload = rest.subspan(kRecordHeader, length);
    if (Crc32c(payload) != crc) break;
    if (std::optional<LedgerEntry> entry = DecodePayload(payload)) {
      read.entries.push_back(std::move(*entry));
    } else {
      ++read.skipped;
    }
    rest = rest.subspan(kRecordHeader + length);
  }
  read.whole_bytes = bytes.size() - rest.size();
  read.cut_bytes = rest.size();
  return read;
}

absl::StatusOr<LedgerRead> ReadLedger(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.is_open()) return ErrnoStatus(errno, path);
  OUTLAST_ASSIGN_OR_RETURN(const std::vector<std::byte> bytes, ReadAll(fd.get(), path));
  LedgerRead read = ParseLedger(bytes);
  OUTLAST_RETURN_IF_ERROR(CheckIsLedger(read, bytes, path));
  return read;
}

absl::StatusOr<LedgerWriter> LedgerWriter::Open(const std::string& path) {
  UniqueFd fd(open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!fd.is_open()) return ErrnoStatus(errno, path);
  OUTLAST_ASSIGN_OR_RETURN(const std::vector<std::byte> bytes, ReadAll(fd.get(), path));
  const LedgerRead read = ParseLedger(bytes);
  OUTLAST_RETURN_IF_ERROR(CheckIsLedger(read, bytes, path));
  const auto size = static_cast<int64_t>(read.whole_bytes);
  if (read.cut_bytes > 0 && ftruncate(fd.get(), size) != 0) return ErrnoStatus(errno, path);
  return LedgerWriter(std::move(fd), path, size);
}

absl::Status LedgerWriter::Append(std::span<const LedgerEntry> entries) {
  std::vector<std::byte> bytes;
  for (const LedgerEntry& entry : entries) AppendRecord(entry, bytes);
  if (absl::Status written = WriteAll(fd_.get(), bytes); !written.ok()) {
    // Part of a record in the middle would hide every later one.
    if (ftruncate(fd_.get(), size_) != 0) return Annotate(ErrnoStatus(errno, "ftruncate"), path_);
    return Annotate(written, path_);
  }
  size_ += static_cast<int64_t>(bytes.size());
  return absl::OkStatus();
}

}  // namespace outlast
