#include "outlast/meter/peak.h"

#include <gtest/gtest.h>

#include <string>

#include "outlast/base/status.h"

namespace outlast {
namespace {

double Bf16Tflops(std::string_view name) {
  const auto entry = FindPeak(name, ComputeType::kBf16);
  return entry.ok() ? entry->flops_per_second / 1e12 : -1;
}

TEST(Peak, OfEachNameIsItsOwnDenseFigure) {
  // What drivers report, and the dense bf16 figure. Frameworks answer A100's 312 for many of these.
  const struct {
    const char* name;
    double tflops;
  } kRows[] = {
      {"NVIDIA A100-SXM4-80GB", 312},
      {"NVIDIA A800-SXM4-80GB", 312},
      {"NVIDIA H100 80GB HBM3", 989.4},
      {"NVIDIA H200", 989},
      {"NVIDIA H100 PCIe", 756},
      {"NVIDIA H100 NVL", 835.5},
      {"NVIDIA H800", 989},
      {"NVIDIA H20", 148},
      {"NVIDIA B200", 2250},
      {"NVIDIA GB200", 2500},
      {"NVIDIA B300 SXM6 AC", 2250},
      {"NVIDIA L40S", 362},
      {"NVIDIA L40", 181},
      {"NVIDIA L4", 121},
      {"NVIDIA L20", 119.5},
      {"NVIDIA A10", 125},
      {"NVIDIA A10G", 70},
      {"NVIDIA A40", 149.7},
      {"NVIDIA A30", 165},
      {"NVIDIA RTX A6000", 154.8},
      {"NVIDIA RTX A4000", 76.7},
      {"NVIDIA GeForce RTX 4090", 165.2},
      {"NVIDIA GeForce RTX 5090", 209.5},
      {"NVIDIA GeForce RTX 3090", 71},
      {"AMD Instinct MI300X", 1307.4},
      {"AMD Instinct MI350X", 2300},
      {"AMD Instinct MI355X", 2516.6},
  };
  for (const auto& row : kRows) EXPECT_DOUBLE_EQ(Bf16Tflops(row.name), row.tflops) << row.name;
}

TEST(Peak, OfAMigSliceIsItsShareOfTheCard) {
  const PeakEntry entry = FindPeak("NVIDIA H100 80GB HBM3 MIG 3g.40gb", ComputeType::kBf16).value();
  EXPECT_NEAR(entry.flops_per_second / 1e12, 424.0, 0.05);  // 989.4 * 3/7
  EXPECT_EQ(entry.unit, "MIG 3/7 of a chip");
  EXPECT_EQ(FindPeak("NVIDIA H100 80GB HBM3 MIG", ComputeType::kBf16).status().code(),
            absl::StatusCode::kNotFound);
}

TEST(Peak, AnUnknownNameIsNotFound) {
  for (const char* name :
       {"NVIDIA RTX A1000 Laptop GPU", "NVIDIA T400 4GB", "NVIDIA GeForce RTX 4090 Laptop GPU",
        "Radeon Pro", "NVIDIA", "", "NVIDIA A100-SXM-64GB"}) {
    EXPECT_EQ(FindPeak(name, ComputeType::kBf16).status().code(), absl::StatusCode::kNotFound)
        << name;
  }
}

TEST(Peak, TokensAreNotSubstrings) {
  for (const char* name :
       {"NVIDIA A1000", "NVIDIA XA100-SXM4-80GB", "NVIDIA L400", "NVIDIA H100x PCIe", "MI300"}) {
    EXPECT_EQ(FindPeak(name, ComputeType::kBf16).status().code(), absl::StatusCode::kNotFound)
        << name;
  }
  EXPECT_DOUBLE_EQ(Bf16Tflops("nvidia a100 pcie 40gb"), 312);
}

TEST(Peak, OfACardWithoutTheTypeIsInvalid) {
  for (const char* name : {"Tesla V100-SXM2-32GB", "Tesla T4"}) {
    EXPECT_EQ(FindPeak(name, ComputeType::kBf16).status().code(),
              absl::StatusCode::kInvalidArgument)
        << name;
  }
  EXPECT_EQ(FindPeak("NVIDIA A100-SXM4-80GB", ComputeType::kFp8).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_DOUBLE_EQ(FindPeak("Tesla T4", ComputeType::kFp16).value().flops_per_second, 65e12);
}

TEST(Peak, IsNotTakenFromSourcesThatContradictEachOther) {
  EXPECT_EQ(FindPeak("Ascend 910B", ComputeType::kBf16).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(FindPeak("NVIDIA B100", ComputeType::kBf16).status().code(),
            absl::StatusCode::kNotFound);
}

TEST(Peak, OfADeviceIsOneAsTheRuntimeNumbersIt) {
  EXPECT_DOUBLE_EQ(Bf16Tflops("AMD Instinct MI250X"), 191.5);
  EXPECT_EQ(FindPeak("AMD Instinct MI250X", ComputeType::kBf16).value().unit, "GCD");
  EXPECT_DOUBLE_EQ(Bf16Tflops("TPU v7x"), 2307.0 / 2);
}

TEST(Peak, OfAnH100IsNeverTheSparseOne) {
  const Peak peak = PeakOf("NVIDIA H100 80GB HBM3");
  EXPECT_DOUBLE_EQ(*peak.flops_per_second(), 989.4e12);
  EXPECT_DOUBLE_EQ(*PeakOf("NVIDIA H100 SXM").flops_per_second(), 989.4e12);
  EXPECT_TRUE(peak.text().starts_with("989.4 TFLOP/s bf16 dense a chip of NVIDIA H100 SXM ("))
      << peak.text();
}

TEST(Peak, ThatIsUnknownSaysWhy) {
  EXPECT_EQ(Peak().text(), "unknown peak (no device was named)");
  EXPECT_FALSE(PeakOf("NVIDIA T400 4GB").flops_per_second().has_value());
  EXPECT_EQ(PeakOf("NVIDIA T400 4GB").text(),
            "unknown peak (no peak is known for a device named \"NVIDIA T400 4GB\")");
  EXPECT_EQ(PeakOf("Tesla T4").text(), "unknown peak (NVIDIA T4 has no bf16 matrix units)");
}

TEST(Peak, OfTheUserWinsAndIsPrintedAsTheirs) {
  const Peak peak = Peak::Declared(123.4e12, "measured GEMM");
  EXPECT_DOUBLE_EQ(*peak.flops_per_second(), 123.4e12);
  EXPECT_EQ(peak.text(), "123.4 TFLOP/s declared by the user (measured GEMM)");
  EXPECT_EQ(Peak::Declared(0, "typo").text(), "unknown peak (the declared peak is 0 FLOP/s)");
}

}  // namespace
}  // namespace outlast
