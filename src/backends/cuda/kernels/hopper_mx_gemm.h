// Grouped GEMM for Hopper (sm_90a) with FP4 and MXFP8 weights and bf16 activations: weights are
// read where they lie and decoded, exactly, on their way from shared memory to the tensor cores,
// whose A operand they are. A thread decodes what ldmatrix gives it, which are not the k that a
// product of the tensor cores has next to each other: rows have their columns in the order of
// mx_place().
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backends/cuda/kernels/device_weights.h"
#include "backends/cuda/kernels/gate_function.cuh"
#include "cadre/storage_format.h"
#include "cadre/stream.h"
#include "cadre/tensor.h"

#ifdef __CUDACC__
#define CADRE_HOST_DEVICE __host__ __device__
#else
#define CADRE_HOST_DEVICE
#endif

namespace cadre::cuda {

/// Where column k of a row lies: a permutation of each 32.
/// FP4: a thread has 8 neighbouring nibbles, k = 8 q + i, and takes i and i + 4 at once.
/// MXFP8 and FP8: it has 4 neighbouring bytes, k = 4 q + i, of each 16.
CADRE_HOST_DEVICE constexpr int64_t mx_place(bool is_fp4, int64_t k) {
  if (is_fp4) {
    const int64_t q = k / 8 % 4;
    const int64_t i = k % 8;
    return k / 32 * 32 + i % 4 * 8 + 2 * q + i / 4;
  }
  const int64_t q = k / 4 % 4;
  const int64_t i = k % 4;
  return k / 16 * 16 + i / 2 * 8 + 2 * q + i % 2;
}

/// Whether the kernels take a layer: compute capability 9.0; FP4 or MXFP8 weights with bf16
/// activations, or FP8 weights with dynamic ones and blocks of 128 columns or all; H and I in
/// multiples of 64, K next to each other, evenly spaced experts, 16-byte aligned rows, MX scales in
/// pairs of bytes. Looks at addresses and strides only.
bool fits_hopper_mx(const ExpertsQuery& query, const DeviceWeights& weights,
                    int compute_capability);

/// The tensor map of a projection [n, k].
CUtensorMap make_mx_map(StorageFormat format, const DeviceMatrices& weights, int64_t num_experts,
                        int64_t n, int64_t k);

/// out[r] = rows[r] W_e^T + bias_e for the rows r of expert e, which are [offsets[e], offsets[e +
/// 1]). With `gated`, W is the gate's and out = gate function of both sums, rounded once.
struct HopperMxGemm {
  StorageFormat format = StorageFormat::kFp4;
  int64_t num_experts = 0;
  const int32_t* expert_offsets = nullptr;  // device [E + 1]
  int64_t n = 0;
  int64_t k = 0;
  int64_t max_rows = 0;
  // [max_rows, k], columns in the order of mx_place(): bf16, or with FP8 codes in fp16.
  const void* rows = nullptr;
  // With FP8, which has them: [groups of 128 of k][row_scale_stride], of which max_rows + 64 may be
  // read.
  const float* row_scales = nullptr;
  int64_t row_scale_stride = 0;
  CUtensorMap weights = {};  // make_mx_map()
  CUtensorMap up_weights = {};
  ScaleLayout layout;     // of FP8 weights
  DeviceMatrices scales;  // where the scales lie
  DeviceMatrices up_scales;
  bool gated = false;
  bool apply_gate = false;  // without `gated`: out = activation of the sum
  GateFunction gate = {};
  DType bias_dtype = DType::kF32;
  DeviceVectors bias;  // first.data null: none
  DeviceVectors up_bias;
  void* out = nullptr;             // [max_rows, n], 16-byte aligned
  DType out_dtype = DType::kBF16;  // with FP8 also fp16 or float32
  bool out_placed = false;         // its columns in the order of mx_place()
};

void hopper_mx_gemm(const HopperMxGemm& args, const Stream& stream);

/// out[r] = x[pair_of_row[r] / top_k] with columns in the order of mx_place(), for the rows
/// [0, *num_rows) of at most max_rows. x [num_tokens, k] bf16, rows may be strided; out contiguous.
void place_mx_rows(StorageFormat format, const TensorView& x, const int32_t* pair_of_row,
                   int64_t top_k, const int32_t* num_rows, int64_t max_rows, void* out,
                   const Stream& stream);

}  // namespace cadre::cuda
