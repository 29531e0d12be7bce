#include "options.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace {

constexpr char kUsage[] =
    "usage: 02_trainer --checkpoints FOLDER [--remote URI] [--log FOLDER] [--texts FOLDER] "
    "[--steps N] "
    "[--checkpoint-every N]\n"
    "                  [--batch N] [--seed N] [--watch-floor SECONDS] [--watch-poll SECONDS]\n";

bool Refuse(const char* flag, const char* found, const char* wanted) {
  std::fprintf(stderr, "02_trainer: %s: '%s', %s wanted\n%s", flag, found, wanted, kUsage);
  return false;
}

template <typename Integer>
bool ParseCount(const char* flag, const char* text, Integer least, Integer& value) {
  char* end;
  const long long parsed = std::strtoll(text, &end, 10);
  if (*text == '\0' || *end != '\0' || parsed < static_cast<long long>(least)) {
    return Refuse(flag, text, least == 0 ? "a number from 0" : "a number from 1");
  }
  value = static_cast<Integer>(parsed);
  return true;
}

bool ParseSeconds(const char* flag, const char* text, double& value) {
  char* end;
  value = std::strtod(text, &end);
  if (*text == '\0' || *end != '\0' || !(value > 0)) return Refuse(flag, text, "seconds above 0");
  return true;
}

bool ParseOne(std::string_view flag, const char* value, TrainerOptions& options) {
  if (flag == "--checkpoints") return options.checkpoints = value, true;
  if (flag == "--remote") return options.remote = value, true;
  if (flag == "--log") return options.log = value, true;
  if (flag == "--texts") return options.texts = value, true;
  if (flag == "--steps") return ParseCount("--steps", value, int64_t{1}, options.steps);
  if (flag == "--checkpoint-every")
    return ParseCount("--checkpoint-every", value, int64_t{1}, options.checkpoint_every);
  if (flag == "--batch") return ParseCount("--batch", value, int64_t{1}, options.batch);
  if (flag == "--seed") return ParseCount("--seed", value, uint64_t{0}, options.seed);
  if (flag == "--watch-floor") return ParseSeconds("--watch-floor", value, options.watch_floor);
  if (flag == "--watch-poll") return ParseSeconds("--watch-poll", value, options.watch_poll);
  return Refuse(std::string(flag).c_str(), value, "a known flag");
}

}  // namespace

std::optional<TrainerOptions> ParseOptions(int argc, char** argv) {
  TrainerOptions options;
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 == argc) {
      std::fprintf(stderr, "02_trainer: %s: a value wanted\n%s", argv[i], kUsage);
      return std::nullopt;
    }
    if (!ParseOne(argv[i], argv[i + 1], options)) return std::nullopt;
  }
  if (options.checkpoints.empty()) {
    std::fprintf(stderr, "02_trainer: --checkpoints: a folder wanted\n%s", kUsage);
    return std::nullopt;
  }
  return options;
}
