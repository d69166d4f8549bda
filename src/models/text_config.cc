#include "models/text_config.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

// Far above every model, far below what could overflow in products of a few of them.
constexpr int64_t kMaxSize = int64_t{1} << 28;

// The range of every RoPE number: wider than any model's, narrow enough that angles of all
// positions are finite in float32.
constexpr double kSmallest = 1e-6;
constexpr double kLargest = 1e6;
constexpr double kLargestTheta = 1e30;
constexpr double kLargestContext = static_cast<double>(kMaxSize);

double in_range(const ConfigReader& config, std::string_view key, double value, double min,
                double max) {
  if (value >= min && value <= max) return value;
  config_error(config, str_cat(config.path(key), ": expected a number from ", min, " to ", max,
                               ", got ", value));
}

double scale(const ConfigReader& config, std::string_view key, double value) {
  return in_range(config, key, value, kSmallest, kLargest);
}

std::optional<double> optional_scale(const ConfigReader& config, std::string_view key, double min) {
  if (!config.has(key)) return std::nullopt;
  return in_range(config, key, config.number(key), min, kLargest);
}

RopeType parse_rope_type(const ConfigReader& config, const std::string& name) {
  if (name == "default") return RopeType::kDefault;
  if (name == "linear") return RopeType::kLinear;
  if (name == "dynamic") return RopeType::kDynamic;
  if (name == "llama3") return RopeType::kLlama3;
  if (name == "yarn") return RopeType::kYarn;
  if (name == "proportional") return RopeType::kProportional;
  throw Unsupported(str_cat(
      config.origin(), ": ", config.path("rope_type"), " ", quote(name),
      " is not supported; supported: default, dynamic, linear, llama3, proportional, yarn"));
}

// The part of a head that is rotated. What stands inside goes before the top level.
double read_rotated_part(const ConfigReader& config, const ConfigReader& parameters, RopeType type,
                         std::optional<double> family_part) {
  constexpr std::string_view kKey = "partial_rotary_factor";
  const ConfigReader& place = parameters.has(kKey) ? parameters : config;
  const double part = place.number_or(kKey, family_part.value_or(1));
  if (!family_part && type != RopeType::kProportional && part != 1) {
    throw Unsupported(str_cat(place.origin(), ": ", place.path(kKey), " ", part,
                              " is not supported by this family; supported: 1"));
  }
  return in_range(place, kKey, part, kSmallest, 1);
}

// How many elements of a head that is.
void set_rotary_dims(const ConfigReader& config, int64_t head_dim, double part, RopeConfig& rope) {
  const double elements = static_cast<double>(head_dim) * part;
  rope.rotary_dim = static_cast<int64_t>(elements);
  if (rope.type == RopeType::kProportional) {
    rope.rotary_dim = head_dim;
    rope.turning_dim = 2 * static_cast<int64_t>(elements / 2);
  }
  const int64_t least = rope.type == RopeType::kDynamic ? 4 : 2;
  if (rope.rotary_dim >= least && rope.rotary_dim % 2 == 0) return;
  config_error(config,
               str_cat("partial_rotary_factor: expected an even number of rotated elements, ",
                       "at least ", least, ", of the ", head_dim, " of a head, got ",
                       rope.rotary_dim, " with factor ", part));
}

void refuse_parameters_per_layer_type(const ConfigReader& parameters) {
  for (const auto& [key, value] : parameters.json().get_ref<const Json::object_t&>()) {
    if (!value.is_object()) continue;
    throw Unsupported(str_cat(parameters.origin(), ": ", parameters.path(key),
                              ": RoPE parameters of their own for a layer type are not supported; "
                              "supported: one set for all layers"));
  }
}

// A value at the top level of config.json goes before the one inside.
double original_context(const ConfigReader& config, const ConfigReader& parameters,
                        const TextConfig& text) {
  constexpr std::string_view kKey = "original_max_position_embeddings";
  const ConfigReader& place = config.has(kKey) ? config : parameters;
  const auto context = static_cast<double>(text.max_position_embeddings);
  return in_range(place, kKey, place.number_or(kKey, context), 1, kLargestContext);
}

void read_llama3(const ConfigReader& parameters, RopeConfig& rope) {
  rope.low_freq_factor = scale(parameters, "low_freq_factor", parameters.number("low_freq_factor"));
  rope.high_freq_factor =
      scale(parameters, "high_freq_factor", parameters.number("high_freq_factor"));
  if (rope.low_freq_factor < rope.high_freq_factor) return;
  config_error(parameters, str_cat(parameters.path("low_freq_factor"),
                                   ": expected a number below high_freq_factor (",
                                   rope.high_freq_factor, "), got ", rope.low_freq_factor));
}

void read_yarn(const ConfigReader& parameters, RopeConfig& rope) {
  if (!(rope.theta > 1)) {
    config_error(parameters,
                 str_cat("rope_theta: expected a number above 1 with yarn, got ", rope.theta));
  }
  rope.beta_fast =
      scale(parameters, "beta_fast", parameters.number_or("beta_fast", rope.beta_fast));
  rope.beta_slow =
      scale(parameters, "beta_slow", parameters.number_or("beta_slow", rope.beta_slow));
  rope.truncate = !parameters.is_null("truncate") && parameters.boolean_or("truncate", true);
  rope.attention_factor = optional_scale(parameters, "attention_factor", kSmallest);
  rope.mscale = optional_scale(parameters, "mscale", 0);
  rope.mscale_all_dim = optional_scale(parameters, "mscale_all_dim", 0);
}

// How far the context is stretched.
double read_factor(const ConfigReader& parameters, const TextConfig& text, const RopeConfig& rope) {
  double factor = 1;
  if (rope.type == RopeType::kYarn && parameters.is_null("factor")) {
    factor = static_cast<double>(text.max_position_embeddings) / rope.original_max_position;
  } else if (rope.type != RopeType::kProportional || parameters.has("factor")) {
    factor = parameters.number("factor");
  }
  return scale(parameters, "factor", factor);
}

void read_rope_parameters(const ConfigReader& config, const ConfigReader& parameters,
                          const TextConfig& text, const TextDefaults& defaults, RopeConfig& rope) {
  refuse_parameters_per_layer_type(parameters);
  const ConfigReader& place = parameters.has("rope_theta") ? parameters : config;
  rope.theta = in_range(place, "rope_theta", place.number_or("rope_theta", rope.theta), kSmallest,
                        kLargestTheta);
  const std::string name = parameters.text_or("rope_type", parameters.text_or("type", "default"));
  rope.type = parse_rope_type(parameters, name);
  const double part =
      read_rotated_part(config, parameters, rope.type, defaults.partial_rotary_factor);
  set_rotary_dims(config, text.head_dim, part, rope);
  if (rope.type == RopeType::kDefault) return;
  if (rope.type == RopeType::kDynamic) {
    rope.original_max_position = static_cast<double>(text.max_position_embeddings);
  } else if (rope.type == RopeType::kLlama3 || rope.type == RopeType::kYarn) {
    rope.original_max_position = original_context(config, parameters, text);
  }
  rope.factor = read_factor(parameters, text, rope);
  if (rope.type == RopeType::kLlama3) read_llama3(parameters, rope);
  if (rope.type == RopeType::kYarn) read_yarn(parameters, rope);
}

// Newer: rope_parameters {rope_type, rope_theta, ...}. Older: rope_theta and rope_scaling {type or
// rope_type, ...} or null. Mixed, Transformers takes rope_scaling unless it is empty, and what
// stands inside before what stands at the top level.
RopeConfig read_rope(const ConfigReader& config, const TextConfig& text,
                     const TextDefaults& defaults) {
  RopeConfig rope;
  rope.theta = defaults.rope_theta;
  ConfigReader parameters(Json::object(), config.origin());
  for (const std::string_view key : {"rope_parameters", "rope_scaling"}) {
    if (!config.has(key)) continue;
    const ConfigReader found = config.object(key);
    if (!found.json().empty()) parameters = found;
  }
  read_rope_parameters(config, parameters, text, defaults, rope);
  return rope;
}

void read_heads(const ConfigReader& config, std::string_view head_dim_key, TextConfig& text) {
  text.num_heads = read_size(config, "num_attention_heads");
  text.num_kv_heads = config.integer_or("num_key_value_heads", text.num_heads, 1, kMaxSize);
  if (text.num_heads % text.num_kv_heads != 0) {
    config_error(config, str_cat("num_key_value_heads (", text.num_kv_heads,
                                 ") must divide num_attention_heads (", text.num_heads, ")"));
  }
  if (config.has(head_dim_key)) {
    text.head_dim = read_size(config, head_dim_key);
  } else if (text.hidden_size % text.num_heads == 0) {
    text.head_dim = text.hidden_size / text.num_heads;
  } else {
    config_error(config,
                 str_cat("without ", head_dim_key, ", num_attention_heads (", text.num_heads,
                         ") must divide hidden_size (", text.hidden_size, ")"));
  }
  if (text.head_dim % 2 != 0) {
    config_error(config, str_cat(head_dim_key, " must be even to be rotated, got ", text.head_dim));
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
  read_heads(config, defaults.head_dim_key, text);
  text.norm_eps = static_cast<float>(in_range(
      config, "rms_norm_eps", config.number_or("rms_norm_eps", defaults.norm_eps), 1e-30, 1e30));
  text.activation = parse_activation(config.text_or("hidden_act", "silu"));
  text.tie_word_embeddings = config.boolean_or("tie_word_embeddings", false);
  text.rope = read_rope(config, text, defaults);
  if (text.rope.type == RopeType::kDynamic) {  // the others' contexts are stretched already
    const double context = text.rope.original_max_position * std::max(1.0, text.rope.factor);
    text.max_position_embeddings = static_cast<int64_t>(std::min(context, kLargestContext));
  }
  return text;
}

int64_t read_qwen_sliding_window(const ConfigReader& config) {
  if (!config.boolean_or("use_sliding_window", false) || config.is_null("sliding_window")) return 0;
  return config.integer_or("sliding_window", 4096, 0);
}

std::vector<int64_t> read_layer_windows(const ConfigReader& config, int64_t num_layers,
                                        int64_t window) {
  const std::vector<std::string> types = config.texts("layer_types");
  if (static_cast<int64_t>(types.size()) != num_layers) {
    config_error(config,
                 str_cat("layer_types: expected ", num_layers, " entries, got ", types.size()));
  }
  std::vector<int64_t> windows;
  for (const std::string& type : types) {
    if (type != "sliding_attention" && type != "full_attention") {
      throw Unsupported(str_cat(config.origin(), ": layer_types: ", quote(type),
                                " is not supported by this family; supported: full_attention, ",
                                "sliding_attention"));
    }
    windows.push_back(type == "sliding_attention" ? window : 0);
  }
  return windows;
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

int64_t read_num_mtp_layers(const ConfigReader& config, int64_t fallback) {
  constexpr int64_t kMaxLayers = 1000;
  const int64_t newer = config.integer_or("num_mtp_layers", fallback, 0, kMaxLayers);
  return config.integer_or("num_nextn_predict_layers", newer, 0, kMaxLayers);
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
