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

__device__ inline uint32_t largest_of_quad(uint32_t bits) {
  bits = max(bits, __shfl_xor_sync(~0u, bits, 1));
  return max(bits, __shfl_xor_sync(~0u, bits, 2));
}

// The warp's 16 rows of one group of 128 columns, from h in sums[kFirst ...].
template <int kFirst>
__device__ void write_codes(const Fp8Params& p, const Piece& piece, int warp_row, int32_t column,
                            char* staging, const float (&sums)[128]) {
  const int lane = threadIdx.x % 32;
  uint32_t largest[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    largest[i / 2 % 2] = max(largest[i / 2 % 2], magnitude_bits(sums[kFirst + i]));
  }
  const int32_t rows = piece.rows - warp_row;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const ActivationScale scale = activation_scale_of_bits(largest_of_quad(largest[h]));
    const int row = lane / 4 + 8 * h;
    char* to = staging + row * kCodesPitch + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float* v = sums + kFirst + 4 * j + 2 * h;
      *reinterpret_cast<uint16_t*>(to + 8 * j) =
          ptx::pack_e4m3(scaled_activation(v[0], scale), scaled_activation(v[1], scale));
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
    for (int i = 0; i < 64; ++i) sums[i] = swiglu(sums[i], sums[64 + i]);
  }
  write_codes<0>(p, piece, warp_row, piece.column, staging, sums);
  if (!kGated && piece.column + kHalfColumns < p.n) {
    write_codes<64>(p, piece, warp_row, piece.column + kHalfColumns, staging, sums);
  }
}

// Results of down in float32, with a bias.
__device__ inline void write_floats(const Fp8Params& p, const Piece& piece, int warpgroup,
                                    const float (&sums)[128]) {
  const int lane = threadIdx.x % 32;
  const int warp_row = warpgroup * 64 + static_cast<int>(threadIdx.x / 32 % 4) * 16;
  const DeviceVector bias = bias_of(p, p.bias, piece.expert);
#pragma unroll
  for (int i = 0; i < 128; ++i) {
    const int row = warp_row + lane / 4 + i / 2 % 2 * 8;
    const int32_t column = piece.column + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (row < piece.rows && column < p.n) {
      static_cast<float*>(p.out)[(piece.row + row) * p.out_stride + column] =
          sums[i] + bias_at(p, bias, column);
    }
  }
}

}  // namespace cadre::cuda::hopper
