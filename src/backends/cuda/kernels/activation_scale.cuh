// Dynamic quantisation of activations on the device, bit for bit that of quant/activations.h.
#pragma once

#include <cstdint>

#include "quant/activations.h"

namespace cadre::cuda {

/// activation_scale() of a group whose largest magnitude has these bits.
__device__ inline ActivationScale activation_scale_of_bits(uint32_t largest) {
  if (largest >= 0x7f800000u) return {__uint_as_float(0x7fc00000u), 0.0f};
  const float amax = fmaxf(__uint_as_float(largest), kActivationFloor);
  return {__fdiv_rn(amax, kMaxE4m3), __fdiv_rn(kMaxE4m3, amax)};
}

__device__ inline uint32_t magnitude_bits(float value) {
  return __float_as_uint(value) & 0x7fffffffu;
}

/// What becomes of a value before it is rounded to e4m3; 0 in a group without a finite scale.
__device__ inline float scaled_activation(float value, const ActivationScale& scale) {
  return scale.inverse == 0.0f ? 0.0f : __fmul_rn(value, scale.inverse);
}

}  // namespace cadre::cuda
