// DeepseekV4ForCausalLM (DeepSeek-V4-Flash, DeepSeek-V4-Pro): hyper-connections, attention over a
// window and over compressed tokens, first routers that go by the token's id, clamped experts.
// Tensors under DeepSeek's names (with or without "model." before them) or under Transformers'.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "layers/compressed_attention.h"
#include "models/model_builder.h"

namespace cadre {
namespace {

constexpr const char* kSliding = "sliding_attention";
constexpr const char* kSparse = "compressed_sparse_attention";
constexpr const char* kHeavy = "heavily_compressed_attention";
constexpr int64_t kMaxRate = 1 << 16;
constexpr int64_t kMaxIterations = 1000;

constexpr size_t kCompressRope = 1;  // of the decoder's ropes; the main one is the first

struct V4Config {
  std::vector<std::string> layer_types;  // [num_layers]
  std::vector<bool> hashed;              // [num_layers]: experts by token id
  int64_t sparse_rate = 0;
  int64_t heavy_rate = 0;
  RopeConfig main_rope;
  RopeConfig compress_rope;
  CompressedAttentionConfig attention;
  int64_t index_heads = 0;
  int64_t index_width = 0;
  int64_t index_top_k = 0;
  HyperConfig hyper;
  MoeOptions moe;
  bool mlp_bias = false;
};

std::vector<std::string> of_layers(const ConfigReader& config, std::string_view key,
                                   int64_t num_layers) {
  std::vector<std::string> types = config.texts(key);
  if (static_cast<int64_t>(types.size()) < num_layers) {
    config_error(config, str_cat(config.path(key), ": expected ", num_layers, " entries, got ",
                                 types.size()));
  }
  types.resize(static_cast<size_t>(num_layers));  // those of layers for multi-token prediction
  return types;
}

// Older configs say 0, 4 or 128 for each layer.
std::vector<std::string> types_of_ratios(const ConfigReader& config, int64_t num_layers) {
  const std::vector<int64_t> ratios = config.integers("compress_ratios");
  std::vector<std::string> types;
  for (const int64_t ratio : ratios) {
    if (ratio != 0 && ratio != 4 && ratio != 128) {
      config_error(config, str_cat("compress_ratios: expected 0, 4 or 128, got ", ratio));
    }
    types.emplace_back(ratio == 0 ? kSliding : ratio == 4 ? kSparse : kHeavy);
  }
  if (static_cast<int64_t>(types.size()) < num_layers) {
    config_error(config,
                 str_cat("compress_ratios: expected ", num_layers, " entries, got ", types.size()));
  }
  types.resize(static_cast<size_t>(num_layers));
  return types;
}

std::vector<std::string> read_layer_types(const ConfigReader& config, int64_t num_layers) {
  if (!config.has("layer_types")) {
    if (config.has("compress_ratios")) return types_of_ratios(config, num_layers);
    std::vector<std::string> types;
    for (int64_t l = 0; l < num_layers; ++l) {
      types.emplace_back(l < 2 || l % 2 == 0 ? kHeavy : kSparse);
    }
    return types;
  }
  std::vector<std::string> types = of_layers(config, "layer_types", num_layers);
  for (const std::string& type : types) {
    if (type == kSliding || type == kSparse || type == kHeavy) continue;
    config_error(config, str_cat("layer_types: expected ", kSliding, ", ", kSparse, " or ", kHeavy,
                                 ", got ", quote(type)));
  }
  return types;
}

std::vector<bool> read_hashed_layers(const ConfigReader& config, int64_t num_layers) {
  std::vector<bool> hashed(static_cast<size_t>(num_layers), false);
  if (!config.has("mlp_layer_types")) {
    const int64_t count = std::min(num_layers, config.integer_or("num_hash_layers", 3, 0));
    std::fill_n(hashed.begin(), count, true);
    return hashed;
  }
  const std::vector<std::string> types = of_layers(config, "mlp_layer_types", num_layers);
  for (size_t l = 0; l < hashed.size(); ++l) {
    hashed[l] = types[l] == "hash_moe";
    if (hashed[l] || types[l] == "moe") continue;
    config_error(config,
                 str_cat("mlp_layer_types: expected hash_moe or moe, got ", quote(types[l])));
  }
  return hashed;
}

// compress_rates {type: rate}; older configs: a key for each.
int64_t read_rate(const ConfigReader& config, const char* type, std::string_view older,
                  int64_t fallback) {
  if (config.has(older)) return config.integer(older, 1, kMaxRate);
  if (!config.has("compress_rates")) return fallback;
  return config.object("compress_rates").integer_or(type, fallback, 1, kMaxRate);
}

// The config with one set of RoPE parameters in the place where all families have them.
ConfigReader with_rope(const ConfigReader& config, const Json& parameters, double factor) {
  Json json = config.json();
  json.erase("rope_scaling");
  json["rope_parameters"] = parameters;
  json["partial_rotary_factor"] = factor;
  json["num_key_value_heads"] = 1;
  if (!config.has("head_dim")) json["head_dim"] = 512;
  return {std::move(json), config.origin()};
}

struct RopeParameters {
  Json main;
  Json compress;
};

// Newer: rope_parameters {main, compress}. Older: rope_theta and compress_rope_theta; what
// rope_scaling says goes for the compressing layers alone, whose cosines and sines YaRN does not
// scale.
RopeParameters read_rope_parameters(const ConfigReader& config) {
  Json shared = Json::object();
  for (const std::string_view key : {"rope_parameters", "rope_scaling"}) {
    if (!config.has(key)) continue;
    const ConfigReader found = config.object(key);
    if (found.has("main") && found.has("compress")) {
      return {found.object("main").json(), found.object("compress").json()};
    }
    if (!found.json().empty()) shared = found.json();
  }
  RopeParameters result{Json::object(), std::move(shared)};
  result.main["rope_theta"] = config.number_or("rope_theta", 10000);
  result.compress["rope_theta"] = config.number_or("compress_rope_theta", 160000);
  result.compress.erase("main");
  result.compress.erase("compress");
  const std::string type = result.compress.value("rope_type", result.compress.value("type", ""));
  if (type == "yarn" && !result.compress.contains("attention_factor")) {
    result.compress["attention_factor"] = 1.0;
  }
  return result;
}

double rotary_factor(const ConfigReader& config) {
  if (config.has("partial_rotary_factor")) return config.number("partial_rotary_factor");
  const auto head_dim = static_cast<double>(config.integer_or("head_dim", 512, 1));
  return config.number_or("qk_rope_head_dim", head_dim / 8) / head_dim;
}

// Sizes, and both ropes.
TextConfig read_text(const ConfigReader& config, V4Config& v4) {
  if (config.integer_or("num_key_value_heads", 1) != 1) {
    config_error(config, str_cat("num_key_value_heads: expected 1, got ",
                                 config.integer("num_key_value_heads")));
  }
  const double factor = rotary_factor(config);
  const RopeParameters ropes = read_rope_parameters(config);
  const TextDefaults defaults{.partial_rotary_factor = factor};
  TextConfig text = read_text_config(with_rope(config, ropes.main, factor), defaults);
  v4.main_rope = text.rope;
  v4.compress_rope = read_text_config(with_rope(config, ropes.compress, factor), defaults).rope;
  if (v4.main_rope.type == RopeType::kDynamic || v4.compress_rope.type == RopeType::kDynamic) {
    throw Unsupported(str_cat(config.origin(), ": rope_type \"dynamic\" is not supported by this ",
                              "family: entries are rotated once, by frequencies that stay"));
  }
  return text;
}

void read_attention(const ConfigReader& config, const TextConfig& text, V4Config& v4) {
  CompressedAttentionConfig& attention = v4.attention;
  attention.hidden_size = text.hidden_size;
  attention.num_heads = text.num_heads;
  attention.head_dim = text.head_dim;
  attention.q_rank = read_size(config, "q_lora_rank");
  attention.rotary_dim = v4.main_rope.rotary_dim;
  attention.sliding_window = config.integer_or("sliding_window", 128, 1, 1 << 20);
  attention.o_groups = read_size(config, "o_groups");
  attention.o_rank = read_size(config, "o_lora_rank");
  attention.norm_eps = text.norm_eps;
  if (text.num_heads % attention.o_groups != 0) {
    config_error(config, str_cat("o_groups (", attention.o_groups,
                                 ") must divide num_attention_heads (", text.num_heads, ")"));
  }
  v4.index_heads = read_size(config, "index_n_heads");
  v4.index_width = read_size(config, "index_head_dim");
  v4.index_top_k = config.integer("index_topk", 1, 1 << 20);
  if (v4.compress_rope.rotary_dim != attention.rotary_dim ||
      attention.rotary_dim > v4.index_width) {
    config_error(config, str_cat("rotated elements: expected as many in all layers, up to ",
                                 "index_head_dim (", v4.index_width, "), got ",
                                 attention.rotary_dim, " and ", v4.compress_rope.rotary_dim));
  }
}

void read_hyper(const ConfigReader& config, float norm_eps, HyperConfig& hyper) {
  hyper.num_streams = config.integer_or("hc_mult", 4, 1, kMaxHyperStreams);
  hyper.sinkhorn_iterations = config.integer_or("hc_sinkhorn_iters", 20, 1, kMaxIterations);
  hyper.eps = static_cast<float>(config.number_or("hc_eps", 1e-6));
  hyper.norm_eps = norm_eps;
}

// norm_topk_prob is not read: Transformers and DeepSeek's own code always normalise.
void read_moe(const ConfigReader& config, MoeOptions& moe) {
  moe.experts.num_experts = read_num_experts(config);
  moe.experts.top_k = read_top_k(config, moe.experts.num_experts);
  moe.experts.intermediate_size = read_size(config, "moe_intermediate_size");
  const double limit = config.number_or("swiglu_limit", 10);
  if (!(limit > 0)) config_error(config, str_cat("swiglu_limit: expected > 0, got ", limit));
  moe.experts.swiglu_limit = static_cast<float>(limit);
  const std::string score = config.text_or("scoring_func", "sqrtsoftplus");
  if (score != "sqrtsoftplus" && score != "sigmoid") {
    throw Unsupported(str_cat(config.origin(), ": scoring_func ", quote(score),
                              " is not supported; supported: sqrtsoftplus, sigmoid"));
  }
  moe.router.score = score == "sigmoid" ? RouterScore::kSigmoid : RouterScore::kSqrtSoftplus;
  moe.router.normalize = true;
  moe.router.scaling_factor = static_cast<float>(config.number_or("routed_scaling_factor", 1.5));
}

// Which of a tensor's two names the checkpoint has.
class Names {
 public:
  explicit Names(const WeightLoader& weights) : weights_(weights) {
    const auto has_layers = [&](const std::string& prefix) {
      return weights.has(prefix + "layers.0.attn_norm.weight") ||
             weights.has(prefix + "layers.0.input_layernorm.weight");
    };
    prefix_ = has_layers("") ? "" : "model.";
    is_hub_ = !weights.has(prefix_ + "layers.0.input_layernorm.weight");
  }

  const std::string& prefix() const { return prefix_; }
  /// The first of `names` that is there; else the one that goes with the others.
  std::string of(const std::string& hub, const std::string& transformers,
                 const std::string& third = "") const {
    for (const std::string& name : {hub, transformers, third}) {
      if (!name.empty() && weights_.has(name)) return name;
    }
    return is_hub_ ? hub : transformers;
  }
  /// Of a tensor under `prefix`.
  std::string in(const std::string& prefix, const char* hub, const char* transformers) const {
    return of(prefix + hub, prefix + transformers);
  }

 private:
  const WeightLoader& weights_;
  std::string prefix_;
  bool is_hub_;
};

class V4Builder {
 public:
  explicit V4Builder(ModelBuilder& builder) : builder_(builder), names_(builder.weights()) {}

  BuiltModel build() {
    const ConfigReader& config = builder_.config();
    const TextConfig text = read_text(config, v4_);
    v4_.layer_types = read_layer_types(config, text.num_layers);
    v4_.hashed = read_hashed_layers(config, text.num_layers);
    v4_.sparse_rate = read_rate(config, kSparse, "compress_rate_csa", 4);
    v4_.heavy_rate = read_rate(config, kHeavy, "compress_rate_hca", 128);
    v4_.mlp_bias = config.boolean_or("mlp_bias", false);
    read_attention(config, text, v4_);
    read_hyper(config, text.norm_eps, v4_.hyper);
    read_moe(config, v4_.moe);
    top(text);
    for (int64_t l = 0; l < text.num_layers; ++l) layer(l);
    for (const char* prefix : {"mtp.", "model.mtp."}) builder_.weights().ignore_all(prefix);
    return builder_.finish();
  }

 private:
  int64_t hidden() const { return builder_.text().hidden_size; }
  // Small ones that are read as float32: a GPU keeps them so.
  TensorView take_wide(const std::string& name, const Dims& shape,
                       std::string_view part = "residual") {
    return builder_.weights().take_float32(name, shape, part);
  }
  LinearWeights matrix(const std::string& name, int64_t out, int64_t in) {
    return builder_.matrix(name, out, in, "attention");
  }

  void top(const TextConfig& text) {
    const std::string& prefix = names_.prefix();
    builder_.begin(
        text, {names_.in(prefix, "embed.weight", "embed_tokens.weight"), prefix + "norm.weight",
               names_.of("head.weight", "lm_head.weight", prefix + "head.weight")});
    BuiltModel& model = builder_.model();
    model.ropes = {v4_.main_rope, v4_.compress_rope};
    model.hyper = v4_.hyper;
    model.needs_compressed_ops = true;
    model.weights.head_connection = {
        {take_wide(names_.in(prefix, "hc_head_fn", "hc_head.hc_fn"),
                   {v4_.hyper.num_streams, v4_.hyper.num_streams * text.hidden_size}),
         {}},
        take_wide(names_.in(prefix, "hc_head_base", "hc_head.hc_base"), {v4_.hyper.num_streams}),
        take_wide(names_.in(prefix, "hc_head_scale", "hc_head.hc_scale"), {1})};
  }

  void layer(int64_t l) {
    const std::string prefix = str_cat(names_.prefix(), "layers.", l, ".");
    builder_.add_layer(
        {builder_.norm(names_.in(prefix, "attn_norm.weight", "input_layernorm.weight"), hidden()),
         attention(l, prefix),
         builder_.norm(names_.in(prefix, "ffn_norm.weight", "post_attention_layernorm.weight"),
                       hidden()),
         moe(l, prefix), connection(prefix, "hc_attn_", "attn_hc."),
         connection(prefix, "hc_ffn_", "ffn_hc.")});
  }

  HyperConnection connection(const std::string& prefix, const char* hub, const char* transformers) {
    const int64_t n = v4_.hyper.num_streams;
    const int64_t mix = (2 + n) * n;
    const auto part = [&](const char* name, const Dims& shape) {
      return take_wide(names_.of(str_cat(prefix, hub, name), str_cat(prefix, transformers, name)),
                       shape);
    };
    return {{part("fn", {mix, n * hidden()}), {}}, part("base", {mix}), part("scale", {3})};
  }

  std::unique_ptr<AttentionBlock> attention(int64_t l, const std::string& layer) {
    const std::string hub = layer + "attn.";
    const std::string other = layer + "self_attn.";
    const auto name = [&](const char* a, const char* b, const char* c = nullptr) {
      return names_.of(hub + a, other + b, c != nullptr ? hub + c : std::string());
    };
    CompressedAttentionConfig config = v4_.attention;
    const int64_t width = config.num_heads * config.head_dim;
    const int64_t o_width = config.o_groups * config.o_rank;
    CompressedAttentionWeights weights;
    weights.q_a = matrix(name("wq_a.weight", "q_a_proj.weight"), config.q_rank, hidden());
    weights.q_norm = builder_.norm(name("q_norm.weight", "q_a_norm.weight"), config.q_rank);
    weights.q_b = matrix(name("wq_b.weight", "q_b_proj.weight"), width, config.q_rank);
    weights.kv = matrix(name("wkv.weight", "kv_proj.weight"), config.head_dim, hidden());
    // Transformers' own way back to the hub's names loses "kv_".
    weights.kv_norm =
        builder_.norm(name("kv_norm.weight", "kv_norm.weight", "norm.weight"), config.head_dim);
    weights.o_a = builder_.plain(name("wo_a.weight", "o_a_proj.weight"),
                                 {o_width, width / config.o_groups}, "attention");
    weights.o_b = matrix(name("wo_b.weight", "o_b_proj.weight"), hidden(), o_width);
    weights.sinks = take_wide(name("attn_sink", "sinks"), {config.num_heads}, "attention");
    const std::string& type = v4_.layer_types[static_cast<size_t>(l)];
    if (type != kSliding) {
      config.rope = kCompressRope;
      const bool is_sparse = type == kSparse;
      weights.compressor = compressor(hub + "compressor.", other + "compressor.",
                                      is_sparse ? v4_.sparse_rate : v4_.heavy_rate,
                                      is_sparse ? 2 : 1, config.head_dim);
      if (is_sparse) weights.indexer = indexer(hub, other);
    }
    return std::make_unique<CompressedAttention>(config, weights);
  }

  CompressorWeights compressor(const std::string& hub, const std::string& other, int64_t rate,
                               int64_t series, int64_t width) {
    const auto name = [&](const char* a, const char* b) { return names_.of(hub + a, other + b); };
    CompressorWeights weights;
    weights.values = matrix(name("wkv.weight", "kv_proj.weight"), series * width, hidden());
    weights.gates = matrix(name("wgate.weight", "gate_proj.weight"), series * width, hidden());
    weights.position_bias =
        take_wide(name("ape", "position_bias"), {rate, series * width}, "attention");
    weights.norm = builder_.norm(name("norm.weight", "kv_norm.weight"), width);
    return weights;
  }

  IndexerWeights indexer(const std::string& hub, const std::string& other) {
    const auto name = [&](const char* a, const char* b) {
      return names_.of(hub + "indexer." + a, other + "compressor.indexer." + b);
    };
    IndexerWeights weights;
    weights.num_heads = v4_.index_heads;
    weights.top_k = v4_.index_top_k;
    weights.q = matrix(name("wq_b.weight", "q_b_proj.weight"), v4_.index_heads * v4_.index_width,
                       v4_.attention.q_rank);
    weights.head_weights = matrix(name("weights_proj.weight", "scorer.weights_proj.weight"),
                                  v4_.index_heads, hidden());
    weights.compressor = compressor(hub + "indexer.compressor.", other + "compressor.indexer.",
                                    v4_.sparse_rate, 2, v4_.index_width);
    return weights;
  }

  MoeBlock moe(int64_t l, const std::string& layer) {
    const bool is_hub = builder_.weights().has(layer + "ffn.gate.weight") ||
                        !builder_.weights().has(layer + "mlp.gate.weight");
    const std::string prefix = layer + (is_hub ? "ffn." : "mlp.");
    MoeOptions options = v4_.moe;
    options.names = {"w1", "w3", "w2"};
    if (v4_.hashed[static_cast<size_t>(l)]) {
      options.names.expert_table = "gate.tid2eid";
    } else {
      options.names.correction_bias = is_hub ? "gate.bias" : "gate.e_score_correction_bias";
    }
    const int64_t inner = options.experts.intermediate_size;
    const auto shared = [&](const char* hub, const char* transformers, int64_t out, int64_t in) {
      const std::string stem = prefix + "shared_experts.";
      const bool has_hub = builder_.weights().has(stem + hub + ".weight");
      return builder_.linear(stem + (has_hub || is_hub ? hub : transformers), out, in, v4_.mlp_bias,
                             "shared expert");
    };
    const Mlp mlp(
        hidden(), inner, builder_.text().activation,
        {shared("w1", "gate_proj", inner, hidden()), shared("w3", "up_proj", inner, hidden()),
         shared("w2", "down_proj", hidden(), inner)},
        options.experts.swiglu_limit);
    return builder_.moe(prefix, options, SharedExpert{mlp, {}});
  }

  ModelBuilder& builder_;
  Names names_;
  V4Config v4_;
};

}  // namespace

BuiltModel build_deepseek_v4(ModelBuilder& builder) { return V4Builder(builder).build(); }

}  // namespace cadre
