// Tokens quantised and brought into the order of experts on the way: each is read once and its
// codes are written to every row that is its own.
#pragma once

#include "backends/cuda/kernels/hopper_fp8_gemm.h"
#include "backends/cuda/kernels/routing.h"

namespace cadre::cuda {

/// x [num_tokens, k] f32, bf16 or fp16, rows may be strided; quantised per 128 of k
/// (quant/activations.h). rows.codes and .scales as Fp8Rows of max_rows = num_tokens * top_k rows.
/// Launched as dependent of the plan.
struct QuantizeTokens {
  TensorView x;
  RoutingPlan plan;
  int64_t top_k = 1;
  Fp8Rows rows;
};

void quantize_tokens(const QuantizeTokens& args, const Stream& stream);

}  // namespace cadre::cuda
