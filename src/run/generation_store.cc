#include "run/generation_store.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <memory>
#include <utility>

#include "base/error.h"
#include "outlast/base/memory.h"

namespace outlast {
namespace {

constexpr size_t kMaxStoreBytes = 64 << 20;
constexpr size_t kMaxMemories = 4096;

absl::Status CheckName(std::string_view what, std::string_view name) {
  if (!name.empty() && name.size() <= kMaxKeyBytes) return absl::OkStatus();
  return Error(absl::StatusCode::kInvalidArgument, "{} of {} bytes: 1 to {} wanted", what,
               name.size(), kMaxKeyBytes);
}

// A memfd has no limit of its own: asking for too much would bring the machine down before it
// failed.
uint64_t AvailableMemoryBytes() {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen("/proc/meminfo", "re"), std::fclose);
  char line[128];
  unsigned long long kib;
  while (file != nullptr && std::fgets(line, sizeof line, file.get()) != nullptr) {
    if (std::sscanf(line, "MemAvailable: %llu kB", &kib) == 1) return kib * 1024;
  }
  return std::numeric_limits<uint64_t>::max();
}

}  // namespace

absl::Status GenerationStore::Put(std::string_view key, std::string_view value) {
  OUTLAST_RETURN_IF_ERROR(CheckName("key", key));
  if (value.size() > kMaxValueBytes) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "value of key '{}': {} bytes, at most {} wanted", key, value.size(),
                 kMaxValueBytes);
  }
  if (const std::string* present = Find(key); present != nullptr) {
    if (*present == value) return absl::OkStatus();
    return Error(absl::StatusCode::kAlreadyExists, "key '{}' holds another value", key);
  }
  if (value_bytes_ + key.size() + value.size() > kMaxStoreBytes) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "key '{}': the generation's store is full, {} bytes", key, value_bytes_);
  }
  value_bytes_ += key.size() + value.size();
  values_.emplace(key, value);
  return absl::OkStatus();
}

const std::string* GenerationStore::Find(std::string_view key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}

uint64_t GenerationStore::promised_bytes() const {
  constexpr uint64_t kBlockBytes = 512;  // as stat(2) counts
  uint64_t promised = 0;
  for (const auto& [name, memory] : memories_) {
    struct stat stat {};
    if (fstat(memory.fd.get(), &stat) != 0) continue;
    const uint64_t touched = static_cast<uint64_t>(stat.st_blocks) * kBlockBytes;
    promised += memory.bytes - std::min(memory.bytes, touched);
  }
  return promised;
}

absl::StatusOr<int> GenerationStore::SharedMemory(std::string_view name, uint64_t bytes,
                                                  Contents contents, uint64_t promised) {
  OUTLAST_RETURN_IF_ERROR(CheckName("name of shared memory", name));
  if (const auto found = memories_.find(name); found != memories_.end()) {
    if (found->second.bytes == bytes) return found->second.fd.get();
    return Error(absl::StatusCode::kInvalidArgument,
                 "shared memory '{}': {} bytes asked for, {} were asked for before", name, bytes,
                 found->second.bytes);
  }
  if (bytes == 0)
    return Error(absl::StatusCode::kInvalidArgument,
                 "shared memory '{}': 0 bytes asked for, at least 1 wanted", name);
  OUTLAST_ASSIGN_OR_RETURN(UniqueFd fd, Allocate(name, bytes, contents, promised));
  return memories_.emplace(name, Memory{std::move(fd), bytes}).first->second.fd.get();
}

absl::StatusOr<UniqueFd> GenerationStore::Allocate(std::string_view name, uint64_t bytes,
                                                   Contents contents, uint64_t promised) {
  const auto spare = spares_.find(name);
  if (contents == Contents::kDirty && spare != spares_.end() && spare->second.bytes == bytes) {
    const std::array<char, kCleanBytes> zeros{};
    const size_t clean = std::min<size_t>(bytes, zeros.size());
    UniqueFd fd = std::move(spare->second.fd);
    spares_.erase(spare);
    if (pwrite(fd.get(), zeros.data(), clean, 0) == static_cast<ssize_t>(clean)) return fd;
  }
  const uint64_t untouched = AvailableMemoryBytes();
  if (const uint64_t available = untouched - std::min(untouched, promised);
      bytes > available || memories_.size() >= kMaxMemories) {
    return Error(absl::StatusCode::kResourceExhausted,
                 "shared memory '{}': {} bytes asked for, {} available, {} others", name, bytes,
                 available, memories_.size());
  }
  return MakeSealedMemory(
      "outlast-shared", bytes,
      contents == Contents::kZeroOnTouch ? Allocation::kOnTouch : Allocation::kNow);
}

}  // namespace outlast
