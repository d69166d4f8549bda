#include "models/text_config.h"

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

// Far above every model, far below what could overflow in products of a few of them.
constexpr int64_t kMaxSize = int64_t{1} << 28;

double positive(const ConfigReader& config, std::string_view key, double value) {
  if (!(value > 0)) config_error(config, str_cat(key, ": expected a positive number, got ", value));
  return value;
}

std::optional<double> optional_number(const ConfigReader& config, std::string_view key) {
  if (!config.has(key)) return std::nullopt;
  return config.number(key);
}

RopeType parse_rope_type(const ConfigReader& config, const std::string& name) {
  if (name == "default") return RopeType::kDefault;
  if (name == "linear") return RopeType::kLinear;
  if (name == "llama3") return RopeType::kLlama3;
  if (name == "yarn") return RopeType::kYarn;
  throw Unsupported(str_cat(config.origin(), ": rope_type \"", name,
                            "\" is not supported; supported: default, linear, llama3, yarn"));
}

void read_rope_scaling(const ConfigReader& scaling, const TextConfig& text, RopeConfig& rope) {
  if (scaling.number_or("partial_rotary_factor", 1) != 1) {
    throw Unsupported(str_cat(scaling.origin(), ": partial_rotary_factor ",
                              scaling.number("partial_rotary_factor"),
                              " is not supported by this family; supported: 1"));
  }
  const std::string name = scaling.text_or("rope_type", scaling.text_or("type", "default"));
  rope.type = parse_rope_type(scaling, name);
  if (rope.type == RopeType::kDefault) return;
  rope.factor = positive(scaling, "factor", scaling.number("factor"));
  if (rope.type == RopeType::kLinear) return;
  const auto context = static_cast<double>(text.max_position_embeddings);
  rope.original_max_position =
      positive(scaling, "original_max_position_embeddings",
               scaling.number_or("original_max_position_embeddings", context));
  if (rope.type == RopeType::kLlama3) {
    rope.low_freq_factor = positive(scaling, "low_freq_factor", scaling.number("low_freq_factor"));
    rope.high_freq_factor =
        positive(scaling, "high_freq_factor", scaling.number("high_freq_factor"));
    return;
  }
  rope.beta_fast = positive(scaling, "beta_fast", scaling.number_or("beta_fast", rope.beta_fast));
  rope.beta_slow = positive(scaling, "beta_slow", scaling.number_or("beta_slow", rope.beta_slow));
  rope.truncate = scaling.boolean_or("truncate", true);
  rope.attention_factor = optional_number(scaling, "attention_factor");
  rope.mscale = optional_number(scaling, "mscale");
  rope.mscale_all_dim = optional_number(scaling, "mscale_all_dim");
}

// Newer: rope_parameters {rope_type, rope_theta, ...}. Older: rope_theta and rope_scaling {type or
// rope_type, ...} or null.
RopeConfig read_rope(const ConfigReader& config, const TextConfig& text, double default_theta) {
  RopeConfig rope;
  rope.rotary_dim = text.head_dim;
  rope.theta = config.number_or("rope_theta", default_theta);
  if (config.has("rope_parameters")) {
    const ConfigReader parameters = config.object("rope_parameters");
    rope.theta = parameters.number_or("rope_theta", rope.theta);
    read_rope_scaling(parameters, text, rope);
  } else if (config.has("rope_scaling")) {
    read_rope_scaling(config.object("rope_scaling"), text, rope);
  }
  positive(config, "rope_theta", rope.theta);
  return rope;
}

void read_heads(const ConfigReader& config, TextConfig& text) {
  text.num_heads = read_size(config, "num_attention_heads");
  text.num_kv_heads = config.integer_or("num_key_value_heads", text.num_heads, 1, kMaxSize);
  if (text.num_heads % text.num_kv_heads != 0) {
    config_error(config, str_cat("num_key_value_heads (", text.num_kv_heads,
                                 ") must divide num_attention_heads (", text.num_heads, ")"));
  }
  if (config.has("head_dim")) {
    text.head_dim = read_size(config, "head_dim");
  } else if (text.hidden_size % text.num_heads == 0) {
    text.head_dim = text.hidden_size / text.num_heads;
  } else {
    config_error(config, str_cat("without head_dim, num_attention_heads (", text.num_heads,
                                 ") must divide hidden_size (", text.hidden_size, ")"));
  }
  if (text.head_dim % 2 != 0) {
    config_error(config, str_cat("head_dim must be even to be rotated, got ", text.head_dim));
  }
}

}  // namespace

void config_error(const ConfigReader& config, const std::string& what) {
  throw CheckpointError(str_cat(config.origin(), ": ", what));
}

int64_t read_size(const ConfigReader& config, std::string_view key) {
  return config.integer(key, 1, kMaxSize);
}

TextConfig read_text_config(const ConfigReader& config, const TextDefaults& defaults) {
  TextConfig text;
  text.vocab_size = read_size(config, "vocab_size");
  text.hidden_size = read_size(config, "hidden_size");
  text.num_layers = config.integer("num_hidden_layers", 1, 100000);
  text.max_position_embeddings = read_size(config, "max_position_embeddings");
  read_heads(config, text);
  text.norm_eps = static_cast<float>(
      positive(config, "rms_norm_eps", config.number_or("rms_norm_eps", defaults.norm_eps)));
  text.activation = parse_activation(config.text_or("hidden_act", "silu"));
  text.tie_word_embeddings = config.boolean_or("tie_word_embeddings", false);
  text.rope = read_rope(config, text, defaults.rope_theta);
  return text;
}

int64_t read_num_experts(const ConfigReader& config) {
  const std::string_view key =
      config.first_of({"num_experts", "num_local_experts", "n_routed_experts"});
  return read_size(config, key);
}

int64_t read_top_k(const ConfigReader& config, int64_t num_experts) {
  const int64_t top_k = read_size(config, "num_experts_per_tok");
  if (top_k > num_experts) {
    config_error(config,
                 str_cat("num_experts_per_tok (", top_k,
                         ") must not be larger than the number of experts (", num_experts, ")"));
  }
  return top_k;
}

std::optional<DType> read_dtype(const ConfigReader& config) {
  for (const std::string_view key : {"dtype", "torch_dtype"}) {
    if (!config.has(key)) continue;
    const std::string name = config.text(key);
    if (name == "auto") continue;
    const std::optional<DType> dtype = parse_dtype(name);
    if (!dtype || !is_compute_dtype(*dtype)) {
      config_error(config, str_cat(key, ": expected float32, bfloat16 or float16, got \"", name,
                                   "\"; give a compute dtype (--dtype) to override it"));
    }
    return dtype;
  }
  return std::nullopt;
}

std::vector<TokenId> read_eos_token_ids(const ConfigReader& config) {
  std::vector<TokenId> ids;
  if (!config.has("eos_token_id")) return ids;
  for (const int64_t id : config.integers("eos_token_id")) {
    if (id < 0 || id > kMaxSize) {
      config_error(config, str_cat("eos_token_id: expected token ids, got ", id));
    }
    ids.push_back(static_cast<TokenId>(id));
  }
  return ids;
}

}  // namespace cadre
