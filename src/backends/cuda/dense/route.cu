// Top-k routing, a warp for each token.
#include <algorithm>

#include "backends/cuda/dense/cuda_dense_ops.h"
#include "backends/cuda/dense/route.cuh"
#include "core/check.h"

namespace cadre::cuda {
namespace {

template <int kPerLane>
__global__ void __launch_bounds__(256, kPerLane <= 4 ? 8 : 1)
    route_kernel(RouteArgs args, int32_t scratch_bytes) {
  extern __shared__ unsigned char memory[];
  begin_dependent();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * warps + warp;
  if (token >= args.num_tokens) return;
  const Scratch scratch(memory + warp * scratch_bytes, args);
  route_token<kPerLane>(args, args.logits + token * args.num_experts, scratch, token,
                        static_cast<int>(threadIdx.x) % 32);
}

// Any number of experts: a block for each token, the experts' state in the workspace-free form of
// reading the logits again for each pick. Slow and plain.
__global__ void __launch_bounds__(32) route_any_kernel(RouteArgs args) {
  extern __shared__ unsigned char memory[];
  begin_dependent();
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t token = blockIdx.x;
  const float* logits = args.logits + token * args.num_experts;
  const RouterScore kind = args.options.score;
  const Scratch scratch(memory, args);
  float max = kMinusInfinity;
  for (int32_t e = lane; e < args.num_experts; e += 32) max = fmaxf(max, logits[e]);  // skips NaN
  max = value_of(__reduce_max_sync(~0u, key_of(max)));
  const auto logit = [&](int32_t e) { return isnan(logits[e]) ? kMinusInfinity : logits[e]; };
  float factor = 1;
  if (kind == RouterScore::kSoftmaxThenTopK) {
    float sum = 0;
    for (int32_t e = lane; e < args.num_experts; e += 32) sum += softmax_term(logit(e), max);
    factor = 1.0f / warp_sum(sum);
  }
  const auto key = [&](int32_t e) {
    const float value = independent_score(logit(e), kind) + (args.bias ? args.bias[e] : 0.0f);
    return key_of(isnan(value) ? kMinusInfinity : value);
  };
  const bool limits = args.options.topk_groups < args.options.num_groups;
  if (limits) {
    for (int32_t e = lane; e < args.num_experts; e += 32) scratch.keys[e] = key(e);
    rate_groups(args, scratch, lane);
  }
  uint32_t last_key = ~0u;
  int32_t last_id = -1;
  for (int32_t j = 0; j < args.top_k; ++j) {
    uint32_t best = kExcluded;
    uint32_t mine = ~0u;
    for (int32_t e = lane; e < args.num_experts; e += 32) {
      if (limits && !group_is_kept(args, scratch.group_values, e)) continue;
      const uint32_t k = limits ? scratch.keys[e] : key(e);
      const bool after = k < last_key || (k == last_key && e > last_id);
      if (after && k > best) best = k, mine = static_cast<uint32_t>(e);
    }
    last_key = __reduce_max_sync(~0u, best);
    last_id = static_cast<int32_t>(__reduce_min_sync(~0u, best == last_key ? mine : ~0u));
    if (lane == 0) scratch.ids[j] = last_id;
  }
  __syncwarp();
  write_row(args, scratch.ids, token, lane, [&](int32_t id) {
    const float x = logit(id);
    return kind == RouterScore::kSoftmaxThenTopK ? softmax_term(x, max) * factor
                                                 : independent_score(x, kind);
  });
}

// A warp for each token, whose experts a table names.
__global__ void __launch_bounds__(32)
    route_by_table_kernel(RouteArgs args, const int32_t* token_ids, const void* table, bool is_64) {
  extern __shared__ int32_t picked[];  // [top_k]
  begin_dependent();
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t token = blockIdx.x;
  const int64_t from = static_cast<int64_t>(token_ids[token]) * args.top_k;
  for (int32_t j = lane; j < args.top_k; j += 32) {
    picked[j] = is_64 ? static_cast<int32_t>(static_cast<const int64_t*>(table)[from + j])
                      : static_cast<const int32_t*>(table)[from + j];
  }
  const float* logits = args.logits + token * args.num_experts;
  const RouterScore kind = args.options.score;
  const auto logit = [&](int32_t e) { return isnan(logits[e]) ? kMinusInfinity : logits[e]; };
  float max = kMinusInfinity;
  float factor = 1;
  if (kind == RouterScore::kSoftmaxThenTopK) {
    for (int32_t e = lane; e < args.num_experts; e += 32) max = fmaxf(max, logits[e]);  // skips NaN
    max = value_of(__reduce_max_sync(~0u, key_of(max)));
    float sum = 0;
    for (int32_t e = lane; e < args.num_experts; e += 32) sum += softmax_term(logit(e), max);
    factor = 1.0f / warp_sum(sum);
  }
  __syncwarp();
  write_row(args, picked, token, lane, [&](int32_t id) {
    const float x = logit(id);
    return kind == RouterScore::kSoftmaxThenTopK ? softmax_term(x, max) * factor
                                                 : independent_score(x, kind);
  });
}

template <int kPerLane>
void route_rows(const RouteArgs& args, const Stream& stream) {
  const size_t scratch = Scratch::bytes(args.num_experts, args.top_k, args.options);
  const int warps = static_cast<int>(std::clamp<size_t>(48 * 1024 / scratch, 1, 8));
  launch("route_kernel", route_kernel<kPerLane>,
         static_cast<unsigned>((args.num_tokens + warps - 1) / warps), 32 * warps,
         static_cast<size_t>(warps) * scratch, stream_of(stream), dependent_launch(stream), args,
         static_cast<int32_t>(scratch));
}

}  // namespace

void CudaDenseOps::route(const TensorView& logits, const TensorView& correction_bias,
                         const RouterOptions& options, MutableTensorView top_k_index,
                         MutableTensorView top_k_weights, Workspace& /*workspace*/,
                         const Stream& stream) {
  const int64_t num_experts = logits.dim(1);
  const int64_t top_k = top_k_index.dim(1);
  validate(options, num_experts, top_k);
  const RouteArgs args =
      route_args(logits, correction_bias, options, num_experts, top_k_index, top_k_weights);
  if (args.num_tokens == 0) return;
  if (num_experts <= 64) return route_rows<2>(args, stream);
  if (num_experts <= 128) return route_rows<4>(args, stream);
  if (num_experts <= 256) return route_rows<8>(args, stream);
  if (num_experts <= 512) return route_rows<16>(args, stream);
  const size_t scratch = Scratch::bytes(num_experts, top_k, options);
  allow_shared_memory(route_any_kernel, scratch);
  launch("route_any_kernel", route_any_kernel, static_cast<unsigned>(args.num_tokens), 32, scratch,
         stream_of(stream), dependent_launch(stream), args);
}

RouteArgs route_args(const TensorView& logits, const TensorView& correction_bias,
                     const RouterOptions& options, int64_t num_experts,
                     const MutableTensorView& top_k_index, const MutableTensorView& top_k_weights) {
  return {logits ? logits.as<float>() : nullptr,
          correction_bias ? correction_bias.as<float>() : nullptr,
          top_k_index.as<int32_t>(),
          top_k_weights.as<float>(),
          top_k_index.dim(0),
          static_cast<int32_t>(num_experts),
          static_cast<int32_t>(top_k_index.dim(1)),
          options};
}

void CudaDenseOps::route_by_table(const TensorView& logits, const TensorView& token_ids,
                                  const TensorView& table, const RouterOptions& options,
                                  MutableTensorView top_k_index, MutableTensorView top_k_weights,
                                  Workspace& /*workspace*/, const Stream& stream) {
  const int64_t top_k = top_k_index.dim(1);
  CADRE_ASSERT(table.dim(1) == top_k && options.score != RouterScore::kTopKThenSoftmax);
  if (logits.dim(0) == 0) return;
  const RouteArgs args = route_args(logits, {}, options, logits.dim(1), top_k_index, top_k_weights);
  launch("route_by_table_kernel", route_by_table_kernel, static_cast<unsigned>(logits.dim(0)), 32,
         static_cast<size_t>(top_k) * sizeof(int32_t), stream_of(stream), dependent_launch(stream),
         args, token_ids.as<int32_t>(), table.data(), table.dtype() == DType::kI64);
}

size_t CudaDenseOps::route_workspace_bytes(int64_t /*num_experts*/, int /*num_threads*/) const {
  return 0;
}

}  // namespace cadre::cuda
