// Sorting pairs by expert. Few pairs: one block does all of it. Many: a first kernel counts the
// experts of each tile of pairs, a second one ranks the pairs of its tile while the first still
// runs, adds up the counts of the tiles before it and writes. Stable by construction.
#include <algorithm>
#include <limits>

#include "backends/cuda/kernels/launch.h"
#include "backends/cuda/kernels/routing.h"
#include "cadre/error.h"
#include "core/check.h"
#include "core/str_cat.h"

namespace cadre::cuda {
namespace {

constexpr int kMaxRounds = 4;  // pairs of a lane that are ranked at once
constexpr int kMaxWarps = 16;
constexpr int64_t kMaxPairsOfOneBlock = kMaxRounds * kMaxWarps * 32;
constexpr int64_t kMaxCounts = 65536;  // experts * tiles: each block of the second kernel reads all
constexpr unsigned kAllLanes = 0xffffffffu;

/// Passed to kernels by value.
template <typename Id>
struct Ids {
  const Id* data;
  int64_t row_stride;
  uint32_t top_k;
  uint32_t num_pairs;
  int num_experts;

  /// The id of a pair. Apart from expert_of(), so that several are on their way at once.
  __device__ Id load(uint32_t pair) const {
    const uint32_t token = pair / top_k;
    return data[token * row_stride + (pair - token * top_k)];
  }
  /// -1: none.
  __device__ int expert_of(Id id) const {
    return id >= 0 && id < num_experts ? static_cast<int>(id) : -1;
  }
};

int warps_for(int64_t num_experts) { return num_experts <= 2048 ? kMaxWarps : 4; }

// A power of two, so that a block reads an expert's counts in whole vectors of four.
int64_t num_tiles_for(int64_t num_pairs, int64_t num_experts) {
  const int64_t most = num_pairs > 64 * kMaxPairsOfOneBlock ? 128 : 64;
  int64_t tiles = 4;
  while (tiles < most && tiles * kMaxPairsOfOneBlock < num_pairs &&
         2 * tiles * num_experts <= kMaxCounts) {
    tiles *= 2;
  }
  return tiles;
}

// ---- inside a block ----------------------------------------------------------------------------

// Exclusive prefix sum of one value per thread. `scratch` holds 32 values.
__device__ int block_exclusive_sum(int value, int* scratch) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int sum = value;
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(kAllLanes, sum, d);
    if (lane >= d) sum += below;
  }
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  int before = 0;
  for (int w = 0; w < warp; ++w) before += scratch[w];
  return before + sum - value;
}

// Turns totals[e] into the first row of e: rows[e] += the sum of totals below e. Writes the offsets
// when given. Returns the number of rows to every thread.
__device__ int add_first_rows(const int* totals, int num_experts, int* rows, int32_t* offsets,
                              int* scratch) {
  const int each = (num_experts + blockDim.x - 1) / blockDim.x;
  const int begin = min(static_cast<int>(threadIdx.x) * each, num_experts);
  const int end = min(begin + each, num_experts);
  int sum = 0;
  for (int e = begin; e < end; ++e) sum += totals[e];
  int row = block_exclusive_sum(sum, scratch);
  for (int e = begin; e < end; ++e) {
    rows[e] += row;
    if (offsets != nullptr) offsets[e] = row;
    row += totals[e];
  }
  __shared__ int num_rows;
  if (threadIdx.x == blockDim.x - 1) {  // its range ends with the last expert
    num_rows = row;
    if (offsets != nullptr) offsets[num_experts] = row;
  }
  __syncthreads();
  return num_rows;
}

// The lanes of the warp that hold the same expert; -1 counts as one. (match_any takes ten times as
// long where experts are many.)
__device__ unsigned lanes_with(int expert, int num_experts) {
  const unsigned key = expert < 0 ? static_cast<unsigned>(num_experts) : expert;
  unsigned same = kAllLanes;
  for (unsigned bits = num_experts, bit = 1; bits != 0; bits /= 2, bit *= 2) {
    const bool is_set = (key & bit) != 0;
    const unsigned lanes = __ballot_sync(kAllLanes, is_set);
    same &= is_set ? lanes : ~lanes;
  }
  return same;
}

// A chunk of pairs in registers: `rounds` of each lane, warps one behind the other.
struct Chunk {
  int expert[kMaxRounds];
  int rank[kMaxRounds];  // among the warp's pairs of the same expert

  static __device__ uint32_t pair(uint32_t first, int rounds, int round) {
    return first + (threadIdx.x / 32) * 32 * rounds + round * 32 + threadIdx.x % 32;
  }

  // `counts` [warps][num_experts], zero before; then the warp's pairs of each expert. Pairs from
  // `end` on have no expert.
  template <typename Id>
  __device__ void rank_pairs(const Ids<Id>& ids, uint32_t first, uint32_t end, int rounds,
                             uint16_t* counts) {
    uint16_t* mine = counts + (threadIdx.x / 32) * ids.num_experts;
    const unsigned lanes_below = (1u << (threadIdx.x % 32)) - 1;
    Id id[kMaxRounds];
#pragma unroll
    for (int r = 0; r < kMaxRounds; ++r) {
      const uint32_t p = pair(first, rounds, r);
      id[r] = -1;
      if (r < rounds && p < end) id[r] = ids.load(p);
    }
#pragma unroll
    for (int r = 0; r < kMaxRounds; ++r) expert[r] = ids.expert_of(id[r]);
#pragma unroll
    for (int r = 0; r < kMaxRounds; ++r) {
      if (r >= rounds) break;
      const unsigned peers = lanes_with(expert[r], ids.num_experts);
      const int below = __popc(peers & lanes_below);
      const int earlier = expert[r] >= 0 ? mine[expert[r]] : 0;
      __syncwarp();
      if (expert[r] >= 0 && below == 0) {
        mine[expert[r]] = static_cast<uint16_t>(earlier + __popc(peers));
      }
      __syncwarp();
      rank[r] = earlier + below;
    }
  }

  // rows[e]: the first row of e in this chunk; counts[w][e]: pairs of e in the warps before w.
  __device__ void write(const RoutingPlan& plan, uint32_t first, uint32_t end, int rounds,
                        const uint16_t* counts, const int* rows, int num_experts) const {
    const uint16_t* mine = counts + (threadIdx.x / 32) * num_experts;
#pragma unroll
    for (int r = 0; r < kMaxRounds; ++r) {
      if (r >= rounds) break;
      const uint32_t p = pair(first, rounds, r);
      if (p >= end) continue;
      int row = -1;
      if (expert[r] >= 0) {
        row = rows[expert[r]] + mine[expert[r]] + rank[r];
        plan.pair_of_row[row] = static_cast<int32_t>(p);
      }
      plan.row_of_pair[p] = row;
    }
  }
};

__device__ void zero_counts(uint16_t* counts, int num_warps, int num_experts) {
  auto* words = reinterpret_cast<uint32_t*>(counts);
  const int n = (num_warps * num_experts + 1) / 2;
  for (int i = threadIdx.x; i < n; i += blockDim.x) words[i] = 0;
}

// counts[w][e] becomes the sum over the warps before w; totals[e] the sum over all.
__device__ void sum_over_warps(uint16_t* counts, int num_warps, int num_experts, int* totals) {
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
    int sum = 0;
    for (int w = 0; w < num_warps; ++w) {
      const int count = counts[w * num_experts + e];
      counts[w * num_experts + e] = static_cast<uint16_t>(sum);
      sum += count;
    }
    totals[e] = sum;
  }
}

__device__ void fill_tail(const RoutingPlan& plan, uint32_t begin, uint32_t end, int num_rows) {
  for (uint32_t r = max(begin, static_cast<uint32_t>(num_rows)) + threadIdx.x; r < end;
       r += blockDim.x) {
    plan.pair_of_row[r] = -1;
  }
}

// Shared memory: rows [E], totals [E], counts [warps][E].
struct Shared {
  int* rows;
  int* totals;
  uint16_t* counts;

  __device__ explicit Shared(int num_experts) {
    extern __shared__ int memory[];
    rows = memory;
    totals = rows + num_experts;
    counts = reinterpret_cast<uint16_t*>(totals + num_experts);
  }
  static size_t bytes(int64_t num_experts, int num_warps) {
    const auto e = static_cast<size_t>(num_experts);
    return 2 * e * sizeof(int) + (e * static_cast<size_t>(num_warps) + 1) * sizeof(uint16_t);
  }
};

// ---- kernels -----------------------------------------------------------------------------------

template <typename Id>
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    plan_in_one_block(Ids<Id> ids, int rounds, RoutingPlan plan) {
  const Shared shared(ids.num_experts);
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
  const int num_rows =
      add_first_rows(shared.totals, ids.num_experts, shared.rows, plan.expert_offsets, scratch);
  chunk.write(plan, 0, ids.num_pairs, rounds, shared.counts, shared.rows, ids.num_experts);
  fill_tail(plan, 0, ids.num_pairs, num_rows);
}

/// counts [num_experts][num_tiles]; tile i is the pairs [i, i + 1) * tile_pairs.
struct TileCounts {
  int32_t* counts;
  int num_tiles;
  uint32_t tile_pairs;

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
    for (int r = 0; r < kMaxRounds; ++r) {  // one addition per warp and expert, however skewed
      const int expert = ids.expert_of(id[r]);
      const unsigned peers = lanes_with(expert, ids.num_experts);
      const bool is_first = (peers & ((1u << (threadIdx.x % 32)) - 1)) == 0;
      if (expert >= 0 && is_first) atomicAdd(&histogram[expert], __popc(peers));
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < ids.num_experts; e += blockDim.x) {
    tiles.counts[e * tiles.num_tiles + blockIdx.x] = histogram[e];
  }
}

// Sums of 4 * kVectors counts of one expert, the first of them of tile `first`: over all, and over
// the tiles before this block's.
template <int kVectors>
__device__ void add_counts(const int32_t* counts, int first, int& below, int& all) {
  int4 c[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    c[j] = __ldcg(reinterpret_cast<const int4*>(counts + first + 4 * j));
  }
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const int left = static_cast<int>(blockIdx.x) - (first + 4 * j);
    all += c[j].x + c[j].y + c[j].z + c[j].w;
    below += (0 < left ? c[j].x : 0) + (1 < left ? c[j].y : 0) + (2 < left ? c[j].z : 0) +
             (3 < left ? c[j].w : 0);
  }
}

// Sums of each expert's counts over the tiles before this block's, and over all; `lanes` threads
// share an expert.
template <int kVectors>
__device__ void sum_over_tiles(const TileCounts& tiles, int num_experts, int lanes, int* before,
                               int* totals) {
  const int lane = threadIdx.x % lanes;
  const int each = tiles.num_tiles / lanes;
  const int experts_at_once = blockDim.x / lanes;
  for (int base = 0; base < num_experts; base += experts_at_once) {
    const int e = base + static_cast<int>(threadIdx.x) / lanes;
    int below = 0;
    int all = 0;
    if (e < num_experts) {
      const int32_t* counts = tiles.counts + e * tiles.num_tiles;
      for (int i = lane * each; i < (lane + 1) * each; i += 4 * kVectors) {
        add_counts<kVectors>(counts, i, below, all);
      }
    }
    for (int d = 1; d < lanes; d *= 2) {
      below += __shfl_xor_sync(kAllLanes, below, d);
      all += __shfl_xor_sync(kAllLanes, all, d);
    }
    if (lane == 0 && e < num_experts) {
      before[e] = below;
      totals[e] = all;
    }
  }
}

template <typename Id>
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    scatter_tiles(Ids<Id> ids, TileCounts tiles, int lanes, RoutingPlan plan) {
  const Shared shared(ids.num_experts);
  __shared__ int scratch[32];
  const int num_warps = blockDim.x / 32;
  const uint32_t chunk_pairs = kMaxRounds * blockDim.x;
  uint32_t begin, end;
  tiles.range(ids, begin, end);
  zero_counts(shared.counts, num_warps, ids.num_experts);
  __syncthreads();
  // The kernel before lets this one start after it has seen the ids: they may be read already.
  Chunk chunk;
  chunk.rank_pairs(ids, begin, end, kMaxRounds, shared.counts);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int vectors = tiles.num_tiles / (4 * lanes);  // a power of two
  if (vectors >= 8) {
    sum_over_tiles<8>(tiles, ids.num_experts, lanes, shared.rows, shared.totals);
  } else if (vectors >= 4) {
    sum_over_tiles<4>(tiles, ids.num_experts, lanes, shared.rows, shared.totals);
  } else {
    sum_over_tiles<1>(tiles, ids.num_experts, lanes, shared.rows, shared.totals);
  }
  __syncthreads();
  const int num_rows = add_first_rows(shared.totals, ids.num_experts, shared.rows,
                                      blockIdx.x == 0 ? plan.expert_offsets : nullptr, scratch);
  for (uint32_t first = begin; first < end; first += chunk_pairs) {
    if (first != begin) {
      for (int e = threadIdx.x; e < ids.num_experts; e += blockDim.x) {
        shared.rows[e] += shared.totals[e];
      }
      zero_counts(shared.counts, num_warps, ids.num_experts);
      __syncthreads();
      chunk.rank_pairs(ids, first, end, kMaxRounds, shared.counts);
      __syncthreads();
    }
    sum_over_warps(shared.counts, num_warps, ids.num_experts, shared.totals);
    __syncthreads();
    chunk.write(plan, first, end, kMaxRounds, shared.counts, shared.rows, ids.num_experts);
    __syncthreads();
  }
  fill_tail(plan, begin, end, num_rows);
}

// ---- host --------------------------------------------------------------------------------------

template <typename Id>
void launch_in_one_block(const Ids<Id>& ids, const RoutingPlan& plan, cudaStream_t stream) {
  const int most_warps = warps_for(ids.num_experts);
  const int pairs = static_cast<int>(ids.num_pairs);
  const int rounds = std::max(1, (pairs + most_warps * 32 - 1) / (most_warps * 32));
  const int pair_warps = (pairs + 32 * rounds - 1) / (32 * rounds);
  // Few pairs still have all experts to add up.
  const int expert_warps = static_cast<int>(std::min<int64_t>(4, (ids.num_experts + 31) / 32));
  const int warps = std::max({1, pair_warps, expert_warps});
  const size_t bytes = Shared::bytes(ids.num_experts, warps);
  allow_shared_memory(plan_in_one_block<Id>, bytes);
  launch("plan_in_one_block", plan_in_one_block<Id>, dim3(1), dim3(warps * 32), bytes, stream,
         Launch::kDependent, ids, rounds, plan);
}

template <typename Id>
void launch_tiles(const Ids<Id>& ids, int32_t* counts, const RoutingPlan& plan,
                  cudaStream_t stream) {
  const int64_t num_tiles = num_tiles_for(ids.num_pairs, ids.num_experts);
  const auto tile_pairs = static_cast<uint32_t>((ids.num_pairs + num_tiles - 1) / num_tiles);
  const TileCounts tiles = {counts, static_cast<int>(num_tiles), tile_pairs};
  const dim3 grid(static_cast<unsigned>(num_tiles));
  const size_t histogram_bytes = static_cast<size_t>(ids.num_experts) * sizeof(int);
  launch("count_tiles", count_tiles<Id>, grid, dim3(kMaxWarps * 32), histogram_bytes, stream,
         Launch::kDependent, ids, tiles);
  const int warps = warps_for(ids.num_experts);
  int lanes = 1;  // threads per expert, each of which reads at least four counts
  while (2 * lanes * ids.num_experts <= warps * 32 && 8 * lanes <= num_tiles && lanes < 32) {
    lanes *= 2;
  }
  const size_t bytes = Shared::bytes(ids.num_experts, warps);
  allow_shared_memory(scatter_tiles<Id>, bytes);
  launch("scatter_tiles", scatter_tiles<Id>, grid, dim3(warps * 32), bytes, stream,
         Launch::kDependent, ids, tiles, lanes, plan);
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
    const int64_t counts = num_experts * num_tiles_for(num_pairs, num_experts);
    launch_tiles(ids, workspace.allocate<int32_t>(counts), plan, stream);
  }
}

size_t ints(int64_t count) { return Workspace::padded(static_cast<size_t>(count) * 4); }

}  // namespace

size_t routing_plan_bytes(int64_t num_pairs, int64_t num_experts) {
  const size_t counts = fits_one_block(num_pairs, num_experts)
                            ? 0
                            : ints(num_experts * num_tiles_for(num_pairs, num_experts));
  return ints(num_experts + 1) + 2 * ints(num_pairs) + counts;
}

RoutingPlan plan_routing(const TensorView& top_k_index, int64_t num_experts, Workspace& workspace,
                         const Stream& stream) {
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
  if (top_k_index.dtype() == DType::kI32) {
    plan_as<int32_t>(top_k_index, num_experts, plan, workspace, stream_of(stream));
  } else {
    plan_as<int64_t>(top_k_index, num_experts, plan, workspace, stream_of(stream));
  }
  return plan;
}

}  // namespace cadre::cuda
