#include "models/qwen_moe.h"

#include "core/str_cat.h"

namespace cadre {

std::vector<bool> qwen_moe_layers(const ConfigReader& config, int64_t num_layers) {
  const int64_t step = config.integer_or("decoder_sparse_step", 1, 1);
  std::vector<bool> result(static_cast<size_t>(num_layers));
  for (int64_t l = 0; l < num_layers; ++l) result[static_cast<size_t>(l)] = (l + 1) % step == 0;
  if (!config.has("mlp_only_layers")) return result;
  for (const int64_t l : config.integers("mlp_only_layers")) {
    if (l < 0 || l >= num_layers) {
      config_error(config,
                   str_cat("mlp_only_layers: expected layers in [0, ", num_layers, "), got ", l));
    }
    result[static_cast<size_t>(l)] = false;
  }
  return result;
}

MoeOptions qwen_moe_options(const ConfigReader& config) {
  MoeOptions options;
  options.experts.num_experts = read_num_experts(config);
  options.experts.top_k = read_top_k(config, options.experts.num_experts);
  options.experts.intermediate_size = read_size(config, "moe_intermediate_size");
  options.router.score = RouterScore::kSoftmaxThenTopK;
  options.router.normalize = config.boolean_or("norm_topk_prob", false);
  return options;
}

}  // namespace cadre
