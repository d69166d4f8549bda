#include "layers/compressed_attention.h"

#include <algorithm>
#include <cmath>

namespace cadre {
namespace {

// Tensors of a layer's cache: the window, then what each compressor keeps.
constexpr size_t kWindow = 0;
constexpr size_t kCompressor = 1;
constexpr size_t kIndexer = 4;
constexpr size_t kEntries = 0;  // of a compressor
constexpr size_t kValues = 1;
constexpr size_t kGates = 2;

MutableTensorView flat(const MutableTensorView& heads) {
  return heads.reshape({heads.dim(0), heads.dim(1) * heads.dim(2)});
}

void add_compressor(const CompressorWeights& weights, DType compute_dtype, CacheLayout& layout) {
  const CacheTensor rows{.width = weights.series() * weights.width(),
                         .fixed_rows = weights.series() * weights.rate(),
                         .block = weights.rate(),
                         .before = (weights.series() - 1) * weights.rate(),
                         .dtype = DType::kF32};
  layout.push_back(
      {.width = weights.width(), .tokens_per_row = weights.rate(), .dtype = compute_dtype});
  layout.push_back(rows);
  layout.push_back(rows);
}

}  // namespace

CacheLayout CompressedAttention::cache_layout(DType compute_dtype) const {
  CacheLayout layout{{.width = config_.head_dim,
                      .fixed_rows = config_.sliding_window,
                      .before = config_.sliding_window - 1,
                      .dtype = compute_dtype}};
  if (weights_.compressor) add_compressor(*weights_.compressor, compute_dtype, layout);
  if (weights_.indexer) add_compressor(weights_.indexer->compressor, compute_dtype, layout);
  return layout;
}

size_t CompressedAttention::compress_bytes(const CompressorWeights& weights,
                                           const WorkspaceQuery& query) const {
  return 2 * query.tensor(DType::kF32, weights.series() * weights.width()) +
         std::max(query.linear(config_.hidden_size),
                  query.ops.compress_workspace_bytes(weights.width(), query.num_threads));
}

size_t CompressedAttention::workspace_bytes(const WorkspaceQuery& query) const {
  const DType dtype = query.compute_dtype;
  const int64_t width = config_.num_heads * config_.head_dim;
  const int64_t o_width = config_.o_groups * config_.o_rank;
  size_t kept = query.tensor(dtype, config_.q_rank) + 2 * query.tensor(dtype, width) +
                query.tensor(dtype, config_.head_dim);
  size_t inner = std::max(
      {query.linear(config_.hidden_size), query.linear(config_.q_rank),
       query.ops.shared_kv_attention_workspace_bytes(config_.num_heads, config_.head_dim,
                                                     query.num_threads),
       query.tensor(dtype, o_width) + std::max(query.linear_heads(width / config_.o_groups),
                                               query.linear_add(config_.hidden_size, o_width))});
  if (weights_.compressor) inner = std::max(inner, compress_bytes(*weights_.compressor, query));
  if (const auto& indexer = weights_.indexer) {
    const int64_t index_width = indexer->compressor.width();
    kept += query.tensor(DType::kI32, indexer->top_k);
    inner = std::max(
        {inner, compress_bytes(indexer->compressor, query),
         query.tensor(dtype, indexer->num_heads * index_width) +
             query.tensor(DType::kF32, indexer->num_heads) +
             std::max({query.linear(config_.q_rank), query.linear(config_.hidden_size),
                       query.ops.pick_entries_workspace_bytes(
                           indexer->num_heads, index_width, indexer->top_k, query.num_threads)})});
  }
  return kept + inner;
}

MutableTensorView CompressedAttention::queries(const TensorView& latent,
                                               const ForwardContext& context) const {
  DenseOps& ops = context.ops;
  const RopeAngles& rope = context.ropes[config_.rope];
  const MutableTensorView q =
      context.take(context.compute_dtype, {latent.dim(0), config_.num_heads, config_.head_dim});
  ops.linear(latent, weights_.q_b, flat(q), context.workspace, context.stream);
  ops.rms_norm(q, {}, config_.norm_eps, q, context.stream);
  ops.rope_pairs(q, config_.head_dim - config_.rotary_dim, rope.cos, rope.sin, false,
                 context.stream);
  return q;
}

MutableTensorView CompressedAttention::rows(const TensorView& x,
                                            const ForwardContext& context) const {
  DenseOps& ops = context.ops;
  const RopeAngles& rope = context.ropes[config_.rope];
  const MutableTensorView kv = context.take(context.compute_dtype, {x.dim(0), config_.head_dim});
  ops.linear(x, weights_.kv, kv, context.workspace, context.stream);
  ops.rms_norm(kv, weights_.kv_norm, config_.norm_eps, kv, context.stream);
  ops.rope_pairs(kv.reshape({x.dim(0), 1, config_.head_dim}), config_.head_dim - config_.rotary_dim,
                 rope.cos, rope.sin, false, context.stream);
  return kv;
}

void CompressedAttention::compress(const CompressorWeights& weights, size_t first,
                                   const TensorView& x, int64_t layer,
                                   const ForwardContext& context) const {
  const Workspace::Scope scope(context.workspace);
  DenseOps& ops = context.ops;
  const RopeAngles& rope = context.ropes[config_.rope];
  const Dims shape{x.dim(0), weights.series() * weights.width()};
  const MutableTensorView values = context.take(DType::kF32, shape);
  const MutableTensorView gates = context.take(DType::kF32, shape);
  const LinearWeights* const projections[] = {&weights.values, &weights.gates};
  const MutableTensorView outs[] = {values, gates};
  ops.linear_group(x, projections, outs, context.workspace, context.stream);
  const MutableTensorView& value_ring = context.cache.tensor(layer, first + kValues);
  const MutableTensorView& gate_ring = context.cache.tensor(layer, first + kGates);
  ops.compress({values, gates, value_ring, gate_ring, weights.position_bias, weights.norm,
                config_.norm_eps, rope.inverse_frequencies, rope.scale, context.tokens,
                context.cache.tensor(layer, first + kEntries)},
               context.workspace, context.stream);
  ops.store_ring(values, context.tokens, value_ring, context.stream);
  ops.store_ring(gates, context.tokens, gate_ring, context.stream);
}

TensorView CompressedAttention::pick(const TensorView& x, const TensorView& latent, int64_t layer,
                                     const ForwardContext& context) const {
  const IndexerWeights& indexer = *weights_.indexer;
  compress(indexer.compressor, kIndexer, x, layer, context);
  const MutableTensorView picks = context.take(DType::kI32, {x.dim(0), indexer.top_k});
  const Workspace::Scope scope(context.workspace);
  DenseOps& ops = context.ops;
  const RopeAngles& rope = context.ropes[config_.rope];
  const int64_t width = indexer.compressor.width();
  const MutableTensorView q =
      context.take(context.compute_dtype, {x.dim(0), indexer.num_heads, width});
  const MutableTensorView weights = context.take(DType::kF32, {x.dim(0), indexer.num_heads});
  ops.linear(latent, indexer.q, flat(q), context.workspace, context.stream);
  ops.rope_pairs(q, width - config_.rotary_dim, rope.cos, rope.sin, false, context.stream);
  ops.linear(x, indexer.head_weights, weights, context.workspace, context.stream);
  const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(width)) /
                                        std::sqrt(static_cast<double>(indexer.num_heads)));
  ops.pick_entries({q, weights, scale, context.cache.tensor(layer, kIndexer + kEntries),
                    indexer.compressor.rate(), context.tokens, picks},
                   context.workspace, context.stream);
  return picks;
}

// A value is a rotated key, so what is mixed turns with the positions of the keys; turning it back
// by the token's own leaves their distances.
void CompressedAttention::project(const MutableTensorView& mixed, MutableTensorView residual,
                                  const ForwardContext& context) const {
  DenseOps& ops = context.ops;
  const RopeAngles& rope = context.ropes[config_.rope];
  ops.rope_pairs(mixed, config_.head_dim - config_.rotary_dim, rope.cos, rope.sin, true,
                 context.stream);
  const int64_t rows = mixed.dim(0);
  const int64_t groups = config_.o_groups;
  const int64_t width = weights_.o_a.dim(1);  // of a group
  const MutableTensorView grouped =
      context.take(context.compute_dtype, {rows, groups * config_.o_rank});
  ops.linear_heads(
      mixed.reshape({rows, groups, width}), weights_.o_a.reshape({groups, config_.o_rank, width}),
      grouped.reshape({rows, groups, config_.o_rank}), context.workspace, context.stream);
  ops.linear_add(grouped, weights_.o_b, residual, context.workspace, context.stream);
}

void CompressedAttention::forward(const TensorView& x, MutableTensorView residual, int64_t layer,
                                  const ForwardContext& context) const {
  const Workspace::Scope scope(context.workspace);
  DenseOps& ops = context.ops;
  const MutableTensorView latent = context.take(context.compute_dtype, {x.dim(0), config_.q_rank});
  ops.linear(x, weights_.q_a, latent, context.workspace, context.stream);
  ops.rms_norm(latent, weights_.q_norm, config_.norm_eps, latent, context.stream);

  SharedKvAttentionArgs args;
  args.q = queries(latent, context);
  args.kv = rows(x, context);
  args.kv_ring = context.cache.tensor(layer, kWindow);
  args.sliding_window = config_.sliding_window;
  if (weights_.compressor) {
    compress(*weights_.compressor, kCompressor, x, layer, context);
    args.entries = context.cache.tensor(layer, kCompressor + kEntries);
    args.rate = weights_.compressor->rate();
  }
  if (weights_.indexer) args.picks = pick(x, latent, layer, context);
  args.sinks = weights_.sinks;
  args.scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
  args.tokens = context.tokens;
  args.out = context.take(context.compute_dtype, args.q.shape());
  ops.shared_kv_attention(args, context.workspace, context.stream);
  ops.store_ring(args.kv, context.tokens, context.cache.tensor(layer, kWindow), context.stream);
  project(args.out, residual, context);
}

}  // namespace cadre
