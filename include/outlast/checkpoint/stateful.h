// Objects that know their own state, and one state of several of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "outlast/checkpoint/state.h"

namespace outlast {

class StateViewBuilder;

// Where an object puts what belongs to it.
class StatePart {
 public:
  // `region.name` is the object's own: the prefix comes before it. The name is copied, the memory
  // is borrowed for as long as the view is used.
  void Add(const Region& region);
  // A small extra (see Extras), likewise under the object's own key.
  void AddExtra(std::string_view key, std::string value);

 private:
  friend class StateViewBuilder;
  StatePart(StateViewBuilder& builder, const std::string& prefix)
      : builder_(builder), prefix_(prefix) {}
  StateViewBuilder& builder_;
  const std::string& prefix_;
};

// A part of a trainer that is saved and restored: a model, an optimizer, a scheduler, a data
// loader. Called on the trainer's thread.
class Stateful {
 public:
  virtual ~Stateful() = default;
  // Adds its regions and extras: the same regions each time, the extras as they are now.
  virtual void Describe(StatePart& part) = 0;
  // The regions hold what was saved at `step`, and `extras` are this object's, by its own keys.
  // Not called when there was nothing to restore (step 0). An error ends the restore.
  virtual absl::Status OnRestored(int64_t step, const Extras& extras) = 0;
};

// Gathers the state of several objects, each under a prefix of its own:
//
//   StateViewBuilder state;
//   state.Add("model", model);
//   state.Add("optimizer", optimizer);
//   OUTLAST_ASSIGN_OR_RETURN(int64_t step, checkpoints->Restore(state.View()));
//   OUTLAST_RETURN_IF_ERROR(state.OnRestored(step, checkpoints->restored_extras()));
//   ...
//   OUTLAST_RETURN_IF_ERROR(checkpoints->SaveIfDue(step + 1, state.View()));
//
// For one thread.
class StateViewBuilder {
 public:
  // Names of `object` become "prefix.name"; an empty prefix leaves them as they are. Borrowed for
  // the builder's life.
  void Add(std::string prefix, Stateful& object);

  // All that the objects describe now, in the order in which they were added. Valid until the next
  // call; names stay where they are while the same regions are described again.
  const StateView& View();

  // Gives each object its extras: a key belongs to the longest prefix that it begins with. The
  // first error ends it, with the object's prefix. Step 0 calls nobody.
  absl::Status OnRestored(int64_t step, const Extras& extras);

 private:
  friend class StatePart;
  struct Entry {
    std::string prefix;  // "" or with its dot
    Stateful* object;
  };
  std::vector<Entry> entries_;
  std::deque<std::string> names_;  // by region
  StateView view_;
};

}  // namespace outlast
