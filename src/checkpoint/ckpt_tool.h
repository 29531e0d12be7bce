// `outlast ckpt`: looks at roots and checkpoints, and changes nothing but what its commands say.
#pragma once

#include <iosfwd>
#include <span>
#include <string>

namespace outlast {

// ls|verify|show DIR [--json]. DIR is a root; verify and show also take one checkpoint's folder.
// `args` begin after `ckpt`.
//   ls      every checkpoint with its state, and what else lies in the root
//   verify  reads and checks every byte of every checkpoint that claims to be whole
//   show    the newest checkpoint's manifest and tensors
// Returns the exit code: 0 whole; 1 damaged, each damage on one line; 85 not a checkpoint root, or
// a wrong command line.
int RunCkptTool(std::span<const std::string> args, std::ostream& out, std::ostream& err);

}  // namespace outlast
