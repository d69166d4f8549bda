// A fresh head in the registers of a few lanes.
#pragma once

#include "backends/cuda/dense/finish.h"
#include "backends/cuda/dense/values.cuh"

namespace cadre::cuda {

__device__ inline float clipped(const FinishArgs& args, float x) {
  if (!args.clips) return x;
  return x < -args.limit ? -args.limit : (x > args.limit ? args.limit : x);  // keeps NaN
}

/// Norm, clip and rotation of a 16-bit head of 8 * kLanes elements, all of which rotate or none:
/// kLanes lanes have eight elements each. All lanes of a warp call it together.
template <int kLanes>
__device__ inline void finish_eight(const FinishArgs& args, const HeadArgs& part, int64_t token,
                                    int64_t head, int lane, float (&x)[8]) {
  load_eight(part.x, args.dtype, (token * part.heads + head) * (8 * kLanes) + 8 * lane, x);
  float cosine[8];
  float sine[8];
  if (part.rotates) {
    const int64_t angle = token * args.half + 8 * (lane % (kLanes / 2));
    load_eight(args.cos, DType::kF32, angle, cosine);
    load_eight(args.sin, DType::kF32, angle, sine);
  }
  float factor = 0;
  float weight[8];
  if (part.weight != nullptr) {
    load_eight(part.weight, part.weight_dtype, head * part.weight_stride + 8 * lane, weight);
#pragma unroll
    for (int j = 0; j < 8; ++j) factor += x[j] * x[j];
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) factor += __shfl_xor_sync(~0u, factor, step);
  factor = 1.0f / sqrtf(factor / (8 * kLanes) + args.eps);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (part.weight != nullptr) x[j] *= factor * weight[j];
    x[j] = clipped(args, x[j]);
    const float other = __shfl_xor_sync(~0u, x[j], kLanes / 2);
    if (part.rotates) x[j] = x[j] * cosine[j] + (lane < kLanes / 2 ? -other : other) * sine[j];
  }
}

}  // namespace cadre::cuda
