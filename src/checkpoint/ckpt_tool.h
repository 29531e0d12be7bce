// `outlast ckpt`: looks at roots and checkpoints, and changes nothing but what its commands say.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <span>
#include <string>

namespace outlast {

class Plugins;

// Whether `err` is a terminal, where long commands show a progress bar.
enum class Terminal : uint8_t { kNo, kYes };

// ls | show | verify | diff | export | import | copy | gc | pin | unpin, each with --help and
// --json. `args` begin after `ckpt`. Returns the exit code: 0 whole, equal or done; 1 damaged,
// different, or it failed; 85 refused before anything was changed: not a checkpoint root, a wrong
// command line, another job's root, or one that a running job holds. `plugins` make the stores that
// ls, show, verify and copy may name; null: folders alone.
int RunCkptTool(std::span<const std::string> args, std::ostream& out, std::ostream& err,
                Terminal terminal = Terminal::kNo, const Plugins* plugins = nullptr);

}  // namespace outlast
