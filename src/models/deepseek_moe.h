// What DeepSeek's families and GLM-4.5 say alike about their feed-forward layers: the first
// layers are dense, the others have routed experts in groups and shared experts without a gate.
#pragma once

#include <string>
#include <variant>

#include "models/model_builder.h"

namespace cadre {

/// V2 (arXiv 2405.04434): softmax scores, topk_method greedy, or group_limited_greedy by the best
/// of each group. V3 (arXiv 2412.19437): sigmoid scores; the best topk_group of n_group groups, by
/// the sum of their two best; a correction bias that helps to pick and does not weigh.
enum class DeepseekRouter : uint8_t { kV2, kV3 };

/// What a family assumes when its config leaves a key out.
struct DeepseekDefaults {
  DeepseekRouter router = DeepseekRouter::kV3;  // always
  int64_t first_k_dense_replace = 0;
  int64_t n_shared_experts = 1;
  double routed_scaling_factor = 1;
  int64_t n_group = 1;
  int64_t topk_group = 1;
};

struct DeepseekFeedForward {
  MoeOptions moe;
  int64_t first_moe_layer = 0;
  int64_t dense_width = 0;   // intermediate sizes
  int64_t shared_width = 0;  // of all shared experts, which are one MLP; 0: none
};

DeepseekFeedForward read_deepseek_feed_forward(const ConfigReader& config,
                                               const DeepseekDefaults& defaults);

/// The feed-forward of a layer, its tensors under `prefix`.
std::variant<Mlp, MoeBlock> build_feed_forward(ModelBuilder& builder, int64_t layer,
                                               const std::string& prefix,
                                               const DeepseekFeedForward& options);

}  // namespace cadre
