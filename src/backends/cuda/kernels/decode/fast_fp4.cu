#include "backends/cuda/kernels/decode/fast.cuh"

namespace cadre::cuda {

bool decode_fast_fp4(const DecodeArgs& a, const DecodeDevice& device) {
  return launch_fast_mx<Kind::kFp4>(a, device);
}

}  // namespace cadre::cuda
