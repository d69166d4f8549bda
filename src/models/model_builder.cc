#include "models/model_builder.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "cadre/error.h"
#include "cadre/float16.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

// Experts that cannot be built because tensors are missing or unfit; loading fails later with all
// names, inspecting goes on.
std::shared_ptr<const ExpertsWeights> no_experts(const StoredWeight& like) {
  auto weights = std::make_shared<ExpertsWeights>();
  weights->format = like.format;
  weights->scale_layout = like.layout;
  return weights;
}

// "bfloat16", "fp8 (float32 scales of 128 x 128)"
std::string form_of(StorageFormat format, const ScaleLayout& layout) {
  if (!is_quantized(format)) return std::string(name_of(format));
  return str_cat(format, " (", layout.dtype, " scales of ",
                 layout.block_rows == 0 ? "a whole matrix"
                                        : str_cat(layout.block_rows, " x ", layout.block_cols),
                 ")");
}

std::shared_ptr<const ExpertsWeights> quantized_experts(const ExpertsConfig& config,
                                                        const std::vector<StoredWeight>& gate,
                                                        const std::vector<StoredWeight>& up,
                                                        const std::vector<StoredWeight>& down,
                                                        std::shared_ptr<const void> owner) {
  struct Projection {
    explicit Projection(const std::vector<StoredWeight>& weights) {
      for (const StoredWeight& weight : weights) {
        tensors.push_back(weight.tensor());
        input_scales.insert(input_scales.end(), weight.input_scales.begin(),
                            weight.input_scales.end());
      }
    }
    std::vector<QuantizedTensor> tensors;
    std::vector<float> input_scales;
  };
  const Projection g(gate);
  const Projection u(up);
  const Projection d(down);
  const QuantizedExperts tensors{g.tensors,      u.tensors,      d.tensors,
                                 g.input_scales, u.input_scales, d.input_scales};
  return std::make_shared<const ExpertsWeights>(
      make_experts_weights(config, tensors, std::move(owner)));
}

template <typename T>
int64_t integer_at(const char* bytes, int64_t i) {
  T value;
  std::memcpy(&value, bytes + static_cast<size_t>(i) * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void widen(const TensorView& tensor, float* out) {
  const auto* bytes = static_cast<const char*>(tensor.data());
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    T value;
    std::memcpy(&value, bytes + static_cast<size_t>(i) * sizeof(T), sizeof(T));
    out[i] = static_cast<float>(value);
  }
}

// Of a contiguous tensor in one of the compute dtypes, at any address.
void to_float32(const TensorView& tensor, float* out) {
  if (tensor.dtype() == DType::kF32) return widen<float>(tensor, out);
  if (tensor.dtype() == DType::kBF16) return widen<BFloat16>(tensor, out);
  return widen<Float16>(tensor, out);
}

}  // namespace

void ModelBuilder::begin(const TextConfig& text, const std::string& prefix) {
  TopNames names;
  names.embedding = prefix + "embed_tokens.weight";
  names.norm = prefix + "norm.weight";
  begin(text, names);
}

void ModelBuilder::begin(const TextConfig& text, const TopNames& names) {
  model_.text = text;
  DecoderWeights& weights = model_.weights;
  const Dims table{text.vocab_size, text.hidden_size};
  weights.embedding = plain(names.embedding, table, "embedding");
  weights.norm = norm(names.norm, text.hidden_size);
  if (text.tie_word_embeddings) {
    weights.head.weight = weights.embedding;
    weights_.ignore(names.head);  // some writers store the same values twice
  } else {
    weights.head = matrix(names.head, text.vocab_size, text.hidden_size, "lm_head");
  }
}

void ModelBuilder::add_layer(DecoderLayer layer) {
  model_.weights.layers.push_back(std::move(layer));
  if (progress_) {
    const auto done = static_cast<int64_t>(model_.weights.layers.size());
    progress_("loading layers", done, model_.text.num_layers);
  }
}

void ModelBuilder::add_vision(const VisionConfig& config, VisionWeights weights,
                              const VisionTokens& tokens) {
  model_.vision.emplace(config, std::move(weights), find_dense_ops(device_.type));
  model_.vision_tokens = tokens;
}

TensorView ModelBuilder::norm(const std::string& name, int64_t width) {
  return weights_.take(name, {width}, "norm");
}

TensorView ModelBuilder::float32(const std::string& name, const Dims& shape,
                                 std::string_view part) {
  const TensorView found = weights_.take_float32(name, shape, part);
  if (found.data() == nullptr || found.device().type != DeviceType::kCpu) return found;
  // A copy even of float32: a tensor in a file may begin at any byte.
  const Tensor& copy = model_.weights.copies.emplace_back(DType::kF32, shape);
  to_float32(found, copy.view().as<float>());
  return copy.view();
}

void ModelBuilder::ignore_extra_layers(int64_t count, const std::string& prefix) {
  for (int64_t i = 0; i < count; ++i) {
    weights_.ignore_all(str_cat(prefix, model_.text.num_layers + i, "."));
  }
}

LinearWeights ModelBuilder::linear(const std::string& prefix, int64_t out, int64_t in, bool bias,
                                   std::string_view part) {
  LinearWeights weights = matrix(prefix + ".weight", out, in, part);
  if (bias) weights.bias = weights_.take(prefix + ".bias", {out}, part);
  return weights;
}

LinearWeights ModelBuilder::matrix(const std::string& name, int64_t out, int64_t in,
                                   std::string_view part) {
  const StoredWeight stored = quantized_.take(name, {out, in}, part);
  LinearWeights weights;
  weights.weight = stored.values;
  weights.scales = stored.scales;
  weights.scale_layout = stored.layout;
  weights.activations = stored.activations;
  if (!stored.input_scales.empty()) weights.input_scale = stored.input_scales.front();
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
  // Inspecting asks for devices that this build has no ops for; loading has refused these.
  const DenseOps* ops = find_dense_ops(device_.type);
  if (ops != nullptr && !ops->serves(config.shape)) {
    throw Unsupported(str_cat(config_.origin(), ": attention heads of ", config.shape.head_dim,
                              " elements do not run on ", device_, "; use --device cpu"));
  }
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
  if (config.has_sinks) {
    weights.sinks = float32(prefix + "sinks", {config.shape.num_heads}, "attention");
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
  ExpertsConfig config = options.experts;
  config.hidden_size = model_.text.hidden_size;
  config.activation = model_.text.activation;
  const Router gate = router(prefix, options);
  const LoadedExperts loaded = experts(prefix, config, options.names);
  ExpertsGroup& owner = group(sub_config, config, loaded, prefix + "experts");
  ++model_.num_moe_layers;
  return {gate, owner, owner.add_layer(loaded.weights), std::move(shared_expert)};
}

Router ModelBuilder::router(const std::string& prefix, const MoeOptions& options) {
  const int64_t num_experts = options.experts.num_experts;
  const std::string name = prefix + options.names.router;
  LinearWeights gate;
  gate.weight = plain(name + ".weight", {num_experts, model_.text.hidden_size}, "router");
  if (options.router_bias) gate.bias = weights_.take(name + ".bias", {num_experts}, "router");
  TensorView correction;
  if (options.names.correction_bias != nullptr) {
    correction = float32(prefix + options.names.correction_bias, {num_experts}, "router");
  }
  TensorView table;
  if (options.names.expert_table != nullptr) {
    table = expert_table(prefix + options.names.expert_table, options);
  }
  return {options.experts.top_k, gate, correction, options.router, table};
}

// Its ids are used unchecked by every forward, so they are checked here.
TensorView ModelBuilder::expert_table(const std::string& name, const MoeOptions& options) {
  const TensorView table =
      weights_.take_integers(name, {model_.text.vocab_size, options.experts.top_k}, "router");
  if (table.data() == nullptr || table.device().type != DeviceType::kCpu) return table;
  const bool is_wide = table.dtype() == DType::kI64;
  const auto* bytes = static_cast<const char*>(table.data());
  for (int64_t i = 0; i < table.numel(); ++i) {
    const int64_t id = is_wide ? integer_at<int64_t>(bytes, i) : integer_at<int32_t>(bytes, i);
    if (id >= 0 && id < options.experts.num_experts) continue;
    weights_.add_fault(str_cat("tensor \"", name, "\": expected experts in [0, ",
                               options.experts.num_experts, "), found ", id, " for token id ",
                               i / table.dim(1)));
    break;
  }
  return table;
}

ExpertsGroup& ModelBuilder::group(const std::string& sub_config, const ExpertsConfig& config,
                                  const LoadedExperts& experts, const std::string& where) {
  const StorageFormat format = experts.weights->format;
  const ScaleLayout& layout = experts.weights->scale_layout;
  for (const auto& known : model_.groups) {
    if (known->sub_config() != sub_config) continue;
    if (!weights_.ok()) return *known;  // what is missing or unfit has no form to compare
    const ExpertsQuery& query = known->query();
    if (query.format != format || !(query.scale_layout == layout)) {
      weights_.add_fault(str_cat(
          where, ": experts stored as ", form_of(format, layout), ", those of earlier layers as ",
          form_of(query.format, query.scale_layout), "; all layers must have the same format"));
    }
    if (query.config.is_transposed != config.is_transposed) {
      weights_.add_fault(str_cat(where, ": experts transposed otherwise than those of earlier ",
                                 "layers; all layers must have the same layout"));
    }
    return *known;
  }
  ExpertsQuery query;
  query.config = config;
  query.device = device_;
  query.compute_dtype = compute_dtype_;
  query.format = format;
  query.scale_layout = layout;
  query.activation_scheme = experts.activations;
  model_.groups.push_back(std::make_unique<ExpertsGroup>(sub_config, query));
  return *model_.groups.back();
}

ModelBuilder::LoadedExperts ModelBuilder::packed_experts(const std::string& prefix,
                                                         ExpertsConfig& config,
                                                         const MoeNames& names) {
  const int64_t hidden = config.hidden_size;
  const int64_t inner = config.intermediate_size;
  const std::string gate_up = prefix + names.packed_gate_up;
  const std::string down = prefix + names.packed_down;
  if (quantized_.is_fp4(gate_up)) config.is_transposed = false;
  const bool transposed = config.is_transposed;
  const auto take = [&](const std::string& name, int64_t n, int64_t k, Rows rows) {
    return quantized_.take(name, {config.num_experts, transposed ? k : n, transposed ? n : k},
                           "experts", transposed ? Rows::kOneMatrix : rows);
  };
  const StoredWeight stored = take(gate_up, 2 * inner, hidden, Rows::kTwoMatrices);
  const StoredWeight stored_down = take(down, hidden, inner, Rows::kOneMatrix);
  require_same_form(down, stored_down, gate_up, stored);
  FusedExperts tensors;
  tensors.gate_up_proj = stored.values;
  tensors.down_proj = stored_down.values;
  if (config.has_bias) {
    const auto take_bias = [&](const std::string& name, int64_t width) {
      return weights_.take(name + "_bias", {config.num_experts, width}, "experts");
    };
    tensors.gate_up_proj_bias = take_bias(gate_up, 2 * inner);
    tensors.down_proj_bias = take_bias(down, hidden);
    require_same_dtype(down + "_bias", tensors.down_proj_bias, gate_up + "_bias",
                       tensors.gate_up_proj_bias);
  }
  if (!weights_.ok()) return {no_experts(stored), stored.activations};
  if (!stored.is_quantized()) {
    return {std::make_shared<const ExpertsWeights>(
        make_experts_weights(config, tensors, weights_.owner()))};
  }
  QuantizedFusedExperts quantized{.gate_up_proj = stored.tensor(),
                                  .down_proj = stored_down.tensor(),
                                  .gate_up_proj_bias = tensors.gate_up_proj_bias,
                                  .down_proj_bias = tensors.down_proj_bias,
                                  .gate_up_input_scales = stored.input_scales,
                                  .down_input_scales = stored_down.input_scales};
  if (config.is_transposed) {  // the config's blocks are those of tensors as they lie
    for (QuantizedTensor* tensor : {&quantized.gate_up_proj, &quantized.down_proj}) {
      std::swap(tensor->layout.block_rows, tensor->layout.block_cols);
    }
  }
  return {std::make_shared<const ExpertsWeights>(
              make_experts_weights(config, quantized, weights_.owner())),
          stored.activations};
}

void ModelBuilder::require_same_dtype(const std::string& name, const TensorView& tensor,
                                      const std::string& other_name, const TensorView& other) {
  if (!weights_.ok() || tensor.dtype() == other.dtype()) return;
  weights_.add_fault(str_cat("tensor \"", name, "\": expected ", other.dtype(), " like ",
                             other_name, ", found ", tensor.dtype()));
}

void ModelBuilder::require_same_form(const std::string& name, const StoredWeight& weight,
                                     const std::string& others, const StoredWeight& other) {
  if (weight.values.data() == nullptr || other.values.data() == nullptr) return;  // faults already
  if (weight.format == other.format && weight.layout == other.layout) return;
  weights_.add_fault(str_cat("tensor \"", name, "\": expected ",
                             form_of(other.format, other.layout), " like ", others, ", found ",
                             form_of(weight.format, weight.layout)));
}

ModelBuilder::LoadedExperts ModelBuilder::experts(const std::string& prefix, ExpertsConfig& config,
                                                  const MoeNames& names) {
  if (quantized_.has(prefix + names.packed_gate_up) || quantized_.has(prefix + names.packed_down)) {
    return packed_experts(prefix, config, names);
  }
  const Dims inner{config.intermediate_size, config.hidden_size};
  const Dims outer{config.hidden_size, config.intermediate_size};
  StoredWeight first;
  const auto take = [&](int64_t expert, const char* projection, const Dims& shape) {
    const std::string name = str_cat(prefix, "experts.", expert, ".", projection, ".weight");
    StoredWeight weight = quantized_.take(name, shape, "experts");
    if (first.values.data() == nullptr) first = weight;
    require_same_form(name, weight, "the layer's other experts", first);
    return weight;
  };
  std::vector<StoredWeight> gate;
  std::vector<StoredWeight> up;
  std::vector<StoredWeight> down;
  for (int64_t e = 0; e < config.num_experts; ++e) {
    gate.push_back(take(e, names.gate, inner));
    up.push_back(take(e, names.up, inner));
    down.push_back(take(e, names.down, outer));
  }
  if (!weights_.ok()) return {no_experts(first), first.activations};
  if (first.is_quantized()) {
    return {quantized_experts(config, gate, up, down, weights_.owner()), first.activations};
  }
  const auto values = [](const std::vector<StoredWeight>& weights) {
    std::vector<TensorView> views;
    for (const StoredWeight& weight : weights) views.push_back(weight.values);
    return views;
  };
  return {std::make_shared<const ExpertsWeights>(
      make_experts_weights(config, values(gate), values(up), values(down), weights_.owner()))};
}

}  // namespace cadre
