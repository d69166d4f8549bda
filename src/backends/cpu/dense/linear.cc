#include "backends/cpu/dense/cpu_dense_ops.h"
#include "backends/cpu/kernels/isa.h"
#include "backends/cpu/kernels/matmul.h"

namespace cadre::cpu {

std::string_view CpuDenseOps::instruction_set() const { return name_of(active_isa()); }

void CpuDenseOps::linear(const TensorView& x, const LinearWeights& weights, MutableTensorView out,
                         Workspace& workspace, const Stream& stream) {
  matmul({x, weights.weight, weights.bias, out, weights.scales, weights.scale_layout,
          weights.activations, weights.input_scale},
         workspace, *stream.threads);
}

size_t CpuDenseOps::linear_workspace_bytes(int64_t num_tokens, int64_t k, DType compute_dtype,
                                           int num_threads) const {
  return matmul_workspace_bytes(num_tokens, k, compute_dtype, num_threads);
}

void CpuDenseOps::linear_heads(const TensorView& x, const TensorView& weight, MutableTensorView out,
                               Workspace& workspace, const Stream& stream) {
  batched_matmul({x, weight, out}, workspace, *stream.threads);
}

size_t CpuDenseOps::linear_heads_workspace_bytes(int64_t num_tokens, int64_t k, DType compute_dtype,
                                                 int num_threads) const {
  return batched_matmul_workspace_bytes(num_tokens, k, compute_dtype, num_threads);
}

DenseOps& dense_ops() {
  static CpuDenseOps ops;
  return ops;
}

}  // namespace cadre::cpu
