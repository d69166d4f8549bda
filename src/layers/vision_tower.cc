#include "layers/vision_tower.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cadre/float16.h"
#include "core/check.h"
#include "core/device_runtime.h"
#include "layers/forward_context.h"
#include "layers/patch_places.h"
#include "layers/rope.h"

namespace cadre {
namespace {

// Inverse frequencies of a head: its rows turn the first half, its columns the second.
std::vector<float> axis_frequencies(const VisionConfig& config) {
  std::vector<float> result =
      rope_frequencies({.theta = config.rope_theta, .rotary_dim = config.head_dim() / 2}).inverse;
  result.insert(result.end(), result.begin(), result.end());
  return result;
}

}  // namespace

// One picture on its way through the tower.
struct VisionTower::Run {
  const VisionTower& tower;
  Workspace& workspace;
  const Stream& stream;
  int64_t num_patches;
  StepTokens tokens = {};
  MutableTensorView residual = {};  // [num_patches, hidden_size] f32
  RopeAngles angles = {};

  const VisionConfig& config() const { return tower.config_; }
  DenseOps& ops() const { return *tower.ops_; }

  MutableTensorView take(DType dtype, const Dims& shape) const {
    const size_t bytes = static_cast<size_t>(num_elements(shape)) * size_of(dtype);
    return {workspace.allocate(bytes), dtype, shape, stream.device};
  }
  MutableTensorView take(const Dims& shape) const { return take(config().compute_dtype, shape); }

  template <typename T>
  MutableTensorView bring(const std::vector<T>& values, DType dtype, const Dims& shape) const {
    const MutableTensorView result = take(dtype, shape);
    copy_tensor({values.data(), dtype, shape}, result, stream);
    synchronize(stream);  // the host's copy may go now
    return result;
  }

  void norm(const TensorView& x, const LayerNormWeights& weights, MutableTensorView out) const {
    ops().layer_norm(x, weights.weight, weights.bias, config().norm_eps, out, stream);
  }

  TensorView bring_pixels(std::span<const float> pixels) const;
  void place_tokens(const std::vector<SequenceSpan>& sequences);
  void embed(std::span<const float> pixels, const PatchPlaces& places);
  void attend(const VisionBlock& block) const;
  void mlp(const VisionBlock& block) const;
  void merge(const PatchMerger& merger, MutableTensorView out) const;
};

TensorView VisionTower::Run::bring_pixels(std::span<const float> pixels) const {
  const Dims shape{num_patches, config().patch_width};
  const Tensor host(config().compute_dtype, shape);
  switch (config().compute_dtype) {
    case DType::kBF16:
      std::transform(pixels.begin(), pixels.end(), host->as<BFloat16>(),
                     [](float value) { return BFloat16(value); });
      break;
    case DType::kF16:
      std::transform(pixels.begin(), pixels.end(), host->as<Float16>(),
                     [](float value) { return Float16(value); });
      break;
    default:
      std::copy(pixels.begin(), pixels.end(), host->as<float>());
  }
  const MutableTensorView result = take(shape);
  copy_tensor(host, result, stream);
  synchronize(stream);
  return result;
}

// The whole picture is one sequence without a past.
void VisionTower::Run::place_tokens(const std::vector<SequenceSpan>& sequences) {
  std::vector<int32_t> numbers(static_cast<size_t>(num_patches));
  tokens.slots = bring(numbers, DType::kI32, {num_patches});
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<int32_t>(i);
  tokens.positions = bring(numbers, DType::kI32, {num_patches});
  tokens.spans =
      bring(std::vector<int32_t>{0, 0, static_cast<int32_t>(num_patches), 0}, DType::kI32, {1, 4});
  tokens.sequences = sequences;
}

void VisionTower::Run::embed(std::span<const float> pixels, const PatchPlaces& places) {
  residual = take(DType::kF32, {num_patches, config().hidden_size});
  const int64_t half = config().head_dim() / 2;
  angles = {take(DType::kF32, {num_patches, half}), take(DType::kF32, {num_patches, half})};
  const Workspace::Scope scope(workspace);
  const VisionWeights& weights = tower.weights_;
  ops().linear(bring_pixels(pixels), weights.patch_embed, residual, workspace, stream);
  ops().add_weighted_rows(weights.positions, bring(places.rows, DType::kI32, {num_patches, 4}),
                          bring(places.weights, DType::kF32, {num_patches, 4}), residual, stream);
  std::vector<int32_t> axes(static_cast<size_t>(half), 0);
  std::fill(axes.begin() + half / 2, axes.end(), 1);
  const std::vector<float> frequencies = axis_frequencies(config());
  ops().rope_angles_on_axes(
      {bring(places.positions, DType::kI32, {2, num_patches}), bring(axes, DType::kI32, {half})},
      bring(frequencies, DType::kF32, {half}), 1, angles.cos, angles.sin, stream);
}

void VisionTower::Run::attend(const VisionBlock& block) const {
  const Workspace::Scope scope(workspace);
  const int64_t heads = config().num_heads;
  const int64_t dim = config().head_dim();
  const Dims flat{num_patches, config().hidden_size};
  const Dims by_head{num_patches, heads, dim};
  const Dims by_sequence{1, heads, num_patches, dim};
  const MutableTensorView x = take(flat);
  norm(residual, block.attention_norm, x);
  const MutableTensorView q = take(by_head);
  const MutableTensorView k = take(by_head);
  const MutableTensorView v = take(by_head);
  const LinearWeights* const weights[] = {&block.q, &block.k, &block.v};
  const MutableTensorView outs[] = {q.reshape(flat), k.reshape(flat), v.reshape(flat)};
  ops().linear_group(x, weights, outs, workspace, stream);
  QkvArgs qkv;
  qkv.q = q;
  qkv.k = k;
  qkv.v = v;
  qkv.cos = angles.cos;
  qkv.sin = angles.sin;
  qkv.tokens = tokens;
  qkv.keys = take(by_sequence);
  qkv.values = take(by_sequence);
  ops().finish_qkv(qkv, stream);
  AttentionArgs args;
  args.q = q;
  args.keys = qkv.keys;
  args.values = qkv.values;
  args.tokens = tokens;
  args.scale = 1.0f / std::sqrt(static_cast<float>(dim));
  args.out = x.reshape(by_head);
  args.is_causal = false;
  ops().attention(args, workspace, stream);
  ops().linear_add(x, block.o, residual, workspace, stream);
}

void VisionTower::Run::mlp(const VisionBlock& block) const {
  const Workspace::Scope scope(workspace);
  const MutableTensorView x = take(residual.shape());
  norm(residual, block.mlp_norm, x);
  const Dims inner{num_patches, config().intermediate_size};
  const MutableTensorView wide = take(DType::kF32, inner);
  ops().linear(x, block.up, wide, workspace, stream);
  const MutableTensorView active = take(inner);
  ops().plain_activation(wide, config().activation, active, stream);
  ops().linear_add(active, block.down, residual, workspace, stream);
}

void VisionTower::Run::merge(const PatchMerger& merger, MutableTensorView out) const {
  const Workspace::Scope scope(workspace);
  const Dims merged{num_patches / config().patches_per_token(),
                    config().patches_per_token() * config().hidden_size};
  const MutableTensorView x = take(merged);
  if (merger.norms_merged) {
    norm(residual.reshape(merged), merger.norm, x);
  } else {
    norm(residual, merger.norm, x.reshape(residual.shape()));
  }
  const MutableTensorView wide = take(DType::kF32, merged);
  ops().linear(x, merger.up, wide, workspace, stream);
  ops().plain_activation(wide, Activation::kGelu, x, stream);
  ops().linear(x, merger.down, out, workspace, stream);
}

VisionTower::VisionTower(const VisionConfig& config, VisionWeights weights, DenseOps* ops)
    : config_(config), weights_(std::move(weights)), ops_(ops) {
  CADRE_ASSERT(weights_.deepstack_blocks.size() == weights_.deepstack_mergers.size());
}

size_t VisionTower::workspace_bytes(int64_t num_patches, int num_threads) const {
  const WorkspaceQuery query{*ops_, num_patches, config_.compute_dtype, num_threads};
  const DType dtype = config_.compute_dtype;
  const int64_t hidden = config_.hidden_size;
  const int64_t inner = config_.intermediate_size;
  const int64_t merged = config_.patches_per_token() * hidden;
  const int64_t half = config_.head_dim() / 2;
  const size_t kept = query.tensor(DType::kF32, hidden) + 2 * query.tensor(DType::kF32, half) +
                      2 * query.tensor(DType::kI32, 1) + Workspace::padded(4 * sizeof(int32_t));
  const size_t embed = query.tensor(dtype, config_.patch_width) + query.tensor(DType::kI32, 2) +
                       2 * query.tensor(DType::kI32, 4) +
                       2 * Workspace::padded(static_cast<size_t>(half) * sizeof(float)) +
                       query.linear(config_.patch_width);
  const AttentionShape shape{config_.num_heads, config_.num_heads, config_.head_dim()};
  const size_t attend =
      6 * query.tensor(dtype, hidden) +
      std::max({query.linear(hidden), query.linear_add(hidden, hidden),
                ops_->attention_workspace_bytes(shape, num_patches, num_threads)});
  const size_t mlp = query.tensor(dtype, hidden) + query.tensor(DType::kF32, inner) +
                     query.tensor(dtype, inner) +
                     std::max(query.linear(hidden), query.linear_add(hidden, inner));
  const size_t merge =
      query.tensor(dtype, hidden) + query.tensor(DType::kF32, hidden) + query.linear(merged);
  return kept + std::max({embed, attend, mlp, merge});
}

void VisionTower::forward(std::span<const float> pixels, int64_t height, int64_t width,
                          std::span<const MutableTensorView> features, Workspace& workspace,
                          const Stream& stream) const {
  CADRE_ASSERT(static_cast<int64_t>(features.size()) == num_features());
  CADRE_ASSERT(static_cast<int64_t>(pixels.size()) == height * width * config_.patch_width);
  const Workspace::Scope scope(workspace);
  Run run{*this, workspace, stream, height * width};
  const std::vector<SequenceSpan> sequences{{0, 0, height * width, 0}};
  run.place_tokens(sequences);
  run.embed(pixels, patch_places(height, width, config_.merge_size, config_.table_side));
  size_t taken = 0;
  for (size_t l = 0; l < weights_.blocks.size(); ++l) {
    run.attend(weights_.blocks[l]);
    run.mlp(weights_.blocks[l]);
    if (taken < weights_.deepstack_blocks.size() &&
        weights_.deepstack_blocks[taken] == static_cast<int64_t>(l)) {
      run.merge(weights_.deepstack_mergers[taken], features[taken + 1]);
      ++taken;
    }
  }
  run.merge(weights_.merger, features[0]);
}

}  // namespace cadre
