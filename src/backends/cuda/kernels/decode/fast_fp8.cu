#include "backends/cuda/kernels/decode/fast.cuh"

namespace cadre::cuda {

bool decode_fast_fp8(const DecodeArgs& a, const DecodeDevice& device) {
  if (is_one(a) && launch_fast<Fp8Operands, Size::kOne>(a, device)) return true;
  return launch_fast<Fp8Operands, Size::kFew>(a, device);
}

}  // namespace cadre::cuda
