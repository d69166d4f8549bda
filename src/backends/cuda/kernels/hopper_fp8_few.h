// A forward of FP8 experts with e4m3 activations on Hopper for few tokens, bound by reading the
// weights of the active experts. Three launches, chained as dependents: tokens quantised; gate and
// up, gate function, quantisation of h and down in one kernel; the weighted sum.
#pragma once

#include "backends/cuda/kernels/hopper_fp8_experts.h"

namespace cadre::cuda {

/// Whether a call of a layer that fits_hopper_fp8() is one of few tokens: the kernels take it, and
/// it is not slower than hopper_fp8_forward().
bool is_hopper_fp8_few(const ExpertsQuery& query, int64_t num_tokens);

/// Workspace of any call of up to max_tokens tokens that the kernels take.
size_t hopper_fp8_few_bytes(const ExpertsQuery& query, int64_t max_tokens);

/// As hopper_fp8_forward().
void hopper_fp8_few_forward(const ExpertsQuery& query, const DeviceWeights& weights,
                            const HopperFp8Maps& maps, const RoutedTokens& tokens,
                            Workspace& workspace, const Stream& stream);

}  // namespace cadre::cuda
