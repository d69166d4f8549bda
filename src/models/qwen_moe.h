// What the Qwen families share: which layers have experts.
#pragma once

#include <vector>

#include "io/json.h"
#include "models/model_builder.h"

namespace cadre {

/// [num_layers] by decoder_sparse_step and mlp_only_layers.
std::vector<bool> qwen_moe_layers(const ConfigReader& config, int64_t num_layers);

/// num_experts, num_experts_per_tok, moe_intermediate_size, norm_topk_prob.
MoeOptions qwen_moe_options(const ConfigReader& config);

}  // namespace cadre
