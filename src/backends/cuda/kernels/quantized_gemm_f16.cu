#include "backends/cuda/kernels/quantized_gemm_kernel.cuh"

namespace cadre::cuda::portable {

void run_quantized_f16(const QuantizedGemm& args, cudaStream_t stream) {
  run_quantized<__half>(args, stream);
}

}  // namespace cadre::cuda::portable
