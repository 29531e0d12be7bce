#include "checkpoint/ckpt_command.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "base/error.h"

namespace outlast {
namespace {

struct Verb {
  std::string_view name;
  std::string_view form;     // after the name
  std::string_view summary;  // one line
  size_t least_places, most_places;
  std::string_view flags;   // that take no value, each between spaces
  std::string_view valued;  // that take one
  std::string_view text;    // of its --help, after form and summary
};

constexpr size_t kAny = 1000;

constexpr std::array kVerbs = {
    Verb{
        "ls", "ROOT", "every checkpoint with its state, and what else lies in the root", 1, 1, " ",
        " ",
        "States: committed, abandoned (whole, but not on the chain of the newest run), incomplete\n"
        "(no MANIFEST.json), deleted (a deletion has begun), damaged, foreign (another job's);\n"
        "pinned and quarantined are added.\n"
        "\n"
        "Example: outlast ckpt ls /ckpt/my-run\n"},
    Verb{"show", "ROOT|CHECKPOINT", "a checkpoint's manifest and tensors; of a root the newest", 1,
         1, " ", " ", "Example: outlast ckpt show /ckpt/my-run --json | jq .step\n"},
    Verb{"verify", "ROOT|CHECKPOINT", "reads and checks every byte; of a root, all checkpoints", 1,
         1, " ", " ",
         "A whole checkpoint that was in quarantine is taken out of it.\n"
         "\n"
         "Example: outlast ckpt verify /ckpt/my-run && echo all whole\n"},
    Verb{"diff", "A B", "how two checkpoints differ; each a root (its newest) or a checkpoint", 2,
         2, " ", " ",
         "Names, types, shapes, and all values, whatever worlds wrote them; of floating point\n"
         "tensors the largest difference. Extras are compared where the worlds have one size.\n"
         "\n"
         "Example: outlast ckpt diff /ckpt/a/step-000000000100-0badcafe /ckpt/b\n"},
    Verb{"export", "ROOT|CHECKPOINT --hf DIR",
         "whole tensors as model.safetensors, in DIR, which must be empty or new", 1, 1, " ",
         " --hf --shard-bytes ",
         "  --hf DIR         the Hugging Face layout\n"
         "  --shard-bytes N  bytes a file (5000000000); past it model-00001-of-0000N.safetensors\n"
         "                   and model.safetensors.index.json\n"
         "\n"
         "Tied names are written once, with a note in the metadata; extras stay behind.\n"
         "\n"
         "Example: outlast ckpt export /ckpt/my-run --hf /models/my-model\n"},
    Verb{
        "import", "DIR ROOT --step N",
        "a new checkpoint in ROOT from safetensors files; the files stay as they are", 2, 2,
        " --fresh ", " --step --parent --job ",
        "  --step N       the step that it is of\n"
        "  --fresh        where ROOT has checkpoints: starts a history of its own, which the next\n"
        "                 run continues; those that are there become abandoned\n"
        "  --parent NAME  where ROOT has checkpoints: the one that it continues from\n"
        "  --job NAME     of a new root, or the one that ROOT must be of\n"
        "\n"
        "DIR is a folder with model.safetensors, or an index and its files, or one file. A "
        "running\n"
        "job's root is refused.\n"
        "\n"
        "Example: outlast ckpt import /models/base /ckpt/tune --step 0\n"},
    Verb{
        "copy", "ROOT|CHECKPOINT ROOT", "a checkpoint as it stands into another root of its job", 2,
        2, " ", " ",
        "Every byte is checked when it is read, and again on the copy. A root of another job is\n"
        "refused, and so is one that a running job holds; a new one becomes of this job. Pins are\n"
        "not copied.\n"
        "\n"
        "Example: outlast ckpt copy /ckpt/my-run /archive/my-run\n"},
    Verb{"gc", "ROOT", "lists what may be deleted; with --yes deletes it", 1, 1, " --yes ", " ",
         "  --yes  do it\n"
         "\n"
         "Deleted are abandoned checkpoints, and unfinished or half-deleted folders; of those a\n"
         "running job's root keeps all. Never the chain, pins, foreign or damaged ones, or what\n"
         "Outlast did not make. A folder that lacks only its manifest is first made whole.\n"
         "\n"
         "Example: outlast ckpt gc /ckpt/my-run         # what would go\n"
         "         outlast ckpt gc /ckpt/my-run --yes\n"},
    Verb{"pin", "ROOT|CHECKPOINT...", "spares checkpoints from retention and gc", 1, kAny, " ", " ",
         "May be done beside a running job.\n"
         "\n"
         "Example: outlast ckpt pin /ckpt/my-run/step-000000012000-7f3a91c2\n"},
    Verb{"unpin", "ROOT|CHECKPOINT...", "takes the pins away", 1, kAny, " ", " ",
         "Example: outlast ckpt unpin /ckpt/my-run/step-000000012000-7f3a91c2\n"},
};

constexpr std::string_view kExits =
    "Exit codes: 0 whole, equal or done; 1 damaged, different, or it failed (a full disk, say);\n"
    "85 refused before anything was changed: not a checkpoint root, a wrong command line, another\n"
    "job's root, or one that a running job holds.\n";

std::string WholeHelp() {
  std::string text = "Usage: outlast ckpt COMMAND ... [--json]\n\n";
  for (const Verb& verb : kVerbs) text += fmt::format("  {:7} {}\n", verb.name, verb.summary);
  return text +
         "\nROOT is the folder of a job's checkpoints, CHECKPOINT one step-... folder in it.\n" +
         std::string(kExits) + "Each command has its own --help. Example:\n" +
         "  outlast ckpt ls /ckpt/my-run\n";
}

std::string HelpOf(const Verb& verb) {
  return fmt::format("Usage: outlast ckpt {} {} [--json]\n{}.\n\n{}\n{}", verb.name, verb.form,
                     verb.summary, verb.text, kExits);
}

bool Lists(std::string_view flags, std::string_view flag) {
  return flags.find(fmt::format(" {} ", flag)) != std::string_view::npos;
}

absl::Status Refuse(const Verb& verb, std::string_view why) {
  return Error(absl::StatusCode::kInvalidArgument, "{}; outlast ckpt {} {} wanted", why, verb.name,
               verb.form);
}

// One flag at `args[at]`; moves `at` over its value.
absl::Status TakeFlag(const Verb& verb, std::span<const std::string> args, size_t& at,
                      CkptCommand& command) {
  std::string flag = args[at];
  std::optional<std::string> value;
  if (const size_t equals = flag.find('='); equals != std::string::npos) {
    value = flag.substr(equals + 1);
    flag.resize(equals);
  }
  const bool bare = flag == "--json" || Lists(verb.flags, flag);
  if (!bare && !Lists(verb.valued, flag))
    return Refuse(verb, fmt::format("unknown option '{}'", flag));
  if (bare && value.has_value()) return Refuse(verb, fmt::format("'{}' takes no value", flag));
  if (!bare && !value.has_value() && at + 1 < args.size()) value = args[++at];
  if (!bare && value.value_or("").empty())
    return Refuse(verb, fmt::format("'{}' has no value", flag));
  if (!command.values.emplace(flag, value.value_or("")).second)
    return Refuse(verb, fmt::format("'{}' is given twice", flag));
  return absl::OkStatus();
}

}  // namespace

std::string CkptCommand::value(std::string_view flag) const {
  const auto found = values.find(std::string(flag));
  return found == values.end() ? "" : found->second;
}

absl::StatusOr<CkptCommand> ParseCkptCommand(std::span<const std::string> args) {
  CkptCommand command;
  const auto is_help = [](const std::string& arg) { return arg == "--help" || arg == "-h"; };
  if (!args.empty() && (is_help(args[0]) || args[0] == "help")) {
    command.help = WholeHelp();
    return command;
  }
  const auto verb =
      std::ranges::find(kVerbs, args.empty() ? std::string_view() : args[0], &Verb::name);
  if (verb == kVerbs.end()) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "{}; one of ls, show, verify, diff, export, import, copy, gc, pin, unpin wanted: "
                 "see outlast ckpt --help",
                 args.empty() ? "no command" : fmt::format("unknown command '{}'", args[0]));
  }
  command.verb = verb->name;
  bool only_places = false;  // after "--"
  for (size_t at = 1; at < args.size(); ++at) {
    const std::string& arg = args[at];
    if (only_places || !arg.starts_with("-") || arg == "-") {
      command.places.push_back(arg);
    } else if (arg == "--") {
      only_places = true;
    } else if (is_help(arg)) {
      command.help = HelpOf(*verb);
      return command;
    } else {
      OUTLAST_RETURN_IF_ERROR(TakeFlag(*verb, args, at, command));
    }
  }
  if (command.places.size() < verb->least_places || command.places.size() > verb->most_places) {
    return Refuse(*verb, fmt::format("{} place{} given", command.places.size(),
                                     command.places.size() == 1 ? "" : "s"));
  }
  for (const std::string& place : command.places)
    if (place.empty()) return Refuse(*verb, "an empty place");
  return command;
}

absl::StatusOr<int64_t> NumberOf(const CkptCommand& command, std::string_view flag, int64_t least) {
  const std::string text = command.value(flag);
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size() && number >= least) return number;
  return Error(absl::StatusCode::kInvalidArgument, "{} '{}': a number of at least {} wanted", flag,
               text, least);
}

}  // namespace outlast
