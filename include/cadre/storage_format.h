// How a weight is stored: element type plus the scheme of its scales. The same description serves
// every device.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "cadre/dtype.h"

namespace cadre {

enum class StorageFormat : uint8_t {
  kF32,
  kF16,
  kBF16,       // plain
  kFp8Block,   // e4m3, one scale per block_rows x block_cols
  kFp8Tensor,  // e4m3, one scale per matrix
  kMxFp8,      // e4m3, one UE8M0 scale per 32 of K
  kFp4,        // e2m1, two per byte along K (low nibble first), one UE8M0 scale per 32 of K
};

inline constexpr int kNumStorageFormats = 7;

/// "float32", "bfloat16", "fp8", "fp8-tensor", "mxfp8", "fp4", ...
std::string_view name_of(StorageFormat format);

/// The plain format of a floating-point dtype; empty for every other dtype.
std::optional<StorageFormat> plain_format(DType dtype);
/// The other way round; empty for quantised formats.
std::optional<DType> plain_dtype(StorageFormat format);

/// True when the format needs scales.
bool is_quantized(StorageFormat format);

/// Bytes of one row of k elements; two e2m1 share a byte (an odd last one has it for itself).
int64_t row_bytes(StorageFormat format, int64_t k);

/// What happens to activations before a product with quantised weights.
/// kNone: they stay in the compute dtype (what FP4, MXFP4 and MXFP8 weights are made for).
/// kDynamic: e4m3, one scale per token and group of 128 of K (32 for FP4), found on the way.
/// kStatic: e4m3, one scale per matrix, read from the checkpoint.
enum class ActivationScheme : uint8_t { kNone, kDynamic, kStatic };

/// "none", "dynamic" or "static".
std::string_view name_of(ActivationScheme scheme);

/// How weight scales are stored; weight = stored value * scale. `dtype` is F32 or F8_E8M0 (other
/// containers of a checkpoint become one of these when it is loaded). kFp8Block has any block size,
/// kFp8Tensor {F32, 0, 0}, kMxFp8 and kFp4 {F8_E8M0, 1, 32}. Last blocks need not be full.
struct ScaleLayout {
  DType dtype = DType::kF32;
  int64_t block_rows = 0;  // rows (N) under one scale; 0 = all
  int64_t block_cols = 0;  // columns (K) under one scale; 0 = all

  friend bool operator==(const ScaleLayout&, const ScaleLayout&) = default;
};

}  // namespace cadre
