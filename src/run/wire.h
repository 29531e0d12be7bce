// What a worker and its keeper (the agent, or a thread of the process in a world of one) say to
// each other over one SOCK_SEQPACKET socket. Version 1. Little endian.
//
//   0 u32 magic "OTLW"  4 u16 version 1  6 u16 kind  8 u64 generation  16 u64 request (0: no answer
//   wanted) 24 i32 status code (answers)  28 u32 payload bytes  32 payload (PayloadWriter's fields)
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/channel.h"
#include "outlast/base/fd.h"

namespace outlast {

enum class MessageKind : uint16_t {
  // worker -> keeper
  kJoined = 1,  // u32 protocol version, u64 incarnation, i32 pid; answer: 16 B run id, Text run
                // dir, u32 world, u32 rank
  kStaged =
      2,  // u64 generation whose body was left (0: none), u32 outcome (StagedOutcome), Text message
  kFinished = 3,      // the body returned OK
  kPut = 4,           // Text key, Text value
  kGet = 5,           // Text key, i64 timeout ns; answer: Text value
  kSharedMemory = 6,  // Text name, u64 bytes, u8 scope (SharedScope); answer: one descriptor
  kStopAnswer = 7,    // i64 stop step, u8 on time, i64 the step where the rank is
  kStopped = 8,       // i64 step: sealed, unwinding
  kWatch = 9,         // the watchdog's options: Text (JSON); the keeper starts to judge
  kAdopted = 10,      // answer to kAdopt: u64 nonce, u64 incarnation, u8 joined, u64 newest
                      // generation that it entered, u8 waits for one, u8 finished
  // checkpoint's extension (checkpoint/save_service.h); worker -> keeper
  kOpenRoot = 32,
  kBuffers = 33,
  kSealed = 34,
  kSkipped = 35,
  kFinish = 36,
  kChoose = 37,
  kVote = 38,
  kHurry = 39,
  kGather = 40,
  kHeld = 41,
  kReadRange = 42,
  kCheckpointLast = 63,
  // keeper -> worker
  kAnswer =
      128,  // to `request`; the status code, and the message of an error or the answer's payload
  kGeneration = 129,  // enter: u64 generation, u32 rank, u32 world, u32 number of runs, and of each
                      // u32 node, u32 first rank, u32 ranks
  kAbort = 130,       // u64 generation (it and older unwind), Text reason
  kStop = 131,        // i64 step, Text reason
  kGo = 132,          // i64 step
  kSaveEvent = 133,   // checkpoint: i64 step, u8 durable, Text error: a disk save ended
  kAhead = 134,       // checkpoint: RestoreChoice: what the next generation will restore from
  kAdopt = 135,       // from another keeper than before: u64 nonce, u64 generation (it and older
                      // unwind), Text reason. What was said and not answered is said again.
};

constexpr uint16_t kWireVersion = 1;

// How a worker came to be staged.
enum class StagedOutcome : uint32_t {
  kFresh = 0,     // it has not entered a generation yet
  kAborted = 1,   // its body unwound because the generation was aborted
  kUncaused = 2,  // its body returned kAborted though nobody had aborted the generation
};

enum class SharedScope : uint8_t {
  kGeneration = 0,  // all zero
  kJob = 1,         // zero when made; as it was left for later ones
  kGenerationDirty =
      2,  // the first 4 KiB are zero, the rest may be what an older generation left: no allocation
  kSlot = 3,  // of the asking slot alone, for the job: zero when made; as its last process left it
};

struct Message {
  MessageKind kind{};
  uint64_t generation = 0;
  uint64_t request = 0;
  absl::StatusCode status = absl::StatusCode::kOk;
  std::string payload;
  std::vector<UniqueFd> fds;
};

std::string Encode(const Message& message);
// kInvalidArgument: not a message; kFailedPrecondition: another version, naming both.
absl::StatusOr<Message> Decode(Channel::Packet packet);

}  // namespace outlast
