#include "outlast/blackbox/segment.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/proc.h"
#include "blackbox/areas.h"
#include "blackbox/claims.h"
#include "blackbox/fork_guard.h"
#include "blackbox/strings.h"
#include "blackbox/words.h"

namespace outlast {
namespace {

static_assert(sizeof(pthread_mutex_t) <= sizeof(SegmentHeader::death_notice));

uint64_t NanosOf(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

// Not MakeSealedMemory: allocating 9 MiB costs milliseconds that a rank's start does not have, for
// pages that most ranks never touch. A memfd has no size limit of its own, so a hole that cannot be
// filled is the same out-of-memory as any other page; what must not happen is a shrink under a
// reader, and that is sealed.
absl::StatusOr<UniqueFd> MakeSparseSealedMemory(uint64_t bytes) {
  UniqueFd fd(memfd_create("outlast-blackbox", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.is_open()) return ErrnoStatus(errno, "create a black box");
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return ErrnoStatus(errno, fmt::format("make a black box of {} bytes", bytes));
  }
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return ErrnoStatus(errno, "seal a black box");
  }
  return fd;
}

SegmentHeader HeaderOf(const SegmentIdentity& identity) {
  SegmentHeader header{};
  header.magic = kSegmentMagic;
  header.major = kSegmentMajor;
  header.minor = kSegmentMinor;
  blackbox::LayOutAreas(header);
  header.job_id = identity.job_id;
  header.generation = identity.generation;
  header.slot = identity.slot;
  header.rank = identity.rank;
  header.world = identity.world;
  header.local_rank = identity.local_rank;
  header.boot_id = BootId();
  header.monotonic_ns = NanosOf(CLOCK_MONOTONIC);
  header.boottime_ns = NanosOf(CLOCK_BOOTTIME);
  header.realtime_ns = NanosOf(CLOCK_REALTIME);
  return header;
}

void StoreId(Id128& target, const Id128& id) {
  const auto halves = std::bit_cast<std::array<uint64_t, 2>>(id);
  blackbox::StoreWordAt(&target.bytes[0], halves[0]);
  blackbox::StoreWordAt(&target.bytes[8], halves[1]);
}

}  // namespace

uint64_t ProcessStartTime(int pid) {
  const std::optional<ProcessInfo> found = ReadProcess(pid);
  return found.has_value() ? found->start_ticks : 0;
}

uint64_t MembersDigest(std::span<const uint32_t> ranks) {
  return Fnv1a64({reinterpret_cast<const char*>(ranks.data()), ranks.size_bytes()});
}

Segment::Segment(UniqueFd fd, Mapping mapping, const SegmentAreas& areas)
    : fd_(std::move(fd)),
      mapping_(std::move(mapping)),
      areas_(areas),
      claims_(std::make_unique<Claims>()) {
  blackbox::GuardAgainstFork(mapping_.data(), mapping_.size());
}

Segment::Segment(Segment&& other) noexcept = default;
Segment& Segment::operator=(Segment&& other) noexcept =
    default;  // Mapping's swaps: the old one goes with `other`

Segment::~Segment() {
  if (mapping_.data() != nullptr) blackbox::ForgetGuarded(mapping_.data());
}

absl::StatusOr<Segment> Segment::Create(const SegmentIdentity& identity) {
  const SegmentHeader header = HeaderOf(identity);
  OUTLAST_ASSIGN_OR_RETURN(UniqueFd fd, MakeSparseSealedMemory(header.segment_bytes));
  OUTLAST_ASSIGN_OR_RETURN(Mapping mapping, Mapping::Shared(fd.get(), header.segment_bytes));
  blackbox::StoreRecord(mapping.data(), header);
  OUTLAST_ASSIGN_OR_RETURN(const SegmentAreas areas, blackbox::CheckAreas(mapping.bytes()));
  return Segment(std::move(fd), std::move(mapping), areas);
}

absl::StatusOr<Segment> Segment::Open(UniqueFd fd) {
  struct stat file {};
  if (fstat(fd.get(), &file) != 0) return ErrnoStatus(errno, "open a black box");
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "black box: descriptor {} is not sealed against shrinking", fd.get());
  }
  if (file.st_size == 0) return Error(absl::StatusCode::kDataLoss, "black box: 0 bytes");
  OUTLAST_ASSIGN_OR_RETURN(Mapping mapping,
                           Mapping::Shared(fd.get(), static_cast<size_t>(file.st_size)));
  OUTLAST_ASSIGN_OR_RETURN(const SegmentAreas areas, blackbox::CheckAreas(mapping.bytes()));
  OUTLAST_RETURN_IF_ERROR(blackbox::CheckWritable(areas));
  return Segment(std::move(fd), std::move(mapping), areas);
}

std::span<std::byte> Segment::area(AreaKind kind) const {
  const SegmentArea& area = areas_[static_cast<size_t>(kind)];
  return mapping_.bytes().subspan(area.offset, area.stride * area.count);
}

std::span<SignatureRow> Segment::signatures(size_t comm) const {
  return Rows<SignatureRow>(AreaKind::kSignatures)
      .subspan(comm * kSignaturesPerComm, kSignaturesPerComm);
}

void Segment::Adopt(const WorkerIdentity& worker) {
  SegmentHeader& h = header();
  const bool is_new =
      LoadWord(h.pid) != worker.pid || LoadWord(h.pid_start_time) != worker.pid_start_time;
  StoreWord(h.pid, 0);
  StoreWord(h.section_word, 0);
  for (SectionRow& row : sections()) blackbox::StoreWordAt(&row, 0);
  for (CommRow& row : comms()) StoreWord(row.id_hash, 0);
  for (PairRow& row : pairs()) {
    if (LoadWord(row.comm) != 0)
      blackbox::StoreRecord(&row, PairRow{});  // untouched pages stay untouched
  }
  for (uint64_t* word : {&h.beat_native, &h.beat_gil, &h.beat_main, &h.unwinding, &h.step})
    StoreWord(*word, 0);
  StoreWord(h.last_error, 0);
  if (is_new) std::memset(h.death_notice, 0, sizeof(h.death_notice));  // the older owner is dead
  SetGeneration(worker.generation, worker.rank, worker.world);
  StoreWord(h.incarnation, worker.incarnation);
  StoreWord(h.pid_start_time, worker.pid_start_time);
  StoreWord(h.pid, worker.pid);
}

void Segment::SetGeneration(uint64_t generation, uint32_t rank, uint32_t world) {
  SegmentHeader& h = header();
  StoreWord(h.rank, rank);
  StoreWord(h.world, world);
  StoreWord(h.generation, generation);
}

void Segment::SetJobId(const Id128& job_id) { StoreId(header().job_id, job_id); }

uint16_t Segment::Intern(std::string_view text) {
  return blackbox::InternString(area(AreaKind::kStrings), text);
}

uint64_t Segment::InternMembers(std::span<const uint32_t> ranks) {
  return blackbox::InternMembers(area(AreaKind::kMembers), ranks);
}

absl::Status Segment::HoldDeathNotice() {
  auto* mutex = reinterpret_cast<pthread_mutex_t*>(header().death_notice);
  constexpr uint32_t kOwnerMask = 0x3fffffff;  // FUTEX_TID_MASK
  if (const uint32_t owner = LoadWord(*death_notice_word()) & kOwnerMask; owner != 0) {
    return Error(absl::StatusCode::kFailedPrecondition,
                 "black box: thread {} holds the death notice already", owner);
  }
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  int error = pthread_mutex_init(mutex, &attributes);
  if (error == 0) error = pthread_mutex_lock(mutex);
  pthread_mutexattr_destroy(&attributes);
  return error == 0 ? absl::OkStatus() : ErrnoStatus(error, "hold the death notice of a black box");
}

uint32_t* Segment::death_notice_word() const {
  return reinterpret_cast<uint32_t*>(header().death_notice);
}

void Segment::DropInChild() { blackbox::DropGuarded(); }

}  // namespace outlast
