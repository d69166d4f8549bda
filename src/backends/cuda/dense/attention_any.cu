// Attention by plain multiply-adds in float32, for whatever the tensor cores' kernels do not take,
// and the sum over splits.
#include "backends/cuda/dense/attention_tiles.cuh"
#include "core/check.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kRowsPerWarp = kFewRows / kWarps;
constexpr int kKeys = 32;                   // of a block: one a lane
constexpr int kMaxDims = kMaxHeadDim / 32;  // dimensions of a lane

// Shared memory: queries [kFewRows][dim], keys and values [kKeys][dim + 1].
struct Shared {
  float* q;
  float* k;
  float* v;
  int32_t pitch;

  __device__ Shared(float* memory, int32_t dim) {
    q = memory;
    k = q + kFewRows * dim;
    pitch = dim | 1;  // odd: rows in different banks
    v = k + kKeys * pitch;
  }
  static size_t bytes(int32_t dim) {
    return static_cast<size_t>(kFewRows * dim + 2 * kKeys * (dim | 1)) * sizeof(float);
  }
};

struct State {
  float max[kRowsPerWarp];
  float sum[kRowsPerWarp];
  float acc[kRowsPerWarp][kMaxDims];
};

__device__ void load_block(const AttentionCall& call, int64_t offset, int32_t first, int32_t count,
                           const Shared& shared) {
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kKeys * call.head_dim; i += kThreads) {
    const int32_t key = i / call.head_dim;
    const int32_t d = i % call.head_dim;
    const int64_t from = offset + static_cast<int64_t>(first) * call.head_dim + i;
    shared.k[key * shared.pitch + d] = key < count ? load_one(call.keys, call.dtype, from) : 0.0f;
    shared.v[key * shared.pitch + d] = key < count ? load_one(call.values, call.dtype, from) : 0.0f;
  }
}

// A block of keys for the rows of a warp; lane l has key first + l.
__device__ void attend_block(const AttentionCall& call, const AttentionTile& tile,
                             const Shared& shared, int32_t first, int32_t end, State& state) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int32_t dim = call.head_dim;
  float scores[kRowsPerWarp] = {};
  for (int32_t d = 0; d < dim; ++d) {
    const float key = shared.k[lane * shared.pitch + d];
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      scores[r] += shared.q[(warp * kRowsPerWarp + r) * dim + d] * key;
    }
  }
#pragma unroll
  for (int r = 0; r < kRowsPerWarp; ++r) {
    const int32_t position = tile.position(tile.first_row + warp * kRowsPerWarp + r, call.group);
    const bool visible = first + lane < end && sees(position, first + lane, call.window);
    float max = visible ? scores[r] : kMinusInfinity;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
    }
    max = fmaxf(max, state.max[r]);
    if (max == kMinusInfinity) continue;  // nothing yet; the same for the whole warp
    const float weight = visible ? expf(scores[r] - max) : 0.0f;
    const float factor = expf(state.max[r] - max);
    state.max[r] = max;
    state.sum[r] = state.sum[r] * factor + warp_sum(weight);
#pragma unroll
    for (int i = 0; i < kMaxDims; ++i) state.acc[r][i] *= factor;
    for (int key = 0; key < kKeys; ++key) {
      const float w = __shfl_sync(~0u, weight, key);
#pragma unroll
      for (int i = 0; i < kMaxDims; ++i) {
        const int32_t d = lane + 32 * i;
        if (d < dim) state.acc[r][i] += w * shared.v[key * shared.pitch + d];
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) attend_any_kernel(AttentionCall call) {
  extern __shared__ float memory[];
  begin_dependent();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const auto kv_head = static_cast<int32_t>(blockIdx.x % call.num_kv_heads);
  const AttentionTile tile =
      find_tile(call, static_cast<int32_t>(blockIdx.x / call.num_kv_heads), kFewRows);
  if (tile.rows == 0) return;
  const Shared shared(memory, call.head_dim);
  const int32_t all_begin = tile.key_begin(call.group, call.window);
  const int32_t all_end = tile.key_end(kFewRows, call.group);
  const int32_t share = split_keys(call, all_end - all_begin);
  const int32_t begin = all_begin + static_cast<int32_t>(blockIdx.y) * share;
  const int32_t end = min(begin + share, all_end);
  if (begin >= end) return;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kFewRows * call.head_dim; i += kThreads) {
    const int32_t row = min(tile.first_row + i / call.head_dim, tile.rows - 1);
    const int64_t from = row_offset(call, tile, kv_head, row) + i % call.head_dim;
    shared.q[i] = load_one(call.q, call.dtype, from) * call.scale;
  }
  State state;
#pragma unroll
  for (int r = 0; r < kRowsPerWarp; ++r) {
    state.max[r] = kMinusInfinity;
    state.sum[r] = 0;
#pragma unroll
    for (int i = 0; i < kMaxDims; ++i) state.acc[r][i] = 0;
  }
  const int64_t offset = cache_offset(call, tile, kv_head);
  for (int32_t first = begin; first < end; first += kKeys) {
    __syncthreads();
    load_block(call, offset, first, min(kKeys, end - first), shared);
    __syncthreads();
    attend_block(call, tile, shared, first, end, state);
  }
  float* partial =
      call.num_splits > 1
          ? call.partials + (static_cast<int64_t>(blockIdx.x) * call.num_splits + blockIdx.y) *
                                (kFewRows * (call.head_dim + 2))
          : nullptr;
#pragma unroll
  for (int r = 0; r < kRowsPerWarp; ++r) {
    const int row = warp * kRowsPerWarp + r;
    if (tile.first_row + row >= tile.rows) continue;
    const float factor = 1.0f / (state.sum[r] + sink_weight(call, kv_head, tile.first_row + row,
                                                            state.max[r] * kLog2E));
#pragma unroll
    for (int i = 0; i < kMaxDims; ++i) {
      const int32_t d = lane + 32 * i;
      if (d >= call.head_dim) continue;
      if (partial != nullptr) {
        partial[row * call.head_dim + d] = state.acc[r][i];
      } else {
        const int64_t to = row_offset(call, tile, kv_head, tile.first_row + row) + d;
        store_one(state.acc[r][i] * factor, call.out, call.dtype, to);
      }
    }
    if (partial != nullptr && lane == 0) {
      float* states = partial + kFewRows * call.head_dim;
      states[row] = state.max[r] * kLog2E;
      states[kFewRows + row] = state.sum[r];
    }
  }
}

// A block for each row of a tile; its warps take splits in turn.
__global__ void __launch_bounds__(kThreads) join_splits_kernel(AttentionCall call) {
  __shared__ float sums[kWarps][kMaxHeadDim];
  begin_dependent();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const auto kv_head = static_cast<int32_t>(blockIdx.x % call.num_kv_heads);
  const AttentionTile tile =
      find_tile(call, static_cast<int32_t>(blockIdx.x / call.num_kv_heads), kFewRows);
  const auto row = static_cast<int32_t>(blockIdx.y);
  if (tile.first_row + row >= tile.rows) return;
  const int32_t keys = tile.key_end(kFewRows, call.group) - tile.key_begin(call.group, call.window);
  const int32_t share = split_keys(call, keys);
  const int32_t used = (keys + share - 1) / share;
  const int64_t size = kFewRows * (call.head_dim + 2);
  const float* first = call.partials + static_cast<int64_t>(blockIdx.x) * call.num_splits * size;
  const float* states = first + kFewRows * call.head_dim + row;
  float max = kMinusInfinity;
  for (int32_t s = lane; s < used; s += 32) max = fmaxf(max, states[s * size]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
  float divisor = 0;
  for (int32_t s = lane; s < used; s += 32) {
    divisor += exp2f(states[s * size] - max) * states[s * size + kFewRows];
  }
  divisor = warp_sum(divisor) + sink_weight(call, kv_head, tile.first_row + row, max);
  float acc[kMaxDims] = {};
#pragma unroll 4
  for (int32_t s = warp; s < used; s += kWarps) {
    const float factor = exp2f(states[s * size] - max);
    const float* from = first + s * size + row * call.head_dim;
#pragma unroll
    for (int i = 0; i < kMaxDims; ++i) {
      const int32_t d = lane + 32 * i;
      if (d < call.head_dim && factor != 0) acc[i] += factor * from[d];
    }
  }
#pragma unroll
  for (int i = 0; i < kMaxDims; ++i) sums[warp][lane + 32 * i] = acc[i];
  __syncthreads();
  const int64_t to = row_offset(call, tile, kv_head, tile.first_row + row);
  for (int32_t d = static_cast<int32_t>(threadIdx.x); d < call.head_dim; d += kThreads) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[w][d];
    store_one(sum / divisor, call.out, call.dtype, to + d);
  }
}

dim3 tile_grid(const AttentionCall& call, int64_t second) {
  const int64_t blocks = max_tiles(call, kFewRows) * call.num_kv_heads;
  CADRE_ASSERT(blocks < INT32_MAX && second < 65536);
  return {static_cast<unsigned>(blocks), static_cast<unsigned>(second)};
}

}  // namespace

void attend_any(const AttentionCall& call, const Stream& stream) {
  CADRE_ASSERT(call.head_dim <= kMaxHeadDim);
  const size_t bytes = Shared::bytes(call.head_dim);
  allow_shared_memory(attend_any_kernel, bytes);
  launch("attend_any_kernel", attend_any_kernel, tile_grid(call, call.num_splits), kThreads, bytes,
         stream_of(stream), dependent_launch(stream), call);
}

void join_splits(const AttentionCall& call, const Stream& stream) {
  launch("join_splits_kernel", join_splits_kernel, tile_grid(call, kFewRows), kThreads, 0,
         stream_of(stream), dependent_launch(stream), call);
}

}  // namespace cadre::cuda
