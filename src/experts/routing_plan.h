// Which expert gets which tokens: the (token, slot) pairs of one call, sorted by expert.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cadre/tensor.h"
#include "cadre/workspace.h"

namespace cadre {

/// Arrays lie in the workspace it was made from. A pair is token * top_k + slot. Slots without an
/// expert are in no list.
struct RoutingPlan {
  int64_t num_pairs = 0;             // with an expert
  int64_t num_active = 0;            // experts with at least one pair
  const int64_t* active = nullptr;   // [num_active] expert ids, ascending
  const int64_t* offsets = nullptr;  // [num_active + 1] into pairs
  const int64_t* pairs = nullptr;    // [num_pairs] by expert, within an expert ascending
};

/// What make_routing_plan takes from the workspace, at most.
size_t routing_plan_bytes(int64_t num_experts, int64_t max_tokens, int64_t top_k);

/// The id in a [num_tokens, top_k] tensor of i32 or i64.
int64_t expert_id(const TensorView& top_k_index, int64_t token, int64_t slot);

/// True for an id that names an expert; one unsigned comparison, so it holds for any int64.
constexpr bool is_expert(int64_t id, int64_t num_experts) {
  return static_cast<uint64_t>(id) < static_cast<uint64_t>(num_experts);
}

/// A stable counting sort. Ids outside [0, num_experts) are dropped before they index anything.
RoutingPlan make_routing_plan(const TensorView& top_k_index, int64_t num_experts,
                              Workspace& workspace);

}  // namespace cadre
