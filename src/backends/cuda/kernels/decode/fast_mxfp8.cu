#include "backends/cuda/kernels/decode/fast.cuh"

namespace cadre::cuda {

bool decode_fast_mxfp8(const DecodeArgs& a, const DecodeDevice& device) {
  return launch_fast_mx<Kind::kMxFp8>(a, device);
}

}  // namespace cadre::cuda
