// Glm4MoeForCausalLM (GLM-4.5, GLM-4.6): rotates a part of each head, optional RMSNorm over every
// query and key head, feed-forward layers as in DeepSeek-V3, one layer for multi-token prediction
// after the last.
#include "core/str_cat.h"
#include "models/deepseek_moe.h"

namespace cadre {

BuiltModel build_glm4_moe(ModelBuilder& builder) {
  const ConfigReader& config = builder.config();
  builder.begin(read_text_config(
      config, {.norm_eps = 1e-5, .rope_theta = 10000, .partial_rotary_factor = 0.5}));
  const TextConfig& text = builder.text();
  const DeepseekFeedForward feed_forward =
      read_deepseek_feed_forward(config, {.first_k_dense_replace = 1});
  const bool bias = config.boolean_or("attention_bias", false);
  AttentionConfig attention = builder.attention_config();
  if (config.boolean_or("use_qk_norm", false)) attention.qk_norm = QkNorm::kPerHead;

  for (int64_t l = 0; l < text.num_layers; ++l) {
    const std::string layer = str_cat("model.layers.", l, ".");
    builder.add_layer({builder.norm(layer + "input_layernorm.weight", text.hidden_size),
                       builder.attention(layer + "self_attn.", attention, bias, false),
                       builder.norm(layer + "post_attention_layernorm.weight", text.hidden_size),
                       build_feed_forward(builder, l, layer + "mlp.", feed_forward)});
  }
  builder.ignore_extra_layers(read_num_mtp_layers(config, 1));
  return builder.finish();
}

}  // namespace cadre
