// The writing side of the Hopper grouped GEMM: biases, the gate function, whole rows of out.
//
// A thread's sums: [4 j + 2 h + i] is row (lane / 4 + 8 h), column (8 j + 2 (lane % 4) + i) of its
// warp's 16 rows. They pass through 4 KiB of the warp's own so that whole rows are written.
#pragma once

#include "backends/cuda/kernels/hopper_tile.cuh"

namespace cadre::cuda::hopper {

inline constexpr int kStagingPitch = 256;  // bytes

struct Target {
  char* out;        // of the warp's first row and the tile's first column
  int64_t stride;   // bytes
  int32_t rows;     // of the warp
  int32_t columns;  // of the tile
};

__device__ inline uint32_t staging_place(int row, int chunk) {
  return static_cast<uint32_t>(row * kStagingPitch + ((chunk ^ (row % 8)) << 4));
}

// Two neighbouring blocks of 8 columns to chunks `chunk` and `chunk + 1`.
template <typename T>
__device__ void stage_blocks(uint32_t staging, int chunk, const float (&v)[8]) {
  const int lane = threadIdx.x % 32;
  const uint32_t address = staging + staging_place(lane % 16, chunk + lane / 16);
  ptx::store_matrices(address, ptx::pack(v[0], v[1], T()), ptx::pack(v[2], v[3], T()),
                      ptx::pack(v[4], v[5], T()), ptx::pack(v[6], v[7], T()));
}

// 128 columns from `first` on.
__device__ inline void write_staged(const Target& target, const char* staging, int first) {
  __syncwarp();
  const int lane = threadIdx.x % 32;
  const int chunk = lane % 16;
  const int column = first + chunk * 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = 2 * i + lane / 16;
    const int4 piece = *reinterpret_cast<const int4*>(staging + staging_place(row, chunk));
    if (row < target.rows && column < target.columns) {
      *reinterpret_cast<int4*>(target.out + row * target.stride + column * 2) = piece;
    }
  }
  __syncwarp();
}

__device__ inline float swiglu(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// swiglu() of two elements with one reciprocal: the special function unit is what this waits for.
// 1 + exp(-gate) stops at 2^63, so that the product of two is finite: a gate below -43 gives less
// than 1e-17 of up in any case.
__device__ inline void swiglu_pair(float (&gate)[2], const float (&up)[2]) {
  constexpr float kLog2E = 1.44269504f;
  const float a = 1.0f + ptx::exp2(fminf(-kLog2E * gate[0], 63.0f));
  const float b = 1.0f + ptx::exp2(fminf(-kLog2E * gate[1], 63.0f));
  const float inverse = ptx::reciprocal(a * b);
  gate[0] *= inverse * b * up[0];
  gate[1] *= inverse * a * up[1];
}

template <typename T>
__device__ void write_gated(const Target& target, char* staging, const float (&sums)[128]) {
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = swiglu(sums[4 * j + i], sums[64 + 4 * j + i]);
    stage_blocks<T>(ptx::shared_address(staging), j, v);
  }
  write_staged(target, staging, 0);
}

template <typename T>
__device__ void write_plain(const Target& target, char* staging, const float (&sums)[128]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
      float v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = sums[64 * half + 4 * j + i];
      stage_blocks<T>(ptx::shared_address(staging), j, v);
    }
    write_staged(target, staging, 128 * half);
  }
}

__device__ inline float bias_at(const Params& p, const DeviceVector& bias, int32_t column) {
  if (bias.data == nullptr) return 0.0f;
  const int64_t at = column * bias.stride;
  if (p.bias_dtype == DType::kF32) return static_cast<const float*>(bias.data)[at];
  if (p.bias_dtype == DType::kBF16) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(bias.data)[at]);
  }
  return __half2float(static_cast<const __half*>(bias.data)[at]);
}

__device__ inline DeviceVector bias_of(const Params& p, const DeviceVectors& biases,
                                       int32_t expert) {
  if (p.bias_dtype == DType::kF32) return biases.expert<float>(expert);
  return biases.expert<uint16_t>(expert);
}

// Biases and every gate function, from sums staged in float32: 64 columns a pass, with a gate 32 of
// gate and the same 32 of up.
template <typename T, bool kGated>
__device__ void write_special_pass(const Params& p, const Piece& piece, const Target& target,
                                   const char* staging, int first) {
  const int lane = threadIdx.x % 32;
  const DeviceVector bias = bias_of(p, p.bias, piece.expert);
  const DeviceVector up_bias = bias_of(p, p.up_bias, piece.expert);
  for (int side = 0; side < (kGated ? 1 : 2); ++side) {
    const int column = first + side * 32 + lane;
    if (column >= target.columns) continue;
    const float b = bias_at(p, bias, piece.column + column);
    const float up_b = kGated ? bias_at(p, up_bias, piece.column + column) : 0.0f;
    for (int row = 0; row < target.rows; ++row) {
      const auto at = [&](int c) {
        return *reinterpret_cast<const float*>(staging + staging_place(row, c / 4) + c % 4 * 4);
      };
      float value = at(side * 32 + lane) + b;
      if (kGated) {
        value = apply(p.gate, value, at(32 + lane) + up_b);
      } else if (p.apply_gate) {
        value = apply(p.gate, 0.0f, value);
      }
      *reinterpret_cast<T*>(target.out + row * target.stride + column * 2) = T(value);
    }
  }
}

template <typename T, bool kGated>
__device__ void write_special(const Params& p, const Piece& piece, const Target& target,
                              char* staging, const float (&sums)[128]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int pass = 0; pass < 4; ++pass) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int block = kGated ? (j < 4 ? 4 * pass + j : 16 + 4 * pass + j - 4) : 8 * pass + j;
      const int column = 8 * j + 2 * (lane % 4);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        char* place = staging + staging_place(lane / 4 + 8 * h, column / 4) + column % 4 * 4;
        *reinterpret_cast<float2*>(place) =
            make_float2(sums[4 * block + 2 * h], sums[4 * block + 2 * h + 1]);
      }
    }
    __syncwarp();
    write_special_pass<T, kGated>(p, piece, target, staging, pass * (kGated ? 32 : 64));
    __syncwarp();
  }
}

__device__ inline Target target_of(const Params& p, const Piece& piece, int warpgroup) {
  const int warp_row = warpgroup * 64 + static_cast<int>(threadIdx.x / 32 % 4) * 16;
  Target target;
  target.stride = p.out_stride * 2;
  target.out = static_cast<char*>(p.out) + (piece.row + warp_row) * target.stride +
               static_cast<int64_t>(piece.column) * 2;
  target.rows = min(16, piece.rows - warp_row);
  target.columns = p.n - piece.column;
  return target;
}

/// Without a gate.
template <typename T>
__device__ void write_tile(const Params& p, const Piece& piece, int warpgroup, char* staging,
                           const float (&sums)[128]) {
  const Target target = target_of(p, piece, warpgroup);
  if (p.special) {
    write_special<T, false>(p, piece, target, staging, sums);
  } else {
    write_plain<T>(target, staging, sums);
  }
}

}  // namespace cadre::cuda::hopper
