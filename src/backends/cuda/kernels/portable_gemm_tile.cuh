// Pieces of the grouped GEMM's kernel (portable_gemm_kernel.cuh): shapes, instructions, which tile
// a block makes, how rows of any layout come to shared memory, and how a tile of sums leaves it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "backends/cuda/kernels/portable_gemm.h"

namespace cadre::cuda::portable {

constexpr int kTileColumns = 128;
constexpr int kStages = 3;
constexpr int kRowBytes = 128;  // of a stage
constexpr int kChunks = kRowBytes / 16;

/// What the kernel takes, by value.
struct Problem {
  PortableGemm gemm;
  bool fast_x;  // rows start at multiples of 16 bytes
  bool fast_w;  // so do those of all groups, and their k are neighbours
};

/// Whether a matrix can be copied in pieces of 16 bytes.
__host__ __device__ inline bool is_fast(const DeviceMatrix& m, int64_t element_bytes) {
  return m.col_stride == 1 && reinterpret_cast<uintptr_t>(m.data) % 16 == 0 &&
         m.row_stride * element_bytes % 16 == 0;
}

template <typename T, int kRows, bool kDual>
struct Shape {
  // float32 holds its operands twice, so its warps have half the rows.
  static constexpr int kWarpRows = std::is_same_v<T, float> ? 32 : kRows / 2;
  static constexpr int kWarpColumns = 64;
  static constexpr int kWarpsM = kRows / kWarpRows;
  static constexpr int kWarpsN = kTileColumns / kWarpColumns;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kTilesM = kWarpRows / 16;
  static constexpr int kTilesN = kWarpColumns / 8;
  static constexpr int kStep = kRowBytes / static_cast<int>(sizeof(T));     // of k in a stage
  static constexpr int kColumns = kDual ? kTileColumns / 2 : kTileColumns;  // of the output
  static constexpr int kStageBytes = (kRows + kTileColumns) * kRowBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes >= kRows * (kTileColumns + 8) * 4);
};

// ---- instructions ------------------------------------------------------------------------------

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// 16 bytes to shared memory, of which the first `bytes` are read and the rest is zero.
__device__ inline void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ inline void load_matrices(uint32_t (&m)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(from)
               : "memory");
}

// sum += A B for 32 bytes of k: m16n8k16 of 16-bit values, m16n8k8 of tf32.
template <typename T>
__device__ inline void multiply_add(float (&sum)[4], const uint32_t (&a)[4], const uint32_t* b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// x = high + low, high with the 11 significant bits of tf32 (rounded); low's bits beyond tf32 are
// cut off by the product.
__device__ inline void split(uint32_t x, uint32_t& high, uint32_t& low) {
  high = (x + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(__uint_as_float(x) - __uint_as_float(high));
}

template <typename T, int kTilesM, int kTilesN>
__device__ inline void multiply_step(float (&sums)[kTilesM][kTilesN][4],
                                     const uint32_t (&a)[kTilesM][4],
                                     const uint32_t (&b)[kTilesN][2]) {
  if constexpr (!std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) multiply_add<T>(sums[i][j], a[i], b[j]);
    }
  } else {
    uint32_t a_high[kTilesM][4], a_low[kTilesM][4];
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
      for (int q = 0; q < 4; ++q) split(a[i][q], a_high[i][q], a_low[i][q]);
    }
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
      uint32_t b_high[2], b_low[2];
#pragma unroll
      for (int q = 0; q < 2; ++q) split(b[j][q], b_high[q], b_low[q]);
      float part[kTilesM][4] = {};
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) multiply_add<T>(part[i], a_low[i], b_high);
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) multiply_add<T>(part[i], a_high[i], b_low);
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) multiply_add<T>(part[i], a_high[i], b_high);
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
        for (int q = 0; q < 4; ++q) sums[i][j][q] += part[i][q];
      }
    }
  }
}

// ---- which tile --------------------------------------------------------------------------------

struct Tile {
  int group;
  int64_t first_row;  // of all groups' rows
  int num_rows;
  int64_t first_column;
};

/// Blocks are numbered over bands of eight row tiles, down the band before across: the tiles of a
/// group that run together share a piece of its weights. False when there is no such tile.
template <int kRows, int kColumns>
__device__ inline bool find_tile(const PortableGemm& gemm, Tile& tile) {
  __shared__ int warp_sums[32];
  __shared__ int found[2];  // group, row tile within it
  const int groups = static_cast<int>(gemm.num_groups);
  const auto rows_of = [&](int g) {
    return gemm.offsets == nullptr ? static_cast<int>(gemm.max_rows)
                                   : gemm.offsets[g + 1] - gemm.offsets[g];
  };
  const auto tiles_of = [&](int g) { return (rows_of(g) + kRows - 1) / kRows; };
  const int each = (groups + static_cast<int>(blockDim.x) - 1) / static_cast<int>(blockDim.x);
  const int begin = min(static_cast<int>(threadIdx.x) * each, groups);
  const int end = min(begin + each, groups);
  int mine = 0;
  for (int g = begin; g < end; ++g) mine += tiles_of(g);
  int up_to = mine;
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, up_to, d);
    if (threadIdx.x % 32 >= d) up_to += below;
  }
  if (threadIdx.x % 32 == 31) warp_sums[threadIdx.x / 32] = up_to;
  __syncthreads();
  int total = 0;
  int before = up_to - mine;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
    if (w < static_cast<int>(threadIdx.x) / 32) before += warp_sums[w];
    total += warp_sums[w];
  }
  constexpr int kBand = 8;
  const auto column_tiles = static_cast<int>((gemm.n + kColumns - 1) / kColumns);
  const int band = static_cast<int>(blockIdx.x) / (kBand * column_tiles);
  if (band * kBand >= total) return false;
  const int height = min(kBand, total - band * kBand);
  const int within = static_cast<int>(blockIdx.x) % (kBand * column_tiles);
  if (within >= height * column_tiles) return false;
  const int row_tile = band * kBand + within % height;
  if (before <= row_tile && row_tile < before + mine) {
    int g = begin;
    int first = before;
    while (first + tiles_of(g) <= row_tile) first += tiles_of(g++);
    found[0] = g;
    found[1] = row_tile - first;
  }
  __syncthreads();
  tile.group = found[0];
  const int within_group = found[1] * kRows;
  tile.first_row = (gemm.offsets == nullptr ? 0 : gemm.offsets[tile.group]) + within_group;
  tile.num_rows = min(kRows, rows_of(tile.group) - within_group);
  tile.first_column = static_cast<int64_t>(within / height) * kColumns;
  return true;
}

/// The row of x of each row of the tile, or -1 beyond it. A block together.
template <int kThreads, int kRows>
__device__ inline void find_row_sources(const PortableGemm& gemm, const Tile& tile,
                                        int (&row_source)[kRows]) {
  for (int r = threadIdx.x; r < kRows; r += kThreads) {
    int source = -1;
    if (r < tile.num_rows) {
      const int64_t row = tile.first_row + r;
      source = gemm.pair_of_row == nullptr
                   ? static_cast<int>(row)
                   : static_cast<int>(static_cast<unsigned>(gemm.pair_of_row[row]) /
                                      static_cast<unsigned>(gemm.top_k));
    }
    row_source[r] = source;
  }
  __syncthreads();
}

// ---- shared memory -----------------------------------------------------------------------------

__device__ inline uint32_t chunk_offset(int row, int chunk) {
  return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ (row & 7)) << 4));
}

// Fills a stage's rows from memory of any stride and alignment. row_at(row) gives the address of
// k = 0, null for rows of zeros.
template <typename T, int kThreads, typename RowAt>
__device__ inline void copy_any(char* stage, int num_rows, int64_t first_k, int64_t k,
                                int64_t col_stride, bool along_rows, RowAt row_at) {
  constexpr int kValues = 16 / sizeof(T);
  for (int i = threadIdx.x; i < num_rows * kChunks; i += kThreads) {
    // Neighbouring threads take neighbouring elements of memory.
    const int row = along_rows ? i % num_rows : i / kChunks;
    const int chunk = along_rows ? i / num_rows : i % kChunks;
    alignas(16) T values[kValues];
    const T* from = row_at(row);
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      const int64_t at = first_k + chunk * kValues + v;
      values[v] = from != nullptr && at < k ? from[at * col_stride] : T(0.0f);
    }
    *reinterpret_cast<uint4*>(stage + chunk_offset(row, chunk)) =
        *reinterpret_cast<const uint4*>(values);
  }
}

// ---- the result --------------------------------------------------------------------------------

__device__ inline float bias_at(const DeviceVectors& vectors, DType dtype, int group, int64_t n) {
  if (vectors.first.data == nullptr) return 0;
  const auto at = [&](auto typed) {
    using Value = decltype(typed);
    const DeviceVector v = vectors.expert<Value>(group);
    return static_cast<float>(static_cast<const Value*>(v.data)[n * v.stride]);
  };
  if (dtype == DType::kF32) return at(float{});
  if (dtype == DType::kBF16) return at(__nv_bfloat16{});
  return at(__half{});
}

constexpr int kPitch = kTileColumns + 8;  // floats between rows of sums: no bank conflicts
constexpr int kOutputs = 4;               // neighbouring columns of a thread

/// Values of kOutputs columns from `column` on, of which those below n are written.
template <typename Out>
__device__ inline void write_columns(const PortableGemm& gemm, int64_t row, int64_t column,
                                     float (&values)[kOutputs]) {
  auto* out = static_cast<Out*>(gemm.out) + row * gemm.out_stride + column;
  const int count = gemm.n - column < kOutputs ? static_cast<int>(gemm.n - column) : kOutputs;
  if constexpr (std::is_same_v<Out, float>) {
    if (gemm.accumulate) {
#pragma unroll
      for (int q = 0; q < kOutputs; ++q) {
        if (q < count) values[q] += out[q];
      }
    }
  }
  alignas(sizeof(Out) * kOutputs) Out rounded[kOutputs];
#pragma unroll
  for (int q = 0; q < kOutputs; ++q) rounded[q] = static_cast<Out>(values[q]);
  using Words = std::conditional_t<sizeof(Out) == 4, uint4, uint2>;
  if (count == kOutputs && reinterpret_cast<uintptr_t>(out) % sizeof(Words) == 0) {
    *reinterpret_cast<Words*>(out) = *reinterpret_cast<const Words*>(rounded);
    return;
  }
#pragma unroll
  for (int q = 0; q < kOutputs; ++q) {
    if (q < count) out[q] = rounded[q];
  }
}

/// sums: the tile, [kRows][kPitch] in shared memory; with kDual the up sums follow the gate's. out
/// is float32 or T; with kAny16 (T has 16 bits) also the other type of 16 bits.
template <typename T, int kRows, bool kDual, bool kAny16 = false>
__device__ inline void write_tile(const PortableGemm& gemm, const Tile& tile, const float* sums) {
  using S = Shape<T, kRows, kDual>;
  constexpr int kGroups = S::kColumns / kOutputs;
  const int local = static_cast<int>(threadIdx.x) % kGroups * kOutputs;
  const int64_t column = tile.first_column + local;
  if (column >= gemm.n) return;
  float bias[kOutputs];
  float up_bias[kOutputs];
#pragma unroll
  for (int q = 0; q < kOutputs; ++q) {
    const bool is_column = column + q < gemm.n;
    bias[q] = is_column ? bias_at(gemm.bias, gemm.bias_dtype, tile.group, column + q) : 0;
    if (kDual) {
      up_bias[q] = is_column ? bias_at(gemm.up_bias, gemm.bias_dtype, tile.group, column + q) : 0;
    }
  }
#pragma unroll 1
  for (int r = threadIdx.x / kGroups; r < tile.num_rows; r += S::kThreads / kGroups) {
    const float* from = sums + r * kPitch + local;
    float values[kOutputs];
#pragma unroll
    for (int q = 0; q < kOutputs; ++q) {
      const float w = from[q] + bias[q];
      if constexpr (kDual) {
        values[q] = apply(gemm.gate, w, from[q + S::kColumns] + up_bias[q]);
      } else {
        values[q] = gemm.apply_gate ? apply(gemm.gate, 0, w) : w;
      }
    }
    if (gemm.out_dtype == DType::kF32) {
      write_columns<float>(gemm, tile.first_row + r, column, values);
    } else if (kAny16 && gemm.out_dtype == DType::kBF16) {
      write_columns<__nv_bfloat16>(gemm, tile.first_row + r, column, values);
    } else {
      write_columns<T>(gemm, tile.first_row + r, column, values);
    }
  }
}

}  // namespace cadre::cuda::portable
