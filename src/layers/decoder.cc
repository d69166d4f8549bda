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
  size_t block = query.tensor(DType::kF32, hidden) + query.linear(hidden);  // the head's
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
  return query.tensor(DType::kF32, hidden) + 2 * query.tensor(config_.compute_dtype, hidden) +
         angles + block;
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
  const StepTokens& tokens = plan_.tokens();
  const int64_t num_tokens = tokens.num_tokens();
  const Workspace::Scope scope(workspace);
  const ForwardContext context{ops_,   workspace, stream, config_.compute_dtype,
                               tokens, angles_,   cache,  observer};
  const MutableTensorView residual = context.take(DType::kF32, {num_tokens, config_.hidden_size});
  turn(tokens, context);
  ops_.embedding(plan_.token_ids(), weights_.embedding, residual, stream);
  add_images(step.images, 0, residual, stream);
  const MutableTensorView routed = context.take(config_.compute_dtype, residual.shape());
  const TensorView pending = run_layers(step.images, residual, routed, context);
  write_logits(step, residual, pending, context);
}

// Cosines and sines of the step's positions.
void Decoder::turn(const StepTokens& tokens, const ForwardContext& context) {
  for (size_t i = 0; i < ropes_.size(); ++i) {
    const auto& [frequencies, inverse, axes] = ropes_[i];
    const Dims shape{tokens.num_tokens(), inverse->dim(0)};
    angles_[i] = {context.take(DType::kF32, shape), context.take(DType::kF32, shape)};
    if (axes && plan_.rope_positions()) {
      ops_.rope_angles_on_axes({plan_.rope_positions(), axes.view()}, inverse.view(),
                               frequencies.scale, angles_[i].cos, angles_[i].sin, context.stream);
    } else {
      ops_.rope_angles(tokens.positions, inverse.view(), frequencies.scale, angles_[i].cos,
                       angles_[i].sin, context.stream);
    }
  }
}

void Decoder::add_images(const StepImages* images, size_t feature, MutableTensorView residual,
                         const Stream& stream) const {
  if (images == nullptr || feature >= images->features.size()) return;
  const Accumulate how = feature == 0 ? Accumulate::kOverwrite : Accumulate::kAdd;
  ops_.scatter_rows(images->features[feature], images->rows, how, residual, stream);
}

TensorView Decoder::run_layers(const StepImages* images, MutableTensorView residual,
                               MutableTensorView routed, const ForwardContext& context) const {
  const Workspace::Scope scope(context.workspace);
  const MutableTensorView x = context.take(config_.compute_dtype, residual.shape());
  TensorView pending;  // of the layer before; joins the residual where that is read next
  for (int64_t l = 0; l < num_layers(); ++l) {
    const DecoderLayer& layer = weights_.layers[static_cast<size_t>(l)];
    if (pending) {
      ops_.add_rms_norm(residual, pending, layer.input_norm, config_.norm_eps, x, context.stream);
    } else {
      ops_.rms_norm(residual, layer.input_norm, config_.norm_eps, x, context.stream);
    }
    layer.attention->forward(x, residual, l, context);
    const Norm norm{layer.post_attention_norm, config_.norm_eps};
    pending = {};
    if (const auto* moe = std::get_if<MoeBlock>(&layer.feed_forward)) {
      moe->run_experts(norm, residual, x, routed, l, context);
      pending = routed;
      if (moe->has_shared_expert()) {
        ops_.add(residual, pending, context.stream);
        moe->add_shared(x, residual, context);
        pending = {};
      }
    } else {
      const Workspace::Scope inner(context.workspace);
      const MutableTensorView out = context.take(DType::kF32, residual.shape());
      ops_.rms_norm(residual, norm.weight, norm.eps, x, context.stream);
      std::get<Mlp>(layer.feed_forward).forward(x, out, context);
      ops_.add(residual, out, context.stream);
    }
    add_images(images, static_cast<size_t>(l) + 1, residual, context.stream);
  }
  return pending;
}

void Decoder::norm_wanted(MutableTensorView residual, const TensorView& pending,
                          MutableTensorView x, const ForwardContext& context) const {
  const float eps = config_.norm_eps;
  if (pending && x.dim(0) == residual.dim(0)) {  // every row, in order
    return ops_.add_rms_norm(residual, pending, weights_.norm, eps, x, context.stream);
  }
  if (pending) ops_.add(residual, pending, context.stream);
  const Workspace::Scope scope(context.workspace);
  const MutableTensorView picked = context.take(DType::kF32, x.shape());
  ops_.gather_rows(residual, plan_.wanted_rows(), picked, context.stream);
  ops_.rms_norm(picked, weights_.norm, eps, x, context.stream);
}

void Decoder::write_logits(const DecoderStep& step, MutableTensorView residual,
                           const TensorView& pending, const ForwardContext& context) const {
  const auto count = static_cast<int64_t>(step.wanted.size());
  if (count == 0) return;
  const Workspace::Scope scope(context.workspace);
  const MutableTensorView x = context.take(config_.compute_dtype, {count, config_.hidden_size});
  norm_wanted(residual, pending, x, context);
  // One product for each run of neighbouring target rows.
  for (int64_t begin = 0; begin < count;) {
    const int64_t target = step.wanted[static_cast<size_t>(begin)].target;
    int64_t end = begin + 1;
    while (end < count && step.wanted[static_cast<size_t>(end)].target == target + end - begin) {
      ++end;
    }
    ops_.linear(x.slice(begin, end), weights_.head, step.logits.slice(target, target + end - begin),
                context.workspace, context.stream);
    begin = end;
  }
}

}  // namespace cadre
