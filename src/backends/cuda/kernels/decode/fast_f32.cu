#include "backends/cuda/kernels/decode/fast.cuh"

namespace cadre::cuda {

bool decode_fast_f32(const DecodeArgs& args, const DecodeDevice& device) {
  return launch_fast<float>(args, device);
}

}  // namespace cadre::cuda
