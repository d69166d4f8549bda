// Attention with many rows a sequence, on the tensor cores: a block of four warps has 128 rows;
// keys and values go through shared memory once for all of them, the next block of them on its way
// while one is worked on.
#pragma once

#include "backends/cuda/dense/attention_tiles.cuh"
#include "backends/cuda/dense/mma.cuh"

namespace cadre::cuda {

template <int kDim>
struct ManyShape {
  static constexpr int kBands = kDim > 128 ? 1 : 2;  // of 16 rows, of each warp
  static constexpr int kWarps = kManyRows / (16 * kBands);
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kKeys = kDim > 128 ? 32 : 64;  // at a time
  static constexpr int kPieces = kDim / 8;            // 16-byte pieces of a row
  static constexpr int kTileBytes = kKeys * kDim * 2;
  static constexpr int kQueryBytes = kManyRows * kDim * 2;
  static constexpr size_t kSharedBytes = kQueryBytes + 4 * static_cast<size_t>(kTileBytes);
};

/// A block of keys or values on its way; those from `end` on become zeros. A thread has the same
/// piece of every so many keys.
template <int kDim>
__device__ inline void request_tile(const AttentionCall& call, const uint16_t* from, int32_t first,
                                    int32_t end, uint32_t to) {
  using S = ManyShape<kDim>;
  constexpr int kStep = S::kThreads / S::kPieces;  // keys
  static_assert(kStep % 8 == 0);                   // so a piece's place is the same
  const int piece = static_cast<int>(threadIdx.x) % S::kPieces;
  const int key = static_cast<int>(threadIdx.x) / S::kPieces;
  const int32_t left = 8 * piece < call.head_dim ? end - first - key : 0;
  const uint16_t* source =
      from + static_cast<int64_t>(left > 0 ? first + key : 0) * call.head_dim + 8 * piece;
  const int32_t stride = kStep * call.head_dim;
  to += piece_offset<kDim>(key, piece);
  for_constants<0, S::kKeys / kStep>([&](auto i) {
    copy_async(to + i * kStep * kDim * 2, source, i * kStep < left);
    source += stride;
  });
}

template <int kDim>
__device__ inline void request_queries(const AttentionCall& call, const AttentionTile& tile,
                                       int32_t kv_head, uint32_t to) {
  using S = ManyShape<kDim>;
#pragma unroll 4
  for (int i = 0; i < kManyRows * S::kPieces / S::kThreads; ++i) {
    const int index = i * S::kThreads + static_cast<int>(threadIdx.x);
    const int row = index / S::kPieces;
    const int piece = index % S::kPieces;
    const bool valid = tile.first_row + row < tile.rows && 8 * piece < call.head_dim;
    const int64_t offset =
        valid ? row_offset(call, tile, kv_head, tile.first_row + row) + 8 * piece : 0;
    copy_async(to + piece_offset<kDim>(row, piece), static_cast<const uint16_t*>(call.q) + offset,
               valid);
  }
}

/// A warp's rows: bands of 16, of which a lane has rows g and g + 8.
template <int kDim>
struct ManyState {
  using S = ManyShape<kDim>;
  float max[S::kBands][2];
  float sum[S::kBands][2];
  float acc[S::kBands][kDim / 8][4];
  int32_t positions[S::kBands][2];
};

/// Scores become weights; the running softmax moves on.
template <typename T, int kDim, bool kMask>
__device__ inline void soften(const AttentionCall& call, int band, int32_t first,
                              float (&scores)[ManyShape<kDim>::kKeys / 8][4],
                              ManyState<kDim>& state) {
  using S = ManyShape<kDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const float scale = call.scale * kLog2E;
  float factors[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float max = state.max[band][half];
#pragma unroll
    for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& score = scores[n][2 * half + j];
        score *= scale;
        if constexpr (kMask) {
          const int32_t key = first + 8 * n + 2 * (lane % 4) + j;
          if (!sees(state.positions[band][half], key, call.window)) score = kMinusInfinity;
        }
        max = fmaxf(max, score);
      }
    }
    max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
    max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
    const float base = max == kMinusInfinity ? 0.0f : max;
    factors[half] = exp2_fast(state.max[band][half] - base);
    state.max[band][half] = max;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& score = scores[n][2 * half + j];
        score = exp2_fast(score - base);
        sum += score;
      }
    }
    state.sum[band][half] = state.sum[band][half] * factors[half] + sum;
  }
  if (__any_sync(~0u, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      state.acc[band][i][0] *= factors[0];
      state.acc[band][i][1] *= factors[0];
      state.acc[band][i][2] *= factors[1];
      state.acc[band][i][3] *= factors[1];
    }
  }
}

template <typename T, int kDim, bool kMask>
__device__ inline void attend_tile(const AttentionCall& call, int32_t first, uint32_t queries,
                                   uint32_t keys, uint32_t values, ManyState<kDim>& state,
                                   const auto& keys_are_read) {
  using S = ManyShape<kDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float scores[S::kBands][S::kKeys / 8][4] = {};
  const uint32_t query_address =
      queries +
      piece_offset<kDim>(warp * S::kBands * 16 + (lane / 8 % 2) * 8 + lane % 8, lane / 16);
  const uint32_t key_address = keys + piece_offset<kDim>((lane / 16) * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t a[S::kBands][4];
    for_constants<0, S::kBands>([&](auto band) {
      load_matrices<band * 16 * kDim * 2>(at_column(query_address, k), a[band]);
    });
    for_constants<0, S::kKeys / 16>([&](auto n) {
      uint32_t b[4];
      load_matrices<n * 16 * kDim * 2>(at_column(key_address, k), b);
#pragma unroll
      for (int band = 0; band < S::kBands; ++band) {
        mma<T>(scores[band][2 * n], a[band][0], a[band][1], a[band][2], a[band][3], b[0], b[1]);
        mma<T>(scores[band][2 * n + 1], a[band][0], a[band][1], a[band][2], a[band][3], b[2], b[3]);
      }
    });
  }
  keys_are_read();
#pragma unroll
  for (int band = 0; band < S::kBands; ++band) {
    soften<T, kDim, kMask>(call, band, first, scores[band], state);
  }
  const uint32_t value_address =
      values + piece_offset<kDim>((lane / 8 % 2) * 8 + lane % 8, lane / 16);
  for_constants<0, S::kKeys / 16>([&](auto n) {
    uint32_t p[S::kBands][4];
#pragma unroll
    for (int band = 0; band < S::kBands; ++band) {
      const float(&low)[4] = scores[band][2 * n];
      const float(&high)[4] = scores[band][2 * n + 1];
      p[band][0] = narrow_two<T>(low[0], low[1]);
      p[band][1] = narrow_two<T>(low[2], low[3]);
      p[band][2] = narrow_two<T>(high[0], high[1]);
      p[band][3] = narrow_two<T>(high[2], high[3]);
    }
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t b[4];
      load_matrices_transposed<n * 16 * kDim * 2>(at_column(value_address, d), b);
#pragma unroll
      for (int band = 0; band < S::kBands; ++band) {
        mma<T>(state.acc[band][2 * d], p[band][0], p[band][1], p[band][2], p[band][3], b[0], b[1]);
        mma<T>(state.acc[band][2 * d + 1], p[band][0], p[band][1], p[band][2], p[band][3], b[2],
               b[3]);
      }
    }
  });
}

template <typename T, int kDim>
__device__ inline void finish_many(const AttentionCall& call, const AttentionTile& tile,
                                   int32_t kv_head, ManyState<kDim>& state) {
  using S = ManyShape<kDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int band = 0; band < S::kBands; ++band) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.sum[band][half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int32_t row = tile.first_row + (warp * S::kBands + band) * 16 + 8 * half + lane / 4;
      sum += sink_weight(call, kv_head, row, state.max[band][half]);
      const float factor = 1.0f / sum;
      if (row >= tile.rows) continue;
      uint16_t* to = static_cast<uint16_t*>(call.out) + row_offset(call, tile, kv_head, row);
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        if (8 * i >= call.head_dim) continue;
        *reinterpret_cast<uint32_t*>(to + 8 * i + 2 * (lane % 4)) = narrow_two<T>(
            state.acc[band][i][2 * half] * factor, state.acc[band][i][2 * half + 1] * factor);
      }
    }
  }
}

template <typename T, int kDim>
__global__ void __launch_bounds__(ManyShape<kDim>::kThreads, kDim > 128 ? 1 : 2)
    attend_many_kernel(const __grid_constant__ AttentionCall call) {
  using S = ManyShape<kDim>;
  extern __shared__ __align__(1024) unsigned char memory[];
  begin_dependent();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  // Late rows see most keys: they start first.
  const unsigned index = gridDim.x - 1 - blockIdx.x;
  const auto kv_head = static_cast<int32_t>(index % call.num_kv_heads);
  const AttentionTile tile =
      find_tile(call, static_cast<int32_t>(index / call.num_kv_heads), kManyRows);
  if (tile.rows == 0) return;
  const int32_t begin = tile.key_begin(call.group, call.window) / S::kKeys * S::kKeys;
  const int32_t end = tile.key_end(kManyRows, call.group);
  // Keys below `mask_before` or from `mask_from` on may be hidden from some row.
  const int32_t mask_before =
      call.window > 0 ? tile.key_end(kManyRows, call.group) - call.window : 0;
  const int32_t mask_from = tile.position(tile.first_row, call.group) + 1;
  const int64_t offset = cache_offset(call, tile, kv_head);
  const auto* keys = static_cast<const uint16_t*>(call.keys) + offset;
  const auto* values = static_cast<const uint16_t*>(call.values) + offset;
  const uint32_t queries = shared_address(memory);
  const uint32_t key_tiles = queries + S::kQueryBytes;
  const uint32_t value_tiles = key_tiles + 2 * S::kTileBytes;
  request_queries<kDim>(call, tile, kv_head, queries);
  request_tile<kDim>(call, keys, begin, end, key_tiles);
  commit_copies();
  request_tile<kDim>(call, values, begin, end, value_tiles);
  commit_copies();
  ManyState<kDim> state;
#pragma unroll
  for (int band = 0; band < S::kBands; ++band) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = tile.first_row + (warp * S::kBands + band) * 16 + 8 * half + lane / 4;
      state.positions[band][half] = tile.position(row, call.group);
      state.max[band][half] = kMinusInfinity;
      state.sum[band][half] = 0;
    }
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) state.acc[band][i][j] = 0;
    }
  }
  uint32_t stage = 0;
  for (int32_t first = begin; first < end; first += S::kKeys, stage ^= 1) {
    wait_for_copies<1>();  // keys are there, values may be under way
    __syncthreads();       // and the other stage has been read by all
    request_tile<kDim>(call, keys, first + S::kKeys, end, key_tiles + (stage ^ 1) * S::kTileBytes);
    commit_copies();
    const auto values_come = [&] {
      wait_for_copies<1>();
      __syncthreads();
      request_tile<kDim>(call, values, first + S::kKeys, end,
                         value_tiles + (stage ^ 1) * S::kTileBytes);
      commit_copies();
    };
    const uint32_t k = key_tiles + stage * S::kTileBytes;
    const uint32_t v = value_tiles + stage * S::kTileBytes;
    if (first < mask_before || first + S::kKeys > mask_from) {
      attend_tile<T, kDim, true>(call, first, queries, k, v, state, values_come);
    } else {
      attend_tile<T, kDim, false>(call, first, queries, k, v, state, values_come);
    }
  }
  finish_many<T, kDim>(call, tile, kv_head, state);
}

}  // namespace cadre::cuda
