#include "backends/cuda/dense/attention_few.cuh"
#include "core/check.h"

namespace cadre::cuda {
namespace {

template <typename T, int kDim>
void run(const AttentionCall& call, const Stream& stream) {
  using S = FewShape<kDim>;
  static_assert(S::kSharedBytes >= S::kWarps * kFewRows * S::kPitch * sizeof(float));
  const int64_t blocks = max_tiles(call, kFewRows) * call.num_kv_heads;
  CADRE_ASSERT(blocks < INT32_MAX);
  allow_shared_memory(attend_few_kernel<T, kDim>, S::kSharedBytes);
  launch("attend_few_kernel", attend_few_kernel<T, kDim>,
         dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(call.num_splits)),
         32 * S::kWarps, S::kSharedBytes, stream_of(stream), dependent_launch(stream), call);
}

template <typename T>
void run_dim(const AttentionCall& call, const Stream& stream) {
  if (call.head_dim <= 64) return run<T, 64>(call, stream);
  if (call.head_dim <= 128) return run<T, 128>(call, stream);
  run<T, 256>(call, stream);
}

}  // namespace

void attend_few(const AttentionCall& call, const Stream& stream) {
  if (call.dtype == DType::kBF16) return run_dim<__nv_bfloat16>(call, stream);
  run_dim<__half>(call, stream);
}

}  // namespace cadre::cuda
