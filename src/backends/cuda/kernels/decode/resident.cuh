// Few tokens' activations in shared memory as a whole, as products take them: every warp reads them
// there, so nothing of them goes through the rings.
#pragma once

#include "backends/cuda/kernels/decode/half_rows.cuh"
#include "backends/cuda/kernels/decode/operands.cuh"
#include "backends/cuda/kernels/decode/plan.cuh"
#include "backends/cuda/kernels/decode/stream.cuh"
#include "backends/cuda/kernels/decode/values.cuh"
#include "quant/activations.h"

namespace cadre::cuda {

/// k up to whole chunks.
template <typename Shape>
__host__ __device__ constexpr int resident_k(int k) {
  constexpr int kOfChunk = Shape::kIsMx ? Shape::kTokenChunk / 2 : Shape::kChunk;
  return (k + kOfChunk - 1) / kOfChunk * kOfChunk;
}

/// Bytes of a row of float16; two rows' pieces lie in different banks.
template <typename Shape>
__host__ __device__ constexpr int resident_mx_stride(int k) {
  return resident_k<Shape>(k) * 2 + 64;
}

/// Of activations that are not in the rings; beside MX weights always with a factor for each row.
template <typename Shape>
__host__ __device__ constexpr size_t resident_bytes(int rows, int k) {
  if constexpr (Shape::kIsMx) {
    const size_t numbers = Shape::kIsResident ? size_t(rows) * resident_mx_stride<Shape>(k) : 0;
    return numbers + (size_t(rows) * 4 + 15) / 16 * 16;
  }
  if (!Shape::kIsResident) return 0;
  const int each = resident_k<Shape>(k);
  return size_t(rows) * (each + each / kFp8Group * 4);
}

#ifdef __CUDACC__

/// Where a row's codes and scales are in `memory`, resident_bytes() long.
template <typename Shape>
__device__ TokenRows resident_rows(char* memory, int rows, int k) {
  if constexpr (Shape::kIsMx) {
    const int stride = resident_mx_stride<Shape>(k);
    return {memory, stride, reinterpret_cast<const float*>(memory + rows * stride)};
  }
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
  constexpr int kAtOnce = 6;
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

/// Starts copies of rows of the compute dtype, `stride` elements apart, to where resident_rows()
/// says; in a group of their own.
__device__ inline void copy_rows(const void* from, int64_t stride, int rows, int k,
                                 const TokenRows& to) {
  const int pieces = k / 8;
  const uint32_t begin = shared_address(to.data);
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * pieces; i += blockDim.x) {
    const int row = i / pieces;
    const int piece = i - row * pieces;
    copy_piece(begin + row * static_cast<uint32_t>(to.stride) + piece * 16,
               static_cast<const char*>(from) + row * stride * 2 + piece * 16);
  }
  commit_copies();
}

/// Makes float16 of these rows where they lie, by all threads, after a barrier; visible after the
/// next one. Several warps share a row where there are few.
template <typename Shape>
__device__ void convert_rows(const DecodeArgs& a, int rows, int k, const TokenRows& to) {
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int share = max(1, warps / rows);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const bool is_f16 = a.compute_dtype == DType::kF16;
#pragma unroll 1
  for (int first = 0; first < rows; first += warps / share) {
    const int row = first + warp / share;
    const bool is_there = row < rows && warp / share < warps / share;
    char* const at = const_cast<char*>(to.data) + row * to.stride;
    const auto piece = [&](int i) { return reinterpret_cast<const uint4*>(at)[i]; };
    HalfScale scale = {};
    if (is_there) {
      scale = half_scale<Shape::kKind>(largest_of_row(k / 8, is_f16, piece), is_f16);
    }
    if (share > 1) __syncthreads();  // the other warps have read the row
    if (!is_there) continue;
    place_half_row<Shape::kKind>(k, resident_k<Shape>(k), scale.of_row, is_f16, at, warp % share,
                                 share, piece);
    if (threadIdx.x % 32 == 0) const_cast<float*>(to.scales)[row] = scale.of_sums;
  }
}

/// The one token of the call as e4m3 codes; as float16 the tokens that copy_rows() brought to
/// shared memory before the first weights.
template <typename Shape>
__device__ void place_x(const DecodeArgs& a, const TokenRows& to) {
  if constexpr (Shape::kIsMx) {
    wait_copies<Shape::kStages>();  // those of the first weights are later
    __syncthreads();
    return convert_rows<Shape>(a, a.num_tokens, a.hidden, to);
  }
  quantize_resident<Shape>(to, 1, a.hidden, [&](int /*row*/, int i, float(&values)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      values[j] = i + j < a.hidden ? read_number<void>(a.x, i + j, a.compute_dtype) : 0;
    }
  });
}

/// h of their slots. Rows of slots without an expert are never read: what lies there is not used.
template <typename Shape>
__device__ void place_h(const DecodeArgs& a, const TokenRows& to) {
  if constexpr (Shape::kIsMx) {
    const int rows = a.num_tokens * a.top_k;
    copy_rows(a.h, a.h_stride, rows, a.intermediate, to);
    wait_copies<0>();
    __syncthreads();
    return convert_rows<Shape>(a, rows, a.intermediate, to);
  }
  quantize_resident<Shape>(to, a.top_k, a.intermediate, [&](int row, int i, float(&values)[4]) {
    const float* const h = static_cast<const float*>(a.h) + row * a.h_stride + i;
    float4 four = {};
    if (i < a.intermediate) four = __ldcg(reinterpret_cast<const float4*>(h));
    values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
  });
}

#endif

}  // namespace cadre::cuda
