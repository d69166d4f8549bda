// What a block of the routing kernels (routing.cu) does with its pairs: read, rank, add up, write.
#pragma once

#include <cstdint>

#include "backends/cuda/kernels/routing.h"

namespace cadre::cuda::routing {

constexpr int kMaxRounds = 4;  // pairs of a lane that are ranked at once
constexpr int kMaxWarps = 16;  // of a block among many
constexpr int kMaxWarpsOfOneBlock = 32;
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
    if (row_stride == top_k) return data[pair];
    const uint32_t token = pair / top_k;
    return data[token * row_stride + (pair - token * top_k)];
  }
  /// -1: none.
  __device__ int expert_of(Id id) const {
    return id >= 0 && id < num_experts ? static_cast<int>(id) : -1;
  }
};

// Exclusive prefix sum of one value per thread. `scratch` holds 32 values.
__device__ inline int block_exclusive_sum(int value, int* scratch) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int sum = value;
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(kAllLanes, sum, d);
    if (lane >= d) sum += below;
  }
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  const int before = __reduce_add_sync(kAllLanes, lane < warp ? scratch[lane] : 0);
  return before + sum - value;
}

// Turns totals[e] into the first row of e: rows[e] += the sum of totals below e. Writes the offsets
// when given. Returns the number of rows to every thread.
__device__ inline int add_first_rows(const int* totals, int num_experts, int* rows,
                                     int32_t* offsets, int* scratch) {
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

// For each of a lane's experts the lanes of the warp that hold the same one in the same round. -1
// counts as one: no expert has all of the bits looked at. (match_any takes ten times as long where
// experts are many.)
__device__ inline void lanes_with(const int (&expert)[kMaxRounds], int rounds, int num_experts,
                                  unsigned (&same)[kMaxRounds]) {
#pragma unroll
  for (int r = 0; r < kMaxRounds; ++r) same[r] = kAllLanes;
  for (unsigned bits = num_experts, bit = 1; bits != 0; bits /= 2, bit *= 2) {
#pragma unroll
    for (int r = 0; r < kMaxRounds; ++r) {
      if (r >= rounds) break;
      const bool is_set = (expert[r] & bit) != 0;
      const unsigned lanes = __ballot_sync(kAllLanes, is_set);
      same[r] &= is_set ? lanes : ~lanes;
    }
  }
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
    unsigned same[kMaxRounds];
    lanes_with(expert, rounds, ids.num_experts, same);
#pragma unroll
    for (int r = 0; r < kMaxRounds; ++r) {
      if (r >= rounds) break;
      const unsigned peers = same[r];
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

__device__ inline void zero_counts(uint16_t* counts, int num_warps, int num_experts) {
  auto* words = reinterpret_cast<uint32_t*>(counts);
  const int n = (num_warps * num_experts + 1) / 2;
  for (int i = threadIdx.x; i < n; i += blockDim.x) words[i] = 0;
}

// counts[w][e] becomes the sum over the warps before w; totals[e] the sum over all.
__device__ inline void sum_over_warps(uint16_t* counts, int num_warps, int num_experts,
                                      int* totals) {
  constexpr int kInFlight = 8;
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) {
    int sum = 0;
    for (int first = 0; first < num_warps; first += kInFlight) {
      int count[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        count[i] = first + i < num_warps ? counts[(first + i) * num_experts + e] : 0;
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (first + i < num_warps) {
          counts[(first + i) * num_experts + e] = static_cast<uint16_t>(sum);
        }
        sum += count[i];
      }
    }
    totals[e] = sum;
  }
}

__device__ inline void fill_tail(const RoutingPlan& plan, uint32_t begin, uint32_t end,
                                 int num_rows) {
  for (uint32_t r = max(begin, static_cast<uint32_t>(num_rows)) + threadIdx.x; r < end;
       r += blockDim.x) {
    plan.pair_of_row[r] = -1;
  }
}

// Values that sum_over_tiles() passes through shared memory.
__host__ __device__ inline int num_parts(int pitch, int num_threads) {
  return 2 * (pitch > 4 * num_threads ? pitch : 4 * num_threads);
}

// Shared memory: num_parts integers (of sum_over_tiles(), or a block's own sorted pairs), rows [E],
// totals [E], counts [warps][E].
struct Shared {
  int* parts;
  int* rows;
  int* totals;
  uint16_t* counts;

  __device__ Shared(int num_experts, int num_parts) {
    extern __shared__ __align__(16) int memory[];
    parts = memory;
    rows = parts + num_parts;
    totals = rows + num_experts;
    counts = reinterpret_cast<uint16_t*>(totals + num_experts);
  }
  static size_t bytes(int64_t num_experts, int num_warps, int num_parts) {
    const auto e = static_cast<size_t>(num_experts);
    return (static_cast<size_t>(num_parts) + 2 * e) * sizeof(int) +
           (e * static_cast<size_t>(num_warps) + 1) * sizeof(uint16_t);
  }
};

}  // namespace cadre::cuda::routing
