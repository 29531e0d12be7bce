// OUTLAST.json, claims, LATEST.json, QUARANTINE.json, hooks.json, and a checkpoint's name.
#include "checkpoint/manifest.h"
#include "tests/fuzz/fuzz.h"

namespace {

template <typename Parse>
void Check(std::string_view input, Parse parse) {
  const auto parsed = parse(input);
  if (parsed.ok()) outlast::fuzz::RequireRoundTrip(*parsed, parse);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input = outlast::fuzz::TextOf(data, size);
  Check(input, outlast::ParseRootRecord);
  Check(input, outlast::ParseClaim);
  Check(input, outlast::ParseLatest);
  Check(input, outlast::ParseQuarantine);
  Check(input, outlast::ParseHooks);
  const auto name = outlast::ParseCheckpointName(input);
  outlast::fuzz::Require(!name || outlast::CheckpointName(name->step, name->nonce) == input,
                         "a name is what its parts make");
  return 0;
}
