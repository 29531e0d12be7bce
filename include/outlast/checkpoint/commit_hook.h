// What must hold before a checkpoint on disk comes to be: hooks that look at it between its last
// byte and its manifest, and may veto it.
//
//   shards and receipts durable ─> hooks, one after the other ─> hooks.json ─> MANIFEST.json
//                                    │ the first that is not ok: the save is aborted with its note
//
// A veto costs that save: what was written of it goes, older checkpoints stay, training goes on,
// and the next save that is due is judged anew. The names of the hooks stand in the receipts, their
// results in hooks.json and in the manifest; after a crash nobody commits a checkpoint one of whose
// hooks left no `ok`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "outlast/checkpoint/dtype.h"

namespace outlast {

// A tensor, or the box of one, that one rank writes.
struct HookTensor {
  std::string_view name;
  DType dtype = DType::kF32;
  Shape global, offset, extent;
  std::span<const std::byte> bytes;  // packed row-major, in memory
};

struct HookShard {
  uint32_t rank = 0;
  std::string path;  // of the durable file; a rank that owns no bytes has none: empty
  std::vector<HookTensor> tensors;
};

// A whole checkpoint, but for its manifest.
struct HookView {
  std::string folder;  // absolute
  int64_t step = 0;
  std::vector<HookShard> shards;  // by rank
};

struct HookVerdict {
  enum class Outcome : uint8_t { kOk, kVeto, kError } outcome = Outcome::kOk;
  std::string note;  // for people: why not, or what was looked at
};

// One question about a checkpoint. Called on the thread that writes saves, one at a time; the next
// save waits for it, and the snapshot that it looks at stays out of use meanwhile.
class CommitHook {
 public:
  virtual ~CommitHook() = default;
  // 1 to 64 of a-z, 0-9, '_', '-' and '.', unlike those of the other hooks.
  virtual std::string_view name() const = 0;
  // An answer that comes later counts as kError, whatever it says.
  virtual absl::Duration deadline() const = 0;
  // `is_over` turns true at the deadline: who may take long asks it now and then, and gives up.
  // Must change nothing in the folder.
  virtual HookVerdict Check(const HookView& view, const std::function<bool()>& is_over) = 0;
};

// A program that judges a checkpoint. It is run by the process that writes saves (the agent, under
// `outlast run`): the command, and the folder as its last argument; OUTLAST_CHECKPOINT (the same),
// OUTLAST_STEP and OUTLAST_WORLD in its environment, no input. Exit code 0 is ok, 3 a veto; any
// other, or a signal, is an error, which aborts the save as well. The last line that it printed is
// the note. At its deadline it is killed, with all processes of its group.
struct HookProgram {
  std::string name;
  std::vector<std::string> command;  // a path, or a name in PATH, and arguments
  absl::Duration deadline = absl::Minutes(5);
};
inline constexpr int kHookVetoExitCode = 3;

struct HookOptions {
  // kVeto: no checkpoint with an infinity or a NaN in a tensor of floats (F8 to F64, C64). Off as
  // delivered: a state may hold them rightly (a mask of -inf, a loss scale), and a hook that is
  // wrong costs every checkpoint; and it takes as much of a core as the save itself.
  enum class NonFinite : uint8_t { kIgnore, kVeto } non_finite = NonFinite::kIgnore;
  // Names that the scan leaves out; `*` stands for any characters, `?` for one.
  std::vector<std::string> non_finite_skip;
  std::vector<HookProgram> programs;
  // Hooks of the process itself: only where it saves by itself, without an agent.
  std::vector<std::shared_ptr<CommitHook>> own;
};

}  // namespace outlast
