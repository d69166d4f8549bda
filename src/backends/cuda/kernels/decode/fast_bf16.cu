#include "backends/cuda/kernels/decode/fast_plain.cuh"

namespace cadre::cuda {

bool decode_fast_bf16(const DecodeArgs& args, const DecodeDevice& device) {
  return launch_fast_plain<__nv_bfloat16>(args, device);
}

}  // namespace cadre::cuda
