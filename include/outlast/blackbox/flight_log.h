// What a rank did last: a ring of 64 B records for each writer thread, and a row for each communicator.
//
// A ring has one writer. (A ring shared by threads has a hole: a writer that is preempted for a whole lap scribbles under
// a newer valid number.) Records are overwritten in place; a reader drops what fails its CRC, so a kill costs at most the
// one record that each thread was writing.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "outlast/blackbox/segment.h"

namespace outlast {

struct FlightRecord {
  uint64_t seq;   // from 1; record n is at (n - 1) % records of the ring
  uint64_t t_ns;  // CLOCK_MONOTONIC
  uint16_t kind;
  uint16_t comm;       // row of the comm table; 0xffff: none
  uint32_t signature;  // low half
  uint64_t op_seq;
  uint64_t bytes;
  uint64_t aux;
  uint32_t call_site;  // index of an interned "file:line", or the low half of a return address
  uint32_t thread;     // kernel thread id
  uint32_t generation;  // low half
  uint32_t crc;         // CRC32C of bytes 0..59
};
static_assert(sizeof(FlightRecord) == 64 && offsetof(FlightRecord, t_ns) == 8 && offsetof(FlightRecord, kind) == 16);
static_assert(offsetof(FlightRecord, comm) == 18 && offsetof(FlightRecord, signature) == 20);
static_assert(offsetof(FlightRecord, op_seq) == 24 && offsetof(FlightRecord, bytes) == 32);
static_assert(offsetof(FlightRecord, aux) == 40 && offsetof(FlightRecord, call_site) == 48);
static_assert(offsetof(FlightRecord, thread) == 52 && offsetof(FlightRecord, generation) == 56);
static_assert(offsetof(FlightRecord, crc) == 60);

inline constexpr uint16_t kNoComm = 0xffff;

// The numbers are part of the ABI; those from kUser on are the caller's.
enum class FlightKind : uint16_t {
  kEntered = 1,    // an operation's call
  kLaunched = 2,   // enqueued
  kStarted = 3,    // runs
  kDone = 4,
  kFailed = 5,     // aux: error
  kSectionOpened = 6,
  kSectionClosed = 7,
  kStep = 8,
  kGeneration = 9,
  kAbort = 10,
  kSnapshot = 11,
  kCheckpoint = 12,
  kUser = 256,
};

struct FlightEvent {
  FlightKind kind = FlightKind::kUser;
  uint16_t comm = kNoComm;
  uint32_t signature = 0;
  uint64_t t_ns = 0;
  uint64_t op_seq = 0;
  uint64_t bytes = 0;
  uint64_t aux = 0;
  uint32_t call_site = 0;
};

// The calling thread's ring. Move-only; used by that thread alone; borrows the segment. The ring is free again when the
// log is destroyed, and its records stay.
class FlightLog {
 public:
  // Takes a free ring, and goes on after its last record. When all are taken the log writes nothing, and the header
  // counts the thread.
  static FlightLog ForThisThread(Segment& segment);

  FlightLog() = default;
  FlightLog(FlightLog&& other) noexcept;
  FlightLog& operator=(FlightLog&& other) noexcept;
  ~FlightLog();

  bool has_ring() const { return ring_ != nullptr; }
  uint32_t ring() const { return ring_number_; }

  // About 25 ns, CRC included. The caller reads the clock.
  void Record(const FlightEvent& event);

 private:
  FlightRecord* ring_ = nullptr;
  const SegmentHeader* header_ = nullptr;
  std::atomic<uint32_t>* claimed_ = nullptr;
  uint64_t next_seq_ = 1;
  uint64_t mask_ = 0;
  uint32_t ring_number_ = 0;
  uint32_t thread_ = 0;
};

// What a reader got out of a ring.
struct FlightRing {
  std::vector<FlightRecord> records;  // by seq; each has a good CRC and lies in its place
  uint64_t lost = 0;                  // missing between the oldest and the newest of them
  uint64_t overwritten = 0;           // older than the oldest
};

// Reads ring `ring` (from 0; one that is not there is empty). Allocates.
FlightRing ReadFlightRing(const SegmentView& view, uint32_t ring);
uint32_t FlightRingCount(const SegmentView& view);

// ---- Communicators ---------------------------------------------------------------------------------------------------

enum class CommKind : uint8_t { kWorld = 1, kData = 2, kTensor = 3, kPipeline = 4, kExpert = 5, kOther = 6 };
enum class CommState : uint8_t { kFree = 0, kInit = 1, kReady = 2, kFailed = 3, kAborted = 4, kClosed = 5 };

// Names for reports: "world", "data" ...; "unknown" for other numbers.
std::string_view CommKindName(CommKind kind);
std::string_view CommStateName(CommState state);

// Bits of OperationSignature::known.
enum SignatureField : uint8_t {
  kKnowsFunction = 1,
  kKnowsDatatype = 2,
  kKnowsReduction = 4,
  kKnowsRoot = 8,
  kKnowsCount = 16,
};

// What must agree between the members of a collective.
struct OperationSignature {
  uint8_t function = 0, datatype = 0, reduction = 0;
  uint8_t known = 0;  // SignatureFields that the source could tell
  int32_t root = -1;
  uint64_t count = 0;

  bool operator==(const OperationSignature&) const = default;
};

// FNV-1a 64 over {u8 function, datatype, reduction, known; i32 root; u64 count}, little endian. Comparable only between
// equal `known` masks.
uint64_t Signature(const OperationSignature& operation);
// Whether the two agree in every field that both know.
bool Agree(const OperationSignature& a, const OperationSignature& b);

struct CommInfo {
  uint64_t id_hash = 0;  // not 0; the same on all members
  uint32_t my_rank = 0;  // in the comm
  std::span<const uint32_t> members;  // ranks of the world, in the order of the comm; borrowed for the call
  CommKind kind = CommKind::kOther;
  std::string_view name;  // cut at 31 bytes
};

// The row of one communicator. Move-only; borrows the segment. One thread enters operations; launched, started and done
// may each come from a thread of their own.
class CommCell {
 public:
  // Takes a row. kInvalidArgument: id 0. kResourceExhausted: all 256 rows are in use.
  static absl::StatusOr<CommCell> Open(Segment& segment, const CommInfo& info);

  CommCell() = default;
  CommCell(CommCell&& other) noexcept;
  CommCell& operator=(CommCell&& other) noexcept;
  // Closes the row: kClosed, unless it is kFailed or kAborted; a later Open may take it.
  ~CommCell();

  // The row's number, as flight records name it.
  uint16_t index() const { return index_; }
  // An operation's call: its sequence number, from 1, which is returned, and what it looks like.
  uint64_t Enter(const OperationSignature& operation, uint64_t now_ns);
  // Highest operation that is enqueued, runs, is finished. Unknown (all ones) until the first call.
  void SetLaunched(uint64_t seq, uint64_t now_ns);
  void SetStarted(uint64_t seq, uint64_t now_ns);
  void SetDone(uint64_t seq, uint64_t now_ns);
  // The source can tell: the three counters start at 0.
  void SetProgressIsKnown();
  void SetState(CommState state, uint64_t now_ns);
  // The first error stays.
  void SetAsyncError(int32_t error, uint64_t now_ns);
  uint64_t api_seq() const { return api_seq_; }

 private:
  CommCell(CommRow* row, std::span<SignatureRow> signatures, std::atomic<uint64_t>* claims, uint16_t index)
      : row_(row), signatures_(signatures), claims_(claims), index_(index) {}
  void Release();

  CommRow* row_ = nullptr;
  std::span<SignatureRow> signatures_;
  std::atomic<uint64_t>* claims_ = nullptr;
  uint64_t api_seq_ = 0;
  uint16_t index_ = kNoComm;
};

// Counters of sends and receives with one peer. Move-only; borrows the segment; one thread a direction. The counts stay
// readable after it until the row is needed.
class PairCell {
 public:
  // Takes a row. kInvalidArgument: id 0. kResourceExhausted: all 4,096 rows are in use.
  static absl::StatusOr<PairCell> Open(Segment& segment, uint64_t comm_id_hash, uint32_t peer);

  PairCell() = default;
  PairCell(PairCell&& other) noexcept;
  PairCell& operator=(PairCell&& other) noexcept;
  ~PairCell();

  void EnterSend() { Add(row_->sends_entered); }
  void FinishSend() { Add(row_->sends_done); }
  void EnterReceive() { Add(row_->receives_entered); }
  void FinishReceive() { Add(row_->receives_done); }

 private:
  static void Add(uint64_t& counter) { StoreWord(counter, LoadWord(counter) + 1); }

  PairRow* row_ = nullptr;
  std::atomic<uint64_t>* claims_ = nullptr;
  uint16_t index_ = 0;
};

// A kept operation of a comm.
struct KeptOperation {
  uint64_t seq = 0;
  OperationSignature operation;
  uint64_t signature = 0;
};

// One look at a communicator.
struct CommSnapshot {
  uint16_t index = 0;
  uint64_t id_hash = 0;
  uint32_t size = 0, my_rank = 0;
  uint64_t members_digest = 0;
  CommKind kind = CommKind::kOther;
  CommState state = CommState::kFree;
  int32_t async_error = 0;
  uint64_t api_seq = 0, launched_seq = kUnknownSeq, started_seq = kUnknownSeq, done_seq = kUnknownSeq;
  uint64_t last_signature = 0, oldest_kept_seq = 0, changed_ns = 0;
  std::string name;
};

// The rows in use, closed ones included. Needs nothing from the writer.
std::vector<CommSnapshot> ReadComms(const SegmentView& view);
// The last operations of comm row `index`, by seq; those that were being written are left out.
std::vector<KeptOperation> ReadOperations(const SegmentView& view, uint16_t index);
std::vector<PairRow> ReadPairs(const SegmentView& view);

}  // namespace outlast
