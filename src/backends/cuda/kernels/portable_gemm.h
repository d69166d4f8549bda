// Grouped GEMM on mma.sync, for sm_80 and up: every layout, stride, alignment and compute dtype.
// The path of GPUs other than Hopper, and of what the Hopper kernels do not take. With one group it
// is a dense GEMM.
#pragma once

#include <cstdint>

#include "backends/cuda/kernels/device_weights.h"
#include "backends/cuda/kernels/gate_function.cuh"
#include "cadre/stream.h"

namespace cadre::cuda {

/// For each group g: out[r] = x[source_of_row(r)] W_g^T + bias_g for its rows r in
/// [offsets[g], offsets[g + 1]). With `up_w` set, W is gate and out = gate_function(gate, up).
struct PortableGemm {
  DType dtype = DType::kBF16;  // of x and W
  int64_t num_groups = 1;
  const int32_t* offsets = nullptr;  // device [num_groups + 1]; null: one group of max_rows rows
  int64_t max_rows = 0;              // bound of the rows of all groups together
  int64_t n = 0;
  int64_t k = 0;
  const void* x = nullptr;
  int64_t x_stride = 0;
  const int32_t* pair_of_row =
      nullptr;  // device; row r reads x[pair_of_row[r] / top_k]; null: x[r]
  int64_t top_k = 1;
  DeviceMatrices w;     // [n, k] of each group; the gate where there is one
  DeviceMatrices up_w;  // first.data null: no gate function
  DType bias_dtype = DType::kF32;
  DeviceVectors bias;
  DeviceVectors up_bias;
  bool apply_gate = false;  // out = gate function; without up_w of `w` alone (no-gate experts)
  GateFunction gate = {};
  void* out = nullptr;  // [rows, n]
  DType out_dtype = DType::kF32;
  int64_t out_stride = 0;
  bool accumulate = false;  // add to out; f32, one group only
};

void portable_gemm(const PortableGemm& args, const Stream& stream);

}  // namespace cadre::cuda
