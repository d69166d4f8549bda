// Tensor maps: what the copy engine of a Hopper GPU has to know about a matrix in device memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cadre/dtype.h"

namespace cadre::cuda {

/// `count` matrices [rows, columns] of bf16, fp16 or bytes, strides in elements.
struct MatrixLayout {
  DType dtype = DType::kBF16;
  const void* data = nullptr;
  int64_t columns = 0;
  int64_t rows = 0;
  int64_t count = 1;
  int64_t row_stride = 0;
  int64_t matrix_stride = 0;
};

/// What the copy engine asks of addresses and strides: 16-byte multiples, positive, below 2^40.
bool fits_tensor_map(const MatrixLayout& layout);

/// Boxes of `box_rows` rows x `box_bytes` (128, 64 or 32) in the swizzle of that many bytes, zeros
/// beyond the matrix. A map of three dimensions (column, row, matrix) when `count` > 1 or
/// `always_3d`. Needs a driver, does no device work; throws DeviceError when the driver refuses.
CUtensorMap make_tensor_map(const MatrixLayout& layout, int box_rows, bool always_3d,
                            int box_bytes = 128);

}  // namespace cadre::cuda
