// A layer's projections as tensor maps see them.
#pragma once

#include "backends/cuda/kernels/device_weights.h"
#include "backends/cuda/kernels/tensor_map.h"

namespace cadre::cuda {

inline MatrixLayout layout_of(const DeviceMatrices& m, int64_t num_experts, DType dtype,
                              int64_t rows, int64_t columns) {
  return {dtype, m.first.data, columns, rows, num_experts, m.first.row_stride, m.expert_stride};
}

inline MatrixLayout gate_layout(const ExpertsConfig& c, DType dtype, const DeviceWeights& w) {
  return layout_of(w.gate, c.num_experts, dtype, c.intermediate_size, c.hidden_size);
}
inline MatrixLayout up_layout(const ExpertsConfig& c, DType dtype, const DeviceWeights& w) {
  return layout_of(w.up, c.num_experts, dtype, c.intermediate_size, c.hidden_size);
}
inline MatrixLayout down_layout(const ExpertsConfig& c, DType dtype, const DeviceWeights& w) {
  return layout_of(w.down, c.num_experts, dtype, c.hidden_size, c.intermediate_size);
}

}  // namespace cadre::cuda
