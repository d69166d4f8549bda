// Products of a few rows with FP8 weights and dynamic activations: every weight is read once, at
// the speed of memory, for all rows and in one launch for all weights that share x. x is quantised
// on the way. Codes, their products and the scales are exact, sums are float32.
#pragma once

#include <cstdint>

#include "backends/cuda/dense/linear_rows.h"
#include "cadre/storage_format.h"

namespace cadre::cuda {

/// The scales of a weight: one for each block of 128 columns (or all) and block_rows rows.
struct BlockScales {
  const void* first = nullptr;
  int64_t row_bytes = 0;  // from one block of rows to the next
  int32_t column_bytes = 0;
  int32_t block_rows = 0;
  bool e8m0 = false;  // else float32
};

/// linear_rows() with weights of e4m3; `dtype` is that of x: f32, bf16 or f16. Where x_codes is
/// set, x is not read but its codes, rows at multiples of 16 bytes, and scales: of row r and group
/// g x_scales[g * x_scale_stride + r].
struct Fp8LinearRows : LinearRows {
  BlockScales scales[kMaxParts];
  const uint8_t* x_codes = nullptr;
  int64_t x_code_stride = 0;
  const float* x_scales = nullptr;
  int64_t x_scale_stride = 0;
};

/// Whether so many rows are quantised ahead of fp8_rows(), not in it.
bool wants_codes(int64_t rows, int64_t k);

/// Up to how many rows fp8_rows() takes a product with K columns; 0 on a GPU other than Hopper and
/// the data centre GPUs after it.
int64_t max_fp8_rows(int64_t k, const Stream& stream);

/// Whether fp8_rows() takes a layout: blocks of 128 columns or all, of rows in sixteens or all.
bool fits_fp8_rows(const ScaleLayout& layout);
/// Its scales; strides in elements.
BlockScales block_scales(const ScaleLayout& layout, const void* scales, int64_t row_stride,
                         int64_t column_stride);

/// x and weights in rows at multiples of 16 bytes, K in multiples of 16. Whole aligned words are
/// read of scales: of E8M0, up to 3 bytes beside them, which never lie in another page.
void fp8_rows(Fp8LinearRows args, const Stream& stream);

}  // namespace cadre::cuda
