#include "backends/cuda/dense/attention_few.cuh"
#include "core/check.h"

namespace cadre::cuda {
namespace {

template <typename T, int kDim, bool kFresh>
void run(const AttentionCall& call, const Stream& stream) {
  using S = FewShape<kDim>;
  const int64_t blocks = max_tiles(call, kFewRows) * call.num_kv_heads;
  CADRE_ASSERT(blocks < INT32_MAX);
  const auto kernel = attend_few_kernel<T, kDim, kFresh>;
  allow_shared_memory(kernel, S::kSharedBytes + 1);  // above what needs no leave
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(call.num_splits));
  const dim3 threads(32 * S::kWarps);
  if (call.num_splits == 1 || call.partials != nullptr) {
    launch("attend_few_kernel", kernel, grid, threads, S::kSharedBytes, stream_of(stream),
           dependent_launch(stream), call);
    return;
  }
  CADRE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  launch_cluster("attend_few_kernel", kernel, grid, threads, S::kSharedBytes, stream_of(stream),
                 dim3(1, static_cast<unsigned>(call.num_splits)), call);
}

template <typename T, int kDim>
void run_fresh_or_not(const AttentionCall& call, const Stream& stream) {
  call.is_fresh ? run<T, kDim, true>(call, stream) : run<T, kDim, false>(call, stream);
}

template <typename T>
void run_dim(const AttentionCall& call, const Stream& stream) {
  if (call.head_dim <= 64) return run_fresh_or_not<T, 64>(call, stream);
  if (call.head_dim <= 128) return run_fresh_or_not<T, 128>(call, stream);
  run_fresh_or_not<T, 256>(call, stream);
}

}  // namespace

bool takes_fresh(const AttentionCall& call) {
  const int32_t dim = call.head_dim;
  return (dim == 64 || dim == 128 || dim == 256) && call.group <= kFewRows && fits_wide(call.fresh);
}

void attend_few(const AttentionCall& call, const Stream& stream) {
  if (call.dtype == DType::kBF16) return run_dim<__nv_bfloat16>(call, stream);
  run_dim<__half>(call, stream);
}

}  // namespace cadre::cuda
