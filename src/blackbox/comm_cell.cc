#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "blackbox/claims.h"
#include "blackbox/words.h"
#include "outlast/blackbox/flight_log.h"

namespace outlast {
namespace {

constexpr std::string_view kKindNames[] = {"unknown", "world", "data", "tensor", "pipeline", "expert", "other"};
constexpr std::string_view kStateNames[] = {"free", "init", "ready", "failed", "aborted", "closed"};

template <size_t n>
std::string_view NameIn(const std::string_view (&names)[n], uint8_t number) {
  return number < n ? names[number] : "unknown";
}

// The second word of a signature's row.
struct SignatureTail {
  uint8_t function, datatype, reduction, known;
  int32_t root;
};
static_assert(sizeof(SignatureTail) == 8);

// Takes the row that `best_free(is_claimed)` proposes until one is had; -1 when it proposes none.
template <typename BestFree>
int ClaimRow(std::atomic<uint64_t>* claims, BestFree best_free) {
  const auto is_claimed = [claims](size_t row) {
    return (claims[row / 64].load(std::memory_order_relaxed) >> row % 64 & 1) != 0;
  };
  while (true) {
    const int row = best_free(is_claimed);
    if (row < 0) return -1;
    const uint64_t bit = uint64_t{1} << row % 64;
    if ((claims[row / 64].fetch_or(bit, std::memory_order_acquire) & bit) == 0) return row;
  }
}

void GiveBackRow(std::atomic<uint64_t>* claims, size_t row) {
  claims[row / 64].fetch_and(~(uint64_t{1} << row % 64), std::memory_order_release);
}

// A comm row that was never used, else the one that was left longest ago: readers keep its history longest.
int ClaimCommRow(std::span<CommRow> rows, std::atomic<uint64_t>* claims) {
  return ClaimRow(claims, [rows](const auto& is_claimed) {
    int best = -1;
    uint64_t best_changed = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (is_claimed(i)) continue;
      if (LoadWord(rows[i].id_hash) == 0) return static_cast<int>(i);
      const uint64_t changed = LoadWord(rows[i].changed_ns);
      if (best < 0 || changed < best_changed) {
        best = static_cast<int>(i);
        best_changed = changed;
      }
    }
    return best;
  });
}

int ClaimPairRow(std::span<PairRow> rows, std::atomic<uint64_t>* claims) {
  return ClaimRow(claims, [rows](const auto& is_claimed) {
    int best = -1;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (is_claimed(i)) continue;
      if (LoadWord(rows[i].comm) == 0) return static_cast<int>(i);
      if (best < 0) best = static_cast<int>(i);
    }
    return best;
  });
}

// The id is away while the row is filled, and comes last.
void FillRow(CommRow& target, const CommInfo& info, uint64_t members) {
  CommRow row = {};
  row.size = static_cast<uint32_t>(info.members.size());
  row.my_rank = info.my_rank;
  row.members = members;
  row.kind = static_cast<uint8_t>(info.kind);
  row.state = static_cast<uint8_t>(CommState::kInit);
  row.launched_seq = row.started_seq = row.done_seq = kUnknownSeq;
  row.oldest_kept_seq = 1;
  std::memcpy(row.name, info.name.data(), std::min(info.name.size(), sizeof(row.name) - 1));
  StoreWord(target.id_hash, 0);
  blackbox::StoreRecord(&target, row);
  StoreWord(target.id_hash, info.id_hash);
}

}  // namespace

std::string_view CommKindName(CommKind kind) { return NameIn(kKindNames, static_cast<uint8_t>(kind)); }
std::string_view CommStateName(CommState state) { return NameIn(kStateNames, static_cast<uint8_t>(state)); }

uint64_t Signature(const OperationSignature& operation) {
  struct {
    SignatureTail tail;
    uint64_t count;
  } const hashed = {{operation.function, operation.datatype, operation.reduction, operation.known, operation.root},
                    operation.count};
  static_assert(sizeof(hashed) == 16);
  return Fnv1a64({reinterpret_cast<const char*>(&hashed), sizeof(hashed)});
}

bool Agree(const OperationSignature& a, const OperationSignature& b) {
  const int both = a.known & b.known;
  return ((both & kKnowsFunction) == 0 || a.function == b.function) &&
         ((both & kKnowsDatatype) == 0 || a.datatype == b.datatype) &&
         ((both & kKnowsReduction) == 0 || a.reduction == b.reduction) &&
         ((both & kKnowsRoot) == 0 || a.root == b.root) && ((both & kKnowsCount) == 0 || a.count == b.count);
}

absl::StatusOr<CommCell> CommCell::Open(Segment& segment, const CommInfo& info) {
  if (info.id_hash == 0) {
    return Error(absl::StatusCode::kInvalidArgument, "communicator '{}': id 0 stands for a free row", info.name);
  }
  std::atomic<uint64_t>* claims = segment.claims_->comms.data();
  const int index = ClaimCommRow(segment.comms(), claims);
  if (index < 0) {
    return Error(absl::StatusCode::kResourceExhausted, "communicator '{}': all {} rows of the black box are in use",
                 info.name, kCommRows);
  }
  const std::span<SignatureRow> signatures = segment.signatures(static_cast<size_t>(index));
  for (SignatureRow& row : signatures) StoreWord(row.op_seq, 0);
  FillRow(segment.comms()[static_cast<size_t>(index)], info, segment.InternMembers(info.members));
  return CommCell(&segment.comms()[static_cast<size_t>(index)], signatures, claims, static_cast<uint16_t>(index));
}

CommCell::CommCell(CommCell&& other) noexcept { *this = std::move(other); }

CommCell& CommCell::operator=(CommCell&& other) noexcept {
  std::swap(row_, other.row_);
  std::swap(signatures_, other.signatures_);
  std::swap(claims_, other.claims_);
  std::swap(api_seq_, other.api_seq_);
  std::swap(index_, other.index_);
  return *this;
}

CommCell::~CommCell() {
  if (row_ != nullptr) Release();
}

void CommCell::Release() {
  const auto state = static_cast<CommState>(LoadWord(row_->state));
  if (state != CommState::kFailed && state != CommState::kAborted) {
    StoreWord(row_->state, static_cast<uint8_t>(CommState::kClosed));
  }
  GiveBackRow(claims_, index_);
}

uint64_t CommCell::Enter(const OperationSignature& operation, uint64_t now_ns) {
  const uint64_t seq = ++api_seq_;
  const uint64_t signature = Signature(operation);
  SignatureRow& row = signatures_[seq % kSignaturesPerComm];
  StoreWord(row.op_seq, kUnknownSeq);
  StoreWord(row.signature, signature);
  StoreWord(row.count, operation.count);
  blackbox::StoreRecord(&row.function, SignatureTail{operation.function, operation.datatype, operation.reduction,
                                                     operation.known, operation.root});
  StoreWord(row.op_seq, seq);
  StoreWord(row_->last_signature, signature);
  if (seq > kSignaturesPerComm) StoreWord(row_->oldest_kept_seq, seq - kSignaturesPerComm + 1);
  StoreWord(row_->changed_ns, now_ns);
  StoreWord(row_->api_seq, seq);
  return seq;
}

void CommCell::SetLaunched(uint64_t seq, uint64_t now_ns) {
  StoreWord(row_->changed_ns, now_ns);
  StoreWord(row_->launched_seq, seq);
}

void CommCell::SetStarted(uint64_t seq, uint64_t now_ns) {
  StoreWord(row_->changed_ns, now_ns);
  StoreWord(row_->started_seq, seq);
}

void CommCell::SetDone(uint64_t seq, uint64_t now_ns) {
  StoreWord(row_->changed_ns, now_ns);
  StoreWord(row_->done_seq, seq);
}

void CommCell::SetProgressIsKnown() {
  StoreWord(row_->launched_seq, 0);
  StoreWord(row_->started_seq, 0);
  StoreWord(row_->done_seq, 0);
}

void CommCell::SetState(CommState state, uint64_t now_ns) {
  StoreWord(row_->changed_ns, now_ns);
  StoreWord(row_->state, static_cast<uint8_t>(state));
}

void CommCell::SetAsyncError(int32_t error, uint64_t now_ns) {
  int32_t none = 0;
  StoreWord(row_->changed_ns, now_ns);
  __atomic_compare_exchange_n(&row_->async_error, &none, error, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}

absl::StatusOr<PairCell> PairCell::Open(Segment& segment, uint64_t comm_id_hash, uint32_t peer) {
  if (comm_id_hash == 0) {
    return Error(absl::StatusCode::kInvalidArgument, "peer {}: communicator id 0 stands for a free row", peer);
  }
  PairCell cell;
  cell.claims_ = segment.claims_->pairs.data();
  const int index = ClaimPairRow(segment.pairs(), cell.claims_);
  if (index < 0) {
    return Error(absl::StatusCode::kResourceExhausted, "peer {}: all {} rows for pairs are in use", peer, kPairRows);
  }
  cell.index_ = static_cast<uint16_t>(index);
  cell.row_ = &segment.pairs()[static_cast<size_t>(index)];
  StoreWord(cell.row_->comm, 0);
  blackbox::StoreRecord(cell.row_, PairRow{.peer = peer});
  StoreWord(cell.row_->comm, comm_id_hash);
  return cell;
}

PairCell::PairCell(PairCell&& other) noexcept { *this = std::move(other); }

PairCell& PairCell::operator=(PairCell&& other) noexcept {
  std::swap(row_, other.row_);
  std::swap(claims_, other.claims_);
  std::swap(index_, other.index_);
  return *this;
}

PairCell::~PairCell() {
  if (row_ != nullptr) GiveBackRow(claims_, index_);
}

std::vector<CommSnapshot> ReadComms(const SegmentView& view) {
  std::vector<CommSnapshot> comms;
  const uint64_t rows = std::min<uint64_t>(view.rows(AreaKind::kComms), kNoComm);
  for (uint64_t i = 0; i < rows; ++i) {
    const auto row = view.Row<CommRow>(AreaKind::kComms, i);
    if (row.id_hash == 0) continue;
    comms.push_back({.index = static_cast<uint16_t>(i),
                     .id_hash = row.id_hash,
                     .size = row.size,
                     .my_rank = row.my_rank,
                     .members_digest = row.members,
                     .kind = static_cast<CommKind>(row.kind),
                     .state = static_cast<CommState>(row.state),
                     .async_error = row.async_error,
                     .api_seq = row.api_seq,
                     .launched_seq = row.launched_seq,
                     .started_seq = row.started_seq,
                     .done_seq = row.done_seq,
                     .last_signature = row.last_signature,
                     .oldest_kept_seq = row.oldest_kept_seq,
                     .changed_ns = row.changed_ns,
                     .name = std::string(row.name, strnlen(row.name, sizeof(row.name)))});
  }
  return comms;
}

std::vector<KeptOperation> ReadOperations(const SegmentView& view, uint16_t index) {
  std::vector<KeptOperation> kept;
  if (index >= view.rows(AreaKind::kSignatures)) return kept;
  const uint64_t size = view.sub_rows(AreaKind::kSignatures, sizeof(SignatureRow));
  for (uint64_t i = 0; i < size; ++i) {
    const auto row = view.SubRow<SignatureRow>(AreaKind::kSignatures, index, i);
    if (row.op_seq == 0 || row.op_seq == kUnknownSeq || row.op_seq % size != i) continue;
    const OperationSignature operation = {.function = row.function, .datatype = row.datatype,
                                          .reduction = row.reduction, .known = row.known, .root = row.root,
                                          .count = row.count};
    // The hash tells a row that was written while it was read, and one that is damaged.
    if (Signature(operation) == row.signature) kept.push_back({row.op_seq, operation, row.signature});
  }
  std::sort(kept.begin(), kept.end(), [](const KeptOperation& a, const KeptOperation& b) { return a.seq < b.seq; });
  return kept;
}

std::vector<PairRow> ReadPairs(const SegmentView& view) {
  std::vector<PairRow> pairs;
  for (uint64_t i = 0; i < view.rows(AreaKind::kPairs); ++i) {
    const auto row = view.Row<PairRow>(AreaKind::kPairs, i);
    if (row.comm != 0) pairs.push_back(row);
  }
  return pairs;
}

}  // namespace outlast
