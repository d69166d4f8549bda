// Fresh rows of latent attention on their way into the cache, queries' rotation, and the sum over
// splits.
#include "backends/cuda/dense/attention_tiles.cuh"
#include "backends/cuda/dense/cuda_dense_ops.h"
#include "backends/cuda/dense/latent_kernels.h"
#include "core/check.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kHeads = 16;  // of a block that rotates queries
constexpr int kMaxSplits = kMaxLatentParts / kLatentAnyRows;

struct RowArgs {
  const float* fresh;
  const void* norm;
  DType norm_dtype;
  float eps;
  void* q_rope;
  int64_t token_stride;
  int64_t head_stride;
  int32_t heads;
  int32_t rank;
  int32_t half;
  bool interleaved;
  const float* cos;
  const float* sin;
  const int32_t* slots;
  const int32_t* positions;
  void* rows;
  DType dtype;
  int64_t max_tokens;
};

struct Pair {
  int32_t first;
  int32_t second;
};

__device__ Pair pair_of(const RowArgs& args, int32_t i) {
  return args.interleaved ? Pair{2 * i, 2 * i + 1} : Pair{i, i + args.half};
}

__device__ void store_row(const RowArgs& args, int64_t token) {
  __shared__ float sums[kWarps];
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t width = args.rank + 2 * args.half;
  const float* fresh = args.fresh + token * width;
  const int64_t to = (args.slots[token] * args.max_tokens + args.positions[token]) * width;
  float squares = 0;
  for (int32_t i = thread; i < args.rank; i += kThreads) squares += fresh[i] * fresh[i];
  squares = warp_sum(squares);
  if (thread % 32 == 0) sums[thread / 32] = squares;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += sums[w];
  const float factor = 1.0f / sqrtf(sum / static_cast<float>(args.rank) + args.eps);
  for (int32_t i = thread; i < args.rank; i += kThreads) {
    const float weight = load_one(args.norm, args.norm_dtype, i);
    store_one(fresh[i] * factor * weight, args.rows, args.dtype, to + i);
  }
  for (int32_t i = thread; i < args.half; i += kThreads) {
    const Pair pair = pair_of(args, i);
    const float a = fresh[args.rank + pair.first];
    const float b = fresh[args.rank + pair.second];
    const float c = args.cos[token * args.half + i];
    const float s = args.sin[token * args.half + i];
    store_one(a * c - b * s, args.rows, args.dtype, to + args.rank + pair.first);
    store_one(b * c + a * s, args.rows, args.dtype, to + args.rank + pair.second);
  }
}

__device__ void rotate_queries(const RowArgs& args, int64_t token, int32_t first_head) {
  const int32_t heads = min(kHeads, args.heads - first_head);
  for (auto i = static_cast<int32_t>(threadIdx.x); i < heads * args.half; i += kThreads) {
    const int32_t angle = i % args.half;
    const Pair pair = pair_of(args, angle);
    const int64_t head =
        token * args.token_stride + (first_head + i / args.half) * args.head_stride;
    const float a = load_one(args.q_rope, args.dtype, head + pair.first);
    const float b = load_one(args.q_rope, args.dtype, head + pair.second);
    const float c = args.cos[token * args.half + angle];
    const float s = args.sin[token * args.half + angle];
    store_one(a * c - b * s, args.q_rope, args.dtype, head + pair.first);
    store_one(b * c + a * s, args.q_rope, args.dtype, head + pair.second);
  }
}

__global__ void __launch_bounds__(kThreads) finish_latent_kernel(RowArgs args) {
  begin_dependent();
  const auto token = static_cast<int64_t>(blockIdx.x);
  if (blockIdx.y == 0) return store_row(args, token);
  rotate_queries(args, token, (static_cast<int32_t>(blockIdx.y) - 1) * kHeads);
}

// A block for each row of a tile.
__global__ void __launch_bounds__(kThreads)
    join_latent_kernel(const __grid_constant__ LatentCall call, int32_t rows_per_tile) {
  begin_dependent();
  const AttentionCall& base = call.base;
  const AttentionTile tile = find_tile(base, static_cast<int32_t>(blockIdx.x), rows_per_tile);
  const auto row = static_cast<int32_t>(blockIdx.y);
  if (tile.first_row + row >= tile.rows) return;
  const int32_t keys = tile.key_end(rows_per_tile, base.group);
  const int32_t share = split_keys(base, keys);
  const int32_t used = (keys + share - 1) / share;
  const int64_t row_size = base.head_dim + 2;
  const int64_t size = rows_per_tile * row_size;
  const float* first =
      base.partials + static_cast<int64_t>(blockIdx.x) * base.num_splits * size + row * row_size;
  const float* states = first + base.head_dim;  // maximum and divisor
  // What each split counts for.
  __shared__ float factors[kMaxSplits];
  const auto thread = static_cast<int32_t>(threadIdx.x);
  float max = kMinusInfinity;
  for (int32_t s = thread % 32; s < used; s += 32) max = fmaxf(max, states[s * size]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
  float divisor = 0;
  for (int32_t s = thread % 32; s < used; s += 32) {
    const float factor = states[s * size] == kMinusInfinity ? 0.0f : exp2f(states[s * size] - max);
    divisor += factor * states[s * size + 1];
    if (thread < 32) factors[s] = factor;
  }
  divisor = warp_sum(divisor);
  __syncthreads();
  const int64_t to = row_offset(base, tile, 0, tile.first_row + row);
  for (int32_t d = thread; d < base.head_dim; d += kThreads) {
    float sum = 0;
#pragma unroll 8
    for (int32_t s = 0; s < used; ++s) {
      // A split that sees nothing for this row has left nothing but its state.
      const float part = first[s * size + d];
      if (factors[s] != 0) sum += factors[s] * part;
    }
    store_one(sum / divisor, base.out, base.dtype, to + d);
  }
}

}  // namespace

void join_latent(const LatentCall& call, int32_t rows_per_tile, const Stream& stream) {
  const int64_t tiles = max_tiles(call.base, rows_per_tile);
  CADRE_ASSERT(tiles < INT32_MAX);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(rows_per_tile));
  launch("join_latent_kernel", join_latent_kernel, grid, kThreads, 0, stream_of(stream),
         dependent_launch(stream), call, rows_per_tile);
}

void CudaDenseOps::finish_latent(const LatentRowArgs& latent, const Stream& stream) {
  const int64_t num_tokens = latent.fresh.dim(0);
  if (num_tokens == 0) return;
  const MutableTensorView& q = latent.q_rope;
  RowArgs args = {};
  args.fresh = latent.fresh.as<float>();
  args.norm = latent.norm.data();
  args.norm_dtype = latent.norm.dtype();
  args.eps = latent.norm_eps;
  args.q_rope = q.mutable_data();
  args.token_stride = q.stride(0);
  args.head_stride = q.stride(1);
  args.heads = static_cast<int32_t>(q.dim(1));
  args.rank = static_cast<int32_t>(latent.norm.numel());
  args.half = static_cast<int32_t>(latent.cos.dim(1));
  args.interleaved = latent.interleaved;
  args.cos = latent.cos.as<float>();
  args.sin = latent.sin.as<float>();
  args.slots = latent.tokens.slots.as<int32_t>();
  args.positions = latent.tokens.positions.as<int32_t>();
  args.rows = latent.rows.mutable_data();
  args.dtype = latent.rows.dtype();
  args.max_tokens = latent.rows.dim(2);
  CADRE_ASSERT(q.dtype() == args.dtype && q.dim(2) == 2 * args.half &&
               latent.fresh.dim(1) == args.rank + 2 * args.half &&
               latent.rows.dim(3) == latent.fresh.dim(1) && num_tokens < INT32_MAX);
  const dim3 grid(static_cast<unsigned>(num_tokens),
                  static_cast<unsigned>(1 + (args.heads + kHeads - 1) / kHeads));
  launch("finish_latent_kernel", finish_latent_kernel, grid, kThreads, 0, stream_of(stream),
         dependent_launch(stream), args);
}

}  // namespace cadre::cuda
