// Runs the hooks of a save, and keeps what they said.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "checkpoint/manifest.h"
#include "outlast/checkpoint/commit_hook.h"

namespace outlast {

using Hooks = std::vector<std::shared_ptr<CommitHook>>;

// kInvalidArgument, naming the option, unless names and deadlines are as they must be.
absl::Status CheckHookOptions(const HookOptions& options);

// The hooks that `options` ask for, in the order in which they run: the scan, programs, the
// process's own.
Hooks MakeHooks(const HookOptions& options);

// How long programs and the process's own may take together. The scan is within the time that a
// save has for its bytes.
absl::Duration TimeOfHooks(const HookOptions& options);

std::vector<std::string> NamesOf(const Hooks& hooks);

// Asks one hook after the other, up to the first that is not ok. Late answers are errors. Blocks.
std::vector<HookResult> AskHooks(const Hooks& hooks, const HookView& view);

// What those results make of the save: OK, or kFailedPrecondition with the hook's name and note.
absl::Status JudgeHooks(std::span<const HookResult> results);

}  // namespace outlast
