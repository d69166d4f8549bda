// Grouped GEMM for Hopper (sm_90a), bf16 and fp16: weights and rows come through tensor maps, wgmma
// multiplies, the gate function is applied before h is written. Layouts that a tensor map cannot
// describe go to portable_gemm.h.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backends/cuda/kernels/device_weights.h"
#include "backends/cuda/kernels/gate_function.cuh"
#include "backends/cuda/kernels/tensor_map.h"
#include "cadre/stream.h"
#include "cadre/tensor.h"

namespace cadre::cuda {

/// The boxes that hopper_gemm() loads: make_tensor_map(rows, kHopperRowBox, false) and
/// make_tensor_map(weights, kHopperWeightBox, true).
inline constexpr int kHopperRowBox = 64;
inline constexpr int kHopperWeightBox = 128;

/// out[r] = row[r] W_e^T + bias_e for the rows r of expert e, which are [offsets[e], offsets[e +
/// 1]). Row r is rows[r], or with `pair_of_row` x[pair_of_row[r] / top_k]: then `rows` is not used.
/// With `gated`, W is the gate's and out = gate function of both sums, in float32, rounded once.
struct HopperGemm {
  DType dtype = DType::kBF16;  // of everything but biases: bf16 or fp16
  int64_t num_experts = 0;
  const int32_t* expert_offsets = nullptr;  // device [E + 1]
  int64_t n = 0;                            // columns of out; a multiple of 8
  int64_t k = 0;
  CUtensorMap rows = {};
  const int32_t* pair_of_row = nullptr;  // device
  int64_t top_k = 1;
  const void* x = nullptr;  // can_gather()
  int64_t x_stride = 0;     // elements
  CUtensorMap weights = {};
  CUtensorMap up_weights = {};
  bool gated = false;
  bool apply_gate = false;  // without `gated`: out = activation of the sum
  GateFunction gate = {};
  DType bias_dtype = DType::kF32;
  DeviceVectors bias;  // first.data null: none
  DeviceVectors up_bias;
  void* out = nullptr;     // 16-byte aligned
  int64_t out_stride = 0;  // elements, a multiple of 8
};

void hopper_gemm(const HopperGemm& args, const Stream& stream);

/// Whether rows can be gathered in place: they begin at multiples of 16 bytes.
bool can_gather(const TensorView& hidden_states);

/// sorted[row_of_pair[p]] = hidden_states[p / top_k] for all pairs with a row, for what cannot be
/// gathered in place. hidden_states [T, H] of 2-byte elements, rows strided.
struct GatherRows {
  TensorView hidden_states;
  int64_t top_k = 0;
  const int32_t* row_of_pair = nullptr;  // device
  void* sorted = nullptr;                // [rows, H]
};

void gather_rows(const GatherRows& args, const Stream& stream);

}  // namespace cadre::cuda
