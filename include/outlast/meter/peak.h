// The dense peak of an accelerator: what MFU divides by. A name that the table lacks has no peak;
// nothing is guessed, and no other card's number stands in.
//
// A device is one "as the runtime numbers it": a GCD of an MI250X, a core of a TPU v3. Structured
// sparsity doubles the number in NVIDIA's sheets and is never used here.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace outlast {

// The type that the GEMMs run in.
enum class ComputeType { kFp32, kTf32, kFp16, kBf16, kFp8, kInt8 };

std::string_view ToString(ComputeType type);

// What the table knows of one device in one type.
struct PeakEntry {
  // Such as "NVIDIA H100 SXM".
  std::string device;
  // Dense, in FLOP/s (not TFLOP/s).
  double flops_per_second = 0;
  // What one device is: "chip", "GCD", "core", or "MIG 3/7 of a chip".
  std::string unit;
  // Where the number comes from, and who says otherwise.
  std::string source;
};

// Looks `device_name` up as its driver spells it, such as "NVIDIA A100-SXM4-80GB": the name is
// split into lower-case words, and a row fits only if it explains every word. "RTX 4090 Laptop GPU"
// is not an RTX 4090. A MIG slice ("... MIG 3g.40gb") is its share of the whole card's
// multiprocessors, by sevenths. kNotFound: no row fits, or sources contradict each other so far
// that none is believed. kInvalidArgument: the device has no such type, as bf16 on a V100.
absl::StatusOr<PeakEntry> FindPeak(std::string_view device_name, ComputeType type);

// A peak to divide by, or the reason why there is none.
class Peak {
 public:
  // Unknown, as nobody said anything.
  Peak() : reason_("no device was named") {}
  static Peak Unknown(std::string reason);
  static Peak Of(const PeakEntry& entry, ComputeType type);
  // The user's own number wins over the table, and is printed as theirs. Not above 0: unknown.
  static Peak Declared(double flops_per_second, std::string_view why);

  // FLOP/s of one device; none when unknown.
  std::optional<double> flops_per_second() const { return flops_per_second_; }
  // "989.4 TFLOP/s bf16 dense of NVIDIA H100 SXM (source)", or "unknown peak (reason)".
  std::string text() const;

 private:
  std::optional<double> flops_per_second_;
  std::string reason_;
};

// FindPeak, with its errors turned into an unknown peak that carries the reason.
Peak PeakOf(std::string_view device_name, ComputeType type = ComputeType::kBf16);

}  // namespace outlast
