// Stands between a program and the C library for every call that creates, writes, syncs, allocates,
// links, renames, truncates or removes: counts those that concern one checkpoint root, kills the
// whole job, or one process of it, after the k-th, or makes some of them fail. Calls that read are
// never counted, and fail when they are named. It is linked into the program, not preloaded, so
// that it works in sanitizer builds too. kill_page.h lists its environment.
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdio>

#include "tests/fault/kill_page.h"

namespace {

using outlast::testing::KillPage;

constexpr int kShortWrite = -1;
constexpr int kDelay = -2;

struct Fault {
  char call[24] = "";
  int error = 0;
  uint32_t delay_ms = 0;
  bool sleeps = false;  // the whole of delay_ms
  uint32_t first = 0;
  uint32_t last = 0;
};

struct Shim {
  KillPage* page = nullptr;
  const char* root = nullptr;
  size_t root_bytes = 0;
  uint32_t from_save = 0;
  uint32_t to_save = 0;
  uint32_t kill_at = 0;
  uint32_t seed = 0;
  uint32_t clock_jumps_s = 0;
  bool counts = true;
  const char* victim = nullptr;
  Fault fault;
};

Shim shim;
// Descriptors that were opened under the root.
std::atomic<bool> counted_fds[4096];

void AddProcess() {
  if (shim.page == nullptr) return;
  const uint32_t i = shim.page->pid_count.fetch_add(1);
  if (i < shim.page->pids.size()) shim.page->pids[i] = static_cast<pid_t>(syscall(SYS_getpid));
}

int ErrorOf(const char* name) {
  if (strcmp(name, "short") == 0) return kShortWrite;
  if (strncmp(name, "delay", 5) == 0 || strncmp(name, "sleep", 5) == 0) return kDelay;
  for (int error = 1; error < 134; ++error) {
    const char* known = strerrorname_np(error);
    if (known != nullptr && strcmp(known, name) == 0) return error;
  }
  abort();  // a test's mistake
}

Fault ParseFault(const char* text) {
  Fault fault;
  char error[24];
  char rest[24] = "";
  const int found = sscanf(text, "%23[^:]:%23[^:]:%u%23s", fault.call, error, &fault.first, rest);
  if (found < 3) abort();
  fault.error = ErrorOf(error);
  if (fault.error == kDelay) fault.delay_ms = static_cast<uint32_t>(atoi(error + 5));
  fault.sleeps = strncmp(error, "sleep", 5) == 0;
  fault.last = fault.first;
  if (rest[0] == '+') fault.last = UINT_MAX;
  if (rest[0] == '-') fault.last = static_cast<uint32_t>(atoi(rest + 1));
  return fault;
}

uint32_t NumberFrom(const char* name) {
  const char* text = getenv(name);
  return text == nullptr ? 0 : static_cast<uint32_t>(atoi(text));
}

// Whether the fault is this process's.
bool IsMeant() {
  const char* wanted = getenv(outlast::testing::kShimFaultRank);
  const char* rank = getenv("RANK");
  return wanted == nullptr || (rank != nullptr && strcmp(rank, wanted) == 0);
}

[[gnu::constructor]] void Start() {
  const char* path = getenv(outlast::testing::kShimPage);
  const char* root = getenv(outlast::testing::kShimRoot);
  if (path == nullptr || root == nullptr) return;
  const int fd = static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC));
  if (fd < 0) abort();
  void* page = mmap(nullptr, sizeof(KillPage), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  syscall(SYS_close, fd);
  if (page == MAP_FAILED) abort();
  shim.root = root;
  shim.root_bytes = strlen(root);
  shim.from_save = NumberFrom(outlast::testing::kShimFromSave);
  shim.to_save = NumberFrom(outlast::testing::kShimToSave);
  shim.kill_at = NumberFrom(outlast::testing::kShimKillAt);
  shim.seed = NumberFrom(outlast::testing::kShimSeed);
  shim.clock_jumps_s = NumberFrom(outlast::testing::kShimClockJumps);
  const char* counts = getenv(outlast::testing::kShimCounts);
  shim.counts = counts == nullptr || strcmp(counts, "0") != 0;
  shim.victim = getenv(outlast::testing::kShimVictim);
  const char* fault = getenv(outlast::testing::kShimFault);
  if (fault != nullptr && IsMeant()) shim.fault = ParseFault(fault);
  shim.page = static_cast<KillPage*>(page);
  if (getenv("RANK") != nullptr && NumberFrom("RANK") < shim.page->ranks.size())
    shim.page->ranks[NumberFrom("RANK")] = static_cast<pid_t>(syscall(SYS_getpid));
  AddProcess();
  pthread_atfork(nullptr, nullptr, AddProcess);
}

bool IsCounted(int fd) {
  return shim.page != nullptr && fd >= 0 && fd < 4096 && counted_fds[fd].load();
}
bool IsCounted(const char* path) {
  return shim.page != nullptr && path != nullptr &&
         strncmp(path, shim.root, shim.root_bytes) == 0 &&
         (path[shim.root_bytes] == '/' || path[shim.root_bytes] == '\0');
}
bool IsCounted(int folder, const char* path) {
  return IsCounted(path) || (path != nullptr && path[0] != '/' && IsCounted(folder));
}

// Returns only where the victim is another process alone.
void Kill() {
  const auto self = static_cast<pid_t>(syscall(SYS_getpid));
  const bool is_self = shim.victim != nullptr && strcmp(shim.victim, "self") == 0;
  if (shim.victim != nullptr && !is_self) {
    const pid_t rank = shim.page->ranks[static_cast<size_t>(atoi(shim.victim))];
    shim.page->killed = rank > 0 && kill(rank, SIGKILL) == 0 ? 1 : 0;
    return;
  }
  shim.page->killed = 1;
  while (is_self) kill(self, SIGKILL);
  for (uint32_t i = 0; i < shim.page->pid_count && i < shim.page->pids.size(); ++i) {
    const pid_t pid = shim.page->pids[i];
    if (pid > 0 && pid != self) kill(pid, SIGKILL);
  }
  while (true) kill(self, SIGKILL);
}

// 0 to delay_ms, by the seed and the call's number.
void Delay(uint32_t number) {
  uint64_t x = (uint64_t{shim.seed} << 32 | number) * 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93U;
  const uint64_t longest = shim.fault.delay_ms * 1'000'000UL;
  const auto nanos = static_cast<long>(shim.fault.sleeps ? longest : (x >> 32) % (longest + 1));
  timespec time{nanos / 1'000'000'000, nanos % 1'000'000'000};
  while (nanosleep(&time, &time) != 0 && errno == EINTR) {
  }
}

bool IsBetweenSaves() {
  const uint32_t saves = shim.page->saves.load();
  return saves >= shim.from_save && (shim.to_save == 0 || saves < shim.to_save);
}

// One call that concerns the root, from before it is made until after.
class Call {
 public:
  Call(const char* name, bool concerns_root)
      : name_(name), counts_(concerns_root && shim.counts && IsBetweenSaves()) {
    const bool any = strcmp(shim.fault.call, "any") == 0;
    if (!counts_ || (!any && strcmp(shim.fault.call, name) != 0)) return;
    named_ = shim.page->named.fetch_add(1) + 1;
    const uint32_t number = named_;
    has_fault_ = number >= shim.fault.first && number <= shim.fault.last;
    if (has_fault_) shim.page->faults.fetch_add(1);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // What to write of `bytes`.
  size_t Cut(size_t bytes) const {
    return has_fault_ && shim.fault.error == kShortWrite ? (bytes + 1) / 2 : bytes;
  }

  // Makes the call, or fails it; counts it; kills. syscall(2) sets errno.
  template <typename Make>
  long operator()(Make make) {
    long result;
    if (has_fault_ && shim.fault.error == kDelay) Delay(named_);
    if (has_fault_ && shim.fault.error > 0) {
      errno = shim.fault.error;
      result = -1;
    } else {
      result = make();
    }
    if (!counts_) return result;
    const int kept = errno;
    const uint32_t number = shim.page->calls.fetch_add(1) + 1;
    if (number <= shim.page->names.size())
      snprintf(shim.page->names[number - 1].data(), shim.page->names[0].size(), "%s", name_);
    if (number == shim.kill_at) Kill();
    errno = kept;
    return result;
  }

 private:
  const char* name_;
  const bool counts_;
  uint32_t named_ = 0;  // the call's number among those of the fault's name
  bool has_fault_ = false;
};

// A call that reads: true, and errno, where it has to fail. A kind of its own: `any` is not meant.
bool FailsToRead(const char* name, bool concerns_root) {
  if (!concerns_root || strcmp(shim.fault.call, name) != 0) return false;
  const uint32_t number = shim.page->named.fetch_add(1) + 1;
  if (number < shim.fault.first || number > shim.fault.last) return false;
  shim.page->faults.fetch_add(1);
  errno = shim.fault.error;
  return true;
}

int Open(int folder, const char* path, int flags, mode_t mode) {
  const bool concerns_root = IsCounted(folder, path);
  if ((flags & O_CREAT) == 0 && FailsToRead("open_to_read", concerns_root)) return -1;
  Call call("open", concerns_root && (flags & O_CREAT) != 0);
  const auto fd =
      static_cast<int>(call([&] { return syscall(SYS_openat, folder, path, flags, mode); }));
  if (fd >= 0 && fd < 4096) counted_fds[fd] = concerns_root;
  return fd;
}

mode_t ModeOf(int flags, va_list arguments) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
}

int MakeFolder(int folder, const char* path, mode_t mode) {
  const bool concerns_root = IsCounted(folder, path);
  // The folder's creation is the first call of its save.
  const char* name = path != nullptr ? strrchr(path, '/') : nullptr;
  if (concerns_root && name != nullptr && strncmp(name, "/step-", 6) == 0)
    shim.page->saves.fetch_add(1);
  Call call("mkdir", concerns_root);
  return static_cast<int>(call([&] { return syscall(SYS_mkdirat, folder, path, mode); }));
}

ssize_t Write(int fd, const void* data, size_t bytes) {
  Call call("write", IsCounted(fd));
  return call([&] { return syscall(SYS_write, fd, data, call.Cut(bytes)); });
}

ssize_t WriteAt(int fd, const void* data, size_t bytes, off_t at) {
  Call call("pwrite", IsCounted(fd));
  // O_DIRECT takes whole blocks only.
  size_t count = call.Cut(bytes);
  if (count < bytes && count >= 4096) count = count / 4096 * 4096;
  return call([&] { return syscall(SYS_pwrite64, fd, data, count, at); });
}

ssize_t ReadAt(int fd, void* data, size_t bytes, off_t at) {
  if (FailsToRead("pread", IsCounted(fd))) return -1;
  return syscall(SYS_pread64, fd, data, bytes, at);
}

void CountCommit(const char* path) {
  const char* name = strrchr(path, '/');
  if (name == nullptr || strcmp(name, "/MANIFEST.json") != 0) return;
  shim.page->commits.fetch_add(1);
  pid_t first = 0;
  const auto self = static_cast<pid_t>(syscall(SYS_getpid));
  if (!shim.page->committer.compare_exchange_strong(first, self) && first != self)
    shim.page->strangers.fetch_add(1);
}

int Link(int from_folder, const char* from, int to_folder, const char* to, int flags) {
  const bool concerns_root = IsCounted(to_folder, to);
  Call call("link", concerns_root);
  const auto result = static_cast<int>(
      call([&] { return syscall(SYS_linkat, from_folder, from, to_folder, to, flags); }));
  if (concerns_root && result == 0) CountCommit(to);
  return result;
}

int Rename(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  Call call("rename", IsCounted(to_folder, to));
  return static_cast<int>(
      call([&] { return syscall(SYS_renameat2, from_folder, from, to_folder, to, flags); }));
}

int Remove(const char* name, int folder, const char* path, int flags) {
  Call call(name, IsCounted(folder, path));
  return static_cast<int>(call([&] { return syscall(SYS_unlinkat, folder, path, flags); }));
}

int Allocate(int fd, int mode, off_t at, off_t bytes) {
  Call call("fallocate", IsCounted(fd));
  return static_cast<int>(call([&] { return syscall(SYS_fallocate, fd, mode, at, bytes); }));
}

int Truncate(int fd, off_t bytes) {
  Call call("ftruncate", IsCounted(fd));
  return static_cast<int>(call([&] { return syscall(SYS_ftruncate, fd, bytes); }));
}

}  // namespace

extern "C" {

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = ModeOf(flags, arguments);
  va_end(arguments);
  return Open(AT_FDCWD, path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = ModeOf(flags, arguments);
  va_end(arguments);
  return Open(AT_FDCWD, path, flags, mode);
}
int openat(int folder, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = ModeOf(flags, arguments);
  va_end(arguments);
  return Open(folder, path, flags, mode);
}
int openat64(int folder, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = ModeOf(flags, arguments);
  va_end(arguments);
  return Open(folder, path, flags, mode);
}
int close(int fd) {
  if (fd >= 0 && fd < 4096) counted_fds[fd] = false;
  return static_cast<int>(syscall(SYS_close, fd));
}

int mkdir(const char* path, mode_t mode) noexcept { return MakeFolder(AT_FDCWD, path, mode); }
int mkdirat(int folder, const char* path, mode_t mode) noexcept {
  return MakeFolder(folder, path, mode);
}

ssize_t write(int fd, const void* data, size_t bytes) { return Write(fd, data, bytes); }
ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) {
  return WriteAt(fd, data, bytes, at);
}
ssize_t pwrite64(int fd, const void* data, size_t bytes, off64_t at) {
  return WriteAt(fd, data, bytes, at);
}
ssize_t read(int fd, void* data, size_t bytes) {
  if (FailsToRead("read", IsCounted(fd))) return -1;
  return syscall(SYS_read, fd, data, bytes);
}
ssize_t pread(int fd, void* data, size_t bytes, off_t at) { return ReadAt(fd, data, bytes, at); }
ssize_t pread64(int fd, void* data, size_t bytes, off64_t at) {
  return ReadAt(fd, data, bytes, at);
}
DIR* opendir(const char* path) {
  if (FailsToRead("opendir", IsCounted(path))) return nullptr;
  // A descriptor that is not counted: the library reads it by calls of its own.
  const auto fd = static_cast<int>(
      syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK));
  return fd < 0 ? nullptr : fdopendir(fd);
}
ssize_t writev(int fd, const iovec* parts, int count) {
  Call call("writev", IsCounted(fd));
  return call([&] { return syscall(SYS_writev, fd, parts, count); });
}

int fsync(int fd) {
  Call call("fsync", IsCounted(fd));
  return static_cast<int>(call([&] { return syscall(SYS_fsync, fd); }));
}
int fdatasync(int fd) {
  Call call("fdatasync", IsCounted(fd));
  return static_cast<int>(call([&] { return syscall(SYS_fdatasync, fd); }));
}
int sync_file_range(int fd, off64_t at, off64_t bytes, unsigned flags) {
  Call call("sync_file_range", IsCounted(fd));
  return static_cast<int>(call([&] { return syscall(SYS_sync_file_range, fd, at, bytes, flags); }));
}

int fallocate(int fd, int mode, off_t at, off_t bytes) { return Allocate(fd, mode, at, bytes); }
int fallocate64(int fd, int mode, off64_t at, off64_t bytes) {
  return Allocate(fd, mode, at, bytes);
}
int ftruncate(int fd, off_t bytes) noexcept { return Truncate(fd, bytes); }
int ftruncate64(int fd, off64_t bytes) noexcept { return Truncate(fd, bytes); }

int link(const char* from, const char* to) noexcept {
  return Link(AT_FDCWD, from, AT_FDCWD, to, 0);
}
int linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) noexcept {
  return Link(from_folder, from, to_folder, to, flags);
}
int rename(const char* from, const char* to) noexcept {
  return Rename(AT_FDCWD, from, AT_FDCWD, to, 0);
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to,
              unsigned flags) noexcept {
  return Rename(from_folder, from, to_folder, to, flags);
}

// The wall clock, and no other: each reading is off by a while of its own.
int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(syscall(SYS_clock_gettime, clock, time));
  if (result != 0 || clock != CLOCK_REALTIME || shim.clock_jumps_s == 0) return result;
  static std::atomic<uint64_t> readings;
  const uint64_t x = (shim.seed + readings.fetch_add(1) + 1) * 0x9e3779b97f4a7c15U;
  time->tv_sec += static_cast<time_t>((x >> 32) % (2 * uint64_t{shim.clock_jumps_s} + 1)) -
                  static_cast<time_t>(shim.clock_jumps_s);
  shim.page->clock_readings.fetch_add(1);
  return 0;
}

int unlink(const char* path) noexcept { return Remove("unlink", AT_FDCWD, path, 0); }
int unlinkat(int folder, const char* path, int flags) noexcept {
  return Remove((flags & AT_REMOVEDIR) != 0 ? "rmdir" : "unlink", folder, path, flags);
}
int rmdir(const char* path) noexcept { return Remove("rmdir", AT_FDCWD, path, AT_REMOVEDIR); }

}  // extern "C"
