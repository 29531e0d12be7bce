#include "checkpoint/plan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "checkpoint/json.h"

namespace outlast {
namespace {

template <typename... Args>
absl::Status Refuse(fmt::format_string<Args...> format, Args&&... args) {
  return Error(absl::StatusCode::kInvalidArgument, format, std::forward<Args>(args)...);
}

__extension__ typedef unsigned __int128 Wide;  // products of two 64-bit sizes

bool HasElements(const Shape& extent) {
  return std::ranges::find(extent.dimensions(), 0) == extent.dimensions().end();
}

bool IsWhole(const Box& box, const Shape& global) {
  return box.extent == global && box.offset == Shape::Zeros(global.rank());
}

std::string BoxText(const Box& box) {
  return fmt::format("offset {} extent {}", box.offset.text(), box.extent.text());
}

bool Overlap(const Box& a, const Box& b) { return HasElements(Intersect(a, b).extent); }

bool BoxBefore(const Box& a, const Box& b) {
  const auto key = [](const Box& box) {
    std::vector<int64_t> numbers(box.offset.dimensions().begin(), box.offset.dimensions().end());
    numbers.insert(numbers.end(), box.extent.dimensions().begin(), box.extent.dimensions().end());
    return numbers;
  };
  return key(a) < key(b);
}

// --- Texts that digests are made of: lengths first, so that no two tables share one ---

void Put(std::string& text, uint64_t number) {
  char bytes[8];
  std::memcpy(bytes, &number, sizeof bytes);
  text.append(bytes, sizeof bytes);
}
void Put(std::string& text, std::string_view value) {
  Put(text, value.size());
  text += value;
}
void Put(std::string& text, const Shape& shape) {
  Put(text, static_cast<uint64_t>(shape.rank()));
  for (const int64_t length : shape.dimensions()) Put(text, static_cast<uint64_t>(length));
}
void Put(std::string& text, const Box& box) {
  Put(text, box.offset);
  Put(text, box.extent);
}

std::string RowText(const TensorRow& row) {
  std::string text;
  Put(text, row.name);
  Put(text, NameOf(row.dtype));
  Put(text, row.global);
  Put(text, row.boxes.size());
  for (const HeldBox& held : row.boxes) {
    Put(text, held.rank);
    Put(text, held.count);
    Put(text, held.step);
    Put(text, held.box);
  }
  return text;
}

void Put(std::string& text, const PlannedPiece& piece) {
  Put(text, piece.row);
  Put(text, piece.writer);
  Put(text, piece.box);
}

// --- Checks ---

absl::Status CheckBox(const TensorRow& row, const HeldBox& held, uint32_t world) {
  const auto refuse = [&](std::string_view why) {
    return Refuse("tensor '{}' of {}: rank {} holds {}: {}", row.name.substr(0, 200),
                  row.global.text(), held.rank, BoxText(held.box), why);
  };
  if (held.count == 0 || held.step == 0 || held.last_rank() >= world)
    return refuse(fmt::format("the world is {}", world));
  if (held.box.offset.rank() != row.global.rank() || held.box.extent.rank() != row.global.rank()) {
    return refuse("another number of dimensions");
  }
  for (int i = 0; i < row.global.rank(); ++i) {
    const int64_t offset = held.box.offset[i], extent = held.box.extent[i];
    if (offset < 0 || extent < 0 || extent > row.global[i] || offset > row.global[i] - extent) {
      return refuse("it leaves the tensor");
    }
  }
  return BytesOf(row.dtype, held.box.extent).status();
}

absl::Status CheckRow(const TensorRow& row, uint32_t world) {
  if (row.name.empty() || row.name.size() > kMaxNameBytes || !IsUtf8(row.name)) {
    return Refuse("a tensor name of {} bytes, 1 to {} of UTF-8 wanted", row.name.size(),
                  kMaxNameBytes);
  }
  const auto bytes = BytesOf(row.dtype, row.global);
  if (!bytes.ok())
    return Annotate(bytes.status(), fmt::format("tensor '{}'", row.name.substr(0, 200)));
  for (const HeldBox& held : row.boxes) OUTLAST_RETURN_IF_ERROR(CheckBox(row, held, world));
  return absl::OkStatus();
}

absl::Status CheckTable(const TensorTable& table) {
  if (table.world == 0) return Refuse("a plan for a world of 0, at least 1 wanted");
  std::set<std::string_view> names;
  for (const TensorRow& row : table.rows) {
    OUTLAST_RETURN_IF_ERROR(CheckRow(row, table.world));
    if (!names.insert(row.name).second)
      return Refuse("tensor '{}' is in the table twice", row.name.substr(0, 200));
  }
  return absl::OkStatus();
}

// --- Assignment ---

// Ranks that hold the same box.
struct Group {
  Box box;
  std::vector<uint32_t> ranks;  // empty: all
  uint64_t bytes = 0;
};

absl::StatusOr<std::vector<Group>> GroupsOf(const TensorRow& row) {
  std::vector<Group> groups;
  if (row.boxes.empty()) {
    OUTLAST_ASSIGN_OR_RETURN(const uint64_t bytes, BytesOf(row.dtype, row.global));
    groups.push_back({{Shape::Zeros(row.global.rank()), row.global}, {}, bytes});
    return groups;
  }
  std::vector<const HeldBox*> sorted;
  for (const HeldBox& held : row.boxes) sorted.push_back(&held);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](auto* a, auto* b) { return BoxBefore(a->box, b->box); });
  std::vector<HeldBox> distinct;
  for (const HeldBox* held : sorted) {
    if (groups.empty() || groups.back().box != held->box) {
      OUTLAST_ASSIGN_OR_RETURN(const uint64_t bytes, BytesOf(row.dtype, held->box.extent));
      groups.push_back({held->box, {}, bytes});
      distinct.push_back(*held);
    }
    for (uint32_t i = 0; i < held->count; ++i)
      groups.back().ranks.push_back(held->rank + i * held->step);
  }
  for (Group& group : groups) std::ranges::sort(group.ranks);
  OUTLAST_RETURN_IF_ERROR(CheckDisjoint(row.name, row.global, distinct));
  uint64_t covered = 0;
  for (const Group& group : groups) covered += group.bytes;
  OUTLAST_ASSIGN_OR_RETURN(const uint64_t wanted, BytesOf(row.dtype, row.global));
  if (covered != wanted) {
    return Refuse("tensor '{}' of {}: its boxes cover {} of {} bytes", row.name.substr(0, 200),
                  row.global.text(), covered, wanted);
  }
  return groups;
}

class Assigner {
 public:
  explicit Assigner(Plan& plan) : plan_(plan) { all_.resize(plan.table.world); }

  absl::Status Run() {
    for (uint32_t rank = 0; rank < plan_.table.world; ++rank) all_[rank] = rank;
    plan_.load.assign(plan_.table.world, 0);
    std::vector<std::vector<Group>> groups;
    for (const TensorRow& row : plan_.table.rows) {
      OUTLAST_ASSIGN_OR_RETURN(groups.emplace_back(), GroupsOf(row));
      for (const Group& group : groups.back()) total_ += group.bytes;
    }
    // What cannot move first: the rest is levelled against it.
    for (const auto& row : groups) {
      for (const Group& group : row) {
        if (!IsReplicated(group))
          plan_.load[group.ranks.empty() ? 0 : group.ranks[0]] += group.bytes;
      }
    }
    for (uint32_t row = 0; row < groups.size(); ++row) {
      for (const Group& group : groups[row]) Place(row, group);
    }
    return absl::OkStatus();
  }

 private:
  bool IsReplicated(const Group& group) const {
    return group.ranks.empty() ? plan_.table.world > 1 : group.ranks.size() > 1;
  }

  void Add(uint32_t row, uint32_t writer, const Box& box, const Box& held, uint64_t bytes) {
    plan_.pieces.push_back({row, writer, box, held, bytes});
  }

  void Place(uint32_t row, const Group& group) {
    const std::span<const uint32_t> replicas = group.ranks.empty() ? all_ : group.ranks;
    if (!HasElements(group.box.extent)) {
      // An empty shard is an entry of each holder; an empty tensor of one rank.
      const bool whole = IsWhole(group.box, plan_.table.rows[row].global);
      const size_t count = whole ? 1 : replicas.size();
      for (size_t i = 0; i < count; ++i) Add(row, replicas[i], group.box, group.box, 0);
      return;
    }
    if (!IsReplicated(group)) return Add(row, replicas[0], group.box, group.box, group.bytes);
    const size_t pieces = PieceCount(group, replicas.size());
    const int cut = pieces > 1 ? CutDimension(row, group, pieces) : -1;
    if (cut < 0) {
      const uint32_t writer = LeastLoaded(replicas, 1)[0];
      plan_.load[writer] += group.bytes;
      return Add(row, writer, group.box, group.box, group.bytes);
    }
    Cut(row, group,
        LeastLoaded(replicas, std::min<size_t>(pieces, static_cast<size_t>(group.box.extent[cut]))),
        cut);
  }

  // 1 up to an eighth of the mean load, then as many eighths as it has, at most one a replica.
  size_t PieceCount(const Group& group, size_t replicas) const {
    const Wide eighths = Wide{group.bytes} * 8 * plan_.table.world;
    return static_cast<size_t>(std::min<Wide>(replicas, (eighths + total_ - 1) / total_));
  }

  // The first dimension with a slice for each piece, else the longest; -1: slices would end inside
  // a byte.
  int CutDimension(uint32_t row, const Group& group, size_t pieces) const {
    const auto lengths = group.box.extent.dimensions();
    if (lengths.empty()) return -1;
    auto chosen = std::ranges::find_if(
        lengths, [&](int64_t n) { return static_cast<uint64_t>(n) >= pieces; });
    if (chosen == lengths.end()) chosen = std::ranges::max_element(lengths);
    if (*chosen < 2) return -1;
    Wide slice_bits = static_cast<Wide>(BitsOf(plan_.table.rows[row].dtype));
    for (auto inner = chosen + 1; inner != lengths.end(); ++inner)
      slice_bits *= static_cast<Wide>(*inner);
    return slice_bits % 8 == 0 ? static_cast<int>(chosen - lengths.begin()) : -1;
  }

  std::vector<uint32_t> LeastLoaded(std::span<const uint32_t> replicas, size_t count) const {
    const auto lighter = [&](uint32_t a, uint32_t b) {
      return std::tie(plan_.load[a], a) < std::tie(plan_.load[b], b);
    };
    if (count == 1) return {*std::ranges::min_element(replicas, lighter)};
    std::vector<uint32_t> chosen(replicas.begin(), replicas.end());
    std::partial_sort(chosen.begin(), chosen.begin() + static_cast<int64_t>(count), chosen.end(),
                      lighter);
    chosen.resize(count);
    return chosen;
  }

  // Pours the slices over `writers` (lightest first) as water fills a vessel: the lightest get
  // most, until all are level. There is at least one.
  void Cut(uint32_t row, const Group& group, std::vector<uint32_t> writers, int dimension) {
    Wide sum = Wide{group.bytes} + plan_.load[writers.front()];
    size_t filled = 1;  // writers that get some
    while (filled < writers.size() && Wide{plan_.load[writers[filled]]} * filled <= sum) {
      sum += plan_.load[writers[filled++]];
    }
    const auto level = static_cast<uint64_t>(sum / filled);
    writers.resize(filled);
    std::sort(writers.begin(), writers.end());
    const int64_t slices = group.box.extent[dimension];
    const uint64_t slice_bytes = group.bytes / static_cast<uint64_t>(slices);
    uint64_t wanted = 0;
    int64_t done = 0;
    for (size_t i = 0; i < filled; ++i) {
      wanted += level - std::min(level, plan_.load[writers[i]]);
      const int64_t until =
          i + 1 == filled
              ? slices
              : std::min(slices, static_cast<int64_t>((wanted + slice_bytes / 2) / slice_bytes));
      if (until <= done) continue;
      Box box = group.box;
      box.offset.set(dimension, box.offset[dimension] + done);
      box.extent.set(dimension, until - done);
      const uint64_t bytes = static_cast<uint64_t>(until - done) * slice_bytes;
      plan_.load[writers[i]] += bytes;
      Add(row, writers[i], box, group.box, bytes);
      done = until;
    }
  }

  Plan& plan_;
  std::vector<uint32_t> all_;
  uint64_t total_ = 0;
};

Sha256Digest DigestOf(const Plan& plan) {
  std::string text = "outlast.plan 1";
  Put(text, plan.table.world);
  Put(text, plan.table.rows.size());
  for (const TensorRow& row : plan.table.rows) text += RowText(row);
  Put(text, plan.pieces.size());
  for (const PlannedPiece& piece : plan.pieces) Put(text, piece);
  return Sha256(text);
}

// --- One rank's part ---

// The boxes of `row` that `rank` holds.
std::vector<const Box*> BoxesOf(const TensorRow& row, uint32_t rank) {
  std::vector<const Box*> boxes;
  for (const HeldBox& held : row.boxes) {
    if (held.rank > rank) break;  // by rank
    if (held.is_held_by(rank)) boxes.push_back(&held.box);
  }
  return boxes;
}

// Writes equal boxes of evenly spaced ranks as one. `boxes` are by rank, one rank each.
void Fold(std::vector<HeldBox>& boxes) {
  std::vector<size_t> order(boxes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(
      order, [&](size_t a, size_t b) { return BoxBefore(boxes[a].box, boxes[b].box); });
  std::vector<HeldBox> folded;
  for (const size_t i : order) {
    const HeldBox& held = boxes[i];
    HeldBox* last = folded.empty() || folded.back().box != held.box ? nullptr : &folded.back();
    if (last != nullptr && last->count == 1 && held.rank > last->rank) {
      last->step = held.rank - last->rank;
      last->count = 2;
    } else if (last != nullptr && held.rank == last->last_rank() + last->step) {
      ++last->count;
    } else {
      folded.push_back(held);
    }
  }
  boxes = std::move(folded);
}

uint64_t HashLayout(const Assignment& assignment) {
  std::string text = "outlast.layout 1";
  Put(text, assignment.header);
  for (const auto* items : {&assignment.image, &assignment.replicated}) {
    Put(text, items->size());
    for (const PlannedItem& item : *items) {
      Put(text, item.box.name);
      Put(text, NameOf(item.box.dtype));
      Put(text, item.box.global);
      Put(text, Box{item.box.offset, item.box.extent});
      Put(text, item.held);
      Put(text, item.box.begin);
      Put(text, item.box.end);
    }
  }
  const Sha256Digest digest = Sha256(text);
  uint64_t hash = 0;
  std::memcpy(&hash, digest.data(), sizeof hash);
  return hash;
}

absl::Status LayOutImage(Assignment& assignment) {
  // LayOut sorts boxes; the items follow them.
  std::map<std::pair<std::string, std::vector<int64_t>>, PlannedItem> items;
  std::vector<SafetensorsBox> boxes;
  const auto key = [](const SafetensorsBox& box) {
    const auto offset = box.offset.dimensions();
    std::vector<int64_t> numbers(offset.begin(), offset.end());
    numbers.insert(numbers.end(), box.extent.dimensions().begin(), box.extent.dimensions().end());
    return std::pair(box.name, std::move(numbers));
  };
  for (PlannedItem& item : assignment.image) {
    boxes.push_back(item.box);
    auto item_key = key(item.box);
    items.emplace(std::move(item_key), std::move(item));
  }
  OUTLAST_ASSIGN_OR_RETURN(assignment.data_bytes, LayOut(boxes));
  OUTLAST_ASSIGN_OR_RETURN(assignment.header, BuildHeader(boxes));
  assignment.image.clear();
  for (SafetensorsBox& box : boxes) {
    PlannedItem& item = items.at(key(box));
    item.box = std::move(box);
    assignment.image.push_back(std::move(item));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RankTable> TableOfRank(const StateView& state, uint32_t rank) {
  OUTLAST_RETURN_IF_ERROR(state.Validate());
  std::vector<const Region*> regions;
  for (const Region& region : state.regions) regions.push_back(&region);
  std::ranges::sort(regions, {}, &Region::name);
  std::multimap<const std::byte*, const Region*> by_memory;
  RankTable table;
  for (const Region* region : regions) {
    if (!region->bytes.empty()) {
      const auto [begin, end] = by_memory.equal_range(region->bytes.data());
      const auto first = std::find_if(
          begin, end, [&](const auto& other) { return IsSameView(*other.second, *region); });
      if (first != end) {
        table.aliases.emplace_back(region->name, first->second->name);
        continue;
      }
      by_memory.emplace(region->bytes.data(), region);
    }
    table.rows.push_back({std::string(region->name),
                          region->dtype,
                          region->global,
                          {{rank, {OffsetOf(*region), region->extent}}}});
  }
  return table;
}

void SettleAliases(std::vector<RankTable>& ranks) {
  std::map<std::string_view, std::string_view> stored_as;  // by name, what all agree on so far
  std::set<std::string> unsettled;
  const auto note = [&](std::string_view name, std::string_view of) {
    const auto [found, is_new] = stored_as.emplace(name, of);
    if (!is_new && found->second != of) unsettled.emplace(name);
  };
  for (const RankTable& rank : ranks) {
    for (const TensorRow& row : rank.rows) note(row.name, row.name);
    for (const auto& [name, of] : rank.aliases) note(name, of);
  }
  if (unsettled.empty()) return;
  for (RankTable& rank : ranks) {
    std::vector<TensorRow> again;
    for (const auto& [name, of] : rank.aliases) {
      if (!unsettled.contains(name)) continue;
      const auto row = std::ranges::find(rank.rows, of, &TensorRow::name);
      again.push_back(*row);
      again.back().name = name;
    }
    std::erase_if(rank.aliases, [&](const auto& alias) { return unsettled.contains(alias.first); });
    std::ranges::move(again, std::back_inserter(rank.rows));
  }
}

absl::StatusOr<TensorTable> MergeTables(std::span<const RankTable> ranks) {
  TensorTable table{static_cast<uint32_t>(ranks.size()), {}};
  std::map<std::string_view, size_t> index;
  for (uint32_t rank = 0; rank < ranks.size(); ++rank) {
    for (const TensorRow& row : ranks[rank].rows) {
      const auto [found, is_new] = index.emplace(row.name, table.rows.size());
      if (is_new) table.rows.push_back({row.name, row.dtype, row.global, {}});
      TensorRow& merged = table.rows[found->second];
      if (merged.dtype != row.dtype || merged.global != row.global) {
        return Refuse("tensor '{}': rank {} has {} {}, rank {} has {} {}", row.name.substr(0, 200),
                      merged.boxes[0].rank, NameOf(merged.dtype), merged.global.text(), rank,
                      NameOf(row.dtype), row.global.text());
      }
      for (const HeldBox& held : row.boxes) merged.boxes.push_back({rank, held.box});
    }
  }
  for (TensorRow& row : table.rows) {
    const bool whole = std::ranges::all_of(
        row.boxes, [&](const HeldBox& held) { return IsWhole(held.box, row.global); });
    if (whole && row.boxes.size() == ranks.size()) {
      row.boxes.clear();
    } else {
      Fold(row.boxes);
    }
  }
  return table;
}

absl::StatusOr<TensorTable> ReplicatedTable(const RankTable& rank, uint32_t world) {
  TensorTable table{world, rank.rows};
  for (TensorRow& row : table.rows) {
    if (!std::ranges::all_of(row.boxes,
                             [&](const HeldBox& held) { return IsWhole(held.box, row.global); })) {
      return Error(absl::StatusCode::kFailedPrecondition,
                   "tensor '{}': this rank holds a part, so the ranks' tables must be merged",
                   row.name.substr(0, 200));
    }
    row.boxes.clear();
  }
  return table;
}

absl::StatusOr<Plan> MakePlan(TensorTable table) {
  OUTLAST_RETURN_IF_ERROR(CheckTable(table));
  Plan plan;
  plan.table.world = table.world;
  std::vector<std::pair<uint64_t, size_t>> order;
  for (size_t i = 0; i < table.rows.size(); ++i) {
    order.emplace_back(BytesOf(table.rows[i].dtype, table.rows[i].global).value(), i);
  }
  std::ranges::sort(order, [&](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first
                              : table.rows[a.second].name < table.rows[b.second].name;
  });
  for (const auto& [bytes, i] : order) {
    std::ranges::stable_sort(table.rows[i].boxes, {}, &HeldBox::rank);
    plan.table.rows.push_back(std::move(table.rows[i]));
  }
  OUTLAST_RETURN_IF_ERROR(Assigner(plan).Run());
  plan.digest = DigestOf(plan);
  return plan;
}

absl::StatusOr<Assignment> AssignmentOf(const Plan& plan, uint32_t rank) {
  if (rank >= plan.table.world) return Refuse("rank {} of a world of {}", rank, plan.table.world);
  Assignment assignment;
  assignment.rank = rank;
  std::vector<const Box*> boxes;  // of this rank, in the row that the pieces have come to
  uint32_t boxes_of = std::numeric_limits<uint32_t>::max();
  for (const PlannedPiece& piece : plan.pieces) {
    const TensorRow& row = plan.table.rows[piece.row];
    if (boxes_of != piece.row) boxes = BoxesOf(row, rank);
    boxes_of = piece.row;
    const bool is_held = row.boxes.empty() || std::ranges::any_of(boxes, [&](const Box* box) {
                           return *box == piece.held;
                         });
    if (piece.writer != rank && !is_held) continue;
    PlannedItem item;
    item.box = {row.name, row.name, row.dtype, row.global, piece.box.offset, piece.box.extent};
    item.held = piece.held;
    item.writer = piece.writer;
    if (piece.writer == rank) {
      assignment.image.push_back(std::move(item));
      continue;
    }
    item.box.begin = assignment.replicated_bytes;
    assignment.replicated_bytes += piece.bytes;
    item.box.end = assignment.replicated_bytes;
    assignment.replicated.push_back(std::move(item));
  }
  if (!assignment.image.empty()) {
    const absl::Status status = LayOutImage(assignment);
    if (!status.ok()) return Annotate(status, fmt::format("the file of rank {}", rank));
  }
  assignment.layout_hash = HashLayout(assignment);
  return assignment;
}

std::string FirstDifference(const Plan& mine, const Plan& other) {
  if (mine.table.world != other.table.world) {
    return fmt::format("a world of {} and one of {}", mine.table.world, other.table.world);
  }
  const size_t rows = std::min(mine.table.rows.size(), other.table.rows.size());
  for (size_t i = 0; i < rows; ++i) {
    const TensorRow& a = mine.table.rows[i];
    const TensorRow& b = other.table.rows[i];
    if (RowText(a) == RowText(b)) continue;
    return fmt::format("tensor '{}' {} {} and tensor '{}' {} {}", a.name.substr(0, 200),
                       NameOf(a.dtype), a.global.text(), b.name.substr(0, 200), NameOf(b.dtype),
                       b.global.text());
  }
  if (mine.table.rows.size() != other.table.rows.size()) {
    const auto& longer = mine.table.rows.size() > rows ? mine.table.rows : other.table.rows;
    return fmt::format("tensor '{}' is in one table only", longer[rows].name.substr(0, 200));
  }
  return mine.digest == other.digest ? "" : "the same tables, assigned otherwise";
}

Box Intersect(const Box& a, const Box& b) {
  Box common{Shape::Zeros(a.offset.rank()), Shape::Zeros(a.offset.rank())};
  for (int i = 0; i < a.offset.rank(); ++i) {
    const int64_t begin = std::max(a.offset[i], b.offset[i]);
    const int64_t end = std::min(a.offset[i] + a.extent[i], b.offset[i] + b.extent[i]);
    common.offset.set(i, begin);
    common.extent.set(i, std::max<int64_t>(0, end - begin));
  }
  return common;
}

absl::Status CheckDisjoint(std::string_view tensor, const Shape& global,
                           std::span<const HeldBox> boxes) {
  std::vector<const HeldBox*> sorted;
  for (const HeldBox& held : boxes) {
    if (HasElements(held.box.extent)) sorted.push_back(&held);
  }
  if (sorted.size() < 2) return absl::OkStatus();
  // Sweeps along the dimension in which the boxes lie most apart: block shards then meet few
  // neighbours.
  int along = 0;
  size_t most = 0;
  for (int i = 0; i < global.rank(); ++i) {
    std::set<int64_t> offsets;
    for (const HeldBox* held : sorted) offsets.insert(held->box.offset[i]);
    if (offsets.size() > most) {
      most = offsets.size();
      along = i;
    }
  }
  const auto begin = [&](const HeldBox* held) {
    return global.rank() == 0 ? 0 : held->box.offset[along];
  };
  const auto end = [&](const HeldBox* held) {
    return global.rank() == 0 ? 1 : begin(held) + held->box.extent[along];
  };
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](auto* a, auto* b) { return begin(a) < begin(b); });
  std::vector<const HeldBox*> open;
  for (const HeldBox* held : sorted) {
    std::erase_if(open, [&](const HeldBox* earlier) { return end(earlier) <= begin(held); });
    for (const HeldBox* earlier : open) {
      if (!Overlap(earlier->box, held->box)) continue;
      return Refuse("tensor '{}': the boxes of rank {} ({}) and rank {} ({}) overlap",
                    tensor.substr(0, 200), earlier->rank, BoxText(earlier->box), held->rank,
                    BoxText(held->box));
    }
    open.push_back(held);
  }
  return absl::OkStatus();
}

BoxWalker::BoxWalker(DType dtype, const Box& from, const Box& to, const Shape& to_strides,
                     const Box* within) {
  Box common = Intersect(from, to);
  if (within != nullptr) common = Intersect(common, *within);
  const int rank = common.extent.rank();
  done_ = !HasElements(common.extent);
  if (done_) return;
  const int64_t element = BitsOf(dtype);
  from_stride_ = to_stride_ = Shape::Zeros(rank);
  int64_t from_bits = element, to_bits = element;
  for (int i = rank - 1; i >= 0; --i) {
    from_stride_.set(i, from_bits);
    to_stride_.set(i, to_strides.rank() == 0 ? to_bits : to_strides[i] * element);
    from_bits_ += static_cast<uint64_t>((common.offset[i] - from.offset[i]) * from_stride_[i]);
    to_bits_ += static_cast<uint64_t>((common.offset[i] - to.offset[i]) * to_stride_[i]);
    from_bits *= from.extent[i];
    to_bits *= to.extent[i];
  }
  // A dimension joins the run while its slices follow each other in both boxes.
  run_bits_ = static_cast<uint64_t>(element);
  dimensions_ = rank;
  while (dimensions_ > 0) {
    const int i = dimensions_ - 1;
    const bool joins =
        common.extent[i] == 1 || (static_cast<uint64_t>(from_stride_[i]) == run_bits_ &&
                                  static_cast<uint64_t>(to_stride_[i]) == run_bits_);
    if (!joins) break;
    run_bits_ *= static_cast<uint64_t>(common.extent[i]);
    --dimensions_;
  }
  count_ = common.extent;
  index_ = Shape::Zeros(rank);
  valid_ = run_bits_ % 8 == 0 && from_bits_ % 8 == 0 && to_bits_ % 8 == 0;
  for (int i = 0; i < dimensions_; ++i) {
    valid_ = valid_ && (count_[i] == 1 || (from_stride_[i] % 8 == 0 && to_stride_[i] % 8 == 0));
  }
}

BoxStretch BoxWalker::stretch() const { return {from_bits_ / 8, to_bits_ / 8, run_bits_ / 8}; }

void BoxWalker::Next() {
  for (int i = dimensions_ - 1; i >= 0; --i) {
    from_bits_ += static_cast<uint64_t>(from_stride_[i]);
    to_bits_ += static_cast<uint64_t>(to_stride_[i]);
    index_.set(i, index_[i] + 1);
    if (index_[i] < count_[i]) return;
    from_bits_ -= static_cast<uint64_t>(from_stride_[i] * count_[i]);
    to_bits_ -= static_cast<uint64_t>(to_stride_[i] * count_[i]);
    index_.set(i, 0);
  }
  done_ = true;
}

uint64_t BoxWalker::end() const {
  uint64_t last = from_bits_ + run_bits_;
  for (int i = 0; i < dimensions_; ++i)
    last += static_cast<uint64_t>(from_stride_[i] * (count_[i] - 1 - index_[i]));
  return last / 8;
}

absl::Status CopyBox(DType dtype, const Box& from_box, std::span<const std::byte> from,
                     const Box& to_box, std::span<std::byte> to) {
  BoxWalker walker(dtype, from_box, to_box);
  if (!walker.is_valid()) return Refuse("a box of {} that ends inside a byte", NameOf(dtype));
  for (; !walker.done(); walker.Next()) {
    const BoxStretch run = walker.stretch();
    std::memcpy(to.data() + run.to, from.data() + run.from, run.bytes);
  }
  return absl::OkStatus();
}

}  // namespace outlast
