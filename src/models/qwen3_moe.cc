// Qwen3MoeForCausalLM (Qwen3-30B-A3B, Qwen3-235B-A22B): RMSNorm over every query and key head,
// head_dim of its own, dense layers where decoder_sparse_step or mlp_only_layers say so.
#include "core/str_cat.h"
#include "models/qwen_moe.h"

namespace cadre {

BuiltModel build_qwen3_moe(ModelBuilder& builder) {
  const ConfigReader& config = builder.config();
  builder.begin(read_text_config(config, {.norm_eps = 1e-6, .rope_theta = 10000}));
  const TextConfig& text = builder.text();
  const MoeOptions moe = qwen_moe_options(config);
  const bool bias = config.boolean_or("attention_bias", false);
  const std::vector<bool> has_experts = qwen_moe_layers(config, text.num_layers);
  AttentionConfig attention = builder.attention_config();
  attention.qk_norm = QkNorm::kPerHead;
  attention.sliding_window = read_qwen_sliding_window(config);

  const auto feed_forward = [&](int64_t l, const std::string& mlp) -> std::variant<Mlp, MoeBlock> {
    if (has_experts[static_cast<size_t>(l)]) return builder.moe(mlp, moe);
    return builder.mlp(mlp, read_size(config, "intermediate_size"));
  };
  for (int64_t l = 0; l < text.num_layers; ++l) {
    const std::string layer = str_cat("model.layers.", l, ".");
    builder.add_layer({builder.norm(layer + "input_layernorm.weight", text.hidden_size),
                       builder.attention(layer + "self_attn.", attention, bias, bias),
                       builder.norm(layer + "post_attention_layernorm.weight", text.hidden_size),
                       feed_forward(l, layer + "mlp.")});
  }
  return builder.finish();
}

}  // namespace cadre
