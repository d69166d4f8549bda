// OlmoeForCausalLM (OLMoE-1B-7B): RMSNorm over the whole query and key projections, optional
// clipping of q, k and v.
#include "core/str_cat.h"
#include "models/model_builder.h"

namespace cadre {

BuiltModel build_olmoe(ModelBuilder& builder) {
  const ConfigReader& config = builder.config();
  builder.begin(read_text_config(config, {.norm_eps = 1e-5, .rope_theta = 10000}));
  const TextConfig& text = builder.text();
  MoeOptions moe;
  moe.experts.num_experts = read_num_experts(config);
  moe.experts.top_k = read_top_k(config, moe.experts.num_experts);
  moe.experts.intermediate_size = read_size(config, "intermediate_size");
  moe.router.score = RouterScore::kSoftmaxThenTopK;
  moe.router.normalize = config.boolean_or("norm_topk_prob", false);
  const bool bias = config.boolean_or("attention_bias", false);
  AttentionConfig attention = builder.attention_config();
  attention.qk_norm = QkNorm::kWholeProjection;
  if (config.has("clip_qkv")) {
    const double limit = config.number("clip_qkv");
    if (!(limit > 0)) config_error(config, str_cat("clip_qkv: expected > 0, got ", limit));
    attention.clip_qkv = static_cast<float>(limit);
  }

  for (int64_t l = 0; l < text.num_layers; ++l) {
    const std::string layer = str_cat("model.layers.", l, ".");
    builder.add_layer({builder.norm(layer + "input_layernorm.weight", text.hidden_size),
                       builder.attention(layer + "self_attn.", attention, bias, bias),
                       builder.norm(layer + "post_attention_layernorm.weight", text.hidden_size),
                       builder.moe(layer + "mlp.", moe)});
  }
  return builder.finish();
}

}  // namespace cadre
