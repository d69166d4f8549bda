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

/// Where activations get their scales from when the experts are quantised.
enum class ActivationScheme : uint8_t { kNone, kDynamic, kStatic };

/// How weight scales are stored. `dtype` is F32, F8_E8M0 or U8 (the bits of E8M0).
struct ScaleLayout {
  DType dtype = DType::kF32;
  int64_t block_rows = 0;  // rows (N) under one scale; 0 = all
  int64_t block_cols = 0;  // columns (K) under one scale; 0 = all

  friend bool operator==(const ScaleLayout&, const ScaleLayout&) = default;
};

}  // namespace cadre
