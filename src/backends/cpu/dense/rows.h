// What the row-wise operations share: rows of any rank, floats in and out of any compute dtype, and
// the cut of rows over threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cadre/dtype.h"
#include "cadre/function_ref.h"
#include "cadre/stream.h"
#include "cadre/tensor.h"

namespace cadre::cpu {

/// Floats that row-wise loops hold on the stack at a time.
inline constexpr int64_t kBlock = 512;

/// `count` elements at `source` (any alignment) as floats. dtype: float32, bfloat16, float16.
void load_floats(const void* source, DType dtype, int64_t count, float* out);

/// The inverse, rounding to nearest even.
void store_floats(const float* source, int64_t count, DType dtype, void* out);

/// Element `index` of contiguous memory.
inline const std::byte* at(const void* data, DType dtype, int64_t index) {
  return static_cast<const std::byte*>(data) + static_cast<size_t>(index) * size_of(dtype);
}
inline std::byte* at(void* data, DType dtype, int64_t index) {
  return static_cast<std::byte*>(data) + static_cast<size_t>(index) * size_of(dtype);
}

/// Rows of a contiguous tensor seen as [rows, last dimension].
inline int64_t row_width(const TensorView& x) { return x.dim(x.rank() - 1); }
inline int64_t num_rows(const TensorView& x) {
  const int64_t width = row_width(x);
  return width == 0 ? 0 : x.numel() / width;
}

/// The sum of squares in an order that depends on the width alone.
float sum_of_squares(const void* row, DType dtype, int64_t width);

/// out[i] = x[i] / rms(x) * weight[i]; `out` may be `x` where the dtypes are equal;
/// an absent weight counts as ones.
void norm_row(const void* x, DType x_dtype, const TensorView& weight, float eps, int64_t width,
              void* out, DType out_dtype);

/// How the elements of a head that rotate together are paired: (i, i + half) or (2 i, 2 i + 1).
enum class RopePairs : uint8_t { kHalves, kNeighbours };

/// Rotates the first 2 * half elements of a head; `to` may be `from` where the dtypes are equal.
/// With sign -1 the other way.
void rotate_head(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t half,
                 const float* cos, const float* sin, RopePairs pairs, float sign = 1.0f);

/// Calls fn(begin, end, thread) for ranges of [0, rows) on the stream's threads; on the calling
/// thread alone when `rows * row_cost` (in floating-point operations) is not worth waking others.
void for_row_ranges(const Stream& stream, int64_t rows, int64_t row_cost,
                    FunctionRef<void(int64_t begin, int64_t end, int thread)> fn);

}  // namespace cadre::cpu
