// The 8192^3 e4m3 product through cuBLASLt, for deepgemm_bench.cu.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "backends/cuda/device/cublas_lt.h"

namespace cadre::cuda {

/// Puts products of `size`^3 into a stream; a and b e4m3 [size, size], K along rows,
/// out bf16. Not ready when there is no cuBLASLt or it has no such product.
class SquareFp8 {
 public:
  SquareFp8(int64_t size, const void* a, const void* b, void* out, void* space, size_t space_bytes,
            bool fast)
      : a_(a), b_(b), out_(out), space_(space), space_bytes_(space_bytes) {
    lt_ = find_cublas_lt();
    if (lt_ == nullptr) return;
    const auto n = static_cast<uint64_t>(size);
    ready_ = make(n, fast);
  }

  bool ready() const { return ready_; }
  bool run(cudaStream_t stream) const {
    const float one = 1, zero = 0;
    return lt_->matmul(handle_, desc_, &one, a_, left_, b_, right_, &zero, out_, result_, out_,
                       result_, &choice_.algo, space_, space_bytes_,
                       stream) == CUBLAS_STATUS_SUCCESS;
  }

 private:
  bool make(uint64_t n, bool fast) {
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const int8_t fast_sums = fast ? 1 : 0;
    const auto ld = static_cast<int64_t>(n);
    bool ok = lt_->create(&handle_) == CUBLAS_STATUS_SUCCESS;
    ok = ok && lt_->desc_create(&desc_, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS;
    ok = ok && lt_->desc_set(desc_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)) ==
                   CUBLAS_STATUS_SUCCESS;
    ok = ok && lt_->desc_set(desc_, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast_sums,
                             sizeof(fast_sums)) == CUBLAS_STATUS_SUCCESS;
    ok = ok && lt_->layout_create(&left_, CUDA_R_8F_E4M3, n, n, ld) == CUBLAS_STATUS_SUCCESS;
    ok = ok && lt_->layout_create(&right_, CUDA_R_8F_E4M3, n, n, ld) == CUBLAS_STATUS_SUCCESS;
    ok = ok && lt_->layout_create(&result_, CUDA_R_16BF, n, n, ld) == CUBLAS_STATUS_SUCCESS;
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
  const void *a_, *b_;
  void *out_, *space_;
  size_t space_bytes_;
  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t desc_ = nullptr;
  cublasLtMatrixLayout_t left_ = nullptr, right_ = nullptr, result_ = nullptr;
  cublasLtMatmulHeuristicResult_t choice_ = {};
  bool ready_ = false;
};

}  // namespace cadre::cuda
