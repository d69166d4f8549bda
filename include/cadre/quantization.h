// Quantised weights: what a checkpoint's config says about them, where their scales lie, and the
// way from floats to stored values and back. docs/numerics.md has the formats and the rounding.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/dtype.h"
#include "cadre/storage_format.h"
#include "cadre/tensor.h"

namespace cadre {

class ThreadPool;

/// How block scales of FP8 weights are stored: float32, or bare powers of two (F8_E8M0).
enum class ScaleFormat : uint8_t { kFloat, kUe8m0 };

/// Transformers' FineGrainedFP8Config: FP8 weights as in DeepSeek-V3's checkpoints.
struct FineGrainedFP8Config {
  ActivationScheme activation_scheme = ActivationScheme::kDynamic;
  /// Rows and columns under one scale; empty: one scale per matrix.
  std::optional<std::array<int64_t, 2>> weight_block_size = {{128, 128}};
  bool dequantize = false;  // weights become plain ones in the compute dtype when they are loaded
  std::vector<std::string> modules_to_not_convert = {};  // names in the checkpoint's own tree
  ScaleFormat scale_fmt = ScaleFormat::kFloat;
};

/// Throws InvalidArgument naming the field when the scheme is neither dynamic nor static or a block
/// has a size that is not positive.
void validate(const FineGrainedFP8Config& config);

/// The formats that a config means. Throw as validate() does.
StorageFormat storage_format_of(const FineGrainedFP8Config& config);
ScaleLayout scale_layout_of(const FineGrainedFP8Config& config);

/// The only layout of kFp8Tensor, kMxFp8 and kFp4; of kFp8Block the usual one, {F32, 128, 128}.
/// Throws InvalidArgument for plain formats.
ScaleLayout scale_layout_of(StorageFormat format);

/// Throws InvalidArgument when the format does not take this layout (see ScaleLayout).
void validate(StorageFormat format, const ScaleLayout& layout);

/// Scales of a matrix of n rows and k columns: [ceil(n / block_rows), ceil(k / block_cols)].
/// Throws InvalidArgument for negative sizes.
Dims scale_shape(const ScaleLayout& layout, int64_t n, int64_t k);

/// A weight as it is stored, [N, K] or [E, N, K], in somebody else's memory.
struct QuantizedTensor {
  StorageFormat format = StorageFormat::kFp8Block;
  ScaleLayout layout;  // its dtype is that of `scales`
  /// F8_E4M3 [.., N, K]. kFp4: int8 or uint8 [.., N, ceil(K / 2)], or [.., N, K / 32, 16] with
  /// contiguous rows (GPT-OSS). The last dimension has stride 1, others any.
  TensorView values;
  /// [.., ceil(N / block_rows), ceil(K / block_cols)] with any strides, F32 or F8_E8M0 (or uint8
  /// with the same bits). kFp8Tensor: one element of any shape for [N, K], E for [E, N, K].
  TensorView scales;
};

/// The same with memory of its own: contiguous, on the host.
struct QuantizedWeight {
  StorageFormat format = StorageFormat::kFp8Block;
  ScaleLayout layout;
  Tensor values;  // F8_E4M3 [.., N, K], or int8 [.., N, ceil(K / 2)]
  Tensor scales;  // [.., ceil(N / block_rows), ceil(K / block_cols)]

  QuantizedTensor view() const { return {format, layout, values.view(), scales.view()}; }
};

/// Quantises a weight of a plain dtype on the host, [N, K] or [E, N, K] with any strides. Each
/// block has the smallest scale that keeps its values in range: amax / 448 in float32; as F8_E8M0
/// that rounded up to a power of two; kFp4 amax / 6 rounded up, or half of it where that gives the
/// smaller squared error. A block of zeros has the scale 1. Values are divided by the scale as it
/// is stored, then rounded to nearest even. `threads` null: on the calling thread. Throws
/// InvalidArgument naming the place of a NaN or infinity, and for shapes, dtypes and layouts that
/// do not fit.
QuantizedWeight quantize(const TensorView& weight, StorageFormat format, const ScaleLayout& layout,
                         ThreadPool* threads = nullptr);

/// Value * scale in float32, rounded to the dtype of `out` ([N, K] or [E, N, K] of a plain dtype on
/// the host, last dimension with stride 1, not overlapping). NaN codes and scales give NaN.
/// `threads` null: on the calling thread. Throws InvalidArgument naming both shapes when one does
/// not fit.
void dequantize(const QuantizedTensor& weight, const MutableTensorView& out,
                ThreadPool* threads = nullptr);

/// The dtype that scales of a format have at run time when a file holds them as `container`: kMxFp8
/// and kFp4 always F8_E8M0, kFp8Tensor always F32, kFp8Block F8_E8M0 for F8_E8M0 and U8, else F32.
/// Throws InvalidArgument naming `name` for containers that no scale of the format comes in.
DType scale_dtype(std::string_view name, StorageFormat format, DType container);

/// Scales from a file (F32, BF16, F16, F8_E8M0 or U8 with the bits of the latter) as F32 or
/// F8_E8M0. No value changes: what is not a power of two in [2^-127, 2^127] cannot become F8_E8M0,
/// and the error names it and its place. The result is `scales` itself, retyped, where the bits
/// stay, else lies in `storage`.
TensorView convert_scales(std::string_view name, const TensorView& scales, DType dtype,
                          Tensor& storage);

}  // namespace cadre
