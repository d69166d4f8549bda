#include "backends/cuda/kernels/portable_gemm_kernel.cuh"

namespace cadre::cuda::portable {

void run_f32(const Problem& problem, bool tall, cudaStream_t stream) {
  run<float>(problem, tall, stream);
}

}  // namespace cadre::cuda::portable
