// What a verdict leaves on disk before anything is done about it.
//
//   RUN_DIR/boxes/g<generation>-<number>-<class>/verdict.json   schema 1
//                                               rank<r>.box     the black boxes as they were
#pragma once

#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "watch/verdict.h"

namespace outlast {

// JSON, schema 1, one object with a newline at its end:
//   schema, generation, class, confidence, ambiguous, kind, culprits [{rank, slot, node, section,
//   phase, step, age_s}], waiting [ranks], comm {name, seq, op} or null, first_divergent_seq or
//   null, cycle [ranks], evidence [lines], reason, stacks [ranks whose stacks were asked for],
//   runbook, took_ms
std::string VerdictJson(const Verdict& verdict, std::span<const int> stacks, absl::Duration took);

// Copies a segment's memfd to a new file, leaving its holes out.
absl::Status CopyBox(int fd, const std::string& path);

struct BoxOfRank {
  int rank = 0;
  int fd = -1;  // borrowed
};

// Makes the folder with the verdict and the boxes, and returns its path. `number` tells the
// verdicts of a run apart. A box that cannot be copied is left out, and the verdict file is written
// all the same; its error comes back.
absl::StatusOr<std::string> WriteEvidence(const std::string& run_dir, int number,
                                          const Verdict& verdict, std::span<const BoxOfRank> boxes,
                                          std::span<const int> stacks, absl::Duration took);

}  // namespace outlast
