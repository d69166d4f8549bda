// Top-k routing by one warp a token. Experts are picked one after the other, each the best of those
// left in the order (value descending, id ascending), as on the CPU (cpu/dense/route.cc).
#pragma once

#include "backends/cuda/dense/values.cuh"
#include "dense/dense_ops.h"

namespace cadre::cuda {

inline constexpr float kMinusInfinity = -__builtin_huge_valf();
inline constexpr uint32_t kExcluded = 0;  // key of an expert that may not be picked

struct RouteArgs {
  const float* logits;
  const float* bias;  // null: none
  int32_t* ids;
  float* weights;
  int64_t num_tokens;
  int32_t num_experts;
  int32_t top_k;
  RouterOptions options;
};

/// `logits` may be absent.
RouteArgs route_args(const TensorView& logits, const TensorView& correction_bias,
                     const RouterOptions& options, int64_t num_experts,
                     const MutableTensorView& top_k_index, const MutableTensorView& top_k_weights);

__device__ inline uint32_t max_of(uint32_t a, uint32_t b) { return a < b ? b : a; }
__device__ inline float value_of(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

// exp(x - max); for max = -inf (nothing finite) a uniform distribution, for +inf all mass on the
// infinite ones.
__device__ inline float softmax_term(float x, float max) {
  if (isinf(max)) return x == max ? 1.0f : 0.0f;
  return exp2f((x - max) * 1.44269504f);
}

__device__ inline float independent_score(float x, RouterScore kind) {
  if (kind == RouterScore::kSigmoid) return 1.0f / (1.0f + expf(-x));
  if (kind == RouterScore::kSqrtSoftplus) return sqrtf(x > 20.0f ? x : log1pf(expf(x)));
  return x;
}

/// A warp's memory: what was picked, and for group-limited routing all keys and the groups' values.
struct Scratch {
  int32_t* ids;         // [top_k]
  uint32_t* keys;       // [num_experts]
  float* group_values;  // [num_groups]

  static size_t bytes(int64_t num_experts, int64_t top_k, const RouterOptions& options) {
    const bool limits = options.topk_groups < options.num_groups;
    return static_cast<size_t>(4 * top_k + (limits ? 4 * (num_experts + options.num_groups) : 0));
  }
  __device__ Scratch(unsigned char* memory, const RouteArgs& args) {
    ids = reinterpret_cast<int32_t*>(memory);
    keys = reinterpret_cast<uint32_t*>(ids + args.top_k);
    group_values = reinterpret_cast<float*>(keys + args.num_experts);
  }
};

__device__ inline float group_value(const uint32_t* keys, int64_t size, GroupScore kind) {
  float first = kMinusInfinity;
  float second = kMinusInfinity;
  for (int64_t e = 0; e < size; ++e) {
    const float value = value_of(keys[e]);
    second = fmaxf(second, fminf(first, value));
    first = fmaxf(first, value);
  }
  return kind == GroupScore::kMax || size == 1 ? first : first + second;
}

// The groups' values from all keys.
__device__ inline void rate_groups(const RouteArgs& args, const Scratch& scratch, int lane) {
  const int64_t size = args.num_experts / args.options.num_groups;
  __syncwarp();
  for (int64_t g = lane; g < args.options.num_groups; g += 32) {
    scratch.group_values[g] = group_value(scratch.keys + g * size, size, args.options.group_score);
  }
  __syncwarp();
}

// Whether the group of an expert is among the best topk_groups.
__device__ inline bool group_is_kept(const RouteArgs& args, const float* values, int32_t expert) {
  const int64_t group = expert / (args.num_experts / args.options.num_groups);
  int64_t better = 0;
  for (int64_t g = 0; g < args.options.num_groups; ++g) {
    better += values[g] > values[group] || (values[g] == values[group] && g < group);
  }
  return better < args.options.topk_groups;
}

// Weights of the picked ids, lane j having pick j, j + 32, ...; ids in `ids` [top_k].
// score_of(id): what weighs.
template <typename Score>
__device__ inline void write_row(const RouteArgs& args, const int32_t* ids, int64_t token, int lane,
                                 const Score& score_of) {
  const bool softmax_over_picked = args.options.score == RouterScore::kTopKThenSoftmax;
  const float best = softmax_over_picked ? score_of(ids[0]) : 0.0f;
  const auto weight_of = [&](int32_t id) {
    const float score = score_of(id);
    return softmax_over_picked ? softmax_term(score, best) : score;
  };
  float weight = lane < args.top_k ? weight_of(ids[lane]) : 0.0f;
  float sum = weight;
  for (int32_t j = lane + 32; j < args.top_k; j += 32) sum += weight_of(ids[j]);
  sum = warp_sum(sum);
  const bool divide = (args.options.normalize || softmax_over_picked) && sum > 0;
  for (int32_t j = lane; j < args.top_k; j += 32) {
    if (j >= 32) weight = weight_of(ids[j]);
    args.ids[token * args.top_k + j] = ids[j];
    args.weights[token * args.top_k + j] =
        (divide ? weight / sum : weight) * args.options.scaling_factor;
  }
}

// Picks from all lanes' keys, lane l having experts [l, l + 1) * kPerLane.
template <int kPerLane>
__device__ inline void pick(const RouteArgs& args, uint32_t (&keys)[kPerLane], int32_t* ids,
                            int lane) {
  uint32_t best = keys[0];  // of this lane
#pragma unroll
  for (int i = 1; i < kPerLane; ++i) best = max_of(best, keys[i]);
  for (int32_t j = 0; j < args.top_k; ++j) {
    const uint32_t top = __reduce_max_sync(~0u, best);
    uint32_t mine = ~0u;
#pragma unroll
    for (int i = kPerLane - 1; i >= 0; --i) {
      if (keys[i] == top) mine = static_cast<uint32_t>(lane * kPerLane + i);
    }
    const uint32_t id = __reduce_min_sync(~0u, mine);
    if (id == mine) {  // one lane
      best = kExcluded;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (static_cast<uint32_t>(lane * kPerLane + i) == id) keys[i] = kExcluded;
        best = max_of(best, keys[i]);
      }
      ids[j] = static_cast<int32_t>(id);
    }
  }
}

// The same for few keys a lane: each lane sorts its own first, then only firsts are compared.
template <int kPerLane>
__device__ inline void pick_sorted(const RouteArgs& args, uint32_t (&keys)[kPerLane], int32_t* ids,
                                   int lane) {
  uint32_t mine[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) mine[i] = static_cast<uint32_t>(i);
#pragma unroll
  for (int round = 0; round < kPerLane; ++round) {  // neighbours only: equals keep their order
#pragma unroll
    for (int i = round % 2; i + 1 < kPerLane; i += 2) {
      const bool swap = keys[i + 1] > keys[i];
      const uint32_t key = swap ? keys[i + 1] : keys[i];
      const uint32_t id = swap ? mine[i + 1] : mine[i];
      keys[i + 1] = swap ? keys[i] : keys[i + 1];
      mine[i + 1] = swap ? mine[i] : mine[i + 1];
      keys[i] = key;
      mine[i] = id;
    }
  }
  // Without a thought of equals first: two lanes that take the same pick take one too many in all.
  uint32_t left[kPerLane];
  uint32_t order = 0;  // which of the lane's experts, a byte each
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    left[i] = keys[i];
    order |= mine[i] << (8 * i);
  }
  int32_t taken = 0;
  for (int32_t j = 0; j < args.top_k; ++j) {
    const bool takes = left[0] == __reduce_max_sync(~0u, left[0]);
    if (takes) ids[j] = lane * kPerLane + static_cast<int32_t>(order & 255u);
#pragma unroll
    for (int i = 0; i + 1 < kPerLane; ++i) left[i] = takes ? left[i + 1] : left[i];
    left[kPerLane - 1] = takes ? kExcluded : left[kPerLane - 1];
    order = takes ? order >> 8 : order;
    taken += takes;
  }
  if (__reduce_add_sync(~0u, taken) == args.top_k) return;
  __syncwarp();
  for (int32_t j = 0; j < args.top_k; ++j) {
    const uint32_t top = __reduce_max_sync(~0u, keys[0]);
    const uint32_t first = keys[0] == top ? lane * kPerLane + mine[0] : ~0u;
    const uint32_t id = __reduce_min_sync(~0u, first);
    const bool takes = id == first;
    if (takes) ids[j] = static_cast<int32_t>(id);
#pragma unroll
    for (int i = 0; i + 1 < kPerLane; ++i) {
      keys[i] = takes ? keys[i + 1] : keys[i];
      mine[i] = takes ? mine[i + 1] : mine[i];
    }
    if (takes) keys[kPerLane - 1] = kExcluded;
  }
}

// A lane's logits: [lane, lane + 1) * kPerLane, minus infinity for NaN and beyond the last.
template <int kPerLane>
__device__ inline void load_logits(const RouteArgs& args, const float* logits, int lane,
                                   float (&x)[kPerLane]) {
  constexpr int kVector = kPerLane < 4 ? kPerLane : 4;
  struct alignas(4 * kVector) Vector {
    float x[kVector];
  };
  const bool aligned =
      args.num_experts % kVector == 0 && reinterpret_cast<uintptr_t>(logits) % sizeof(Vector) == 0;
#pragma unroll
  for (int i = 0; i < kPerLane; i += kVector) {
    const int32_t e = lane * kPerLane + i;
    if (aligned && e < args.num_experts) {
      const Vector v = *reinterpret_cast<const Vector*>(logits + e);
#pragma unroll
      for (int j = 0; j < kVector; ++j) x[i + j] = v.x[j];
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        x[i + j] = e + j < args.num_experts ? logits[e + j] : kMinusInfinity;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (isnan(x[i])) x[i] = kMinusInfinity;
  }
}

// Lane l has experts [l, l + 1) * kPerLane in registers. `logits` of the token, in any memory.
template <int kPerLane>
__device__ inline void route_token(const RouteArgs& args, const float* logits,
                                   const Scratch& scratch, int64_t token, int lane) {
  const RouterScore kind = args.options.score;
  const bool by_logit =
      kind == RouterScore::kSoftmaxThenTopK || kind == RouterScore::kTopKThenSoftmax;
  float scores[kPerLane];
  load_logits(args, logits, lane, scores);
  const int32_t first = lane * kPerLane;
  float max = 0;
  float factor = 1;
  if (kind == RouterScore::kSoftmaxThenTopK) {
    max = scores[0];
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) max = fmaxf(max, scores[i]);
    max = value_of(__reduce_max_sync(~0u, key_of(max)));
    if (!args.options.normalize) {  // else it cancels
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (first + i < args.num_experts) sum += softmax_term(scores[i], max);
      }
      factor = 1.0f / warp_sum(sum);
    }
  }
  uint32_t keys[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int32_t e = first + i;
    float value = by_logit ? scores[i] : independent_score(scores[i], kind);
    if (args.bias != nullptr) {
      value += e < args.num_experts ? args.bias[e] : 0.0f;
      if (isnan(value)) value = kMinusInfinity;
    }
    keys[i] = e < args.num_experts ? key_of(value) : kExcluded;
  }
  if (args.options.topk_groups < args.options.num_groups) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (first + i < args.num_experts) scratch.keys[first + i] = keys[i];
    }
    rate_groups(args, scratch, lane);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int32_t e = first + i;
      if (e < args.num_experts && !group_is_kept(args, scratch.group_values, e)) {
        keys[i] = kExcluded;
      }
    }
  }
  if constexpr (kPerLane <= 4) {
    pick_sorted<kPerLane>(args, keys, scratch.ids, lane);
  } else {
    pick<kPerLane>(args, keys, scratch.ids, lane);
  }
  __syncwarp();
  write_row(args, scratch.ids, token, lane, [&](int32_t id) {
    const float x = isnan(logits[id]) ? kMinusInfinity : logits[id];
    if (kind == RouterScore::kSoftmaxThenTopK) return softmax_term(x, max) * factor;
    return independent_score(x, kind);
  });
}

}  // namespace cadre::cuda
