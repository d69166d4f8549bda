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

/// The boxes that hopper_gemm() loads and stores: make_tensor_map(rows, kHopperRowBox, false),
/// make_tensor_map(weights, kHopperWeightBox, true), make_tensor_map(out, kHopperOutBox, false).
inline constexpr int kHopperRowBox = 64;
inline constexpr int kHopperWeightBox = 128;
inline constexpr int kHopperOutBox = 16;

/// out[r] = rows[r] W_e^T + bias_e for the rows r of expert e, which are [offsets[e], offsets[e +
/// 1]). With `pair_of_row`, row r is x[pair_of_row[r] / top_k]; where there are many, they are
/// first brought into order in `sorted`, which `rows` describes. With `gated`, W is the gate's and
/// out = gate function of both sums, in float32, rounded once.
struct HopperGemm {
  DType dtype = DType::kBF16;  // of everything but biases: bf16 or fp16
  int64_t num_experts = 0;
  // Device [E + 1]. Complete before the kernel ahead of this one in the stream began, unless rows
  // are to be sorted: it is read while that one ends.
  const int32_t* expert_offsets = nullptr;
  uint32_t* counts = nullptr;  // device, hopper_gemm_counts() of them, 0 when the kernel ahead ends
  int64_t n = 0;               // columns of out; a multiple of 8
  int64_t k = 0;
  int64_t max_rows = 0;
  CUtensorMap rows = {};
  const int32_t* pair_of_row = nullptr;  // device
  int64_t top_k = 1;
  const void* x = nullptr;
  int64_t x_stride = 0;    // elements
  void* sorted = nullptr;  // [max_rows, k]
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
  CUtensorMap out_boxes = {};
  // Where hopper_gemm_cuts_k() says so: the last pieces of work are cut along K and their sums meet
  // here. Both null: none is.
  float* partial_sums = nullptr;      // device, kHopperPartialSums of them
  uint32_t* partial_turns = nullptr;  // device, kHopperPartialTurns of them, cleared like `counts`
};

/// A tile of 128 x 256 for each CTA that can run, with a turn for each of its 8 warps that
/// multiply.
inline constexpr int64_t kHopperMaxCtas = 144;
inline constexpr int64_t kHopperPartialSums = kHopperMaxCtas * 128 * 256;
inline constexpr int64_t kHopperPartialTurns = kHopperMaxCtas * 8;

/// Whether a product without a gate, of rows already in order, gains by it: few experts with many
/// rows, so that a call is a few rounds of work over the multiprocessors, each a long one.
constexpr bool hopper_gemm_cuts_k(int64_t max_rows, int64_t num_experts, int64_t k) {
  return num_experts <= 32 && k >= 4096 && max_rows > 128 * num_experts;
}

/// With `sort` for a call that sorts max_rows rows.
constexpr int64_t hopper_gemm_counts(bool sort, int64_t max_rows, int64_t num_experts) {
  constexpr int64_t kTileRows = 128;
  return sort ? 2 + max_rows / kTileRows + num_experts + 1 : 1;
}

void hopper_gemm(const HopperGemm& args, const Stream& stream);

}  // namespace cadre::cuda
