// Latent attention by plain multiply-adds in float32, for whatever the tensor cores' kernel does
// not take. A warp has two rows of a tile; lane l has key l % 16 of a block for row l / 16.
#include "backends/cuda/dense/attention_tiles.cuh"
#include "backends/cuda/dense/latent_kernels.h"
#include "core/check.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 2;                       // of a warp
constexpr int kKeys = 16;                      // of a block
constexpr int kMaxDims = kMaxLatentRank / 32;  // of a lane
static_assert(kLatentAnyRows == kThreads / 32 * kRows);

// Floats: queries [kLatentAnyRows][width], rows of the cache [kKeys][width | 1].
size_t shared_bytes(int32_t width) {
  return static_cast<size_t>(kLatentAnyRows * width + kKeys * (width | 1)) * sizeof(float);
}

struct State {
  float max[kRows] = {kMinusInfinity, kMinusInfinity};  // of scores times log2(e)
  float sum[kRows] = {};
  float acc[kRows][kMaxDims] = {};
};

__device__ void load_queries(const LatentCall& call, const AttentionTile& tile, float* q) {
  const AttentionCall& base = call.base;
  const int32_t width = base.head_dim + call.rope_dim;
  for (auto i = static_cast<int32_t>(threadIdx.x); i < kLatentAnyRows * width; i += kThreads) {
    const int32_t row = min(tile.first_row + i / width, tile.rows - 1);
    const int32_t d = i % width;
    float x;
    if (d < base.head_dim) {
      x = load_one(base.q, base.dtype, row_offset(base, tile, 0, row) + d);
    } else {
      const int64_t head = (tile.first_token + row / base.group) * call.token_stride +
                           (row % base.group) * call.head_stride;
      x = load_one(call.q_rope, base.dtype, head + d - base.head_dim);
    }
    q[i] = x * base.scale * kLog2E;
  }
}

// Keys [first, first + kKeys) for the rows of a warp.
__device__ void attend_block(const LatentCall& call, const AttentionTile& tile, const float* q,
                             const float* rows, int32_t first, int32_t end, State& state) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int32_t rank = call.base.head_dim;
  const int32_t width = rank + call.rope_dim;
  const int32_t pitch = width | 1;
  const int row = warp * kRows + lane / kKeys;
  const int32_t key = first + lane % kKeys;
  float score = 0;
  for (int32_t d = 0; d < width; ++d) score += q[row * width + d] * rows[lane % kKeys * pitch + d];
  const bool visible = key < end && key <= tile.position(tile.first_row + row, call.base.group);
  float max = visible ? score : kMinusInfinity;
#pragma unroll
  for (int step = kKeys / 2; step > 0; step /= 2) {
    max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
  }
  max = fmaxf(max, lane < kKeys ? state.max[0] : state.max[1]);
  const float weight = visible ? exp2f(score - max) : 0.0f;
  float sum = weight;
#pragma unroll
  for (int step = kKeys / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float row_max = __shfl_sync(~0u, max, r * kKeys);
    const float row_sum = __shfl_sync(~0u, sum, r * kKeys);
    const float factor = state.max[r] == kMinusInfinity ? 0.0f : exp2f(state.max[r] - row_max);
    state.max[r] = row_max;
    state.sum[r] = state.sum[r] * factor + row_sum;
#pragma unroll
    for (int i = 0; i < kMaxDims; ++i) state.acc[r][i] *= factor;
  }
  for (int k = 0; k < kKeys; ++k) {
    const float weights[kRows] = {__shfl_sync(~0u, weight, k), __shfl_sync(~0u, weight, kKeys + k)};
#pragma unroll
    for (int i = 0; i < kMaxDims; ++i) {
      const int32_t d = lane + 32 * i;
      if (d >= rank) continue;
      const float value = rows[k * pitch + d];
#pragma unroll
      for (int r = 0; r < kRows; ++r) state.acc[r][i] += weights[r] * value;
    }
  }
}

__device__ void leave(const LatentCall& call, const AttentionTile& tile, const State& state) {
  const AttentionCall& base = call.base;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = static_cast<int>(threadIdx.x) / 32 * kRows + r;
    if (tile.first_row + row >= tile.rows) continue;
    const int64_t part = static_cast<int64_t>(blockIdx.x) * base.num_splits + blockIdx.y;
    float* partial = base.partials == nullptr
                         ? nullptr
                         : base.partials + (part * kLatentAnyRows + row) * (base.head_dim + 2);
    const int64_t to = row_offset(base, tile, 0, tile.first_row + row);
#pragma unroll
    for (int i = 0; i < kMaxDims; ++i) {
      const int32_t d = lane + 32 * i;
      if (d >= base.head_dim) continue;
      if (partial != nullptr) {
        partial[d] = state.acc[r][i];
      } else {
        store_one(state.acc[r][i] / state.sum[r], base.out, base.dtype, to + d);
      }
    }
    if (partial != nullptr && lane == 0) {
      partial[base.head_dim] = state.max[r];
      partial[base.head_dim + 1] = state.sum[r];
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    latent_any_kernel(const __grid_constant__ LatentCall call) {
  extern __shared__ float memory[];
  begin_dependent();
  const AttentionCall& base = call.base;
  const AttentionTile tile = find_tile(base, static_cast<int32_t>(blockIdx.x), kLatentAnyRows);
  if (tile.rows == 0) return;
  const int32_t all = tile.key_end(kLatentAnyRows, base.group);
  const int32_t share = split_keys(base, all);
  const int32_t begin = static_cast<int32_t>(blockIdx.y) * share;
  const int32_t end = min(begin + share, all);
  if (begin >= end) return;
  const int32_t width = base.head_dim + call.rope_dim;
  float* q = memory;
  float* rows = q + kLatentAnyRows * width;
  load_queries(call, tile, q);
  State state;
  const int64_t cache = tile.slot * base.max_tokens * width;
  for (int32_t first = begin; first < end; first += kKeys) {
    __syncthreads();
    const int32_t count = min(kKeys, end - first) * width;
    for (auto i = static_cast<int32_t>(threadIdx.x); i < kKeys * width; i += kThreads) {
      const int64_t from = cache + static_cast<int64_t>(first) * width + i;
      rows[i / width * (width | 1) + i % width] =
          i < count ? load_one(base.keys, base.dtype, from) : 0.0f;
    }
    __syncthreads();
    attend_block(call, tile, q, rows, first, end, state);
  }
  leave(call, tile, state);
}

}  // namespace

void latent_any(const LatentCall& call, const Stream& stream) {
  const int64_t tiles = max_tiles(call.base, kLatentAnyRows);
  CADRE_ASSERT(tiles < INT32_MAX);
  const size_t bytes = shared_bytes(call.base.head_dim + call.rope_dim);
  allow_shared_memory(latent_any_kernel, bytes);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(call.base.num_splits));
  launch("latent_any_kernel", latent_any_kernel, grid, kThreads, bytes, stream_of(stream),
         dependent_launch(stream), call);
}

}  // namespace cadre::cuda
