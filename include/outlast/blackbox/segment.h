// The black box of a rank: a shared-memory segment that the agent creates before the rank starts,
// and that outlives it.
//
//   [header 4 KiB, with the area table][sections][comms][signatures][pairs]
//   [flight rings][step log][strings][members]
//
// The agent holds the descriptor and reads without the rank's help, so a rank that is stopped, dead
// or wedged is still readable. ABI 1: little endian, every counter one aligned 64-bit store, no
// pointers. Areas are found through the table; unknown areas and fields are skipped, another major
// version is refused. Each word has one writer (the worker, or the agent where stated); a reader
// takes two looks, and a value that could be torn is moving, which is progress.
//
// A forked child of a process that has a Segment (a data-loader worker, say) never writes: in the
// child each mapping is replaced, at its own address, by private zero pages. So pointers that the
// child inherited stay good, nothing crashes, and nothing that the child writes reaches the record.
// (MADV_DONTFORK would crash it at the first touch.)
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "absl/status/statusor.h"
#include "outlast/base/fd.h"
#include "outlast/base/id.h"
#include "outlast/base/memory.h"

namespace outlast {

static_assert(std::endian::native == std::endian::little, "records are little endian");

// One aligned load or store of a word that another thread or process may be using.
template <typename T>
T LoadWord(const T& word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}
template <typename T>
void StoreWord(T& word, std::type_identity_t<T> value) {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

// Eight characters as the u64 that a little-endian file starts with.
constexpr uint64_t MagicOf(const char (&text)[9]) {
  uint64_t magic = 0;
  for (int i = 7; i >= 0; --i) magic = magic << 8 | static_cast<unsigned char>(text[i]);
  return magic;
}

// FNV-1a, 64 bits: offset basis 14695981039346656037, prime 1099511628211.
constexpr uint64_t Fnv1a64(std::string_view bytes, uint64_t hash = 14695981039346656037u) {
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

// ---- ABI 1 ----

inline constexpr uint64_t kSegmentMagic = MagicOf("OTLBBX01");
inline constexpr uint16_t kSegmentMajor = 1;
inline constexpr uint16_t kSegmentMinor = 0;
inline constexpr uint32_t kSegmentHeaderBytes = 4096;
// A sequence number that the source cannot give.
inline constexpr uint64_t kUnknownSeq = ~uint64_t{0};

enum class AreaKind : uint32_t {
  kSections = 1,
  kComms = 2,
  kSignatures = 3,  // one row a comm: its last 64 operations
  kPairs = 4,
  kFlightRings = 5,  // one row a ring of 64 B records
  kStepLog = 6,
  kStrings = 7,
  kMembers = 8,
};

struct AreaEntry {
  uint32_t kind;
  uint32_t stride;  // bytes of a row
  uint64_t offset;  // from the segment's start; a multiple of 64
  uint64_t count;   // rows
  uint64_t reserved;
};
static_assert(sizeof(AreaEntry) == 32);
inline constexpr uint32_t kMaxAreas = 16;

struct SegmentHeader {
  uint64_t magic;
  uint16_t major, minor;
  uint32_t header_bytes;
  uint64_t segment_bytes;
  uint32_t areas;
  uint32_t flags;  // 0
  Id128 job_id;    // 0 until a root is open
  uint64_t generation;
  uint32_t slot, rank, world, local_rank;
  int32_t pid;  // 0 until the worker joined
  uint32_t incarnation;
  uint64_t pid_start_time;  // field 22 of /proc/PID/stat, against reuse of pids
  Id128 boot_id;
  uint64_t monotonic_ns, boottime_ns, realtime_ns;  // read together once, at creation
  uint64_t beat_native;                             // 0x080: a native thread, 4/s
  std::byte reserved_1[0xc0 - 0x88];
  uint64_t beat_gil;   // 0x0c0: a Python thread, 1/s: the GIL can be had
  uint64_t beat_main;  // 0x0c8: a pending call, 1/s: the main thread runs bytecode
  std::byte reserved_2[0x100 - 0xd0];
  uint64_t step;          // 0x100
  uint64_t section_word;  // id << 32, depth << 16, phase << 8, flags; stored last. 0: outside any
                          // section
  uint64_t sections_opened;
  uint64_t unwinding;        // an exception or shutdown is under way
  int64_t last_error;        // an absl::StatusCode, or what the writer's errors are numbered by
  uint64_t flight_overflow;  // 0x128: threads that found all flight rings taken, and wrote nothing
  std::byte reserved_3[0x140 - 0x130];
  // 0x140: a robust mutex; readers look at its first word, the futex, alone
  alignas(8) std::byte death_notice[64];
  uint64_t abort_generation;  // 0x180, by the agent: this and older generations unwind
  uint64_t stop_step;         // by the agent; 0: none
  uint64_t trace_mask;        // by the agent
  std::byte reserved_4[0x200 - 0x198];
  AreaEntry area[kMaxAreas];  // 0x200
  std::byte reserved_5[kSegmentHeaderBytes - 0x400];
};
static_assert(sizeof(SegmentHeader) == kSegmentHeaderBytes);
static_assert(offsetof(SegmentHeader, major) == 0x008 && offsetof(SegmentHeader, minor) == 0x00a);
static_assert(offsetof(SegmentHeader, header_bytes) == 0x00c &&
              offsetof(SegmentHeader, segment_bytes) == 0x010);
static_assert(offsetof(SegmentHeader, areas) == 0x018 && offsetof(SegmentHeader, flags) == 0x01c);
static_assert(offsetof(SegmentHeader, job_id) == 0x020 &&
              offsetof(SegmentHeader, generation) == 0x030);
static_assert(offsetof(SegmentHeader, slot) == 0x038 && offsetof(SegmentHeader, rank) == 0x03c);
static_assert(offsetof(SegmentHeader, world) == 0x040 &&
              offsetof(SegmentHeader, local_rank) == 0x044);
static_assert(offsetof(SegmentHeader, pid) == 0x048 &&
              offsetof(SegmentHeader, incarnation) == 0x04c);
static_assert(offsetof(SegmentHeader, pid_start_time) == 0x050 &&
              offsetof(SegmentHeader, boot_id) == 0x058);
static_assert(offsetof(SegmentHeader, monotonic_ns) == 0x068 &&
              offsetof(SegmentHeader, boottime_ns) == 0x070);
static_assert(offsetof(SegmentHeader, realtime_ns) == 0x078 &&
              offsetof(SegmentHeader, beat_native) == 0x080);
static_assert(offsetof(SegmentHeader, beat_gil) == 0x0c0 &&
              offsetof(SegmentHeader, beat_main) == 0x0c8);
static_assert(offsetof(SegmentHeader, step) == 0x100 &&
              offsetof(SegmentHeader, section_word) == 0x108);
static_assert(offsetof(SegmentHeader, sections_opened) == 0x110 &&
              offsetof(SegmentHeader, unwinding) == 0x118);
static_assert(offsetof(SegmentHeader, last_error) == 0x120 &&
              offsetof(SegmentHeader, flight_overflow) == 0x128);
static_assert(offsetof(SegmentHeader, death_notice) == 0x140 &&
              offsetof(SegmentHeader, abort_generation) == 0x180);
static_assert(offsetof(SegmentHeader, stop_step) == 0x188 &&
              offsetof(SegmentHeader, trace_mask) == 0x190);
static_assert(offsetof(SegmentHeader, area) == 0x200);

// An open section. The first eight bytes are one word, 0 when the row is free, stored last.
struct SectionRow {
  uint32_t id;  // FNV-1a 64 of the name, folded to 32 bits, never 0: the same on all ranks
  uint8_t phase;
  uint8_t flags;  // 1: the limit is declared, hence firm
  uint16_t name;  // index into the strings
  uint64_t start_ns;
  uint64_t limit_ns;  // 0: learned
  uint64_t progress;
  uint64_t
      opened;  // the header's sections_opened at start: tells two openings of one section apart
  std::byte reserved[24];
};
static_assert(sizeof(SectionRow) == 64 && offsetof(SectionRow, phase) == 4 &&
              offsetof(SectionRow, flags) == 5);
static_assert(offsetof(SectionRow, name) == 6 && offsetof(SectionRow, start_ns) == 8);
static_assert(offsetof(SectionRow, limit_ns) == 16 && offsetof(SectionRow, progress) == 24);
static_assert(offsetof(SectionRow, opened) == 32);
inline constexpr uint32_t kSectionRows = 16;

// A communicator. See CommCell in flight_log.h.
struct CommRow {
  uint64_t id_hash;  // 0: free
  uint32_t size;
  uint32_t my_rank;
  uint64_t members;  // digest of the rank list (MembersDigest)
  uint8_t kind;
  uint8_t state;
  uint16_t reserved_1;
  int32_t async_error;  // the first one stays
  uint64_t api_seq, launched_seq, started_seq,
      done_seq;  // of the last operation there; kUnknownSeq: not known
  uint64_t last_signature;
  uint64_t oldest_kept_seq;  // of the signatures
  uint64_t changed_ns;       // monotonic time of the last change
  char name[32];             // padded with zeros
  uint64_t reserved_2;
};
static_assert(sizeof(CommRow) == 128 && offsetof(CommRow, size) == 8 &&
              offsetof(CommRow, my_rank) == 12);
static_assert(offsetof(CommRow, members) == 16 && offsetof(CommRow, kind) == 24 &&
              offsetof(CommRow, state) == 25);
static_assert(offsetof(CommRow, async_error) == 28 && offsetof(CommRow, api_seq) == 32);
static_assert(offsetof(CommRow, launched_seq) == 40 && offsetof(CommRow, started_seq) == 48);
static_assert(offsetof(CommRow, done_seq) == 56 && offsetof(CommRow, last_signature) == 64);
static_assert(offsetof(CommRow, oldest_kept_seq) == 72 && offsetof(CommRow, changed_ns) == 80);
static_assert(offsetof(CommRow, name) == 88);
inline constexpr uint32_t kCommRows = 256;

// What an operation looked like: operation q of a comm is at q % 64. op_seq is stored last;
// kUnknownSeq while it changes.
struct SignatureRow {
  uint64_t op_seq;
  uint64_t signature;
  uint64_t count;
  uint8_t function, datatype, reduction, known;
  int32_t root;
};
static_assert(sizeof(SignatureRow) == 32 && offsetof(SignatureRow, signature) == 8 &&
              offsetof(SignatureRow, count) == 16);
static_assert(offsetof(SignatureRow, function) == 24 && offsetof(SignatureRow, datatype) == 25);
static_assert(offsetof(SignatureRow, reduction) == 26 && offsetof(SignatureRow, known) == 27);
static_assert(offsetof(SignatureRow, root) == 28);
inline constexpr uint32_t kSignaturesPerComm = 64;

// Sends to and receives from one peer on one comm, counted.
struct PairRow {
  uint64_t comm;  // id hash; 0: free
  uint32_t peer;
  uint32_t reserved;
  uint64_t sends_entered, sends_done, receives_entered, receives_done;
};
static_assert(sizeof(PairRow) == 48 && offsetof(PairRow, peer) == 8 &&
              offsetof(PairRow, sends_entered) == 16);
static_assert(offsetof(PairRow, sends_done) == 24 && offsetof(PairRow, receives_entered) == 32);
static_assert(offsetof(PairRow, receives_done) == 40);
inline constexpr uint32_t kPairRows = 4096;

inline constexpr uint32_t kFlightRings = 16;
inline constexpr uint32_t kFlightRecordsPerRing = 4096;
inline constexpr uint32_t kStepRecords = 32768;
inline constexpr uint32_t kStringsBytes = 64 << 10;
inline constexpr uint32_t kMembersBytes = 64 << 10;

// Strings and members are entries of 8-byte multiples behind one u64, the bytes used so far (0:
// none, so 8). An index is an entry's offset in its area; 0 means none. The first word of an entry
// is stored last: 0 marks one that a killed writer left unfinished.
struct StringEntry {
  uint32_t id;  // FNV-1a 64 of the text, folded to 32 bits, never 0
  uint16_t bytes;
  uint16_t zero;  // then the text
};
static_assert(sizeof(StringEntry) == 8);
struct MembersEntry {
  uint64_t digest;
  uint32_t runs, ranks;  // then `runs` MemberRuns; `ranks` is what they sum to
};
struct MemberRun {  // ranks first, first + stride, ...
  uint32_t first, count, stride;
};
static_assert(sizeof(MembersEntry) == 16 && sizeof(MemberRun) == 12);

// An area that was checked against its segment's bounds; all 0 where there is none.
struct SegmentArea {
  uint64_t offset = 0, count = 0;
  uint32_t stride = 0;
};
using SegmentAreas = std::array<SegmentArea, kMaxAreas + 1>;  // by kind

// ---- Writing ----

// Whose black box it is. job_id is zero while no checkpoint root is open.
struct SegmentIdentity {
  Id128 job_id;
  uint64_t generation = 0;
  uint32_t slot = 0, rank = 0, world = 1, local_rank = 0;
};

// What a process says of itself when it takes the segment over.
struct WorkerIdentity {
  int32_t pid = 0;
  uint64_t pid_start_time = 0;
  uint32_t incarnation = 0;
  uint64_t generation = 0;
  uint32_t rank = 0, world = 1;
};

// Field 22 of /proc/PID/stat, in clock ticks since boot; 0 when there is no such process.
uint64_t ProcessStartTime(int pid);

// FNV-1a 64 over the ranks as little-endian u32, in order.
uint64_t MembersDigest(std::span<const uint32_t> ranks);

// A read-write mapping of a segment. Move-only; what writes through it (ProgressWriter, FlightLog,
// ...) borrows the mapping, which stays at its address when the Segment moves, and must not outlive
// it. Methods are safe for concurrent use unless they say otherwise.
class Segment {
 public:
  // The agent's side: a sparse memfd of about 9 MiB, sealed against shrinking and growing. Costs
  // well under 1 ms.
  static absl::StatusOr<Segment> Create(const SegmentIdentity& identity);
  // The worker's side, with the descriptor that the agent handed down. kDataLoss: not a segment, or
  // cut, or its areas do not fit. kUnimplemented: another major version. kFailedPrecondition: could
  // still be shrunk under us.
  static absl::StatusOr<Segment> Open(UniqueFd fd);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  int fd() const { return fd_.get(); }
  std::span<const std::byte> bytes() const { return mapping_.bytes(); }
  SegmentHeader& header() const { return *reinterpret_cast<SegmentHeader*>(mapping_.data()); }

  // Sets pid, incarnation, generation, rank and world, and clears what an older process left open:
  // sections, comms, pairs, beats, unwinding, the last error. Counters that tell instances apart go
  // on. One caller, before any writer.
  void Adopt(const WorkerIdentity& worker);
  // A new membership for the same process. The worker's alone.
  void SetGeneration(uint64_t generation, uint32_t rank, uint32_t world);
  void SetJobId(const Id128& job_id);

  std::span<SectionRow> sections() const { return Rows<SectionRow>(AreaKind::kSections); }
  std::span<CommRow> comms() const { return Rows<CommRow>(AreaKind::kComms); }
  // The last kSignaturesPerComm operations of comm row `comm`.
  std::span<SignatureRow> signatures(size_t comm) const;
  std::span<PairRow> pairs() const { return Rows<PairRow>(AreaKind::kPairs); }
  // The bytes of any area, such as the flight rings and the step log; empty where there is none.
  std::span<std::byte> area(AreaKind kind) const;

  // The index of `text` in the strings, cut at 255 bytes; 0 when the area is full. No allocation.
  // Once a string, not once an operation: it walks the area.
  uint16_t Intern(std::string_view text);
  // Records a rank list, and returns its digest. A list that does not fit is left out: the digest
  // still compares.
  uint64_t InternMembers(std::span<const uint32_t> ranks);

  // Holds the robust mutex of the early death notice from the calling thread until that thread
  // ends; the kernel marks its first word (FUTEX_OWNER_DIED, bit 30) when the process dies, before
  // its memory is torn down. Call it on a thread that lives as long as the process.
  // kFailedPrecondition: held already.
  absl::Status HoldDeathNotice();
  // That first word, for futex waits by the agent.
  uint32_t* death_notice_word() const;

  // In a forked child: replaces all mappings of segments and buffers by private zero pages. Runs by
  // itself after fork(); only a raw clone() or a vfork() child that does not exec at once must call
  // it.
  static void DropInChild();

 private:
  friend class FlightLog;
  friend class CommCell;
  friend class PairCell;
  struct Claims;

  Segment(UniqueFd fd, Mapping mapping, const SegmentAreas& areas);
  template <typename T>
  std::span<T> Rows(AreaKind kind) const {
    const std::span<std::byte> bytes = area(kind);
    return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
  }

  UniqueFd fd_;
  Mapping mapping_;
  SegmentAreas areas_;  // checked once, never read from shared memory again
  std::unique_ptr<Claims>
      claims_;  // rows and rings in use by this process; apart, so that a move leaves it in place
};

// ---- Reading ----

// Read-only access to a live segment or a saved one. All input is taken as hostile: bounds are
// checked once, kept here, and never read again; what can be torn is read by word. Copyable, cheap
// to copy. Safe for concurrent use.
class SegmentView {
 public:
  // Maps a sealed memfd; a file, which could be cut while it is read, is copied (up to 256 MiB).
  // Errors as Segment::Open; the message names what is wrong.
  static absl::StatusOr<SegmentView> Open(int fd);
  // Copies `bytes`, such as a saved segment.
  static absl::StatusOr<SegmentView> FromBytes(std::span<const std::byte> bytes);

  const SegmentHeader& header() const {
    return *reinterpret_cast<const SegmentHeader*>(bytes_.data());
  }
  // All of it, to save a copy.
  std::span<const std::byte> bytes() const { return bytes_; }

  uint64_t rows(AreaKind kind) const;
  // Row `row` of an area, copied by 64-bit words; rows of a newer minor version may be longer than
  // T. `row` < rows(kind).
  template <typename T>
  T Row(AreaKind kind, uint64_t row) const {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
    std::array<uint64_t, sizeof(T) / 8> words;
    CopyWords(kind, row, 0, words);
    return std::bit_cast<T>(words);
  }
  // The same for record `index` of 64-bit multiples inside a row, such as a record of a flight
  // ring.
  template <typename T>
  T SubRow(AreaKind kind, uint64_t row, uint64_t index) const {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
    std::array<uint64_t, sizeof(T) / 8> words;
    CopyWords(kind, row, index * sizeof(T), words);
    return std::bit_cast<T>(words);
  }
  // Records of `bytes` in one row of the area.
  uint64_t sub_rows(AreaKind kind, size_t bytes) const;

  // The interned text; empty for 0 and for an index that leads nowhere.
  std::string String(uint32_t index) const;
  // The rank list with this digest, checked against it; empty when it was left out.
  std::vector<uint32_t> Members(uint64_t digest) const;

 private:
  SegmentView(std::shared_ptr<const void> owner, std::span<const std::byte> bytes,
              const SegmentAreas& areas);
  void CopyWords(AreaKind kind, uint64_t row, uint64_t offset, std::span<uint64_t> words) const;

  std::shared_ptr<const void>
      owner_;  // shared: a view is handed around, the bytes are read by all of its copies
  std::span<const std::byte> bytes_;
  SegmentAreas areas_;
};

}  // namespace outlast
