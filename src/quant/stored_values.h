// The two shapes in which files hold FP4 values.
#pragma once

#include "cadre/tensor.h"

namespace cadre {

/// Values whose rows are cut into groups of 32 ([.., N, K / 32, 16], as in GPT-OSS) with their rows
/// in one piece: [.., N, K / 2], a tensor of `rank` dimensions. All others as they are.
inline TensorView with_whole_rows(const TensorView& values, int rank) {
  const bool is_cut = values.rank() == rank + 1 && values.dim(rank) == 16 &&
                      values.stride(rank) == 1 &&
                      (values.dim(rank - 1) <= 1 || values.stride(rank - 1) == 16);
  if (!is_cut) return values;
  Dims shape(std::span<const int64_t>(values.shape().begin(), static_cast<size_t>(rank)));
  Dims strides(std::span<const int64_t>(values.strides().begin(), static_cast<size_t>(rank)));
  shape[rank - 1] = values.dim(rank - 1) * 16;
  strides[rank - 1] = 1;
  return {values.data(), values.dtype(), shape, strides, values.device()};
}

}  // namespace cadre
