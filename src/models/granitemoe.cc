// GraniteMoeForCausalLM (Granite 3 MoE): constant factors on embeddings, attention scores, what
// each block adds to the residual stream, and logits; experts of a layer in two tensors, gate rows
// first; top-k of the logits, then softmax.
#include "core/str_cat.h"
#include "models/model_builder.h"

namespace cadre {
namespace {

float read_factor(const ConfigReader& config, std::string_view key) {
  const double factor = config.number_or(key, 1);
  if (factor >= 1e-6 && factor <= 1e6) return static_cast<float>(factor);
  config_error(config, str_cat(key, ": expected a number from 1e-06 to 1e+06, got ", factor));
}

// The residual stream is kept divided by residual_multiplier, so that blocks add to it as they are:
// norms take that out again, with an epsilon divided by its square.
TextConfig read_config(const ConfigReader& config) {
  TextConfig text = read_text_config(config, {.norm_eps = 1e-6, .rope_theta = 10000});
  const float residual = read_factor(config, "residual_multiplier");
  text.norm_eps /= residual * residual;
  text.embedding_scale = read_factor(config, "embedding_multiplier") / residual;
  text.logits_scale = 1.0f / read_factor(config, "logits_scaling");
  return text;
}

}  // namespace

BuiltModel build_granitemoe(ModelBuilder& builder) {
  const ConfigReader& config = builder.config();
  builder.begin(read_config(config));
  const TextConfig& text = builder.text();
  MoeOptions moe;
  moe.experts.num_experts = read_num_experts(config);
  moe.experts.top_k = read_top_k(config, moe.experts.num_experts);
  moe.experts.intermediate_size = read_size(config, "intermediate_size");
  moe.router.score = RouterScore::kTopKThenSoftmax;
  if (builder.weights().has_any("model.layers.0.block_sparse_moe.experts.")) {
    moe.names.router = "router";
  } else {
    moe.names.packed_gate_up = "input_linear.weight";
    moe.names.packed_down = "output_linear.weight";
    moe.names.router = "router.layer";
  }
  const bool bias = config.boolean_or("attention_bias", false);
  AttentionConfig attention = builder.attention_config();
  attention.scale = read_factor(config, "attention_multiplier");

  for (int64_t l = 0; l < text.num_layers; ++l) {
    const std::string layer = str_cat("model.layers.", l, ".");
    builder.add_layer({builder.norm(layer + "input_layernorm.weight", text.hidden_size),
                       builder.attention(layer + "self_attn.", attention, bias, bias),
                       builder.norm(layer + "post_attention_layernorm.weight", text.hidden_size),
                       builder.moe(layer + "block_sparse_moe.", moe)});
  }
  return builder.finish();
}

}  // namespace cadre
