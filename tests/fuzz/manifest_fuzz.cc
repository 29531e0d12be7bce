#include "checkpoint/manifest.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input = outlast::fuzz::TextOf(data, size);
  (void)outlast::ParseManifest(input);
  const auto parsed = outlast::ParseManifest(outlast::fuzz::WithSelfCrc(input));
  if (parsed.ok()) outlast::fuzz::RequireRoundTrip(*parsed, outlast::ParseManifest);
  return 0;
}
