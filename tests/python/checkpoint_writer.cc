// Writes checkpoints whose bytes a reader in another language can work out for itself:
//
//   checkpoint_writer ROOT
//
// Byte i of a tensor is (31 i + the sum of its name's bytes) mod 256, of a BOOL the lowest bit of
// that. Step 1 is of three ranks with every kind of box, step 2 the same state of one rank; step 3
// has the types that PyTorch's readers do not know (they refuse a folder that has any).
#include <cstdio>
#include <numeric>

#include "tests/checkpoint/disk_fixture.h"

namespace outlast {
namespace {

std::vector<std::byte> BytesFor(std::string_view name, DType dtype, const Shape& shape) {
  std::vector<std::byte> bytes(BytesOf(dtype, shape).value());
  const auto seed = std::accumulate(name.begin(), name.end(), 0u, [](unsigned sum, char c) {
    return sum + static_cast<unsigned char>(c);
  });
  for (size_t i = 0; i < bytes.size(); ++i) {
    const auto value = static_cast<uint8_t>(31 * i + seed);
    bytes[i] = static_cast<std::byte>(dtype == DType::kBool ? value & 1 : value);
  }
  return bytes;
}

void Add(OwnedState& state, const std::string& name, DType dtype, const Shape& global,
         std::optional<Box> box = std::nullopt) {
  state.AddZeros(name, dtype, global, box);
  const Region& region = state.view().regions.back();
  const Box whole{Shape::Zeros(global.rank()), global};
  const std::vector<std::byte> all = BytesFor(name, dtype, global);
  if (!CopyBox(dtype, whole, all, {OffsetOf(region), region.extent}, region.bytes).ok()) abort();
}

// torch 2.11 with safetensors 0.8.
enum class Torch : uint8_t { kKnows, kLacks };
std::vector<DType> Types(Torch torch) {
  std::vector<DType> types;
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    const bool lacks = BitsOf(dtype) < 8 || dtype == DType::kF8E8M0;
    if (lacks == (torch == Torch::kLacks)) types.push_back(dtype);
  }
  return types;
}

std::vector<OwnedState> StateOf(int64_t world) {
  std::vector<OwnedState> ranks(static_cast<size_t>(world));
  // Uneven cuts, as [begin, end) of the 10 rows and of the 9 columns.
  const int64_t row[] = {0, 4, 5, 10}, column[] = {0, 3, 5, 9};
  for (int64_t rank = 0; rank < world; ++rank) {
    OwnedState& state = ranks[static_cast<size_t>(rank)];
    const int64_t first = world == 1 ? 0 : row[rank], last = world == 1 ? 10 : row[rank + 1];
    Add(state, "rows", DType::kF32, {10, 20}, Box{{first, 0}, {last - first, 20}});
    const int64_t left = world == 1 ? 0 : column[rank], right = world == 1 ? 9 : column[rank + 1];
    Add(state, "columns", DType::kBF16, {6, 9}, Box{{0, left}, {6, right - left}});
    Add(state, "replicated", DType::kF32, {30, 16});
    Add(state, "scalar", DType::kI64, {});
    Add(state, "none", DType::kF32, {0, 5});
    Add(state, "layers/0/\u00fc \u043a\u043b\u044e\u0447", DType::kF16, {3, 2});
    for (const DType dtype : Types(Torch::kKnows))
      Add(state, "dtype." + std::string(NameOf(dtype)), dtype, {4, 8});
    Region tied = state.view().regions[2];
    tied.name = "tied";
    state.view().regions.push_back(tied);
    state.view().extras = {{"cursor", "{\"samples\":" + std::to_string(rank) + "}"}};
  }
  return ranks;
}

int Main(const std::string& path) {
  const auto root = OpenRoot(path);
  const auto first = Save(*root, 1, StateOf(3));
  const auto second = Save(*root, 2, StateOf(1), {.parent = first.value_or("")});
  std::vector<OwnedState> others(1);
  for (const DType dtype : Types(Torch::kLacks))
    Add(others[0], "dtype." + std::string(NameOf(dtype)), dtype, {4, 8});
  const auto third = Save(*root, 3, others, {.parent = second.value_or("")});
  if (!first.ok() || !third.ok() || !second.ok() || !root->Release().ok()) {
    std::fprintf(stderr, "checkpoint_writer: %s; %s; %s\n", first.status().ToString().c_str(),
                 second.status().ToString().c_str(), third.status().ToString().c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace outlast

int main(int argc, char** argv) {
  if (argc == 2) return outlast::Main(argv[1]);
  std::fprintf(stderr, "usage: checkpoint_writer ROOT\n");
  return 2;
}
