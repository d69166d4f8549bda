// Dynamic quantisation of activations, the same on every backend and device: e4m3, one float32
// scale per token and group of K (docs/numerics.md).
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "quant/float8.h"

namespace cadre {

/// k under one scale before a product with FP8 weights, and with FP4 weights.
inline constexpr int64_t kActivationGroup = 128;
inline constexpr int64_t kFp4ActivationGroup = 32;

/// The least magnitude that a group's largest value counts as: a group of zeros gives zeros.
inline constexpr float kActivationFloor = 1e-10f;

/// value = code * scale; code = e4m3(value * inverse).
struct ActivationScale {
  float scale;
  float inverse;
};

/// Of a group whose largest magnitude is `amax`: scale = amax / 448, inverse = 448 / amax, each
/// rounded once. A group that holds a NaN or an infinity (`amax` is then one of them: take the
/// maximum over the bits without sign) has the scale NaN and the inverse 0, its codes are 0: all
/// results of that token are NaN, those of others are not touched.
inline ActivationScale activation_scale(float amax) {
  if (std::bit_cast<uint32_t>(amax) >= 0x7f800000u) {
    return {std::numeric_limits<float>::quiet_NaN(), 0};
  }
  const float floored = amax < kActivationFloor ? kActivationFloor : amax;
  return {floored / kMaxE4m3, kMaxE4m3 / floored};
}

/// One row: codes [k], scales [ceil(k / group)]; a last group need not be full.
inline void quantize_activations(const float* x, int64_t k, int64_t group, uint8_t* codes,
                                 float* scales) {
  for (int64_t begin = 0; begin < k; begin += group) {
    const int64_t end = begin + group < k ? begin + group : k;
    uint32_t largest = 0;
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t bits = std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
      largest = bits > largest ? bits : largest;
    }
    const ActivationScale scale = activation_scale(std::bit_cast<float>(largest));
    scales[begin / group] = scale.scale;
    for (int64_t i = begin; i < end; ++i) {
      codes[i] = scale.inverse == 0 ? uint8_t{0} : float_to_e4m3(x[i] * scale.inverse);
    }
  }
}

/// The same with one given scale for all of the row (static activations): code = e4m3(x / scale),
/// the quotient rounded once. NaN stays NaN, infinity becomes the largest value.
inline void quantize_activations(const float* x, int64_t k, float scale, uint8_t* codes) {
  for (int64_t i = 0; i < k; ++i) codes[i] = float_to_e4m3(x[i] / scale);
}

}  // namespace cadre
