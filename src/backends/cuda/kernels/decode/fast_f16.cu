#include "backends/cuda/kernels/decode/fast_plain.cuh"

namespace cadre::cuda {

bool decode_fast_f16(const DecodeArgs& args, const DecodeDevice& device) {
  return launch_fast_plain<__half>(args, device);
}

}  // namespace cadre::cuda
