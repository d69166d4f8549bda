#include "layers/attention.h"

#include <algorithm>

namespace cadre {
namespace {

MutableTensorView flat(const MutableTensorView& heads) {
  return heads.reshape({heads.dim(0), heads.dim(1) * heads.dim(2)});
}

}  // namespace

size_t Attention::workspace_bytes(const WorkspaceQuery& query) const {
  const AttentionShape& shape = config_.shape;
  const int64_t q_width = shape.num_heads * shape.head_dim;
  const int64_t kv_width = shape.num_kv_heads * shape.head_dim;
  const DType dtype = query.compute_dtype;
  return 2 * query.tensor(dtype, q_width) + 2 * query.tensor(dtype, kv_width) +
         std::max(
             {query.linear(config_.hidden_size), query.linear_add(config_.hidden_size, q_width),
              query.ops.attention_workspace_bytes(shape, query.max_tokens, query.num_threads)});
}

CacheLayout Attention::cache_layout(DType compute_dtype) const {
  const CacheTensor heads{.num_heads = config_.shape.num_kv_heads,
                          .width = config_.shape.head_dim,
                          .dtype = compute_dtype};
  return {heads, heads};
}

Attention::Projections Attention::project(const TensorView& x,
                                          const ForwardContext& context) const {
  const AttentionShape& shape = config_.shape;
  const auto take = [&](int64_t heads) {
    return context.take(context.compute_dtype, {x.dim(0), heads, shape.head_dim});
  };
  const Projections result{take(shape.num_heads), take(shape.num_kv_heads),
                           take(shape.num_kv_heads)};
  const LinearWeights* const weights[] = {&weights_.q, &weights_.k, &weights_.v};
  const MutableTensorView outs[] = {flat(result.q), flat(result.k), flat(result.v)};
  context.ops.linear_group(x, weights, outs, context.workspace, context.stream);
  return result;
}

void Attention::forward(const TensorView& x, MutableTensorView residual, int64_t layer,
                        const ForwardContext& context) const {
  const Workspace::Scope scope(context.workspace);
  const auto [q, k, v] = project(x, context);
  DenseOps& ops = context.ops;
  const KvStore& cache = context.cache;
  const RopeAngles& rope = context.ropes[config_.rope];
  const MutableTensorView mixed = context.take(context.compute_dtype, q.shape());
  ops.finish_and_attend({q, k, v, config_.qk_norm, weights_.q_norm, weights_.k_norm,
                         config_.norm_eps, config_.clip_qkv, rope.cos, rope.sin, context.tokens,
                         cache.keys(layer), cache.values(layer)},
                        {q, cache.keys(layer), cache.values(layer), context.tokens, config_.scale,
                         config_.sliding_window, mixed, weights_.sinks},
                        context.workspace, context.stream);
  ops.linear_add(flat(mixed), weights_.o, residual, context.workspace, context.stream);
}

}  // namespace cadre
