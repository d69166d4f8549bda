#include "backends/cuda/kernels/decode/fast.cuh"

namespace cadre::cuda {

bool decode_fast_f16(const DecodeArgs& args, const DecodeDevice& device) {
  return launch_fast<__half>(args, device);
}

}  // namespace cadre::cuda
