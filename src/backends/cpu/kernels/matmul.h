// The CPU's matrix products: one set of kernels for experts and dense layers, so that all share one
// order of summation.
//
// Every output is summed as docs/numerics.md states: chunks of 128 in k, each from zero in
// ascending pairs by one accumulator, added to a running float32 sum. The result of a row does not
// depend on how many rows are computed with it, nor on the number of threads. Weights are read in
// place, in any strides; nothing is allocated.
#pragma once

#include <cstdint>

#include "cadre/storage_format.h"
#include "cadre/tensor.h"
#include "cadre/thread_pool.h"
#include "cadre/workspace.h"

namespace cadre::cpu {

/// out[t, n] = sum_k x[t, k] * w[n, k] + bias[n], the sum in float32, rounded once to out's dtype.
struct MatmulArgs {
  TensorView x;       // [T, K] float32, bfloat16 or float16: the compute dtype; last stride 1
  TensorView weight;  // [N, K] float32, bfloat16 or float16, any strides; rounded to the compute
                      // dtype when wider
  TensorView bias;    // [N] float32, bfloat16 or float16; absent = none
  MutableTensorView out;  // [T, N] float32 or the compute dtype; last stride 1
  // A quantised weight: float8_e4m3 [N, K], or int8 [N, ceil(K / 2)] of two e2m1 each, and what
  // LinearWeights (dense/dense_ops.h) says of it.
  TensorView scales = {};
  ScaleLayout scale_layout = {};
  ActivationScheme activations = ActivationScheme::kNone;
  float input_scale = 0;
};

void matmul(const MatmulArgs& args, Workspace& workspace, ThreadPool& threads);

/// What matmul takes from the workspace for up to `num_rows` rows.
size_t matmul_workspace_bytes(int64_t num_rows, int64_t k, DType compute_dtype, int num_threads);

/// The same for many small matrices, each with rows of its own: out[t, b, n] = sum_k x[t, b, k] *
/// w[b, n, k].
struct BatchedMatmulArgs {
  TensorView x;           // [T, B, K], last stride 1
  TensorView weight;      // [B, N, K], any strides
  MutableTensorView out;  // [T, B, N], last stride 1
};

void batched_matmul(const BatchedMatmulArgs& args, Workspace& workspace, ThreadPool& threads);

size_t batched_matmul_workspace_bytes(int64_t num_rows, int64_t k, DType compute_dtype,
                                      int num_threads);

}  // namespace cadre::cpu
