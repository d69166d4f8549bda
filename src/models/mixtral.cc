// MixtralForCausalLM: experts w1 (gate), w3 (up), w2 (down) under block_sparse_moe (packed writers
// say mlp), renormalised top-k, an optional sliding window in all layers.
#include "core/str_cat.h"
#include "models/model_builder.h"

namespace cadre {

BuiltModel build_mixtral(ModelBuilder& builder) {
  const ConfigReader& config = builder.config();
  builder.begin(read_text_config(config, {.norm_eps = 1e-5, .rope_theta = 1000000}));
  const TextConfig& text = builder.text();
  MoeOptions moe;
  moe.experts.num_experts = read_num_experts(config);
  moe.experts.top_k = read_top_k(config, moe.experts.num_experts);
  moe.experts.intermediate_size = read_size(config, "intermediate_size");
  moe.router.score = RouterScore::kSoftmaxThenTopK;
  moe.router.normalize = true;
  moe.names = {"w1", "w3", "w2"};
  AttentionConfig attention = builder.attention_config();
  attention.sliding_window = config.integer_or("sliding_window", 0, 0);

  for (int64_t l = 0; l < text.num_layers; ++l) {
    const std::string layer = str_cat("model.layers.", l, ".");
    const bool packed = builder.weights().has_any(layer + "mlp.");
    builder.add_layer({builder.norm(layer + "input_layernorm.weight", text.hidden_size),
                       builder.attention(layer + "self_attn.", attention, false, false),
                       builder.norm(layer + "post_attention_layernorm.weight", text.hidden_size),
                       builder.moe(layer + (packed ? "mlp." : "block_sparse_moe."), moe)});
  }
  return builder.finish();
}

}  // namespace cadre
