#include "outlast/meter/peak.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "base/error.h"

namespace outlast {
namespace {

// A cell: dense TFLOP/s; kNone: the device lacks the type; kOpen: no figure that we would stand by.
constexpr double kNone = -1;
constexpr double kOpen = 0;

struct Row {
  std::string_view device;
  // Every word must be in the name ...
  std::string_view words;
  // ... and what else the name has must be among these.
  std::string_view also;
  std::string_view unit;
  double bf16, fp16, fp8;
  double fp32, tf32, int8;
  std::string_view source;
};

constexpr std::string_view kSheet = "vendor's dense figure";
constexpr double kO = kOpen;
constexpr double kX = kNone;

// Words in several rows of one device: its driver spells it in several ways.
//   device, words, also, unit, bf16, fp16, fp8, fp32, tf32, int8, source
constexpr Row kRows[] = {
    {"NVIDIA V100 SXM2", "v100 sxm2", "16gb 32gb", "chip", kX, 125, kX, 15.7, kX, kO, kSheet},
    {"NVIDIA V100 PCIe", "v100 pcie", "16gb 32gb", "chip", kX, 112, kX, kO, kX, kO, kSheet},
    {"NVIDIA V100S", "v100s", "pcie 32gb", "chip", kX, 130, kX, kO, kX, kO, kSheet},
    {"NVIDIA T4", "t4", "", "chip", kX, 65, kX, kO, kX, kO, kSheet},
    {"NVIDIA A100", "a100 sxm4", "40gb 80gb", "chip", 312, 312, kX, kO, 156, 624, kSheet},
    {"NVIDIA A100", "a100 pcie", "40gb 80gb", "chip", 312, 312, kX, kO, 156, 624, kSheet},
    {"NVIDIA A800", "a800 sxm4", "40gb 80gb", "chip", 312, 312, kX, kO, 156, 624, kSheet},
    {"NVIDIA A800", "a800 pcie", "40gb 80gb", "chip", 312, 312, kX, kO, 156, 624, kSheet},
    {"NVIDIA A30", "a30", "24gb", "chip", 165, 165, kX, kO, kO, kO, kSheet},
    {"NVIDIA A10", "a10", "24gb", "chip", 125, 125, kX, kO, kO, kO, kSheet},
    {"NVIDIA A10G", "a10g", "24gb", "chip", 70, 70, kX, kO, kO, kO,
     "llm-analysis; Lightning and Composer say 125, the A10's"},
    {"NVIDIA A40", "a40", "48gb", "chip", 149.7, 149.7, kX, kO, kO, kO, kSheet},
    {"NVIDIA RTX A6000", "rtx a6000", "48gb", "chip", 154.8, 154.8, kX, 38.7, kO, kO, kSheet},
    {"NVIDIA RTX A4000", "rtx a4000", "16gb", "chip", 76.7, 76.7, kX, kO, kO, kO, kSheet},
    {"NVIDIA L4", "l4", "24gb", "chip", 121, 121, 242, kO, kO, kO, kSheet},
    {"NVIDIA L40", "l40", "48gb", "chip", 181, 181, kO, kO, kO, kO, kSheet},
    {"NVIDIA L40S", "l40s", "48gb", "chip", 362, 362, 733, kO, kO, kO, kSheet},
    {"NVIDIA L20", "l20", "48gb", "chip", 119.5, 119.5, kO, kO, kO, kO, kSheet},
    {"NVIDIA H100 SXM", "h100 hbm3", "80gb 96gb sxm5", "chip", 989.4, 989.4, 1979, kO, kO, kO,
     "vendor's dense figure; 1830 MHz x 512 x 2 x 528 tensor cores"},
    {"NVIDIA H100 SXM", "h100 sxm", "80gb", "chip", 989.4, 989.4, 1979, kO, kO, kO, kSheet},
    {"NVIDIA H100 SXM", "h100 sxm5", "80gb", "chip", 989.4, 989.4, 1979, kO, kO, kO, kSheet},
    {"NVIDIA H100 SXM", "h100 hbm2e", "64gb 80gb", "chip", 989.4, 989.4, 1979, kO, kO, kO,
     "nominal: look at the part's clock"},
    {"NVIDIA H100 PCIe", "h100 pcie", "80gb", "chip", 756, 756, 1513, kO, kO, kO,
     "vendor's dense figure; verl says 989, the SXM's"},
    {"NVIDIA H100 NVL", "h100 nvl", "94gb", "chip", 835.5, 835.5, 1671, kO, kO, kO, kSheet},
    {"NVIDIA H800 SXM", "h800", "sxm sxm5 80gb hbm3", "chip", 989, 989, 1979, kO, kO, kO, kSheet},
    {"NVIDIA H800 PCIe", "h800 pcie", "80gb", "chip", 756, 756, 1513, kO, kO, kO, kSheet},
    {"NVIDIA H20", "h20", "sxm 96gb hbm3", "chip", 148, 148, kO, kO, kO, kO, kSheet},
    {"NVIDIA H200 SXM", "h200", "sxm sxm5 141gb hbm3e", "chip", 989, 989, 1979, kO, kO, kO, kSheet},
    {"NVIDIA H200 NVL", "h200 nvl", "141gb", "chip", 836, 836, kO, kO, kO, kO, kSheet},
    {"NVIDIA GH200", "gh200", "96gb 120gb 144gb 480gb 144g hbm3 hbm3e", "chip", 989, 989, 1979, kO,
     kO, kO, kSheet},
    {"NVIDIA B100", "b100", "", "chip", kO, kO, kO, kO, kO, kO, "no figure that two sources share"},
    {"NVIDIA B200", "b200", "sxm sxm6 180gb 192gb", "chip", 2250, 2250, 4500, kO, kO, kO, kSheet},
    {"NVIDIA B300", "b300", "sxm sxm6 ac 288gb", "chip", 2250, 2250, 4500, kO, kO, kO, kSheet},
    {"NVIDIA GB200", "gb200", "", "chip", 2500, 2500, 5000, kO, kO, kO,
     "torchtitan, verl, ml-engineering; NVIDIA's dgxc-benchmarking says 2450"},
    {"NVIDIA GB300", "gb300", "", "chip", 2450, 2450, 4900, kO, kO, kO,
     "NVIDIA's dgxc-benchmarking; others say 2500"},
    {"NVIDIA GeForce RTX 3090", "rtx 3090", "", "chip", 71, 71, kX, kO, kO, kO,
     "vendor's white paper, fp32 accumulation"},
    {"NVIDIA GeForce RTX 4090", "rtx 4090", "", "chip", 165.2, 165.2, 330, kO, kO, kO,
     "vendor's white paper, fp32 accumulation"},
    {"NVIDIA GeForce RTX 5090", "rtx 5090", "", "chip", 209.5, 209.5, 419, kO, kO, kO,
     "vendor's white paper, fp32 accumulation"},
    {"AMD Instinct MI100", "mi100", "", "chip", kO, kO, kX, kO, kO, kO,
     "no figure that two sources share"},
    {"AMD Instinct MI210", "mi210", "", "chip", 181, 181, kX, kO, kO, kO, kSheet},
    {"AMD Instinct MI250", "mi250", "oam", "GCD", 181, 181, kX, kO, kO, kO,
     "vendor's data sheet: 362 a card of two GCDs"},
    {"AMD Instinct MI250X", "mi250x", "oam", "GCD", 191.5, 191.5, kX, kO, kO, kO,
     "vendor's data sheet: 383 a card of two GCDs"},
    {"AMD Instinct MI300A", "mi300a", "", "chip", 980.6, 980.6, kO, kO, kO, kO, kSheet},
    {"AMD Instinct MI300X", "mi300x", "oam 192gb", "chip", 1307.4, 1307.4, 2610, kO, kO, kO,
     "vendor's data sheet; torchtitan says 1300, verl 1336"},
    {"AMD Instinct MI325X", "mi325x", "oam 256gb", "chip", 1307.4, 1307.4, 2610, kO, kO, kO,
     kSheet},
    {"AMD Instinct MI350X", "mi350x", "oam 288gb", "chip", 2300, 2300, kO, kO, kO, kO, kSheet},
    {"AMD Instinct MI355X", "mi355x", "oam 288gb", "chip", 2516.6, 2516.6, 5000, kO, kO, kO,
     kSheet},
    {"Google TPU v2", "tpu v2", "", "core", 22.5, kO, kX, kO, kX, kO,
     "vendor's page: 45 a chip of two cores"},
    {"Google TPU v3", "tpu v3", "", "core", 61.5, kO, kX, kO, kX, kO,
     "vendor's page: 123 a chip of two cores; scaling-book says 140"},
    {"Google TPU v4", "tpu v4", "", "chip", 275, kO, kX, kO, kX, kO, "vendor's page"},
    {"Google TPU v5e", "tpu v5e", "", "chip", 197, kO, kX, kO, kX, kO, "vendor's page"},
    {"Google TPU v5e", "tpu v5 lite", "", "chip", 197, kO, kX, kO, kX, kO, "vendor's page"},
    {"Google TPU v5p", "tpu v5p", "", "chip", 459, kO, kX, kO, kX, kO, "vendor's page"},
    {"Google TPU v6e", "tpu v6e", "", "chip", 918, kO, kO, kO, kX, kO,
     "vendor's page; scaling-book says 920"},
    {"Google TPU v6e", "tpu v6 lite", "", "chip", 918, kO, kO, kO, kX, kO,
     "vendor's page; scaling-book says 920"},
    {"Google TPU v7x", "tpu v7x", "", "half a chip", 1153.5, kO, 2307, kO, kX, kO,
     "vendor's page: 2307 (fp8 4614) a chip of two devices"},
    {"Intel Gaudi2", "gaudi2", "", "chip", 432, kO, 865, kO, kO, kO, kSheet},
    {"Intel Gaudi3", "gaudi3", "", "chip", 1677, kO, 1677, kO, kO, kO,
     "vendor's product brief; the white paper's 1835 is at a clock that was not shipped"},
    {"Intel Data Center GPU Max 1550", "max 1550", "data center", "chip", kO, kO, kX, kO, kO, kO,
     "published figures run from 298 to 341"},
    {"AWS Trainium1", "trainium1", "", "chip", 190, kO, kO, kO, kO, kO, "vendor's page"},
    {"AWS Trainium2", "trainium2", "", "chip", 667, kO, 1299, kO, kO, kO, "vendor's page"},
    {"Huawei Ascend 910B", "ascend 910b", "", "chip", kO, kO, kX, kO, kO, kO,
     "published figures run from 320 to 354"},
    {"Huawei Ascend 910C", "ascend 910c", "", "chip", kO, kO, kX, kO, kO, kO,
     "published only as about 800"},
};

using Words = std::vector<std::string>;

bool Has(const Words& words, std::string_view word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// Lower-case runs of letters, digits and dots. The dot stays: "3g.40gb" is one word.
Words Split(std::string_view text) {
  Words words;
  std::string word;
  for (const char c : text) {
    const auto u = static_cast<unsigned char>(c);
    if (std::isalnum(u) || c == '.') {
      word += static_cast<char>(std::tolower(u));
    } else if (!word.empty()) {
      words.push_back(std::exchange(word, ""));
    }
  }
  if (!word.empty()) words.push_back(word);
  return words;
}

bool IsBrand(const std::string& word) {
  constexpr std::string_view kBrands[] = {"nvidia", "tesla", "geforce", "amd",    "instinct",
                                          "google", "cloud", "intel",   "habana", "aws",
                                          "huawei", "gpu",   "graphics"};
  return std::find(std::begin(kBrands), std::end(kBrands), word) != std::end(kBrands);
}

bool Fits(const Row& row, const Words& name) {
  const Words wanted = Split(row.words);
  const Words also = Split(row.also);
  return std::all_of(wanted.begin(), wanted.end(),
                     [&](const auto& word) { return Has(name, word); }) &&
         std::all_of(name.begin(), name.end(),
                     [&](const auto& word) { return Has(wanted, word) || Has(also, word); });
}

double Cell(const Row& row, ComputeType type) {
  switch (type) {
    case ComputeType::kFp32:
      return row.fp32;
    case ComputeType::kTf32:
      return row.tf32;
    case ComputeType::kFp16:
      return row.fp16;
    case ComputeType::kBf16:
      return row.bf16;
    case ComputeType::kFp8:
      return row.fp8;
    case ComputeType::kInt8:
      return row.int8;
  }
  return kOpen;
}

// Takes "mig 3g.40gb" (and "+me") off the name. 7 sevenths: no slice. 0: a slice that is not
// understood.
int TakeMigSevenths(Words& name) {
  const auto mig = std::find(name.begin(), name.end(), "mig");
  if (mig == name.end()) return 7;
  int sevenths = 0;
  if (mig + 1 != name.end()) {
    const std::string& slice = mig[1];
    const auto [end, error] = std::from_chars(slice.data(), slice.data() + slice.size(), sevenths);
    const bool is_slice = error == std::errc() && end != slice.data() + slice.size() && *end == 'g';
    if (!is_slice || sevenths < 1 || sevenths > 7) sevenths = 0;
  }
  name.erase(mig, name.end());
  return sevenths;
}

}  // namespace

std::string_view ToString(ComputeType type) {
  switch (type) {
    case ComputeType::kFp32:
      return "fp32";
    case ComputeType::kTf32:
      return "tf32";
    case ComputeType::kFp16:
      return "fp16";
    case ComputeType::kBf16:
      return "bf16";
    case ComputeType::kFp8:
      return "fp8";
    case ComputeType::kInt8:
      return "int8";
  }
  return "?";
}

absl::StatusOr<PeakEntry> FindPeak(std::string_view device_name, ComputeType type) {
  Words name = Split(device_name);
  std::erase_if(name, IsBrand);
  const int sevenths = TakeMigSevenths(name);
  const Row* row = std::find_if(std::begin(kRows), std::end(kRows),
                                [&](const Row& each) { return Fits(each, name); });
  if (row == std::end(kRows) || sevenths == 0) {
    return Error(absl::StatusCode::kNotFound, "no peak is known for a device named \"{}\"",
                 device_name);
  }
  const double tflops = Cell(*row, type);
  if (tflops == kNone) {
    return Error(absl::StatusCode::kInvalidArgument, "{} has no {} matrix units", row->device,
                 ToString(type));
  }
  if (tflops == kOpen) {
    return Error(absl::StatusCode::kNotFound, "no {} peak of {} is in the table ({})",
                 ToString(type), row->device, row->source);
  }
  return PeakEntry{.device = std::string(row->device),
                   .flops_per_second = tflops * 1e12 * sevenths / 7,
                   .unit = sevenths == 7 ? std::string(row->unit)
                                         : fmt::format("MIG {}/7 of a {}", sevenths, row->unit),
                   .source = std::string(row->source)};
}

Peak Peak::Unknown(std::string reason) {
  Peak peak;
  peak.reason_ = std::move(reason);
  return peak;
}

Peak Peak::Of(const PeakEntry& entry, ComputeType type) {
  Peak peak;
  peak.flops_per_second_ = entry.flops_per_second;
  peak.reason_ =
      fmt::format("{:.1f} TFLOP/s {} dense a {} of {} ({})", entry.flops_per_second / 1e12,
                  ToString(type), entry.unit, entry.device, entry.source);
  return peak;
}

Peak Peak::Declared(double flops_per_second, std::string_view why) {
  if (!std::isfinite(flops_per_second) || flops_per_second <= 0) {
    return Unknown(fmt::format("the declared peak is {} FLOP/s", flops_per_second));
  }
  Peak peak;
  peak.flops_per_second_ = flops_per_second;
  peak.reason_ =
      fmt::format("{:.6g} TFLOP/s declared by the user ({})", flops_per_second / 1e12, why);
  return peak;
}

std::string Peak::text() const {
  return flops_per_second_ ? reason_ : fmt::format("unknown peak ({})", reason_);
}

Peak PeakOf(std::string_view device_name, ComputeType type) {
  const absl::StatusOr<PeakEntry> entry = FindPeak(device_name, type);
  if (!entry.ok()) return Peak::Unknown(std::string(MessageOf(entry.status())));
  return Peak::Of(*entry, type);
}

}  // namespace outlast
