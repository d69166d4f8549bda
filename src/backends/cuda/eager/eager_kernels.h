// What `eager` needs besides products: rows gathered, the gate function, a bias.
#pragma once

#include <cstdint>

#include "backends/cuda/kernels/device_weights.h"
#include "backends/cuda/kernels/gate_function.cuh"
#include "cadre/stream.h"
#include "cadre/tensor.h"

namespace cadre::cuda {

/// A bias of one expert; data null: none.
struct Bias {
  DeviceVector vector;
  DType dtype = DType::kF32;
};

/// out[r] = x[pair_of_row[r] / top_k] for `rows` rows. x [num_tokens, width], rows may be strided;
/// out contiguous, of the same dtype.
void gather_rows_of_pairs(const TensorView& x, const int32_t* pair_of_row, int64_t rows,
                          int64_t top_k, void* out, const Stream& stream);

/// h = gate_function(gate + gate_bias, up + up_bias), rounded once. gate and up [rows, width] f32,
/// h in `dtype`; all contiguous. `gate` is not read without a gate.
void apply_gate(const GateFunction& function, const float* gate, const Bias& gate_bias,
                const float* up, const Bias& up_bias, int64_t rows, int64_t width, void* h,
                DType dtype, const Stream& stream);

/// y [rows, width] f32, contiguous, += bias
void add_to_rows(float* y, const Bias& bias, int64_t rows, int64_t width, const Stream& stream);

}  // namespace cadre::cuda
