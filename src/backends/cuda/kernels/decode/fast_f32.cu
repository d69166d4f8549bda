#include "backends/cuda/kernels/decode/fast_plain.cuh"

namespace cadre::cuda {

bool decode_fast_f32(const DecodeArgs& args, const DecodeDevice& device) {
  return launch_fast_plain<float>(args, device);
}

}  // namespace cadre::cuda
