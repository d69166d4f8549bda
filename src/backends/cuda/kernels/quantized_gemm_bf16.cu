#include "backends/cuda/kernels/quantized_gemm_kernel.cuh"

namespace cadre::cuda::portable {

void run_quantized_bf16(const QuantizedGemm& args, cudaStream_t stream) {
  run_quantized<__nv_bfloat16>(args, stream);
}

}  // namespace cadre::cuda::portable
