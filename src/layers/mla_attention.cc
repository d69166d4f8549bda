#include "layers/mla_attention.h"

#include <algorithm>

namespace cadre {
namespace {

// Tokens times heads whose queries are in the latent space at a time, so that the workspace does
// not grow with the number of heads: 128 Ki rows of 512 16-bit elements are 128 MiB.
constexpr int64_t kMaxLatentRows = int64_t{128} << 10;

// Indices [begin, end) of the middle dimension and [first, first + count) of the last one.
MutableTensorView part(const TensorView& x, int64_t begin, int64_t end, int64_t first,
                       int64_t count) {
  auto* data = static_cast<std::byte*>(const_cast<void*>(x.data()));
  const int64_t offset = begin * x.stride(1) + first * x.stride(2);
  return {data + static_cast<size_t>(offset) * size_of(x.dtype()),
          x.dtype(),
          {x.dim(0), end - begin, count},
          x.strides(),
          x.device()};
}

MutableTensorView flat(const MutableTensorView& heads) {
  return heads.reshape({heads.dim(0), heads.dim(1) * heads.dim(2)});
}

}  // namespace

size_t MlaAttention::workspace_bytes(const WorkspaceQuery& query) const {
  const MlaConfig& c = config_;
  const DType dtype = query.compute_dtype;
  size_t project =
      std::max(query.linear(c.hidden_size), query.linear(std::max<int64_t>(c.q_rank, 1)));
  if (c.q_rank > 0) project += query.tensor(DType::kF32, c.q_rank) + query.tensor(dtype, c.q_rank);
  // A step of fewer tokens may take more heads at a time.
  const int64_t rows =
      std::min(query.max_tokens * c.num_heads, std::max(query.max_tokens, kMaxLatentRows));
  const size_t latent = Workspace::padded(static_cast<size_t>(rows * c.rank) * size_of(dtype));
  const size_t attend =
      2 * latent + std::max({query.linear_heads(c.nope_dim), query.linear_heads(c.rank),
                             query.ops.latent_attention_workspace_bytes(
                                 {c.num_heads, c.rank, c.rope_dim}, rows, query.num_threads)});
  return query.tensor(dtype, c.num_heads * (c.nope_dim + c.rope_dim)) +
         query.tensor(DType::kF32, c.rank + c.rope_dim) +
         query.tensor(dtype, c.num_heads * c.value_dim) +
         std::max({project, attend, query.linear_add(c.hidden_size, c.num_heads * c.value_dim)});
}

CacheLayout MlaAttention::cache_layout(DType compute_dtype) const {
  return {{.num_heads = 1, .width = config_.rank + config_.rope_dim, .dtype = compute_dtype}};
}

void MlaAttention::project(const TensorView& x, MutableTensorView q, MutableTensorView fresh,
                           const ForwardContext& context) const {
  DenseOps& ops = context.ops;
  if (config_.q_rank == 0) {
    ops.linear(x, weights_.q, q, context.workspace, context.stream);
    return ops.linear(x, weights_.kv_a, fresh, context.workspace, context.stream);
  }
  const Workspace::Scope scope(context.workspace);
  const Dims shape{x.dim(0), config_.q_rank};
  const MutableTensorView compressed = context.take(DType::kF32, shape);
  const MutableTensorView normed = context.take(context.compute_dtype, shape);
  const LinearWeights* const weights[] = {&weights_.q_a, &weights_.kv_a};
  const MutableTensorView outs[] = {compressed, fresh};
  ops.linear_group(x, weights, outs, context.workspace, context.stream);
  ops.rms_norm(compressed, weights_.q_norm, config_.norm_eps, normed, context.stream);
  ops.linear(normed, weights_.q, q, context.workspace, context.stream);
}

void MlaAttention::attend(const TensorView& q, int64_t begin, int64_t end, MutableTensorView out,
                          int64_t layer, const ForwardContext& context) const {
  const MlaConfig& c = config_;
  const Workspace::Scope scope(context.workspace);
  const Dims shape{q.dim(0), end - begin, c.rank};
  const MutableTensorView q_latent = context.take(context.compute_dtype, shape);
  const MutableTensorView mixed = context.take(context.compute_dtype, shape);
  const auto* kv_b = static_cast<const std::byte*>(weights_.kv_b.data());
  // A head's weights from row `first` of its nope_dim + value_dim on.
  const auto weight = [&](int64_t first, const Dims& dims, const Dims& strides) {
    const int64_t row = begin * (c.nope_dim + c.value_dim) + first;
    return TensorView(kv_b + static_cast<size_t>(row * c.rank) * size_of(weights_.kv_b.dtype()),
                      weights_.kv_b.dtype(), dims, strides, weights_.kv_b.device());
  };
  const int64_t head_stride = (c.nope_dim + c.value_dim) * c.rank;
  DenseOps& ops = context.ops;
  ops.linear_heads(part(q, begin, end, 0, c.nope_dim),
                   weight(0, {end - begin, c.rank, c.nope_dim}, {head_stride, 1, c.rank}), q_latent,
                   context.workspace, context.stream);
  ops.latent_attention({q_latent, part(q, begin, end, c.nope_dim, c.rope_dim),
                        context.cache.tensor(layer, 0), context.tokens, c.scale, mixed},
                       context.workspace, context.stream);
  ops.linear_heads(mixed,
                   weight(c.nope_dim, {end - begin, c.value_dim, c.rank}, {head_stride, c.rank, 1}),
                   part(out, begin, end, 0, c.value_dim), context.workspace, context.stream);
}

void MlaAttention::forward(const TensorView& x, MutableTensorView residual, int64_t layer,
                           const ForwardContext& context) const {
  const MlaConfig& c = config_;
  const Workspace::Scope scope(context.workspace);
  const int64_t num_tokens = x.dim(0);
  const MutableTensorView q =
      context.take(context.compute_dtype, {num_tokens, c.num_heads, c.nope_dim + c.rope_dim});
  const MutableTensorView fresh = context.take(DType::kF32, {num_tokens, c.rank + c.rope_dim});
  const MutableTensorView out =
      context.take(context.compute_dtype, {num_tokens, c.num_heads, c.value_dim});
  project(x, flat(q), fresh, context);
  const RopeAngles& rope = context.ropes[c.rope];
  context.ops.finish_latent(
      {fresh, weights_.kv_norm, c.norm_eps, part(q, 0, c.num_heads, c.nope_dim, c.rope_dim),
       c.interleaved_rope, rope.cos, rope.sin, context.tokens, context.cache.tensor(layer, 0)},
      context.stream);
  const int64_t heads = std::clamp<int64_t>(kMaxLatentRows / num_tokens, 1, c.num_heads);
  for (int64_t begin = 0; begin < c.num_heads; begin += heads) {
    attend(q, begin, std::min(begin + heads, c.num_heads), out, layer, context);
  }
  context.ops.linear_add(flat(out), weights_.o, residual, context.workspace, context.stream);
}

}  // namespace cadre
