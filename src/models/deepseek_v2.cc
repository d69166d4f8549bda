// DeepseekV2ForCausalLM (DeepSeek-V2, -Coder-V2, -V2-Lite): latent attention, dense first layers,
// softmax router with or without groups, shared experts.
#include "cadre/error.h"
#include "core/str_cat.h"
#include "models/deepseek_moe.h"
#include "models/mla.h"

namespace cadre {

BuiltModel build_deepseek_v2(ModelBuilder& builder) {
  const ConfigReader& config = builder.config();
  builder.begin(read_text_config(
      config, {.norm_eps = 1e-6, .rope_theta = 10000, .head_dim_key = "qk_rope_head_dim"}));
  const TextConfig& text = builder.text();
  const MlaOptions attention = read_mla(builder);
  const DeepseekFeedForward feed_forward =
      read_deepseek_feed_forward(config, {.router = DeepseekRouter::kV2, .n_shared_experts = 2});
  if (config.boolean_or("mlp_bias", false)) {
    throw Unsupported(str_cat(config.origin(), ": mlp_bias true is not supported"));
  }

  for (int64_t l = 0; l < text.num_layers; ++l) {
    const std::string layer = str_cat("model.layers.", l, ".");
    builder.add_layer({builder.norm(layer + "input_layernorm.weight", text.hidden_size),
                       build_mla(builder, layer + "self_attn.", attention),
                       builder.norm(layer + "post_attention_layernorm.weight", text.hidden_size),
                       build_feed_forward(builder, l, layer + "mlp.", feed_forward)});
  }
  return builder.finish();
}

}  // namespace cadre
