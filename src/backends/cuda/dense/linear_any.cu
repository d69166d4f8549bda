// Products with few rows, the plain ways: 16-bit elements at any alignment, and float32.
#include <algorithm>

#include "backends/cuda/dense/linear_parts.cuh"
#include "backends/cuda/dense/mma.cuh"

namespace cadre::cuda {
namespace {

constexpr int kMaxWarps = 8;
constexpr int32_t kStep = 32;  // elements of k that a warp takes at a time
constexpr int kMaxRows = 32;
constexpr int kColumns = 8;  // weight rows of a tile
constexpr int kSums = kMaxRows * kColumns;

// Elements [k, k + 8) of a row, zeros beyond its end.
__device__ uint4 load_row(const uint16_t* row, int32_t k, int32_t end) {
  uint4 v = {0, 0, 0, 0};
  uint32_t* words = &v.x;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (k + i < end) words[i / 2] |= static_cast<uint32_t>(row[k + i]) << (16 * (i % 2));
  }
  return v;
}

// The same products as in linear_rows.cu, loaded element by element; a block has one tile.
template <typename T>
__global__ void __launch_bounds__(32 * kMaxWarps)
    linear_unaligned_kernel(const __grid_constant__ LinearRows args) {
  __shared__ float sums[kMaxWarps][kSums];
  begin_dependent();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int g = lane / 4;
  const int q = lane % 4;
  const auto tile = static_cast<int32_t>(blockIdx.x);
  const LinearPart& part = args.parts[part_of(args, tile)];
  const int64_t first = static_cast<int64_t>(tile - part.first_tile) * kColumns;
  const auto k_end = static_cast<int32_t>(args.k);
  const auto* weight = static_cast<const uint16_t*>(part.weight) + (first + g) * part.weight_stride;
  const int32_t weight_end = first + g < part.n ? k_end : 0;
  float acc[kMaxRows / 16][4] = {};
  for (int32_t k = warp * kStep + 8 * q; k - 8 * q < k_end; k += warps * kStep) {
    const uint4 w = load_row(weight, k, weight_end);
#pragma unroll
    for (int p = 0; p < kMaxRows / 16; ++p) {
      if (16 * p >= args.rows) continue;
      const auto x_of = [&](int64_t row) {
        return load_row(static_cast<const uint16_t*>(args.x) + row * args.x_stride, k,
                        row < args.rows ? k_end : 0);
      };
      const uint4 low = x_of(16 * p + g);
      const uint4 high = x_of(16 * p + 8 + g);
      mma<T>(acc[p], low.x, high.x, low.y, high.y, w.x, w.y);
      mma<T>(acc[p], low.z, high.z, low.w, high.w, w.z, w.w);
    }
  }
#pragma unroll
  for (int p = 0; p < kMaxRows / 16; ++p) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[warp][(16 * p + 8 * (i / 2) + g) * kColumns + 2 * q + i % 2] = acc[p][i];
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kSums; i += static_cast<int>(blockDim.x)) {
    const int64_t row = i / kColumns;
    const int64_t column = first + i % kColumns;
    if (row >= args.rows || column >= part.n) continue;
    float sum = output_base(part, row, column);
    for (int j = 0; j < warps; ++j) sum += sums[j][i];
    store_one(sum, part.out, part.out_dtype, row * part.out_stride + column);
  }
}

constexpr int kFloatThreads = 256;
constexpr int kFloatColumns = 4;
constexpr int kFloatRows = 8;

// Elements [k, k + 4) of a row of floats, zeros beyond its end.
template <bool kVectors>
__device__ float4 load_floats(const float* row, int64_t k, int64_t end) {
  if constexpr (kVectors) {
    return k < end ? *reinterpret_cast<const float4*>(row + k) : float4{0, 0, 0, 0};
  }
  return {k < end ? row[k] : 0.0f, k + 1 < end ? row[k + 1] : 0.0f, k + 2 < end ? row[k + 2] : 0.0f,
          k + 3 < end ? row[k + 3] : 0.0f};
}

// Float32 by plain multiply-adds: a block has four weight rows, its threads slices of k.
template <int kRows, bool kVectors>
__global__ void __launch_bounds__(kFloatThreads)
    linear_floats_kernel(const __grid_constant__ LinearRows args) {
  __shared__ float sums[kFloatThreads / 32][kRows][kFloatColumns];
  const LinearPart& part = args.parts[part_of(args, static_cast<int32_t>(blockIdx.x))];
  const int64_t first =
      static_cast<int64_t>(static_cast<int32_t>(blockIdx.x) - part.first_tile) * kFloatColumns;
  const float* weight = static_cast<const float*>(part.weight);
  const float* x = static_cast<const float*>(args.x);
  begin_dependent();
  float acc[kRows][kFloatColumns] = {};
  for (int64_t k = 4 * threadIdx.x; k < args.k; k += 4 * kFloatThreads) {
    float4 w[kFloatColumns];
#pragma unroll
    for (int c = 0; c < kFloatColumns; ++c) {
      const int64_t n = first + c;
      w[c] = load_floats<kVectors>(weight + n * part.weight_stride, k, n < part.n ? args.k : 0);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float4 v = load_floats<kVectors>(x + r * args.x_stride, k, r < args.rows ? args.k : 0);
#pragma unroll
      for (int c = 0; c < kFloatColumns; ++c) {
        acc[r][c] += v.x * w[c].x + v.y * w[c].y + v.z * w[c].z + v.w * w[c].w;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kFloatColumns; ++c) {
      const float sum = warp_sum(acc[r][c]);
      if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32][r][c] = sum;
    }
  }
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x) / kFloatColumns;
  const int64_t column = first + threadIdx.x % kFloatColumns;
  if (r >= kRows || r >= args.rows || column >= part.n) return;
  float sum = 0;
  for (const auto& one : sums) sum += one[r][threadIdx.x % kFloatColumns];
  store_one(sum + output_base(part, r, column), part.out, part.out_dtype,
            r * part.out_stride + column);
}

}  // namespace

void linear_rows_unaligned(LinearRows& args, const Stream& stream) {
  CADRE_ASSERT(args.rows <= kMaxRows);
  const int32_t tiles = set_tiles(args, kColumns);
  if (tiles == 0) return;
  const auto warps =
      static_cast<unsigned>(std::clamp<int64_t>((args.k + kStep - 1) / kStep, 1, kMaxWarps));
  const auto kernel = args.dtype == DType::kBF16 ? linear_unaligned_kernel<__nv_bfloat16>
                                                 : linear_unaligned_kernel<__half>;
  launch("linear_unaligned_kernel", kernel, dim3(static_cast<unsigned>(tiles)), dim3(32 * warps), 0,
         stream_of(stream), dependent_launch(stream), args);
}

void linear_rows_floats(LinearRows& args, bool vectors, const Stream& stream) {
  CADRE_ASSERT(args.rows <= kFloatRows);
  const int32_t tiles = set_tiles(args, kFloatColumns);
  if (tiles == 0) return;
  const auto kernel =
      args.rows == 1 ? (vectors ? linear_floats_kernel<1, true> : linear_floats_kernel<1, false>)
                     : (vectors ? linear_floats_kernel<kFloatRows, true>
                                : linear_floats_kernel<kFloatRows, false>);
  launch("linear_floats_kernel", kernel, dim3(static_cast<unsigned>(tiles)), dim3(kFloatThreads), 0,
         stream_of(stream), dependent_launch(stream), args);
}

}  // namespace cadre::cuda
