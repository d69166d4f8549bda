// Products with few rows: every weight is read once, at the speed of memory, for all rows together.
#pragma once

#include <cstdint>

#include "cadre/dtype.h"
#include "cadre/stream.h"
#include "dense/dense_ops.h"

namespace cadre::cuda {

/// One of the weights that share x.
struct LinearPart {
  const void* weight = nullptr;  // [n, k]
  int64_t weight_stride = 0;     // elements between rows
  const void* bias = nullptr;    // [n]; null: none
  DType bias_dtype = DType::kF32;
  void* out = nullptr;  // [rows, n]
  DType out_dtype = DType::kF32;
  int64_t out_stride = 0;
  int64_t n = 0;
  bool accumulate = false;  // add to out
  int32_t first_tile = 0;   // set by linear_rows()
};

LinearPart linear_part(const LinearWeights& weights, const MutableTensorView& out, bool accumulate);

struct LinearRows {
  static constexpr int kMaxParts = 4;

  DType dtype = DType::kBF16;  // of x and the weights
  const void* x = nullptr;
  int64_t x_stride = 0;
  int64_t rows = 0;
  int64_t k = 0;
  int num_parts = 0;
  LinearPart parts[kMaxParts];
};

/// Up to how many rows linear_rows() takes a product of this dtype.
int64_t max_linear_rows(DType dtype);

void linear_rows(LinearRows args, const Stream& stream);

}  // namespace cadre::cuda
