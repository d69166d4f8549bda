// What a block of threads has to do, from the routed ids: the active experts and the pairs of each.
// Every block builds it for itself in shared memory, so that no launch is spent on it.
#pragma once

#include <cstdint>

#include "backends/cuda/kernels/decode/decode_kernels.h"

namespace cadre::cuda {

/// Entries are experts with up to `max_count` of their pairs; an expert with more has several. All
/// blocks have the same entries with the same pairs. The order of pairs within an entry may differ;
/// no value depends on it: each pair is a column of its own.
struct Plan {
  int32_t* expert_of_pair;  // [P]; -1: no expert
  float* weight;            // [P] of the routing, where there is an expert; `down` alone
  int32_t* entry_expert;    // [P]
  int32_t* cursor;          // [E]
  uint16_t* entry_first;    // [P] of `pair` and `row`
  uint16_t* entry_count;    // [P]
  uint16_t* pair;           // [P]
  uint16_t* row;            // [P] the row of x, or of h, that the pair multiplies
  int32_t* totals;          // number of entries, largest count
  int num_entries = 0;
  int largest_count = 0;
};

__host__ __device__ inline size_t plan_bytes(int pairs, int experts) {
  const size_t bytes = size_t(pairs) * (4 + 4 + 4 + 2 + 2 + 2 + 2) + size_t(experts) * 4 + 8;
  return (bytes + 127) / 128 * 128;
}

#ifdef __CUDACC__

/// Of the pair: -1 where the id names no expert.
__device__ inline int32_t expert_of(const DecodeArgs& a, int pair) {
  const int64_t at = pair / a.top_k * a.ids_stride + pair % a.top_k;
  const int64_t id = a.ids_are_64 ? __ldcg(static_cast<const long long*>(a.ids) + at)
                                  : __ldcg(static_cast<const int*>(a.ids) + at);
  return static_cast<uint64_t>(id) < static_cast<uint64_t>(a.num_experts) ? static_cast<int32_t>(id)
                                                                          : -1;
}

/// Lays the arrays out from `memory`, plan_bytes() long.
__device__ inline Plan place_plan(char* memory, int pairs, int experts) {
  Plan plan;
  plan.expert_of_pair = reinterpret_cast<int32_t*>(memory);
  plan.weight = reinterpret_cast<float*>(plan.expert_of_pair + pairs);
  plan.entry_expert = plan.expert_of_pair + 2 * pairs;
  plan.cursor = plan.entry_expert + pairs;
  plan.totals = plan.cursor + experts;
  plan.entry_first = reinterpret_cast<uint16_t*>(plan.totals + 2);
  plan.entry_count = plan.entry_first + pairs;
  plan.pair = plan.entry_count + pairs;
  plan.row = plan.pair + pairs;
  return plan;
}

/// One token: its slots are the entries. An expert named twice is two entries.
__device__ inline void plan_one_token(Plan& plan, const DecodeArgs& a, bool rows_are_tokens) {
  if (threadIdx.x >= 32) return;
  const int slot = static_cast<int>(threadIdx.x);
  const int32_t expert = slot < a.top_k ? expert_of(a, slot) : -1;
  const uint32_t valid = __ballot_sync(~0u, expert >= 0);
  if (slot < a.top_k) plan.expert_of_pair[slot] = expert;
  if (expert >= 0) {
    const int entry = __popc(valid & ((1u << slot) - 1));
    plan.entry_expert[entry] = expert;
    plan.entry_first[entry] = static_cast<uint16_t>(entry);
    plan.entry_count[entry] = 1;
    plan.pair[entry] = static_cast<uint16_t>(slot);
    plan.row[entry] = static_cast<uint16_t>(rows_are_tokens ? 0 : slot);
  }
  if (slot == 0) {
    plan.totals[0] = __popc(valid);
    plan.totals[1] = 1;
  }
}

/// Exclusive prefix sum of one number for each thread, in the order of threads.
template <int kThreads>
__device__ uint32_t exclusive_sum(uint32_t value) {
  __shared__ uint32_t warp_sums[kThreads / 32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  uint32_t sum = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
#pragma unroll 1
  for (int w = 0; w < warp; ++w) sum += warp_sums[w];
  return sum - value;
}

/// From counts in `cursor` to entries, and the first pair of each expert in `cursor`.
template <int kThreads>
__device__ void plan_entries(Plan& plan, int experts, int max_count) {
  const int each = (experts + kThreads - 1) / kThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * each, experts);
  const int end = min(begin + each, experts);
  uint32_t mine = 0;  // entries in the upper half, pairs in the lower
#pragma unroll 1
  for (int e = begin; e < end; ++e) {
    const uint32_t count = static_cast<uint32_t>(plan.cursor[e]);
    mine += count + ((count + max_count - 1) / max_count << 16);
  }
  uint32_t at = exclusive_sum<kThreads>(mine);
  int largest = 0;
#pragma unroll 1
  for (int e = begin; e < end; ++e) {
    const int count = plan.cursor[e];
    plan.cursor[e] = static_cast<int32_t>(at & 0xffff);
#pragma unroll 1
    for (int done = 0; done < count; done += max_count) {
      const int entry = static_cast<int>(at >> 16);
      const int here = min(count - done, max_count);
      plan.entry_expert[entry] = e;
      plan.entry_first[entry] = static_cast<uint16_t>(at & 0xffff);
      plan.entry_count[entry] = static_cast<uint16_t>(here);
      largest = max(largest, here);
      at += (1u << 16) + static_cast<uint32_t>(here);
    }
  }
  if (largest > 0) atomicMax(&plan.totals[1], largest);
  if (threadIdx.x == kThreads - 1) plan.totals[0] = static_cast<int32_t>(at >> 16);
}

/// Lists the pairs of each expert, in any order.
template <int kThreads>
__device__ void plan_pairs(Plan& plan, const DecodeArgs& a, int pairs, bool rows_are_tokens) {
#pragma unroll 1
  for (int p = threadIdx.x; p < pairs; p += kThreads) {
    const int32_t expert = plan.expert_of_pair[p];
    if (expert < 0) continue;
    const int at = atomicAdd(&plan.cursor[expert], 1);
    plan.pair[at] = static_cast<uint16_t>(p);
    plan.row[at] = static_cast<uint16_t>(rows_are_tokens ? p / a.top_k : p);
  }
}

/// The same in ascending order, by one warp: for experts of several entries.
__device__ inline void plan_pairs_in_order(Plan& plan, const DecodeArgs& a, int pairs,
                                           bool rows_are_tokens) {
  if (threadIdx.x >= 32) return;
  const int lane = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int first = 0; first < pairs; first += 32) {
    const int p = first + lane;
    const int32_t expert = p < pairs ? plan.expert_of_pair[p] : -1;
    const uint32_t same = __match_any_sync(~0u, expert);
    const int before = __popc(same & ((1u << lane) - 1));
    const int start = expert >= 0 ? plan.cursor[expert] : 0;
    __syncwarp();
    if (expert >= 0) {
      plan.pair[start + before] = static_cast<uint16_t>(p);
      plan.row[start + before] = static_cast<uint16_t>(rows_are_tokens ? p / a.top_k : p);
      if (before == 0) plan.cursor[expert] = start + __popc(same);
    }
    __syncwarp();
  }
}

/// For blocks of kThreads threads; ends with the plan visible to all of them.
template <int kThreads>
__device__ Plan build_plan(char* memory, const DecodeArgs& a, bool rows_are_tokens, int max_count) {
  const int pairs = a.num_tokens * a.top_k;
  Plan plan = place_plan(memory, pairs, a.num_experts);
  if (a.num_tokens == 1 && a.top_k <= 32) {
    plan_one_token(plan, a, rows_are_tokens);
  } else {
#pragma unroll 1
    for (int e = threadIdx.x; e < a.num_experts; e += kThreads) plan.cursor[e] = 0;
    if (threadIdx.x == 0) plan.totals[1] = 0;
    __syncthreads();
    constexpr int kAtOnce = 2;  // loads on their way
#pragma unroll 1
    for (int first = threadIdx.x; first < pairs; first += kAtOnce * kThreads) {
      int32_t expert[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        expert[i] = expert_of(a, min(first + i * kThreads, pairs - 1));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int p = first + i * kThreads;
        if (p >= pairs) break;
        plan.expert_of_pair[p] = expert[i];
        if (expert[i] >= 0) atomicAdd(&plan.cursor[expert[i]], 1);
      }
    }
    __syncthreads();
    plan_entries<kThreads>(plan, a.num_experts, max_count);
    __syncthreads();
    if (plan.totals[1] == max_count) {
      plan_pairs_in_order(plan, a, pairs, rows_are_tokens);
    } else {
      plan_pairs<kThreads>(plan, a, pairs, rows_are_tokens);
    }
  }
  __syncthreads();
  plan.num_entries = plan.totals[0];
  plan.largest_count = plan.totals[1];
  return plan;
}

#endif

}  // namespace cadre::cuda
