// The writing side of the FP8 grouped GEMM: gate function and quantisation of h, or rows of
// float32. Rows of 16-bit floats are written by hopper_write.cuh.
//
// A thread's sums as in hopper_write.cuh: [4 j + 2 h + i] is row (lane / 4 + 8 h), column (8 j + 2
// (lane % 4) + i) of its warp's 16 rows, so that a row's 128 columns lie in the four lanes of a
// quad.
#pragma once

#include "backends/cuda/kernels/activation_scale.cuh"
#include "backends/cuda/kernels/hopper_fp8_tile.cuh"
#include "backends/cuda/kernels/hopper_write.cuh"

namespace cadre::cuda::hopper {

inline constexpr int kCodesPitch = 128 + 16;  // bytes; 8 rows in different banks

__device__ inline float largest_of_quad(float value) {
  value = ptx::max_or_nan(value, __shfl_xor_sync(~0u, value, 1));
  return ptx::max_or_nan(value, __shfl_xor_sync(~0u, value, 2));
}

// The warp's 16 rows of one group of 128 columns, from h in sums[kFirst ...].
template <int kFirst>
__device__ void write_codes(const Fp8Params& p, const Piece& piece, int warp_row, int32_t column,
                            char* staging, const float (&sums)[128]) {
  const int lane = threadIdx.x % 32;
  float largest[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    largest[i / 2 % 2] = ptx::max_or_nan(largest[i / 2 % 2], fabsf(sums[kFirst + i]));
  }
  const int32_t rows = piece.rows - warp_row;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const ActivationScale scale =
        activation_scale_of_bits(__float_as_uint(largest_of_quad(largest[h])));
    const uint16_t finite = scale.inverse == 0.0f ? 0 : 0xffff;  // else the codes are 0
    const int row = lane / 4 + 8 * h;
    char* to = staging + row * kCodesPitch + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float* v = sums + kFirst + 4 * j + 2 * h;
      const uint16_t codes =
          ptx::pack_e4m3(__fmul_rn(v[0], scale.inverse), __fmul_rn(v[1], scale.inverse));
      *reinterpret_cast<uint16_t*>(to + 8 * j) = codes & finite;
    }
    if (lane % 4 == 0 && row < rows) {
      p.out_scales[column / kFp8Group * p.out_scale_stride + piece.row + warp_row + row] =
          scale.scale;
    }
  }
  __syncwarp();
  char* out = static_cast<char*>(p.out) + (piece.row + warp_row) * p.out_stride + column;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 4 * i + lane / 8;
    const int4 part = *reinterpret_cast<const int4*>(staging + row * kCodesPitch + lane % 8 * 16);
    if (row < rows) *reinterpret_cast<int4*>(out + row * p.out_stride + lane % 8 * 16) = part;
  }
  __syncwarp();
}

// Biases and every gate function, in a rolled loop over sums in shared memory: each thread has its
// own 32 words there, in 4 passes.
template <bool kGated>
__device__ void apply_special(const Fp8Params& p, const Piece& piece, char* staging,
                              float (&sums)[128]) {
  const int lane = threadIdx.x % 32;
  float* own = reinterpret_cast<float*>(staging) + lane;
  const DeviceVector bias = bias_of(p, p.bias, piece.expert);
  const DeviceVector up_bias = bias_of(p, p.up_bias, piece.expert);
#pragma unroll
  for (int pass = 0; pass < (kGated ? 4 : 8); ++pass) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      own[32 * i] = sums[16 * pass + i];
      if (kGated) own[32 * (16 + i)] = sums[64 + 16 * pass + i];
    }
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const int32_t column = piece.column + 8 * (4 * pass + i / 4) + 2 * (lane % 4) + i % 2;
      float value = own[32 * i] + (column < p.n ? bias_at(p, bias, column) : 0.0f);
      if (kGated) {
        const float up_b = column < p.n ? bias_at(p, up_bias, column) : 0.0f;
        value = apply(p.gate, value, own[32 * (16 + i)] + up_b);
      } else {
        value = apply(p.gate, 0.0f, value);
      }
      own[32 * i] = column < p.n ? value : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) sums[16 * pass + i] = own[32 * i];
  }
  __syncwarp();
}

template <bool kGated>
__device__ void write_quantized(const Fp8Params& p, const Piece& piece, int warpgroup,
                                char* staging, float (&sums)[128]) {
  const int warp_row = warpgroup * 64 + static_cast<int>(threadIdx.x / 32 % 4) * 16;
  if (p.special || !kGated) {
    apply_special<kGated>(p, piece, staging, sums);
  } else {
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
      float h[2] = {sums[i], sums[i + 1]};
      swiglu_pair(h, {sums[64 + i], sums[64 + i + 1]});
      sums[i] = h[0];
      sums[i + 1] = h[1];
    }
  }
  write_codes<0>(p, piece, warp_row, piece.column, staging, sums);
  if (!kGated && piece.column + kHalfColumns < p.n) {
    write_codes<64>(p, piece, warp_row, piece.column + kHalfColumns, staging, sums);
  }
}

__device__ inline float4 add(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Four neighbours of a row, of which the first `count` are there.
__device__ inline float4 load_four(const float* from, int32_t count) {
  if (count >= 4) return *reinterpret_cast<const float4*>(from);
  return make_float4(count > 0 ? from[0] : 0, count > 1 ? from[1] : 0, count > 2 ? from[2] : 0, 0);
}
__device__ inline void store_four(float* to, int32_t count, float4 values) {
  if (count >= 4) {
    *reinterpret_cast<float4*>(to) = values;
    return;
  }
  if (count > 0) to[0] = values.x;
  if (count > 1) to[1] = values.y;
  if (count > 2) to[2] = values.z;
}

// What write_floats() adds to comes to L2 while the products run: half a row a thread.
__device__ inline void prefetch_floats(const Fp8Params& p, const Piece& piece, int warpgroup) {
  const int row = warpgroup * 64 + static_cast<int>(threadIdx.x) % 128 / 2;
  const int first = static_cast<int>(threadIdx.x) % 2 * kHalfColumns;
  if (row >= piece.rows) return;
  const auto* from = static_cast<const float*>(p.out) + (piece.row + row) * p.out_stride;
#pragma unroll
  for (int i = 0; i < kHalfColumns; i += 32) {
    if (piece.column + first + i < p.n) ptx::prefetch(from + piece.column + first + i);
  }
}

// Results in float32: 64 columns a pass through the warp's staging, so that whole rows are written.
__device__ inline void write_floats(const Fp8Params& p, const Piece& piece, int warpgroup,
                                    char* staging, const float (&sums)[128]) {
  const int lane = threadIdx.x % 32;
  const int warp_row = warpgroup * 64 + static_cast<int>(threadIdx.x / 32 % 4) * 16;
  const DeviceVector bias = bias_of(p, p.bias, piece.expert);
  auto* out = static_cast<float*>(p.out) + (piece.row + warp_row) * p.out_stride + piece.column;
#pragma unroll
  for (int pass = 0; pass < 4; ++pass) {
    const int32_t column = 64 * pass + lane % 16 * 4;
    const int32_t left = p.n - piece.column - column;
    // Row 2 i + lane / 16 of the warp's, or none.
    const auto count_of = [&](int i) {
      return warp_row + 2 * i + lane / 16 < piece.rows ? left : 0;
    };
    const auto place_of = [&](int i) { return out + (2 * i + lane / 16) * p.out_stride + column; };
    float b[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < left) b[i] = bias_at(p, bias, piece.column + column + i);
    }
    float4 bases[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      bases[i] = make_float4(b[0], b[1], b[2], b[3]);
      if (p.accumulate) bases[i] = add(bases[i], load_four(place_of(i), count_of(i)));
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {  // pairs of columns
      const int row = lane / 4 + i % 2 * 8;
      const int at = i / 2 * 8 + lane % 4 * 2;
      const float* pair = sums + 32 * pass + 2 * i;
      *reinterpret_cast<float2*>(staging + staging_place(row, at / 4) + at % 4 * 4) =
          make_float2(pair[0], pair[1]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const char* from = staging + staging_place(2 * i + lane / 16, lane % 16);
      store_four(place_of(i), count_of(i), add(*reinterpret_cast<const float4*>(from), bases[i]));
    }
    __syncwarp();
  }
}

}  // namespace cadre::cuda::hopper
