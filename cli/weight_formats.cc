#include "weight_formats.h"

#include <algorithm>
#include <array>

#include "core/check.h"

namespace cadre::cli {

namespace {

constexpr ScaleLayout kFloatBlocks = {DType::kF32, 128, 128};
constexpr ScaleLayout kPowerBlocks = {DType::kF8E8M0, 128, 128};
constexpr ScaleLayout kOneScale = {DType::kF32, 0, 0};
constexpr ScaleLayout kMicroscaling = {DType::kF8E8M0, 1, 32};

constexpr std::array<WeightFormat, 8> kFormats = {{
    {"bf16", StorageFormat::kBF16, {}, ActivationScheme::kNone},
    {"f32", StorageFormat::kF32, {}, ActivationScheme::kNone},
    {"fp16", StorageFormat::kF16, {}, ActivationScheme::kNone},
    {"fp8", StorageFormat::kFp8Block, kFloatBlocks, ActivationScheme::kDynamic},
    {"fp8-ue8m0", StorageFormat::kFp8Block, kPowerBlocks, ActivationScheme::kDynamic},
    {"fp8-tensor", StorageFormat::kFp8Tensor, kOneScale, ActivationScheme::kDynamic},
    {"mxfp8", StorageFormat::kMxFp8, kMicroscaling, ActivationScheme::kNone},
    {"fp4", StorageFormat::kFp4, kMicroscaling, ActivationScheme::kNone},
}};

}  // namespace

std::span<const WeightFormat> weight_formats() { return kFormats; }

std::vector<std::string> weight_format_names() {
  std::vector<std::string> names;
  for (const WeightFormat& format : kFormats) names.emplace_back(format.name);
  return names;
}

const WeightFormat& find_weight_format(std::string_view name) {
  const auto* found = std::find_if(kFormats.begin(), kFormats.end(),
                                   [&](const WeightFormat& f) { return f.name == name; });
  CADRE_ASSERT(found != kFormats.end());
  return *found;
}

}  // namespace cadre::cli
