#include "backends/cuda/dense/attention_many.cuh"
#include "core/check.h"

namespace cadre::cuda {
namespace {

template <typename T, int kDim>
void run(const AttentionCall& call, const Stream& stream) {
  using S = ManyShape<kDim>;
  const int64_t blocks = max_tiles(call, kManyRows) * call.num_kv_heads;
  CADRE_ASSERT(blocks < INT32_MAX);
  allow_shared_memory(attend_many_kernel<T, kDim>, S::kSharedBytes);
  launch("attend_many_kernel", attend_many_kernel<T, kDim>, static_cast<unsigned>(blocks),
         S::kThreads, S::kSharedBytes, stream_of(stream), dependent_launch(stream), call);
}

template <typename T>
void run_dim(const AttentionCall& call, const Stream& stream) {
  if (call.head_dim <= 64) return run<T, 64>(call, stream);
  if (call.head_dim <= 128) return run<T, 128>(call, stream);
  run<T, 256>(call, stream);
}

}  // namespace

void attend_many(const AttentionCall& call, const Stream& stream) {
  if (call.dtype == DType::kBF16) return run_dim<__nv_bfloat16>(call, stream);
  run_dim<__half>(call, stream);
}

}  // namespace cadre::cuda
