#include "outlast/base/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <utility>

#include "base/error.h"
#include "base/huge_pages.h"

namespace outlast {
namespace {

// An address where `bytes` are free now and huge pages can be mapped as such; nullptr: none found.
// Another thread may take it first: then the kernel chooses another one.
void* FindAlignedRange(size_t bytes) {
  const size_t room = bytes + kHugePageBytes;
  void* start = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  munmap(start, room);
  const size_t past = reinterpret_cast<uintptr_t>(start) % kHugePageBytes;
  return static_cast<std::byte*>(start) + (past == 0 ? 0 : kHugePageBytes - past);
}

}  // namespace

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, size_);
}

absl::StatusOr<Mapping> Mapping::Map(int fd, size_t bytes, int protection, int flags) {
  if (bytes == 0)
    return Error(absl::StatusCode::kInvalidArgument,
                 "map memory: 0 bytes asked for, at least 1 wanted");
  void* wish = nullptr;
  if (bytes >= kHugePageBytes) wish = FindAlignedRange(bytes);
  void* address = mmap(wish, bytes, protection, flags, fd, 0);
  if (address == MAP_FAILED)
    return ErrnoStatus(errno, fmt::format("map {} bytes of memory", bytes));
  return Mapping(static_cast<std::byte*>(address), bytes);
}

absl::StatusOr<Mapping> Mapping::Shared(int fd, size_t bytes) {
  return Map(fd, bytes, PROT_READ | PROT_WRITE, MAP_SHARED);
}

absl::StatusOr<Mapping> Mapping::SharedReadOnly(int fd, size_t bytes) {
  return Map(fd, bytes, PROT_READ, MAP_SHARED);
}

absl::StatusOr<Mapping> Mapping::SharedTouched(int fd, size_t bytes) {
  OUTLAST_ASSIGN_OR_RETURN(Mapping mapping, Shared(fd, bytes));
  madvise(mapping.data(), bytes, MADV_HUGEPAGE);  // where shmem_enabled is `advise`
  CollapseIntoHugePages(mapping.data(), bytes);
  // Kernels before 5.14 do not know POPULATE_WRITE: there the first use does it.
  if (madvise(mapping.data(), bytes, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
    return Error(absl::StatusCode::kResourceExhausted, "no memory for {} bytes (error {})", bytes,
                 errno);
  }
  return mapping;
}

absl::StatusOr<Mapping> Mapping::Anonymous(size_t bytes) {
  OUTLAST_ASSIGN_OR_RETURN(Mapping mapping,
                           Map(-1, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS));
  madvise(mapping.data(), bytes,
          MADV_HUGEPAGE);  // a wish: without huge pages it is slower, not wrong
  madvise(mapping.data(), bytes, MADV_POPULATE_WRITE);
  return mapping;
}

absl::StatusOr<UniqueFd> MakeSealedMemory(const char* name, size_t bytes, Allocation allocation) {
  UniqueFd fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.is_open()) return ErrnoStatus(errno, fmt::format("create memory '{}'", name));
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 ||
      (allocation == Allocation::kNow &&
       fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) != 0)) {
    return ErrnoStatus(errno, fmt::format("allocate {} bytes of memory for '{}'", bytes, name));
  }
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return ErrnoStatus(errno, fmt::format("seal memory '{}'", name));
  }
  return fd;
}

}  // namespace outlast
