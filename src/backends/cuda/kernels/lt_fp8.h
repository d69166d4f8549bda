// The e4m3 product of cuBLASLt, which benches compare with: a scale for each whole matrix, where
// ours have blocks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backends/cuda/device/cublas_lt.h"

namespace cadre::cuda {

/// Puts out = a b^T into a stream; a e4m3 [m, k], b e4m3 [n, k], out bf16 [m, n]. With `fast` sums
/// as the tensor cores add. Not ready when there is no cuBLASLt or it has no such product.
class LtFp8 {
 public:
  LtFp8(int64_t m, int64_t n, int64_t k, void* space, size_t space_bytes, bool fast)
      : space_(space), space_bytes_(space_bytes) {
    lt_ = find_cublas_lt();
    ready_ = lt_ != nullptr && make(m, n, k, fast);
  }

  bool ready() const { return ready_; }
  bool run(const void* a, const void* b, void* out, cudaStream_t stream) const {
    const float one = 1, zero = 0;
    // By columns: out^T = (b^T)^T a^T.
    return lt_->matmul(handle_, desc_, &one, b, left_, a, right_, &zero, out, result_, out, result_,
                       &choice_.algo, space_, space_bytes_, stream) == CUBLAS_STATUS_SUCCESS;
  }

 private:
  bool make(int64_t m, int64_t n, int64_t k, bool fast) {
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const int8_t fast_sums = fast ? 1 : 0;
    const auto layout = [&](cublasLtMatrixLayout_t& to, cudaDataType_t type, int64_t rows,
                            int64_t columns) {
      return lt_->layout_create(&to, type, static_cast<uint64_t>(rows),
                                static_cast<uint64_t>(columns), rows) == CUBLAS_STATUS_SUCCESS;
    };
    bool ok = lt_->create(&handle_) == CUBLAS_STATUS_SUCCESS;
    ok = ok && lt_->desc_create(&desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS;
    ok = ok && lt_->desc_set(desc_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)) ==
                   CUBLAS_STATUS_SUCCESS;
    ok = ok && lt_->desc_set(desc_, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast_sums,
                             sizeof(fast_sums)) == CUBLAS_STATUS_SUCCESS;
    ok = ok && layout(left_, CUDA_R_8F_E4M3, k, n) && layout(right_, CUDA_R_8F_E4M3, k, m) &&
         layout(result_, CUDA_R_16BF, n, m);
    cublasLtMatmulPreference_t preference = nullptr;
    ok = ok && lt_->preference_create(&preference) == CUBLAS_STATUS_SUCCESS;
    ok = ok && lt_->preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                   &space_bytes_, sizeof(space_bytes_)) == CUBLAS_STATUS_SUCCESS;
    int found = 0;
    ok = ok && lt_->get_heuristic(handle_, desc_, left_, right_, result_, result_, preference, 1,
                                  &choice_, &found) == CUBLAS_STATUS_SUCCESS;
    return ok && found > 0;
  }

  const CublasLt* lt_ = nullptr;
  void* space_;
  size_t space_bytes_;
  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t desc_ = nullptr;
  cublasLtMatrixLayout_t left_ = nullptr, right_ = nullptr, result_ = nullptr;
  cublasLtMatmulHeuristicResult_t choice_ = {};
  bool ready_ = false;
};

}  // namespace cadre::cuda
