// The ways of storing experts' weights that --format names.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/storage_format.h"

namespace cadre::cli {

struct WeightFormat {
  std::string_view name;
  StorageFormat storage;
  ScaleLayout scales;            // of quantised formats
  ActivationScheme activations;  // that products with such weights take
};

/// bf16, f32, fp16, fp8, fp8-ue8m0, fp8-tensor, mxfp8, fp4.
std::span<const WeightFormat> weight_formats();
std::vector<std::string> weight_format_names();
/// Of one of these names.
const WeightFormat& find_weight_format(std::string_view name);

}  // namespace cadre::cli
