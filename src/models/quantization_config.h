// What config.json says about quantised weights: `quantization_config` as Transformers and DeepSeek
// write it, and `expert_dtype`.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/quantization.h"
#include "io/json.h"

namespace cadre {

/// How a checkpoint stores what it stores quantised. Whether a weight is quantised, its own dtype
/// says.
struct CheckpointQuantization {
  std::string method;  // "fp8", "mxfp8" or "mxfp4"; empty: config.json has no quantization_config
  FineGrainedFP8Config fp8 = {};  // with dequantize as wanted for all formats
  bool has_fp8 = false;           // float8_e4m3 weights may occur
  bool has_fp4 = false;           // int8 or uint8 weights, two e2m1 in each

  bool dequantize() const { return fp8.dequantize; }
};

/// `quantization_config` with quant_method
///   fp8: activation_scheme dynamic | static, weight_block_size [rows, columns] | null, scale_fmt
///     float | ue8m0, modules_to_not_convert | ignored_layers, fmt e4m3, dequantize;
///   mxfp8: the same with blocks of [1, 32];
///   mxfp4 (GPT-OSS): modules_to_not_convert, dequantize;
/// and `expert_dtype` fp4 | fp8 beside it or in text_config (DeepSeek-V4). Other keys are passed
/// over, as in Transformers. `wanted`: of it only `dequantize` counts where the checkpoint is
/// quantised; where it is not, there is nothing to dequantise, and quantising is refused. Throws
/// Unsupported for methods and values that are not served, CheckpointError for malformed ones.
CheckpointQuantization read_quantization(const ConfigReader& config,
                                         const std::optional<FineGrainedFP8Config>& wanted);

/// Whether modules_to_not_convert names the module: itself, a parent of it, or the end of its name;
/// '*' stands for any text.
bool is_excluded(const FineGrainedFP8Config& config, std::string_view module);

}  // namespace cadre
