// The writing side of the kernel of hopper_mx_kernel.cuh: biases, gate functions, results.
#pragma once

#include "backends/cuda/kernels/hopper_mx_tile.cuh"

namespace cadre::cuda {
namespace mx {

__device__ inline void synchronize_warpgroup(int warpgroup) {
  if (warpgroup == 0) {
    asm volatile("bar.sync 1, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 2, 128;" ::: "memory");
  }
}

// 16-byte chunk of a staged row of 64 columns.
__device__ inline int staged(int row, int chunk) {
  return row * 128 + ((chunk ^ (row / 2 % 8)) << 4);
}

__device__ inline float bias_at(const Params& p, const DeviceVectors& biases, int32_t expert,
                                int32_t row) {
  if (biases.first.data == nullptr || row >= p.n) return 0;
  const DeviceVector v =
      p.bias_dtype == DType::kF32 ? biases.expert<float>(expert) : biases.expert<uint16_t>(expert);
  const int64_t at = row * v.stride;
  if (p.bias_dtype == DType::kF32) return static_cast<const float*>(v.data)[at];
  if (p.bias_dtype == DType::kBF16) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(v.data)[at]);
  }
  return __half2float(static_cast<const __half*>(v.data)[at]);
}

// Biases and every gate function, in a rolled loop over sums in shared memory: each thread has
// kColumns / 4 words there, which hold a quarter of its sums.
template <bool kGated, int kColumns>
__device__ void apply_special(const Params& p, const float (&bias)[2], const float (&up_bias)[2],
                              float* staging, float (&sums)[kColumns / 2],
                              float (&up_sums)[kColumns / 2]) {
  constexpr int kCount = kColumns / 8;  // of either kind at a time
  float* own = staging + threadIdx.x % 128;
  float* up = own + 128 * kCount;
#pragma unroll
  for (int first = 0; first < kColumns / 2; first += kCount) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      own[128 * i] = sums[first + i];
      up[128 * i] = up_sums[first + i];
    }
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
      const int h = (first + i) / 2 % 2;
      const float value = own[128 * i] + (h == 0 ? bias[0] : bias[1]);
      const float up_value = up[128 * i] + (h == 0 ? up_bias[0] : up_bias[1]);
      if (kGated) {
        own[128 * i] = apply(p.gate, value, up_value);
      } else {
        own[128 * i] = p.apply_gate ? apply(p.gate, 0.0f, value) : value;
        up[128 * i] = p.apply_gate ? apply(p.gate, 0.0f, up_value) : up_value;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sums[first + i] = own[128 * i];
      if (!kGated) up_sums[first + i] = up[128 * i];
    }
  }
}

// 64 columns of out from `column` on. Value [4 j + 2 h + i] is weight row (lane / 4 + 8 h) of the
// warp's 16, token (8 j + 2 (lane % 4) + i).
template <typename Weights, int kColumns>
__device__ void write_columns(const Params& p, const Piece& piece, int warpgroup, int32_t column,
                              char* staging, const float (&values)[kColumns / 2]) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  synchronize_warpgroup(warpgroup);  // what was staged before has been read
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp * 16 + lane / 4 + 8 * h;
    const int place = p.out_placed ? static_cast<int>(mx_place(Weights::kIsFp4, row)) : row;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = 8 * j + 2 * (lane % 4) + i;
        const float value = values[4 * j + 2 * h + i];
        *reinterpret_cast<uint16_t*>(staging + staged(token, place / 8) + place % 8 * 2) =
            p.out_dtype == DType::kF16 ? __half_as_ushort(__float2half(value))
                                       : __bfloat16_as_ushort(__float2bfloat16(value));
      }
    }
  }
  synchronize_warpgroup(warpgroup);
  const int thread = threadIdx.x % 128;
  const int chunk = thread % 8;
  if (column + chunk * 8 >= p.n) return;
  for (int token = thread / 8; token < piece.rows; token += 16) {
    const int64_t at = static_cast<int64_t>(piece.row + token) * p.n + column + chunk * 8;
    *reinterpret_cast<int4*>(static_cast<uint16_t*>(p.out) + at) =
        *reinterpret_cast<const int4*>(staging + staged(token, chunk));
  }
}

// The same in float32, as it lies in registers.
template <int kColumns>
__device__ void write_floats(const Params& p, const Piece& piece, int32_t column,
                             const float (&values)[kColumns / 2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
    const int32_t at =
        column + static_cast<int32_t>(threadIdx.x / 32 % 4) * 16 + lane / 4 + i / 2 % 2 * 8;
    if (token < piece.rows && at < p.n) {
      static_cast<float*>(p.out)[static_cast<int64_t>(piece.row + token) * p.n + at] = values[i];
    }
  }
}

template <typename Weights, bool kGated, int kColumns>
__device__ void write_tile(const Params& p, const Piece& piece, int warpgroup, char* staging,
                           float (&sums)[kColumns / 2], float (&up_sums)[kColumns / 2]) {
  const int32_t first = piece.column + warpgroup * 64;
  const int32_t second = kGated ? first : first + kHalf;
  if (!p.plain) {
    const int32_t row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    float bias[2];
    float up_bias[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      bias[h] = bias_at(p, p.bias, piece.expert, first + row + 8 * h);
      up_bias[h] = bias_at(p, kGated ? p.up_bias : p.bias, piece.expert, second + row + 8 * h);
    }
    synchronize_warpgroup(warpgroup);  // the tile before has been written
    apply_special<kGated, kColumns>(p, bias, up_bias, reinterpret_cast<float*>(staging), sums,
                                    up_sums);
  } else if (kGated) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      sums[i] = __fdividef(sums[i], 1.0f + __expf(-sums[i])) * up_sums[i];
    }
  }
  if (std::is_same_v<Weights, hopper::Fp8Weights> && p.out_dtype == DType::kF32) {
    write_floats<kColumns>(p, piece, first, sums);
    if (!kGated) write_floats<kColumns>(p, piece, second, up_sums);
    return;
  }
  write_columns<Weights, kColumns>(p, piece, warpgroup, first, staging, sums);
  if (!kGated) write_columns<Weights, kColumns>(p, piece, warpgroup, second, staging, up_sums);
}

}  // namespace mx
}  // namespace cadre::cuda
