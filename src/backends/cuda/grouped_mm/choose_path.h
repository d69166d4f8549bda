// Which kernels of grouped_mm run a layer.
#pragma once

#include "backends/cuda/kernels/device_weights.h"

namespace cadre::cuda {

enum class GroupedPath {
  kHopper,    // kernels/hopper_gemm.h
  kHopperMx,  // kernels/hopper_mx_gemm.h: quantised weights
  kPortable,  // kernels/portable_gemm.h, quantized_gemm.h: every format, layout, dtype and GPU
};

/// Hopper kernels need compute capability 9.0, bf16 or fp16, H and I in multiples of 8, and
/// projections with K next to each other, evenly spaced experts and 16-byte aligned rows. Looks at
/// addresses and strides only.
GroupedPath choose_path(const ExpertsConfig& config, DType dtype, const DeviceWeights& weights,
                        int compute_capability);

}  // namespace cadre::cuda
