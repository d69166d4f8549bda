#include "backends/cuda/kernels/portable_gemm_kernel.cuh"

namespace cadre::cuda::portable {

void run_f16(const Problem& problem, bool tall, cudaStream_t stream) {
  run<__half>(problem, tall, stream);
}

}  // namespace cadre::cuda::portable
