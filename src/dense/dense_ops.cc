#include "dense/dense_ops.h"

#include <string>
#include <vector>

#include "cadre/error.h"
#include "core/check.h"
#include "core/str_cat.h"
#include "dense/compiled_dense_ops.h"

namespace cadre {
namespace {

void no_vision_ops() {
  CADRE_ASSERT(false &&
               "not an op of this device: models with images are to be refused at loading");
}

}  // namespace

DenseOps* find_dense_ops(DeviceType device) {
  for (const CompiledDenseOps& entry : compiled_dense_ops()) {
    if (entry.device == device) return &entry.get();
  }
  return nullptr;
}

DenseOps& dense_ops(DeviceType device) {
  if (DenseOps* ops = find_dense_ops(device)) return *ops;
  std::vector<std::string_view> built;
  for (const CompiledDenseOps& entry : compiled_dense_ops()) built.push_back(name_of(entry.device));
  throw Unsupported(
      str_cat("device ", name_of(device),
              ": this build has no dense operations for it; available: ", join(built)));
}

void DenseOps::linear_group(const TensorView& x, std::span<const LinearWeights* const> weights,
                            std::span<const MutableTensorView> outs, Workspace& workspace,
                            const Stream& stream) {
  CADRE_ASSERT(weights.size() == outs.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    linear(x, *weights[i], outs[i], workspace, stream);
  }
}

void DenseOps::linear_add(const TensorView& x, const LinearWeights& weights, MutableTensorView y,
                          Workspace& workspace, const Stream& stream) {
  const Workspace::Scope scope(workspace);
  const MutableTensorView product(workspace.allocate(y.nbytes()), DType::kF32, y.shape(),
                                  y.device());
  linear(x, weights, product, workspace, stream);
  add(y, product, stream);
}

void DenseOps::add_rms_norm(MutableTensorView residual, const TensorView& x,
                            const TensorView& weight, float eps, MutableTensorView out,
                            const Stream& stream) {
  add(residual, x, stream);
  rms_norm(residual, weight, eps, out, stream);
}

size_t DenseOps::linear_add_workspace_bytes(int64_t num_tokens, int64_t n, int64_t k,
                                            DType compute_dtype, int num_threads) const {
  return Workspace::padded(static_cast<size_t>(num_tokens * n) * sizeof(float)) +
         linear_workspace_bytes(num_tokens, k, compute_dtype, num_threads);
}

void DenseOps::finish_qkv(const QkvArgs& args, const Stream& stream) {
  const auto flat = [](const MutableTensorView& x) {
    return x.reshape({x.dim(0), x.dim(1) * x.dim(2)});
  };
  const auto normalize = [&](const MutableTensorView& heads, const TensorView& weight) {
    const MutableTensorView rows = args.qk_norm == QkNorm::kPerHead ? heads : flat(heads);
    rms_norm(rows, weight, args.norm_eps, rows, stream);
  };
  if (args.qk_norm != QkNorm::kNone) {
    normalize(args.q, args.q_norm);
    normalize(args.k, args.k_norm);
  }
  if (args.clip) {
    for (const MutableTensorView& x : {args.q, args.k, args.v}) clamp(x, *args.clip, stream);
  }
  rope(args.q, args.cos, args.sin, stream);
  rope(args.k, args.cos, args.sin, stream);
  store_kv(args.k, args.tokens, args.keys, stream);
  store_kv(args.v, args.tokens, args.values, stream);
}

void DenseOps::finish_and_attend(const QkvArgs& qkv, const AttentionArgs& args,
                                 Workspace& workspace, const Stream& stream) {
  finish_qkv(qkv, stream);
  attention(args, workspace, stream);
}

void DenseOps::norm_and_route(const NormRouteArgs& args, Workspace& workspace,
                              const Stream& stream) {
  rms_norm(args.residual, args.norm, args.eps, args.x, stream);
  const Workspace::Scope scope(workspace);
  const Dims shape{args.x.dim(0), args.gate.weight.dim(0)};
  const MutableTensorView logits(
      workspace.allocate(static_cast<size_t>(num_elements(shape)) * sizeof(float)), DType::kF32,
      shape, stream.device);
  linear(args.x, args.gate, logits, workspace, stream);
  route(logits, args.correction_bias, args.options, args.top_k_index, args.top_k_weights, workspace,
        stream);
}

void DenseOps::sample(const SampleArgs& /*args*/, Workspace& /*workspace*/,
                      const Stream& /*stream*/) {
  CADRE_ASSERT(false && "sample: not an op of this device; use Sampler");
}

void DenseOps::layer_norm(const TensorView& /*x*/, const TensorView& /*weight*/,
                          const TensorView& /*bias*/, float /*eps*/, MutableTensorView /*out*/,
                          const Stream& /*stream*/) {
  no_vision_ops();
}

void DenseOps::plain_activation(const TensorView& /*x*/, Activation /*activation*/,
                                MutableTensorView /*out*/, const Stream& /*stream*/) {
  no_vision_ops();
}

void DenseOps::rope_angles_on_axes(const AxisPositions& /*where*/,
                                   const TensorView& /*inverse_frequencies*/, float /*scale*/,
                                   MutableTensorView /*cos*/, MutableTensorView /*sin*/,
                                   const Stream& /*stream*/) {
  no_vision_ops();
}

void DenseOps::add_weighted_rows(const TensorView& /*table*/, const TensorView& /*rows*/,
                                 const TensorView& /*weights*/, MutableTensorView /*y*/,
                                 const Stream& /*stream*/) {
  no_vision_ops();
}

void DenseOps::scatter_rows(const TensorView& /*x*/, const TensorView& /*rows*/,
                            Accumulate /*accumulate*/, MutableTensorView /*y*/,
                            const Stream& /*stream*/) {
  no_vision_ops();
}

size_t DenseOps::sample_workspace_bytes(int64_t /*num_rows*/, int64_t /*vocab_size*/) const {
  return 0;
}

StorageFormat format_of(const LinearWeights& weights) {
  if (const std::optional<StorageFormat> plain = plain_format(weights.weight.dtype()))
    return *plain;
  if (weights.weight.dtype() != DType::kF8E4M3) return StorageFormat::kFp4;
  if (weights.scale_layout == ScaleLayout{DType::kF8E8M0, 1, 32}) return StorageFormat::kMxFp8;
  return weights.scale_layout.block_rows == 0 ? StorageFormat::kFp8Tensor
                                              : StorageFormat::kFp8Block;
}

void validate(const RouterOptions& options, int64_t num_experts, int64_t top_k) {
  if (top_k < 1 || top_k > num_experts) {
    throw InvalidArgument(str_cat("router: top_k must lie in [1, number of experts = ", num_experts,
                                  "], got ", top_k));
  }
  const int64_t groups = options.num_groups;
  if (groups < 1 || num_experts % groups != 0) {
    throw InvalidArgument(
        str_cat("router: ", groups, " groups must divide the ", num_experts, " experts evenly"));
  }
  if (options.topk_groups < 1 || options.topk_groups > groups) {
    throw InvalidArgument(str_cat("router: topk_groups must lie in [1, num_groups = ", groups,
                                  "], got ", options.topk_groups));
  }
  if (options.topk_groups * (num_experts / groups) < top_k) {
    throw InvalidArgument(str_cat("router: ", options.topk_groups, " groups of ",
                                  num_experts / groups, " experts cannot give top_k = ", top_k,
                                  " experts"));
  }
}

}  // namespace cadre
