#include "backends/cuda/kernels/decode/fast.cuh"

namespace cadre::cuda {

bool decode_fast_bf16(const DecodeArgs& args, const DecodeDevice& device) {
  return launch_fast<__nv_bfloat16>(args, device);
}

}  // namespace cadre::cuda
