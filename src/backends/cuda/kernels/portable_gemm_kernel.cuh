// The grouped GEMM of portable_gemm.h for one dtype; each portable_gemm_<dtype>.cu instantiates it.
//
// A block makes a tile of kRows x 128 sums: 128 output columns, or 64 with gate and up side by side
// (64 rows of each matrix), so that a thread holds both sums of an output. K goes through shared
// memory in three stages of 128 bytes per row, 16-byte chunks swizzled by the row's low bits;
// ldmatrix reads them without bank conflicts, whatever the dtype.
//
// float32 products are three tf32 products of the values split in two. The tensor cores truncate
// their sums, so each step of k starts from zero and is added in float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "backends/cuda/kernels/launch.h"
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

/// sums: the tile, [kRows][kPitch] in shared memory; with kDual the up sums follow the gate's.
template <typename T, int kRows, bool kDual>
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
    } else {
      write_columns<T>(gemm, tile.first_row + r, column, values);
    }
  }
}

// ---- the kernel --------------------------------------------------------------------------------

template <typename T, int kRows, bool kDual, bool kFast>
__global__ void __launch_bounds__(Shape<T, kRows, kDual>::kThreads)
    grouped_gemm(const __grid_constant__ Problem problem) {
  using S = Shape<T, kRows, kDual>;
  constexpr int kThreads = S::kThreads;
  constexpr int kValues = 16 / static_cast<int>(sizeof(T));
  const PortableGemm& gemm = problem.gemm;
  wait_for_previous_kernel();
  let_next_kernel_start();
  Tile tile;
  if (!find_tile<kRows, S::kColumns>(gemm, tile)) return;

  extern __shared__ __align__(128) char stages[];
  __shared__ int row_source[kRows];  // row of x; -1 beyond the tile
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

  const DeviceMatrix w = gemm.w.expert<T>(tile.group);
  const DeviceMatrix up = kDual ? gemm.up_w.expert<T>(tile.group) : w;
  const auto* x = static_cast<const T*>(gemm.x);
  const auto x_row = [&](int row) -> const T* {
    return row_source[row] < 0 ? nullptr : x + row_source[row] * gemm.x_stride;
  };
  const auto w_row = [&](int row) -> const T* {
    const bool is_up = kDual && row >= S::kColumns;
    const DeviceMatrix& m = is_up ? up : w;
    const int64_t n = tile.first_column + (is_up ? row - S::kColumns : row);
    return n < gemm.n ? static_cast<const T*>(m.data) + n * m.row_stride : nullptr;
  };

  // The 16-byte copies of a thread: one chunk of every kPass-th row.
  constexpr int kPass = kThreads / kChunks;
  constexpr int kCopiesX = kRows / kPass;
  constexpr int kCopiesW = kTileColumns / kPass;
  const int chunk = threadIdx.x % kChunks;
  const int copy_row = threadIdx.x / kChunks;
  const T* x_from[kCopiesX];
  const T* w_from[2];   // row copy_row of each matrix
  unsigned x_rows = 0;  // bit i: the row of copy i is there
  unsigned w_rows = 0;
#pragma unroll
  for (int i = 0; i < kCopiesX; ++i) {
    const T* from = x_row(copy_row + i * kPass);
    x_from[i] = (from != nullptr ? from : x) + chunk * kValues;
    if (from != nullptr) x_rows |= 1u << i;
  }
  w_from[0] = static_cast<const T*>(w.data) + (tile.first_column + copy_row) * w.row_stride +
              chunk * kValues;
  w_from[1] = static_cast<const T*>(up.data) + (tile.first_column + copy_row) * up.row_stride +
              chunk * kValues;
#pragma unroll
  for (int i = 0; i < kCopiesW; ++i) {
    if (w_row(copy_row + i * kPass) != nullptr) w_rows |= 1u << i;
  }

  const bool fast_w = kFast || (is_fast(w, sizeof(T)) && is_fast(up, sizeof(T)));

  // A stage is asked for in kParts pieces, between the products of another.
  constexpr int kParts = kChunks / 2;
  const auto load_part = [&](int slot, int64_t first_k, int part) {
    char* x_stage = stages + slot * S::kStageBytes;
    char* w_stage = x_stage + kRows * kRowBytes;
    // Bytes of the row that lie in this thread's chunk.
    const int64_t left = (gemm.k - first_k) * static_cast<int64_t>(sizeof(T)) - chunk * 16;
    const int bytes = static_cast<int>(left < 0 ? 0 : (left < 16 ? left : 16));
    const uint32_t to = shared_address(x_stage) + chunk_offset(copy_row, chunk);
    if (kFast || problem.fast_x) {
#pragma unroll
      for (int i = 0; i < kCopiesX; ++i) {
        if (i * kParts / kCopiesX != part) continue;
        copy_async(to + i * kPass * kRowBytes, x_from[i] + first_k, x_rows >> i & 1 ? bytes : 0);
      }
    } else if (part == 0) {
      copy_any<T, kThreads>(x_stage, kRows, first_k, gemm.k, 1, false, x_row);
    }
    if (fast_w) {
#pragma unroll
      for (int i = 0; i < kCopiesW; ++i) {
        if (i * kParts / kCopiesW != part) continue;
        constexpr int kHalf = kDual ? kCopiesW / 2 : kCopiesW;
        const bool is_up = i >= kHalf;
        const int64_t row_stride = is_up ? up.row_stride : w.row_stride;
        const T* from = w_from[is_up] + (i % kHalf) * (kPass * row_stride) + first_k;
        copy_async(to + (kRows + i * kPass) * kRowBytes, from, w_rows >> i & 1 ? bytes : 0);
      }
    } else if (part == 0) {
      const bool along_rows = w.col_stride > w.row_stride;
      copy_any<T, kThreads>(w_stage, kTileColumns, first_k, gemm.k, w.col_stride, along_rows,
                            w_row);
    }
  };

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp % S::kWarpsM * S::kWarpRows;
  const int warp_column = warp / S::kWarpsM * (kDual ? S::kWarpColumns / 2 : S::kWarpColumns);
  // First row in the stage of a pair of column tiles (16 rows of the weights).
  const auto w_tile_row = [&](int pair) {
    constexpr int kHalf = kDual ? S::kTilesN / 4 : S::kTilesN / 2;
    return kRows + warp_column + pair % kHalf * 16 + (pair >= kHalf ? S::kColumns : 0);
  };
  const int a_row = warp_row + lane % 16;
  const int b_row = lane % 8 + lane / 16 * 8;
  float sums[S::kTilesM][S::kTilesN][4] = {};

  const auto steps = static_cast<int>((gemm.k + S::kStep - 1) / S::kStep);
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (s < steps) load_part(s, static_cast<int64_t>(s) * S::kStep, part);
    }
    commit_copies();
  }
  int slot = 0;
  int next_slot = kStages - 1;
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kStages - 2>();
    __syncthreads();
    const int next = step + kStages - 1;
    const uint32_t stage = shared_address(stages + slot * S::kStageBytes);
#pragma unroll
    for (int c = 0; c < kChunks; c += 2) {
      uint32_t a[S::kTilesM][4];
      uint32_t b[S::kTilesN][2];
#pragma unroll
      for (int i = 0; i < S::kTilesM; ++i) {
        load_matrices(a[i], stage + chunk_offset(a_row + i * 16, c + lane / 16));
      }
#pragma unroll
      for (int p = 0; p < S::kTilesN / 2; ++p) {
        uint32_t m[4];
        load_matrices(m, stage + chunk_offset(w_tile_row(p) + b_row, c + lane / 8 % 2));
        b[2 * p][0] = m[0], b[2 * p][1] = m[1];
        b[2 * p + 1][0] = m[2], b[2 * p + 1][1] = m[3];
      }
      if (next < steps) load_part(next_slot, static_cast<int64_t>(next) * S::kStep, c / 2);
      multiply_step<T, S::kTilesM, S::kTilesN>(sums, a, b);
    }
    commit_copies();
    slot = slot + 1 == kStages ? 0 : slot + 1;
    next_slot = next_slot + 1 == kStages ? 0 : next_slot + 1;
  }

  __syncthreads();  // the stages become the tile of sums
  auto* tile_sums = reinterpret_cast<float*>(stages);
#pragma unroll
  for (int i = 0; i < S::kTilesM; ++i) {
#pragma unroll
    for (int j = 0; j < S::kTilesN; ++j) {
      const int column = w_tile_row(j / 2) - kRows + j % 2 * 8 + lane % 4 * 2;
      float* to = tile_sums + (warp_row + i * 16 + lane / 4) * kPitch + column;
      *reinterpret_cast<float2*>(to) = make_float2(sums[i][j][0], sums[i][j][1]);
      *reinterpret_cast<float2*>(to + 8 * kPitch) = make_float2(sums[i][j][2], sums[i][j][3]);
    }
  }
  __syncthreads();
  write_tile<T, kRows, kDual>(gemm, tile, tile_sums);
}

// ---- host --------------------------------------------------------------------------------------

template <typename T, int kRows, bool kDual, bool kFast>
void launch_tiles(const Problem& problem, cudaStream_t stream) {
  using S = Shape<T, kRows, kDual>;
  const PortableGemm& gemm = problem.gemm;
  // Groups end inside a tile: at most one more each.
  const int64_t row_tiles = gemm.offsets == nullptr
                                ? (gemm.max_rows + kRows - 1) / kRows
                                : gemm.max_rows / kRows + std::min(gemm.num_groups, gemm.max_rows);
  const int64_t blocks = (row_tiles + 7) / 8 * 8 * ((gemm.n + S::kColumns - 1) / S::kColumns);
  auto* kernel = grouped_gemm<T, kRows, kDual, kFast>;
  allow_shared_memory(kernel, S::kSharedBytes);
  launch("grouped_gemm", kernel, dim3(static_cast<unsigned>(blocks)), dim3(S::kThreads),
         S::kSharedBytes, stream, Launch::kDependent, problem);
}

template <typename T, bool kDual>
void launch_layout(const Problem& problem, bool tall, cudaStream_t stream) {
  if (!problem.fast_x || !problem.fast_w) {
    launch_tiles<T, 64, kDual, false>(problem, stream);
  } else if (tall) {
    launch_tiles<T, 128, kDual, true>(problem, stream);
  } else {
    launch_tiles<T, 64, kDual, true>(problem, stream);
  }
}

/// `tall`: tiles of 128 rows instead of 64.
template <typename T>
void run(const Problem& problem, bool tall, cudaStream_t stream) {
  if (problem.gemm.up_w.first.data != nullptr) {
    launch_layout<T, true>(problem, tall, stream);
  } else {
    launch_layout<T, false>(problem, tall, stream);
  }
}

void run_bf16(const Problem& problem, bool tall, cudaStream_t stream);
void run_f16(const Problem& problem, bool tall, cudaStream_t stream);
void run_f32(const Problem& problem, bool tall, cudaStream_t stream);

}  // namespace cadre::cuda::portable
