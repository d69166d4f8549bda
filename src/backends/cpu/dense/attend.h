// The inner steps of attention, compiled for several instruction sets: query rows against one block
// of keys with a running softmax, and the widening of cache rows.
#pragma once

#include <cstdint>
#include <span>

#include "cadre/dtype.h"

namespace cadre::cpu {

/// Keys in a block. Blocks lie at multiples of this from position 0, whatever the batch or the
/// piece, so a row's order of summation depends on its position alone.
inline constexpr int64_t kKeyBlock = 64;

/// A query row's state: out = accumulator / sum once all blocks are done.
struct SoftmaxState {
  float max;
  float sum;
};

struct AttendArgs {
  const float* queries;  // [num_queries, head_dim], scaled
  const float* keys;     // [count, head_dim]
  const float* values;   // row i at values + i * value_stride, value_dim floats
  int64_t count;         // 1 to kKeyBlock
  int64_t head_dim;
  int64_t value_dim;
  int64_t value_stride;
  float* accumulators;   // [num_queries, value_dim]
  SoftmaxState* states;  // [num_queries]
  int64_t num_queries;
};

struct AttendKernels {
  void (*attend)(const AttendArgs& args);
  /// scores[q * kKeyBlock + i] = queries[q] . keys[i], nothing else of `args` is read. Places from
  /// `count` to the next multiple of 16 may be overwritten.
  void (*score)(const AttendArgs& args, float* scores);
  /// `count` elements, bfloat16 or float16, as floats.
  void (*widen)(const void* source, DType dtype, int64_t count, float* out);
};

/// The forms that this processor runs, fastest first; the last one runs anywhere.
std::span<const AttendKernels> attend_kernels();

}  // namespace cadre::cpu
