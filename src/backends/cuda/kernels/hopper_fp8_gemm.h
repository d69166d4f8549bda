// Grouped GEMM for Hopper (sm_90a) on FP8: e4m3 activations with a float32 scale per row and 128 of
// K, e4m3 weights with a scale per block, both multiplied by wgmma. The sums of each 128 of K leave
// the tensor cores, which add with few bits, and are scaled and added in float32. Weights and
// scales are read where they lie, float32 or E8M0.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backends/cuda/kernels/device_weights.h"
#include "backends/cuda/kernels/gate_function.cuh"
#include "backends/cuda/kernels/hopper_gemm.h"
#include "backends/cuda/kernels/tensor_map.h"
#include "cadre/storage_format.h"
#include "cadre/stream.h"
#include "cadre/tensor.h"

namespace cadre::cuda {

/// K under one scale of activations, and columns of a tile: blocks of weight scales have 128
/// columns or all, and a multiple of 128 rows or all.
inline constexpr int64_t kFp8Group = 128;

constexpr bool fits_hopper_fp8_scales(const ScaleLayout& layout) {
  return layout.block_rows % kFp8Group == 0 &&
         (layout.block_cols == 0 || layout.block_cols == kFp8Group);
}

constexpr int64_t fp8_groups(int64_t k) { return (k + kFp8Group - 1) / kFp8Group; }
/// From one group's row scales to the next's.
constexpr int64_t fp8_scale_stride(int64_t rows) { return rows; }
/// From one row of codes to the next.
constexpr int64_t fp8_row_stride(int64_t k) { return fp8_groups(k) * kFp8Group; }

/// Rows of e4m3 codes and their scales.
struct Fp8Rows {
  uint8_t* codes = nullptr;  // [rows, k], rows fp8_row_stride(k) apart, 16-byte aligned
  float* scales =
      nullptr;  // [fp8_groups(k), rows], groups fp8_scale_stride(rows) apart, as aligned
};

/// out[r] = rows[r] W_e^T + bias_e for the rows r of expert e, which are [offsets[e], offsets[e +
/// 1]). With `gated`, W is the gate's and out = gate function of both sums.
struct HopperFp8Gemm {
  int64_t num_experts = 0;
  // Device [E + 1]. Complete before the kernel ahead of this one in the stream began. Null:
  // experts have equal shares of max_rows.
  const int32_t* expert_offsets = nullptr;
  uint32_t* count = nullptr;  // device, one, 0 when this kernel begins to work
  int64_t n = 0;              // columns of out
  int64_t k = 0;
  int64_t max_rows = 0;
  Fp8Rows rows;
  CUtensorMap weights = {};  // make_tensor_map(weights, kHopperWeightBox, true)
  CUtensorMap up_weights = {};
  ScaleLayout scale_layout;
  // Where the scales lie; evenly spaced. Whole aligned words are read: of E8M0, up to 3 bytes
  // beside the scales, which never lie in another page.
  DeviceMatrices weight_scales;
  DeviceMatrices up_scales;
  bool gated = false;
  bool apply_gate = false;  // without `gated`: out = activation of the sum
  GateFunction gate = {};
  DType bias_dtype = DType::kF32;
  DeviceVectors bias;  // first.data null: none
  DeviceVectors up_bias;
  // With a gate function the result is quantised as the rows are, from float32. Else it is rounded
  // to out_dtype: float32, bf16, or fp16; 16-byte aligned rows, of 16-bit floats n in eights.
  Fp8Rows out_rows;
  void* out = nullptr;
  DType out_dtype = DType::kBF16;
  int64_t out_stride = 0;   // elements
  bool accumulate = false;  // float32 results: added to what is there
  // Works beside the kernel ahead in the stream, on what that leaves of the device: neither writes
  // what the other reads, and all that this one reads was complete when that one began.
  bool beside_previous = false;
};

void hopper_fp8_gemm(const HopperFp8Gemm& args, const Stream& stream);

}  // namespace cadre::cuda
