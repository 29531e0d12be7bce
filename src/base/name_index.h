// Numbers names by the ten thousand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace outlast {

// Gives each distinct name a number, counted from 0 in the order in which they come. The names are
// borrowed. Open addressing: a node a name, as std::unordered_map makes them, takes several times
// as long where there are many.
class NameIndex {
 public:
  // `expected` names; more than that are slower, not wrong.
  explicit NameIndex(size_t expected = 0);

  struct Added {
    uint32_t number;
    bool is_new;
  };
  Added Add(std::string_view name);
  std::optional<uint32_t> Find(std::string_view name) const;
  size_t size() const { return names_.size(); }

 private:
  struct Slot {
    uint32_t tag = 0;  // of the hash: most other names are told apart without a look at them
    uint32_t number_and_1 = 0;  // 0: free
  };
  // The slot of `name`, or the free one where it would be.
  size_t SlotOf(std::string_view name, size_t hash) const;
  void Grow();

  std::vector<Slot> slots_;  // a power of two, at most half of them taken
  std::vector<std::string_view> names_;
};

}  // namespace outlast
