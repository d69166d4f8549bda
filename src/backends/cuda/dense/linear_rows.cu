// The weights are the columns of the tensor cores' products and the rows of x their rows, so a tile
// is only eight weight rows high and the work spreads evenly. Every lane loads 16 bytes of its
// weight row straight into registers: the products' order of k is ours to choose, as long as x
// follows it. A block's warps take slices of k; their sums meet in shared memory in a fixed order.
// Weights are asked for before the kernels ahead have ended: only x depends on them.
#include <algorithm>

#include "backends/cuda/dense/linear_rows.h"
#include "backends/cuda/dense/mma.cuh"
#include "backends/cuda/dense/values.cuh"
#include "core/check.h"

namespace cadre::cuda {
namespace {

constexpr int kMaxWarps = 8;
constexpr int32_t kStep = 32;  // elements of k that a warp takes with one load per lane

// Streams through: read once, so the first-level cache is not for it.
__device__ uint4 load_weight(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Elements [k, k + 8) of a row, zeros beyond its end.
template <bool kVectors, bool kIsWeight>
__device__ uint4 load_row(const uint16_t* row, int32_t k, int32_t end) {
  uint4 v = {0, 0, 0, 0};
  if constexpr (kVectors) {
    if (k < end) v = kIsWeight ? load_weight(row + k) : *reinterpret_cast<const uint4*>(row + k);
  } else {
    uint32_t* words = &v.x;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (k + i < end) words[i / 2] |= static_cast<uint32_t>(row[k + i]) << (16 * (i % 2));
    }
  }
  return v;
}

__device__ void finish_output(const LinearPart& part, int64_t row, int64_t column, float sum) {
  if (part.bias != nullptr) sum += load_one(part.bias, part.bias_dtype, column);
  const int64_t index = row * part.out_stride + column;
  if (part.accumulate) sum += load_one(part.out, part.out_dtype, index);
  store_one(sum, part.out, part.out_dtype, index);
}

__device__ int part_of(const LinearRows& args, int32_t tile) {
  int p = 0;
  while (p + 1 < args.num_parts && tile >= args.parts[p + 1].first_tile) ++p;
  return p;
}

// kRows: 8, 16 or 32 rows of x at most. A tile has 8 * kTiles weight rows; a warp's chunk of k has
// kSteps steps, all of them in flight.
template <int kRows, int kTiles, int kSteps>
struct Shape {
  static constexpr int kHalves = (kRows + 7) / 8;      // groups of eight rows of x
  static constexpr int kProducts = (kRows + 15) / 16;  // products over them
  static constexpr int kColumns = 8 * kTiles;          // weight rows of a tile
  static constexpr int32_t kChunk = kStep * kSteps;    // elements of k
  static constexpr int kSums = kRows * kColumns;       // sums of a tile
};

template <typename T, int kRows, int kTiles, int kSteps, bool kVectors>
__global__ void __launch_bounds__(32 * kMaxWarps, kRows == 8 ? 3 : 2)
    linear_rows_kernel(const __grid_constant__ LinearRows args) {
  using S = Shape<kRows, kTiles, kSteps>;
  extern __shared__ float sums[];  // [warps][kRows][kColumns]
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int g = lane / 4;
  const int q = lane % 4;
  const LinearPart& part = args.parts[part_of(args, static_cast<int32_t>(blockIdx.x))];
  const int64_t first =
      static_cast<int64_t>(static_cast<int32_t>(blockIdx.x) - part.first_tile) * S::kColumns;
  const uint16_t* rows[kTiles];
  int32_t ends[kTiles];  // 0 beyond the last weight row
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int64_t n = first + 8 * i + g;
    rows[i] = static_cast<const uint16_t*>(part.weight) + n * part.weight_stride;
    ends[i] = n < part.n ? static_cast<int32_t>(args.k) : 0;
  }
  uint4 w[kSteps][kTiles];
  int32_t k = warp * S::kChunk + 8 * q;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      w[s][i] = load_row<kVectors, true>(rows[i], k + s * kStep, ends[i]);
    }
  }
  begin_dependent();
  const uint16_t* x[S::kHalves];
  int32_t x_ends[S::kHalves];
#pragma unroll
  for (int h = 0; h < S::kHalves; ++h) {
    x[h] = static_cast<const uint16_t*>(args.x) + (8 * h + g) * args.x_stride;
    x_ends[h] = 8 * h + g < args.rows ? static_cast<int32_t>(args.k) : 0;
  }
  float acc[S::kProducts][kTiles][4] = {};
  const int32_t stride = warps * S::kChunk;
  for (; k - 8 * q < args.k; k += stride) {
    uint4 a[kSteps][2 * S::kProducts];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int h = 0; h < 2 * S::kProducts; ++h) {
        a[s][h] = h < S::kHalves ? load_row<kVectors, false>(x[h], k + s * kStep, x_ends[h])
                                 : uint4{0, 0, 0, 0};
      }
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int p = 0; p < S::kProducts; ++p) {
        const uint4 low = a[s][2 * p];
        const uint4 high = a[s][2 * p + 1];
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          mma<T>(acc[p][i], low.x, high.x, low.y, high.y, w[s][i].x, w[s][i].y);
          mma<T>(acc[p][i], low.z, high.z, low.w, high.w, w[s][i].z, w[s][i].w);
        }
      }
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        w[s][i] = load_row<kVectors, true>(rows[i], k + stride + s * kStep, ends[i]);
      }
    }
  }
#pragma unroll
  for (int p = 0; p < S::kProducts; ++p) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * p + 8 * half + g;
        if (row >= kRows) continue;
        float* to = sums + warp * S::kSums + row * S::kColumns + 8 * i + 2 * q;
        *reinterpret_cast<float2*>(to) = {acc[p][i][2 * half], acc[p][i][2 * half + 1]};
      }
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < S::kSums; i += static_cast<int>(blockDim.x)) {
    const int64_t row = i / S::kColumns;
    const int64_t column = first + i % S::kColumns;
    if (row >= args.rows || column >= part.n) continue;
    float sum = 0;
    for (int j = 0; j < warps; ++j) sum += sums[j * S::kSums + i];
    finish_output(part, row, column, sum);
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
  finish_output(part, r, column, sum);
}

int32_t set_tiles(LinearRows& args, int64_t columns) {
  int64_t tiles = 0;
  for (int p = 0; p < args.num_parts; ++p) {
    args.parts[p].first_tile = static_cast<int32_t>(tiles);
    tiles += (args.parts[p].n + columns - 1) / columns;
  }
  CADRE_ASSERT(tiles < INT32_MAX);
  return static_cast<int32_t>(tiles);
}

template <typename T, int kRows, int kTiles, int kSteps, bool kVectors>
void run(LinearRows& args, const Stream& stream) {
  using S = Shape<kRows, kTiles, kSteps>;
  const int32_t tiles = set_tiles(args, S::kColumns);
  if (tiles == 0) return;
  const int64_t chunks = (args.k + S::kChunk - 1) / S::kChunk;
  const auto warps = static_cast<unsigned>(std::clamp<int64_t>(chunks, 1, kMaxWarps));
  launch("linear_rows_kernel", linear_rows_kernel<T, kRows, kTiles, kSteps, kVectors>,
         static_cast<unsigned>(tiles), 32 * warps, warps * S::kSums * sizeof(float),
         stream_of(stream), dependent_launch(stream), args);
}

bool vectors_fit(const LinearRows& args, int64_t lanes) {
  const auto aligned = [&](const void* p, int64_t stride) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride % lanes == 0;
  };
  bool fits = args.k % lanes == 0 && aligned(args.x, args.x_stride);
  for (int p = 0; p < args.num_parts; ++p) {
    fits = fits && aligned(args.parts[p].weight, args.parts[p].weight_stride);
  }
  return fits;
}

template <typename T>
void run_halves(LinearRows& args, const Stream& stream) {
  if (!vectors_fit(args, 8)) return run<T, 32, 1, 2, false>(args, stream);
  if (args.rows <= 8) return run<T, 8, 1, 8, true>(args, stream);
  if (args.rows <= 16) return run<T, 16, 2, 4, true>(args, stream);
  run<T, 32, 2, 4, true>(args, stream);
}

void run_floats(LinearRows& args, const Stream& stream) {
  const bool vectors = vectors_fit(args, 4);
  const int32_t tiles = set_tiles(args, kFloatColumns);
  if (tiles == 0) return;
  const auto kernel =
      args.rows == 1 ? (vectors ? linear_floats_kernel<1, true> : linear_floats_kernel<1, false>)
                     : (vectors ? linear_floats_kernel<kFloatRows, true>
                                : linear_floats_kernel<kFloatRows, false>);
  launch("linear_floats_kernel", kernel, dim3(static_cast<unsigned>(tiles)), dim3(kFloatThreads), 0,
         stream_of(stream), dependent_launch(stream), args);
}

}  // namespace

int64_t max_linear_rows(DType dtype) { return dtype == DType::kF32 ? kFloatRows : 32; }

void linear_rows(LinearRows args, const Stream& stream) {
  CADRE_ASSERT(args.rows <= max_linear_rows(args.dtype) && args.k < (int64_t{1} << 30));
  if (args.rows == 0) return;
  if (args.dtype == DType::kBF16) return run_halves<__nv_bfloat16>(args, stream);
  if (args.dtype == DType::kF16) return run_halves<__half>(args, stream);
  run_floats(args, stream);
}

}  // namespace cadre::cuda
