// The kernels of hopper_fp8_few.h.
#pragma once

#include <cuda.h>

#include "backends/cuda/kernels/decode/decode_kernels.h"
#include "backends/cuda/kernels/hopper_fp8_gemm.h"

namespace cadre::cuda {

/// Most tokens that share one read of an expert's weights; an expert with more is read again, from
/// L2 as a rule.
inline constexpr int kMaxFewTokens = 32;

/// Passed to kernels by value. Of `args`: everything but `h`, `format` and the strides of weights.
struct HopperFp8Few {
  // x_codes [num_tokens, H] and h_codes [pairs, I]: rows fp8_row_stride() apart, scales [rows,
  // groups]. y [pairs, parts, H] float32.
  DecodeArgs args;
  CUtensorMap gate = {};  // make_tensor_map(weights, kHopperWeightBox, true)
  CUtensorMap up = {};
  CUtensorMap down = {};
  ScaleLayout scale_layout;
  int32_t down_blocks = 0;  // of 128 of I in a part of a sum of down; even, or all
  int32_t parts = 1;
  // [1 + pairs]: pieces of work taken, and tiles of h that are there, of each entry of the plan.
  uint32_t* counters = nullptr;
};

/// x to x_codes; clears the counters.
void hopper_fp8_few_quantize(const HopperFp8Few& few, const Stream& stream);
/// From x_codes to y. Needs hopper_fp8_few_fits().
void hopper_fp8_few_products(const HopperFp8Few& few, const Stream& stream);
/// From y to out.
void hopper_fp8_few_combine(const HopperFp8Few& few, const Stream& stream);

/// Whether the plan of so many pairs and experts has room beside the stages.
bool hopper_fp8_few_fits(int64_t pairs, int64_t num_experts);

}  // namespace cadre::cuda
