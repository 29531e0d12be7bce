// Our own checks of a node. Each runs in a process of its own: it may block, and it may be killed.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <ctime>
#include <functional>
#include <limits>
#include <map>
#include <thread>

#include "base/error.h"
#include "base/plain_number.h"
#include "launch/preflight.h"
#include "outlast/base/clock.h"
#include "outlast/base/crc32c.h"
#include "outlast/base/fd.h"
#include "outlast/base/memory.h"
#include "outlast/base/status.h"

namespace outlast {
namespace {

constexpr size_t kMiB = 1 << 20;
constexpr size_t kMovedBytes = 64 * kMiB;
constexpr size_t kDiskBytes = 32 * kMiB;

double MegabytesPerSecond(size_t bytes, absl::Duration took) {
  return static_cast<double>(bytes) / 1e6 / std::max(1e-9, absl::ToDoubleSeconds(took));
}

// Bytes that no disk or link compresses away by accident, and that tell their place.
void Fill(std::span<std::byte> bytes, uint64_t seed) {
  uint64_t value = seed;
  for (size_t i = 0; i + sizeof value <= bytes.size(); i += sizeof value) {
    value = value * 6364136223846793005u + 1442695040888963407u;  // Knuth's MMIX generator
    std::memcpy(bytes.data() + i, &value, sizeof value);
  }
}

// The value that was measured. Errors: the machine does not do it at all, or does it wrongly.
using Measured = absl::StatusOr<double>;

Measured CopyMemory(const std::string&) {
  OUTLAST_ASSIGN_OR_RETURN(Mapping from, Mapping::Anonymous(kMovedBytes));
  OUTLAST_ASSIGN_OR_RETURN(Mapping to, Mapping::Anonymous(kMovedBytes));
  Fill({from.data(), kMovedBytes}, 1);
  std::memset(to.data(), 0, kMovedBytes);
  absl::Duration best = absl::InfiniteDuration();
  for (int pass = 0; pass < 3; ++pass) {
    const absl::Duration start = Clock::Real().Uptime();
    std::memcpy(to.data(), from.data(), kMovedBytes);
    best = std::min(best, Clock::Real().Uptime() - start);
  }
  if (std::memcmp(to.data(), from.data(), kMovedBytes) != 0)
    return Error(absl::StatusCode::kDataLoss, "the copy differs from what was copied");
  return MegabytesPerSecond(kMovedBytes, best);
}

absl::StatusOr<std::pair<UniqueFd, UniqueFd>> ConnectLoopback() {
  UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const raw = reinterpret_cast<sockaddr*>(&address);
  if (!listener.is_open() || bind(listener.get(), raw, length) != 0 ||
      listen(listener.get(), 1) != 0 || getsockname(listener.get(), raw, &length) != 0)
    return ErrnoStatus(errno, "listen on 127.0.0.1");
  UniqueFd from(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!from.is_open() || connect(from.get(), raw, length) != 0)
    return ErrnoStatus(errno, "connect to 127.0.0.1");
  UniqueFd to(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!to.is_open()) return ErrnoStatus(errno, "accept on 127.0.0.1");
  return std::make_pair(std::move(from), std::move(to));
}

Measured SendLoopback(const std::string&) {
  OUTLAST_ASSIGN_OR_RETURN(auto ends, ConnectLoopback());
  std::vector<std::byte> sent(kMiB), received(kMiB);
  Fill(sent, 2);
  const absl::Duration start = Clock::Real().Uptime();
  std::thread sender([&] {
    for (size_t done = 0; done < kMovedBytes;) {
      const ssize_t size =
          send(ends.first.get(), sent.data() + done % kMiB, kMiB - done % kMiB, MSG_NOSIGNAL);
      if (size <= 0) break;
      done += static_cast<size_t>(size);
    }
    shutdown(ends.first.get(), SHUT_WR);
  });
  size_t done = 0;
  bool differs = false;
  while (done < kMovedBytes) {
    const size_t at = done % kMiB;
    const ssize_t size = recv(ends.second.get(), received.data(), kMiB - at, 0);
    if (size <= 0) break;
    differs =
        differs || std::memcmp(received.data(), sent.data() + at, static_cast<size_t>(size)) != 0;
    done += static_cast<size_t>(size);
  }
  const absl::Duration took = Clock::Real().Uptime() - start;
  ends.second = UniqueFd();  // lets a sender go that still has something
  sender.join();
  if (done < kMovedBytes)
    return Error(absl::StatusCode::kUnavailable, "the connection ended after {} bytes", done);
  if (differs) return Error(absl::StatusCode::kDataLoss, "what came differs from what was sent");
  return MegabytesPerSecond(kMovedBytes, took);
}

absl::Status ReadAll(int fd, std::span<std::byte> bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t size =
        pread(fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) return ErrnoStatus(size < 0 ? errno : EIO, "read");
    done += static_cast<size_t>(size);
  }
  return absl::OkStatus();
}

// Nothing is left there, killed or not: the file has no name.
Measured WriteDisk(const std::string& folder) {
  UniqueFd file(open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (!file.is_open()) {
    std::string path = folder + "/.outlast-preflight-XXXXXX";
    file = UniqueFd(mkostemp(path.data(), O_CLOEXEC));
    // A file system that turned read-only has seen errors.
    if (!file.is_open() && errno == EROFS)
      return Error(absl::StatusCode::kDataLoss, "make a file: {}", std::strerror(EROFS));
    if (!file.is_open()) return ErrnoStatus(errno, "make a file");
    unlink(path.c_str());
  }
  OUTLAST_ASSIGN_OR_RETURN(Mapping bytes, Mapping::Anonymous(kDiskBytes));
  const std::span<std::byte> all(bytes.data(), kDiskBytes);
  Fill(all, 3);
  const uint32_t crc = Crc32c(all);
  const absl::Duration start = Clock::Real().Uptime();
  if (const int error = posix_fallocate(file.get(), 0, kDiskBytes); error == ENOSPC)
    return ErrnoStatus(error, "reserve 32 MiB");
  OUTLAST_RETURN_IF_ERROR(WriteAll(file.get(), all));
  if (fdatasync(file.get()) != 0) return ErrnoStatus(errno, "fdatasync");
  const absl::Duration took = Clock::Real().Uptime() - start;
  posix_fadvise(file.get(), 0, 0, POSIX_FADV_DONTNEED);  // so that the disk is read, if it obeys
  std::memset(all.data(), 0, all.size());
  OUTLAST_RETURN_IF_ERROR(ReadAll(file.get(), all));
  if (Crc32c(all) != crc)
    return Error(absl::StatusCode::kDataLoss, "what was read differs from what was written");
  return MegabytesPerSecond(kDiskBytes, took);
}

Measured LookAtSharedMemory(const std::string&) {
  const UniqueFd memory(memfd_create("outlast-preflight", MFD_CLOEXEC));
  if (!memory.is_open()) return ErrnoStatus(errno, "memfd_create");
  std::vector<std::byte> bytes(kMiB);
  for (int i = 0; i < 16; ++i) OUTLAST_RETURN_IF_ERROR(WriteAll(memory.get(), bytes));
  struct statvfs space {};
  if (statvfs("/dev/shm", &space) != 0) return ErrnoStatus(errno, "look at /dev/shm");
  return static_cast<double>(space.f_bavail) * static_cast<double>(space.f_frsize) / kMiB;
}

absl::Duration Read(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return absl::DurationFromTimespec(time);
}

// How far apart two clocks ran, in percent. That a clock is right is NTP's business.
Measured CompareClocks(const std::string&) {
  const absl::Duration monotonic = Read(CLOCK_MONOTONIC), raw = Read(CLOCK_MONOTONIC_RAW);
  Clock::Real().SleepFor(absl::Milliseconds(50));
  const double ran = absl::ToDoubleSeconds(Read(CLOCK_MONOTONIC) - monotonic);
  const double ran_raw = absl::ToDoubleSeconds(Read(CLOCK_MONOTONIC_RAW) - raw);
  if (ran <= 0 || ran_raw <= 0)
    return Error(absl::StatusCode::kDataLoss, "a clock stood still for 50 ms");
  const absl::Time wall = Clock::Real().WallTime();
  if (wall < absl::FromUnixSeconds(1704067200))  // 2024-01-01, before this program was written
    return Error(absl::StatusCode::kDataLoss, "the wall clock says {}", absl::FormatTime(wall));
  return std::abs(ran / ran_raw - 1) * 100;
}

struct Body {
  std::function<Measured(const std::string& folder)> measure;
  bool is_ceiling = false;  // the floor is one
};

const std::map<std::string_view, Body>& Bodies() {
  static const std::map<std::string_view, Body> bodies = {
      {"memory", {CopyMemory}},      {"loopback", {SendLoopback}},     {"disk", {WriteDisk}},
      {"shm", {LookAtSharedMemory}}, {"clock", {CompareClocks, true}},
  };
  return bodies;
}

}  // namespace

CheckEnd RunCheck(const Check& check, const std::string& folder) {
  const Body& body = Bodies().at(check.name);
  const std::string where = check.name == "disk" ? fmt::format(" in '{}'", folder) : "";
  const Measured measured = body.measure(folder);
  if (!measured.ok()) {
    // A folder that is not there, or not ours, is a slip of who asked: it says nothing of the node.
    const bool is_slip =
        absl::IsNotFound(measured.status()) || absl::IsPermissionDenied(measured.status());
    return {is_slip ? kProbeUnknown : kProbeUnfit,
            fmt::format("{}{}: {}", check.what, where, MessageOf(measured.status()))};
  }
  const bool fits = body.is_ceiling ? *measured <= check.floor : *measured >= check.floor;
  return {fits ? kProbeFit : kProbeUnfit,
          fmt::format("{}{}: {} {}, at {} {:g} wanted", check.what, where, PlainNumber(*measured),
                      check.unit, body.is_ceiling ? "most" : "least", check.floor)};
}

}  // namespace outlast
