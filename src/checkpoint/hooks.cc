#include "checkpoint/hooks.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/child_program.h"
#include "base/error.h"
#include "checkpoint/json.h"
#include "checkpoint/non_finite.h"
#include "outlast/base/clock.h"

namespace outlast {
namespace {

using Outcome = HookVerdict::Outcome;

constexpr size_t kMaxNote = 4 << 10;
constexpr size_t kMaxCommandBytes = 16 << 10;
constexpr size_t kMaxPrograms = 64;

bool IsName(std::string_view name) {
  return !name.empty() && name.size() <= 64 &&
         name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_-.") ==
             std::string_view::npos;
}

bool IsDeadline(absl::Duration deadline) {
  return deadline > absl::ZeroDuration() && deadline <= absl::Hours(24);
}

absl::Status Refuse(std::string_view what, std::string_view found, std::string_view wanted) {
  return Error(absl::StatusCode::kInvalidArgument, "checkpointer option hooks.{}: '{}', {} wanted",
               what, found, wanted);
}

class ProgramHook final : public CommitHook {
 public:
  explicit ProgramHook(HookProgram program) : program_(std::move(program)) {}

  std::string_view name() const override { return program_.name; }
  absl::Duration deadline() const override { return program_.deadline; }

  HookVerdict Check(const HookView& view, const std::function<bool()>&) override {
    ProgramCall call;
    call.command = program_.command;
    call.command.push_back(view.folder);
    call.environment = {{"OUTLAST_CHECKPOINT", view.folder},
                        {"OUTLAST_STEP", std::to_string(view.step)},
                        {"OUTLAST_WORLD", std::to_string(view.shards.size())}};
    call.deadline = program_.deadline;
    const auto end = RunProgram(call);
    if (!end.ok()) return {Outcome::kError, std::string(MessageOf(end.status()))};
    return VerdictOf(*end);
  }

 private:
  HookVerdict VerdictOf(const ProgramEnd& end) const {
    const std::string said = end.last_line.empty() ? "" : ": " + end.last_line;
    if (end.timed_out) {
      return {Outcome::kError, fmt::format("killed at its deadline of {}{}",
                                           absl::FormatDuration(program_.deadline), said)};
    }
    if (end.signal != 0) return {Outcome::kError, fmt::format("signal {}{}", end.signal, said)};
    if (end.code == 0) return {Outcome::kOk, end.last_line};
    if (end.code == kHookVetoExitCode)
      return {Outcome::kVeto, end.last_line.empty() ? "it gave no reason" : end.last_line};
    return {Outcome::kError, fmt::format("exit code {}{}", end.code, said)};
  }

  const HookProgram program_;
};

std::string_view NameOf(Outcome outcome) {
  switch (outcome) {
    case Outcome::kOk:
      return "ok";
    case Outcome::kVeto:
      return "veto";
    case Outcome::kError:
      break;
  }
  return "error";
}

HookResult Ask(CommitHook& hook, const HookView& view) {
  const absl::Duration until = Clock::Real().Uptime() + hook.deadline();
  const auto is_over = [&] { return Clock::Real().Uptime() > until; };
  HookVerdict verdict = hook.Check(view, is_over);
  if (verdict.outcome != Outcome::kError && is_over()) {
    verdict = {Outcome::kError, fmt::format("it answered after its deadline of {}",
                                            absl::FormatDuration(hook.deadline()))};
  }
  if (verdict.note.size() > kMaxNote) verdict.note.resize(kMaxNote);
  if (!IsUtf8(verdict.note)) verdict.note = "its note is not UTF-8";
  return {std::string(hook.name()), std::string(NameOf(verdict.outcome)), std::move(verdict.note)};
}

}  // namespace

absl::Status CheckHookOptions(const HookOptions& options) {
  std::set<std::string, std::less<>> names = {std::string(kNonFiniteHook)};
  if (options.programs.size() > kMaxPrograms)
    return Refuse("programs", std::to_string(options.programs.size()), "at most 64");
  for (const HookProgram& program : options.programs) {
    if (!IsName(program.name))
      return Refuse("programs.name", program.name, "1 to 64 of a-z, 0-9, '_', '-' and '.'");
    if (!names.insert(program.name).second)
      return Refuse("programs.name", program.name, "a name of its own");
    size_t bytes = 0;
    for (const std::string& word : program.command) bytes += word.size() + 1;
    const bool has_nul = std::ranges::any_of(program.command, [](const std::string& word) {
      return word.find('\0') != std::string::npos;
    });
    if (program.command.empty() || program.command[0].empty() || has_nul ||
        bytes > kMaxCommandBytes)
      return Refuse("programs.command", program.name, "a program and arguments, up to 16 KiB,");
    if (!IsDeadline(program.deadline)) {
      return Refuse("programs.deadline", absl::FormatDuration(program.deadline),
                    "a positive time of at most 24 hours");
    }
  }
  for (const auto& hook : options.own) {
    if (hook == nullptr) return Refuse("own", "null", "a hook");
    if (!IsName(hook->name()) || !names.insert(std::string(hook->name())).second)
      return Refuse("own", hook->name(), "a name of its own: 1 to 64 of a-z, 0-9, '_', '-', '.'");
    if (!IsDeadline(hook->deadline()))
      return Refuse("own", hook->name(), "a positive deadline of at most 24 hours");
  }
  return absl::OkStatus();
}

Hooks MakeHooks(const HookOptions& options) {
  Hooks hooks;
  if (options.non_finite == HookOptions::NonFinite::kVeto)
    hooks.push_back(MakeNonFiniteHook(options.non_finite_skip));
  for (const HookProgram& program : options.programs)
    hooks.push_back(std::make_shared<ProgramHook>(program));
  hooks.insert(hooks.end(), options.own.begin(), options.own.end());
  return hooks;
}

absl::Duration TimeOfHooks(const HookOptions& options) {
  absl::Duration time;
  for (const HookProgram& program : options.programs) time += program.deadline;
  for (const auto& hook : options.own) time += hook->deadline();
  return time;
}

std::vector<std::string> NamesOf(const Hooks& hooks) {
  std::vector<std::string> names;
  for (const auto& hook : hooks) names.emplace_back(hook->name());
  return names;
}

std::vector<HookResult> AskHooks(const Hooks& hooks, const HookView& view) {
  std::vector<HookResult> results;
  for (const auto& hook : hooks) {
    results.push_back(Ask(*hook, view));
    if (results.back().result != "ok") break;
  }
  return results;
}

absl::Status JudgeHooks(std::span<const HookResult> results) {
  for (const HookResult& result : results) {
    if (result.result == "ok") continue;
    return Error(absl::StatusCode::kFailedPrecondition, "hook '{}' {}: {}", result.name,
                 result.result == "veto" ? "vetoes it" : "failed", result.note);
  }
  return absl::OkStatus();
}

}  // namespace outlast
