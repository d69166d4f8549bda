// One token's activations in shared memory as a whole, as products take them: every warp reads them
// there, so nothing of them goes through the rings.
#pragma once

#include "backends/cuda/kernels/decode/operands.cuh"
#include "backends/cuda/kernels/decode/plan.cuh"
#include "backends/cuda/kernels/decode/stream.cuh"
#include "backends/cuda/kernels/decode/values.cuh"
#include "quant/activations.h"

namespace cadre::cuda {

/// k up to whole chunks.
template <typename Shape>
__host__ __device__ constexpr int resident_k(int k) {
  return (k + Shape::kChunk - 1) / Shape::kChunk * Shape::kChunk;
}

/// 0 where activations go through the rings.
template <typename Shape>
__host__ __device__ constexpr size_t resident_bytes(int rows, int k) {
  if (!Shape::kIsResident) return 0;
  const int each = resident_k<Shape>(k);
  return size_t(rows) * (each + each / kFp8Group * 4);
}

#ifdef __CUDACC__

/// Where a row's codes and scales are in `memory`, resident_bytes() long.
template <typename Shape>
__device__ TokenRows resident_rows(char* memory, int rows, int k) {
  const int each = resident_k<Shape>(k);
  return {memory, each, reinterpret_cast<const float*>(memory + rows * each), each / kFp8Group};
}

/// activation_scale() of quant/activations.h from the bits of the largest magnitude.
__device__ inline ActivationScale scale_of_bits(uint32_t largest) {
  if (largest >= 0x7f800000u) return {__uint_as_float(0x7fc00000u), 0};
  const float amax = fmaxf(__uint_as_float(largest), kActivationFloor);
  return {__fdiv_rn(amax, kMaxE4m3), __fdiv_rn(kMaxE4m3, amax)};
}

/// Codes and scales of all rows, by all threads of the block; visible after the next barrier.
/// read(row, i, float (&)[4]) gives numbers i to i + 3, zeros beyond k.
template <typename Shape, typename Read>
__device__ void quantize_resident(const TokenRows& to, int rows, int k, const Read& read) {
  constexpr int kAtOnce = 4;
  const int groups = resident_k<Shape>(k) / kFp8Group;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = threadIdx.x / 32; first < rows * groups; first += kAtOnce * kStreamWarps) {
    float values[kAtOnce][4];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int item = first + j * kStreamWarps;
      if (item < rows * groups) {
        read(item / groups, item % groups * kFp8Group + 4 * lane, values[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int item = first + j * kStreamWarps;
      if (item >= rows * groups) break;
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        largest = max(largest, __float_as_uint(values[j][i]) & 0x7fffffffu);
      }
      const ActivationScale scale = scale_of_bits(__reduce_max_sync(~0u, largest));
      uint32_t codes = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scaled = scale.inverse == 0 ? 0.0f : __fmul_rn(values[j][i], scale.inverse);
        codes |= to_e4m3(scaled) << 8 * i;
      }
      char* const row = const_cast<char*>(to.data) + item / groups * to.stride;
      *reinterpret_cast<uint32_t*>(row + item % groups * kFp8Group + 4 * lane) = codes;
      if (lane == 0) {
        const_cast<float*>(to.scales)[item / groups * to.scale_stride + item % groups] =
            scale.scale;
      }
    }
  }
}

/// The one token of the call.
template <typename Shape>
__device__ void place_x(const DecodeArgs& a, const TokenRows& to) {
  quantize_resident<Shape>(to, 1, a.hidden, [&](int /*row*/, int i, float(&values)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      values[j] = i + j < a.hidden ? read_number<void>(a.x, i + j, a.compute_dtype) : 0;
    }
  });
}

/// h of its slots. Rows of slots without an expert are never read: what lies there is not used.
template <typename Shape>
__device__ void place_h(const DecodeArgs& a, const TokenRows& to) {
  quantize_resident<Shape>(to, a.top_k, a.intermediate, [&](int row, int i, float(&values)[4]) {
    const float* const h = static_cast<const float*>(a.h) + row * a.h_stride + i;
    float4 four = {};
    if (i < a.intermediate) four = __ldcg(reinterpret_cast<const float4*>(h));
    values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
  });
}

#endif

}  // namespace cadre::cuda
