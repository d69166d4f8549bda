// GptOssForCausalLM (gpt-oss-20b, gpt-oss-120b), unquantised: biases everywhere, attention sinks,
// windows in every second layer, YaRN; experts transposed with interleaved gate and up columns and
// a clamped gate; top-k of the logits, then softmax.
#include <nlohmann/json.hpp>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "models/model_builder.h"

namespace cadre {
namespace {

constexpr float kAlpha = 1.702f;
constexpr double kLimit = 7;

// What a config without RoPE parameters means.
ConfigReader with_rope(const ConfigReader& config) {
  if (config.has("rope_parameters") || config.has("rope_scaling")) return config;
  Json json = config.json();
  json["rope_parameters"] = {{"rope_type", "yarn"}, {"factor", 32.0},
                             {"beta_fast", 32.0},   {"beta_slow", 1.0},
                             {"truncate", false},   {"original_max_position_embeddings", 4096}};
  return {std::move(json), config.origin()};
}

std::vector<int64_t> windows(const ConfigReader& config, int64_t num_layers) {
  const int64_t window =
      config.is_null("sliding_window") ? 0 : config.integer_or("sliding_window", 128, 0);
  if (config.has("layer_types")) return read_layer_windows(config, num_layers, window);
  std::vector<int64_t> result(static_cast<size_t>(num_layers), 0);
  for (size_t l = 0; l < result.size(); l += 2) result[l] = window;
  return result;
}

MoeOptions moe_options(const ConfigReader& config) {
  // The family's own number in Transformers, whatever the config says.
  if (config.number_or("swiglu_limit", kLimit) != kLimit) {
    throw Unsupported(str_cat(config.origin(), ": swiglu_limit ", config.number("swiglu_limit"),
                              " is not supported by this family; supported: ", kLimit));
  }
  MoeOptions moe;
  ExpertsConfig& experts = moe.experts;
  experts.num_experts = read_num_experts(config);
  experts.top_k = read_top_k(config, experts.num_experts);
  experts.intermediate_size = read_size(config, "intermediate_size");
  experts.has_bias = true;
  experts.is_transposed = true;
  experts.is_concatenated = false;
  experts.swiglu_alpha = kAlpha;
  experts.swiglu_limit = static_cast<float>(kLimit);
  moe.router.score = RouterScore::kTopKThenSoftmax;
  moe.router_bias = true;
  moe.names.router = "router";
  return moe;
}

}  // namespace

BuiltModel build_gpt_oss(ModelBuilder& builder) {
  const ConfigReader& config = builder.config();
  builder.begin(read_text_config(with_rope(config), {.norm_eps = 1e-5, .rope_theta = 150000}));
  const TextConfig& text = builder.text();
  const MoeOptions moe = moe_options(config);
  const std::vector<int64_t> window = windows(config, text.num_layers);
  const bool bias = config.boolean_or("attention_bias", true);

  for (int64_t l = 0; l < text.num_layers; ++l) {
    const std::string layer = str_cat("model.layers.", l, ".");
    AttentionConfig attention = builder.attention_config();
    attention.sliding_window = window[static_cast<size_t>(l)];
    attention.has_sinks = true;
    builder.add_layer({builder.norm(layer + "input_layernorm.weight", text.hidden_size),
                       builder.attention(layer + "self_attn.", attention, bias, bias),
                       builder.norm(layer + "post_attention_layernorm.weight", text.hidden_size),
                       builder.moe(layer + "mlp.", moe)});
  }
  return builder.finish();
}

}  // namespace cadre
