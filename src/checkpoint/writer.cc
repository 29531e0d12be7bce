#include "checkpoint/writer.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <thread>
#include <utility>

#include "base/error.h"
#include "outlast/base/crc32c.h"
#include "outlast/base/mutex.h"

namespace outlast {
namespace {

// A linear map over GF(2) of 32-bit values: row i is the image of bit i.
using Operator = std::array<uint32_t, 32>;

uint32_t Apply(const Operator& map, uint32_t value) {
  uint32_t sum = 0;
  for (size_t i = 0; value != 0; ++i, value >>= 1) {
    if (value & 1) sum ^= map[i];
  }
  return sum;
}

Operator Squared(const Operator& map) {
  Operator square;
  for (size_t i = 0; i < square.size(); ++i) square[i] = Apply(map, map[i]);
  return square;
}

// What appending one zero bit does to the register of CRC32C (reflected polynomial 0x82f63b78).
Operator OneZeroBit() {
  Operator map;
  map[0] = 0x82f63b78;
  for (size_t i = 1; i < map.size(); ++i) map[i] = 1u << (i - 1);
  return map;
}

// What appending `bytes` zero bytes does.
Operator ZeroBytes(uint64_t bytes) {
  Operator result;
  for (size_t i = 0; i < result.size(); ++i) result[i] = 1u << i;
  Operator power = Squared(Squared(Squared(OneZeroBit())));  // 8 bits
  for (; bytes != 0; bytes >>= 1, power = Squared(power)) {
    if ((bytes & 1) == 0) continue;
    for (uint32_t& row : result) row = Apply(power, row);
  }
  return result;
}

// The CRC of a whole file from those of its chunks: a second pass over the bytes would cost as much
// as the first.
uint32_t CombineChunks(std::span<const uint32_t> chunks, uint64_t bytes) {
  const Operator whole_chunk = ZeroBytes(kChunkBytes);
  uint32_t crc = 0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const uint64_t length = std::min<uint64_t>(kChunkBytes, bytes - i * kChunkBytes);
    crc = Apply(length == kChunkBytes ? whole_chunk : ZeroBytes(length), crc) ^ chunks[i];
  }
  return crc;
}

// Takes the CRCs of an image block by block, ahead of the one who writes it: the disk does not wait
// for the processor. It stays near enough that what it read is still in the cache for the write.
class BlockChecker {
 public:
  // `wanted` CRCs, by chunk; none: they are only taken. All borrowed.
  BlockChecker(std::span<const std::byte> image, std::span<const uint32_t> wanted,
               size_t block_bytes, const std::string& path, const ShardWriteOptions& options)
      : image_(image),
        wanted_(wanted),
        block_bytes_(block_bytes),
        path_(path),
        one_in_(!wanted.empty() && options.crcs == ShardWriteOptions::Crcs::kSample ? kSampleOneIn
                                                                                    : 1),
        sample_(options.sample % one_in_) {
    crcs_.reserve(image.size() / kChunkBytes + 1);
    if (image.size() <= block_bytes) return;  // nothing to be ahead of
    thread_ = std::thread([this] { Run(); });
    pthread_setname_np(thread_.native_handle(), "outlast-crc");
  }
  ~BlockChecker() { Stop(); }
  BlockChecker(const BlockChecker&) = delete;
  BlockChecker& operator=(const BlockChecker&) = delete;

  // Returns when block `index` was checked, and lets the next ones be. In ascending order.
  absl::Status Await(size_t index) {
    if (!thread_.joinable()) return CheckBlock(index);
    MutexLock lock(mutex_);
    awaited_ = index;
    changed_.NotifyAll();
    while (checked_ <= index && status_.ok()) changed_.Wait(mutex_);
    return checked_ > index ? absl::OkStatus() : status_;
  }
  // After the last block.
  std::vector<uint32_t> TakeCrcs() {
    Stop();
    return std::move(crcs_);
  }

 private:
  static constexpr size_t kAhead = 2;  // blocks

  void Run() {
    for (size_t index = 0; index * block_bytes_ < image_.size(); ++index) {
      {
        MutexLock lock(mutex_);
        while (!stopping_ && index > awaited_ + kAhead) changed_.Wait(mutex_);
        if (stopping_) return;
      }
      absl::Status status = CheckBlock(index);
      MutexLock lock(mutex_);
      status_ = std::move(status);
      if (status_.ok()) checked_ = index + 1;
      changed_.NotifyAll();
      if (!status_.ok()) return;
    }
  }

  absl::Status CheckBlock(size_t index) {
    const size_t end = std::min((index + 1) * block_bytes_, image_.size());
    for (size_t at = index * block_bytes_; at < end; at += kChunkBytes) {
      const size_t i = crcs_.size();
      if (i % one_in_ != sample_) {
        crcs_.push_back(wanted_[i]);
        continue;
      }
      const uint32_t crc = Crc32c(image_.subspan(at, std::min<size_t>(kChunkBytes, end - at)));
      if (!wanted_.empty() && crc != wanted_[i]) {
        return Error(absl::StatusCode::kDataLoss,
                     "{}: the buffer's chunk at {} has crc {:08x}, {:08x} was sealed", path_, at,
                     crc, wanted_[i]);
      }
      crcs_.push_back(crc);
    }
    return absl::OkStatus();
  }

  void Stop() {
    {
      MutexLock lock(mutex_);
      stopping_ = true;
      changed_.NotifyAll();
    }
    if (thread_.joinable()) thread_.join();
  }

  const std::span<const std::byte> image_;
  const std::span<const uint32_t> wanted_;
  const size_t block_bytes_;
  const std::string& path_;
  const uint64_t one_in_;  // chunks that are checked
  const uint64_t sample_;
  std::vector<uint32_t> crcs_;  // the thread's; ours when there is none, or it has ended
  Mutex mutex_;
  CondVar changed_;
  size_t awaited_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t checked_ ABSL_GUARDED_BY(mutex_) = 0;  // blocks
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace

namespace {

// A multiple of kChunkBytes. Where a rate is given, some tenth of a second of it: one stream of
// bytes then, not bursts of a large block each.
size_t BlockBytes(const ShardWriteOptions& options) {
  size_t chunks = options.io.block_bytes / kChunkBytes;
  if (options.limiter != nullptr && options.limiter->bytes_per_second() != 0)
    chunks = std::min<size_t>(chunks, options.limiter->bytes_per_second() / 10 / kChunkBytes);
  return std::max<size_t>(chunks, 1) * kChunkBytes;
}

}  // namespace

uint32_t CombineCrcs(uint32_t first, uint32_t second, uint64_t second_bytes) {
  return Apply(ZeroBytes(second_bytes), first) ^ second;
}

std::vector<uint32_t> ChunkCrcs(std::span<const std::byte> bytes) {
  std::vector<uint32_t> crcs;
  crcs.reserve(bytes.size() / kChunkBytes + 1);
  for (size_t at = 0; at < bytes.size(); at += kChunkBytes) {
    crcs.push_back(Crc32c(bytes.subspan(at, std::min<size_t>(kChunkBytes, bytes.size() - at))));
  }
  return crcs;
}

std::vector<SavedBox> SavedBoxesOf(const Assignment& assignment) {
  std::vector<SavedBox> boxes;
  boxes.reserve(assignment.image.size());
  for (const PlannedItem& item : assignment.image) {
    const SafetensorsBox& box = item.box;
    boxes.push_back(
        {box.name, box.key, box.dtype, box.global, box.offset, box.extent, box.begin, box.end});
  }
  return boxes;
}

absl::StatusOr<ShardFile> WriteShard(const std::string& folder, uint32_t writer,
                                     std::span<const std::byte> image,
                                     std::span<const uint32_t> chunks,
                                     const ShardWriteOptions& options) {
  ShardFile file;
  file.name = ShardName(writer);
  file.bytes = image.size();
  const std::string path = folder + "/" + file.name;
  const size_t count = (image.size() + kChunkBytes - 1) / kChunkBytes;
  if (!chunks.empty() && chunks.size() != count) {
    return Error(absl::StatusCode::kInvalidArgument, "{}: {} chunk CRCs for {} bytes, {} wanted",
                 path, chunks.size(), image.size(), count);
  }
  OUTLAST_ASSIGN_OR_RETURN(DirectWriter file_writer,
                           DirectWriter::Create(path, image.size(), options.io));
  const size_t block = BlockBytes(options);
  BlockChecker checker(image, chunks, block, path, options);
  for (size_t at = 0; at < image.size(); at += block) {
    if (options.limiter != nullptr) options.limiter->Await(std::min(block, image.size() - at));
    OUTLAST_RETURN_IF_ERROR(checker.Await(at / block));
    OUTLAST_RETURN_IF_ERROR(
        file_writer.Append(image.subspan(at, std::min(block, image.size() - at))));
    if (options.progress != nullptr) *options.progress += std::min(block, image.size() - at);
  }
  file.chunks = checker.TakeCrcs();
  OUTLAST_RETURN_IF_ERROR(file_writer.Finish());
  file.crc32c = CombineChunks(file.chunks, file.bytes);
  return file;
}

absl::StatusOr<ReceiptEntry> WriteReceipt(const std::string& folder, const Receipt& receipt) {
  // What no reader would take must not stand on disk.
  OUTLAST_ASSIGN_OR_RETURN(const std::string text, ToCheckedText(receipt));
  ReceiptEntry entry{ReceiptName(receipt.rank), text.size(), Crc32c(text), receipt.data_bytes()};
  OUTLAST_RETURN_IF_ERROR(CreateWhole(folder, entry.name, text));
  return entry;
}

}  // namespace outlast
