#include "layers/residual.h"

#include <algorithm>

#include "core/device_runtime.h"

namespace cadre {

size_t PlainResidual::workspace_bytes(const WorkspaceQuery& query, int64_t hidden_size) {
  return query.tensor(DType::kF32, hidden_size);  // the rows that the head reads
}

void PlainResidual::normalize(const Norm& norm, MutableTensorView x) {
  if (pending_) {
    context_.ops.add_rms_norm(stream_, pending_, norm.weight, norm.eps, x, context_.stream);
    pending_ = {};
  } else {
    context_.ops.rms_norm(stream_, norm.weight, norm.eps, x, context_.stream);
  }
}

MutableTensorView PlainResidual::sum() {
  if (pending_) context_.ops.add(stream_, pending_, context_.stream);
  pending_ = {};
  return stream_;
}

void PlainResidual::add(const TensorView& out) {
  sum();
  pending_ = out;
}

void PlainResidual::normalize_rows(const TensorView& rows, const Norm& norm, MutableTensorView x) {
  if (x.dim(0) == stream_.dim(0)) return normalize(norm, x);  // every row, in order
  const MutableTensorView stream = sum();
  const Workspace::Scope scope(context_.workspace);
  const MutableTensorView picked = context_.take(DType::kF32, x.shape());
  context_.ops.gather_rows(stream, rows, picked, context_.stream);
  context_.ops.rms_norm(picked, norm.weight, norm.eps, x, context_.stream);
}

HyperResidual::HyperResidual(const ForwardContext& context, const HyperConfig& config,
                             const HyperConnection& head, MutableTensorView embedding)
    : context_(context),
      config_(config),
      head_(head),
      collapsed_(embedding),
      streams_(context.take(DType::kF32, {embedding.dim(0), config.num_streams, embedding.dim(1)})),
      sum_(context.take(DType::kF32, embedding.shape())),
      post_(context.take(DType::kF32, {embedding.dim(0), config.num_streams})),
      mix_(context.take(DType::kF32, {embedding.dim(0), config.num_streams, config.num_streams})) {
  context.ops.hyper_expand({streams_, embedding, {}, {}}, context.stream);
}

size_t HyperResidual::workspace_bytes(const WorkspaceQuery& query, const HyperConfig& config,
                                      int64_t hidden_size) {
  const int64_t n = config.num_streams;
  const size_t product = query.ops.linear_workspace_bytes(query.max_tokens, n * hidden_size,
                                                          DType::kF32, query.num_threads);
  const size_t kept = query.tensor(DType::kF32, n * hidden_size) +
                      query.tensor(DType::kF32, hidden_size) + query.tensor(DType::kF32, n) +
                      query.tensor(DType::kF32, n * n);
  const size_t opening = query.tensor(DType::kF32, (2 + n) * n) + product;
  const size_t head = query.tensor(DType::kF32, n * hidden_size) +
                      query.tensor(DType::kF32, hidden_size) + query.tensor(DType::kF32, n) +
                      product;
  return kept + std::max(opening, head);
}

MutableTensorView HyperResidual::logits(const MutableTensorView& streams,
                                        const HyperConnection& connection) {
  const int64_t rows = streams.dim(0);
  const MutableTensorView result =
      context_.take(DType::kF32, {rows, connection.weights.weight.dim(0)});
  context_.ops.linear(streams.reshape({rows, streams.dim(1) * streams.dim(2)}), connection.weights,
                      result, context_.workspace, context_.stream);
  return result;
}

void HyperResidual::open(const HyperConnection& connection) {
  const Workspace::Scope scope(context_.workspace);
  context_.ops.hyper_collapse(
      {streams_, logits(streams_, connection), connection.base, connection.scale, config_.norm_eps,
       config_.eps, config_.sinkhorn_iterations, collapsed_, post_, mix_},
      context_.stream);
  clear_tensor(sum_, context_.stream);
}

void HyperResidual::normalize(const Norm& norm, MutableTensorView x) {
  context_.ops.rms_norm(collapsed_, norm.weight, norm.eps, x, context_.stream);
}

void HyperResidual::add(const TensorView& out) { context_.ops.add(sum_, out, context_.stream); }

void HyperResidual::close() {
  context_.ops.hyper_expand({streams_, sum_, post_, mix_}, context_.stream);
}

void HyperResidual::normalize_rows(const TensorView& rows, const Norm& norm, MutableTensorView x) {
  const Workspace::Scope scope(context_.workspace);
  const int64_t width = streams_.dim(1) * streams_.dim(2);
  const MutableTensorView picked =
      context_.take(DType::kF32, {x.dim(0), streams_.dim(1), streams_.dim(2)});
  const MutableTensorView collapsed = context_.take(DType::kF32, x.shape());
  context_.ops.gather_rows(streams_.reshape({streams_.dim(0), width}), rows,
                           picked.reshape({x.dim(0), width}), context_.stream);
  context_.ops.hyper_collapse({picked,
                               logits(picked, head_),
                               head_.base,
                               head_.scale,
                               config_.norm_eps,
                               config_.eps,
                               config_.sinkhorn_iterations,
                               collapsed,
                               {},
                               {}},
                              context_.stream);
  context_.ops.rms_norm(collapsed, norm.weight, norm.eps, x, context_.stream);
}

}  // namespace cadre
