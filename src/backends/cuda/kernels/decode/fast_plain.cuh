// The fast kernels of weights in the compute dtype.
#pragma once

#include "backends/cuda/kernels/decode/fast.cuh"

namespace cadre::cuda {

template <typename T>
bool launch_fast_plain(const DecodeArgs& a, const DecodeDevice& device) {
  using Operands = PlainOperands<T>;
  if (is_one(a) && launch_fast<Operands, Size::kOne>(a, device)) return true;
  if (a.num_tokens > kSmallTokens && launch_fast<Operands, Size::kMany>(a, device)) return true;
  return launch_fast<Operands, Size::kFew>(a, device) ||
         launch_fast<Operands, Size::kLean, 1>(a, device);
}

}  // namespace cadre::cuda
