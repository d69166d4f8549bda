// A forward of FP8 experts with e4m3 activations on Hopper, from routed ids to the combined output:
// the plan, tokens quantised and sorted, gate and up with the gate function and the quantisation of
// h in one product, down, the weighted sum.
#pragma once

#include "backends/cuda/kernels/device_weights.h"
#include "backends/cuda/kernels/hopper_fp8_gemm.h"
#include "cadre/workspace.h"

namespace cadre::cuda {

/// Whether the kernels take a layer: compute capability 9.0, FP8 weights with dynamic activations,
/// scales per matrix or in blocks of 128 (or a multiple) x 128, H a multiple of 8, projections with
/// K next to each other, evenly spaced experts and 16-byte aligned rows. Looks at addresses and
/// strides only.
bool fits_hopper_fp8(const ExpertsQuery& query, const DeviceWeights& weights,
                     int compute_capability);

struct HopperFp8Maps {
  CUtensorMap gate = {};
  CUtensorMap up = {};
  CUtensorMap down = {};
};

HopperFp8Maps make_hopper_fp8_maps(const ExpertsQuery& query, const DeviceWeights& weights);

/// Workspace of a forward of up to max_tokens tokens; calls with more tokens than fit 4 GiB between
/// the products run in chunks.
size_t hopper_fp8_bytes(const ExpertsQuery& query, int64_t max_tokens);

void hopper_fp8_forward(const ExpertsQuery& query, const DeviceWeights& weights,
                        const HopperFp8Maps& maps, const RoutedTokens& tokens, Workspace& workspace,
                        const Stream& stream);

/// The products of a forward, for benchmarks: what hopper_fp8_forward() runs on sorted rows.
HopperFp8Gemm hopper_fp8_up(const ExpertsQuery& query, const DeviceWeights& weights,
                            const HopperFp8Maps& maps);
HopperFp8Gemm hopper_fp8_down(const ExpertsQuery& query, const DeviceWeights& weights,
                              const HopperFp8Maps& maps);

}  // namespace cadre::cuda
