// Routing on the device: pairs (token, slot) sorted by expert, and the weighted sum that brings
// expert rows back to tokens. No host read, no atomics whose order could show: the same call gives
// the same bits. All kernels are launched as dependents (launch.h) and let theirs start early.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cadre/stream.h"
#include "cadre/tensor.h"
#include "cadre/workspace.h"

namespace cadre::cuda {

/// The most experts that plan_routing takes; supports() refuses more.
inline constexpr int64_t kMaxRoutedExperts = 4096;

/// Device pointers into a workspace. P = num_tokens * top_k pairs; pair p = token * top_k + slot.
/// Rows are real pairs only: ids outside [0, E) have none.
struct RoutingPlan {
  int32_t* expert_offsets = nullptr;  // [E + 1] first row of each expert; the last: number of rows
  int32_t* pair_of_row = nullptr;     // [P] ascending within an expert; -1 beyond the last row
  int32_t* row_of_pair = nullptr;     // [P] -1: no expert
  uint32_t* counters = nullptr;       // [num_counters] zeros, for the kernels that follow
  int64_t num_counters = 0;
};

size_t routing_plan_bytes(int64_t num_pairs, int64_t num_experts, int64_t num_counters = 0);

/// top_k_index [num_tokens, top_k] i32 or i64, rows may be strided. Takes routing_plan_bytes() from
/// the workspace. One launch for up to 2048 pairs (512 with more than 2048 experts), else two.
/// Throws InvalidArgument for 2^31 pairs or more.
RoutingPlan plan_routing(const TensorView& top_k_index, int64_t num_experts, Workspace& workspace,
                         const Stream& stream, int64_t num_counters = 0);

/// out[t] = sum over slots in order of weights[t, slot] * y[row_of_pair[t, slot]], float32, rounded
/// once. y [rows, H] f32 or the compute dtype, contiguous; slots without a row add nothing and
/// their weight is not read; a token without experts gives zeros. top_k_weights f32 or the compute
/// dtype, rows may be strided; out [num_tokens, H] f32 or the compute dtype, rows may be strided.
/// row_of_pair and top_k_weights are complete before the kernel ahead of this one in the stream
/// begins: they are read while that one ends.
void combine(const TensorView& y, const int32_t* row_of_pair, const TensorView& top_k_weights,
             MutableTensorView out, const Stream& stream);

}  // namespace cadre::cuda
