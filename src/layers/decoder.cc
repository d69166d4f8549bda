#include "layers/decoder.h"

#include <algorithm>
#include <utility>

#include "core/device_runtime.h"

namespace cadre {

Decoder::Decoder(const DecoderConfig& config, DecoderWeights weights, DenseOps& ops)
    : config_(config), weights_(std::move(weights)), ops_(ops), angles_(config.ropes.size()) {
  for (const RopeConfig& rope : config.ropes) ropes_.push_back({rope_frequencies(rope), {}, {}});
}

std::vector<CacheLayout> Decoder::cache_layouts() const {
  std::vector<CacheLayout> result;
  for (const DecoderLayer& layer : weights_.layers) {
    result.push_back(layer.attention->cache_layout(config_.compute_dtype));
  }
  return result;
}

size_t Decoder::workspace_bytes(int64_t max_tokens, int num_threads) const {
  const WorkspaceQuery query{ops_, max_tokens, config_.compute_dtype, num_threads};
  const int64_t hidden = config_.hidden_size;
  size_t block = query.linear(hidden);  // the head's
  for (const DecoderLayer& layer : weights_.layers) {
    block = std::max(block, layer.attention->workspace_bytes(query));
    if (const auto* mlp = std::get_if<Mlp>(&layer.feed_forward)) {
      block = std::max(block, query.tensor(DType::kF32, hidden) + mlp->workspace_bytes(query));
    } else {
      block = std::max(block, std::get<MoeBlock>(layer.feed_forward).workspace_bytes(query));
    }
  }
  size_t angles = 0;
  for (const RopeConfig& rope : config_.ropes) {
    angles += 2 * query.tensor(DType::kF32, rope.rotary_dim / 2);
  }
  const size_t residual = config_.hyper
                              ? HyperResidual::workspace_bytes(query, *config_.hyper, hidden)
                              : PlainResidual::workspace_bytes(query, hidden);
  return query.tensor(DType::kF32, hidden) + 2 * query.tensor(config_.compute_dtype, hidden) +
         angles + residual + block;
}

void Decoder::reserve(int64_t max_tokens, const Stream& stream) {
  plan_.reserve(max_tokens, stream.device);
  for (Rope& rope : ropes_) {
    if (rope.inverse) continue;
    const std::vector<float>& inverse = rope.frequencies.inverse;
    const Dims half{static_cast<int64_t>(inverse.size())};
    rope.inverse = Tensor(DType::kF32, half, stream.device);
    copy_tensor({inverse.data(), DType::kF32, half}, rope.inverse, stream);
    if (const std::vector<int32_t>& axes = rope.frequencies.axes; !axes.empty()) {
      rope.axes = Tensor(DType::kI32, half, stream.device);
      copy_tensor({axes.data(), DType::kI32, half}, rope.axes, stream);
    }
    synchronize(stream);
  }
}

void Decoder::set_inputs(const DecoderStep& step, const Stream& stream) {
  plan_.fill(step.token_ids, step.sequences, step.wanted, step.rope_positions, stream);
}

void Decoder::compute(const DecoderStep& step, KvStore& cache, Workspace& workspace,
                      const Stream& stream, MoeObserver* observer) {
  if (!step.has_inputs) plan_.upload(stream);
  const Workspace::Scope scope(workspace);
  const ForwardContext context{ops_,    workspace, stream,   config_.compute_dtype, plan_.tokens(),
                               angles_, cache,     observer, plan_.token_ids()};
  const MutableTensorView embedding =
      context.take(DType::kF32, {plan_.tokens().num_tokens(), config_.hidden_size});
  turn(context);
  ops_.embedding(plan_.token_ids(), weights_.embedding, embedding, stream);
  if (config_.embedding_scale != 1) ops_.scale(embedding, config_.embedding_scale, stream);
  if (step.images != nullptr) add_images(*step.images, 0, embedding, stream);
  const auto run = [&](Residual&& residual) {
    run_layers(step.images, residual, context);
    write_logits(step, residual, context);
  };
  if (config_.hyper) {
    run(HyperResidual(context, *config_.hyper, weights_.head_connection, embedding));
  } else {
    run(PlainResidual(context, embedding));
  }
}

// Cosines and sines of the step's positions.
void Decoder::turn(const ForwardContext& context) {
  for (size_t i = 0; i < ropes_.size(); ++i) {
    const auto& [frequencies, inverse, axes] = ropes_[i];
    const Dims shape{context.tokens.num_tokens(), inverse->dim(0)};
    angles_[i] = {context.take(DType::kF32, shape), context.take(DType::kF32, shape),
                  inverse.view(), frequencies.scale};
    if (axes && plan_.rope_positions()) {
      ops_.rope_angles_on_axes({plan_.rope_positions(), axes.view()}, inverse.view(),
                               frequencies.scale, angles_[i].cos, angles_[i].sin, context.stream);
    } else if (frequencies.ntk) {
      ops_.dynamic_rope_angles(context.tokens.positions, inverse.view(), *frequencies.ntk,
                               angles_[i].cos, angles_[i].sin, context.stream);
    } else {
      ops_.rope_angles(context.tokens.positions, inverse.view(), frequencies.scale, angles_[i].cos,
                       angles_[i].sin, context.stream);
    }
  }
}

void Decoder::add_images(const StepImages& images, size_t feature, MutableTensorView residual,
                         const Stream& stream) const {
  if (feature >= images.features.size()) return;
  const Accumulate how = feature == 0 ? Accumulate::kOverwrite : Accumulate::kAdd;
  ops_.scatter_rows(images.features[feature], images.rows, how, residual, stream);
}

void Decoder::run_layers(const StepImages* images, Residual& residual,
                         const ForwardContext& context) const {
  const Dims shape{context.tokens.num_tokens(), config_.hidden_size};
  const MutableTensorView routed = context.take(config_.compute_dtype, shape);
  const MutableTensorView x = context.take(config_.compute_dtype, shape);
  for (int64_t l = 0; l < num_layers(); ++l) {
    const DecoderLayer& layer = weights_.layers[static_cast<size_t>(l)];
    residual.open(layer.attention_connection);
    residual.normalize({layer.input_norm, config_.norm_eps}, x);
    layer.attention->forward(x, residual.sum(), l, context);
    residual.close();
    residual.open(layer.feed_forward_connection);
    feed_forward(layer, l, x, routed, residual, context);
    residual.close();
    const auto feature = static_cast<size_t>(l) + 1;
    if (images != nullptr && feature < images->features.size()) {
      add_images(*images, feature, residual.sum(), context.stream);
    }
  }
}

// Routed experts alone are left to be added where the residual is read next.
void Decoder::feed_forward(const DecoderLayer& layer, int64_t index, MutableTensorView x,
                           MutableTensorView routed, Residual& residual,
                           const ForwardContext& context) const {
  const Norm norm{layer.post_attention_norm, config_.norm_eps};
  if (const auto* moe = std::get_if<MoeBlock>(&layer.feed_forward)) {
    moe->run_experts(norm, residual.input(), x, routed, index, context);
    residual.add(routed);
    if (moe->has_shared_expert()) moe->add_shared(x, residual.sum(), context);
    return;
  }
  const Workspace::Scope scope(context.workspace);
  const MutableTensorView out = context.take(DType::kF32, x.shape());
  residual.normalize(norm, x);
  std::get<Mlp>(layer.feed_forward).forward(x, out, context);
  ops_.add(residual.sum(), out, context.stream);
}

void Decoder::write_logits(const DecoderStep& step, Residual& residual,
                           const ForwardContext& context) const {
  const auto count = static_cast<int64_t>(step.wanted.size());
  if (count == 0) return;
  const Workspace::Scope scope(context.workspace);
  const MutableTensorView x = context.take(config_.compute_dtype, {count, config_.hidden_size});
  residual.normalize_rows(plan_.wanted_rows(), {weights_.norm, config_.norm_eps}, x);
  // One product for each run of neighbouring target rows.
  for (int64_t begin = 0; begin < count;) {
    const int64_t target = step.wanted[static_cast<size_t>(begin)].target;
    int64_t end = begin + 1;
    while (end < count && step.wanted[static_cast<size_t>(end)].target == target + end - begin) {
      ++end;
    }
    const MutableTensorView logits = step.logits.slice(target, target + end - begin);
    ops_.linear(x.slice(begin, end), weights_.head, logits, context.workspace, context.stream);
    if (config_.logits_scale != 1) ops_.scale(logits, config_.logits_scale, context.stream);
    begin = end;
  }
}

}  // namespace cadre
