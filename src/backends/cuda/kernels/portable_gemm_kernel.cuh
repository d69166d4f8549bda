// The grouped GEMM of portable_gemm.h for one dtype; each portable_gemm_<dtype>.cu instantiates it.
//
// A block makes a tile of kRows x 128 sums: 128 output columns, or 64 with gate and up side by side
// (64 rows of each matrix), so that both sums of an output end in one block. K goes through shared
// memory in three stages of 128 bytes per row, 16-byte chunks swizzled by the row's low bits;
// ldmatrix reads them without bank conflicts, whatever the dtype.
//
// float32 products are three tf32 products of the values split in two. The tensor cores truncate
// their sums, so each step of k starts from zero and is added in float32.
#pragma once

#include <algorithm>

#include "backends/cuda/kernels/launch.h"
#include "backends/cuda/kernels/portable_gemm_tile.cuh"

namespace cadre::cuda::portable {

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
  __shared__ int row_source[kRows];
  find_row_sources<kThreads>(gemm, tile, row_source);

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

  const auto load_stage = [&](int slot, int64_t first_k) {
    char* x_stage = stages + slot * S::kStageBytes;
    char* w_stage = x_stage + kRows * kRowBytes;
    // Bytes of the row that lie in this thread's chunk.
    const int64_t left = (gemm.k - first_k) * static_cast<int64_t>(sizeof(T)) - chunk * 16;
    const int bytes = static_cast<int>(left < 0 ? 0 : (left < 16 ? left : 16));
    const uint32_t to = shared_address(x_stage) + chunk_offset(copy_row, chunk);
    if (kFast || problem.fast_x) {
#pragma unroll
      for (int i = 0; i < kCopiesX; ++i) {
        copy_async(to + i * kPass * kRowBytes, x_from[i] + first_k, x_rows >> i & 1 ? bytes : 0);
      }
    } else {
      copy_any<T, kThreads>(x_stage, kRows, first_k, gemm.k, 1, false, x_row);
    }
    if (fast_w) {
#pragma unroll
      for (int i = 0; i < kCopiesW; ++i) {
        constexpr int kHalf = kDual ? kCopiesW / 2 : kCopiesW;
        const bool is_up = i >= kHalf;
        const int64_t row_stride = is_up ? up.row_stride : w.row_stride;
        const T* from = w_from[is_up] + (i % kHalf) * (kPass * row_stride) + first_k;
        copy_async(to + (kRows + i * kPass) * kRowBytes, from, w_rows >> i & 1 ? bytes : 0);
      }
    } else {
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
    if (s < steps) load_stage(s, static_cast<int64_t>(s) * S::kStep);
    commit_copies();
  }
  int slot = 0;
  int next_slot = kStages - 1;
  for (int step = 0; step < steps; ++step) {
    wait_for_copies<kStages - 2>();
    __syncthreads();
    const uint32_t stage = shared_address(stages + slot * S::kStageBytes);
    // The operands of the next products are on their way while these run.
    uint32_t a[2][S::kTilesM][4];
    uint32_t b[2][S::kTilesN][2];
    const auto load_operands = [&](int c, int to) {
#pragma unroll
      for (int i = 0; i < S::kTilesM; ++i) {
        load_matrices(a[to][i], stage + chunk_offset(a_row + i * 16, c + lane / 16));
      }
#pragma unroll
      for (int p = 0; p < S::kTilesN / 2; ++p) {
        uint32_t m[4];
        load_matrices(m, stage + chunk_offset(w_tile_row(p) + b_row, c + lane / 8 % 2));
        b[to][2 * p][0] = m[0], b[to][2 * p][1] = m[1];
        b[to][2 * p + 1][0] = m[2], b[to][2 * p + 1][1] = m[3];
      }
    };
    load_operands(0, 0);
    const int next = step + kStages - 1;
    if (next < steps) load_stage(next_slot, static_cast<int64_t>(next) * S::kStep);
    commit_copies();
#pragma unroll
    for (int c = 0; c < kChunks; c += 2) {
      if (c + 2 < kChunks) load_operands(c + 2, (c / 2 + 1) % 2);
      multiply_step<T, S::kTilesM, S::kTilesN>(sums, a[c / 2 % 2], b[c / 2 % 2]);
    }
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
