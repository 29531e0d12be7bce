// How the agent of a job whose former agent was killed finds the guardian that keeps the workers
// (outlast run --on-agent-death adopt).
//
// <run-dir>/guardian-<job>.json says who that is: a process by pid, start time and boot, so that a
// stranger with its pid is never taken for it, and the abstract Unix socket that it listens on. It
// also has the command line, for only the very same one may go on with the job. The file is the
// agent's, made before the first worker; the guardian removes it when it ends. A file whose process
// is gone says nothing.
//
// Both ends of the socket ask the kernel who the other is: the agent wants the file's pid, the
// guardian its own user.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/channel.h"
#include "launch/guardian.h"
#include "launch/options.h"
#include "outlast/base/fd.h"
#include "outlast/base/id.h"

namespace outlast {

struct GuardianFile {
  std::string run_id;  // 32 hex digits
  std::string run_dir;
  pid_t pid = 0;
  uint64_t start_ticks = 0;
  std::string boot_id;
  std::string socket;  // abstract: without its first byte, which is 0
  int world = 0;
  std::vector<std::string> flags;  // as given, but those that say how to begin
  std::vector<std::string> command;
  bool operator==(const GuardianFile&) const = default;
};

// Where it is looked for.
std::string GuardianFilePath(const LaunchOptions& options);

std::string ToText(const GuardianFile& file);
// kDataLoss: no such file's text; kUnimplemented: of a newer version.
absl::StatusOr<GuardianFile> ParseGuardianFile(std::string_view text);

// That very process lives.
bool IsAlive(const GuardianFile& file);

// What differs between the command line that started the job and this one; empty: nothing.
std::string WhatDiffers(const GuardianFile& file, const LaunchOptions& options);

// The file of a job that starts. kAlreadyExists: another one, whose guardian lives, has the place;
// kUnimplemented: one of another version.
absl::Status WriteGuardianFile(const LaunchOptions& options, const GuardianFile& file);

struct FoundJob {
  GuardianFile file;
  Guardian::Adoption adoption;
};
// The job of these options whose agent is gone. none: there is none, and nobody stands in the way.
// kFailedPrecondition: its agent lives, or this command line is not its own. kUnimplemented:
// another version of the program has begun it. kUnavailable: its guardian does not answer; it may
// just be ending. Call it while the process has one thread: with a job AgentSignals() are blocked
// from then on, for whoever sends one means the job.
absl::StatusOr<std::optional<FoundJob>> FindJob(const LaunchOptions& options);

// What `outlast status` shows of a run whose agent is gone: the guardian that keeps its workers for
// another one. none: nobody does.
std::optional<GuardianFile> GuardianOf(const std::string& run_dir, const std::string& run_id);

// The guardian's side. An abstract socket that has no file.
std::string SocketOf(std::string_view run_id);
absl::StatusOr<UniqueFd> ListenForAgents(std::string_view run_id);
// kPermissionDenied: of another user.
absl::StatusOr<Channel> AcceptAgent(int listener, pid_t* pid);

}  // namespace outlast
