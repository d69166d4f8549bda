// DeepseekV3ForCausalLM (DeepSeek-V3, -R1, arXiv 2412.19437): latent attention, dense first layers,
// sigmoid router with a correction bias and groups, shared experts, layers for multi-token
// prediction after the last.
#include "core/str_cat.h"
#include "models/deepseek_moe.h"
#include "models/mla.h"

namespace cadre {

BuiltModel build_deepseek_v3(ModelBuilder& builder) {
  const ConfigReader& config = builder.config();
  builder.begin(read_text_config(
      config, {.norm_eps = 1e-6, .rope_theta = 10000, .head_dim_key = "qk_rope_head_dim"}));
  const TextConfig& text = builder.text();
  MlaOptions attention = read_mla(builder);
  attention.attention.interleaved_rope = config.boolean_or("rope_interleave", true);
  const DeepseekFeedForward feed_forward = read_deepseek_feed_forward(
      config,
      {.first_k_dense_replace = 3, .routed_scaling_factor = 2.5, .n_group = 8, .topk_group = 4});

  for (int64_t l = 0; l < text.num_layers; ++l) {
    const std::string layer = str_cat("model.layers.", l, ".");
    builder.add_layer({builder.norm(layer + "input_layernorm.weight", text.hidden_size),
                       build_mla(builder, layer + "self_attn.", attention),
                       builder.norm(layer + "post_attention_layernorm.weight", text.hidden_size),
                       build_feed_forward(builder, l, layer + "mlp.", feed_forward)});
  }
  builder.ignore_extra_layers(read_num_mtp_layers(config, 1));
  return builder.finish();
}

}  // namespace cadre
