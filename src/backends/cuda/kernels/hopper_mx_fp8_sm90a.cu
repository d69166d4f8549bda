#include "backends/cuda/kernels/hopper_mx_kernel.cuh"

namespace cadre::cuda::mx {

void run_fp8(const HopperMxGemm& args, const Stream& stream) {
  launch_format<hopper::Fp8Weights>(args, stream);
}

}  // namespace cadre::cuda::mx
