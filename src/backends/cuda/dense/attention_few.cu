#include "backends/cuda/dense/attention_few.cuh"
#include "core/check.h"

namespace cadre::cuda {
namespace {

template <typename T, int kDim>
void run(const AttentionCall& call, const Stream& stream) {
  using S = FewShape<kDim>;
  const int64_t blocks = max_tiles(call, kFewRows) * call.num_kv_heads;
  CADRE_ASSERT(blocks < INT32_MAX);
  const auto kernel = attend_few_kernel<T, kDim>;
  allow_shared_memory(kernel, S::kSharedBytes + 1);  // above what needs no leave
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(call.num_splits));
  config.blockDim = dim3(32 * S::kWarps);
  config.dynamicSmemBytes = S::kSharedBytes;
  config.stream = stream_of(stream);
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (dependent_launch(stream) == Launch::kDependent) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (call.num_splits > 1 && call.partials == nullptr) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {1, static_cast<unsigned>(call.num_splits), 1};
    if (call.num_splits > 8) {
      CADRE_CUDA_CHECK(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    }
  }
  check(cudaLaunchKernelEx(&config, kernel, call), "attend_few_kernel", __FILE__, __LINE__);
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
