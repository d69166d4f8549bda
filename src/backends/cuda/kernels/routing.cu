// Sorting pairs by expert. Few pairs: one block does all of it. Many: a first kernel counts the
// experts of each tile of pairs, a second one ranks the pairs of its tile while the first still
// runs, adds up the counts of the tiles before it and writes. Stable by construction.
#include <algorithm>
#include <limits>

#include "backends/cuda/kernels/launch.h"
#include "backends/cuda/kernels/routing.h"
#include "backends/cuda/kernels/routing_block.cuh"
#include "cadre/error.h"
#include "core/check.h"
#include "core/str_cat.h"

namespace cadre::cuda {
namespace {

using namespace routing;  // NOLINT(google-build-using-namespace): the other half of this file

constexpr int64_t kMaxPairsOfOneBlock = kMaxRounds * kMaxWarps * 32;
constexpr int64_t kTilePairs = kMaxWarps * 32;  // a round; more where that makes too many tiles
constexpr int64_t kMaxCounts = 65536;  // experts * tiles: each block of the second kernel reads all

int warps_for(int64_t num_experts) { return num_experts <= 2048 ? kMaxWarps : 4; }

int64_t pitch_for(int64_t num_experts) { return (num_experts + 3) / 4 * 4; }

int64_t num_tiles_for(int64_t num_pairs, int64_t num_experts) {
  const int64_t most = num_pairs >= 64 * kMaxPairsOfOneBlock ? 128 : 64;
  int64_t tiles = 4;
  while (tiles < most && tiles * kTilePairs < num_pairs && 2 * tiles * num_experts <= kMaxCounts) {
    tiles *= 2;
  }
  return tiles;
}

// ---- kernels -----------------------------------------------------------------------------------

/// By all threads of the grid, after the wait for the kernel before, which may still count.
__device__ void clear_counters(const RoutingPlan& plan) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < plan.num_counters;
       i += step) {
    plan.counters[i] = 0;
  }
}

template <typename Id>
__global__ void __launch_bounds__(kMaxWarpsOfOneBlock * 32, 1)
    plan_in_one_block(Ids<Id> ids, int rounds, RoutingPlan plan) {
  const Shared shared(ids.num_experts, ids.num_pairs);
  __shared__ int scratch[32];
  const int num_warps = blockDim.x / 32;
  zero_counts(shared.counts, num_warps, ids.num_experts);
  for (int e = threadIdx.x; e < ids.num_experts; e += blockDim.x) shared.rows[e] = 0;
  wait_for_previous_kernel();
  let_next_kernel_start();
  __syncthreads();
  Chunk chunk;
  chunk.rank_pairs(ids, 0, ids.num_pairs, rounds, shared.counts);
  __syncthreads();
  sum_over_warps(shared.counts, num_warps, ids.num_experts, shared.totals);
  __syncthreads();
  clear_counters(plan);
  const int num_rows =
      add_first_rows(shared.totals, ids.num_experts, shared.rows, plan.expert_offsets, scratch);
  // Sorted in shared memory first: scattered writes to the device's are slow from one block.
  RoutingPlan here = plan;
  here.pair_of_row = shared.parts;
  chunk.write(here, 0, ids.num_pairs, rounds, shared.counts, shared.rows, ids.num_experts);
  __syncthreads();
  for (uint32_t r = threadIdx.x; r < ids.num_pairs; r += blockDim.x) {
    plan.pair_of_row[r] = static_cast<int>(r) < num_rows ? here.pair_of_row[r] : -1;
  }
}

/// counts [num_tiles][pitch], pitch >= num_experts and a multiple of four; tile i is the pairs
/// [i, i + 1) * tile_pairs.
struct TileCounts {
  int32_t* counts;
  int num_tiles;
  int pitch;
  uint32_t tile_pairs;
  int rounds;  // of a chunk

  template <typename Id>
  __device__ void range(const Ids<Id>& ids, uint32_t& begin, uint32_t& end) const {
    const uint64_t first = static_cast<uint64_t>(blockIdx.x) * tile_pairs;
    begin = static_cast<uint32_t>(min(first, static_cast<uint64_t>(ids.num_pairs)));
    end = static_cast<uint32_t>(min(first + tile_pairs, static_cast<uint64_t>(ids.num_pairs)));
  }
};

template <typename Id>
__global__ void __launch_bounds__(kMaxWarps * 32, 1) count_tiles(Ids<Id> ids, TileCounts tiles) {
  extern __shared__ int histogram[];
  for (int e = threadIdx.x; e < ids.num_experts; e += blockDim.x) histogram[e] = 0;
  wait_for_previous_kernel();
  let_next_kernel_start();
  __syncthreads();
  uint32_t begin, end;
  tiles.range(ids, begin, end);
  for (uint32_t base = begin; base < end; base += kMaxRounds * blockDim.x) {
    Id id[kMaxRounds];
#pragma unroll
    for (int r = 0; r < kMaxRounds; ++r) {
      const uint32_t p = base + r * blockDim.x + threadIdx.x;
      id[r] = -1;
      if (p < end) id[r] = ids.load(p);
    }
#pragma unroll
    for (int r = 0; r < kMaxRounds; ++r) {
      const int expert = ids.expert_of(id[r]);
      if (expert >= 0) atomicAdd(&histogram[expert], 1);
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < ids.num_experts; e += blockDim.x) {
    tiles.counts[blockIdx.x * tiles.pitch + e] = histogram[e];
  }
}

__device__ void add_if(bool counts, int4& sum, const int4& value) {
  if (!counts) return;
  sum.x += value.x;
  sum.y += value.y;
  sum.z += value.z;
  sum.w += value.w;
}

// Sums of each expert's counts over the tiles before this block's, and over all. A thread reads
// four neighbouring experts of every `groups`-th tile; `parts` [groups][2][pitch] brings the
// threads together.
__device__ void sum_over_tiles(const TileCounts& tiles, int num_experts, int* parts, int* before,
                               int* totals) {
  constexpr int kInFlight = 8;
  const int vectors = tiles.pitch / 4;
  const int groups = max(1, static_cast<int>(blockDim.x) / vectors);
  const int group = groups == 1 ? 0 : static_cast<int>(threadIdx.x) / vectors;
  const int step = groups == 1 ? blockDim.x : vectors;
  const int first_vector = groups == 1 ? threadIdx.x : threadIdx.x % vectors;
  for (int v = first_vector; v < vectors && group < groups; v += step) {
    int4 below = {};
    int4 all = {};
    for (int first = group; first < tiles.num_tiles; first += groups * kInFlight) {
      int4 c[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int tile = min(first + i * groups, tiles.num_tiles - 1);
        c[i] = __ldcg(reinterpret_cast<const int4*>(tiles.counts + tile * tiles.pitch) + v);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int tile = first + i * groups;
        add_if(tile < tiles.num_tiles, all, c[i]);
        add_if(tile < static_cast<int>(blockIdx.x), below, c[i]);
      }
    }
    reinterpret_cast<int4*>(parts + 2 * group * tiles.pitch)[v] = below;
    reinterpret_cast<int4*>(parts + (2 * group + 1) * tiles.pitch)[v] = all;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
    int below = 0;
    int all = 0;
    for (int g = 0; g < groups; ++g) {
      below += parts[2 * g * tiles.pitch + e];
      all += parts[(2 * g + 1) * tiles.pitch + e];
    }
    before[e] = below;
    totals[e] = all;
  }
}

template <typename Id>
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    scatter_tiles(Ids<Id> ids, TileCounts tiles, RoutingPlan plan) {
  const Shared shared(ids.num_experts, num_parts(tiles.pitch, blockDim.x));
  __shared__ int scratch[32];
  const int num_warps = blockDim.x / 32;
  const uint32_t chunk_pairs = tiles.rounds * blockDim.x;
  uint32_t begin, end;
  tiles.range(ids, begin, end);
  zero_counts(shared.counts, num_warps, ids.num_experts);
  __syncthreads();
  // The kernel before lets this one start after it has seen the ids: they may be read already.
  Chunk chunk;
  chunk.rank_pairs(ids, begin, end, tiles.rounds, shared.counts);
  wait_for_previous_kernel();
  let_next_kernel_start();
  sum_over_tiles(tiles, ids.num_experts, shared.parts, shared.rows, shared.totals);
  __syncthreads();
  clear_counters(plan);
  const int num_rows = add_first_rows(shared.totals, ids.num_experts, shared.rows,
                                      blockIdx.x == 0 ? plan.expert_offsets : nullptr, scratch);
  for (uint32_t first = begin; first < end; first += chunk_pairs) {
    if (first != begin) {
      for (int e = threadIdx.x; e < ids.num_experts; e += blockDim.x) {
        shared.rows[e] += shared.totals[e];
      }
      zero_counts(shared.counts, num_warps, ids.num_experts);
      __syncthreads();
      chunk.rank_pairs(ids, first, end, tiles.rounds, shared.counts);
      __syncthreads();
    }
    sum_over_warps(shared.counts, num_warps, ids.num_experts, shared.totals);
    __syncthreads();
    chunk.write(plan, first, end, tiles.rounds, shared.counts, shared.rows, ids.num_experts);
    __syncthreads();
  }
  fill_tail(plan, begin, end, num_rows);
}

// ---- host --------------------------------------------------------------------------------------

template <typename Id>
void launch_in_one_block(const Ids<Id>& ids, const RoutingPlan& plan, cudaStream_t stream) {
  const int most_warps = ids.num_experts <= 1024 ? kMaxWarpsOfOneBlock : warps_for(ids.num_experts);
  const int pairs = static_cast<int>(ids.num_pairs);
  const int rounds = std::max(1, (pairs + most_warps * 32 - 1) / (most_warps * 32));
  const int pair_warps = (pairs + 32 * rounds - 1) / (32 * rounds);
  // Few pairs still have all experts to add up.
  const int expert_warps = static_cast<int>(std::min<int64_t>(4, (ids.num_experts + 31) / 32));
  const int warps = std::max({1, pair_warps, expert_warps});
  const size_t bytes = Shared::bytes(ids.num_experts, warps, pairs);
  allow_shared_memory(plan_in_one_block<Id>, bytes);
  launch("plan_in_one_block", plan_in_one_block<Id>, dim3(1), dim3(warps * 32), bytes, stream,
         Launch::kDependent, ids, rounds, plan);
}

template <typename Id>
void launch_tiles(const Ids<Id>& ids, int32_t* counts, const RoutingPlan& plan,
                  cudaStream_t stream) {
  const int64_t num_tiles = num_tiles_for(ids.num_pairs, ids.num_experts);
  const auto tile_pairs = static_cast<uint32_t>((ids.num_pairs + num_tiles - 1) / num_tiles);
  const int threads = warps_for(ids.num_experts) * 32;
  const int rounds =
      std::clamp((static_cast<int>(tile_pairs) + threads - 1) / threads, 1, kMaxRounds);
  const TileCounts tiles = {counts, static_cast<int>(num_tiles),
                            static_cast<int>(pitch_for(ids.num_experts)), tile_pairs, rounds};
  const dim3 grid(static_cast<unsigned>(num_tiles));
  const size_t histogram_bytes = static_cast<size_t>(ids.num_experts) * sizeof(int);
  launch("count_tiles", count_tiles<Id>, grid, dim3(kMaxWarps * 32), histogram_bytes, stream,
         Launch::kDependent, ids, tiles);
  const size_t bytes =
      Shared::bytes(ids.num_experts, threads / 32, num_parts(tiles.pitch, threads));
  allow_shared_memory(scatter_tiles<Id>, bytes);
  launch("scatter_tiles", scatter_tiles<Id>, grid, dim3(threads), bytes, stream, Launch::kDependent,
         ids, tiles, plan);
}

bool fits_one_block(int64_t num_pairs, int64_t num_experts) {
  return num_pairs <= kMaxRounds * 32 * warps_for(num_experts);
}

template <typename Id>
void plan_as(const TensorView& index, int64_t num_experts, const RoutingPlan& plan,
             Workspace& workspace, cudaStream_t stream) {
  const int64_t num_pairs = index.dim(0) * index.dim(1);
  const Ids<Id> ids = {static_cast<const Id*>(index.data()), index.stride(0),
                       static_cast<uint32_t>(std::max<int64_t>(1, index.dim(1))),
                       static_cast<uint32_t>(num_pairs), static_cast<int>(num_experts)};
  if (fits_one_block(num_pairs, num_experts)) {
    launch_in_one_block(ids, plan, stream);
  } else {
    const int64_t counts = pitch_for(num_experts) * num_tiles_for(num_pairs, num_experts);
    launch_tiles(ids, workspace.allocate<int32_t>(counts), plan, stream);
  }
}

size_t ints(int64_t count) { return Workspace::padded(static_cast<size_t>(count) * 4); }

}  // namespace

size_t routing_plan_bytes(int64_t num_pairs, int64_t num_experts, int64_t num_counters) {
  const size_t counts = fits_one_block(num_pairs, num_experts)
                            ? 0
                            : ints(pitch_for(num_experts) * num_tiles_for(num_pairs, num_experts));
  return ints(num_experts + 1) + 2 * ints(num_pairs) + ints(num_counters) + counts;
}

RoutingPlan plan_routing(const TensorView& top_k_index, int64_t num_experts, Workspace& workspace,
                         const Stream& stream, int64_t num_counters) {
  CADRE_ASSERT(num_experts >= 1 && num_experts <= kMaxRoutedExperts);
  CADRE_ASSERT(top_k_index.dtype() == DType::kI32 || top_k_index.dtype() == DType::kI64);
  const int64_t num_pairs = top_k_index.dim(0) * top_k_index.dim(1);
  if (num_pairs > std::numeric_limits<int32_t>::max()) {
    throw InvalidArgument(str_cat("experts forward: top_k_index: expected at most 2^31 - 1 pairs ",
                                  "of token and slot, got ", num_pairs,
                                  "; run the tokens in several calls"));
  }
  RoutingPlan plan;
  plan.expert_offsets = workspace.allocate<int32_t>(num_experts + 1);
  plan.pair_of_row = workspace.allocate<int32_t>(num_pairs);
  plan.row_of_pair = workspace.allocate<int32_t>(num_pairs);
  plan.counters = workspace.allocate<uint32_t>(num_counters);
  plan.num_counters = num_counters;
  if (top_k_index.dtype() == DType::kI32) {
    plan_as<int32_t>(top_k_index, num_experts, plan, workspace, stream_of(stream));
  } else {
    plan_as<int64_t>(top_k_index, num_experts, plan, workspace, stream_of(stream));
  }
  return plan;
}

}  // namespace cadre::cuda
