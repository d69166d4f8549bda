// Which rows and keys a block of attention has.
#pragma once

#include "backends/cuda/dense/attention_kernels.h"
#include "backends/cuda/dense/values.cuh"

namespace cadre::cuda {

struct AttentionTile {
  int32_t slot;
  int32_t first_token;  // of the sequence, in q
  int32_t num_tokens;   // of the sequence
  int32_t past;
  int32_t first_row;  // of this tile
  int32_t rows;       // of the sequence: num_tokens * group; 0: there is no such tile
  bool is_causal;

  /// The last key that a row sees.
  __device__ int32_t position(int32_t row, int32_t group) const {
    return past + (is_causal ? min(row, rows - 1) / group : num_tokens - 1);
  }
  /// Keys that at least one of `count` rows of the tile sees: [begin, end).
  __device__ int32_t key_begin(int32_t group, int32_t window) const {
    return window > 0 ? max(0, position(first_row, group) - window + 1) : 0;
  }
  __device__ int32_t key_end(int32_t count, int32_t group) const {
    return position(first_row + count - 1, group) + 1;
  }
};

/// Tile number `index` of `rows_per_tile` rows, in the order of sequences. Each warp finds it for
/// itself.
__device__ inline AttentionTile find_tile(const AttentionCall& call, int32_t index,
                                          int32_t rows_per_tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int32_t base = 0; base < call.num_sequences; base += 32) {
    int4 span = {0, 0, 0, 0};
    if (base + lane < call.num_sequences) {
      const int32_t* from = call.spans + 4 * (base + lane);
      span = {from[0], from[1], from[2], from[3]};
    }
    const int32_t tiles = (span.z * call.group + rows_per_tile - 1) / rows_per_tile;
    int32_t end = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += other;
    }
    const unsigned votes = __ballot_sync(~0u, index < end);
    if (votes == 0) {
      index -= __shfl_sync(~0u, end, 31);
      continue;
    }
    const int owner = __ffs(static_cast<int>(votes)) - 1;
    AttentionTile tile;
    tile.slot = __shfl_sync(~0u, span.x, owner);
    tile.first_token = __shfl_sync(~0u, span.y, owner);
    tile.num_tokens = __shfl_sync(~0u, span.z, owner);
    tile.past = __shfl_sync(~0u, span.w, owner);
    const int32_t before = __shfl_sync(~0u, end - tiles, owner);
    tile.first_row = (index - before) * rows_per_tile;
    tile.rows = tile.num_tokens * call.group;
    tile.is_causal = call.is_causal;
    return tile;
  }
  return {};
}

/// Keys of one split.
__device__ inline int32_t split_keys(const AttentionCall& call, int32_t keys) {
  const int32_t share = (keys + call.num_splits - 1) / call.num_splits;
  return max(kMinSplitKeys, (share + 15) / 16 * 16);
}

/// Element offset of a row in q and out.
__device__ inline int64_t row_offset(const AttentionCall& call, const AttentionTile& tile,
                                     int32_t kv_head, int32_t row) {
  const int64_t token = tile.first_token + row / call.group;
  const int64_t head = static_cast<int64_t>(kv_head) * call.group + row % call.group;
  return (token * call.num_kv_heads * call.group + head) * call.head_dim;
}

/// Element offset of a head's first key in the caches.
__device__ inline int64_t cache_offset(const AttentionCall& call, const AttentionTile& tile,
                                       int32_t kv_head) {
  return (static_cast<int64_t>(tile.slot) * call.num_kv_heads + kv_head) * call.max_tokens *
         call.head_dim;
}

__device__ inline bool sees(int32_t position, int32_t key, int32_t window) {
  return key <= position && (window == 0 || key > position - window);
}

/// 2^x.
__device__ inline float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

inline constexpr float kLog2E = 1.44269504f;
inline constexpr float kMinusInfinity = -__builtin_huge_valf();

/// What the sink of a row's head adds to its divisor; `max`: the row's largest score times log2(e).
__device__ inline float sink_weight(const AttentionCall& call, int32_t kv_head, int32_t row,
                                    float max) {
  if (call.sinks == nullptr) return 0;
  return exp2f(call.sinks[kv_head * call.group + row % call.group] * kLog2E - max);
}

}  // namespace cadre::cuda
