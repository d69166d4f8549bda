#include "models/model_builder.h"

#include <cmath>
#include <utility>

#include "core/str_cat.h"

namespace cadre {
namespace {

// Experts that cannot be built because tensors are missing or unfit; loading fails later with all
// names, inspecting goes on.
std::shared_ptr<const ExpertsWeights> no_experts(DType dtype) {
  auto weights = std::make_shared<ExpertsWeights>();
  weights->format = plain_format(dtype).value_or(StorageFormat::kBF16);
  return weights;
}

}  // namespace

void ModelBuilder::begin(const TextConfig& text, const std::string& prefix) {
  model_.text = text;
  DecoderWeights& weights = model_.weights;
  const Dims table{text.vocab_size, text.hidden_size};
  weights.embedding = weights_.take(prefix + "embed_tokens.weight", table, "embedding");
  weights.norm = norm(prefix + "norm.weight", text.hidden_size);
  if (text.tie_word_embeddings) {
    weights.head.weight = weights.embedding;
    weights_.ignore("lm_head.weight");  // some writers store the same values twice
  } else {
    weights.head.weight = weights_.take("lm_head.weight", table, "lm_head");
  }
}

void ModelBuilder::add_layer(DecoderLayer layer) {
  model_.weights.layers.push_back(std::move(layer));
  if (progress_) {
    const auto done = static_cast<int64_t>(model_.weights.layers.size());
    progress_("loading layers", done, model_.text.num_layers);
  }
}

TensorView ModelBuilder::norm(const std::string& name, int64_t width) {
  return weights_.take(name, {width}, "norm");
}

LinearWeights ModelBuilder::linear(const std::string& prefix, int64_t out, int64_t in, bool bias,
                                   std::string_view part) {
  LinearWeights weights;
  weights.weight = weights_.take(prefix + ".weight", {out, in}, part);
  if (bias) weights.bias = weights_.take(prefix + ".bias", {out}, part);
  return weights;
}

AttentionConfig ModelBuilder::attention_config() const {
  const TextConfig& text = model_.text;
  AttentionConfig config;
  config.hidden_size = text.hidden_size;
  config.shape = {text.num_heads, text.num_kv_heads, text.head_dim};
  config.scale = 1.0f / std::sqrt(static_cast<float>(text.head_dim));
  config.norm_eps = text.norm_eps;
  return config;
}

std::unique_ptr<AttentionBlock> ModelBuilder::attention(const std::string& prefix,
                                                        AttentionConfig config, bool qkv_bias,
                                                        bool o_bias) {
  const int64_t hidden = config.hidden_size;
  const int64_t q_width = config.shape.num_heads * config.shape.head_dim;
  const int64_t kv_width = config.shape.num_kv_heads * config.shape.head_dim;
  AttentionWeights weights;
  weights.q = linear(prefix + "q_proj", q_width, hidden, qkv_bias, "attention");
  weights.k = linear(prefix + "k_proj", kv_width, hidden, qkv_bias, "attention");
  weights.v = linear(prefix + "v_proj", kv_width, hidden, qkv_bias, "attention");
  weights.o = linear(prefix + "o_proj", hidden, q_width, o_bias, "attention");
  if (config.qk_norm != QkNorm::kNone) {
    const bool per_head = config.qk_norm == QkNorm::kPerHead;
    weights.q_norm = norm(prefix + "q_norm.weight", per_head ? config.shape.head_dim : q_width);
    weights.k_norm = norm(prefix + "k_norm.weight", per_head ? config.shape.head_dim : kv_width);
  }
  return std::make_unique<Attention>(config, weights);
}

Mlp ModelBuilder::mlp(const std::string& prefix, int64_t intermediate_size, std::string_view part) {
  const int64_t hidden = model_.text.hidden_size;
  return {hidden,
          intermediate_size,
          model_.text.activation,
          {linear(prefix + "gate_proj", intermediate_size, hidden, false, part),
           linear(prefix + "up_proj", intermediate_size, hidden, false, part),
           linear(prefix + "down_proj", hidden, intermediate_size, false, part)}};
}

MoeBlock ModelBuilder::moe(const std::string& prefix, const MoeOptions& options,
                           std::optional<SharedExpert> shared_expert,
                           const std::string& sub_config) {
  ExpertsConfig config;
  config.num_experts = options.num_experts;
  config.hidden_size = model_.text.hidden_size;
  config.intermediate_size = options.intermediate_size;
  config.top_k = options.top_k;
  config.activation = model_.text.activation;
  const LinearWeights gate =
      linear(prefix + "gate", options.num_experts, config.hidden_size, false, "router");
  const Router router(options.top_k, gate, {}, options.router);
  auto weights = experts(prefix + "experts.", config, options.names);
  ExpertsGroup& owner = group(sub_config, config, weights->format, prefix + "experts");
  ++model_.num_moe_layers;
  return {router, owner, owner.add_layer(std::move(weights)), std::move(shared_expert)};
}

ExpertsGroup& ModelBuilder::group(const std::string& sub_config, const ExpertsConfig& config,
                                  StorageFormat format, const std::string& where) {
  for (const auto& known : model_.groups) {
    if (known->sub_config() != sub_config) continue;
    if (known->query().format != format) {
      weights_.add_fault(str_cat(where, ": experts stored as ", format, ", those of earlier layers",
                                 " as ", known->query().format,
                                 "; all layers must have the same format"));
    }
    return *known;
  }
  ExpertsQuery query;
  query.config = config;
  query.device = device_;
  query.compute_dtype = compute_dtype_;
  query.format = format;
  model_.groups.push_back(std::make_unique<ExpertsGroup>(sub_config, query));
  return *model_.groups.back();
}

std::shared_ptr<const ExpertsWeights> ModelBuilder::packed_experts(const std::string& prefix,
                                                                   const ExpertsConfig& config) {
  const int64_t hidden = config.hidden_size;
  const int64_t inner = config.intermediate_size;
  FusedExperts tensors;
  tensors.gate_up_proj =
      weights_.take(prefix + "gate_up_proj", {config.num_experts, 2 * inner, hidden}, "experts");
  tensors.down_proj =
      weights_.take(prefix + "down_proj", {config.num_experts, hidden, inner}, "experts");
  const DType dtype = tensors.gate_up_proj.dtype();
  if (weights_.ok() && tensors.down_proj.dtype() != dtype) {
    weights_.add_fault(str_cat("tensor \"", prefix, "down_proj\": expected ", dtype,
                               " like gate_up_proj, found ", tensors.down_proj.dtype()));
  }
  if (!weights_.ok()) return no_experts(dtype);
  return std::make_shared<const ExpertsWeights>(
      make_experts_weights(config, tensors, weights_.owner()));
}

std::shared_ptr<const ExpertsWeights> ModelBuilder::experts(const std::string& prefix,
                                                            const ExpertsConfig& config,
                                                            const ExpertNames& names) {
  if (weights_.has(prefix + "gate_up_proj")) return packed_experts(prefix, config);
  const Dims inner{config.intermediate_size, config.hidden_size};
  const Dims outer{config.hidden_size, config.intermediate_size};
  std::optional<DType> dtype;
  const auto take = [&](int64_t expert, const char* projection, const Dims& shape) {
    const std::string name = str_cat(prefix, expert, ".", projection, ".weight");
    const TensorView view = weights_.take(name, shape, "experts");
    if (!view.data()) return view;
    if (!dtype) dtype = view.dtype();
    if (view.dtype() != *dtype) {
      weights_.add_fault(str_cat(weights_.checkpoint().find(name)->file, ": tensor \"", name,
                                 "\": expected ", *dtype, " like the layer's other experts, found ",
                                 view.dtype()));
    }
    return view;
  };
  std::vector<TensorView> gate;
  std::vector<TensorView> up;
  std::vector<TensorView> down;
  for (int64_t e = 0; e < config.num_experts; ++e) {
    gate.push_back(take(e, names.gate, inner));
    up.push_back(take(e, names.up, inner));
    down.push_back(take(e, names.down, outer));
  }
  if (!weights_.ok()) return no_experts(dtype.value_or(DType::kBF16));
  return std::make_shared<const ExpertsWeights>(
      make_experts_weights(config, gate, up, down, weights_.owner()));
}

}  // namespace cadre
