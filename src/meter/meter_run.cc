// Apart from meter.cc: a program that meters a bare black box does not link the run.
#include <utility>

#include "outlast/meter/meter.h"
#include "outlast/run/run.h"

namespace outlast {

absl::StatusOr<std::unique_ptr<Meter>> Meter::Start(Run& run, MeterOptions options) {
  return Start(run.black_box(), run.progress(), std::move(options));
}

}  // namespace outlast
