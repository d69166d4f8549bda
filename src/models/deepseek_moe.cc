#include "models/deepseek_moe.h"

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

constexpr int64_t kMaxSharedExperts = 1 << 10;

void read_groups(const ConfigReader& config, const ExpertsConfig& experts,
                 const DeepseekDefaults& defaults, RouterOptions& router) {
  router.num_groups = config.integer_or("n_group", defaults.n_group, 1);
  router.topk_groups = config.integer_or("topk_group", defaults.topk_group, 1);
  try {
    validate(router, experts.num_experts, experts.top_k);
  } catch (const InvalidArgument& error) {
    config_error(config, str_cat("n_group and topk_group: ", error.what()));
  }
}

// Weights are not renormalised, whatever norm_topk_prob says: as in Transformers.
RouterOptions read_v2_router(const ConfigReader& config, const ExpertsConfig& experts,
                             const DeepseekDefaults& defaults) {
  RouterOptions router;
  router.score = RouterScore::kSoftmaxThenTopK;
  router.group_score = GroupScore::kMax;
  const std::string method = config.text_or("topk_method", "greedy");
  if (method == "group_limited_greedy") {
    read_groups(config, experts, defaults, router);
  } else if (method != "greedy") {
    throw Unsupported(str_cat(config.origin(), ": topk_method ", quote(method),
                              " is not supported by this family; supported: greedy, "
                              "group_limited_greedy"));
  }
  return router;
}

RouterOptions read_v3_router(const ConfigReader& config, const ExpertsConfig& experts,
                             const DeepseekDefaults& defaults) {
  RouterOptions router;
  router.score = RouterScore::kSigmoid;
  router.group_score = GroupScore::kSumOfTopTwo;
  router.normalize = config.boolean_or("norm_topk_prob", true);
  read_groups(config, experts, defaults, router);
  return router;
}

}  // namespace

DeepseekFeedForward read_deepseek_feed_forward(const ConfigReader& config,
                                               const DeepseekDefaults& defaults) {
  if (const int64_t every = config.integer_or("moe_layer_freq", 1); every != 1) {
    throw Unsupported(
        str_cat(config.origin(), ": moe_layer_freq ", every, " is not supported; supported: 1"));
  }
  DeepseekFeedForward result;
  ExpertsConfig& experts = result.moe.experts;
  experts.num_experts = read_num_experts(config);
  experts.top_k = read_top_k(config, experts.num_experts);
  experts.intermediate_size = read_size(config, "moe_intermediate_size");
  if (defaults.router == DeepseekRouter::kV2) {
    result.moe.router = read_v2_router(config, experts, defaults);
  } else {
    result.moe.router = read_v3_router(config, experts, defaults);
    result.moe.names.correction_bias = "gate.e_score_correction_bias";
  }
  result.moe.router.scaling_factor =
      static_cast<float>(config.number_or("routed_scaling_factor", defaults.routed_scaling_factor));
  result.first_moe_layer =
      config.integer_or("first_k_dense_replace", defaults.first_k_dense_replace, 0);
  result.dense_width = read_size(config, "intermediate_size");
  result.shared_width =
      experts.intermediate_size *
      config.integer_or("n_shared_experts", defaults.n_shared_experts, 0, kMaxSharedExperts);
  return result;
}

std::variant<Mlp, MoeBlock> build_feed_forward(ModelBuilder& builder, int64_t layer,
                                               const std::string& prefix,
                                               const DeepseekFeedForward& options) {
  if (layer < options.first_moe_layer) return builder.mlp(prefix, options.dense_width);
  std::optional<SharedExpert> shared;
  if (options.shared_width > 0) {
    const std::string name = prefix + "shared_experts.";
    shared = SharedExpert{builder.mlp(name, options.shared_width, "shared expert"), {}};
  }
  return builder.moe(prefix, options.moe, std::move(shared));
}

}  // namespace cadre
