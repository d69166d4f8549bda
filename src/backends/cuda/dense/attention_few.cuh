// Attention with few rows a sequence, on the tensor cores: every warp of a block streams its own
// keys and values through its own ring of shared memory, without a barrier, and keeps its own
// running softmax; the warps' results meet at the end.
#pragma once

#include <cooperative_groups.h>

#include "backends/cuda/dense/attention_tiles.cuh"
#include "backends/cuda/dense/finish.cuh"
#include "backends/cuda/dense/mma.cuh"

namespace cadre::cuda {

/// kDim: head_dim rounded up; what is beyond head_dim counts as zeros.
template <int kDim>
struct FewShape {
  static constexpr int kWarps = kDim > 128 ? 4 : 8;
  static constexpr int kKeys = 16;                    // of a warp at a time
  static constexpr int kStages = kDim > 128 ? 2 : 3;  // of a warp's ring
  static constexpr int kPieces = kDim / 8;            // 16-byte pieces of a key
  static constexpr int kTileBytes = kKeys * kDim * 2;
  static constexpr int kStageBytes = 2 * kTileBytes;  // keys and values
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kPitch = kDim + 4;  // floats of a row where the warps' results meet
  // Behind the rings: rows' results from all blocks of a cluster, sums, maximum and divisor.
  static constexpr int kResult = kDim + 4;  // floats
  static constexpr size_t kSharedBytes =
      static_cast<size_t>(kWarps) * kRingBytes + kFewRows * kResult * sizeof(float);
  static_assert(kRingBytes >= kFewRows * kPitch * 4);
};

/// Up to 16 keys and values on their way; those beyond `end` become zeros.
template <int kDim>
__device__ inline void request_keys(const AttentionCall& call, const uint16_t* keys,
                                    const uint16_t* values, int32_t first, int32_t end,
                                    uint32_t stage) {
  using S = FewShape<kDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < S::kKeys * S::kPieces / 32; ++i) {
    const int index = i * 32 + lane;
    const int key = index / S::kPieces;
    const int piece = index % S::kPieces;
    const bool valid = first + key < end && 8 * piece < call.head_dim;
    const int64_t from = valid ? static_cast<int64_t>(first + key) * call.head_dim + 8 * piece : 0;
    const uint32_t to = stage + piece_offset<kDim>(key, piece);
    copy_async(to, keys + from, valid);
    copy_async(to + S::kTileBytes, values + from, valid);
  }
}

/// What a block finishes by itself when each sequence has one new token: the queries of its group
/// and, in the block that has the token's position, its key and value.
template <typename T, int kDim>
struct FreshHeads {
  static constexpr int kKeyRow = kFewRows;
  static constexpr int kValueRow = kFewRows + 1;
  static constexpr int kPitch = kDim + 8;  // no two of eight rows in one bank

  T rows[kFewRows + 2][kPitch];

  /// By all threads; the rows are there after a barrier.
  __device__ void finish(const AttentionCall& call, const AttentionTile& tile, int32_t kv_head,
                         bool has_position) {
    constexpr int kLanes = kDim / 8;
    constexpr int kAtOnce = 32 * FewShape<kDim>::kWarps / kLanes;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const int heads = call.group + (has_position ? 2 : 0);
    for (int first = 0; first < heads; first += kAtOnce) {
      const int index = first + static_cast<int>(threadIdx.x) / kLanes;
      const int which = max(0, index - call.group + 1);  // q, k, v
      const HeadArgs& part = call.fresh.parts[min(which, 2)];
      const int64_t head = which > 0 ? kv_head : kv_head * call.group + index;
      float x[8];
      finish_eight<kLanes>(call.fresh, part, tile.first_token, head, lane, x);
      if (index >= heads) continue;
      store_eight(x, rows[which == 0 ? index : kFewRows - 1 + which], call.dtype, 8 * lane);
      if (which == 0) continue;
      const int64_t to = cache_offset(call, tile, kv_head) + static_cast<int64_t>(tile.past) * kDim;
      store_eight(x, part.cache, call.dtype, to + 8 * lane);
    }
  }

  /// Key and value into a stage, as its key number `key`. By one warp.
  __device__ void put(uint32_t stage, int key) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    constexpr int kPieces = FewShape<kDim>::kPieces;
    for (int i = lane; i < 2 * kPieces; i += 32) {
      const int piece = i % kPieces;
      const bool is_key = i < kPieces;
      const uint4 bits =
          *reinterpret_cast<const uint4*>(&rows[is_key ? kKeyRow : kValueRow][8 * piece]);
      const uint32_t to =
          stage + piece_offset<kDim>(key, piece) + (is_key ? 0 : FewShape<kDim>::kTileBytes);
      asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(bits.x), "r"(bits.y),
                   "r"(bits.z), "r"(bits.w)
                   : "memory");
    }
  }
};

/// The rows' running softmax of one warp: rows g and g + 8 of the lane.
template <int kDim>
struct FewState {
  float max[2] = {kMinusInfinity, kMinusInfinity};  // of scores times log2(e)
  float sum[2] = {0, 0};                            // of this lane's columns
  float acc[kDim / 8][4] = {};
};

/// 16 keys from `first` on. q: the queries as products take them.
template <typename T, int kDim>
__device__ inline void attend_keys(const AttentionCall& call, const uint32_t (&q)[kDim / 16][4],
                                   const int32_t (&positions)[2], int32_t first, int32_t end,
                                   uint32_t stage, FewState<kDim>& state) {
  using S = FewShape<kDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float scores[2][4] = {};
  float others[2][4] = {};  // of every second step, so that products wait less for each other
  const uint32_t key_address = stage + piece_offset<kDim>((lane / 16) * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t b[4];
    load_matrices<0>(at_column(key_address, k), b);
    auto& sums = k % 2 == 0 ? scores : others;
    mma<T>(sums[0], q[k][0], q[k][1], q[k][2], q[k][3], b[0], b[1]);
    mma<T>(sums[1], q[k][0], q[k][1], q[k][2], q[k][3], b[2], b[3]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) scores[i / 4][i % 4] += others[i / 4][i % 4];
  uint32_t p[4];
  float factors[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float max = state.max[half];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t key = first + 8 * (i / 2) + 2 * (lane % 4) + i % 2;
      float& score = scores[i / 2][2 * half + i % 2];
      score *= call.scale * kLog2E;
      if (key >= end || !sees(positions[half], key, call.window)) score = kMinusInfinity;
      max = fmaxf(max, score);
    }
    max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
    max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
    const float base = max == kMinusInfinity ? 0.0f : max;
    factors[half] = exp2_fast(state.max[half] - base);
    state.max[half] = max;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& score = scores[i / 2][2 * half + i % 2];
      score = exp2_fast(score - base);
      sum += score;
    }
    state.sum[half] = state.sum[half] * factors[half] + sum;
    p[half] = narrow_two<T>(scores[0][2 * half], scores[0][2 * half + 1]);
    p[2 + half] = narrow_two<T>(scores[1][2 * half], scores[1][2 * half + 1]);
  }
  if (__any_sync(~0u, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      state.acc[i][0] *= factors[0];
      state.acc[i][1] *= factors[0];
      state.acc[i][2] *= factors[1];
      state.acc[i][3] *= factors[1];
    }
  }
  const uint32_t value_address =
      stage + piece_offset<kDim>((lane / 8 % 2) * 8 + lane % 8, lane / 16);
#pragma unroll
  for (int d = 0; d < kDim / 16; ++d) {
    uint32_t b[4];
    load_matrices_transposed<S::kTileBytes>(at_column(value_address, d), b);
    mma<T>(state.acc[2 * d], p[0], p[1], p[2], p[3], b[0], b[1]);
    mma<T>(state.acc[2 * d + 1], p[0], p[1], p[2], p[3], b[2], b[3]);
  }
}

/// Elements [d, d + 2) of a row of q.
__device__ inline uint32_t load_query(const AttentionCall& call, int64_t row, int d) {
  if (d >= call.head_dim) return 0;
  return *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(call.q) + row + d);
}

/// The warps' results become the block's. result_of(row): where those of a row go.
template <int kDim, typename ResultOf>
__device__ inline void join_warps(FewState<kDim>& state, float* memory, const ResultOf& result_of) {
  using S = FewShape<kDim>;
  __shared__ float states[2][S::kWarps][kFewRows];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  float* mine = memory + warp * kFewRows * S::kPitch;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = 8 * half + lane / 4;
    float sum = state.sum[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (lane % 4 == 0) {
      states[0][warp][row] = state.max[half];
      states[1][warp][row] = sum;
    }
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      float* to = mine + row * S::kPitch + 8 * i + 2 * (lane % 4);
      *reinterpret_cast<float2*>(to) = {state.acc[i][2 * half], state.acc[i][2 * half + 1]};
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kFewRows * (kDim / 4); i += 32 * S::kWarps) {
    const int row = i / (kDim / 4);
    const int d = 4 * (i % (kDim / 4));
    float max = kMinusInfinity;
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) max = fmaxf(max, states[0][w][row]);
    float divisor = 0;
    float4 sum = {0, 0, 0, 0};
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) {
      if (states[0][w][row] == kMinusInfinity) continue;
      const float factor = exp2f(states[0][w][row] - max);
      const float4 from =
          *reinterpret_cast<const float4*>(memory + (w * kFewRows + row) * S::kPitch + d);
      divisor += factor * states[1][w][row];
      sum.x += factor * from.x;
      sum.y += factor * from.y;
      sum.z += factor * from.z;
      sum.w += factor * from.w;
    }
    float* result = result_of(row);
    *reinterpret_cast<float4*>(result + d) = sum;
    if (d == 0) *reinterpret_cast<float2*>(result + kDim) = {max, divisor};
  }
}

/// Sums over the splits' results become outputs. This block has rows `first`, first + splits, ...;
/// `results` [splits][rows of this block].
template <int kDim>
__device__ inline void write_rows(const AttentionCall& call, const AttentionTile& tile,
                                  int32_t kv_head, int first, const float* results) {
  using S = FewShape<kDim>;
  const int splits = call.num_splits;
  const int rows = kFewRows / splits;
  for (int i = static_cast<int>(threadIdx.x); i < rows * (kDim / 2); i += 32 * S::kWarps) {
    const int place = i / (kDim / 2);
    const int row = first + place * splits;
    const int d = 2 * (i % (kDim / 2));
    if (tile.first_row + row >= tile.rows || d >= call.head_dim) continue;
    float max = kMinusInfinity;
    for (int s = 0; s < splits; ++s) {
      max = fmaxf(max, results[(s * rows + place) * S::kResult + kDim]);
    }
    float divisor = 0;
    float2 sum = {0, 0};
    for (int s = 0; s < splits; ++s) {
      const float* result = results + (s * rows + place) * S::kResult;
      const float factor = result[kDim] == kMinusInfinity ? 0.0f : exp2f(result[kDim] - max);
      divisor += factor * result[kDim + 1];
      sum.x += factor * result[d];
      sum.y += factor * result[d + 1];
    }
    divisor += sink_weight(call, kv_head, tile.first_row + row, max);
    const int64_t to = row_offset(call, tile, kv_head, tile.first_row + row) + d;
    store_one(sum.x / divisor, call.out, call.dtype, to);
    store_one(sum.y / divisor, call.out, call.dtype, to + 1);
  }
}

/// A split's results for join_splits().
template <int kDim>
__device__ inline void leave_partial(const AttentionCall& call, const float* results) {
  using S = FewShape<kDim>;
  const int64_t part = static_cast<int64_t>(blockIdx.x) * call.num_splits + blockIdx.y;
  float* partial = call.partials + part * (kFewRows * (call.head_dim + 2));
  for (int i = static_cast<int>(threadIdx.x); i < kFewRows * (kDim + 2); i += 32 * S::kWarps) {
    const int row = i / (kDim + 2);
    const int d = i % (kDim + 2);
    const float value = results[row * S::kResult + d];
    if (d < call.head_dim) partial[row * call.head_dim + d] = value;
    if (d >= kDim) partial[kFewRows * (call.head_dim + d - kDim) + row] = value;
  }
}

template <typename T, int kDim, bool kFresh>
__global__ void __launch_bounds__(32 * FewShape<kDim>::kWarps)
    attend_few_kernel(const __grid_constant__ AttentionCall call) {
  using S = FewShape<kDim>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const auto kv_head = static_cast<int32_t>(blockIdx.x % call.num_kv_heads);
  const AttentionTile tile =
      find_tile(call, static_cast<int32_t>(blockIdx.x / call.num_kv_heads), kFewRows);
  if (tile.rows == 0) return begin_dependent();  // whole clusters
  const int32_t all_begin = tile.key_begin(call.group, call.window);
  const int32_t all_end = tile.key_end(kFewRows, call.group);
  const int32_t share = split_keys(call, all_end - all_begin);
  const int32_t begin = all_begin + static_cast<int32_t>(blockIdx.y) * share;
  const int32_t end = min(begin + share, all_end);
  const bool in_cluster = call.num_splits > 1 && call.partials == nullptr;
  if (begin >= end && !in_cluster) return begin_dependent();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (in_cluster) cooperative_groups::this_cluster().barrier_arrive();
#endif
  const int64_t offset = cache_offset(call, tile, kv_head);
  const auto* keys = static_cast<const uint16_t*>(call.keys) + offset;
  const auto* values = static_cast<const uint16_t*>(call.values) + offset;
  const uint32_t ring = shared_address(memory) + warp * S::kRingBytes;
  constexpr int kStride = S::kWarps * S::kKeys;
  int32_t next = begin + warp * S::kKeys;
  int ahead = 0;
  const int32_t stored = kFresh ? min(end, tile.past) : end;  // keys in the cache
  const auto request = [&] {
    request_keys<kDim>(call, keys, values, next, stored, ring + ahead * S::kStageBytes);
    commit_copies();
    next += kStride;
    ++ahead;
  };
  // What was there before this step does not depend on the kernel ahead.
  while (ahead < S::kStages - 1 && min(next + S::kKeys, stored) <= tile.past) request();
  begin_short();
  while (ahead < S::kStages - 1) request();
  __shared__ __align__(16) unsigned char fresh_memory[kFresh ? sizeof(FreshHeads<T, kDim>) : 16];
  auto& fresh = *reinterpret_cast<FreshHeads<T, kDim>*>(fresh_memory);
  if constexpr (kFresh) {
    fresh.finish(call, tile, kv_head, begin <= tile.past && tile.past < end);
    __syncthreads();
  }
  int32_t positions[2];
  uint32_t q[kDim / 16][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = min(tile.first_row + 8 * half + lane / 4, tile.rows - 1);
    positions[half] = tile.position(row, call.group);
    const int64_t from = row_offset(call, tile, kv_head, row);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const int d = 16 * k + 2 * (lane % 4);
      if constexpr (kFresh) {
        q[k][half] = *reinterpret_cast<const uint32_t*>(&fresh.rows[row][d]);
        q[k][2 + half] = *reinterpret_cast<const uint32_t*>(&fresh.rows[row][d + 8]);
      } else {
        q[k][half] = load_query(call, from, d);
        q[k][2 + half] = load_query(call, from, d + 8);
      }
    }
  }
  FewState<kDim> state;
  int stage = 0;
  for (int32_t first = begin + warp * S::kKeys; first < end; first += kStride) {
    ahead = stage == 0 ? S::kStages - 1 : stage - 1;
    request();
    wait_for_copies<S::kStages - 1>();
    __syncwarp();
    if constexpr (kFresh) {
      if (tile.past - first >= 0 && tile.past - first < S::kKeys) {
        fresh.put(ring + stage * S::kStageBytes, tile.past - first);
        __syncwarp();
      }
    }
    attend_keys<T, kDim>(call, q, positions, first, end, ring + stage * S::kStageBytes, state);
    __syncwarp();
    stage = stage == S::kStages - 1 ? 0 : stage + 1;
  }
  wait_for_copies<0>();
  __syncthreads();
  float* sums = reinterpret_cast<float*>(memory);
  float* results = reinterpret_cast<float*>(memory + S::kWarps * S::kRingBytes);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (in_cluster) {
    // Row r goes to block r % splits of the cluster.
    const auto cluster = cooperative_groups::this_cluster();
    const int rows = kFewRows / call.num_splits;
    cluster.barrier_wait();  // all blocks are there
    join_warps<kDim>(state, sums, [&](int row) {
      const auto source = static_cast<int>(blockIdx.y);
      float* mine = results + (source * rows + row / call.num_splits) * S::kResult;
      return cluster.map_shared_rank(mine, row % call.num_splits);
    });
    cluster.sync();
    return write_rows<kDim>(call, tile, kv_head, static_cast<int>(blockIdx.y), results);
  }
#endif
  join_warps<kDim>(state, sums, [&](int row) { return results + row * S::kResult; });
  __syncthreads();
  if (call.partials != nullptr) return leave_partial<kDim>(call, results);
  write_rows<kDim>(call, tile, kv_head, 0, results);
}

}  // namespace cadre::cuda
