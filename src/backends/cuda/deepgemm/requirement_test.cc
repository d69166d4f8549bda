// The answer for GPUs that are not here.
#include "backends/cuda/deepgemm/requirement.h"

#include <gtest/gtest.h>

namespace cadre::cuda {
namespace {

constexpr ScaleLayout kFloatScales = {DType::kF32, 128, 128};
constexpr ScaleLayout kPowerScales = {DType::kF8E8M0, 128, 128};

bool mentions(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

TEST(DeepGemmRequirement, HopperTakesEveryFormatAndBothKindsOfScales) {
  for (const ScaleLayout& layout : {kFloatScales, kPowerScales}) {
    EXPECT_EQ(unmet_by_gpu(90, StorageFormat::kFp8Block, layout), "");
  }
  EXPECT_EQ(unmet_by_gpu(90, StorageFormat::kBF16, {}), "");
  EXPECT_EQ(unmet_by_gpu(90, StorageFormat::kFp4, {DType::kF8E8M0, 1, 32}), "");
}

TEST(DeepGemmRequirement, OlderGpusAreToldWhatIsNeeded) {
  for (const int capability : {0, 75, 80, 89}) {
    for (const StorageFormat format : {StorageFormat::kBF16, StorageFormat::kFp8Block}) {
      const std::string reason = unmet_by_gpu(capability, format, kFloatScales);
      EXPECT_TRUE(mentions(reason, "compute capability 9.0")) << reason;
    }
  }
  EXPECT_TRUE(mentions(unmet_by_gpu(89, StorageFormat::kBF16, {}), "has 8.9"));
}

TEST(DeepGemmRequirement, Float32ScalesAreRefusedFromCompute10On) {
  for (const int capability : {100, 103, 120}) {
    for (const StorageFormat format : {StorageFormat::kFp8Block, StorageFormat::kFp8Tensor}) {
      EXPECT_TRUE(mentions(unmet_by_gpu(capability, format, kFloatScales), "UE8M0")) << capability;
    }
    const std::string powers = unmet_by_gpu(capability, StorageFormat::kFp8Block, kPowerScales);
    EXPECT_FALSE(mentions(powers, "UE8M0")) << powers;
    EXPECT_TRUE(mentions(powers, "kernels for compute capability 9.0")) << powers;
  }
}

}  // namespace
}  // namespace cadre::cuda
