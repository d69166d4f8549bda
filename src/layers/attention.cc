#include "layers/attention.h"

#include <algorithm>

#include "core/check.h"
#include "layers/kv_store.h"

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
         query.tensor(DType::kF32, config_.hidden_size) +
         std::max({query.linear(config_.hidden_size), query.linear(q_width),
                   query.ops.attention_workspace_bytes(shape, query.num_threads)});
}

Attention::Projections Attention::project(const TensorView& x,
                                          const ForwardContext& context) const {
  const AttentionShape& shape = config_.shape;
  const auto take = [&](int64_t heads) {
    return context.take(context.compute_dtype, {x.dim(0), heads, shape.head_dim});
  };
  const Projections result{take(shape.num_heads), take(shape.num_kv_heads),
                           take(shape.num_kv_heads)};
  const auto run = [&](const LinearWeights& weights, const MutableTensorView& out) {
    context.ops.linear(x, weights, flat(out), context.workspace, context.stream);
  };
  run(weights_.q, result.q);
  run(weights_.k, result.k);
  run(weights_.v, result.v);
  return result;
}

void Attention::normalize(const MutableTensorView& heads, const TensorView& weight,
                          const ForwardContext& context) const {
  if (config_.qk_norm == QkNorm::kNone) return;
  const MutableTensorView rows = config_.qk_norm == QkNorm::kPerHead ? heads : flat(heads);
  context.ops.rms_norm(rows, weight, config_.norm_eps, rows, context.stream);
}

void Attention::forward(const TensorView& x, MutableTensorView residual, int64_t layer,
                        const ForwardContext& context) const {
  const Workspace::Scope scope(context.workspace);
  const auto [q, k, v] = project(x, context);
  DenseOps& ops = context.ops;
  normalize(q, weights_.q_norm, context);
  normalize(k, weights_.k_norm, context);
  if (config_.clip_qkv) {
    for (const MutableTensorView& tensor : {q, k, v}) {
      ops.clamp(tensor, *config_.clip_qkv, context.stream);
    }
  }
  ops.rope(q, context.rope_cos, context.rope_sin, context.stream);
  ops.rope(k, context.rope_cos, context.rope_sin, context.stream);
  const KvStore& cache = context.cache;
  ops.store_kv(k, context.sequences, cache.keys(layer), context.stream);
  ops.store_kv(v, context.sequences, cache.values(layer), context.stream);

  const MutableTensorView mixed = context.take(context.compute_dtype, q.shape());
  ops.attention({q, cache.keys(layer), cache.values(layer), context.sequences, config_.scale,
                 config_.sliding_window, mixed},
                context.workspace, context.stream);
  const MutableTensorView out = context.take(DType::kF32, residual.shape());
  ops.linear(flat(mixed), weights_.o, out, context.workspace, context.stream);
  ops.add(residual, out, context.stream);
}

}  // namespace cadre
