// Qwen2MoeForCausalLM (Qwen1.5-MoE, Qwen2-57B-A14B): biases on q, k and v; a shared expert scaled
// by the sigmoid of its gate; dense layers where decoder_sparse_step or mlp_only_layers say so.
#include <algorithm>

#include "core/str_cat.h"
#include "models/qwen_moe.h"

namespace cadre {
namespace {

// layer_types when given, else every other layer below max_window_layers, as Transformers does.
std::vector<int64_t> windows(const ConfigReader& config, int64_t num_layers) {
  std::vector<int64_t> result(static_cast<size_t>(num_layers), 0);
  const int64_t window = read_qwen_sliding_window(config);
  if (window == 0) return result;
  if (config.has("layer_types")) return read_layer_windows(config, num_layers, window);
  const int64_t max_window_layers = config.integer_or("max_window_layers", 28);
  for (int64_t l = 0; l < std::min(num_layers, max_window_layers); l += 2) {
    result[static_cast<size_t>(l)] = window;
  }
  return result;
}

}  // namespace

BuiltModel build_qwen2_moe(ModelBuilder& builder) {
  const ConfigReader& config = builder.config();
  builder.begin(read_text_config(config, {.norm_eps = 1e-6, .rope_theta = 10000}));
  const TextConfig& text = builder.text();
  const MoeOptions moe = qwen_moe_options(config);
  const bool qkv_bias = config.boolean_or("qkv_bias", true);
  const std::vector<bool> has_experts = qwen_moe_layers(config, text.num_layers);
  const std::vector<int64_t> window = windows(config, text.num_layers);
  const int64_t hidden = text.hidden_size;

  const auto feed_forward = [&](int64_t l, const std::string& mlp) -> std::variant<Mlp, MoeBlock> {
    if (!has_experts[static_cast<size_t>(l)]) {
      return builder.mlp(mlp, read_size(config, "intermediate_size"));
    }
    const int64_t shared = read_size(config, "shared_expert_intermediate_size");
    SharedExpert shared_expert{
        builder.mlp(mlp + "shared_expert.", shared, "shared expert"),
        builder.linear(mlp + "shared_expert_gate", 1, hidden, false, "shared expert")};
    return builder.moe(mlp, moe, std::move(shared_expert));
  };
  for (int64_t l = 0; l < text.num_layers; ++l) {
    const std::string layer = str_cat("model.layers.", l, ".");
    AttentionConfig attention = builder.attention_config();
    attention.sliding_window = window[static_cast<size_t>(l)];
    builder.add_layer({builder.norm(layer + "input_layernorm.weight", hidden),
                       builder.attention(layer + "self_attn.", attention, qkv_bias, false),
                       builder.norm(layer + "post_attention_layernorm.weight", hidden),
                       feed_forward(l, layer + "mlp.")});
  }
  return builder.finish();
}

}  // namespace cadre
