#include "experts/routing_plan.h"

#include <algorithm>
#include <cstring>

namespace cadre {

size_t routing_plan_bytes(int64_t num_experts, int64_t max_tokens, int64_t top_k) {
  const auto bytes = [](int64_t count) {
    return Workspace::padded(static_cast<size_t>(count) * sizeof(int64_t));
  };
  const int64_t pairs = max_tokens * top_k;
  return 2 * bytes(num_experts + 1) + bytes(num_experts) + bytes(pairs);
}

int64_t expert_id(const TensorView& top_k_index, int64_t token, int64_t slot) {
  const int64_t at = token * top_k_index.stride(0) + slot * top_k_index.stride(1);
  if (top_k_index.dtype() == DType::kI32) {
    int32_t id;
    std::memcpy(&id, static_cast<const char*>(top_k_index.data()) + at * 4, sizeof(id));
    return id;
  }
  int64_t id;
  std::memcpy(&id, static_cast<const char*>(top_k_index.data()) + at * 8, sizeof(id));
  return id;
}

RoutingPlan make_routing_plan(const TensorView& top_k_index, int64_t num_experts,
                              Workspace& workspace) {
  const int64_t num_tokens = top_k_index.dim(0);
  const int64_t top_k = top_k_index.dim(1);
  auto* next = workspace.allocate<int64_t>(num_experts + 1);  // counts, then where to write
  auto* active = workspace.allocate<int64_t>(num_experts);
  auto* offsets = workspace.allocate<int64_t>(num_experts + 1);
  auto* pairs = workspace.allocate<int64_t>(num_tokens * top_k);

  std::fill_n(next, num_experts, 0);
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t s = 0; s < top_k; ++s) {
      const int64_t id = expert_id(top_k_index, t, s);
      if (is_expert(id, num_experts)) ++next[id];
    }
  }
  RoutingPlan plan{0, 0, active, offsets, pairs};
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t count = next[e];
    next[e] = plan.num_pairs;
    if (count == 0) continue;
    active[plan.num_active] = e;
    offsets[plan.num_active++] = plan.num_pairs;
    plan.num_pairs += count;
  }
  offsets[plan.num_active] = plan.num_pairs;
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t s = 0; s < top_k; ++s) {
      const int64_t id = expert_id(top_k_index, t, s);
      if (is_expert(id, num_experts)) pairs[next[id]++] = t * top_k + s;
    }
  }
  return plan;
}

}  // namespace cadre
