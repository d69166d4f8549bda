// MiniMaxM2ForCausalLM (MiniMax-M2): RMSNorm over the whole query and key projections, a part of
// each head rotated, experts w1 (gate), w3 (up), w2 (down) under block_sparse_moe (packed writers
// say mlp), sigmoid scores with a correction bias that helps to pick.
#include "core/str_cat.h"
#include "models/model_builder.h"

namespace cadre {
namespace {

// The hub's config gives rotary_dim, which Transformers 5.17 passes over; partial_rotary_factor,
// where there is one, goes before it.
double rotated_part(const ConfigReader& config) {
  if (!config.has("rotary_dim") || !config.has("head_dim")) return 1;
  return static_cast<double>(read_size(config, "rotary_dim")) /
         static_cast<double>(read_size(config, "head_dim"));
}

}  // namespace

BuiltModel build_minimax_m2(ModelBuilder& builder) {
  const ConfigReader& config = builder.config();
  builder.begin(read_text_config(
      config,
      {.norm_eps = 1e-6, .rope_theta = 5000000, .partial_rotary_factor = rotated_part(config)}));
  const TextConfig& text = builder.text();
  MoeOptions moe;
  moe.experts.num_experts = read_num_experts(config);
  moe.experts.top_k = read_top_k(config, moe.experts.num_experts);
  moe.experts.intermediate_size = read_size(config, "intermediate_size");
  moe.router.score = RouterScore::kSigmoid;
  moe.router.normalize = true;
  moe.names = {
      .gate = "w1", .up = "w3", .down = "w2", .correction_bias = "e_score_correction_bias"};
  AttentionConfig attention = builder.attention_config();
  attention.qk_norm = QkNorm::kWholeProjection;

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
