// Rows of bfloat16 or float16 as float16 beside MX weights (mx.cuh): times a power of two that
// brings their largest finite number near the top of its range (FP4, whose weights are 2^-14 times
// what they stand for) or near one (MXFP8), so that nothing above 2^-25 of that number is lost.
// Infinity and NaN stay what they are.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "backends/cuda/kernels/decode/shapes.h"
#include "cadre/dtype.h"

namespace cadre::cuda {

#ifdef __CUDACC__

/// Times the row gives what the products take; times their sums gives what the row would have
/// given.
struct HalfScale {
  float of_row;
  float of_sums;
};

/// Two numbers of a row.
__device__ inline float2 floats_of(uint32_t two, bool is_f16) {
  if (is_f16) return __half22float2(*reinterpret_cast<const __half2*>(&two));
  return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
}

/// The largest magnitude of a row of `pieces` times 8 numbers, finite ones alone, as bits. By one
/// warp; piece(i) reads 16 bytes.
template <typename Piece>
__device__ uint32_t largest_of_row(int pieces, bool is_f16, const Piece& piece) {
  const uint32_t infinity = is_f16 ? 0x7c00u : 0x7f80u;
  uint32_t largest = 0;  // two
  const auto take = [&](bool finite_alone) {
    constexpr int kAtOnce = 4;
    for (int first = threadIdx.x % 32; first < pieces; first += kAtOnce * 32) {
      uint4 values[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        values[j] = {};
        if (first + j * 32 < pieces) values[j] = piece(first + j * 32);
      }
#pragma unroll
      for (int j = 0; j < 4 * kAtOnce; ++j) {
        const uint4& v = values[j / 4];
        uint32_t two = (j % 4 == 0 ? v.x : j % 4 == 1 ? v.y : j % 4 == 2 ? v.z : v.w) & 0x7fff7fffu;
        if (finite_alone) {
          if ((two & 0xffffu) >= infinity) two &= 0xffff0000u;
          if (two >> 16 >= infinity) two &= 0xffffu;
        }
        largest = __vmaxu2(largest, two);
      }
    }
    largest = __reduce_max_sync(~0u, max(largest & 0xffffu, largest >> 16));
  };
  take(false);
  if (largest >= infinity) {
    largest = 0;
    take(true);
  }
  return largest;
}

template <Kind kKind>
__device__ HalfScale half_scale(uint32_t largest, bool is_f16) {
  constexpr uint32_t kTop = kKind == Kind::kFp4 ? 127 + 14 : 128;
  constexpr uint32_t kBack = kKind == Kind::kFp4 ? 0 : 1;
  // Of exponents for which both powers are normal numbers; rows below keep fewer bits.
  constexpr uint32_t kLeast = kKind == Kind::kFp4 ? 14 : 2;
  const uint32_t exponent = max(__float_as_uint(floats_of(largest, is_f16).x) >> 23, kLeast);
  return {__uint_as_float((kTop + 127 - exponent) << 23),
          __uint_as_float((exponent - kBack) << 23)};
}

/// Piece `piece` of 8 numbers, at its place in the row of float16 at `to`.
template <Kind kKind>
__device__ void place_piece(char* to, int piece, const uint4& from, float scale, bool is_f16) {
  float v[8];
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = floats_of(words[i], is_f16);
    v[2 * i] = two.x * scale;
    v[2 * i + 1] = two.y * scale;
  }
  const auto pair = [&](int a, int b) {
    const __half2 two = __floats2half2_rn(v[a], v[b]);
    return *reinterpret_cast<const uint32_t*>(&two);
  };
  if constexpr (kKind == Kind::kFp4) {  // as fp4_halves() takes nibbles
    *reinterpret_cast<uint4*>(to + piece * 16) = {pair(0, 4), pair(2, 6), pair(1, 5), pair(3, 7)};
  } else {  // a lane has four neighbours of each 16
    const int q = piece % 4;
    char* const at = to + piece / 4 * 64 + q % 2 * 32 + q / 2 * 8;
    *reinterpret_cast<uint2*>(at) = {pair(0, 1), pair(2, 3)};
    *reinterpret_cast<uint2*>(at + 16) = {pair(4, 5), pair(6, 7)};
  }
}

/// Part `part` of `parts` of a row, by one warp: pieces of 8 numbers from piece(i) to their places
/// in the row `to`, where piece(i) may read; zeros from k to padded_k.
template <Kind kKind, typename Piece>
__device__ void place_half_row(int k, int padded_k, float scale, bool is_f16, char* to, int part,
                               int parts, const Piece& piece) {
  const int lane = threadIdx.x % 32;
#pragma unroll 2
  for (int first = part * 32; first < padded_k / 8; first += 32 * parts) {
    const int i = first + lane;
    uint4 value = {};
    if (i < k / 8) value = piece(i);
    __syncwarp();  // all lanes have read
    if (i < padded_k / 8) place_piece<kKind>(to, i, value, scale, is_f16);
  }
}

#endif

}  // namespace cadre::cuda
