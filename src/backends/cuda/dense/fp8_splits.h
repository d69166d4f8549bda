// Products that were cut along K: adds their parts.
#pragma once

#include <cstdint>

#include "backends/cuda/dense/linear_rows.h"
#include "cadre/stream.h"

namespace cadre::cuda {

struct SplitSums {
  int64_t splits = 1;
  int64_t rows = 0;
  int num_parts = 0;
  LinearPart parts[LinearRows::kMaxParts];  // their outputs and biases
  // [splits, rows, n] each, rows at multiples of 16 bytes.
  const float* sums[LinearRows::kMaxParts] = {};
  int64_t sum_strides[LinearRows::kMaxParts] = {};  // elements between rows
};

/// out = sum over splits + b (+ out), in the order of splits.
void add_splits(const SplitSums& args, const Stream& stream);

}  // namespace cadre::cuda
